"""Makes the digests that a pool's pages lack, beside the loop that owns the pool.

A page is hashed at the speed of memory, some five gigabytes a second: a long prompt takes seconds, and the loop has
twenty milliseconds. So a few pages are hashed at once, and more of them on a thread, slice by slice. The pages' lender
is asked again after each slice: what was written meanwhile has another generation, and keeps no digest (P1).
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvbus.grants import Grant
from kvbus.ledger.types import LeaseView
from kvbus.pool.digests import NONE, DigestMode, digest_of
from kvbus.pool.memory import PoolMemory

AT_ONCE_BYTES = 4 << 20
"""Hashed on the loop itself: 0.8 ms of memory that no cache holds, less than the thread costs where cores are few."""
SLICE_BYTES = 4 << 20
"""Hashed by one call on the thread: some 0.8 ms. Pages of up to 64 KiB are hashed without giving up the interpreter, so
the loop gets its turn between two calls: on two busy cores 99 of 100 of its ticks came up to 14 ms late with 16 MiB,
and up to 10 ms with 4 MiB. A grant waits for one call at most behind pages that nobody waits for."""


def keep_granted(memory: PoolMemory, view: LeaseView | None, grant: Grant) -> None:
    """Keep a grant's digests with the pages that its content goes to, before any of it has come.

    They are kept for the generations that the pages have once they are sealed: where one does not arrive, that
    generation never comes, and its digest is nothing.
    """
    digests = grant.page_digests()
    if view is not None and digests:
        pages, counters = view.pages[: len(digests)], view.counters[: len(digests)]
        memory.digests.keep(pages, [counter + 1 for counter in counters], digests)


class Digester:
    """One pool's maker of digests; without digests turned on it has nothing to do, and starts no thread."""

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory
        self._digests = memory.digests
        self._thread: ThreadPoolExecutor | None = None
        self._unmade: asyncio.Task[None] | None = None
        self._slice_pages = max(1, SLICE_BYTES // memory.layout.page_bytes)
        if self._digests.mode is DigestMode.ALWAYS:
            self._digests.follow_sealing(self._make_unmade)

    def __repr__(self) -> str:
        return f"<Digester {self._digests!r} busy={self._unmade is not None}>"

    def ready(self, pages: Sequence[int]) -> bool:
        """Whether a grant of these pages needs nothing more; hashes them at once where they are few."""
        if self._digests.mode is DigestMode.OFF:
            return True
        missing = self._digests.missing(pages)
        if len(missing) * self._memory.layout.page_bytes > AT_ONCE_BYTES:
            return False
        counters = self._memory.generations.counters(missing)
        self._digests.take_over(missing, counters, self._hashes(missing))
        return True

    async def make(self, pages: Sequence[int]) -> None:
        """Make the digests that these pages lack; the caller has them pinned, or does not mind if some stay without."""
        if self.ready(pages):
            return
        loop, step = asyncio.get_running_loop(), self._slice_pages
        for first in range(0, len(pages), step):
            missing = self._digests.missing(pages[first : first + step])
            if missing:
                counters = self._memory.generations.counters(missing)
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvbus-digests")
                self._digests.take_over(
                    missing, counters, await loop.run_in_executor(self._thread, self._hashes, missing)
                )

    def column(self, view: LeaseView) -> tuple[int, ...] | None:
        """Return a lease's digests for its grant, None where none are made; ValueError where one is missing."""
        if self._digests.mode is DigestMode.OFF:
            return None
        digests = self._digests.of(view.pages)
        if NONE in digests:
            raise ValueError(f"{digests.count(NONE)} of its pages were stored anew meanwhile, undigested: ask again")
        return digests

    async def close(self) -> None:
        """End what is being made; bounded by one slice."""
        if self._unmade is not None:
            self._unmade.cancel()
            await asyncio.gather(self._unmade, return_exceptions=True)
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _make_unmade(self) -> None:
        """Hash what was sealed without a digest, one task for all of it."""
        if self._unmade is None or self._unmade.done():
            self._unmade = asyncio.get_running_loop().create_task(self._make_all())

    async def _make_all(self) -> None:
        while pages := self._digests.take_unmade():  # all of them: taken a few at a time they would all be made at once
            await self.make(pages)

    def _hashes(self, pages: Sequence[int]) -> list[int]:
        return [digest_of(self._memory.page_bytes(page)) for page in pages]
