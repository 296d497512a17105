"""What a member records leaves in order, as few messages, and is stored once, whatever becomes of the acks."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from kvbus.commands.logs import LogReader
from kvbus.errors import BusError
from kvbus.events import Event, EventsBatch, FactsSeen, Header, TransferStep, decode, decode_all, encode, split
from kvbus.ledger.agreement import Decision, Party
from kvbus.ledger.facts import AttemptRow, FactDetail, FailureClass, GrantedRow, LeaseFacts, OutcomeRow
from kvbus.roles.lane import BATCH_LENGTH_MAX_BYTES
from kvbus.roles.recorder import Recorder
from kvbus.subscriber import Seen, Subscriber
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Topics
from kvbus.transport import Delivery, NotStored, Stored
from tests.waiting import until

TOPICS = Topics()


def step(number: int, *, padding: int = 0) -> TransferStep:
    return TransferStep(transfer="T1", request_hash="0" * 32, step=f"s{number}", text="x" * padding)


class Ackless(MemoryBus):
    """A connection that stores, and loses the ack of the first messages; it keeps what it was given."""

    def __init__(self, broker: MemoryBroker, lost: int = 0) -> None:
        super().__init__(broker)
        self.lost = lost
        self.given: list[tuple[str, bytes, str]] = []

    async def store(
        self, subject: str, data: bytes, *, message_id: str, wait_s: float = 5.0, after: int | None = None
    ) -> Stored | NotStored:
        self.given.append((subject, data, message_id))
        answer = await super().store(subject, data, message_id=message_id, wait_s=wait_s, after=after)
        if self.lost:
            self.lost -= 1
            raise BusError("the broker did not confirm in time")
        return answer


class Recorded:
    """One member's recorder over a bus in memory."""

    def __init__(self, *, lost: int = 0) -> None:
        self.broker = MemoryBroker()
        self.bus = Ackless(self.broker, lost)
        ticks = itertools.count(1_700_000_000_000_000_000, 1_000)
        self.recorder = Recorder(
            bus=self.bus, topics=TOPICS, instance="a", member="m0", epoch=7, unix_ns=lambda: next(ticks)
        )

    @asynccontextmanager
    async def stored(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.recorder.run())
        try:
            assert await self.recorder.flush(10.0)
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def messages(self, subject: str = TOPICS.facts("a")) -> Sequence[Delivery]:
        return await self.bus.history(subject)

    async def events(self) -> list[Event]:
        return [seen.event async for seen in LogReader(self.bus, TOPICS).newest(10_000)]


def steps(events: Sequence[Event]) -> list[str]:
    return [event.body.step for event in events if isinstance(event.body, TransferStep)]


def decision(n: int) -> Decision:
    return Decision("open", "T1", term=1, n=n, previous="", parties=(Party("m0", 7, 0, 11),))


async def test_events_that_gathered_leave_as_one_message_and_are_read_one_by_one() -> None:
    recorded = Recorded()
    for number in range(30):
        recorded.recorder.event(step(number), cause=f"c{number}")
    async with recorded.stored():
        (message,) = await recorded.messages()
        events = await recorded.events()

    assert steps(events) == [f"s{number}" for number in range(30)]
    assert [event.header.c for event in events] == [f"c{number}" for number in range(30)]
    assert [event.header.s for event in events] == list(range(1, 31))
    times = [event.header.t for event in events]
    assert times == sorted(set(times)), "each event keeps the time at which it was recorded"
    assert decode(message.data).header.event_id == events[-1].header.event_id
    assert recorded.recorder.stored_sequence == 30


async def test_a_step_recorded_without_a_model_has_the_bytes_of_one_that_was_made() -> None:
    made, told = Recorded(), Recorded()
    made.recorder.event(step(3, padding=5), cause="c")
    told.recorder.step("T1", "0" * 32, "s3", "x" * 5, "c")
    async with made.stored(), told.stored():
        assert [one.data for one in await told.messages()] == [one.data for one in await made.messages()]


async def test_what_is_told_has_the_bytes_of_a_header_that_was_made_and_of_a_changed_copy() -> None:
    body, made, told = step(3), Recorded().recorder, Recorded().recorder
    for changed in ({}, {"text": "other"}):
        header = made.header(body.KIND, "c")
        assert told.encoded(body, "c", **changed) == encode(header, body.model_copy(update=changed))


async def test_one_event_alone_is_no_batch() -> None:
    recorded = Recorded()
    recorded.recorder.event(step(1))
    async with recorded.stored():
        (message,) = await recorded.messages()

    assert isinstance(decode(message.data).body, TransferStep)


async def test_decisions_that_gathered_leave_as_one_message_and_are_read_one_by_one_in_their_place() -> None:
    recorded = Recorded()
    for number in range(3):
        recorded.recorder.event(step(2 * number))
        recorded.recorder.event(step(2 * number + 1))
        recorded.recorder.decision(decision(number + 1))
    async with recorded.stored():
        (settled,) = await recorded.messages(TOPICS.settle("a"))
        events = await recorded.events()

    assert decode(settled.data).header.event_id == "a.m0.7.9"
    assert [event.header.s for event in events] == list(range(1, 10))
    assert [event.header.k for event in events] == ["transfer_step", "transfer_step", "open"] * 3


async def test_a_batch_whose_ack_was_lost_is_sent_again_as_it_was_whatever_came_meanwhile() -> None:
    recorded = Recorded(lost=3)
    recorded.recorder.event(step(0))
    recorded.recorder.event(step(1))
    task = asyncio.create_task(recorded.recorder.run())
    await until(lambda: recorded.recorder.retries == 1, what="the first ack is lost")
    recorded.recorder.event(step(2))
    assert await recorded.recorder.flush(10.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    repeats, rest = recorded.bus.given[:4], recorded.bus.given[4:]
    assert len(set(repeats)) == 1
    assert len(rest) == 1
    assert steps(await recorded.events()) == ["s0", "s1", "s2"]
    assert len(await recorded.messages()) == 2, "the broker knows the repeats by their id"


async def test_no_batch_is_longer_than_what_the_stream_takes() -> None:
    recorded = Recorded()
    for number in range(300):
        recorded.recorder.event(step(number, padding=1_900))
    async with recorded.stored():
        messages = await recorded.messages()
        events = await recorded.events()

    assert steps(events) == [f"s{number}" for number in range(300)]
    assert len(messages) == -(-300 // (BATCH_LENGTH_MAX_BYTES // 2_000))
    assert max(len(message.data) for message in messages) < BATCH_LENGTH_MAX_BYTES + 10_000


async def test_rows_and_lines_of_a_round_are_what_the_wire_says_of_their_kinds() -> None:
    """They are written without their models: each must be read back through them, field by field."""
    recorded = Recorded()
    failure = FailureClass.TRANSPORT
    facts = LeaseFacts(
        lines=[(11, 0, 519, 2, 10), (12, 1, 1 << 20, 0, 0)],
        rows=[
            GrantedRow(11, "T1", 1, writes=True, lender="pool-0", peer="b", pages=(4, 5, 9), counters=(3, 5, 1)),
            AttemptRow(11, 1, "pull", "b"),
            OutcomeRow(11, 1, "failed", 0, 0, "completed", failure, "y" * 3_000),
        ],
        details=[FactDetail(12, failure, "z" * 3_000, "b")],
    )
    recorded.recorder.facts(facts)
    async with recorded.stored():
        granted, attempt, outcome, lines = (event.body for event in await recorded.events())

    assert granted.model_dump() == {
        "ticket": 11,
        "transfer": "T1",
        "rank": 1,
        "direction": "write",
        "lender": "pool-0",
        "peer": "b",
        "pages": b"".join(page.to_bytes(4, "little") for page in (4, 5, 9)),
        "counters": b"".join(counter.to_bytes(8, "little") for counter in (3, 5, 1)),
    }
    assert attempt.model_dump() == {"ticket": 11, "attempt": 1, "binding": "pull", "peer": "b"}
    told = outcome.model_dump()
    assert (told["result"], told["evidence"], told["failure"], told["text"]) == (
        "failed",
        "completed",
        "transport",
        "y" * 2_000,
    )
    assert isinstance(lines, FactsSeen)
    assert lines.n == 2
    assert [(one.ticket, one.failure, one.text, one.peer) for one in lines.details] == [
        (12, "transport", "z" * 2_000, "b")
    ]


async def test_what_is_wrong_with_one_event_of_a_batch_spoils_no_other() -> None:
    def encoded(number: int, instance: str = "a") -> bytes:
        return encode(Header(k="transfer_step", i=instance, m="m0", e=7, s=number, t=number), step(number))

    def batch(*events: bytes) -> bytes:
        return encode(Header(k="batch", i="a", m="m0", e=7, s=9, t=9), EventsBatch(events=events))

    broker = MemoryBroker()
    bus = broker.connect()
    data = batch(encoded(1), b"noise", encoded(2, "b"), batch(encoded(3)), encoded(4))
    await bus.store(TOPICS.facts("a"), data, message_id="x")
    subscriber = Subscriber(bus)
    found: list[Event] = []
    async with aclosing(subscriber.facts()) as items:
        async for item in items:
            assert isinstance(item, Seen)
            assert item.sequence == 1
            found.append(item.event)
            if len(found) == 2:
                break

    assert steps(found) == ["s1", "s4"]
    assert subscriber.counters() == {"malformed": 2, "wrong_subject": 1}
    assert len(split(data)) == 5
    assert [isinstance(one, Event) for one in decode_all(data)] == [True, False, True, False, True]
