"""A pool as a socket sees it: where its pages are, and its generation records.

The pool's descriptor is mapped once more here, for reading only where it is served, and stays mapped with its owner.
The file is sealed against shrinking, so no access through this mapping can fail.
"""

import mmap

import numpy as np
from numpy.typing import NDArray

from kvbus.dataplane.socket_calls import Places
from kvbus.pool.generations import RECORD_BYTES
from kvbus.pool.memory import PoolMemory

WORDS = RECORD_BYTES // 8

Pages = NDArray[np.int64]
Column = NDArray[np.uint64]


class PoolBytes:
    """The bytes of one pool, mapped for sockets."""

    def __init__(self, memory: PoolMemory, *, writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mapping = mmap.mmap(
            memory.fd, memory.length_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=access
        )
        whole = np.frombuffer(self._mapping, dtype=np.uint8)  # while it lives, the mapping cannot be closed
        first = memory.generations_offset
        table = whole[first : first + RECORD_BYTES * memory.page_count].view(np.uint64)
        self._records = table.reshape(memory.page_count, WORDS)
        self.page_count = memory.page_count
        self.page_bytes = memory.layout.page_bytes
        self._stride = memory.page_stride
        self._address = int(whole[memory.pages_offset :].ctypes.data)
        self._spare = np.zeros(self.page_bytes, dtype=np.uint8)
        self.spare = int(self._spare.ctypes.data)
        """Where a page of nobody's is: zeros to send, or where bytes land that nobody waits for, of all connections.

        It costs memory only once bytes land in it.
        """

    def places(self, pages: Pages) -> Places:
        """Return the pages' addresses; IndexError for a page outside the pool: the kernel would take any address."""
        if np.count_nonzero((pages < 0) | (pages >= self.page_count)):
            raise IndexError(f"a page outside the pool of {self.page_count}")
        return (self._address + self._stride * pages).astype(np.uint64)

    def spare_places(self, count: int) -> Places:
        """Return the spare page's address so many times."""
        return np.full(count, self.spare, dtype=np.uint64)

    def records(self, pages: Pages) -> Column:
        """Return a copy of the pages' generation records as they are now, one row each."""
        return self._records.take(pages, axis=0)
