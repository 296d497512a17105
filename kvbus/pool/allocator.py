"""Which page is in which state, who pins it, and what goes next when room is needed.

    FREE ──take──▶ WRITING ──cache──▶ CACHED ──evict──▶ FREE
                      │                  ├─forget──▶ FORGOTTEN ──last unpin──▶ FREE
                      └─free──▶ FREE     └─quarantine──▶ QUARANTINED ──free──▶ FREE

A page that is being written, pinned or quarantined is in no list from which room is made, so nothing can take it. Each
step costs O(1) a page. The allocator knows no names and no generations: `kvbus.pool.lender` joins the three in one
step, on the one thread that owns them (P9).
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import compress

from kvbus.errors import LedgerContradictionError


class PageState(IntEnum):
    """Where a page is in its life."""

    FREE = 0
    WRITING = 1
    """Lent for writing: no content yet."""
    CACHED = 2
    """Holds sealed content under a name; evicted only while nobody pins it."""
    QUARANTINED = 3
    """Somebody may still write it, or its bytes are suspect: neither read by name nor used again."""
    FORGOTTEN = 4
    """Lost its name while it is pinned: who reads goes on, nobody finds it, and the last unpin frees it."""


# Plain ints inside: an enum's members cost several times as much to compare.
_FREE, _WRITING, _CACHED, _QUARANTINED, _FORGOTTEN = (int(state) for state in PageState)
_STATES = tuple(PageState)


@dataclass(frozen=True, slots=True)
class PageStatistics:
    """Pages by state; `pinned` and `idle` split the cached ones, `claimed` counts those that peers take up (P26).

    `bound` may only take content of one salt, since a fenced reader may still read them (P5).
    """

    pages: int
    free: int
    writing: int
    cached: int
    quarantined: int
    pinned: int
    idle: int
    claimed: int
    evictions: int
    forgotten: int = 0
    bound: int = 0


class PageAllocator:
    """The states of one pool's pages.

    Pins keep a cached page from eviction; each read lease and each pin set adds one. Claims count what the engine
    cannot have back for its own prompts: a page has one for each peer's write lease or pin on it, one while it is
    quarantined, and one for each fenced reader that binds it to one salt; `claimed` is the number of pages that have
    any.
    """

    def __init__(self, page_count: int) -> None:
        self._states = bytearray(page_count)
        self._pins = [0] * page_count
        self._claims = [0] * page_count
        # Used as a stack with removal from the middle; popped from the end, so a fresh pool hands out 0, 1, 2…
        self._free = dict.fromkeys(range(page_count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and unpinned, least recently used first
        self._counts = [page_count, 0, 0, 0, 0]
        self._bound: dict[int, int] = {}  # page → how many fenced readers may still read it
        self._claimed = 0
        self._evictions = 0

    def __repr__(self) -> str:
        free, writing, cached, quarantined, _ = self._counts
        return f"<PageAllocator free={free} writing={writing} cached={cached} quarantined={quarantined}>"

    @property
    def page_count(self) -> int:
        """How many pages there are."""
        return len(self._states)

    @property
    def available(self) -> int:
        """How many pages could be taken now: the free ones, and those that may be evicted."""
        return len(self._free) + len(self._idle)

    @property
    def claimed(self) -> int:
        """How many pages peers and quarantine take up (P26)."""
        return self._claimed

    def state(self, page: int) -> PageState:
        """Return a page's state."""
        return _STATES[self._states[page]]

    def pins(self, page: int) -> int:
        """Return how many read leases and pin sets hold a page."""
        return self._pins[page]

    def pinned(self) -> dict[int, int]:
        """Return the pages that are pinned, each with its pins; O(pages), for checks."""
        return dict(compress(enumerate(self._pins), self._pins))

    def unclaimed(self, pages: Iterable[int]) -> int:
        """Return how many of the pages no peer takes up yet."""
        claims = self._claims
        return sum(1 for page in pages if not claims[page])

    def pages_in(self, wanted: PageState) -> set[int]:
        """Return the pages in a state; O(pages), for checks and tests."""
        number = int(wanted)
        return {page for page, state in enumerate(self._states) if state == number}

    def reachable(self, pages: Iterable[int]) -> list[int]:
        """Return those of the pages that could be taken now."""
        return [page for page in pages if page in self._free or page in self._idle]

    def take(
        self, count: int, *, for_peer: bool, first: Sequence[int] = (), barred: Collection[int] = ()
    ) -> tuple[list[int], list[int]]:
        """Return `count` pages now in WRITING, and those among them that were evicted for it, least recent first.

        Pages in `first`, all reachable, go before others, and none in `barred` is taken. The caller asked before how
        many are available: more than that is a contradiction, and changes nothing.
        """
        if count > self.available - len(self.reachable(barred)):
            raise LedgerContradictionError("more pages are taken than are available", count=count, of=self.available)
        taken, evicted = self._chosen(count, first, barred)
        self._counts[_CACHED] -= len(evicted)
        self._counts[_FREE] -= len(taken)
        self._counts[_WRITING] += count
        self._evictions += len(evicted)
        taken = sorted(taken + evicted)  # in ascending order neighbours stay neighbours, and are read as one run
        states = self._states
        for page in taken:
            states[page] = _WRITING
        if for_peer:
            self._claim(taken)
        return taken, evicted

    def cache(self, pages: Sequence[int], *, for_peer: bool) -> None:
        """Move written pages, whose content is now named, to CACHED, unpinned; the last one is used most recently."""
        self._move(pages, (_WRITING, _QUARANTINED), _CACHED, for_peer=for_peer)
        idle = self._idle
        for page in pages:  # an ordered dict's own update takes more than twice as long
            idle[page] = None

    def free(self, pages: Sequence[int], *, for_peer: bool) -> None:
        """Move pages to FREE that are written or quarantined, on evidence that the caller has."""
        for page in pages:
            if self._pins[page]:
                raise LedgerContradictionError("a pinned page is freed", page=page, pins=self._pins[page])
        self._move(pages, (_WRITING, _QUARANTINED), _FREE, for_peer=for_peer)
        self._free.update(dict.fromkeys(pages))

    def forget(self, pages: Sequence[int]) -> None:
        """Move cached pages, whose content has lost its name, to FREE as soon as nobody pins them: some of them now."""
        self._move(pages, (_CACHED,), _FORGOTTEN, for_peer=False)
        for page in pages:
            self._idle.pop(page, None)
        self._free_forgotten([page for page in pages if not self._pins[page]])

    def bind(self, pages: Sequence[int]) -> None:
        """Count pages as taken up until `unbind`: a fenced reader may still read them, once for each such reader."""
        for page in pages:
            self._bound[page] = self._bound.get(page, 0) + 1
        self._claim(pages)

    def unbind(self, pages: Sequence[int]) -> None:
        """Take one `bind` of each page back."""
        for page in pages:
            left = self._bound.pop(page) - 1
            if left:
                self._bound[page] = left
        self._unclaim(pages)

    def is_bound(self, page: int) -> bool:
        """Return whether a fenced reader may still read a page."""
        return page in self._bound

    def evict(self, page: int) -> bool:
        """Move a cached page to FREE unless it is pinned; return whether it moved."""
        if self._pins[page]:
            return False
        self._move((page,), (_CACHED,), _FREE, for_peer=False)
        del self._idle[page]
        self._free[page] = None
        self._evictions += 1
        return True

    def quarantine(self, pages: Sequence[int], *, for_peer: bool) -> None:
        """Move pages out of use, from any other state; pins on them stay until they are dropped."""
        self._move(pages, (_FREE, _WRITING, _CACHED, _FORGOTTEN), _QUARANTINED, for_peer=for_peer)
        for page in pages:
            self._free.pop(page, None)
            self._idle.pop(page, None)
        self._claim(pages)

    def pin(self, pages: Sequence[int], *, for_peer: bool) -> None:
        """Keep cached pages from eviction until `unpin`."""
        states, pins, idle = self._states, self._pins, self._idle
        for page in pages:
            if states[page] != _CACHED:
                state = self.state(page).name
                raise LedgerContradictionError("a page without content is pinned", page=page, state=state)
            if not pins[page]:
                del idle[page]
            pins[page] += 1
        if for_peer:
            self._claim(pages)

    def unpin(self, pages: Sequence[int], *, for_peer: bool) -> None:
        """Drop one pin of each page; those now unpinned may be evicted again, the last one given as the last."""
        states, pins, idle = self._states, self._pins, self._idle
        for page in pages:
            if not pins[page]:
                raise LedgerContradictionError("a page is unpinned more often than it was pinned", page=page)
            pins[page] -= 1
            if not pins[page] and states[page] == _CACHED:
                idle[page] = None
        if for_peer:
            self._unclaim(pages)
        if self._counts[_FORGOTTEN]:
            self._free_forgotten([page for page in pages if states[page] == _FORGOTTEN and not pins[page]])

    def statistics(self) -> PageStatistics:
        """Return the counts of this moment; O(1)."""
        free, writing, cached, quarantined, forgotten = self._counts
        idle = len(self._idle)
        return PageStatistics(
            pages=self.page_count,
            free=free,
            writing=writing,
            cached=cached,
            quarantined=quarantined,
            pinned=cached - idle,
            idle=idle,
            claimed=self._claimed,
            evictions=self._evictions,
            forgotten=forgotten,
            bound=len(self._bound),
        )

    def check(self) -> None:
        """Raise LedgerContradictionError where lists, states and counts disagree; O(pages)."""
        states, claimed, free, idle = self._states, self._claims, list(self._free), list(self._idle)
        pinned = self.pinned()
        in_state = [states.count(state) for state in range(len(_STATES))]
        pinned_in = bytes(map(states.__getitem__, pinned))
        claims: Sequence[bool] = (
            # As many as there are, and none that is in another state: then those and no others.
            len(free) == in_state[_FREE] and {_FREE}.issuperset(map(states.__getitem__, free)),
            len(idle) == in_state[_CACHED] - pinned_in.count(_CACHED),
            {_CACHED}.issuperset(map(states.__getitem__, idle)) and not any(map(self._pins.__getitem__, idle)),
            {_CACHED, _QUARANTINED, _FORGOTTEN}.issuperset(pinned_in),
            in_state[_FORGOTTEN] == pinned_in.count(_FORGOTTEN),
            self._counts == in_state,
            self._claimed == len(claimed) - claimed.count(0),
            min(claimed, default=0) >= 0,
            min(self._pins, default=0) >= 0,
            all(claimed[page] == self._bound.get(page) for page in filter(claimed.__getitem__, free)),
            all(claimed[page] >= count > 0 for page, count in self._bound.items()),
            all(claimed[page] for page in self.pages_in(PageState.QUARANTINED)),
        )
        if not all(claims):
            raise LedgerContradictionError("the pool's page lists disagree", claims=claims, counts=self._counts)

    def _chosen(self, count: int, first: Sequence[int], barred: Collection[int]) -> tuple[list[int], list[int]]:
        """Take pages out of their lists; return those that were free, and those that were idle."""
        if not first and not barred:
            evicted = [self._idle.popitem(last=False)[0] for _ in range(count - len(self._free))]
            return [self._free.popitem()[0] for _ in range(count - len(evicted))], evicted
        passed = {*first, *barred}
        rest = [page for page in (*reversed(self._free), *self._idle) if page not in passed]
        chosen = [*first, *rest][:count]
        evicted = [page for page in chosen if self._idle.pop(page, page) is None]
        return [page for page in chosen if self._free.pop(page, page) is None], evicted

    def _free_forgotten(self, pages: Sequence[int]) -> None:
        self._move(pages, (_FORGOTTEN,), _FREE, for_peer=False)
        self._free.update(dict.fromkeys(pages))

    def _move(self, pages: Sequence[int], before: tuple[int, ...], after: int, *, for_peer: bool) -> None:
        states, counts = self._states, self._counts
        given_up: list[int] = []
        for page in pages:
            state = states[page]
            if state not in before:
                raise LedgerContradictionError(
                    f"a page moves to {PageState(after).name} from a state that does not lead there",
                    page=page,
                    state=PageState(state).name,
                )
            states[page] = after
            counts[state] -= 1
            if state == _QUARANTINED or (for_peer and state == _WRITING):
                given_up.append(page)
        counts[after] += len(pages)
        if given_up:
            self._unclaim(given_up)

    def _claim(self, pages: Sequence[int]) -> None:
        claims = self._claims
        for page in pages:
            self._claimed += not claims[page]
            claims[page] += 1

    def _unclaim(self, pages: Sequence[int]) -> None:
        claims = self._claims
        for page in pages:
            if not claims[page]:
                raise LedgerContradictionError("a peer gives up a page that it did not take up", page=page)
            claims[page] -= 1
            self._claimed -= not claims[page]
