"""What is moved: page sizes and counts, and which pages of the source go to which pages of the destination."""

import random
from dataclasses import dataclass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE_SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB)
COUNTS = (1, 64, 512, 2048)
MOVED_BYTES_MAX = GIB
QUICK_SIZES, QUICK_COUNTS = (16 * KIB, 64 * KIB, 2 * MIB), (1, 64, 512)
QUICK_MOVED_BYTES_MAX = 256 * MIB
CONTIGUOUS_PAGE_BYTES = 2 * MIB
SPARE = 4
"""A pool has a quarter more pages than the largest case moves, so that the pages lie scattered in it."""
SPARE_PAGES_MIN = 64
SOURCE_SEED, LOCAL_SEED = 1, 2


@dataclass(frozen=True, slots=True)
class Case:
    """So many pages of one size; `contiguous`: in one piece on both sides, as no real cache lies."""

    page_bytes: int
    count: int
    contiguous: bool = False

    @property
    def length_bytes(self) -> int:
        """How much one transfer moves."""
        return self.page_bytes * self.count

    @property
    def label(self) -> str:
        """The case as a table names it."""
        if self.contiguous:
            return f"{size_text(self.length_bytes)} contiguous"
        return f"{self.count} x {size_text(self.page_bytes)}"


def size_text(length_bytes: int) -> str:
    """Return a size in the largest unit that divides it."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if length_bytes % unit == 0:
            return f"{length_bytes // unit} {name}"
    return f"{length_bytes} B"


def grid(sizes: tuple[int, ...], counts: tuple[int, ...], moved_bytes_max: int) -> list[list[Case]]:
    """Return the scattered cases, one list for each page size: those share their pools."""
    return [[Case(size, count) for count in counts if size * count <= moved_bytes_max] for size in sizes]


def pool_pages(cases: list[Case]) -> int:
    """Return how many pages the pools of these cases have on either side; one is kept for the pool's own prompt."""
    most = max(case.count for case in cases)
    return most + 1 + (0 if cases[0].contiguous else max(most // SPARE, SPARE_PAGES_MIN))


def source_order(pages: int, *, contiguous: bool) -> list[int]:
    """Return which page of the source holds the n-th name: the same permutation in every process."""
    order = list(range(pages))
    if not contiguous:
        random.Random(SOURCE_SEED).shuffle(order)
    return order


def local_pages(pages: int, count: int, *, contiguous: bool) -> list[int]:
    """Return which pages of the destination are free to be filled, ascending, as its allocator hands them out."""
    if contiguous:
        return list(range(count))
    return sorted(random.Random(LOCAL_SEED).sample(range(pages), count))
