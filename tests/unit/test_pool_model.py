"""The lender against a model of sets: after every step each page is exactly where the model says.

The model is a second, plainer implementation: sets of free, cached, lent and quarantined pages, one list for the order
of eviction, and for each page the byte that fills it. It compares whole sets, so a page lost counts as much as one that
is lent twice.
"""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from kvbus.ledger.types import LeaseView
from kvbus.pool.allocator import PageState
from kvbus.pool.lease import PoolLease
from kvbus.pool.pins import PinSet
from tests.unit.pool_parts import names_of, small_lender

PAGES = 7
RESERVE = 2
BLOCKS = 4
PROMPTS = {prompt: names_of(BLOCKS, prompt) for prompt in (1, 2, 3)}
PROMPT = st.sampled_from(sorted(PROMPTS))
BLOCK_RANGES = st.tuples(st.integers(0, 1), st.integers(1, BLOCKS))  # (first block, count)
MASKS = st.lists(st.booleans(), min_size=BLOCKS, max_size=BLOCKS)


@dataclass(eq=False)
class Lent:
    """What the model knows of one lease."""

    lease: PoolLease
    names: tuple[bytes, ...]
    pages: tuple[int, ...]
    writes: bool
    for_peer: bool
    pins: "Pinned | None" = None
    byte: int = 0
    viewed: bool = False
    arrived: list[bool] | None = None
    counters: tuple[int, ...] = ()


@dataclass(eq=False)
class Pinned:
    """What the model knows of one pin set."""

    pins: PinSet
    for_peer: bool
    pages: list[int] = field(default_factory=list)
    dropped: bool = False


class PoolMachine(RuleBasedStateMachine):
    leases = Bundle("leases")
    pin_sets = Bundle("pin_sets")

    def __init__(self) -> None:
        super().__init__()
        self.lender = small_lender(PAGES, RESERVE)
        self.free = set(range(PAGES))
        self.cached: dict[bytes, int] = {}
        self.order: list[int] = []  # cached and unpinned, the next one to be evicted first
        self.quarantined: set[int] = set()
        self.live: list[Lent] = []
        self.unmarked: list[Lent] = []
        self.sets: list[Pinned] = []
        self.counter = [0] * PAGES
        self.bytes = [0] * PAGES
        self.next_byte = 1

    # --- the model's words ---

    def owners(self) -> Counter[int]:
        reads = [lent.pages for lent in self.live if not lent.writes]
        pins = [held.pages for held in self.sets]
        return Counter(page for pages in reads + pins for page in pages)

    def claimed(self) -> set[int]:
        lent = [lent.pages for lent in self.live if lent.for_peer]
        pins = [held.pages for held in self.sets if held.for_peer]
        return {page for pages in lent + pins for page in pages} | self.quarantined

    def unpinned(self, pages: tuple[int, ...]) -> None:
        owners = self.owners()
        for page in reversed(pages):
            if not owners[page] and page in self.cached.values():
                self.order.append(page)

    def touch(self, page: int) -> None:
        if page in self.order:
            self.order.remove(page)

    def prefix(self, names: tuple[bytes, ...]) -> tuple[int, ...]:
        pages: list[int] = []
        for name in names:
            if name not in self.cached:
                break
            pages.append(self.cached[name])
        return tuple(pages)

    def settle(self, lent: Lent) -> None:
        """The pages of a marked write lease, last first, become content or free."""
        assert lent.arrived is not None
        for page, name, whole in reversed(list(zip(lent.pages, lent.names, lent.arrived, strict=True))):
            if whole and name not in self.cached:
                self.cached[name] = page
                self.order.append(page)
                self.counter[page] += 1
            else:
                self.free.add(page)
        for name, whole in zip(lent.names, lent.arrived, strict=True):
            if whole and lent.pins and not lent.pins.dropped and self.cached[name] not in lent.pins.pages:
                lent.pins.pages.append(self.cached[name])
                self.touch(self.cached[name])

    # --- steps ---

    @initialize(target=leases, prompt=PROMPT)
    def some_content_is_there_and_lent(self, prompt: int) -> Lent:
        self.bring(prompt, (0, BLOCKS), for_peer=False, held=None)
        return self.read(prompt, (0, BLOCKS - 1), for_peer=True)

    @rule(target=leases, prompt=PROMPT, blocks=BLOCK_RANGES, for_peer=st.booleans())
    def lend_read(self, prompt: int, blocks: tuple[int, int], for_peer: bool) -> Lent:  # noqa: FBT001
        return self.read(prompt, blocks, for_peer=for_peer)

    def read(self, prompt: int, blocks: tuple[int, int], *, for_peer: bool) -> Lent:
        first, count = blocks
        names = PROMPTS[prompt][first : first + count]
        pages = self.prefix(names)
        over = len(self.claimed() | set(pages)) > PAGES - RESERVE and not set(pages) <= self.claimed()
        lease = self.lender.lend_read(names, first, for_peer=for_peer)
        assert (lease.failure is not None) == (for_peer and over)
        lent = Lent(lease, names, () if lease.failure else pages, writes=False, for_peer=for_peer)
        self.live.append(lent)
        for page in lent.pages:
            self.touch(page)
        lent.counters = tuple(self.counter[page] for page in lent.pages)
        assert lease.pages == lent.pages
        assert lease.counters == lent.counters
        return lent

    @rule(
        target=leases,
        prompt=PROMPT,
        blocks=BLOCK_RANGES,
        for_peer=st.booleans(),
        held=st.none() | pin_sets,
    )
    def lend_write(self, prompt: int, blocks: tuple[int, int], for_peer: bool, held: Pinned | None) -> Lent:  # noqa: FBT001
        first, count = blocks
        names = PROMPTS[prompt][first : first + count]
        room = len(self.free) + len(self.order)
        over = for_peer and len(self.claimed()) + len(names) > PAGES - RESERVE
        lease = self.lender.lend_write(
            names, range(first, first + len(names)), for_peer=for_peer, pins=held.pins if held else None
        )
        assert (lease.failure is not None) == (over or len(names) > room)
        lent = Lent(lease, names, lease.pages, writes=True, for_peer=for_peer, pins=held)
        self.live.append(lent)
        if lease.failure:
            return lent
        evicted = set(self.order[: max(0, len(names) - len(self.free))])
        assert len(lent.pages) == len(names) == len(set(lent.pages))
        assert set(lent.pages) <= self.free | evicted
        assert evicted <= set(lent.pages)
        self.order = self.order[len(evicted) :]
        self.cached = {name: page for name, page in self.cached.items() if page not in evicted}
        self.free -= set(lent.pages)
        for page in lent.pages:
            self.counter[page] += 1 + self.counter[page] % 2
        lent.counters = tuple(self.counter[page] for page in lent.pages)
        return lent

    @rule(lent=leases)
    def view(self, lent: Lent) -> None:
        view = lent.lease.poll()
        if lent.lease.failure:
            assert view is None
            return
        assert isinstance(view, LeaseView)
        assert (view.pages, view.counters, view.names) == (lent.pages, lent.counters, lent.names[: len(lent.pages)])
        lent.viewed = True
        if lent.writes and not lent.byte:
            lent.byte = self.next_byte
            self.next_byte = self.next_byte % 255 + 1
            for page in lent.pages:
                self.lender.memory.page_bytes(page)[:] = lent.byte
                self.bytes[page] = lent.byte

    @rule(lent=leases, mask=MASKS)
    def mark(self, lent: Lent, mask: list[bool]) -> None:
        if lent.writes and lent.pages and lent.arrived is None:
            self.view(lent)
            lent.arrived = mask[: len(lent.pages)]
            lent.lease.mark_arrived(lent.arrived)

    @rule(lent=consumes(leases))
    def release(self, lent: Lent) -> None:
        lent.lease.release()
        lent.lease.release()
        self.live.remove(lent)
        if not lent.writes:
            self.unpinned(lent.pages)
        elif not lent.viewed:
            self.free |= set(lent.pages)
        elif lent.arrived is None:
            self.quarantined |= set(lent.pages)
            self.unmarked.append(lent)
        else:
            self.settle(lent)

    @rule(prompt=PROMPT, blocks=BLOCK_RANGES, held=st.none() | pin_sets, marked=st.booleans())
    def fetch(self, prompt: int, blocks: tuple[int, int], held: Pinned | None, marked: bool) -> None:  # noqa: FBT001
        self.bring(prompt, blocks, for_peer=True, held=held, marked=marked)

    def bring(
        self, prompt: int, blocks: tuple[int, int], *, for_peer: bool, held: Pinned | None, marked: bool = True
    ) -> None:
        """A whole write: most of a pool's life, and without it little content would come about."""
        lent = self.lend_write(prompt, blocks, for_peer=for_peer, held=held)
        self.view(lent)
        if marked:
            self.mark(lent, [True] * BLOCKS)
        self.release(lent)

    @precondition(lambda self: self.unmarked)
    @rule(mask=MASKS)
    def mark_late(self, mask: list[bool]) -> None:
        lent = self.unmarked.pop(0)
        lent.arrived = mask[: len(lent.pages)]
        lent.lease.mark_arrived(lent.arrived)
        self.quarantined -= set(lent.pages)
        self.settle(lent)

    @precondition(lambda self: self.cached)
    @rule(prompt=PROMPT)
    def evict(self, prompt: int) -> None:
        names = PROMPTS[prompt]
        gone = set(self.order) & {self.cached[name] for name in names if name in self.cached}
        assert self.lender.evict(names) == len(gone)
        self.cached = {name: page for name, page in self.cached.items() if page not in gone}
        self.order = [page for page in self.order if page not in gone]
        self.free |= gone

    @rule(target=pin_sets, for_peer=st.booleans())
    def new_pin_set(self, for_peer: bool) -> Pinned:  # noqa: FBT001
        held = Pinned(self.lender.pin_set(for_peer=for_peer), for_peer)
        self.sets.append(held)
        return held

    @rule(held=pin_sets, prompt=PROMPT, blocks=BLOCK_RANGES)
    def pin(self, held: Pinned, prompt: int, blocks: tuple[int, int]) -> None:
        names = PROMPTS[prompt][blocks[0] : blocks[0] + blocks[1]]
        pages = self.prefix(names)
        assert held.pins.pin(names) == len(pages)
        for page in pages:
            if page not in held.pages:
                held.pages.append(page)
                self.touch(page)

    @rule(held=consumes(pin_sets))
    def drop(self, held: Pinned) -> None:
        held.pins.drop()
        held.pins.drop()
        held.dropped = True
        self.sets.remove(held)
        pages, held.pages = tuple(held.pages), []
        self.unpinned(pages)

    @precondition(lambda self: self.free or self.cached)
    @rule(data=st.data(), for_good=st.booleans())
    def quarantine(self, data: st.DataObject, for_good: bool) -> None:  # noqa: FBT001
        page = data.draw(st.sampled_from(sorted(self.free | set(self.cached.values()))))
        assert self.lender.quarantine([page]) == 1
        self.free.discard(page)
        self.touch(page)
        self.cached = {name: other for name, other in self.cached.items() if other != page}
        self.quarantined.add(page)
        if not for_good:
            self.readmit()

    def readmit(self) -> None:
        """All that may come back: not what an unmarked lease or a reader still has."""
        owned = {page for lent in self.unmarked for page in lent.pages} | set(self.owners())
        pages = self.quarantined - owned
        self.lender.readmit(sorted(pages))
        self.quarantined -= pages
        self.free |= pages

    # --- what holds after every step ---

    @invariant()
    def every_page_is_where_the_model_says(self) -> None:
        allocator = self.lender._allocator
        assert allocator.pages_in(PageState.FREE) == self.free
        assert allocator.pages_in(PageState.CACHED) == set(self.cached.values())
        assert allocator.pages_in(PageState.QUARANTINED) == self.quarantined
        written = {page for lent in self.live if lent.writes for page in lent.pages}
        assert allocator.pages_in(PageState.WRITING) == written
        assert list(allocator._idle) == self.order
        names = [name for prompt in PROMPTS.values() for name in prompt]
        assert self.lender._index.match(names) == [self.cached.get(name) for name in names]

    @invariant()
    def every_pin_and_claim_is_accounted_for(self) -> None:
        owners = self.owners()
        assert [self.lender._allocator.pins(page) for page in range(PAGES)] == [owners[page] for page in range(PAGES)]
        assert self.lender._allocator.claimed == len(self.claimed())

    @invariant()
    def content_and_lent_pages_keep_bytes_and_generations(self) -> None:
        memory = self.lender.memory
        for page in range(PAGES):
            record = memory.generations.read(page)
            assert record is not None
            assert record.counter == self.counter[page]
        for lent in self.live:
            assert tuple(self.counter[page] for page in lent.pages) == lent.counters
        watched = set(self.cached.values()) | set(self.owners())
        for page in watched:
            assert set(memory.page_bytes(page)) == {self.bytes[page]}
            assert self.counter[page] % 2 == 0

    @invariant()
    def the_lenders_own_check_agrees(self) -> None:
        self.lender.check()

    def teardown(self) -> None:
        self.lender.memory.close()


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


TestPoolAgainstTheModel = PoolMachine.TestCase  # contract P9, 17, 18, P26
