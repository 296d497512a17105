"""A bus over several nodes: it finds one that lives, and asks again what a cluster without a leader did not hear."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED, Assets, WorkLimits
from kvbus.bus_guards import Tally, nodes, shown
from kvbus.bus_jetstream import Fetched, JetStream
from kvbus.errors import BusError
from kvbus.testing.cluster import free_ports
from kvbus.topics import Topics
from kvbus.transport import BUCKET_EPOCH
from tests.waiting import until

TOPICS = Topics()
TOKEN = "one for all nodes"  # noqa: S105 - of this test's own brokers
FAILOVERS = 6
"""A bus that keeps asking one node of two passes one of them by chance, and six once in 64 runs."""


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[list[EmbeddedBroker]]:
    """Two brokers that know nothing of each other: all that a client needs to fail over between."""
    async with AsyncExitStack() as ends:
        ports = zip(("one", "two"), free_ports(2), strict=True)
        brokers = [EmbeddedBroker(tmp_path / name, port=port, token=TOKEN) for name, port in ports]
        for broker in brokers:
            ends.push_async_callback(broker.stop)
            await broker.start()
        yield brokers


def url_of(brokers: Sequence[EmbeddedBroker]) -> str:
    return ",".join(broker.url for broker in brokers)


async def test_a_bus_enters_by_whichever_node_lives(pair: list[EmbeddedBroker]) -> None:
    (nobody,) = free_ports(1)
    bus = await NatsBus.connect(f"nats://127.0.0.1:{nobody}, {pair[0].url}", name="t", token=TOKEN)
    assert bus.health().connected
    await bus.close()


@pytest.mark.slow
async def test_a_bus_whose_node_dies_goes_on_with_another(pair: list[EmbeddedBroker]) -> None:
    bus = await NatsBus.connect(url_of(pair), name="t", token=TOKEN)
    try:
        for failover in range(FAILOVERS):
            connected = bus._link.client.connected_url
            assert connected is not None
            lost = next(broker for broker in pair if broker.url.endswith(f":{connected.port}"))
            lost.kill()

            def is_back(times: int = failover + 1) -> bool:
                return bus.health().connected and bus.health().counters.get("reconnected") == times

            await until(is_back, what="the bus is connected to the other node")
            await lost.start()
        assert "rebuilt" not in bus.health().counters, "the client found its way by itself"
    finally:
        await bus.close()


class LossyDoor:
    """A bus that loses the first so many questions to JetStream, as a cluster does that has no leader."""

    def __init__(self, bus: NatsBus, losses: int) -> None:
        self._bus = bus
        self.losses = losses
        self.asked: list[str] = []

    @property
    def closing(self) -> bool:
        return self._bus.closing

    async def ask(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, wait_s: float) -> bytes:
        self.asked.append(subject)
        if len(self.asked) <= self.losses:
            async with asyncio.timeout(wait_s):
                await asyncio.Event().wait()
        return await self._bus.ask(subject, data, headers=headers, wait_s=wait_s)

    async def tell(self, subject: str, data: bytes) -> None:
        await self._bus.tell(subject, data)

    async def fetch(self, stream: str, consumer: str, *, most: int, wait_s: float) -> Sequence[Fetched]:
        return await self._bus.fetch(stream, consumer, most=most, wait_s=wait_s)

    async def leave(self, stream: str, consumer: str) -> None:
        await self._bus.leave(stream, consumer)


@pytest.fixture
async def bus(broker: EmbeddedBroker) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(broker.url, name="t", token=broker.token, limits=EMBEDDED)
    await made.ensure_assets()
    yield made
    await made.close()


def streams_over(door: LossyDoor) -> JetStream:
    return JetStream(door, Assets(TOPICS, EMBEDDED), WorkLimits(), Tally(logging.getLogger(__name__)))


async def test_a_read_whose_question_was_lost_is_asked_again(bus: NatsBus) -> None:
    await bus.store("kv.facts.a", b"x", message_id="x")
    door = LossyDoor(bus, losses=1)
    last = await streams_over(door).last("kv.facts.a")
    assert last is not None
    assert last.data == b"x"
    assert len(door.asked) > 1


async def test_a_value_whose_answer_was_lost_is_put_again(bus: NatsBus) -> None:
    door = LossyDoor(bus, losses=1)
    await streams_over(door).put(BUCKET_EPOCH, "a", b"1")
    entry = await bus.get(BUCKET_EPOCH, "a")
    assert entry is not None
    assert entry.value == b"1"
    assert len(door.asked) > 1


@pytest.mark.slow
async def test_a_fenced_write_whose_answer_was_lost_is_not_repeated(bus: NatsBus) -> None:
    """Asked again, it would meet its own first copy, and tell that another has won."""
    door = LossyDoor(bus, losses=1)
    with pytest.raises(BusError, match="did not answer in time"):
        await streams_over(door).compare_and_set(BUCKET_EPOCH, "a", b"1", 0)
    assert len(door.asked) == 1


def test_nodes_are_told_apart_by_commas_and_shown_without_their_secrets() -> None:
    assert nodes("nats://a:1") == ["nats://a:1"]
    assert nodes("nats://a:1, nats://b:2,") == ["nats://a:1", "nats://b:2"]
    assert shown("nats://t@a:1,nats://u:p@b:2") == "nats://a:1,nats://b:2"
