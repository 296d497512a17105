"""Holes of bytes: a page is read while it is written, rewritten while it is read, written by two (P1-P3)."""

# ruff: noqa: SLF001, ANN401 - what takes a rule out sits inside of what it spoils, and hands on what it does not use

from collections.abc import Sequence
from typing import Any

from kvbus.ledger.facts import Evidence
from kvbus.ledger.holder import LeaseHolder
from kvbus.pool import generations
from kvbus.pool.generations import Generation
from kvbus.pool.lender import PoolLender
from kvbus.testing.sim.holes.hole import Hole, Patch, taken_out
from kvbus.testing.sim.holes.script import Script
from kvbus.testing.sim.member import Member
from kvbus.testing.sim.pages import write
from kvbus.testing.sim.plane import SimReader

A, B = 1, 2
_ALL_ONES = (1 << 64) - 1


# ---------------------------------------------------------------------------------------------------------------- P1


async def _half_written(s: Script) -> None:
    await s.up()
    s.compute("i0", A)
    await s.until("the engine of i0 writes", lambda: s.is_writing("i0"))
    engine = s.freeze_engine("i0")
    s.say("half of each page of A is written at i0")
    first = await s.outcome(s.ask("i1", "i0", A))
    s.require(first.pages_moved == 0, f"{first.pages_moved} pages of A came to i1 while i0 was writing them")
    s.loop.resume(engine)
    await s.idle("i0")
    second = await s.outcome(s.ask("i1", "i0", A))
    s.staged(second.pages_moved == 8, "the sealed pages should have moved")
    await s.rest()


def _sealed_at_hand_over() -> Sequence[Patch]:
    """Seal and name pages when they are handed to the engine, not when it has filled them."""
    lend_write, give_back = PoolLender.lend_write, PoolLender.give_back

    def at_hand_over(self: PoolLender, names: Any, ordinals: Any, **more: Any) -> Any:
        lease = lend_write(self, names, ordinals, **more)
        if not lease.for_peer:
            self.memory.generations.seal_pages(lease.pages)
            for name, page in zip(lease.names, lease.pages, strict=True):
                self._index.insert(name, page)
            self._allocator.cache(lease.pages, for_peer=False)
        return lease

    def nothing_left(self: PoolLender, lease: Any) -> None:
        if lease.for_peer or not lease.arrived:
            give_back(self, lease)
        else:
            del self._leases[lease.lease_id]

    return [(PoolLender, "lend_write", at_hand_over), (PoolLender, "give_back", nothing_left)]


async def _restarted_counters(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    grant = s.gate("lend_answered", "i0")
    request = s.ask("i1", "i0", A)
    await s.caught(grant)
    before = s.kill("i0")
    after = await s.restarted("i0")
    await s.cached("i0", B)
    same_place(s, before, after)
    s.say("i0 has restarted: B stands in the pages of A, with the counters that A had, and the old grant arrives")
    grant.open()
    outcome = await s.outcome(request)
    s.require(not s.held("i1", A), "pages of A at i1 were read under a grant of i0's last run")
    s.staged(outcome.failure == "page_changed", f"the reads should have found other pages, not {outcome.reason}")
    await s.rest()


def same_place(s: Script, before: Member, after: Member) -> None:
    """Let the next run's pool lie where the last one's did: under the addresses that its grants name."""
    s.truth.take_place(before.process, after.process)


def _only_counters() -> Sequence[Patch]:
    """Compare counters without their epoch."""
    return [(Generation, "__eq__", lambda self, other: other is not None and self.counter == other.counter)]


# ---------------------------------------------------------------------------------------------------------------- P2


async def _rewritten_under_the_read(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    gets = s.stall("i1", "_half")
    request = s.ask("i1", "i0", A)
    await s.stalled(gets)
    pages = s.parts("i0").pool.lender.pages_held(s.names("i0", A))
    s.say(f"a get is posted; now the engine of i0 writes B in place into {len(pages)} pages")
    table = s.member("i0").process.memory.generations  # type: ignore[union-attr] # it has a pool
    table.raise_pages(pages)
    _write(s, "i0", pages, s.names("i0", B))
    table.seal_pages(pages)
    gets.open()
    outcome = await s.outcome(request)
    s.require(outcome.pages_moved == 0, f"{outcome.pages_moved} pages count as A at i1, and hold B")
    await s.until("i0 has its pages back", lambda: s.lent("i0") == 0)
    s.parts("i0").pool.lender.evict(s.names("i0", A))
    await s.rest()


def _generation_first() -> Sequence[Patch]:
    """Read the generations when the gets are posted, not when their bytes have landed."""
    next_segment = SimReader._next_segment
    seen: dict[Any, list[Generation | None]] = {}

    def and_read(self: SimReader, attempt: Any) -> None:
        next_segment(self, attempt)
        if attempt.moving is not None:
            read = attempt.source.memory.generations.read
            seen[attempt] = [read(page) for page in attempt.progress.plan.source_pages]

    def as_read_before(self: SimReader, attempt: Any, segment: Any) -> None:
        plan = attempt.progress.plan
        same = [r for r in segment.rows if seen[attempt][r] == Generation(plan.grant.lender_epoch, plan.counters[r])]
        attempt.moving = None
        attempt.progress.verified(segment, same)
        self._next_segment(attempt)

    return [(SimReader, "_next_segment", and_read), (SimReader, "_verify", as_read_before)]


async def _torn_word(s: Script) -> None:
    await s.up()
    table = s.member("i0").process.memory.generations  # type: ignore[union-attr] # it has a pool
    table._counters[:] = [0xFE] * len(table._counters)  # as after 127 rewritings
    await s.cached("i0", A)
    gets = s.stall("i1", "_half")
    request = s.ask("i1", "i0", A)
    await s.stalled(gets)
    pages = s.parts("i0").pool.lender.pages_held(s.names("i0", A))
    for page in pages:
        table._counters[page] = 0x1FD
    table.raise_pages(pages)
    _write(s, "i0", pages, s.names("i0", B))
    s.say("granted under 0x0100; i0 rewrote the pages and is sealing them: of 0x01ff to 0x0200 half is stored, 0x0100")
    for page in pages:
        table._table[page, 1], table._table[page, 3] = 0x0100, 0x0200 ^ _ALL_ONES
    gets.open()
    outcome = await s.outcome(request)
    s.require(outcome.pages_moved == 0, f"{outcome.pages_moved} pages count as A at i1, and hold B")
    table.seal_pages(pages)
    await s.until("i0 has its pages back", lambda: s.lent("i0") == 0)
    s.parts("i0").pool.lender.evict(s.names("i0", A))
    for page in range(len(pages), len(table._counters)):
        table._counters[page] = 0
    await s.rest()


def _without_complement() -> Sequence[Patch]:
    """Read a generation without its complement."""

    def first_words(record: bytes) -> Generation:
        return Generation(int.from_bytes(record[:8], "little"), int.from_bytes(record[8:16], "little"))

    return [(generations, "decode", first_words)]


def _write(s: Script, instance: str, pages: Sequence[int], names: Sequence[bytes]) -> None:
    memory = s.member(instance).process.memory
    if memory is not None:
        write(memory, pages, 0, [name + name for name in names])


# ---------------------------------------------------------------------------------------------------------------- P3


async def _second_attempt(s: Script) -> None:
    await s.up()
    await s.cached("i0", A)
    await s.cached("i2", B)
    gets = s.stall("i1", "_half", "_closed")
    first = await s.outcome(s.ask("i1", "i0", A, budget_s=1.0))
    s.staged(first.outcome == "failed", "the stalled transfer should have been given up")
    s.say("A is given up, and its get may still land; B is wanted now")
    gets.pass_others()
    second = await s.outcome(s.ask("i1", "i2", B))
    s.staged(second.outcome == "settled", f"B should have come: {second.reason}")
    s.say("the get of A lands")
    gets.open()
    await s.pause(1.0)
    s.check()
    await s.rest()


def _freed_when_given_up() -> Sequence[Patch]:
    """Take the end of a transfer for the end of its access: its pages are free for the next attempt."""
    abandon = LeaseHolder.abandon

    def at_once(self: LeaseHolder, ticket: int, failure: Any, text: str) -> None:
        abandon(self, ticket, failure, text)
        held = self._held[ticket]
        if held.attempt_open:
            held.binding.open_attempts -= 1
            held.end_attempt(Evidence.COMPLETED)

    return [(LeaseHolder, "abandon", at_once)]


HOLES = (
    Hole(
        "P1",
        "a page is asked for while it is half written",
        "only sealed pages are found: nothing moved until the writer had sealed them",
        _half_written,
        taken_out(_sealed_at_hand_over),
        "wrong bytes",
    ),
    Hole(
        "P1",
        "restarted counters match an old grant",
        "the epoch is part of the generation: the old grant read nothing that counts",
        _restarted_counters,
        taken_out(_only_counters),
        "wrong bytes",
    ),
    Hole(
        "P2",
        "the source rewrites between a get and its after-read",
        "the after-read came after the bytes and was not the grant's: no page counted",
        _rewritten_under_the_read,
        taken_out(_generation_first),
        "wrong bytes",
    ),
    Hole(
        "P2",
        "a torn word reads as the grant's",
        "the complement contradicted the torn word: no page counted",
        _torn_word,
        taken_out(_without_complement),
        "wrong bytes",
    ),
    Hole(
        "P3",
        "the next attempt starts while a get of the last one stalls",
        "the next attempt had other pages: the late get landed where nothing was",
        _second_attempt,
        taken_out(_freed_when_given_up),
        "its pages are being written",
        instances=3,
    ),
)
