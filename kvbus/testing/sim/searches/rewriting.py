"""The memory reader against a source that rewrites what it has lent: nothing but what the grant says may be delivered.

In the simulated world a lent page is never rewritten, so generations have nothing to notice there. Here the source
breaks its word at every step, as it may after fencing (P5): pages are rewritten before, between and after the reader's
copies, halves of them, with their generation torn, and the whole pool under another epoch.
"""

import random

from kvbus.dataplane.memory import _Reading
from kvbus.dataplane.reader import Progress
from kvbus.dataplane.reading import Limits, LocalPool, ReadOrder, plan
from kvbus.errors import KvbusError
from kvbus.events import ReaderKey, column
from kvbus.grants import Grant, MemoryAccess, PoolGeometry
from kvbus.ledger.facts import Evidence
from kvbus.ledger.types import Direction, Failed, LeaseView, Order
from kvbus.pool.layout import PageLayout
from kvbus.pool.memory import PoolMemory
from kvbus.processes import identity
from kvbus.testing.sim.searches.found import BrokenPromiseError, Found, require

READINGS = 150
PAGES = 8
PAGE_BYTES = 64
EPOCH, NEXT_EPOCH = 1 << 32 | 5, 2 << 32 | 6
LAYOUT = PageLayout("toy", 1, 1, 4, PAGE_BYTES // 4, "uint8", 0, 1, "ab")
LIMITS = tuple(Limits(run_bytes, segment_bytes=2 * PAGE_BYTES) for run_bytes in (PAGE_BYTES // 2, PAGE_BYTES))
"""Columns of runs that are halves of a page, and page by page."""
GRANTED_COUNTER, TORN_COUNTER = 0x100, 0x1FF
"""While the second becomes 0x200 byte by byte, it can be read as the first."""


class _Source:
    """A pool whose pages hold what their generation says, unless they are being rewritten."""

    def __init__(self, draw: random.Random, epoch: int) -> None:
        self.memory = PoolMemory.create(LAYOUT, PAGES, epoch)
        self._random = draw
        self._half: int | None = None
        for page in range(PAGES):
            self._write(page)

    def grant(self, pages: tuple[int, ...]) -> Grant:
        memory = self.memory
        return Grant(
            lender_instance="source",
            lender_member="m0",
            lender_epoch=memory.epoch,
            reader=ReaderKey(instance="reader", member="m0", epoch=9, transfer="t", attempt=1, rank=0),
            ticket=1,
            rank=0,
            fingerprint=memory.fingerprint,
            nonce=bytes(16),
            pool=PoolGeometry(
                base=memory.address,
                length_bytes=memory.length_bytes,
                generations_offset=memory.generations_offset,
                pages_offset=memory.pages_offset,
                page_stride=memory.page_stride,
                page_bytes=PAGE_BYTES,
                page_count=PAGES,
            ),
            pages=column(pages, 4),
            counters=column(memory.generations.counters(pages), 8),
            memory=MemoryAccess(process=identity(), fd=memory.fd),
        )

    def turn(self, pages: tuple[int, ...]) -> None:
        """Do one step of a rewrite: begin one with half a page, or end the one that was begun."""
        if self._half is not None:
            self._write_half(self._half, 1)
            self.memory.generations.seal_pages([self._half])
            self._half = None
        elif self._random.random() < 0.5:
            self._half = self._random.choice(pages)
            self.memory.generations.raise_pages([self._half])
            self._write_half(self._half, 0)
        else:
            self._write(self._random.choice(pages))

    def settle(self) -> None:
        """End what was begun."""
        if self._half is not None:
            self.turn(())

    def tear(self, page: int) -> None:
        """Rewrite a page up to the moment at which one byte of its next counter is stored."""
        generations = self.memory.generations
        while generations.counters([page])[0] < TORN_COUNTER - 1:
            generations.raise_pages([page])
            generations.seal_pages([page])
        generations.raise_pages([page])
        self._write_half(page, 0)
        generations._table[page, 1] = GRANTED_COUNTER  # noqa: SLF001 - 0x1FF with the second byte of 0x200, and not the first

    def write_up_to(self, page: int, counter: int) -> None:
        """Rewrite a page until it is sealed under that counter."""
        while self.memory.generations.counters([page])[0] < counter:
            self._write(page)

    def _write(self, page: int) -> None:
        self.memory.generations.raise_pages([page])
        for half in (0, 1):
            self._write_half(page, half)
        self.memory.generations.seal_pages([page])

    def _write_half(self, page: int, half: int) -> None:
        counter = self.memory.generations.counters([page])[0]
        content = content_of(self.memory.epoch, page, counter + counter % 2)
        middle = PAGE_BYTES // 2
        part = slice(0, middle) if half == 0 else slice(middle, None)
        self.memory.page_bytes(page)[part] = list(content[part])


def content_of(epoch: int, page: int, counter: int) -> bytes:
    """Return what a page holds that is sealed under a generation; no two generations have the same."""
    return (epoch.to_bytes(8, "little") + page.to_bytes(4, "little") + counter.to_bytes(4, "little")) * 4


class _Search:
    def __init__(self, seed: int) -> None:
        self.step = 0
        self._random = random.Random(f"{seed}:rewriting")
        self._target = PoolMemory.create(LAYOUT, PAGES, 3 << 32 | 7)
        self._sources = [_Source(self._random, epoch) for epoch in (EPOCH, NEXT_EPOCH)]

    def run(self) -> None:
        for self.step in range(1, READINGS + 1):
            if self.step == READINGS:
                self._read_torn()
            else:
                self._read_one()

    def close(self) -> None:
        for memory in (self._target, *(source.memory for source in self._sources)):
            memory.close()

    def _read_one(self) -> None:
        """Read some pages under a grant, with turns of the source between all steps; seldom out of the next pool."""
        draw = self._random
        source = self._sources[0]
        pages = tuple(draw.sample(range(PAGES), draw.randint(1, 4)))
        source.settle()
        grant = source.grant(pages)
        restarted = draw.random() < 0.1
        found = self._sources[1] if restarted else source
        if restarted:  # the descriptor now leads to the pool of the next process, whose counters are as far
            for page in pages:
                found.write_up_to(page, source.memory.generations.counters([page])[0])
        self._read(grant, pages, found, turns=0.0 if restarted else 0.25)

    def _read_torn(self) -> None:
        source, page = self._sources[0], self._random.randrange(PAGES)
        source.settle()
        fresh = _Source(self._random, EPOCH)
        fresh.write_up_to(page, GRANTED_COUNTER)
        grant = fresh.grant((page,))
        fresh.tear(page)
        try:
            self._read(grant, (page,), fresh, turns=0.0)
        finally:
            fresh.memory.close()

    def _read(self, grant: Grant, pages: tuple[int, ...], source: _Source, *, turns: float) -> None:
        rows = range(len(pages))
        view = LeaseView(
            pool=self._target.fingerprint,
            rank=0,
            epoch=self._target.epoch,
            ordinals=tuple(rows),
            names=tuple(bytes([row]) * 16 for row in rows),
            pages=tuple(rows),
            counters=(1,) * len(pages),
        )
        order = Order(1, 1, view, Direction.WRITE, ReadOrder(grant), "source", None)
        progress = Progress(order, plan(order, LocalPool.of(self._target), "memory"))
        reading = _Reading(progress, source.memory, self._target, self._random.choice(LIMITS))
        while True:
            if self._random.random() < turns:
                source.turn(pages)
            reading.advance()
            if reading.next_turn is None:
                break
            reading.next_turn()
        del reading
        self._check(grant, progress, pages)

    def _check(self, grant: Grant, progress: Progress, pages: tuple[int, ...]) -> None:
        result = progress.change(Evidence.COMPLETED).result
        if result is None or isinstance(result, Failed):
            return
        for row, (page, counter) in enumerate(zip(pages, grant.page_counters(), strict=True)):
            same = self._target.page_bytes(row).tobytes() == content_of(grant.lender_epoch, page, counter)
            text = f"page {page} was granted in generation {counter}, delivered, and holds something else"
            require(same or not result.arrived[row], text)


def search(seed: int) -> Found | None:
    """Make some hundred readings from a seed; return the first that delivered what was not granted."""
    one = _Search(seed)
    try:
        one.run()
    except (BrokenPromiseError, KvbusError) as error:
        return Found(str(error), one.step)
    finally:
        one.close()
    return None
