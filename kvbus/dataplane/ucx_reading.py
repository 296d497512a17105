"""One attempt as the UCX thread sees it: which gets come next, and when a segment may be verified.

Everything here runs on the UCX thread. A segment goes through payload and after-read, in this order and never
overlapping: the generation records are asked for once its last byte has arrived (P2).
"""

import mmap
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from kvbus.dataplane import ucp
from kvbus.dataplane.reader import Progress
from kvbus.dataplane.reading import SCRATCH_BYTES, Limits, Segment
from kvbus.ledger.facts import FailureClass
from kvbus.pool.generations import RECORD_BYTES

SEGMENTS_UNDER_WAY_MAX = 4
"""Of one attempt: one being read, one being verified, and two in line."""
PIECES_MAX = 8
"""Posted, and waited for, together: a page of 16 KiB then costs this thread 10 µs where it cost 13 alone."""
PIECES_BYTES_MAX = 512 << 10
"""Together, where they are several: 0.1 ms of reading, which delays no other attempt."""
SCRATCH_SLOTS = 3
"""Segments of one peer being verified at once: one a round trip, and two in line behind it."""


class _Phase(Enum):
    BEFORE = auto()
    PAYLOAD = auto()
    AFTER = auto()


@dataclass(slots=True, eq=False)
class Work:
    """One segment under way: `left` gets of its present phase have not ended."""

    reading: "Reading"
    segment: Segment
    phase: _Phase = _Phase.PAYLOAD
    left: int = 0
    slot: int | None = None


class Get(NamedTuple):
    """What is posted together, one piece or a few small ones; without a work it is the probe."""

    reading: "Reading"
    work: Work | None
    pieces: Sequence[ucp.Piece]
    length_bytes: int
    handle: ucp.MemoryHandle


class Scratch:
    """Slots of private memory where generation records land, given out in order of asking.

    Each link has its own, so that a peer that does not move holds up nobody else's verification.
    """

    def __init__(self, memory: mmap.mmap, address: int, handle: ucp.MemoryHandle) -> None:
        self.handle = handle
        self._view = memoryview(memory)
        self._address = address
        self._free = list(range(SCRATCH_SLOTS))
        self._waiting: deque[Work] = deque()

    @staticmethod
    def length_bytes() -> int:
        """Return how much memory to map: the slots, and a place for probes, whose bytes nobody reads."""
        return SCRATCH_SLOTS * SCRATCH_BYTES + mmap.PAGESIZE

    @property
    def probe_address(self) -> int:
        """Where probes land."""
        return self._address + SCRATCH_SLOTS * SCRATCH_BYTES

    def ask(self, work: Work) -> None:
        """Give the work a slot and its gets, now or when its turn comes."""
        self._waiting.append(work)
        self._serve()

    def address(self, slot: int) -> int:
        """Return where a slot starts."""
        return self._address + slot * SCRATCH_BYTES

    def content(self, slot: int) -> memoryview:
        """Return a slot's bytes."""
        return self._view[slot * SCRATCH_BYTES : (slot + 1) * SCRATCH_BYTES]

    def give_back(self, work: Work) -> None:
        """Take the slot back, once no get can write into it any more."""
        if work.slot is not None:
            self._free.append(work.slot)
            work.slot = None
            self._serve()

    def forget(self, reading: "Reading") -> None:
        """Let an attempt that has ended wait no more, and take its slots back."""
        self._waiting = deque(work for work in self._waiting if work.reading is not reading)
        for work in reading.works:
            self.give_back(work)

    def _serve(self) -> None:
        while self._free and self._waiting:
            work = self._waiting.popleft()
            work.slot = self._free.pop()
            work.reading.post_spans(work)


class Reading:
    """One attempt on a link: which gets it may post next, and whether any of them is under way."""

    def __init__(
        self,
        progress: Progress,
        limits: Limits,
        scratch: Scratch,
        pool: ucp.MemoryHandle,
        *,
        reads_before: bool,
    ) -> None:
        self.progress = progress
        self.in_flight = 0
        self.key: ucp.RemoteKey | None = None
        self.packed_key = b""
        """Both given by the link."""
        self.cancel_by: float | None = None
        self.works: list[Work] = []
        self._segments = progress.plan.segments(limits)
        self._pieces_bytes = min(PIECES_BYTES_MAX, limits.run_bytes)
        self._has_more = True
        self.ready: deque[Get] = deque()
        """What the link may post now, in order."""
        self._scratch = scratch
        self._pool = pool
        self._reads_before = reads_before

    @property
    def ended(self) -> bool:
        """Whether no get is under way, and none will be."""
        if self.in_flight:
            return False
        return self.progress.stop is not None or not (self._has_more or self.works)

    def stop(self, failure: FailureClass, text: str) -> None:
        """Post nothing more; the first reason stands."""
        self.progress.fail(failure, text)
        self.ready.clear()

    def refill(self) -> bool:
        """Begin the next segment where nothing is ready; tell whether something is, then."""
        while not self.ready and self._has_more and len(self.works) < SEGMENTS_UNDER_WAY_MAX:
            if self.progress.stop is not None:
                return False
            self._begin_segment()
        return bool(self.ready)

    def get_ended(self, get: Get, *, is_whole: bool) -> None:
        """Note the end of a get; the last one of a phase leads to the next phase, if all went well."""
        self.in_flight -= 1
        work = get.work
        if work is None or not is_whole or self.progress.stop is not None:
            return
        work.left -= 1
        if work.left == 0:
            self._phase_ended(work)

    def post_spans(self, work: Work) -> None:
        """Line up the reads of the segment's generation records, ahead of any more payload."""
        if work.slot is None:
            raise ValueError("the segment has no scratch slot")
        if self.progress.stop is not None:
            return
        base = self._scratch.address(work.slot)
        gets = self._gets(work, work.segment.spans, base, self._scratch.handle)
        work.left = len(gets)
        self.ready.extendleft(gets)

    def _begin_segment(self) -> None:
        segment = next(self._segments, None)
        if segment is None:
            self._has_more = False
            return
        work = Work(self, segment)
        self.works.append(work)
        if self._reads_before:
            work.phase = _Phase.BEFORE
            self._scratch.ask(work)
        else:
            self._post_payload(work)

    def _post_payload(self, work: Work) -> None:
        gets = self._gets(work, work.segment.columns(), self.progress.plan.local.address, self._pool)
        work.phase, work.left = _Phase.PAYLOAD, len(gets)
        self.ready.extend(gets)

    def _phase_ended(self, work: Work) -> None:
        if work.phase is _Phase.PAYLOAD:
            # Only now: a record read earlier could still be the grant's while a later byte is not (P2).
            work.phase = _Phase.AFTER
            self._scratch.ask(work)
            return
        unchanged = work.segment.unchanged_rows(self._scratch.content(work.slot)) if work.slot is not None else ()
        if work.phase is _Phase.BEFORE and unchanged:
            self._scratch.give_back(work)
            self._post_payload(work)
            return
        self.works.remove(work)
        self._scratch.give_back(work)
        self.progress.verified(work.segment, unchanged)

    def _gets(
        self, work: Work, runs: Iterable[tuple[int, int, int]], local_base: int, handle: ucp.MemoryHandle
    ) -> list[Get]:
        remote_base = self.progress.plan.grant.pool.base
        pieces = [(local_base + local, length, remote_base + source) for source, local, length in runs]
        count = max(1, min(PIECES_MAX, self._pieces_bytes // max(length for _, length, _ in pieces)))
        parts = [pieces[first : first + count] for first in range(0, len(pieces), count)]
        return [Get(self, work, part, sum(length for _, length, _ in part), handle) for part in parts]

    def probe(self) -> Get:
        """Return the get that proves the peer's answer: the first granted page's record, into no one's memory."""
        plan = self.progress.plan
        offset = plan.grant.pool.generations_offset + RECORD_BYTES * plan.source_pages[0]
        piece = (self._scratch.probe_address, RECORD_BYTES, plan.grant.pool.base + offset)
        return Get(self, None, (piece,), RECORD_BYTES, self._scratch.handle)
