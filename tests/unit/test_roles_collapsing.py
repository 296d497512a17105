"""A full outbox keeps of each lease what its newest line says, in place, and loses nothing that no later line says."""

import asyncio
import random
import time

import pytest

from kvbus.errors import BusError
from kvbus.events import FactsSeen, Header, TransferStep, column, decode, decode_all, encode, from_column
from kvbus.ledger.facts import FactDetail, FailureClass, GrantedRow, LeaseFacts
from kvbus.parts import FactDetailRow
from kvbus.roles import lane
from kvbus.roles import recorder as recording
from kvbus.roles.collapsing import newest_lines
from kvbus.roles.recorder import Recorder
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Topics
from kvbus.transport import NotStored, Stored
from tests.waiting import until

TOPICS = Topics()
SMALL_BYTES = 60_000
Line = tuple[int, int, int, int, int]


def facts(number: int, lines: list[Line], details: tuple[FactDetailRow, ...] = ()) -> bytes:
    tickets, ranks, bits, lo, hi = list(zip(*lines, strict=True)) or [()] * 5
    body = FactsSeen(
        n=len(lines),
        ticket=column(tickets, 8),
        rank=column(ranks, 2),
        bits=column(bits, 4),
        lo=column(lo, 4),
        hi=column(hi, 4),
        details=details,
    )
    return encode(Header(k=body.KIND, i="a", m="m0", e=1, s=number, t=number), body)


def lines_of(data: bytes) -> list[Line]:
    body = decode(data).body
    assert isinstance(body, FactsSeen)
    tickets, ranks = from_column(body.ticket, 8), from_column(body.rank, 2)
    bits, lo, hi = (from_column(values, 4) for values in (body.bits, body.lo, body.hi))
    return list(zip(tickets, ranks, bits, lo, hi, strict=True))


def test_the_newest_line_of_each_ticket_is_left_in_its_place_under_its_own_number() -> None:
    row = FactDetailRow(ticket=1, failure="transport", text="gone")
    events = [
        facts(1, [(1, 0, 1, 0, 0), (2, 0, 1, 0, 0)]),
        facts(2, [(1, 0, 3, 0, 0)], details=(row,)),
        facts(3, [(2, 0, 3, 0, 0), (3, 1, 1, 2, 5), (3, 1, 3, 2, 5)]),
        facts(4, [(1, 0, 7, 0, 0)]),
        facts(5, []),
    ]
    left = newest_lines(events)
    assert left[0] is None
    assert left[4] == events[4]  # an empty one is nobody's doing, and nothing is made of it
    shown = {number: lines_of(data) for number, data in enumerate(left, 1) if data is not None}
    assert shown == {2: [], 3: [(2, 0, 3, 0, 0), (3, 1, 3, 2, 5)], 4: [(1, 0, 7, 0, 0)], 5: []}
    second = decode(left[1] or b"")
    assert isinstance(second.body, FactsSeen)
    assert (second.header.s, second.body.details) == (2, (row,))
    assert newest_lines([one for one in left if one is not None]) == [one for one in left if one is not None]


def test_what_is_left_says_of_each_ticket_what_all_of_it_said() -> None:
    pick = random.Random(7)
    events, told = [], dict[int, Line]()
    for number in range(200):
        lines = [(pick.randrange(40), 0, pick.randrange(1, 2**20), 0, pick.randrange(9)) for _ in range(5)]
        events.append(facts(number, lines))
        told |= {line[0]: line for line in lines}
    left = [one for one in newest_lines(events) if one is not None]
    lines = [line for data in left for line in lines_of(data)]
    assert {line[0]: line for line in lines} == told
    assert len(lines) == len(told)


def test_only_facts_collapse() -> None:
    body = TransferStep(transfer="t", request_hash="0" * 32, step="x")
    with pytest.raises(TypeError, match="transfer_step"):
        newest_lines([encode(Header(k=body.KIND, i="a", s=1, t=1), body)])


class Away(MemoryBus):
    """A broker that takes nothing until it is let; what it was given first hangs there, as at a dying connection."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.there = asyncio.Event()

    async def store(
        self, subject: str, data: bytes, *, message_id: str, wait_s: float = 5.0, after: int | None = None
    ) -> Stored | NotStored:
        stored = await super().store(subject, data, message_id=message_id, wait_s=wait_s, after=after)
        if not self.there.is_set():
            await self.there.wait()
            raise BusError("the broker did not confirm in time")
        return stored


def batch(ticket: int, bits: int, *, rows: tuple[GrantedRow, ...] = (), text: str = "") -> LeaseFacts:
    details = [FactDetail(ticket, FailureClass.TRANSPORT, text)] if text else []
    return LeaseFacts(lines=[(ticket, 0, bits, 0, bits)], details=details, rows=[*rows])


async def test_a_full_outbox_collapses_and_what_is_stored_says_all_that_was_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "OUTBOX_LENGTH_MAX_BYTES", SMALL_BYTES)
    monkeypatch.setattr(lane, "COLLAPSE_LENGTH_BYTES", SMALL_BYTES // 4)
    bus = Away(MemoryBroker())
    recorder = Recorder(bus=bus, topics=TOPICS, instance="a", member="m0", epoch=1, unix_ns=time.time_ns)
    running = asyncio.create_task(recorder.run())
    recorder.facts(batch(1, 1))
    await until(lambda: recorder._facts.leaving == 1)  # under way, and stored without a word
    told: dict[int, int] = {}
    for turn in range(1, 201):
        for ticket in range(1, 11):
            granted = GrantedRow(
                ticket, f"t{ticket}", 0, writes=False, lender="pool", peer="b", pages=(ticket,), counters=(2,)
            )
            recorder.facts(batch(ticket, turn, rows=(granted,) if turn == 1 else (), text="why" if turn == 5 else ""))
            told[ticket] = turn
    assert recorder.dropped == 0
    assert recorder.collapsed > 1_000
    assert recorder.queued_bytes == sum(len(data) for data, _, _ in recorder._facts.queue) <= SMALL_BYTES
    bus.there.set()
    assert await recorder.flush(20)
    stored = [event for one in await bus.history(TOPICS.facts("a")) for event in decode_all(one.data)]
    state, order, reasons, numbers = dict[int, int](), list[str](), 0, list[int]()
    for event in stored:
        assert not isinstance(event, Exception)
        numbers.append(event.header.s)
        order.append(event.header.k)
        if isinstance(event.body, FactsSeen):
            reasons += len(event.body.details)
            for ticket, bits in zip(from_column(event.body.ticket, 8), from_column(event.body.bits, 4), strict=True):
                assert state.get(ticket, 0) <= bits
                state[ticket] = bits
    assert state == told
    assert order.count("lease_granted") == reasons == 10
    assert numbers == sorted(set(numbers))  # in their order, each once
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await bus.close()


async def test_an_outbox_that_is_full_of_what_cannot_collapse_drops_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "OUTBOX_LENGTH_MAX_BYTES", SMALL_BYTES)
    bus = MemoryBus()
    recorder = Recorder(bus=bus, topics=TOPICS, instance="a", member="m0", epoch=1, unix_ns=time.time_ns)
    for number in range(1_000):
        recorder.event(TransferStep(transfer="t", request_hash="0" * 32, step="x", text=f"{number}"))
    kept = recorder.queued_events
    assert recorder.dropped == 1_000 - kept > 0
    assert recorder.collapsed == 0
    assert recorder.queued_bytes <= SMALL_BYTES
    await bus.close()
