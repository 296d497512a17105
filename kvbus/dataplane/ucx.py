"""The UCX reader: a backend that fills write leases with one-sided gets, and can end its own access.

Gets are pulled by the destination, never pushed: a late put overwrote a reused buffer whole when that was tried. UCX
cannot cancel a get, and waits for ever for a frozen peer over TCP; so a cancel waits for what is under way, and then
closes the connection by force. In both cases the evidence is that every request has ended.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from kvbus.dataplane import ucp
from kvbus.dataplane.reader import PEERS_MAX, Isolation, Outbox, Pace, Pair, Progress
from kvbus.dataplane.reading import Plan, limits_for, plan
from kvbus.dataplane.ucx_link import Link, LinkCounters
from kvbus.dataplane.ucx_plane import Notice, RegisteredPool, UcxPlane
from kvbus.dataplane.ucx_reading import Reading, Scratch
from kvbus.errors import BackendError
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Change, Order, SubmissionRejectedError

__all__ = ["Notice", "UcxPlane", "UcxReader", "UcxReaderSettings", "UcxStatistics"]

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
            text = f"no pool is registered for rank {order.view.rank}"
            raise SubmissionRejectedError(FailureClass.TRANSPORT, text)
        checked = plan(order, pool.local, self.name)
        if self._isolation.refuses(order.peer, checked.grant.lender_epoch):
            raise SubmissionRejectedError(FailureClass.PEER_LOST, f"{order.peer} is isolated in this epoch")
        self._is_attached = self._is_attached or self._plane.attach(self)
        pair = (order.ticket, order.attempt)
        self._outbox.open(pair)
        if not self._plane.post(lambda: self._start(order, checked, pool)):
            self._outbox.withdraw(pair)
            raise SubmissionRejectedError(FailureClass.TRANSPORT, "the UCX thread does not run, or is far behind")

    def changes(self) -> Sequence[Change]:
        """Return and forget what changed since the last call, oldest first."""
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
            wish = link.step(now)
            if wish is not None:
                asked = wish if asked is None else min(asked, wish)
            if link.closed:
                self._forget(link)
        if self._is_closing and not self._running:
            self._emptied.set()
        return asked

    def close(self) -> None:
        """Forget the links: the context closes their endpoints by force. Attempts under way get no evidence."""
        self._links.clear()
        self._stepped.clear()

    def _start(self, order: Order, checked: Plan, pool: RegisteredPool) -> None:
        progress, offer = Progress(order, checked), checked.grant.ucx
        if offer is None:  # `plan` has refused such a grant
            return
        try:
            link = self._link(order.peer, checked, offer.address)
        except (BackendError, ValueError, TypeError) as error:
            progress.fail(FailureClass.PEER_LOST, f"no connection to {order.peer}: {error}")
            self._outbox.report(progress.change(Evidence.NEVER_SUBMITTED))
            return
        reading = Reading(progress, self._limits, link.scratch, pool.handle, reads_before=self._settings.reads_before)
        self._running[progress.pair] = (link, reading)
        link.add(reading, offer.rkey)

    def _link(self, peer: str, checked: Plan, address: bytes) -> Link:
        grant = checked.grant
        key = (peer, grant.lender_instance, grant.lender_member, grant.lender_epoch, address)
        known = self._links.get(key)
        if known is not None and not known.closing:
            return known
        self._make_room()
        memory, place, handle = self._plane.map_scratch(Scratch.length_bytes())
        try:
            endpoint = ucp.Endpoint.open(self._plane.worker, address)
        except (BackendError, ValueError, TypeError):
            self._plane.unmap_scratch(handle)
            raise
        link = Link(
            peer,
            endpoint,
            scratch=Scratch(memory, place, handle),
            pace=self._pace,
            counters=self._counters,
            wire_up_by=time.monotonic() + self._settings.wire_up_s,
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
            _, reading = self._running[pair]
            reading.stop(FailureClass.CANCELLED, "cancelled")
            reading.cancel_by = time.monotonic() + self._settings.cancel_wait_s

    def _close_links(self, failure: FailureClass, text: str, peer: str | None = None) -> None:
        for link in tuple(self._stepped):
            if peer is None or link.peer == peer:
                link.close(failure, text)

    def _shut(self) -> None:
        self._is_closing = True
        self._close_links(FailureClass.SHUTDOWN, "the reader was shut down")

    def _ended(self, link: Link, reading: Reading, evidence: Evidence) -> None:
        """Tell the holder, then the source; nothing of this attempt can touch a page of either any more (P4).

        The holder first: the message is a system call that wakes the source, 0.7 ms on a busy host.
        """
        del self._running[reading.progress.pair]
        self._outbox.report(reading.progress.change(evidence))
        grant = reading.progress.plan.grant
        link.send_notice(Notice(grant.reader, grant.nonce))

    def _forget(self, link: Link) -> None:
        self._stepped.remove(link)
        for key in [key for key, known in self._links.items() if known is link]:
            del self._links[key]
        self._plane.unmap_scratch(link.scratch.handle)
