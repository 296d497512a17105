"""The socket reader: a backend that fills write leases over plain TCP, where UCX is not wanted or not there.

The source checks what it is asked for, so what is granted is all that a reader can get. The reader still checks every
page against its grant: what makes bytes count is the record behind them, not the source's word.
"""

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from kvbus.dataplane.reader import Isolation, Outbox, Pace, Pair, Progress
from kvbus.dataplane.reading import LocalPool, limits_for, plan
from kvbus.dataplane.socket_link import Link, LinkCounters, LinkTools
from kvbus.dataplane.socket_pool import PoolBytes
from kvbus.dataplane.socket_reading import BLOCK_BYTES, Reading
from kvbus.errors import BackendError
from kvbus.grants import SocketAccess
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Change, Failed, Order, SubmissionRejectedError
from kvbus.pool.memory import PoolMemory

LINKS_MAX = 256
"""One open file each, as many as a source serves."""
IDLE_S = 1.0
"""How often links are looked at where nothing happens, for their wire-up time; and should a wake be lost."""
JOIN_S = 5.0
"""The thread looks up after a few megabytes; only a stopped machine meets this."""

log = logging.getLogger(__name__)

LinkKey = tuple[str, str, str, int, tuple[str, ...], int]
"""Peer, and who it is in truth: instance, member, epoch, and where it answers."""


@dataclass(frozen=True, slots=True)
class SocketReaderSettings:
    """What an operator may set: the limit of all peers together, and how long a connection may take to be answered."""

    rate_limit_bytes_s: float | None = None
    wire_up_s: float = 10.0


@dataclass(frozen=True, slots=True)
class SocketStatistics:
    """Counters of the reader; `length_bytes` counts everything that was received."""

    length_bytes: int
    questions: int
    failures: int
    releases_sent: int
    releases_lost: int
    connections: int
    attempts: int
    isolated: tuple[str, ...]


class SocketReader:
    """Reads granted pages over one connection per source and epoch, in one thread of its own; a `Backend`.

    `wake` is called from that thread: the caller makes that safe, and it must not raise. All methods belong to one
    thread, the holder's.
    """

    def __init__(self, *, wake: Callable[[], None], settings: SocketReaderSettings | None = None) -> None:
        chosen = settings or SocketReaderSettings()
        self._outbox = Outbox(wake)
        self._isolation = Isolation()
        self._targets: dict[int, tuple[LocalPool, PoolBytes]] = {}
        self._is_shut = False
        self._has_told_failure = False
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()  # at most two for each attempt under way
        self._thread: threading.Thread | None = None
        self._wire_up_s = chosen.wire_up_s
        # Under a rate limit a block is what the limit allows in one step, so that the flow stays even.
        paced = chosen.rate_limit_bytes_s is not None
        self._block_bytes = limits_for(chosen.rate_limit_bytes_s).run_bytes if paced else BLOCK_BYTES
        # From here on: the reader thread's.
        self._stopping = False
        self._failure = ""
        self._pace = Pace(chosen.rate_limit_bytes_s)
        self._counters = LinkCounters()
        self._links: dict[LinkKey, Link] = {}
        self._stepped: deque[Link] = deque()
        self._by_fd: dict[int, Link] = {}
        self._running: dict[Pair, tuple[Link, Reading]] = {}

    def __repr__(self) -> str:
        return f"<SocketReader attempts={len(self._running)} connections={len(self._links)}>"

    @property
    def name(self) -> str:
        """The transport's name, as grants and requests spell it."""
        return "socket"

    def start(self) -> None:
        """Start the thread; harmless if it runs."""
        if self._thread is None:
            self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._epoll = select.epoll()
            self._epoll.register(self._event_fd, select.EPOLLIN)
            self._tools = LinkTools(
                epoll=self._epoll,
                pace=self._pace,
                counters=self._counters,
                wire_up_s=self._wire_up_s,
                on_socket=self._has_socket,
                on_end=self._ended,
            )
            self._thread = threading.Thread(target=self._run, name="kvbus-socket", daemon=True)
            self._thread.start()

    def register(self, memory: PoolMemory, rank: int = 0) -> None:
        """Fill leases of this rank's pool from now on."""
        if rank in self._targets:
            raise ValueError(f"rank {rank} has a pool already")
        self._targets[rank] = (LocalPool.of(memory), PoolBytes(memory, writable=True))

    def submit(self, order: Order) -> None:
        """Start reading the granted pages; SubmissionRejectedError where nothing has escaped yet."""
        target = self._targets.get(order.view.rank)
        if self._is_shut:
            raise SubmissionRejectedError(FailureClass.SHUTDOWN, "the reader is shut down")
        if target is None or self._thread is None or not self._thread.is_alive():
            text = self._failure or f"no pool is registered for rank {order.view.rank}, or the reader was not started"
            raise SubmissionRejectedError(FailureClass.TRANSPORT, text)
        checked = plan(order, target[0], self.name)
        if self._isolation.refuses(order.peer, checked.grant.lender_epoch):
            raise SubmissionRejectedError(FailureClass.PEER_LOST, f"{order.peer} is isolated in this epoch")
        pair = (order.ticket, order.attempt)
        self._outbox.open(pair)
        progress, pool = Progress(order, checked), target[1]
        if not self._post(lambda: self._start(progress, pool)):
            self._outbox.withdraw(pair)
            raise SubmissionRejectedError(FailureClass.TRANSPORT, self._failure or "the reader's thread has ended")

    def changes(self) -> Sequence[Change]:
        """Return and forget what changed since the last call, oldest first.

        BackendError, once, where the reader's thread has failed; the evidence of its attempts comes with the next call.
        """
        if self._failure and not self._has_told_failure:
            self._has_told_failure = True
            raise BackendError(self._failure)
        return self._outbox.drain()

    def cancel(self, ticket: int, attempt: int) -> None:
        """End that attempt as soon as the thread looks up; what its source still sends lands nowhere."""
        pair = (ticket, attempt)
        if self._outbox.first_cancel(pair):
            self._post(lambda: self._cancel(pair))

    def isolate(self, peer: str) -> None:
        """Close the connections to that peer by force, and refuse it in every epoch seen so far."""
        self._isolation.isolate(peer)
        self._post(lambda: self._close_links(FailureClass.PEER_LOST, f"{peer} was isolated", peer))

    def shutdown(self, budget_s: float) -> Sequence[tuple[int, int]]:
        """Close every connection by force; return the attempts that still owe evidence. May be called again."""
        self._is_shut = True
        if self._outbox.unfinished():
            ended = threading.Event()
            self._post(lambda: self._close_links(FailureClass.SHUTDOWN, "the reader was shut down"))
            if self._post(ended.set):  # commands run in order: what was closed has been reported by then
                ended.wait(budget_s)
        return self._outbox.unfinished()

    def release_hold(self) -> None:
        """Close all connections and end the thread; within JOIN_S."""
        self._post(self._stop)
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def statistics(self) -> SocketStatistics:
        """Return the counters as they stand."""
        return SocketStatistics(
            **asdict(self._counters),
            connections=len(self._links),
            attempts=len(self._outbox.unfinished()),
            isolated=self._isolation.peers(),
        )

    def _post(self, command: Callable[[], None]) -> bool:
        with self._lock:
            if self._stopping or self._thread is None:
                return False
            self._commands.append(command)
            os.eventfd_write(self._event_fd, 1)
        return True

    # -------------------------------------------------------------------------------------- on the reader thread

    def _run(self) -> None:
        try:
            self._drive()
        except Exception as error:
            log.exception("the socket reader's thread has failed: its connections are closed, and it reads no more")
            self._failure = f"the socket reader's thread has failed: {error!r}"
            self._stop()
        self._run_commands()
        failure = FailureClass.TRANSPORT if self._failure else FailureClass.SHUTDOWN
        self._close_links(failure, self._failure or "the reader was ended")
        self._epoll.close()
        os.close(self._event_fd)

    def _drive(self) -> None:
        sleep_s = IDLE_S
        while not self._stopping:
            events = self._epoll.poll(sleep_s)
            for fd, mask in events:
                link = self._by_fd.get(fd)
                if fd == self._event_fd:
                    os.eventfd_read(fd)
                elif link is not None:
                    self._contain(link, partial(link.handle, mask))
            self._run_commands()
            sleep_s = self._step()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _contain(self, link: Link, act: Callable[[], None]) -> None:
        """Do something to one link; what it raises breaks that link, and nothing else (R21)."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - contained to its link
            self._break(link, error)

    def _break(self, link: Link, error: Exception) -> None:
        """End a link after a fault of this process, and what was to be read over it, also where it did not know yet."""
        try:
            link.break_by(error)
        except Exception:
            log.exception("the connection to %s was not ended in order", link.peer)
        for other, reading in tuple(self._running.values()) if link.is_cut else ():
            if other is link:
                reading.stop(FailureClass.TRANSPORT, f"the connection to {link.peer} was given up: {error!r}")
                forced = Evidence.ENDPOINT_DESTROYED if reading.was_asked else Evidence.NEVER_SUBMITTED
                self._ended(link, reading, forced)

    def _step(self) -> float:
        """Drive every link once; one that asked for bytes comes last next time, so that a shared limit starves none.

        Taking turns by steps would not do: where each answer brings two steps, every second link would get nothing.
        """
        now, sleep_s = time.monotonic(), IDLE_S
        for link in tuple(self._stepped):
            asked = self._pace.operations
            wish = self._step_link(link, now)
            if self._pace.operations != asked:
                self._stepped.remove(link)
                self._stepped.append(link)
            if wish is not None:
                sleep_s = min(sleep_s, wish)
            if link.closed:
                self._forget(link)
        return sleep_s

    def _step_link(self, link: Link, now: float) -> float | None:
        try:
            return link.step(now)
        except Exception as error:  # noqa: BLE001 - contained to its link
            self._break(link, error)
            return 0.0

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True

    def _start(self, progress: Progress, pool: PoolBytes) -> None:
        grant = progress.plan.grant
        if grant.socket is None:  # `plan` has refused such a grant
            return
        try:
            link = self._link(progress, grant.socket)
            reading = Reading(progress, pool, self._block_bytes)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing has left, and it ends this attempt alone
            progress.fail(FailureClass.TRANSPORT, f"no connection to {progress.order.peer}: {error}")
            self._outbox.report(progress.change(Evidence.NEVER_SUBMITTED))
            return
        self._running[progress.pair] = (link, reading)
        self._contain(link, partial(link.add, reading))

    def _link(self, progress: Progress, offer: SocketAccess) -> Link:
        """Return the link to the source of an order; BackendError where no more can be opened."""
        if self._failure:
            raise BackendError(self._failure)
        grant, peer = progress.plan.grant, progress.order.peer
        who = (grant.lender_instance, grant.lender_member, grant.lender_epoch)
        key = (peer, *who, offer.addresses, offer.port)
        known = self._links.get(key)
        if known is not None and not known.closed:
            return known
        if len(self._stepped) >= LINKS_MAX:
            idle = next((link for link in self._stepped if link.idle), None)
            if idle is None:
                raise BackendError(f"{LINKS_MAX} connections are busy; wait for one to end")
            idle.close(FailureClass.NONE, "")
            self._forget(idle)
        link = Link(peer, offer.addresses, offer.port, epoch=grant.lender_epoch, tools=self._tools)
        self._links[key] = link
        self._stepped.append(link)
        return link

    def _cancel(self, pair: Pair) -> None:
        if pair in self._running:
            link, reading = self._running[pair]
            self._contain(link, partial(link.stop, reading, FailureClass.CANCELLED, "cancelled"))

    def _close_links(self, failure: FailureClass, text: str, peer: str | None = None) -> None:
        for link in tuple(self._stepped):
            if peer is None or link.peer == peer:
                self._contain(link, partial(link.close, failure, text))
                self._forget(link)

    def _ended(self, link: Link, reading: Reading, evidence: Evidence) -> None:
        """Tell the holder, then the source: nothing of this attempt can touch a page of either any more (P4)."""
        ticket, attempt = reading.progress.pair
        del self._running[ticket, attempt]
        try:
            change = reading.progress.change(evidence)
        except Exception as error:  # the evidence stands, whatever cannot be said of the bytes
            log.exception("what T%d brought cannot be told: nothing of it counts", ticket)
            text = f"what arrived cannot be told: {error!r}"
            change = Change(ticket, attempt, Failed(FailureClass.TRANSPORT, text), evidence, text)
        self._outbox.report(change)
        self._contain(link, partial(link.release, reading.ticket))

    def _has_socket(self, link: Link, before: int, now: int) -> None:
        self._by_fd.pop(before, None)
        if now >= 0:
            self._by_fd[now] = link

    def _forget(self, link: Link) -> None:
        self._stepped.remove(link)
        for key in [key for key, known in self._links.items() if known is link]:
            del self._links[key]
