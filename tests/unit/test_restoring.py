"""A follower whose log holds a gap for good asks the members that live what they hold, and nobody else."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.errors import BusError
from kvbus.events import Header, SnapshotAsked, SnapshotTaken, StatsAnswered, TransferStep, decode, encode
from kvbus.parts import Body
from kvbus.restoring import snapshots
from kvbus.snapshots import HeldLeaseRow
from kvbus.subscriber import Lagged, Seen, Subscriber
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Query, Topics, escape
from kvbus.transport import BUCKET_INSTANCES, Bus, Delivery
from tests.waiting import until

TOPICS = Topics()


def said(body: Body, number: int = 1, instance: str = "a", member: str = "m0") -> bytes:
    return encode(Header(k=body.KIND, i=instance, m=member, e=1, s=number, t=number), body)


def step(number: int) -> bytes:
    return said(TransferStep(transfer="t", request_hash="0" * 32, step="x", text=f"{number}"), number)


class Member:
    """One member as it answers for its state: so many leases, three in a part."""

    def __init__(self, bus: Bus, instance: str, name: str, leases: int) -> None:
        self.bus, self.instance, self.name = bus, instance, name
        self.leases = leases
        self.asked: list[int] = []

    async def begin(self) -> None:
        await self.bus.put(BUCKET_INSTANCES, escape(f"{self.instance}/{self.name}"), b"its record")
        await self.bus.respond(TOPICS.query(self.instance, Query.SNAPSHOT, self.name), self.answer)

    async def answer(self, delivery: Delivery) -> bytes:
        asked = decode(delivery.data).body
        assert isinstance(asked, SnapshotAsked)
        self.asked.append(asked.after)
        tickets = range(asked.after + 1, min(asked.after + 4, self.leases + 1))
        row = HeldLeaseRow(ticket=1, transfer="t", rank=0, direction="read", lender="p", peer="b", bits=1)
        body = SnapshotTaken(
            reason="asked",
            after=asked.after,
            more=asked.after + 3 < self.leases,
            leases_held=self.leases,
            leases=tuple(row.model_copy(update={"ticket": ticket}) for ticket in tickets),
            transfers_running=0,
            facts_sequence=1,
            settle_n=0,
        )
        return said(body, instance=self.instance, member=self.name)


@pytest.fixture(params=["nats", "memory"])
async def buses(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Bus, Bus]]:
    """Two parties over one broker."""
    if request.param == "memory":
        shared = MemoryBroker()
        yield shared.connect(), shared.connect()
        return
    async with EmbeddedBroker.started(tmp_path / "broker") as broker:
        both = [
            await NatsBus.connect(broker.url, name="t", token=broker.token, limits=EMBEDDED, topics=TOPICS)
            for _ in range(2)
        ]
        await both[0].ensure_assets()
        yield both[0], both[1]
        for one in both:
            await one.close()


async def trim(bus: Bus) -> None:
    """Take from the facts stream all that it holds; its sequence goes on."""
    if isinstance(bus, NatsBus):
        await bus.ask("$JS.API.STREAM.PURGE.KVB_FACTS", b"", wait_s=30)
    else:
        assert isinstance(bus, MemoryBus)
        bus.broker.logs[0].messages.clear()


async def test_what_the_log_lost_is_followed_by_the_state_of_each_member_and_then_by_what_is_new(
    buses: tuple[Bus, Bus],
) -> None:
    ours, theirs = buses
    one, two = Member(theirs, "a", "m0", 7), Member(theirs, "b", "m0", 0)
    await one.begin()
    await two.begin()
    for number in range(1, 6):
        await theirs.store(TOPICS.facts("a"), step(number), message_id=f"{number}")
    await trim(theirs)
    items: list[Seen | Lagged] = []
    heard = items.append

    async def follow() -> None:
        async with aclosing(Subscriber(ours).facts(since=2, settle=False)) as seen:
            async for item in seen:
                heard(item)

    following = asyncio.create_task(follow())
    for number in (6, 7):
        await theirs.store(TOPICS.facts("a"), step(number), message_id=f"{number}")
    await until(lambda: len([item for item in items if isinstance(item, Seen)]) >= 6)
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following

    lagged = [item for item in items if isinstance(item, Lagged)]
    assert [one.lost for one in lagged] == [True]
    seen = [item for item in items if isinstance(item, Seen)]
    told = [item.event for item in seen if isinstance(item.event.body, SnapshotTaken)]
    assert [(event.header.i, len(getattr(event.body, "leases", ()))) for event in told] == [
        ("a", 3),
        ("a", 3),
        ("a", 1),
        ("b", 0),
    ]
    assert {item.sequence for item in seen if item.event in told} == {0}
    assert items.index(lagged[0]) < items.index(next(item for item in seen if item.event in told))
    assert [getattr(item.event.body, "text", "") for item in seen if item.sequence] == ["6", "7"]
    assert one.asked == [0, 3, 6]


async def test_a_log_that_is_whole_asks_nobody() -> None:
    shared = MemoryBroker()
    ours, theirs = shared.connect(), shared.connect()
    one = Member(theirs, "a", "m0", 1)
    await one.begin()
    await theirs.store(TOPICS.facts("a"), step(1), message_id="1")
    items: list[Seen | Lagged] = []
    async with aclosing(Subscriber(ours).facts(since=0, settle=False)) as seen:
        async for item in seen:
            items.append(item)
            break
    assert [type(item) for item in items] == [Seen]
    assert one.asked == []


@pytest.mark.parametrize("fault", ["nobody", "another member", "another kind", "no end", "broken", "away"])
async def test_a_member_that_does_not_answer_as_it_should_is_counted_and_the_others_are_heard(fault: str) -> None:
    shared = MemoryBroker()
    ours, theirs = shared.connect(), shared.connect()
    await Member(theirs, "z", "m0", 1).begin()
    await theirs.put(BUCKET_INSTANCES, escape("a/m0"), b"x")
    await theirs.put(BUCKET_INSTANCES, "nobodys-name", b"x")
    whole = SnapshotTaken(reason="", leases_held=0, transfers_running=0, facts_sequence=0, settle_n=0)
    answers = {
        "another member": said(whole, member="m1"),
        "another kind": said(StatsAnswered(counters={})),
        "no end": said(whole.model_copy(update={"more": True})),
        "broken": b"\xff",
    }

    async def answer(delivery: Delivery) -> bytes:
        del delivery
        return answers[fault]

    if fault in answers:
        await theirs.respond(TOPICS.query("a", Query.SNAPSHOT, "m0"), answer)
    counts: Counter[str] = Counter()
    if fault == "away":
        ours.cut()
        with pytest.raises(BusError):
            await ours.keys(BUCKET_INSTANCES)
    heard = [event.header.i async for event in snapshots(ours, TOPICS, counts)]
    assert heard == ([] if fault == "away" else ["z"])
    assert counts["snapshot_missing"] == 1
