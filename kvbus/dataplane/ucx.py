"""The UCX reader: a backend that fills write leases with one-sided gets, and can end its own access.

Gets are pulled by the destination, never pushed: a late put overwrote a reused buffer whole when that was tried. UCX
cannot cancel a get, and waits for ever for a frozen peer over TCP; so a cancel waits for what is under way, and then
closes the connection by force. In both cases the evidence is that every request has ended.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from kvbus.dataplane import ucp
from kvbus.dataplane.notices import Notice
from kvbus.dataplane.reader import PEERS_MAX, Isolation, Outbox, Pace, Pair, Progress
from kvbus.dataplane.reading import Plan, limits_for, plan
from kvbus.dataplane.ucx_link import Link, LinkCounters
from kvbus.dataplane.ucx_plane import RegisteredPool, UcxPlane
from kvbus.dataplane.ucx_reading import Reading, Scratch
from kvbus.errors import BackendError
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Change, Failed, Order, SubmissionRejectedError

__all__ = ["Notice", "UcxPlane", "UcxReader", "UcxReaderSettings", "UcxStatistics"]

log = logging.getLogger(__name__)

LinkKey = tuple[str, str, str, int, bytes]
"""Peer, and who it is in truth: instance, member, epoch, and the address under which it answers."""


@dataclass(frozen=True, slots=True)
class UcxReaderSettings:
    """What an operator may set.

    `rate_limit_bytes_s` holds for all peers together. `cancel_wait_s`: reads under way at a cancel (32 MiB at most)
    take 7 ms on one host and a quarter of a second over 1 Gbit/s. `wire_up_s`: milliseconds on an idle host, seconds
    on a starved one. `reads_before` also reads generations ahead of the bytes: it saves the reading of a segment that
    has changed altogether, and proves nothing.
    """

    rate_limit_bytes_s: float | None = None
    cancel_wait_s: float = 1.0
    wire_up_s: float = 10.0
    reads_before: bool = False


@dataclass(frozen=True, slots=True)
class UcxStatistics:
    """Counters of the reader; `length_bytes` counts generations, and gets that failed, too.

    `lanes` names UCX's transports by peer: without `cma/…` between two processes of one host, reading is slow.
    """

    length_bytes: int
    gets: int
    failures: int
    notices_sent: int
    notices_lost: int
    endpoints: int
    attempts: int
    isolated: tuple[str, ...]
    lanes: Mapping[str, tuple[str, ...]]


class UcxReader:
    """Reads granted pages into the registered pool over one endpoint per peer and epoch; a `Backend`.

    `wake` is called from the UCX thread: the caller makes that safe, and it must not raise. All methods belong to one
    thread, the holder's.
    """

    def __init__(self, plane: UcxPlane, *, wake: Callable[[], None], settings: UcxReaderSettings | None = None) -> None:
        self._plane = plane
        self._settings = settings or UcxReaderSettings()
        self._outbox = Outbox(wake)
        self._isolation = Isolation()
        self._is_shut = False
        self._is_attached = False
        self._has_told_failure = False
        # From here on: the UCX thread's.
        self._pace = Pace(self._settings.rate_limit_bytes_s)
        self._limits = limits_for(self._settings.rate_limit_bytes_s)
        self._counters = LinkCounters()
        self._links: dict[LinkKey, Link] = {}
        self._stepped: deque[Link] = deque()
        self._running: dict[Pair, tuple[Link, Reading]] = {}
        self._is_closing = False
        self._emptied = threading.Event()

    def __repr__(self) -> str:
        return f"<UcxReader attempts={len(self._running)} endpoints={len(self._links)}>"

    @property
    def name(self) -> str:
        """The transport's name, as grants and requests spell it."""
        return "ucx"

    def submit(self, order: Order) -> None:
        """Start reading the granted pages; SubmissionRejectedError where nothing has escaped yet."""
        if self._is_shut:
            raise SubmissionRejectedError(FailureClass.SHUTDOWN, "the reader is shut down")
        pool = self._plane.pool(order.view.rank)
        if pool is None:
            text = self._plane.failure or f"no pool is registered for rank {order.view.rank}"
            raise SubmissionRejectedError(FailureClass.TRANSPORT, text)
        checked = plan(order, pool.local, self.name)
        if self._isolation.refuses(order.peer, checked.grant.lender_epoch):
            raise SubmissionRejectedError(FailureClass.PEER_LOST, f"{order.peer} is isolated in this epoch")
        self._is_attached = self._is_attached or self._plane.attach(self)
        progress = Progress(order, checked)
        self._outbox.open(progress.pair)
        if not self._plane.post(lambda: self._start(progress, pool), lambda: self._drop(progress)):
            self._outbox.withdraw(progress.pair)
            text = self._plane.failure or "the UCX thread does not run, or is far behind"
            raise SubmissionRejectedError(FailureClass.TRANSPORT, text)

    def changes(self) -> Sequence[Change]:
        """Return and forget what changed since the last call, oldest first.

        BackendError, once, where the UCX thread has failed: whoever holds the leases stops submitting here. What it
        still has to say of its attempts comes with the next calls.
        """
        if self._plane.failure and not self._has_told_failure:
            self._has_told_failure = True
            raise BackendError(self._plane.failure)
        return self._outbox.drain()

    def cancel(self, ticket: int, attempt: int) -> None:
        """Post nothing more of that attempt; it ends once what is under way has ended, or was ended by force."""
        pair = (ticket, attempt)
        if self._outbox.first_cancel(pair):
            self._plane.post(lambda: self._cancel(pair))

    def isolate(self, peer: str) -> None:
        """Close the connections to that peer by force, and refuse it in every epoch seen so far."""
        self._isolation.isolate(peer)
        self._plane.post(lambda: self._close_links(FailureClass.PEER_LOST, f"{peer} was isolated", peer))

    def shutdown(self, budget_s: float) -> Sequence[tuple[int, int]]:
        """Close every connection by force; return the attempts that still owe evidence. May be called again."""
        self._is_shut = True
        if self._plane.post(self._shut) and self._outbox.unfinished():
            self._emptied.wait(budget_s)
        return self._outbox.unfinished()

    def release_hold(self) -> None:
        """Close UCX and end its thread, within the plane's own bound; the pool's mapping stays."""
        self._plane.close()

    def statistics(self) -> UcxStatistics:
        """Return the counters as they stand."""
        return UcxStatistics(
            **asdict(self._counters),
            endpoints=len(self._links),
            attempts=len(self._outbox.unfinished()),
            isolated=self._isolation.peers(),
            lanes={link.peer: link.lanes for link in tuple(self._stepped) if link.lanes},
        )

    def lanes(self, peer: str) -> tuple[str, ...]:
        """Return UCX's own transports to a peer that is connected, such as `tcp/lo` and `cma/memory`; else none."""
        return next((link.lanes for link in tuple(self._stepped) if link.peer == peer and link.lanes), ())

    # ------------------------------------------------------------------------------------------ on the UCX thread

    def step(self, now: float) -> float | None:
        """Drive every link once, a different one first each time, so that a shared rate limit starves none."""
        asked: float | None = None
        self._stepped.rotate(-1)
        for link in tuple(self._stepped):
            wish = self._step_link(link, now)
            if wish is not None:
                asked = wish if asked is None else min(asked, wish)
        if self._is_closing and not self._running:
            self._emptied.set()
        return asked

    def failed(self, text: str) -> None:
        """Tell that nobody knows how the attempts under way end; their leases stay until there is evidence."""
        for ticket, attempt in self._running:
            self._outbox.report(Change(ticket, attempt, Failed(FailureClass.UNCERTAIN, text), None, text))

    def closed(self, *, is_quiet: bool) -> None:
        """Forget the links; the forced close, where it succeeded, has ended the attempts under way, and nothing else.

        Without it they keep their leases for as long as this process lives (contract 41).
        """
        text = self._plane.failure or "UCX was closed"
        result = None if self._plane.failure else Failed(FailureClass.SHUTDOWN, text)  # `failed` has told the other
        for ticket, attempt in self._running if is_quiet else ():
            self._outbox.report(Change(ticket, attempt, result, Evidence.ENDPOINT_DESTROYED, text))
        self._running.clear()
        self._links.clear()
        self._stepped.clear()
        self._emptied.set()

    def _drop(self, progress: Progress) -> None:
        """The thread ended before the attempt's turn."""
        progress.fail(FailureClass.TRANSPORT, self._plane.failure or "UCX was closed")
        self._outbox.report(progress.change(Evidence.NEVER_SUBMITTED))

    def _start(self, progress: Progress, pool: RegisteredPool) -> None:
        peer, offer = progress.order.peer, progress.plan.grant.ucx
        if offer is None:  # `plan` has refused such a grant
            return
        try:
            link = self._link(peer, progress.plan, offer.address)
            ahead = self._settings.reads_before
            reading = Reading(progress, self._limits, link.scratch, pool.handle, reads_before=ahead)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing has left, and it ends this attempt alone
            progress.fail(FailureClass.PEER_LOST, f"no connection to {peer}: {error}")
            self._outbox.report(progress.change(Evidence.NEVER_SUBMITTED))
            return
        self._running[progress.pair] = (link, reading)
        self._contain(link, lambda: link.add(reading, offer.rkey))

    def _link(self, peer: str, checked: Plan, address: bytes) -> Link:
        grant = checked.grant
        key = (peer, grant.lender_instance, grant.lender_member, grant.lender_epoch, address)
        known = self._links.get(key)
        if known is not None and not known.closing:
            return known
        self._make_room()
        memory, place, handle = self._plane.map_scratch(Scratch.length_bytes())
        connect = partial(ucp.Endpoint.open, self._plane.worker, address)
        try:
            endpoint = connect()
        except BaseException:
            self._plane.unmap_scratch(handle)
            raise
        link = Link(
            peer,
            endpoint,
            scratch=Scratch(memory, place, handle),
            pace=self._pace,
            counters=self._counters,
            wire_up_by=time.monotonic() + self._settings.wire_up_s,
            connect=connect,
            on_end=self._ended,
        )
        self._links[key] = link
        self._stepped.append(link)
        return link

    def _make_room(self) -> None:
        """Close the oldest idle link where there are too many; BackendError if all are busy."""
        if len(self._stepped) < PEERS_MAX:
            return
        idle = next((link for link in self._links.values() if link.idle), None)
        if idle is None:
            raise BackendError(f"{PEERS_MAX} connections are busy; wait for one to end")
        idle.close(FailureClass.NONE, "")

    def _cancel(self, pair: Pair) -> None:
        if pair in self._running:
            link, reading = self._running[pair]
            reading.cancel_by = time.monotonic() + self._settings.cancel_wait_s
            self._contain(link, lambda: reading.stop(FailureClass.CANCELLED, "cancelled"))

    def _close_links(self, failure: FailureClass, text: str, peer: str | None = None) -> None:
        for link in tuple(self._stepped):
            if peer is None or link.peer == peer:
                self._contain(link, lambda link=link: link.close(failure, text))  # type: ignore[misc]

    def _shut(self) -> None:
        self._is_closing = True
        self._close_links(FailureClass.SHUTDOWN, "the reader was shut down")

    def _ended(self, link: Link, reading: Reading, evidence: Evidence) -> None:
        """Tell the holder, then the source; nothing of this attempt can touch a page of either any more (P4).

        The holder first: the message is a system call that wakes the source, 0.7 ms on a busy host.
        """
        ticket, attempt = reading.progress.pair
        del self._running[ticket, attempt]
        try:
            change = reading.progress.change(evidence)
        except Exception as error:  # the evidence stands, whatever cannot be said of the bytes
            log.exception("what T%d brought cannot be told: nothing of it counts", ticket)
            text = f"what arrived cannot be told: {error!r}"
            change = Change(ticket, attempt, Failed(FailureClass.TRANSPORT, text), evidence, text)
        self._outbox.report(change)
        grant = reading.progress.plan.grant
        link.send_notice(Notice(grant.reader, grant.nonce))

    def _step_link(self, link: Link, now: float) -> float | None:
        """Drive one link; a fault of any kind ends what goes over it, and nothing else (R21)."""
        try:
            wish = link.step(now)
            if link.closed:
                self._forget(link)
        except Exception as error:  # noqa: BLE001 - contained to its link
            link.break_by(error)
            return 0
        return wish

    @staticmethod
    def _contain(link: Link, act: Callable[[], None]) -> None:
        """Do something to one link; what it raises breaks that link."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - contained to its link
            link.break_by(error)

    def _forget(self, link: Link) -> None:
        self._stepped.remove(link)
        for key in [key for key, known in self._links.items() if known is link]:
            del self._links[key]
        self._plane.unmap_scratch(link.scratch.handle)
