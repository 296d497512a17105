"""The pool's lender: look-up, pin and generation in one step, and pages that come back only on evidence (P9).

One thread owns a lender, its allocator, its index and its generations; no method waits or calls anybody back, so each
is one step to everybody else. The order inside a step is what keeps the rules:

- lending for reading: find, pin, note the generation; nothing can evict in between (P9);
- lending for writing: take the pages out of the index, raise their generations, and only then make the view (P1);
- taking back: seal, then name (P1: only sealed pages are found), insert if absent (P9), then pin or leave to eviction;
- refusing: count first, change afterwards, so that a refused lease has changed nothing (contract 13). What peers hold,
  with what is quarantined, stays under a cap that leaves the engine its longest prompt (P26).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.types import Direction, LeaseFailure, LeaseView
from kvbus.pool.allocator import PageAllocator, PageState, PageStatistics
from kvbus.pool.audit import check_leases
from kvbus.pool.fences import Fences
from kvbus.pool.index import ReuseIndex
from kvbus.pool.lease import PoolLease
from kvbus.pool.memory import PoolMemory
from kvbus.pool.pins import PinSet
from kvbus.pool.refusals import no_room, not_whole, over_cap, require_names, require_ordinals, require_pages


@dataclass(frozen=True, slots=True)
class LenderStatistics:
    """What a lender has out: leases that were not released, and pages by state."""

    pages: PageStatistics
    lent_cap_pages: int
    reads: int
    writes: int
    failed: int
    unmarked: int
    pin_sets: int
    refusals: int


class PoolLender:
    """Lends the pages of one pool of one rank; `lent_cap_pages` is what peers and quarantine may take up together.

    What is lent `for_peer` counts toward the cap and is refused beyond it; what the engine itself asks for does not,
    since the rest of the pool is there for that. Nothing here is timed, and nothing is freed because somebody went
    away: whoever holds a lease releases it on evidence.
    """

    def __init__(
        self,
        memory: PoolMemory,
        allocator: PageAllocator,
        index: ReuseIndex,
        *,
        name: str,
        rank: int,
        lent_cap_pages: int,
    ) -> None:
        self.name: Final = name
        """The lender's name, as facts carry it."""
        self.rank: Final = rank
        """The rank whose pages this lender owns."""
        self.memory: Final = memory
        """The pool that the pages are in."""
        self._allocator = allocator
        self._index = index
        self._fences = Fences(allocator, index, memory.generations)
        self._lent_cap_pages = lent_cap_pages
        self._leases: dict[int, PoolLease] = {}
        self._unmarked: dict[int, PoolLease] = {}
        self._pin_sets: dict[int, PinSet] = {}
        self._changed: dict[int, None] = {}
        self._last_id = 0
        self._refusals = 0

    def __repr__(self) -> str:
        pages = self._allocator.statistics()
        return (
            f"<PoolLender {self.name} rank={self.rank} leases={len(self._leases)} free={pages.free} "
            f"cached={pages.cached} claimed={pages.claimed}/{self._lent_cap_pages}>"
        )

    # --- lending ---

    def lend_read(
        self, names: Sequence[bytes], first_ordinal: int = 0, *, whole: bool = False, for_peer: bool = True
    ) -> PoolLease:
        """Lend the longest prefix of the names that is held; row n has ordinal `first_ordinal` + n.

        What is missing is a shorter view, down to none: a miss is no failure (contract 30). With `whole` anything less
        than all names is refused, and so is what would pass the cap.
        """
        require_names(names)
        require_ordinals((first_ordinal,))
        pages = self._index.longest_prefix(names)
        failure = self._read_failure(len(names), pages, whole=whole, for_peer=for_peer)
        if failure:
            return self._enter(Direction.READ, failure, first_ordinal, for_peer=for_peer)
        self._allocator.pin(pages, for_peer=for_peer)
        ordinals = range(first_ordinal, first_ordinal + len(pages))
        view = self._view(ordinals, names[: len(pages)], pages, self.memory.generations.counters(pages))
        return self._enter(Direction.READ, view, first_ordinal, for_peer=for_peer)

    def lend_write(
        self,
        names: Sequence[bytes] | None,
        ordinals: Sequence[int],
        *,
        pins: PinSet | None = None,
        prompt_blocks: int = 0,
        for_peer: bool = True,
        salt: str | None = None,
    ) -> PoolLease:
        """Lend one page for each ordinal (ascending) to be filled with the content that its name means.

        Room is made by evicting what was used least recently. `names` None lends unnamed rows: `PoolLease.name_rows`
        names them before they are marked. `pins` pins the content from the moment of the release; `prompt_blocks` says
        how far the prompt is held once all rows arrived, if blocks after the last ordinal are. `salt` is that of the
        names; without it the pages can never be fenced, nor are those taken that a fence binds (P5). ValueError for
        more rows than the pool has pages (contract 16).
        """
        require_ordinals(ordinals)
        if names is not None:
            require_names(names)
        if names is not None and len(names) != len(ordinals):
            raise ValueError(f"{len(names)} names for {len(ordinals)} ordinals: send one for each row")
        if len(ordinals) > self._allocator.page_count:
            raise ValueError(f"{len(ordinals)} rows asked for, the pool has {self._allocator.page_count} pages")
        if pins is not None and pins.dropped:
            raise ValueError(f"the pins of the lease were dropped already: {pins!r}")
        first = ordinals[0] if ordinals else prompt_blocks
        failure = self.refusal(len(ordinals), for_peer=for_peer, salt=salt)
        if failure:
            return self._enter(Direction.WRITE, failure, first, for_peer=for_peer)
        first_pages, barred = self._fences.first(salt), self._fences.barred(salt)
        pages, evicted = self._allocator.take(len(ordinals), for_peer=for_peer, first=first_pages, barred=barred)
        for page in evicted:
            self._index.remove(page)
        self._fences.note(pages, salt)
        counters = self.memory.generations.raise_pages(pages)
        view = self._view(ordinals, names or (b"",) * len(ordinals), pages, counters)
        return self._enter(Direction.WRITE, view, first, prompt_blocks=prompt_blocks, pins=pins, for_peer=for_peer)

    def refusal(self, pages: int, *, for_peer: bool = True, salt: str | None = None) -> LeaseFailure | None:
        """Return why a write lease on so many pages would be refused now, or None; changes nothing."""
        fresh = max(0, pages - len(self._fences.first(salt)))
        if for_peer and fresh and self._allocator.claimed + fresh > self._lent_cap_pages:
            return over_cap(fresh, self._lent_cap_pages, self._allocator.statistics())
        if pages > (room := self.room(salt)):
            return no_room(pages, room, self._allocator.statistics())
        return None

    def room(self, salt: str | None = None) -> int:
        """Return how many pages content of this salt could take now."""
        return self._allocator.available - len(self._fences.barred(salt))

    def progress(self) -> Sequence[int]:
        """Return the ids of the leases made since the last call: in place, each is ready or failed from the start."""
        if not self._changed:  # asked in each pass of each round
            return ()
        changed = tuple(self._changed)
        self._changed.clear()
        return changed

    # --- what is held ---

    def pin_set(self, *, for_peer: bool = True) -> PinSet:
        """Return a new, empty pin set; whoever asks for it drops it."""
        pins = PinSet(self, self._next_id(), for_peer=for_peer)
        self._pin_sets[pins.set_id] = pins
        return pins

    def held(self, names: Sequence[bytes]) -> list[bool]:
        """Return, name by name, whether its content is here now; nothing is pinned by asking."""
        return [page is not None for page in self._index.match(names)]

    def evict(self, names: Sequence[bytes]) -> int:
        """Forget the named content that nobody holds, and return how many pages that freed; lent pages stay."""
        freed = 0
        for page in self._index.match(names):
            if page is not None and self._allocator.evict(page):
                self._index.remove(page)
                freed += 1
        return freed

    def forget_names(self) -> int:
        """Lend nothing by the names of now any more, and return how many those were (contract 24).

        Called for when the same names will mean other bytes. Who reads goes on; what open writes bring is no content.
        """
        pages = sorted(self._index.pages())
        for page in pages:
            self._index.remove(page)
        self._allocator.forget(pages)
        for lease in (*self._leases.values(), *self._unmarked.values()):
            lease.forget()
        return len(pages)

    def lift(self, lease_id: int) -> bool:
        """The reader of a fenced lease reads no more, on evidence: bind its pages no longer; False if none is."""
        return self._fences.lift(lease_id)

    def quarantine(self, pages: Sequence[int]) -> int:
        """Take free or cached pages out of use, and return how many were not yet; leases on them run on.

        Pages that are being written belong to their lease: keep that lease, or release it unmarked.
        """
        require_pages(pages, self._allocator.page_count)
        for page in pages:
            if self._allocator.state(page) is PageState.WRITING:
                raise ValueError(f"page {page} is lent for writing: keep the lease instead")
        fresh = [page for page in dict.fromkeys(pages) if self._allocator.state(page) is not PageState.QUARANTINED]
        for page in fresh:
            if self._allocator.state(page) is PageState.CACHED:
                self._index.remove(page)
        self._allocator.quarantine(fresh, for_peer=False)
        return len(fresh)

    def readmit(self, pages: Sequence[int]) -> None:
        """Make quarantined pages free, on evidence that nobody accesses them; ValueError where that cannot be.

        Pages of a lease that was released unmarked come back by marking that lease.
        """
        require_pages(pages, self._allocator.page_count)
        owned = {page for lease in self._unmarked.values() for page in lease.pages}
        for page in pages:
            if self._allocator.state(page) is not PageState.QUARANTINED:
                raise ValueError(f"page {page} is not quarantined")
            if self._allocator.pins(page) or page in owned:
                raise ValueError(f"page {page} is still lent: wait for its release, or mark its lease")
        self._allocator.free(list(dict.fromkeys(pages)), for_peer=False)

    # --- for leases and pin sets ---

    def give_back(self, lease: PoolLease) -> None:
        """Take the pages of a lease that is being released; only `PoolLease.release` calls this."""
        del self._leases[lease.lease_id]
        self._changed.pop(lease.lease_id, None)
        if lease.failure:
            return
        if lease.direction is Direction.READ:
            self._allocator.unpin(lease.pages[::-1], for_peer=lease.for_peer)  # as in _commit: the end goes first
        elif not lease.viewed or not lease.pages:
            self._allocator.free(lease.pages[::-1], for_peer=lease.for_peer)
        elif lease.arrived is None:
            self._unmarked[lease.lease_id] = lease
            self._allocator.quarantine(lease.pages, for_peer=lease.for_peer)
        else:
            self._commit(lease)

    def raise_fence(self, lease: PoolLease) -> LeaseFailure | None:
        """Fence a read lease's pages; only `PoolLease.fence` calls this."""
        return self._fences.raise_for(lease)

    def resolve(self, lease: PoolLease) -> None:
        """Take the pages of a lease marked after its release out of quarantine; only `mark_arrived` calls this."""
        if self._unmarked.pop(lease.lease_id, None) is not None:  # a lease without rows left nothing behind
            self._commit(lease)

    def pages_held(self, names: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest prefix of the names that is held; pins nothing by itself."""
        require_names(names)
        return self._index.longest_prefix(names)

    def add_pins(self, pages: Sequence[int], *, for_peer: bool) -> None:
        """Add one pin to each page; only pin sets call this."""
        self._allocator.pin(pages, for_peer=for_peer)

    def drop_pins(self, pins: PinSet) -> None:
        """Take back every pin of a set; only `PinSet.drop` calls this."""
        del self._pin_sets[pins.set_id]
        self._allocator.unpin(pins.pages[::-1], for_peer=pins.for_peer)

    # --- seen from outside ---

    def statistics(self) -> LenderStatistics:
        """Return the counts of this moment; O(leases)."""
        lent = [lease for lease in self._leases.values() if not lease.failure]
        reads = sum(1 for lease in lent if lease.direction is Direction.READ)
        return LenderStatistics(
            pages=self._allocator.statistics(),
            lent_cap_pages=self._lent_cap_pages,
            reads=reads,
            writes=len(lent) - reads,
            failed=len(self._leases) - len(lent),
            unmarked=len(self._unmarked),
            pin_sets=len(self._pin_sets),
            refusals=self._refusals,
        )

    def check(self) -> None:
        """Raise LedgerContradictionError where any promise of pool and lender is broken; O(pages)."""
        self._allocator.check()
        self._index.check()
        self.memory.generations.check()
        if self._index.pages() != self._allocator.pages_in(PageState.CACHED):
            raise LedgerContradictionError("named pages and cached pages differ", names=len(self._index))
        check_leases(
            self._allocator,
            self.memory.generations,
            leases=list(self._leases.values()),
            unmarked=list(self._unmarked.values()),
            pin_sets=list(self._pin_sets.values()),
        )

    # --- inside a step ---

    def _commit(self, lease: PoolLease) -> None:
        index, counts = self._index, not lease.forgotten
        content, spare = dict[int, bytes](), list[int]()
        # Last row first: the prompt's end is evicted before its beginning, and free pages are handed out ascending.
        rows = zip(lease.pages[::-1], lease.names[::-1], (lease.arrived or ())[::-1], strict=True)
        for page, name, whole in rows:
            if whole and name and counts and name not in index:
                content[page] = name
            else:
                spare.append(page)
        sealed = tuple(content)
        self.memory.generations.seal_pages(sealed)
        self.memory.digests.sealed(sealed)
        for page, name in content.items():
            index.insert(name, page)
        self._allocator.cache(sealed, for_peer=lease.for_peer)
        if spare:
            self._allocator.free(spare, for_peer=lease.for_peer)
        if lease.pins is not None and not lease.forgotten:
            arrived = [name for name, whole in zip(lease.names, lease.arrived or (), strict=True) if whole]
            lease.pins.add([page for page in index.match(arrived) if page is not None])

    def _read_failure(self, asked: int, pages: list[int], *, whole: bool, for_peer: bool) -> LeaseFailure | None:
        if whole and len(pages) < asked:
            return not_whole(asked, len(pages))
        fresh = self._allocator.unclaimed(pages) if for_peer else 0
        if for_peer and fresh and self._allocator.claimed + fresh > self._lent_cap_pages:
            return over_cap(fresh, self._lent_cap_pages, self._allocator.statistics())
        return None

    def _enter(
        self,
        direction: Direction,
        granted: LeaseView | LeaseFailure,
        first_ordinal: int,
        *,
        for_peer: bool,
        prompt_blocks: int = 0,
        pins: PinSet | None = None,
    ) -> PoolLease:
        lease = PoolLease(
            self,
            self._next_id(),
            direction,
            granted,
            first_ordinal=first_ordinal,
            prompt_blocks=prompt_blocks,
            pins=pins,
            for_peer=for_peer,
        )
        self._leases[lease.lease_id] = lease
        self._changed[lease.lease_id] = None
        self._refusals += lease.failure is not None
        return lease

    def _view(
        self, ordinals: Sequence[int], names: Sequence[bytes], pages: Sequence[int], counters: tuple[int, ...]
    ) -> LeaseView:
        return LeaseView(
            pool=self.memory.fingerprint,
            rank=self.rank,
            epoch=self.memory.epoch,
            ordinals=tuple(ordinals),
            names=tuple(names),
            pages=tuple(pages),
            counters=counters,
        )

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id


def lender_over(memory: PoolMemory, *, name: str, engine_reserve_pages: int) -> PoolLender:
    """Return a lender over a fresh pool that leaves the engine `engine_reserve_pages`: its longest prompt (P26)."""
    if not 0 <= engine_reserve_pages <= memory.page_count:
        raise ValueError(f"reserve of {engine_reserve_pages} pages, expected 0…{memory.page_count}")
    return PoolLender(
        memory=memory,
        allocator=PageAllocator(memory.page_count),
        index=ReuseIndex(),
        name=name,
        rank=memory.layout.rank,
        lent_cap_pages=memory.page_count - engine_reserve_pages,
    )
