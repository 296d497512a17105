"""A pool as a socket sees it: one range of bytes, from which runs of pages are cut, and its generation records.

The pool's descriptor is mapped once more here, for reading only where it is served, and stays mapped with its owner.
The file is sealed against shrinking, so no access through this mapping can fail.
"""

import mmap
from bisect import bisect_right
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kvbus.pool.generations import RECORD_BYTES
from kvbus.pool.memory import PoolMemory

WORDS = RECORD_BYTES // 8
_ALL_ONES = np.uint64((1 << 64) - 1)

Pages = NDArray[np.int64]
Column = NDArray[np.uint64]


class PoolBytes:
    """The bytes of one pool, mapped for sockets."""

    def __init__(self, memory: PoolMemory, *, writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mapping = mmap.mmap(
            memory.fd, memory.length_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=access
        )
        self._bytes = memoryview(self._mapping)
        first = memory.generations_offset
        table = np.frombuffer(self._bytes[first : first + RECORD_BYTES * memory.page_count], dtype=np.uint64)
        self._table = table.reshape(memory.page_count, WORDS)
        self.page_count = memory.page_count
        self.page_bytes = memory.layout.page_bytes
        self._pages_offset = memory.pages_offset
        self._stride = memory.page_stride

    def views(self, pages: Pages) -> list[memoryview]:
        """Return the bytes of pages in that order, neighbours without padding between them as one view."""
        whole, length, stride = self._bytes, self.page_bytes, self._stride
        firsts: list[int] = (self._pages_offset + stride * pages).tolist()
        ends = [first + length for first in firsts]
        if stride == length and not set(ends).isdisjoint(firsts):
            firsts, ends = _merged(firsts, ends)
        return [whole[first:end] for first, end in zip(firsts, ends, strict=True)]

    def records(self, pages: Pages) -> Column:
        """Return a copy of the pages' generation records as they are now, one row each."""
        return self._table[pages]


def expected_records(epoch: int, counters: Column) -> Column:
    """Return the only records that pages may have under these counters, complements included."""
    records = np.empty((len(counters), WORDS), dtype=np.uint64)
    records[:, 0], records[:, 1] = epoch, counters
    records[:, 2:] = records[:, :2] ^ _ALL_ONES
    return records


def _merged(firsts: list[int], ends: list[int]) -> tuple[list[int], list[int]]:
    """Join ranges that follow upon each other, in place and in order."""
    starts, stops = firsts[:1], list[int]()
    for end, first in zip(ends, firsts[1:], strict=False):
        if first != end:
            stops.append(end)
            starts.append(first)
    return starts, [*stops, ends[-1]]


class Ranges:
    """Ranges of bytes that are worked off in order, and how far that is; a call takes as many as it is given."""

    def __init__(self, views: list[memoryview]) -> None:
        self._views = views
        self._ends = list(accumulate(map(len, views)))
        self._at = 0

    @property
    def left_bytes(self) -> int:
        """How many bytes are still to be worked off."""
        return self._ends[-1] - self._at if self._ends else 0

    def rest(self, views_max: int) -> list[memoryview]:
        """Return the next ranges, the first one without what is behind it."""
        index = bisect_right(self._ends, self._at)
        views = self._views[index : index + views_max]
        if views and (begun := len(views[0]) - (self._ends[index] - self._at)):
            views[0] = views[0][begun:]
        return views

    def advance(self, length_bytes: int) -> None:
        """Note that so many bytes more were worked off."""
        self._at += length_bytes


def filler(part: memoryview, length_bytes: int) -> list[memoryview]:
    """Return so many bytes, made of one part again and again."""
    whole, rest = divmod(length_bytes, len(part))
    return [*[part] * whole, *([part[:rest]] if rest else [])]
