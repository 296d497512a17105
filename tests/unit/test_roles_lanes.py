"""A recorder's two lanes: facts wait for the decisions before them, decisions for nothing; each keeps its order."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kvbus.commands.auditing import Verdict, audit
from kvbus.commands.recordings import Record, Stored
from kvbus.errors import BusError
from kvbus.events import Event, TransferStep, decode_all
from kvbus.ledger.agreement import Decision, Party
from kvbus.ledger.facts import Evidence, LeaseFacts
from kvbus.roles.recorder import Recorder
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Family, Topics
from kvbus.transport import NotStored
from kvbus.transport import Stored as Answer
from tests.unit.story_parts import Member, flushed, ticking
from tests.waiting import until

TOPICS = Topics()
FACTS, SETTLE = TOPICS.facts("a"), TOPICS.settle("a")


@dataclass(slots=True)
class Gate:
    """What stands before one stream; while it is not opened, messages wait there."""

    opened: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0


class Gated(MemoryBus):
    """A connection with a gate before each stream; it keeps what passed, in the order in which it was stored."""

    def __init__(self, broker: MemoryBroker | None = None) -> None:
        super().__init__(broker or MemoryBroker())
        self.gates = {FACTS: Gate(), SETTLE: Gate()}
        self.tried: list[tuple[str, bytes, str]] = []
        self.passed: list[tuple[str, int, bytes]] = []
        for gate in self.gates.values():
            gate.opened.set()

    async def store(
        self, subject: str, data: bytes, *, message_id: str, wait_s: float = 5.0, after: int | None = None
    ) -> Answer | NotStored:
        self.tried.append((subject, data, message_id))
        gate = self.gates[subject]
        gate.waiting += 1
        await gate.opened.wait()
        gate.waiting -= 1
        answer = await super().store(subject, data, message_id=message_id, wait_s=wait_s, after=after)
        if isinstance(answer, Answer) and not answer.duplicate:
            self.passed.append((subject, answer.sequence, data))
        return answer

    def shut(self, subject: str) -> Gate:
        self.gates[subject].opened.clear()
        return self.gates[subject]

    def stored(self, subject: str = "") -> list[Event]:
        """What is stored, in that order; of both streams, or of one."""
        messages = [data for where, _, data in self.passed if subject in {"", where}]
        return [event for data in messages for event in decode_all(data) if isinstance(event, Event)]


class Recorded:
    """One member's recorder at work over gates."""

    def __init__(self, bus: Gated) -> None:
        self.bus = bus
        ticks = itertools.count(1_700_000_000_000_000_000, 1_000)
        self.recorder = Recorder(
            bus=bus, topics=TOPICS, instance="a", member="m0", epoch=7, unix_ns=lambda: next(ticks)
        )
        self.decided = 0

    def fact(self, *, padding: int = 0) -> int:
        self.recorder.event(TransferStep(transfer="T1", request_hash="0" * 32, step="x", text="x" * padding))
        return self.recorder.queued_sequence

    def decision(self) -> None:
        self.decided += 1
        parties = (Party("m0", 7, 0, self.decided),)
        self.recorder.decision(Decision("open", f"T{self.decided}", 7, self.decided, "", parties))


@asynccontextmanager
async def recording(bus: Gated | None = None) -> AsyncIterator[Recorded]:
    recorded = Recorded(bus or Gated())
    task = asyncio.create_task(recorded.recorder.run())
    try:
        yield recorded
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def turns(count: int) -> None:
    """Let everything else that is ready have its turn, so often."""
    for _ in range(count):
        await asyncio.sleep(0)  # noqa: TID251 - no time passes


def numbers(events: list[Event]) -> list[int]:
    return [event.header.s for event in events]


# contract 3
async def test_a_fact_is_not_stored_before_the_decisions_that_were_recorded_before_it() -> None:
    async with recording() as one:
        gate = one.bus.shut(SETTLE)
        one.fact()
        one.decision()
        one.fact()
        one.decision()
        one.fact()
        await until(lambda: gate.waiting and one.bus.stored(FACTS))
        await turns(20)
        assert numbers(one.bus.stored()) == [1]
        assert one.recorder.stored_sequence == 1
        gate.opened.set()
        assert await one.recorder.flush(10.0)

        assert numbers(one.bus.stored()) == [1, 2, 4, 3, 5]
        assert one.recorder.stored_sequence == 5
        assert one.recorder.queued_bytes == one.recorder.queued_events == 0


async def test_a_decision_waits_for_no_fact() -> None:
    async with recording() as one:
        gate = one.bus.shut(FACTS)
        one.fact()
        one.decision()
        await until(lambda: numbers(one.bus.stored()) == [2])
        assert not await one.recorder.flush(0.01)
        gate.opened.set()
        assert await one.recorder.flush(10.0)

        assert numbers(one.bus.stored()) == [2, 1]


async def test_what_gathers_behind_one_message_leaves_in_one_message_of_each_lane() -> None:
    async with recording() as one:
        gates = [one.bus.shut(SETTLE), one.bus.shut(FACTS)]
        one.fact()
        one.decision()
        await until(lambda: all(gate.waiting for gate in gates))
        for _ in range(50):
            one.decision()
            one.fact()
        for gate in gates:
            gate.opened.set()
        assert await one.recorder.flush(10.0)

        assert len(one.bus.passed) == 4
        assert sorted(numbers(one.bus.stored())) == list(range(1, 103))


async def test_who_waits_until_a_fact_is_stored_waits_for_no_decision_behind_it() -> None:
    async with recording() as one:
        gate = one.bus.shut(SETTLE)
        behind = one.fact()
        one.decision()
        assert await one.recorder.handled(behind, 10.0)
        after = one.fact()
        assert not await one.recorder.handled(after, 0.01)
        waiting = asyncio.create_task(one.recorder.handled(after, 10.0))
        gate.opened.set()
        assert await waiting


async def test_a_refused_decision_holds_no_fact_up() -> None:
    async with recording() as one:

        async def full(*_: object, **__: object) -> NotStored:
            return NotStored("full")

        store = one.bus.store
        one.bus.store = full  # type: ignore[method-assign] # for the decision
        one.decision()
        await until(lambda: one.recorder.dropped == 1)
        one.bus.store = store  # type: ignore[method-assign]
        one.fact()
        assert await one.recorder.flush(10.0)
        assert numbers(one.bus.stored()) == [2]


async def test_behind_steps_of_transfers_a_lane_rests_so_that_the_next_ones_leave_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbus.roles.recorder.REST_S", 60.0)
    async with recording() as one:
        one.fact()
        await until(lambda: numbers(one.bus.stored()) == [1])
        for _ in range(20):
            one.fact()
            await turns(3)
        one.decision()
        await until(lambda: numbers(one.bus.stored()) == [1, 22])
        assert one.recorder.queued_events == 20
    monkeypatch.setattr("kvbus.roles.recorder.REST_S", 0.001)
    async with recording() as one:
        for count in (1, 2, 3):
            one.fact()
            await until(lambda count=count: len(one.bus.stored()) == count)  # type: ignore[misc] # bound here


async def test_behind_facts_that_tell_no_step_a_lane_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.roles.recorder.REST_S", 60.0)
    line = LeaseFacts(lines=[(1, 0, 5, 0, 1)])
    async with recording() as one:
        for count in (1, 2, 3):
            one.recorder.facts(line)
            await until(lambda count=count: len(one.bus.stored()) == count)  # type: ignore[misc] # bound here


class Unsure(Gated):
    """A connection whose acks come late, or are lost after or before the message came through, as a seed decides."""

    def __init__(self, pick: random.Random) -> None:
        super().__init__()
        self.pick = pick
        self.at_once: dict[str, int] = {FACTS: 0, SETTLE: 0}

    async def store(
        self, subject: str, data: bytes, *, message_id: str, wait_s: float = 5.0, after: int | None = None
    ) -> Answer | NotStored:
        self.at_once[subject] += 1
        assert self.at_once[subject] == 1, "one message at a time in each lane"
        try:
            await turns(self.pick.randrange(6))
            if self.pick.random() < 0.2:
                raise BusError("no connection to the broker")
            answer = await super().store(subject, data, message_id=message_id, wait_s=wait_s, after=after)
            await turns(self.pick.randrange(6))
            if self.pick.random() < 0.2:
                raise BusError("the broker did not confirm in time")
            return answer
        finally:
            self.at_once[subject] -= 1


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.roles.recorder.RETRY_MIN_S", 0.0)
    monkeypatch.setattr("kvbus.roles.recorder.RETRY_MAX_S", 0.0)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", range(30))
async def test_whatever_becomes_of_acks_each_event_is_stored_once_in_order_and_behind_what_it_follows(
    seed: int,
) -> None:
    pick = random.Random(seed)
    async with recording(Unsure(pick)) as one:
        recorded = 0
        for _ in range(120):
            for _ in range(pick.randrange(4)):
                recorded += 1
                one.decision() if pick.random() < 0.4 else one.fact(padding=pick.choice((0, 0, 1_900)))
            await turns(1)
        assert await one.recorder.flush(30.0)

        decisions = {event.header.s for event in one.bus.stored(SETTLE)}
        there: set[int] = set()
        for event in one.bus.stored():
            if event.header.s not in decisions:
                assert {number for number in decisions if number < event.header.s} <= there
            there.add(event.header.s)
        assert there == set(range(1, recorded + 1))
        for subject in (FACTS, SETTLE):
            found = numbers(one.bus.stored(subject))
            assert found == sorted(set(found))
        sent: dict[str, tuple[str, bytes]] = {}
        for subject, data, message_id in one.bus.tried:
            assert sent.setdefault(message_id, (subject, data)) == (subject, data), "one id stood for two messages"


# contract 1, 3
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", range(4))
async def test_whatever_part_of_both_logs_is_read_refutes_nothing(seed: int) -> None:
    """A reader sees any beginning of what was stored: first of the facts, then, a little later, of the decisions."""
    pick = random.Random(seed)
    bus = Unsure(pick)
    member = Member(bus, "a", unix_ns=ticking())
    async with flushed(member):
        under_way: list[tuple[int, str]] = []
        for number in range(10):
            under_way.append((member.lease_for_transfer("b", transfer=f"t{number}"), f"t{number}"))
            while under_way and pick.random() < 0.6:
                ticket, transfer = under_way.pop(pick.randrange(len(under_way)))
                member.holder.assign(ticket, "order")
                member.rounds.run()
                member.ucx.deliver(ticket, evidence=Evidence.COMPLETED)
                member.rounds.run()
                member.step("access_ended", "completed", transfer=transfer)
            await turns(pick.randrange(24))
        assert await member.recorder.flush(30.0)
    assert len(bus.passed) > 8, "few beginnings to read"
    for end in range(len(bus.passed) + 1):
        for later in {end, min(end + 1, len(bus.passed))}:
            result = audit(Record(stored=[*part(bus, FACTS, end), *part(bus, SETTLE, later)]))
            assert result.verdict is not Verdict.REFUTED, (end, later, result.first and result.first.text)


def part(bus: Gated, subject: str, end: int) -> Iterator[Stored]:
    family = Family.FACTS if subject == FACTS else Family.SETTLE
    for where, sequence, data in bus.passed[:end]:
        if where == subject:
            yield from Stored(family, sequence, subject, data).events()
