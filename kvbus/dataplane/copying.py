"""How pages are copied out of a mapped pool, turn by turn: each run by itself, or small pages gathered and scattered.

A slice of numpy's costs half a microsecond of Python beside its bytes. So small pages are gathered, many by one call,
into a scratch that stays in the core's cache, and scattered from there by another: pages of 4 KiB then take a third
less of the processor's time, and pages of 16 KiB a tenth less.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvbus.dataplane.cutting import Limits, Pages, Runs, Segment
from kvbus.dataplane.reading import Plan
from kvbus.pool.memory import PoolMemory

TURN_BYTES_MAX = 1 << 20
"""0.2 ms, so that a cancel is seen soon; longer turns gain nothing. With a turn for each page of 16 KiB, three quarters
of the time went into turns."""
SMALL_BYTES_MAX = 16 << 10
"""At 64 KiB the second pass of the bytes costs more than the slices did."""
SCRATCH_BYTES = 256 << 10
"""A quarter of a small core's second cache: with 128 KiB and with 512 KiB copying took as long or longer."""

Turn = Callable[[], int]
"""Copies something, and returns how many bytes that were."""
Bytes = NDArray[np.uint8]
Whole = NDArray[np.void]
"""The pages of a pool, one element each."""


class Copier:
    """Copies pages from one mapped pool into another; what is copied was checked against both before."""

    def __init__(self, plan: Plan, source: PoolMemory, target: PoolMemory, limits: Limits) -> None:
        page_bytes = plan.local.page_bytes
        self.limits = Limits(min(TURN_BYTES_MAX, limits.run_bytes), limits.segment_bytes)
        self.gathers = page_bytes <= min(SMALL_BYTES_MAX, self.limits.run_bytes) and all(
            memory.page_stride == page_bytes for memory in (source, target)
        )
        self._to, self._from = target.whole, source.whole
        if self.gathers:
            self._pages, self._local = plan.page_column(), np.array(plan.local_pages, dtype=np.int64)
            self._to_pages, self._from_pages = _whole_pages(target), _whole_pages(source)
            rows = min(SCRATCH_BYTES // page_bytes, len(self._pages))
            self._scratch = np.empty(rows, dtype=self._from_pages.dtype)

    def turns(self, segment: Segment) -> Iterator[Turn]:
        """Yield what copies all rows of a segment, a turn each."""
        if not self.gathers:
            for runs in segment.runs.in_parts(self.limits.run_bytes) if segment.runs else ():
                yield partial(_copy_runs, self._to, self._from, runs)
            return
        rows = np.array(segment.rows, dtype=np.int64)
        pages, local = self._pages[rows], self._local[rows]
        count = self.limits.run_bytes // self._scratch.itemsize
        for first in range(0, len(rows), count):
            yield partial(self._gather, pages[first : first + count], local[first : first + count])

    def _gather(self, pages: Pages, local: Pages) -> int:
        step = len(self._scratch)
        for first in range(0, len(pages), step):
            chosen = pages[first : first + step]
            part = self._scratch[: len(chosen)]
            np.take(self._from_pages, chosen, out=part, mode="clip")  # "raise" would copy once more; all are inside
            self._to_pages[local[first : first + step]] = part
        return len(pages) * self._scratch.itemsize


def _copy_runs(to: Bytes, from_: Bytes, runs: Runs) -> int:
    copied = 0
    for source, local, length in runs.columns():
        to[local : local + length] = from_[source : source + length]
        copied += length
    return copied


def _whole_pages(memory: PoolMemory) -> Whole:
    return memory.whole[memory.pages_offset :].view(np.dtype((np.void, memory.page_stride)))
