"""The settle log over a bus: appends are fenced, own words are known again, gaps are read, a lost log is begun anew."""

import asyncio

import pytest

from kvbus.errors import BusError
from kvbus.events import EventsBatch, Header, HeartbeatSeen, encode
from kvbus.ledger.agreement import Decision, Party
from kvbus.ledger.shares import Heard, ShareBook
from kvbus.roles import settle_log
from kvbus.roles.decisions import body_of
from kvbus.roles.settle_log import REWIND_S, SettleLog
from kvbus.testing.bus import MemoryBus
from kvbus.topics import Topics
from kvbus.transport import Delivery, NotStored, Stored
from tests.waiting import until

TOPICS = Topics()
SUBJECT = TOPICS.settle("i")


class Deaf(MemoryBus):
    """A connection whose next store is obeyed, and whose answer is lost; then somebody else may come first."""

    lost = 0
    stored = 0

    async def store(
        self, subject: str, data: bytes, *, message_id: str, wait_s: float = 5.0, after: int | None = None
    ) -> Stored | NotStored:
        self.stored += 1
        answer = await super().store(subject, data, message_id=message_id, wait_s=wait_s, after=after)
        if self.lost:
            self.lost -= 1
            self.broker.stream_of(subject).ids.clear()  # nor does it know the id any more: the fence has to do
            raise BusError("the broker did not confirm in time", broker="memory")
        return answer


class Reader:
    """One member with its place in the log."""

    def __init__(self, bus: MemoryBus, name: str = "m0", epoch: int = 10) -> None:
        self.bus, self.name, self.epoch, self.said = bus, name, epoch, 0
        self.book = ShareBook(name, epoch)
        self.applied: list[str] = []
        self.refused = 0
        self.log = SettleLog(
            bus=bus,
            topics=TOPICS,
            instance="i",
            header=self.header,
            hear=self.hear,
            place=lambda: self.book.place,
            join=self.join,
        )

    def header(self, kind: str) -> Header:
        self.said += 1
        return Header(k=kind, i="i", m=self.name, e=self.epoch, s=self.said, t=1)

    def hear(self, decision: Decision) -> Heard:
        heard = self.book.hear(decision).heard
        self.refused += heard is Heard.REFUSED
        if heard is Heard.APPLIED:
            self.applied.append(decision.decision_id)
        return heard

    def join(self, decision: Decision, writer: tuple[str, int]) -> None:
        self.book.join(decision, writer)
        self.applied.append(decision.decision_id)

    async def listen(self) -> None:
        async def repeated(delivery: Delivery) -> None:
            self.log.repeated(delivery)

        await self.bus.subscribe(TOPICS.live_settle("i"), repeated)

    async def say(self, kind: str = "cancel", term: int | None = None) -> bool:
        """Append this member's next decision, chained to what it applied last."""
        book, parties = self.book, (Party(self.name, self.epoch, 0, 0),)
        transfer = "" if kind == "term" else "t"
        decision = Decision(kind, transfer, term or book.term, book.n + 1, book.head_id, parties)
        stands = await self.log.append(decision)
        if stands:
            self.hear(decision)
        return stands


async def two(bus: MemoryBus | None = None) -> tuple[Reader, Reader]:
    """Return m0, which has taken term 1, and m1, which has read that."""
    first = Reader(bus or MemoryBus())
    second = Reader(first.bus.broker.connect(), "m1", 11)
    await first.log.catch_up(0.0)
    assert await first.say("term", 1)
    await second.log.catch_up(0.0)
    assert second.book.place == (1, 1)
    return first, second


def written(reader: Reader) -> int:
    return sum(1 for _ in reader.bus.broker.logs[1].select(SUBJECT, 0))


# ------------------------------------------------------------------------------------------------------------ appending


# P13
async def test_who_has_not_read_what_another_wrote_may_not_append() -> None:
    first, second = await two()
    assert await second.say("term", 2)
    assert not await first.say()
    assert written(first) == 2
    await first.log.catch_up(1.0)
    assert first.book.place == (2, 2)
    assert first.book.coordinator == ("m1", 11)


# P13
async def test_of_two_that_take_a_term_at_once_one_does() -> None:
    first = Reader(MemoryBus())
    second = Reader(first.bus.broker.connect(), "m1", 11)
    await first.log.catch_up(0.0)
    await second.log.catch_up(0.0)
    assert [await first.say("term", 1), await second.say("term", 1)] == [True, False]
    await second.log.catch_up(1.0)
    assert second.book.coordinator == ("m0", 10)


# P13
async def test_a_member_knows_its_own_word_again_where_only_the_answer_was_lost() -> None:
    bus = Deaf()
    first, second = await two(bus)
    bus.lost = 1
    assert await first.say()
    assert bus.stored == 3
    assert written(first) == 2
    assert await first.say()
    second.log.behind = True
    await second.log.catch_up(1.0)
    assert second.applied == ["1.1", "1.2", "1.3"]


# P13
async def test_where_another_wrote_behind_its_word_a_member_leads_no_more_and_reads_both() -> None:
    bus = Deaf()
    first, second = await two(bus)
    bus.lost = 1
    decision = Decision("cancel", "t", 1, 2, "1.1", ())
    data = encode(second.header("term"), body_of(Decision("term", "", 2, 3, "1.2", (Party("m1", 11, 0, 0),))))
    bus.broker.clock = lambda: 0.0
    append, newest = first.log.append(decision), bus.last

    async def overtaken(subject: str) -> Delivery | None:
        if bus.stored == 3 and written(first) == 2:
            bus.broker.store(SUBJECT, data, "m1's")
        return await newest(subject)

    bus.last = overtaken  # type: ignore[method-assign] # the other member is faster
    assert not await append
    await first.log.catch_up(1.0)
    assert first.applied == ["1.1", "1.2", "2.3"]


async def test_a_member_goes_on_trying_while_the_broker_is_away() -> None:
    first, second = await two()
    first.bus.cut()
    saying = asyncio.get_running_loop().create_task(first.say())
    second.log.behind = True
    await second.log.catch_up(1.0)
    assert second.applied == ["1.1"]
    first.bus.restore()
    assert await saying
    assert first.book.place == (1, 2)


# P15
async def test_a_log_that_was_lost_is_begun_anew_by_the_next_that_appends() -> None:
    first, second = await two()
    assert await first.say()
    lose(first)
    assert not await first.say()
    assert first.log.sequence == 0
    await first.log.catch_up(1.0)
    assert await first.say("term", 2)
    second.log.told_of(2, 3)
    await second.log.catch_up(1.0)
    assert second.applied == ["1.1", "2.3"]


# P13, P15
async def test_a_log_that_lost_its_end_and_grew_again_is_not_taken_for_the_same() -> None:
    first, second = await two()
    assert await first.say()
    broker = first.bus.broker
    broker.logs[1].messages.popitem()  # the broker's power failed: m0's last word is gone
    broker.logs[1].head -= 1
    assert await second.say("term", 2)  # at that very place
    assert second.log.sequence == first.log.sequence
    first.bus.cut()
    first.bus.restore()
    assert not await first.say()
    assert written(first) == 2
    await first.log.catch_up(1.0)
    assert first.book.place == (2, 2)


def lose(reader: Reader) -> None:
    log = reader.bus.broker.logs[1]
    log.messages.clear()
    log.ids.clear()
    log.head = 0


# ------------------------------------------------------------------------------------------------------------ following


async def test_live_repeats_are_applied_without_reading_where_they_follow() -> None:
    first, second = await two()
    await second.listen()
    assert await first.say()
    assert await first.say()
    await until(lambda: len(second.log._live) == 2)
    second.bus.history = refuse  # type: ignore[method-assign,assignment] # nothing has to be read
    await second.log.catch_up(1.0)
    assert second.applied == ["1.1", "1.2", "1.3"]


async def refuse(_filter: str, *, after_sequence: int = 0, most: int = 0) -> list[Delivery]:
    raise AssertionError(f"the log is read from {after_sequence}, {most} at most")


async def test_a_gap_in_the_live_repeats_makes_a_member_read() -> None:
    first, second = await two()
    assert await first.say()
    await second.listen()  # too late for that
    assert await first.say()
    await until(lambda: len(second.log._live) == 1)
    await second.log.catch_up(1.0)
    assert second.applied == ["1.1", "1.2", "1.3"]


# P25
async def test_a_head_that_somebody_names_makes_a_member_read_and_one_that_it_has_does_not() -> None:
    first, second = await two()
    assert await first.say()
    assert not second.log.told_of(1, 1)
    await second.log.catch_up(1.0)
    assert second.applied == ["1.1"]
    assert second.log.told_of(1, 2)
    await second.log.catch_up(1.0)
    assert second.applied == ["1.1", "1.2"]


# P25
@pytest.mark.parametrize("entries", [3, 25, 61])
async def test_a_member_that_fell_behind_reads_all_that_it_missed(
    entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settle_log, "READ_MOST", 10)
    first, second = await two()
    for _ in range(entries):
        assert await first.say()
    for now in range(3):  # a turn with each heartbeat, each of which names the head
        second.log.told_of(*first.book.place)
        await second.log.catch_up(float(now))
    assert second.applied == [f"1.{n}" for n in range(1, entries + 2)]


async def test_a_member_that_starts_begins_behind_the_newest_decision_and_follows_whoever_made_it() -> None:
    first, _ = await two()
    assert await first.say()
    late = Reader(first.bus.broker.connect(), "m1", 12)
    await late.log.catch_up(0.0)
    assert late.applied == ["1.2"]
    assert late.book.coordinator == ("m0", 10)
    assert await first.say()
    late.log.told_of(*first.book.place)
    await late.log.catch_up(1.0)
    assert late.applied == ["1.2", "1.3"]


# P15
async def test_decisions_that_left_together_while_the_instance_had_one_member_are_read_one_by_one() -> None:
    first, second = await two()
    decisions = [Decision("cancel", "t", 1, n, f"1.{n - 1}", ()) for n in (2, 3, 4)]
    events = tuple(encode(first.header("cancel"), body_of(decision)) for decision in decisions)
    header = first.header("batch")
    batch = encode(header, EventsBatch(events=(*events[:1], b"\x00", *events[1:])))
    await second.listen()
    first.bus.broker.store(SUBJECT, batch, header.event_id)
    await until(lambda: len(second.log._live) == 1)
    await second.log.catch_up(1.0)
    assert second.applied == ["1.1", "1.2", "1.3", "1.4"]
    assert second.log.malformed == 1

    late = Reader(first.bus.broker.connect(), "m1", 12)
    await late.log.catch_up(0.0)
    assert late.applied == ["1.4"]
    assert late.book.coordinator == ("m0", 10)
    read = Reader(first.bus.broker.connect(), "m1", 13)
    read.log._began = True
    await read.log.catch_up(0.0)
    assert read.applied == ["1.1", "1.2", "1.3", "1.4"]


# contract 50
async def test_a_head_that_the_log_does_not_have_is_looked_for_once() -> None:
    first, second = await two()
    second.log.told_of(9, 999)  # by somebody who is gone, of a log that was lost
    await second.log.catch_up(1.0)
    reads: list[int] = []
    history = second.bus.history

    async def counted(subject_filter: str, *, after_sequence: int = 0, most: int = 10_000) -> list[Delivery]:
        reads.append(after_sequence)
        return list(await history(subject_filter, after_sequence=after_sequence, most=most))

    second.bus.history = counted  # type: ignore[method-assign]
    for turn in range(3):
        assert await first.say()
        second.log.told_of(*first.book.place)
        await second.log.catch_up(2.0 + turn * REWIND_S)
    assert reads == [1, 2, 3]
    assert second.book.place == first.book.place
    assert second.log.told_term == 9


# P13
async def test_a_lower_term_in_the_log_is_passed_over() -> None:
    first, second = await two()
    assert await second.say("term", 2)
    zombie = encode(first.header("cancel"), body_of(Decision("cancel", "t", 1, 2, "1.1", ())))
    first.bus.broker.store(SUBJECT, zombie, "unfenced")
    second.log.behind = True
    await second.log.catch_up(1.0)
    assert second.refused == 1
    assert second.book.place == (2, 2)


async def test_what_is_no_decision_is_counted_and_passed_over() -> None:
    first, second = await two()
    broker = first.bus.broker
    beat = HeartbeatSeen(
        transfers_running=0, leases_held=0, pages_free=0, pages_cached=0, pages_lent=0, facts_sequence=0, settle_n=0
    )
    broker.store(SUBJECT, b"\x00", "garbage")
    broker.store(SUBJECT, encode(first.header(beat.KIND), beat), "no decision")
    assert not await first.say()  # something stands behind what it read
    await first.log.catch_up(1.0)
    assert first.log.malformed == 2
    assert await first.say()
    second.log.behind = True
    await second.log.catch_up(1.0)
    assert second.applied == ["1.1", "1.2"]


# contract 50
async def test_live_repeats_that_are_not_looked_at_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle_log, "LIVE_MAX", 4)
    first, second = await two()
    second.log = SettleLog(
        bus=second.bus,
        topics=TOPICS,
        instance="i",
        header=second.header,
        hear=second.hear,
        place=lambda: second.book.place,
        join=second.join,
    )
    await second.listen()
    for _ in range(9):
        assert await first.say()
    await until(lambda: second.log.behind and len(second.log._live) == 4)
    await second.log.catch_up(1.0)
    assert second.book.place == first.book.place
