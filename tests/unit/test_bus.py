"""The promises of a bus, kept alike by NATS (a real broker) and by the one in memory."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED, WorkLimits
from kvbus.errors import BusError
from kvbus.events import EVENT_LENGTH_MAX_BYTES, REQUEST_LENGTH_MAX_BYTES
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Command, Topics
from kvbus.transport import BUCKET_EPOCH, BUCKET_INSTANCES, Bus, Delivery, NoAnswer, NotStored, Stored, Work
from tests.unit.helpers.log_promises import LOG_PROMISES, Trim, check_that_a_trimmed_log_starts_anew
from tests.waiting import until

TOPICS = Topics()
WORK = WorkLimits(ack_wait_s=4.0, in_flight_max=2)
"""Work is offered again after four seconds: a busy machine takes and finishes within them."""
HASHES = tuple(f"{number:032x}" for number in range(9))

Connect = Callable[[], Awaitable[Bus]]


@pytest.fixture(params=["nats", "memory"])
async def connect(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    """Make one more bus over the broker of this test."""
    buses: list[Bus] = []
    if request.param == "memory":
        shared = MemoryBroker(work=WORK)

        async def connect_memory() -> Bus:
            buses.append(shared.connect())
            return buses[-1]

        yield connect_memory
    else:
        async with EmbeddedBroker.started(tmp_path / "broker") as broker:

            async def connect_nats() -> Bus:
                buses.append(
                    await NatsBus.connect(broker.url, name="t", token=broker.token, limits=EMBEDDED, work=WORK)
                )
                return buses[-1]

            yield connect_nats
            await close_all(buses)
    await close_all(buses)


@pytest.fixture
def trim(bus: Bus) -> Trim:
    """Take from the settle logs all that they hold."""

    async def trim_all() -> None:
        if isinstance(bus, NatsBus):
            await bus.ask("$JS.API.STREAM.PURGE.KVB_SETTLE", b"", wait_s=30)
        else:
            assert isinstance(bus, MemoryBus)
            bus.broker.log_age_max_s = 0.0
            bus.broker.trim()
            bus.broker.log_age_max_s = None

    return trim_all


async def close_all(buses: list[Bus]) -> None:
    for one in buses:
        await one.close()


@pytest.fixture
async def bus(connect: Connect) -> Bus:
    made = await connect()
    await made.ensure_assets()
    return made


class Ear:
    """Collects what it hears."""

    def __init__(self) -> None:
        self.heard: list[Delivery] = []

    async def __call__(self, delivery: Delivery) -> None:
        self.heard.append(delivery)

    @property
    def said(self) -> list[bytes]:
        return [delivery.data for delivery in self.heard]


async def take(bus: Bus, most: int = 8, wait_s: float = 0.3) -> list[tuple[bytes, int]]:
    taken = await bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=most, wait_s=wait_s)
    return [(work.delivery.data, work.attempt) for work in taken]


async def take_all(bus: Bus, count: int) -> list[Work]:
    """Take so many; a wait brings what is there within a round trip, which need not be all of it."""
    taken: list[Work] = []

    async def are_taken() -> bool:
        taken.extend(await bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=8, wait_s=30))
        return len(taken) >= count

    await until(are_taken, what=f"{count} requests are offered")
    return taken


async def test_a_published_message_reaches_exact_and_wildcard_subscriptions_in_order(bus: Bus) -> None:
    exact, wild, other = Ear(), Ear(), Ear()
    await bus.subscribe("kv.hb.a", exact)
    await bus.subscribe("kv.hb.*", wild)
    await bus.subscribe("kv.hb.b", other)
    for number in range(20):
        await bus.publish("kv.hb.a", b"%d" % number)
    await until(lambda: len(exact.said) == len(wild.said) == 20)
    assert exact.said == wild.said == [b"%d" % number for number in range(20)]
    assert other.said == []


async def test_a_closed_subscription_hears_nothing_and_closes_twice(bus: Bus) -> None:
    closed, after = Ear(), Ear()
    subscription = await bus.subscribe("kv.hb.a", closed)
    await bus.subscribe("kv.hb.a", after)
    await subscription.close()
    await subscription.close()
    await bus.publish("kv.hb.a", b"x")
    await until(lambda: after.said)
    assert closed.said == []


async def test_a_handler_that_raises_is_counted_and_hears_the_next_message(bus: Bus) -> None:
    ear = Ear()

    async def fragile(delivery: Delivery) -> None:
        await ear(delivery)
        if delivery.data == b"bad":
            raise ValueError("planted")

    await bus.subscribe("kv.hb.a", fragile)
    for data in (b"bad", b"good"):
        await bus.publish("kv.hb.a", data)
    await until(lambda: ear.said == [b"bad", b"good"])
    assert bus.health().counters["handler_raised"] == 1
    assert bus.health().connected


async def test_a_request_is_answered_or_says_why_not(bus: Bus) -> None:
    subject = TOPICS.command("b", Command.LEASE)
    assert await bus.request(subject, b"1", wait_s=30) == NoAnswer("nobody_listens")
    never = asyncio.Event()

    async def respond(delivery: Delivery) -> bytes:
        if delivery.data == b"bad":
            raise ValueError("planted")
        if delivery.data == b"slow":
            await never.wait()
        return b"answer to " + delivery.data

    await bus.respond(subject, respond)
    assert await bus.request(subject, b"slow", wait_s=0.05) == NoAnswer("late")
    assert await bus.request(subject, b"bad", wait_s=0.05) == NoAnswer("late")
    assert await bus.request(subject, b"2", wait_s=30) == b"answer to 2"
    assert bus.health().counters["responder_raised"] == 1
    never.set()


async def test_many_requests_are_answered_at_once(bus: Bus) -> None:
    gate = asyncio.Event()
    waiting = 0

    async def respond(delivery: Delivery) -> bytes:
        nonlocal waiting
        waiting += 1
        await gate.wait()
        return delivery.data

    await bus.respond("kv.cmd.b.lease", respond)
    asked = [asyncio.ensure_future(bus.request("kv.cmd.b.lease", b"%d" % n, wait_s=20)) for n in range(70)]
    await until(lambda: waiting == 64)
    gate.set()
    assert await asyncio.gather(*asked) == [b"%d" % n for n in range(70)]


@pytest.mark.parametrize(
    ("subject", "limit_bytes"),
    [
        ("kv.facts.a", EVENT_LENGTH_MAX_BYTES),
        ("kv.hb.a", EVENT_LENGTH_MAX_BYTES),
        ("kv.cmd.a.lease", REQUEST_LENGTH_MAX_BYTES),
    ],
)
async def test_an_oversized_message_is_refused_before_it_is_sent(bus: Bus, subject: str, limit_bytes: int) -> None:
    await bus.publish(subject, bytes(limit_bytes))
    with pytest.raises(BusError) as refused:
        await bus.publish(subject, bytes(limit_bytes + 1))
    assert refused.value.details["length_bytes"] == limit_bytes + 1
    assert refused.value.details["length_max_bytes"] == limit_bytes
    assert bus.health().connected


async def test_headers_count_towards_the_size_of_a_stored_message(bus: Bus) -> None:
    with pytest.raises(BusError, match="too long"):
        await bus.store("kv.facts.a", bytes(EVENT_LENGTH_MAX_BYTES), message_id="x")
    assert await bus.history("kv.facts.*") == []


async def test_a_taker_that_is_cancelled_leaves_the_queue_usable(bus: Bus) -> None:
    taking = asyncio.ensure_future(bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=4, wait_s=60))
    assert await bus.keys(BUCKET_EPOCH) == []
    taking.cancel()
    await asyncio.wait({taking})
    for number in range(2):
        await bus.store(TOPICS.transfer("b", HASHES[number]), b"%d" % number, message_id=f"{number}")
    taken = await take_all(bus, 2)
    assert sorted((work.delivery.data, work.attempt) for work in taken) == [(b"0", 1), (b"1", 1)]


async def test_a_repeated_message_id_is_stored_once(bus: Bus) -> None:
    assert await bus.store("kv.facts.a", b"x", message_id="a.m.1.1") == Stored(1, duplicate=False)
    assert await bus.store("kv.facts.a", b"x", message_id="a.m.1.1") == Stored(1, duplicate=True)
    assert len(await bus.history("kv.facts.*")) == 1


async def test_stored_facts_are_repeated_live_with_their_sequence_and_the_one_before(bus: Bus) -> None:
    ear = Ear()
    await bus.subscribe(TOPICS.live_facts(), ear)
    for number, instance in enumerate("aba"):
        await bus.store(f"kv.facts.{instance}", b"%d" % number, message_id=f"{number}")
    await until(lambda: len(ear.heard) == 3)
    assert [(d.subject, d.sequence, d.last_on_subject) for d in ear.heard] == [
        ("kv.live.facts.a", 1, 0),
        ("kv.live.facts.b", 2, 0),
        ("kv.live.facts.a", 3, 1),
    ]


async def test_history_reads_a_log_from_a_sequence_oldest_first(bus: Bus) -> None:
    for number in range(300):
        await bus.store("kv.facts.a" if number % 2 else "kv.facts.b", b"%d" % number, message_id=f"{number}")
    everything = await bus.history("kv.facts.*")
    assert [delivery.sequence for delivery in everything] == list(range(1, 301))
    assert [d.data for d in await bus.history("kv.facts.a", after_sequence=296)] == [b"297", b"299"]
    assert [d.sequence for d in await bus.history("kv.facts.*", after_sequence=10, most=3)] == [11, 12, 13]
    assert await bus.history("kv.facts.*", after_sequence=300) == []
    assert await bus.history("kv.settle.*") == []
    with pytest.raises(ValueError, match="facts, settle and blocks"):
        await bus.history("kv.transfer.b.*")


# P13: the fence under a coordinator's appends
@pytest.mark.contract("P13")
@pytest.mark.parametrize("check", LOG_PROMISES, ids=lambda check: check.__name__)
async def test_a_settle_log_keeps_its_promises(
    check: Callable[[Bus, Bus], Awaitable[None]], bus: Bus, connect: Connect
) -> None:
    await check(bus, await connect())


# P14: the hole itself, as a bus has it; who appends has to know
@pytest.mark.contract("P14")
async def test_a_trimmed_log_refuses_its_owner_and_lets_a_zombie_in(bus: Bus, connect: Connect, trim: Trim) -> None:
    await check_that_a_trimmed_log_starts_anew(bus, await connect(), trim)


async def test_a_fence_holds_for_facts_and_requests_too(bus: Bus) -> None:
    assert await bus.store("kv.facts.a", b"1", message_id="1", after=0) == Stored(1, duplicate=False)
    assert await bus.store("kv.facts.a", b"2", message_id="2", after=0) == NotStored("moved")
    assert await bus.last("kv.facts.a") == Delivery("kv.facts.a", b"1", 1)
    subject = TOPICS.transfer("b", HASHES[0])
    assert await bus.store(subject, b"1", message_id="1", after=3) == NotStored("moved")
    assert await bus.store(subject, b"1", message_id="1", after=0) == Stored(1, duplicate=False)
    assert await bus.store(subject, b"1", message_id="1", after=0) == Stored(1, duplicate=True)


async def test_a_request_that_is_queued_or_running_is_refused_until_it_is_finished(bus: Bus) -> None:
    subject = TOPICS.transfer("b", HASHES[0])
    assert await bus.store(subject, b"1", message_id="r1") == Stored(1, duplicate=False)
    assert await bus.store(subject, b"1", message_id="r1") == Stored(1, duplicate=True)
    assert await bus.store(subject, b"2", message_id="r2") == NotStored("pending")
    (work,) = await bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=8, wait_s=30)
    assert await bus.store(subject, b"2", message_id="r2") == NotStored("pending")
    await work.finish()
    assert isinstance(await bus.store(subject, b"2", message_id="r2"), Stored)


async def test_work_is_taken_up_to_the_in_flight_cap_and_by_its_destination_only(bus: Bus) -> None:
    for number in range(4):
        await bus.store(TOPICS.transfer("b", HASHES[number]), b"%d" % number, message_id=f"{number}")
    await bus.store(TOPICS.transfer("c", HASHES[0]), b"c", message_id="c")
    taken = await take_all(bus, 2)
    assert [work.delivery.data for work in taken] == [b"0", b"1"]
    assert await take(bus) == []
    await taken[0].finish()
    (work,) = await take_all(bus, 1)
    assert (work.delivery.data, work.attempt) == (b"2", 1)


# P23
@pytest.mark.slow
async def test_work_that_is_given_back_or_abandoned_is_offered_again_and_each_offer_counts(bus: Bus) -> None:
    await bus.store(TOPICS.transfer("b", HASHES[0]), b"x", message_id="x")
    (work,) = await bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=1, wait_s=30)
    await work.give_back(0.01)
    with pytest.raises(BusError, match="has ended"):
        await work.finish()
    assert [await take(bus, wait_s=30) for _ in range(4)] == [[(b"x", offer)] for offer in range(2, 6)]
    (work,) = await bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=1, wait_s=30)
    await work.finish()
    assert await bus.store(TOPICS.transfer("b", HASHES[0]), b"x", message_id="y") == Stored(2, duplicate=False)


# P19: with a backoff on the consumer the broker would offer it again after its first step, kept or not.
@pytest.mark.slow
@pytest.mark.contract("P19")
async def test_work_that_is_kept_is_not_offered_again_however_long_it_takes(bus: Bus) -> None:
    await bus.store(TOPICS.transfer("b", HASHES[0]), b"x", message_id="x")
    (work,) = await bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=1, wait_s=30)
    for _ in range(6):  # well over one ack wait, each pause well under it
        await work.keep()
        assert await take(bus, wait_s=0.8) == []
    await work.finish()
    assert await take(bus, wait_s=WORK.ack_wait_s + 0.2) == []


async def test_of_eight_candidates_for_a_key_one_wins(bus: Bus, connect: Connect) -> None:
    others = [await connect() for _ in range(3)]
    for round_ in range(5):
        key = f"a{round_}"
        racing = [others[n % 3].compare_and_set(BUCKET_EPOCH, key, b"%d" % n, revision=0) for n in range(8)]
        won = list(map(bool, await asyncio.gather(*racing)))
        assert won.count(True) == 1
        entry = await bus.get(BUCKET_EPOCH, key)
        assert entry is not None
        assert entry.value == b"%d" % won.index(True)
        again = [one.compare_and_set(BUCKET_EPOCH, key, b"n", revision=entry.revision) for one in others]
        assert list(map(bool, await asyncio.gather(*again))).count(True) == 1


async def test_a_bucket_lists_gets_and_overwrites_its_keys(bus: Bus) -> None:
    assert await bus.get(BUCKET_INSTANCES, "a") is None
    assert await bus.keys(BUCKET_INSTANCES) == []
    await bus.put(BUCKET_INSTANCES, "a", b"1")
    await bus.put(BUCKET_INSTANCES, "a", b"2")
    await bus.put(BUCKET_INSTANCES, "10=2E0", b"")
    assert await bus.keys(BUCKET_INSTANCES) == ["10=2E0", "a"]
    entry = await bus.get(BUCKET_INSTANCES, "a")
    assert entry is not None
    assert entry.value == b"2"
    assert not await bus.compare_and_set(BUCKET_INSTANCES, "a", b"3", revision=entry.revision + 100)
    with pytest.raises(ValueError, match="escaped name"):
        await bus.get(BUCKET_INSTANCES, "10.0.0.1:8000")


async def test_two_parties_hear_each_other(connect: Connect) -> None:
    one, other = await connect(), await connect()
    ear = Ear()
    await one.subscribe("kv.result.r", ear)
    await other.publish("kv.result.r", b"x")
    await until(lambda: ear.said == [b"x"])


async def test_a_closed_bus_refuses_and_closes_again(bus: Bus) -> None:
    await bus.close()
    await bus.close()
    assert not bus.health().connected
    with pytest.raises(BusError, match="closed"):
        await bus.publish("kv.hb.a", b"x")
    assert await take(bus, wait_s=0.05) == []
