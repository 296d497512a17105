"""The bytes of a pool's pages, read and written in its mapping: of so few, an array costs more than a copy."""

from collections.abc import Collection, Iterable, Iterator

from kvbus.pool.memory import PoolMemory

HALF_BYTES = 16
"""The length of a page name."""
PAGE_BYTES = 2 * HALF_BYTES
"""A page name twice, so that half a page of another content shows."""


def read(memory: PoolMemory, pages: Collection[int], first: int = 0, length: int = PAGE_BYTES) -> list[bytes]:
    """Return so many bytes of each of these pages, from byte `first` on; IndexError outside the pool."""
    mapping = memory._mapping  # noqa: SLF001 - a view of it would keep the pool from being unmapped
    return [mapping[at : at + length] for at in _places(memory, pages, first)]


def write(memory: PoolMemory, pages: Collection[int], first: int, parts: Iterable[bytes]) -> None:
    """Put one part into each of these pages, from byte `first` on; where there are more of one, the rest is left."""
    mapping = memory._mapping  # noqa: SLF001
    for at, part in zip(_places(memory, pages, first), parts, strict=False):
        mapping[at : at + len(part)] = part


def strange(memory: PoolMemory, pages: Collection[int], names: Iterable[bytes]) -> list[tuple[int, bytes]]:
    """Return the pages that do not hold what their names mean, with those; a page may have two. As with `write`."""
    found = zip(pages, names, read(memory, pages), strict=False)
    return [(page, name) for page, name, there in found if there != name + name]


def _places(memory: PoolMemory, pages: Collection[int], first: int) -> Iterator[int]:
    if min(pages, default=0) < 0:  # which a range would count from its end
        raise IndexError(f"pages {list(pages)} of a pool of {memory.page_count}")
    start, stride = memory.pages_offset + first, memory.page_stride
    places = range(start, start + stride * memory.page_count, stride)
    return map(places.__getitem__, pages)
