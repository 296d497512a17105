"""The bytes of a pool's pages as plain views: of so few bytes, arrays cost more than whatever is made of them."""

from collections.abc import Iterator, Sequence

from kvbus.pool.memory import PoolMemory

PAGE_BYTES = 32
"""A page name twice: see `truth.content`."""


def views(memory: PoolMemory, pages: Sequence[int]) -> Iterator[memoryview]:
    """Yield the bytes of these pages, writable; whoever kept one would keep the pool from being unmapped."""
    whole, first, stride = memory.whole.data, memory.pages_offset, memory.page_stride
    for page in pages:
        if not 0 <= page < memory.page_count:
            raise IndexError(f"page {page} of a pool of {memory.page_count}")
        at = first + stride * page
        yield whole[at : at + PAGE_BYTES]
