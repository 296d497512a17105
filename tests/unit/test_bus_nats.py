"""What only a real broker can do to a bus: die, come back, close the client for good, refuse, hold drifted streams."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED, INSTANCE_TTL_S, Assets, WorkLimits, drift, work_consumer
from kvbus.bus_calls import Calls
from kvbus.bus_guards import check_version, headers_length, shown
from kvbus.errors import BusError, ConfigError
from kvbus.topics import Topics
from kvbus.transport import BUCKET_EPOCH, BUCKET_INSTANCES, Bus, Delivery, NoAnswer, NotStored, Stored
from tests.waiting import until

TOPICS = Topics()
HASH = "0" * 32

Connect = Callable[..., Awaitable[NatsBus]]


@pytest.fixture
async def connect(broker: EmbeddedBroker) -> AsyncIterator[Connect]:
    made: list[NatsBus] = []

    async def one(topics: Topics | None = None, work: WorkLimits | None = None) -> NatsBus:
        url, token = broker.url, broker.token
        made.append(await NatsBus.connect(url, name="t", token=token, topics=topics, limits=EMBEDDED, work=work))
        return made[-1]

    yield one
    for bus in made:
        await bus.close()


@pytest.fixture
async def bus(connect: Connect) -> NatsBus:
    made = await connect()
    await made.ensure_assets()
    return made


async def stored(bus: Bus, subject: str, message_id: str) -> bool:
    """Whether the broker confirmed; as an outbox does, one asks again with the same id until it has."""
    try:
        return isinstance(await bus.store(subject, message_id.encode(), message_id=message_id, wait_s=2), Stored)
    except BusError:
        return False


def counted(bus: Bus, what: str, times: int) -> bool:
    return bus.health().counters.get(what, 0) == times


@pytest.mark.slow
async def test_connecting_to_nothing_says_where_it_looked_and_what_to_do() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(BusError, match=r"kvbus up.*--nats URL") as refused:
            await Calls().within(NatsBus.connect(f"nats://secret@127.0.0.1:{port}", name="t"), 60)
    assert refused.value.details["broker"] == f"nats://127.0.0.1:{port}"
    assert "5 s" in str(refused.value.details["tried"])
    assert "secret" not in str(refused.value)


@pytest.mark.slow
async def test_connecting_to_something_that_never_speaks_ends_too() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        with pytest.raises(BusError, match="no broker answers"):
            await Calls().within(NatsBus.connect(f"nats://127.0.0.1:{mute.getsockname()[1]}", name="t"), 60)


async def test_wrong_credentials_are_named_as_such(broker: EmbeddedBroker) -> None:
    with pytest.raises(BusError, match="refused these credentials"):
        await NatsBus.connect(broker.url, name="t", token="wrong")  # noqa: S106 - wrong on purpose


async def test_a_url_may_carry_the_token(nats_url: str) -> None:
    bus = await NatsBus.connect(nats_url, name="t")
    assert bus.health().connected
    await bus.close()


async def test_killing_the_broker_loses_nothing_that_it_confirmed(bus: NatsBus, broker: EmbeddedBroker) -> None:
    live: list[bytes] = []

    async def hear(delivery: Delivery) -> None:
        live.append(delivery.data)

    await bus.subscribe(TOPICS.live_facts(), hear)
    confirmed = [f"before {n}" for n in range(50) if await stored(bus, "kv.facts.a", f"before {n}")]
    assert len(confirmed) == 50
    broker.kill()
    await until(lambda: not bus.health().connected)
    with pytest.raises(BusError, match="no connection"):
        await bus.publish("kv.hb.a", b"x")
    assert await bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=1, wait_s=0.1) == []
    await broker.start()
    for number in range(50):
        await until(partial(stored, bus, "kv.facts.a", f"after {number}"))
    held = [delivery.data.decode() for delivery in await bus.history("kv.facts.*")]
    assert held == confirmed + [f"after {number}" for number in range(50)]
    await until(lambda: b"after 49" in live)
    assert bus.health().counters["reconnected"] == 1


async def test_work_taken_before_an_outage_can_be_finished_after_it(bus: NatsBus, broker: EmbeddedBroker) -> None:
    await bus.store(TOPICS.transfer("b", HASH), b"x", message_id="x")
    (work,) = await bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=4, wait_s=30)
    broker.kill()
    await until(lambda: not bus.health().connected)
    with pytest.raises(BusError):
        await work.finish()
    await broker.start()
    await until(lambda: bus.health().connected)

    async def finished() -> bool:
        try:  # a broker takes connections before it has its consumers back
            await work.finish()
        except BusError:
            return False
        return True

    await until(finished)
    assert isinstance(await bus.store(TOPICS.transfer("b", HASH), b"y", message_id="y"), Stored)
    taken = await bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=4, wait_s=30)
    assert [(again.delivery.data, again.attempt) for again in taken] == [(b"y", 1)]


async def test_a_client_that_was_closed_for_good_is_replaced_with_its_subscriptions(bus: NatsBus) -> None:
    heard: list[bytes] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(delivery.data)

    async def answer(delivery: Delivery) -> bytes:
        return delivery.data

    await bus.subscribe("kv.hb.a", hear)
    await bus.respond("kv.cmd.b.lease", answer)
    await bus.store(TOPICS.transfer("b", HASH), b"x", message_id="x")
    (work,) = await bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=1, wait_s=30)
    for round_ in range(2):
        client = bus._link.client
        client._max_payload = 8 << 20  # past the guard: the broker answers with an error that ends the client
        await client.publish("kv.hb.a", bytes(2 << 20))
        await until(partial(counted, bus, "rebuilt", round_ + 1))
        assert client.is_closed
        assert bus.health().connected
        await bus.publish("kv.hb.a", b"%d" % round_)
        await until(partial(heard.__contains__, b"%d" % round_))
        assert await bus.request("kv.cmd.b.lease", b"ping", wait_s=30) == b"ping"
    await work.finish()  # an ack outlives the connection by which its message came
    assert await bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=1, wait_s=0.1) == []


async def test_a_client_that_closed_while_the_broker_is_away_is_replaced_once_it_is_back(
    bus: NatsBus, broker: EmbeddedBroker
) -> None:
    heard: list[bytes] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(delivery.data)

    await bus.subscribe(TOPICS.live_facts(), hear)
    client = bus._link.client
    broker.kill()
    await client.close()
    await until(lambda: not bus.health().connected)
    await broker.start()
    await until(partial(stored, bus, "kv.facts.a", "x"))
    await until(lambda: heard == [b"x"])


async def test_a_request_in_flight_when_the_broker_dies_ends_as_late(bus: NatsBus, broker: EmbeddedBroker) -> None:
    asked = asyncio.Event()

    async def never(delivery: Delivery) -> bytes:
        asked.set()
        await asyncio.Event().wait()
        return delivery.data

    await bus.respond("kv.cmd.b.lease", never)
    asking = asyncio.ensure_future(bus.request("kv.cmd.b.lease", b"x", wait_s=1))
    await asked.wait()
    broker.kill()
    assert await asking == NoAnswer("late")


async def test_a_slow_handler_drops_messages_in_public_and_the_connection_lives(bus: NatsBus) -> None:
    gate = asyncio.Event()
    heard = 0

    async def slow(delivery: Delivery) -> None:
        nonlocal heard
        await gate.wait()
        heard += 1

    await bus.subscribe("kv.hb.a", slow)
    for _ in range(9_000):
        await bus.publish("kv.hb.a", b"x")
    await until(lambda: bus.health().counters.get("client_SlowConsumerError", 0) > 0)
    gate.set()
    await until(lambda: heard + bus.health().counters["client_SlowConsumerError"] == 9_000)
    assert bus.health().connected


async def test_closing_does_not_wait_for_work_that_nobody_takes(bus: NatsBus) -> None:
    taking = asyncio.ensure_future(bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=1, wait_s=60))
    await until(lambda: bus._inboxes)
    started_at = asyncio.get_running_loop().time()
    await bus.close()
    assert await taking == []
    assert asyncio.get_running_loop().time() - started_at < 50, "it sat the whole wait out"


async def test_assets_are_made_once_and_by_whoever_comes_first(connect: Connect) -> None:
    buses = [await connect() for _ in range(3)]
    await asyncio.gather(*(bus.ensure_assets() for bus in buses))
    await buses[0].ensure_assets()


async def test_an_asset_of_another_shape_is_named_with_field_found_and_expected(bus: NatsBus) -> None:
    wanted = next(one for one in Assets(TOPICS, EMBEDDED).streams() if one["name"] == "KVB_FACTS")
    changed = json.dumps(wanted | {"max_age": 60_000_000_000, "duplicate_window": 60_000_000_000}).encode()
    await bus.ask("$JS.API.STREAM.UPDATE.KVB_FACTS", changed, wait_s=30)
    await bus.store("kv.facts.a", b"x", message_id="x")
    with pytest.raises(ConfigError) as refused:
        await bus.ensure_assets()
    details = refused.value.details
    assert (details["stream"], details["field"]) == ("KVB_FACTS", "max_age")
    assert (details["found"], details["expected"]) == (60_000_000_000, 3_600_000_000_000)
    assert len(await bus.history("kv.facts.*")) == 1, "ensure deletes nothing"


async def test_logs_are_kept_for_as_long_as_an_operator_asks_and_never_for_less_than_before(
    bus: NatsBus, broker: EmbeddedBroker
) -> None:
    async def kept_h() -> dict[str, float]:
        names = ("KVB_FACTS", "KVB_SETTLE", "KVB_BLOCKS", "KVB_TRANSFER")
        told = {name: json.loads(await bus.ask(f"$JS.API.STREAM.INFO.{name}", b"", wait_s=30)) for name in names}
        return {name: one["config"]["max_age"] / 3_600e9 for name, one in told.items()}

    await bus.store("kv.facts.a", b"x", message_id="x")
    assert await kept_h() == {"KVB_FACTS": 1, "KVB_SETTLE": 1, "KVB_BLOCKS": 0, "KVB_TRANSFER": 1 / 6}
    for hours, expected in ((24, 24), (1, 24), (48, 48)):
        limits = replace(EMBEDDED, keep_hours=hours)
        other = await NatsBus.connect(broker.url, name="t", token=broker.token, limits=limits)
        try:
            await other.ensure_assets()
        finally:
            await other.close()
        assert await kept_h() == {
            "KVB_FACTS": expected, "KVB_SETTLE": expected, "KVB_BLOCKS": 0, "KVB_TRANSFER": 1 / 6,
        }  # fmt: skip
    await bus.ensure_assets()
    assert [one.data for one in await bus.history("kv.facts.a")] == [b"x"]


async def test_a_broker_without_the_assets_says_so(connect: Connect) -> None:
    bus = await connect()
    with pytest.raises(BusError, match="kvbus init"):
        await bus.store("kv.facts.a", b"x", message_id="x")
    with pytest.raises(BusError, match="stream not found"):
        await bus.history("kv.facts.*")
    with pytest.raises(BusError):
        await bus.get(BUCKET_EPOCH, "a")


async def test_two_deployments_share_a_broker_by_prefix(connect: Connect) -> None:
    small = Topics("blue")
    names = {str(asset["name"]) for asset in Assets(small, EMBEDDED).all()}
    assert names == {
        "blue_KVB_TRANSFER", "blue_KVB_FACTS", "blue_KVB_SETTLE", "blue_KVB_BLOCKS", "KV_blue_kvbus_instances",
        "KV_blue_kvbus_epoch",
    }  # fmt: skip
    bus = await connect(small)
    await bus.ensure_assets()
    await bus.store("blue.facts.a", b"x", message_id="x")
    assert [one.data for one in await bus.history("blue.facts.*")] == [b"x"]
    assert await bus.compare_and_set(BUCKET_EPOCH, "a", b"1", revision=0)


@pytest.mark.slow
async def test_an_instance_that_is_not_refreshed_expires_with_its_bucket_and_may_come_back(bus: NatsBus) -> None:
    await bus.put(BUCKET_INSTANCES, "a", b"1")
    await bus.put(BUCKET_EPOCH, "a", b"1")

    async def is_gone() -> bool:
        return await bus.get(BUCKET_INSTANCES, "a") is None

    assert not await is_gone()
    await until(is_gone, 6 * INSTANCE_TTL_S)
    assert await bus.keys(BUCKET_INSTANCES) == []
    assert await bus.compare_and_set(BUCKET_INSTANCES, "a", b"2", revision=0)
    assert await bus.get(BUCKET_EPOCH, "a") is not None


# P14: with the broker's own clock; an hour in production, half a second here
@pytest.mark.contract("P14")
async def test_a_term_that_outlived_its_stream_refuses_its_owner_and_lets_a_zombie_in(
    bus: NatsBus, connect: Connect
) -> None:
    wanted = next(one for one in Assets(TOPICS, EMBEDDED).streams() if one["name"] == "KVB_SETTLE")
    short = json.dumps(wanted | {"max_age": 500_000_000, "duplicate_window": 500_000_000}).encode()
    await bus.ask("$JS.API.STREAM.UPDATE.KVB_SETTLE", short, wait_s=30)
    zombie, log = await connect(), TOPICS.settle("a")
    assert await bus.store(log, b"term", message_id="1", after=0) == Stored(1, duplicate=False)

    async def is_gone() -> bool:
        return await bus.last(log) is None

    await until(is_gone)
    assert await bus.history(log) == []
    assert await bus.store(log, b"owner", message_id="2", after=1) == NotStored("moved")
    assert await zombie.store(log, b"zombie", message_id="3", after=0) == Stored(2, duplicate=False)


async def test_a_fence_and_its_repeats_outlive_a_killed_broker(bus: NatsBus, broker: EmbeddedBroker) -> None:
    log = TOPICS.settle("a")
    assert await bus.store(log, b"1", message_id="1", after=0) == Stored(1, duplicate=False)
    broker.kill()
    await until(lambda: not bus.health().connected)
    with pytest.raises(BusError, match="no connection"):
        await bus.last(log)
    with pytest.raises(BusError, match="no connection"):
        await bus.store(log, b"2", message_id="2", after=1)
    await broker.start()
    await until(lambda: bus.health().connected)
    assert await bus.store(log, b"1", message_id="1", after=0) == Stored(1, duplicate=True)
    assert await bus.store(log, b"2", message_id="2", after=1) == Stored(2, duplicate=False)
    assert await bus.last(log) == Delivery(log, b"2", 2)


def test_an_older_server_is_refused_by_version() -> None:
    check_version((2, 11), "nats://h")
    check_version((3, 0), "nats://h")
    with pytest.raises(ConfigError, match="too old"):
        check_version((2, 10), "nats://h")


# P19
@pytest.mark.contract("P19")
def test_the_work_consumer_has_no_backoff() -> None:
    assert "backoff" not in work_consumer("b", "kv.transfer.b.*", WorkLimits())


def test_drift_ignores_what_the_operator_sizes_and_what_a_newer_broker_adds() -> None:
    wanted: dict[str, object] = {
        "max_bytes": 1,
        "discard": "new",
        "republish": {"src": "a", "dest": "b"},
        "no_ack": False,
    }
    assert not list(drift(wanted, {"max_bytes": 2, "discard": "new", "republish": {"src": "a", "dest": "b", "new": 1}}))
    assert list(drift(wanted, {"discard": "old", "republish": {"src": "a", "dest": "c"}})) == [
        ("discard", "old", "new"),
        ("republish", {"src": "a", "dest": "c"}, {"src": "a", "dest": "b"}),
    ]


def test_headers_are_measured_as_the_broker_does() -> None:
    assert headers_length(None) == 0
    assert headers_length({"Nats-Msg-Id": "abc"}) == len("NATS/1.0\r\nNats-Msg-Id: abc\r\n\r\n")


def test_a_shown_url_hides_its_secret() -> None:
    assert shown("nats://user:secret@host:4222") == "nats://host:4222"
    assert shown("host:4222") == "nats://host:4222"
