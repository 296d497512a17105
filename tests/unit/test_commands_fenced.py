"""An audit takes a fence for what it is: reason enough for a read to go back, and never for a write."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from kvbus.commands.audit import lines
from kvbus.commands.auditing import Verdict, audit
from kvbus.commands.rules import Rule
from kvbus.commands.stories import Story, tell
from kvbus.events import Event, FactsSeen, column, from_column
from kvbus.ledger.facts import EVIDENCE_BITS, Fact
from kvbus.testing.bus import MemoryBus
from kvbus.transport import Bus
from tests.tampering import Copy
from tests.unit.story_parts import TRANSFER, Pair
from tests.unit.test_commands_audit import recorded

ENDED = int(Fact.ACCESS_ENDED) | EVIDENCE_BITS


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    memory = MemoryBus()
    yield memory
    await memory.close()


def fenced_pair(bus: Bus) -> tuple[Pair, int]:
    """A source that fenced its silent reader, and goes on; the reader's ticket there."""
    pair = Pair(bus)
    _, read = pair.begin()
    pair.a.holder.isolate("lending", "b", "silent")
    assert pair.a.holder.fence(read, "its host has no power") == ""
    pair.a.rounds.run()
    assert read not in pair.a.holder.tickets()
    for _ in range(3):
        pair.a.engine_writes()
    return pair, read


def with_bits(copy: Copy, instance: str, change: Callable[[int], int]) -> Copy:
    """The record with other bits in all lines of an instance's first lease."""

    def changed(event: Event) -> Event:
        body = event.body
        if event.header.i != instance or not isinstance(body, FactsSeen):
            return event
        tickets, bits = from_column(body.ticket, 8), from_column(body.bits, 4)
        other = [change(old) if ticket == 1 else old for ticket, old in zip(tickets, bits, strict=True)]
        return replace(event, body=body.model_copy(update={"bits": column(other, 4)}))

    return copy.changed(changed)


async def test_a_read_that_went_back_fenced_is_clean(bus: Bus) -> None:
    # P5
    pair, read = fenced_pair(bus)
    result = audit(await recorded(bus, pair.a, pair.b))
    assert (result.verdict, result.reasons, result.offences) == (Verdict.CLEAN, (), ())
    assert (pair.a.instance, read) not in {(out.life.key.instance, out.life.key.ticket) for out in result.out}


async def test_a_read_that_went_back_neither_fenced_nor_ended_refutes(bus: Bus) -> None:
    # P5, contract 1
    pair, _ = fenced_pair(bus)
    copy = Copy.of(await recorded(bus, pair.a, pair.b))
    result = audit(with_bits(copy, "a", lambda bits: bits & ~int(Fact.FENCED)).record())
    assert result.verdict is Verdict.REFUTED
    assert result.first is not None
    assert result.first.rule is Rule.EVIDENCE


async def test_a_fenced_read_whose_return_is_missing_refutes(bus: Bus) -> None:
    # P5
    pair, _ = fenced_pair(bus)
    copy = Copy.of(await recorded(bus, pair.a, pair.b))
    result = audit(with_bits(copy, "a", lambda bits: bits & ~int(Fact.RETURNED)).record())
    assert result.verdict is Verdict.REFUTED
    assert result.first is not None
    assert result.first.rule is Rule.RETURNED


@pytest.mark.parametrize("ended", [False, True])
async def test_a_write_that_was_fenced_refutes_whatever_else_is_known(bus: Bus, *, ended: bool) -> None:
    # P5, contract 3
    pair = Pair(bus)
    pair.whole()
    copy = Copy.of(await recorded(bus, pair.a, pair.b))

    def fence(bits: int) -> int:
        return bits | int(Fact.FENCED) if bits & Fact.SUBMITTED and bits & ENDED else bits

    copy = with_bits(copy, "b", fence)
    if not ended:
        copy = with_bits(copy, "b", lambda bits: bits & ~ENDED)
    result = audit(copy.record())
    assert result.verdict is Verdict.REFUTED
    rules = {offence.rule for offence in result.offences}
    assert Rule.FENCED in rules
    assert (Rule.EVIDENCE in rules) is not ended
    assert "is lent for writing, and fenced" in "\n".join(lines(result))


async def test_a_story_says_that_a_read_was_fenced(bus: Bus) -> None:
    # P5
    pair, _ = fenced_pair(bus)
    record = await recorded(bus, pair.a, pair.b)
    story = tell(record.events(), TRANSFER)
    assert isinstance(story, Story)
    assert "fenced, so that its reader, which may read still, delivers nothing of them; returned exactly once" in (
        story.summary
    )
