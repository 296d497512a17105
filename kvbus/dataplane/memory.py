"""The memory reader: a backend that copies pages from the lender's memfd on the same host, without UCX.

It opens the lender's descriptor through /proc, maps the pool read-only, and checks that what it finds is the pool that
the grant describes. The mapping outlives the lender: whole pages can still be read after its death, and verified. It
keeps the same promises as the UCX reader, so that tests, and hosts without UCX, run the same protocol. It has no
channel to the lender: the word that its access has ended goes over the bus.
"""

import errno
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvbus.dataplane.copying import Copier, Turn
from kvbus.dataplane.cutting import WORDS, Limits, Segment, matching, rows_where
from kvbus.dataplane.reader import Isolation, Outbox, Pace, Pair, Progress
from kvbus.dataplane.reading import LocalPool, Plan, limits_for, plan, verify
from kvbus.errors import BackendError, KvbusError, PeerError
from kvbus.events import ProcessIdentity
from kvbus.grants import Grant, MemoryAccess
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Change, Order, SubmissionRejectedError
from kvbus.pool.generations import RECORD_BYTES
from kvbus.pool.memory import PoolMemory
from kvbus.processes import identity, open_pidfd, start_ticks

MAPPINGS_MAX = 64
"""Pools of other processes mapped at once: several times the workers of one host; each costs address space only."""
IDLE_S = 1.0
"""Nothing depends on it: should a wake be lost, the thread looks again this soon."""
NO_MEMORY = "this process has no memory to read with"
JOIN_S = 5.0
"""The thread looks up after each turn; only a stopped machine meets this."""
FEW_PAGES = 16
"""Up to here a turn of Python for each page is cheaper than columns: those cost as much as forty pages do."""
AT_ONCE_BYTES = 256 << 10
"""Read on the caller's own thread between two looks at what changed: 0.1 ms at most, however many orders it takes. One
of them costs less than to wake another thread and to hear of it; beyond this all of them go there."""

SourceKey = tuple[ProcessIdentity, int, int]
"""Process, descriptor and epoch of a mapped pool: the process itself, for a name can come back with another one."""


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """Counters of the reader; a copy is what one turn copies, up to a mebibyte."""

    length_bytes: int
    copies: int
    mappings: int
    attempts: int
    isolated: tuple[str, ...]


class _Reading:
    """One attempt: its copies in order, turn by turn, each segment verified after its last byte."""

    def __init__(self, progress: Progress, source: PoolMemory, target: PoolMemory, limits: Limits) -> None:
        self.progress = progress
        self.source = source
        plan = progress.plan
        self._is_small = len(plan.source_pages) <= FEW_PAGES and plan.local.page_bytes <= limits.run_bytes
        self.turns = self._page_by_page(target) if self._is_small else self._turns(Copier(plan, source, target, limits))
        self.next_turn: Turn | None = None
        if not self._is_small:
            self._pages, self._expected = plan.page_column(), plan.expected_records()
            first, end = source.generations_offset, source.generations_offset + RECORD_BYTES * source.page_count
            self._records = source.whole[first:end].view(np.uint64).reshape(-1, WORDS)

    def advance(self) -> None:
        """Look what to copy next; verifies a segment when its last copy was made."""
        self.next_turn = next(self.turns, None) if self.progress.stop is None else None

    def _turns(self, copier: Copier) -> Generator[Turn, None, None]:
        segments = self.progress.plan.segments(copier.limits, with_runs=not copier.gathers, with_spans=False)
        for segment in segments:
            rows = self._unchanged(segment.rows)  # only saves copying: what counts is the look afterwards (P2)
            if rows:
                yield from copier.turns(segment)
            self.progress.verified(segment, self._unchanged(rows))

    def _page_by_page(self, target: PoolMemory) -> Generator[Turn, None, None]:
        """Copy each page by a slice of its own: of few pages, columns cost more than the bytes do."""
        plan = self.progress.plan
        for row, (page, place) in enumerate(zip(plan.source_pages, plan.local_pages, strict=True)):
            segment = Segment((row,), (), (), (), ())
            rows = self._unchanged(segment.rows)  # as above
            if rows:
                yield partial(_copy_page, target, place, self.source, page)
            self.progress.verified(segment, self._unchanged(rows))

    def _unchanged(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the rows whose generation is the grant's now, as the source's own table says."""
        if self._is_small:
            plan = self.progress.plan
            epoch, pages, counters = plan.grant.lender_epoch, plan.source_pages, plan.counters
            return tuple(row for row in rows if verify(self._record(pages[row]), epoch, counters[row]))
        chosen = np.array(rows, dtype=np.int64)
        return rows_where(rows, matching(self._records[self._pages[chosen]], self._expected[chosen]))

    def _record(self, page: int) -> bytes:
        first = self.source.generations_offset + RECORD_BYTES * page
        return self.source.whole[first : first + RECORD_BYTES].tobytes()


def _copy_page(target: PoolMemory, place: int, source: PoolMemory, page: int) -> int:
    bytes_here = target.page_bytes(place)
    bytes_here[:] = source.page_bytes(page)
    return len(bytes_here)


class MemoryReader:
    """Reads granted pages out of other processes' memfds, in one thread of its own; a `Backend`.

    `wake` is called from that thread, or from the caller's own where little was to be read: the caller makes that safe,
    and it must not raise. All methods belong to one thread, the holder's.
    """

    def __init__(self, *, wake: Callable[[], None], rate_limit_bytes_s: float | None = None) -> None:
        self._outbox = Outbox(wake)
        self._isolation = Isolation()
        self._targets: dict[int, tuple[LocalPool, PoolMemory]] = {}
        self._is_shut = False
        self._turn = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()  # at most two for each attempt under way
        self._stopping = False
        self._at_once = 0  # bytes read on the caller's own thread since it last looked what changed
        self._sleeps = False  # changed and read under the condition's lock, as what follows is while it is true
        self._thread: threading.Thread | None = None
        # From here on: the reader thread's, and while that sleeps, the caller's.
        self._pace = Pace(rate_limit_bytes_s)
        self._limits = limits_for(rate_limit_bytes_s)
        self._sources: OrderedDict[SourceKey, PoolMemory] = OrderedDict()
        self._readings: deque[_Reading] = deque()
        self._length_bytes = self._copied = 0

    def __repr__(self) -> str:
        return f"<MemoryReader attempts={len(self._readings)} mappings={len(self._sources)}>"

    @property
    def name(self) -> str:
        """The transport's name, as grants and requests spell it."""
        return "memory"

    def start(self) -> None:
        """Start the thread; harmless if it runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvbus-memory", daemon=True)
            self._thread.start()

    def register(self, memory: PoolMemory, rank: int = 0) -> MemoryAccess:
        """Fill leases of this rank's pool from now on, and return what a grant needs to reach the pool."""
        if rank in self._targets:
            raise ValueError(f"rank {rank} has a pool already")
        self._targets[rank] = (LocalPool.of(memory), memory)
        return MemoryAccess(process=identity(), fd=memory.fd)

    def submit(self, order: Order) -> None:
        """Start reading the granted pages; SubmissionRejectedError where nothing has escaped yet."""
        target = self._targets.get(order.view.rank)
        if self._is_shut:
            raise SubmissionRejectedError(FailureClass.SHUTDOWN, "the reader is shut down")
        if target is None or self._thread is None or not self._thread.is_alive():
            text = f"no pool is registered for rank {order.view.rank}, or the reader was not started"
            raise SubmissionRejectedError(FailureClass.TRANSPORT, text)
        checked = plan(order, target[0], self.name)
        if self._isolation.refuses(order.peer, checked.grant.lender_epoch):
            raise SubmissionRejectedError(FailureClass.PEER_LOST, f"{order.peer} is isolated in this epoch")
        self._outbox.open((order.ticket, order.attempt))
        progress, memory = Progress(order, checked), target[1]
        with self._turn:
            if self._may_read_at_once(checked):
                self._read_at_once(progress, memory)
            else:
                self._post(lambda: self._begin(progress, memory))

    def changes(self) -> Sequence[Change]:
        """Return and forget what changed since the last call, oldest first."""
        self._at_once = 0
        return self._outbox.drain()

    def cancel(self, ticket: int, attempt: int) -> None:
        """Copy nothing more for that attempt; at most the copy under way still ends."""
        pair = (ticket, attempt)
        if self._outbox.first_cancel(pair):
            self._post(lambda: self._stop(FailureClass.CANCELLED, "cancelled", pair=pair))

    def isolate(self, peer: str) -> None:
        """End the attempts that read from that peer, and refuse it in every epoch seen so far."""
        self._isolation.isolate(peer)
        self._post(lambda: self._stop(FailureClass.PEER_LOST, f"{peer} was isolated", peer=peer))

    def shutdown(self, budget_s: float) -> Sequence[tuple[int, int]]:
        """End every attempt; return those that still owe evidence. May be called again."""
        self._is_shut = True
        if self._outbox.unfinished() and self._thread is not None:
            ended = threading.Event()
            self._post(lambda: self._stop(FailureClass.SHUTDOWN, "the reader was shut down"))
            self._post(ended.set)  # commands run in order: what was stopped has been reported by then
            ended.wait(budget_s)
        return self._outbox.unfinished()

    def release_hold(self) -> None:
        """End the thread and unmap what was mapped; within JOIN_S."""
        with self._turn:
            self._stopping = True
            self._turn.notify()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def statistics(self) -> MemoryStatistics:
        """Return the counters as they stand."""
        return MemoryStatistics(
            length_bytes=self._length_bytes,
            copies=self._copied,
            mappings=len(self._sources),
            attempts=len(self._outbox.unfinished()),
            isolated=self._isolation.peers(),
        )

    def _post(self, command: Callable[[], None]) -> None:
        with self._turn:
            self._commands.append(command)
            self._turn.notify()

    def _may_read_at_once(self, checked: Plan) -> bool:
        """Whether an order is small, of a pool that is mapped already, and the thread sleeps: then all here is ours."""
        pages = len(checked.source_pages)
        small = pages <= FEW_PAGES and self._at_once + pages * checked.local.page_bytes <= AT_ONCE_BYTES
        rests = self._sleeps and not (self._stopping or self._commands or self._readings or self._pace.is_limited)
        offer = checked.grant.memory
        return small and rests and offer is not None and _key_of(offer, checked.grant) in self._sources

    def _read_at_once(self, progress: Progress, target: PoolMemory) -> None:
        """Do for one attempt what the thread would do for it; it ends by this."""
        self._at_once += len(progress.plan.source_pages) * progress.plan.local.page_bytes
        self._begin(progress, target)
        while self._readings:
            self._take_turn()

    # -------------------------------------------------------------------------------------- on the reader thread

    def _run(self) -> None:
        while not self._stopping:
            self._wait()
            while self._commands:
                self._commands.popleft()()
            self._take_turn()
        self._readings.clear()
        while self._sources:
            self._sources.popitem()[1].close()

    def _wait(self) -> None:
        """Sleep until there is a command, or a copy that the pace allows."""
        with self._turn:
            wait_s = self._pace.wait_s(time.monotonic()) if self._readings else IDLE_S
            if wait_s and not self._commands and not self._stopping:
                self._sleeps = True
                self._turn.wait(min(wait_s, IDLE_S))
                self._sleeps = False

    def _take_turn(self) -> None:
        now = time.monotonic()
        if not self._readings or self._pace.wait_s(now):
            return
        reading = self._readings[0]
        self._readings.rotate(-1)
        try:
            if reading.next_turn is not None:
                copied = reading.next_turn()
                self._pace.spend(copied, now)
                self._length_bytes += copied
                self._copied += 1
            reading.advance()
        except MemoryError:  # only this attempt ends by it; its copies were made, or were not begun
            reading.progress.fail(FailureClass.TRANSPORT, NO_MEMORY)
            reading.next_turn = None
        if reading.next_turn is None:
            self._end(reading)

    def _begin(self, progress: Progress, target: PoolMemory) -> None:
        try:
            reading = _Reading(progress, self._source(progress.plan.grant), target, self._limits)
            reading.advance()
        except PeerError as error:
            progress.fail(FailureClass.GRANT_REFUSED, str(error))
        except KvbusError as error:
            progress.fail(FailureClass.PEER_LOST, str(error))
        except MemoryError:
            progress.fail(FailureClass.TRANSPORT, NO_MEMORY)
        else:
            self._readings.append(reading)
            return
        self._outbox.report(progress.change(Evidence.NEVER_SUBMITTED))

    def _stop(self, failure: FailureClass, text: str, *, pair: Pair | None = None, peer: str | None = None) -> None:
        """End the attempts that are meant (all, without a name). Copies are this thread's own: none is under way."""
        for reading in tuple(self._readings):
            if pair in {None, reading.progress.pair} and peer in {None, reading.progress.order.peer}:
                reading.progress.fail(failure, text)
                self._end(reading)

    def _end(self, reading: _Reading) -> None:
        reading.turns.close()
        self._readings.remove(reading)
        self._outbox.report(reading.progress.change(Evidence.COMPLETED))

    def _source(self, grant: Grant) -> PoolMemory:
        """Return the mapped pool that the grant describes; PeerError if it is another one, BackendError if gone."""
        offer = grant.memory
        if offer is None:
            raise PeerError("the grant offers no memory access")
        key = _key_of(offer, grant)
        source = self._sources.get(key)
        if source is None:
            self._make_room()
            source = self._sources[key] = map_source(offer)
        problem = mismatch(source, grant)
        if problem is not None:
            raise PeerError(f"the lender's memory is not the pool of the grant: {problem}")
        self._sources.move_to_end(key)
        return source

    def _make_room(self) -> None:
        """Unmap the pools that were not read for the longest time; those being read stay, whatever the bound."""
        used = {id(reading.source) for reading in self._readings}
        for key in [key for key, source in self._sources.items() if id(source) not in used]:
            if len(self._sources) < MAPPINGS_MAX:
                return
            self._sources.pop(key).close()


def _key_of(offer: MemoryAccess, grant: Grant) -> SourceKey:
    return offer.process, offer.fd, grant.lender_epoch


def map_source(offer: MemoryAccess) -> PoolMemory:
    """Map a descriptor of another process of this host, read-only.

    BackendError if that process is not (any more) the one that offered it, PeerError if what it offers is no pool. The
    process is looked at again after opening: a pid that was reused in between would lend out a stranger's file.
    """
    process = offer.process
    try:
        pidfd = open_pidfd(process)
    except OSError as error:  # no descriptors are left
        raise BackendError(f"the lender (pid {process.pid}) cannot be looked at: {error.strerror}") from error
    if pidfd is None:
        raise BackendError(f"the lender (pid {process.pid}) is gone, or not of this host: use another transport")
    try:
        # O_NONBLOCK: a descriptor that is a pipe must not stop this thread.
        fd = os.open(f"/proc/{process.pid}/fd/{offer.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise BackendError(f"the lender's memory cannot be opened: {error.strerror}") from error
    finally:
        os.close(pidfd)
    try:
        if start_ticks(process.pid) != process.start_ticks:
            raise BackendError(f"the lender (pid {process.pid}) has gone meanwhile")
        return PoolMemory.attach(fd, writable=False)
    except KvbusError:
        os.close(fd)
        raise
    except (OSError, ValueError, RecursionError) as error:  # a header that only looks like one
        os.close(fd)
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise BackendError(f"this process has no memory to map the lender's pool: {error.strerror}") from error
        raise PeerError(f"the lender's memory holds no pool: {error!r}") from error


def mismatch(source: PoolMemory, grant: Grant) -> str | None:
    """Return in what a mapped pool differs from what the grant says of it, or None."""
    stated = grant.pool
    pairs = (
        ("epoch", source.epoch, grant.lender_epoch),
        ("fingerprint", source.fingerprint, grant.fingerprint),
        ("length_bytes", source.length_bytes, stated.length_bytes),
        ("generations_offset", source.generations_offset, stated.generations_offset),
        ("pages_offset", source.pages_offset, stated.pages_offset),
        ("page_stride", source.page_stride, stated.page_stride),
        ("page_bytes", source.layout.page_bytes, stated.page_bytes),
        ("page_count", source.page_count, stated.page_count),
    )
    wrong = (f"{name} is {found}, granted {granted}" for name, found, granted in pairs if found != granted)
    return next(wrong, None)
