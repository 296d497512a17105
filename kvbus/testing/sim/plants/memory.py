"""Faults of the pool: generations, the index, eviction, the cap; and of the engine's desk before it."""

# ruff: noqa: SLF001, ANN401 - a fault sits inside of what it spoils, and hands on what it does not look at

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvbus.engines.desk import Allocated
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.lending import LendState
from kvbus.ledger.types import Delivered, Direction
from kvbus.pool.allocator import PageAllocator
from kvbus.pool.generations import Generations
from kvbus.pool.index import ReuseIndex
from kvbus.pool.lease import PoolLease
from kvbus.pool.lender import PoolLender
from kvbus.pool.memory import PoolMemory
from kvbus.roles.desk import PoolDesk
from kvbus.roles.running import Running
from kvbus.roles.source import Source
from kvbus.testing.sim import assembly as assembly_module
from kvbus.testing.sim.assembly import Builder
from kvbus.testing.sim.plants.plant import Change, plant


@plant("rows that did not arrive are committed", "contract 17")
def count_stopped_rows() -> Sequence[Change]:
    """Mark every row of a stopped lease as arrived."""
    mark = PoolLease.mark_arrived

    def mark_all(self: PoolLease, arrived: Sequence[bool]) -> None:
        mark(self, (True,) * len(arrived) if any(arrived) else arrived)

    return [(PoolLease, "mark_arrived", mark_all)]


@plant("lent pages are evicted", "P9, contract 1")
def evict_lent_pages() -> Sequence[Change]:
    """Leave pinned pages in the list from which room is made."""
    pin = PageAllocator.pin

    def still_idle(self: PageAllocator, pages: Sequence[int], *, for_peer: bool) -> None:
        pin(self, pages, for_peer=for_peer)
        for page in pages:
            self._idle[page] = None

    return [(PageAllocator, "pin", still_idle)]


@plant("a generation is not raised", "P1")
def skip_generation() -> Sequence[Change]:
    """Lend a page for writing under the generation that it had."""
    raise_pages = Generations.raise_pages

    def unraised(self: Generations, pages: Sequence[int]) -> tuple[int, ...]:
        before = {page: self._counters[page] for page in pages}
        raised = raise_pages(self, pages)
        self._counters.__setitem__(slice(None), [before.get(at, now) for at, now in enumerate(self._counters)])
        return raised

    return [(Generations, "raise_pages", unraised)]


@plant("a page's counter begins again", "P1, contract 48", check="lender")
def restart_counter() -> Sequence[Change]:
    """Count from the beginning with each new content of a page."""
    raise_pages = Generations.raise_pages

    def from_one(self: Generations, pages: Sequence[int]) -> tuple[int, ...]:
        for page in pages:
            self._counters[page] = 0
        return raise_pages(self, pages)

    return [(Generations, "raise_pages", from_one)]


@plant("pages are sealed when the engine gets them", "P1")
def seal_before_writing() -> Sequence[Change]:
    """Take an engine's pages as content before it has written them."""
    alloc = PoolDesk.alloc

    def and_commit(self: PoolDesk, handle: int, first_block: int, count: int) -> Any:
        granted = alloc(self, handle, first_block, count)
        if isinstance(granted, Allocated):
            known = self._writes[granted.write]
            self._writes_backend.completed(known.ticket, whole=True, page_bytes=1)
            self._rounds().run()
        return granted

    return [(PoolDesk, "alloc", and_commit)]


@plant("a prefix is looked up, and pinned later", "P9")
def pin_later() -> Sequence[Change]:
    """Lend the pages that were found a moment ago, in which anything may have been evicted."""
    decide = Source._decide

    async def lend(self: Source, asked: Any, entry: Any, key: Any, pages: list[int]) -> None:
        await asyncio.sleep(0.02)
        if entry.state is LendState.COMPUTING:
            index: Any = self._pool.lender._index
            index.longest_prefix = lambda _names: pages
            try:
                self._lend_now(asked, entry)
            finally:
                del index.longest_prefix
            self._questions.wake(key)

    def look_up_first(self: Source, asked: Any, entry: Any) -> None:
        from kvbus.names import names_from_bytes  # noqa: PLC0415 - the fault's own
        from kvbus.roles.source import key_of  # noqa: PLC0415 - the fault's own

        names = names_from_bytes(asked.names)
        pages = self._pool.lender.pages_held(names)
        if len(pages) < len(names):
            decide(self, asked, entry)
            return
        self._tasks.start(lend(self, asked, entry, key_of(asked.key), pages), name="planted")

    return [(Source, "_decide", look_up_first)]


@plant("a second page takes a name over", "P9")
def overwrite_name() -> Sequence[Change]:
    """Insert into the index whether or not the name is there."""

    def insert(self: ReuseIndex, name: bytes, page: int) -> int:
        self._name_of.pop(self._page_of.get(name, -1), None)
        self._page_of[name] = page
        self._name_of[page] = name
        return page

    return [(ReuseIndex, "insert", insert), (ReuseIndex, "__contains__", lambda _self, _name: False)]


@plant("names are visible before the settle", "P10, contract 25")
def visible_early() -> Sequence[Change]:
    """Let pages be found as soon as they are delivered."""
    take_result = LeaseHolder._take_result

    def and_name(self: LeaseHolder, held: Any, result: Any, text: str) -> None:
        take_result(self, held, result, text)
        if isinstance(result, Delivered) and held.mode.direction is Direction.WRITE and held.view is not None:
            index = held.lease._keeper._index
            for page, name, whole in zip(held.view.pages, held.view.names, held.arrived, strict=True):
                if whole and name not in index and page not in index.pages():
                    index.insert(name, page)

    return [(LeaseHolder, "_take_result", and_name)]


@plant("the cap on lent pages is ignored", "P26")
def ignore_cap() -> Sequence[Change]:
    """Lend to peers whatever is there."""
    refusal, read_failure = PoolLender.refusal, PoolLender._read_failure

    def for_the_engine(self: PoolLender, *args: Any, **options: Any) -> Any:
        return refusal(self, *args, **{**options, "for_peer": False})

    def for_anybody(self: PoolLender, *args: Any, **options: Any) -> Any:
        return read_failure(self, *args, **{**options, "for_peer": False})

    return [(PoolLender, "refusal", for_the_engine), (PoolLender, "_read_failure", for_anybody)]


@plant("pins are kept", "P9, contract 1")
def keep_pins() -> Sequence[Change]:
    """Keep the pins of a transfer that ended."""
    return [(Running, "_report", lambda self: self.on_ended(self))]


@plant("a successor adopts its predecessor's pool", "P8", weathers=("lingering",))
def adopt_pool() -> Sequence[Change]:
    """Start on the memory that the last process of this instance used, with its pages formatted anew."""
    build = Builder._pool
    newest: dict[str, PoolMemory] = {}
    starting: list[str] = []

    def reuse(layout: Any, pages: int, epoch: int) -> PoolMemory:
        before = newest.get(starting[-1])
        if before is None or before._bytes is None:
            before = PoolMemory.create(layout, pages, epoch)
        else:
            before._generations = Generations(before._table(), epoch)
            before.generations.format()
        newest[starting[-1]] = before
        return before

    def adopting(self: Builder) -> Any:
        starting.append(self._place.instance)
        return build(self)

    return [(assembly_module, "PoolMemory", SimpleNamespace(create=reuse)), (Builder, "_pool", adopting)]
