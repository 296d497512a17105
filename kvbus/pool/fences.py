"""Fences: how pages come back whose reader will never speak again, and what may be written into them then (P5).

A fenced reader may still read. Two things keep that harmless:

- it cannot deliver: the pages that it alone held lose their name and have their generations raised before they become
  free, so its look after reading finds another generation than its grant's (P2). A page that others hold too stays
  theirs, whole and under its name; the write lease that takes it one day raises it (P1);
- what lands in its memory is of the salt that it was lent: until it is known to be gone, the pages take content of that
  salt only. Zeroing them would not do: it clears what they held, and the reader would still fetch what they hold next.

Bound pages count as taken up (P26), since an engine's longest prompt of another salt cannot use them.
"""

from collections.abc import Sequence

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.facts import FailureClass
from kvbus.ledger.types import Direction, LeaseFailure
from kvbus.pool.allocator import PageAllocator, PageState
from kvbus.pool.generations import Generations
from kvbus.pool.index import ReuseIndex
from kvbus.pool.lease import PoolLease


class Fences:
    """The salt of each page's content, and the pages that fenced readers bind to theirs; one lender's."""

    def __init__(self, allocator: PageAllocator, index: ReuseIndex, generations: Generations) -> None:
        self._allocator = allocator
        self._index = index
        self._generations = generations
        self._salts: dict[int, str] = {}
        self._pages: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def __repr__(self) -> str:
        return f"<Fences readers={len(self._pages)} pages={len(self._bound())}>"

    def note(self, pages: Sequence[int], salt: str | None) -> None:
        """Note of which salt the next content of these pages is; None: nobody said."""
        for page in pages:
            if salt is None:
                self._salts.pop(page, None)
            else:
                self._salts[page] = salt

    def raise_for(self, lease: PoolLease) -> LeaseFailure | None:
        """Fence the pages of a read lease, or return why that cannot be and change nothing; its release comes next."""
        if lease.direction is not Direction.READ or lease.released or lease.failure or lease.fenced:
            raise LedgerContradictionError("only a read lease that is out can be fenced, once", lease=lease.lease_id)
        unknown = sum(1 for page in lease.pages if page not in self._salts)
        if unknown:
            text = f"nobody said of which salt the content of {unknown} of its pages is, so nothing may follow it there"
            return LeaseFailure(FailureClass.LEASE_REFUSED, text)
        allocator = self._allocator
        alone = [page for page in lease.pages if allocator.pins(page) == 1]
        named = [page for page in alone if allocator.state(page) is PageState.CACHED]
        for page in named:
            self._index.remove(page)
        allocator.forget(named)
        self._generations.raise_pages(alone)
        allocator.bind(lease.pages)
        self._pages[lease.lease_id] = lease.pages
        return None

    def lift(self, lease_id: int) -> bool:
        """The fenced reader of a lease reads no more, on evidence: its pages are as any others; False if unknown."""
        pages = self._pages.pop(lease_id, None)
        if pages is None:
            return False
        self._allocator.unbind(pages)
        return True

    def first(self, salt: str | None) -> list[int]:
        """Return the pages that content of this salt takes before others: bound to it, and free or idle."""
        if not self._pages or salt is None:
            return []
        return self._allocator.reachable(page for page in self._bound() if self._salts[page] == salt)

    def barred(self, salt: str | None) -> list[int]:
        """Return the pages that content of this salt may not take: bound to another one, and free or idle."""
        if not self._pages:
            return []
        bound = self._bound()
        return self._allocator.reachable(page for page in bound if salt is None or self._salts[page] != salt)

    def _bound(self) -> dict[int, None]:
        return dict.fromkeys(page for pages in self._pages.values() for page in pages)
