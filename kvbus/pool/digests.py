"""Digests: 64 bits over a page's bytes, by which readers notice what no generation shows.

A generation says that nobody wrote the page who had the right to. It says nothing of a stray write, a memory that lost
a bit, or a transport that brought other bytes. A digest is made of sealed pages, travels in the grant under the
lender's signature, and is compared where the bytes arrive and where an engine takes them.

A digest belongs to one content: it is kept with the counter of that content's generation, and is nothing once the page
has another one. So a page that is written anew has no digest, without anybody taking the old one back; and a digest
may be kept for bytes that are still on their way, under the counter that their seal will give.

XXH3 is no protection against somebody who means harm: it is for accidents. Two contents of one page have the same
digest once in 2**64 times; 128 bits are hashed as fast, and would leave a grant room for 6,500 pages, not 9,000.
"""

import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvbus.pool.generations import Generations

NONE: Final = 0
"""In place of a digest that nobody has made; no page has it."""


class DigestMode(StrEnum):
    """When digests are made, and whether they are compared."""

    OFF = "off"
    """Never: none is in a grant, and none that comes in one is looked at."""
    GRANT = "grant"
    """When a page is lent to a peer for the first time. Those that come in a grant are compared and kept."""
    ALWAYS = "always"
    """When a page is sealed, whoever wrote it; otherwise as `grant`."""


def digest_of(content: NDArray[np.uint8]) -> int:
    """Return the digest of a page's bytes; never NONE."""
    return xxhash.xxh3_64_intdigest(content.data) or 1


class PageDigests:
    """The digests of one pool's pages, as the worker that lends them knows them.

    The thread that owns the pool owns them too; only `note_differing` may be called from any. `mode` is chosen once,
    before the first page is lent: `turn_on`.
    """

    def __init__(self, generations: Generations, page_count: int) -> None:
        self.mode = DigestMode.OFF
        self.made = 0
        """Digests that were made here."""
        self.spoiled = 0
        """Pages whose bytes were found changed since they were sealed here."""
        self.reported = 0
        """Pages of ours that readers found with other bytes than their digests."""
        self.rewritten = 0
        """Pages of ours that readers found rewritten while they read them."""
        self.dropped = 0
        """Reported pages that were taken out of the reuse index, since nobody could say which side was at fault."""
        self._generations = generations
        self._page_count = page_count
        self._digests = array("Q")
        self._counters = array("Q")
        self._unmade: dict[int, None] = {}
        self._on_unmade: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._differing = 0

    def __repr__(self) -> str:
        return f"<PageDigests {self.mode} made={self.made} differing={self._differing} spoiled={self.spoiled}>"

    @property
    def differing(self) -> int:
        """How many pages arrived here with other bytes than their grants promised."""
        return self._differing

    def turn_on(self, mode: DigestMode) -> None:
        """Keep digests from now on; 16 bytes a page."""
        self.mode = mode
        if mode is not DigestMode.OFF and not self._digests:
            self._digests = array("Q", bytes(8 * self._page_count))
            self._counters = array("Q", bytes(8 * self._page_count))

    def keep(self, pages: Sequence[int], counters: Sequence[int], digests: Sequence[int]) -> None:
        """Keep what is said of pages in these generations, now or once they are sealed."""
        if self.mode is DigestMode.OFF:
            return
        for page, counter, digest in zip(pages, counters, digests, strict=True):
            self._digests[page] = digest
            self._counters[page] = counter

    def of(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Return the digests of what the pages hold now, NONE where there is none."""
        if self.mode is DigestMode.OFF:
            return (NONE,) * len(pages)
        kept, digests = self._counters, self._digests
        now = self._generations.counters(pages)
        return tuple(
            digests[page] if counter and kept[page] == counter else NONE
            for page, counter in zip(pages, now, strict=True)
        )

    def missing(self, pages: Sequence[int]) -> list[int]:
        """Return those of the pages that have no digest."""
        return [page for page, digest in zip(pages, self.of(pages), strict=True) if digest == NONE]

    def take_over(self, pages: Sequence[int], counters: Sequence[int], digests: Sequence[int]) -> None:
        """Keep digests that were made of pages in these generations, unless a page has another one by now.

        Then it may have been written meanwhile, and the digest is of no content.
        """
        now = self._generations.counters(pages)
        same = [row for row, counter in enumerate(counters) if counter == now[row] and counter and counter % 2 == 0]
        self.keep([pages[row] for row in same], [counters[row] for row in same], [digests[row] for row in same])
        self.made += len(same)

    def follow_sealing(self, on_unmade: Callable[[], None]) -> None:
        """Have the one who makes digests hear of sealed pages that have none."""
        self._on_unmade = on_unmade

    def sealed(self, pages: Iterable[int]) -> None:
        """Note pages that hold content from now on; only lenders call this."""
        if self.mode is not DigestMode.ALWAYS or self._on_unmade is None:
            return
        self._unmade.update(dict.fromkeys(self.missing(list(pages))))  # at most one entry a page
        if self._unmade:
            self._on_unmade()

    def take_unmade(self) -> list[int]:
        """Return and forget the sealed pages whose digests are to be made, oldest first."""
        pages, self._unmade = list(self._unmade), {}
        return pages

    def note_differing(self, pages: int) -> None:
        """Count pages that arrived with other bytes than promised; from any thread."""
        with self._lock:
            self._differing += pages
