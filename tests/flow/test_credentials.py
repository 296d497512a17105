"""Rights that end while somebody is connected: said at once, nothing lost, and over as soon as they are back."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_access import DeniedError, new_credential, read_credential
from kvbus.bus_assets import EMBEDDED
from kvbus.events import TransferStep
from kvbus.publisher import Publisher
from kvbus.subscriber import Seen, Subscriber
from kvbus.transport import Delivery, Stored
from tests.flow.guarded import DASH, GATEWAY, GuardedTown, guarded_town, instance
from tests.flow.town import TOPICS, prompt
from tests.waiting import until

pytestmark = pytest.mark.slow

BACK_S = 100.0
"""A client that was closed for good is replaced within seconds; this is far beyond it."""


@pytest.fixture
async def place() -> AsyncIterator[GuardedTown]:
    """A broker that knows its users, and no worker."""
    with tempfile.TemporaryDirectory(prefix="kvflow-") as name:
        async with guarded_town(Path(name), instance("a"), instance("b")) as running:
            yield running


async def queued(publisher: Publisher, name: str) -> bool:
    """Whether a request gets into the queue."""
    handle = await publisher.transfer(source="a", destination="b", prompt=prompt(name, 1))
    return (await handle.verdict(wait_s=0)).verdict == "queued"


async def test_a_requester_that_may_not_ask_any_more_is_told_so_and_asks_again_once_it_may(place: GuardedTown) -> None:
    assert await queued(place.publisher, "while it may")
    place.change({f'"{TOPICS.transfer_filter()}", "$JS.API.STREAM.INFO.KVB_TRANSFER"': '"kv.nothing"'})

    said: list[str] = []

    async def denied() -> bool:
        try:
            await place.publisher.transfer(source="a", destination="b", prompt=prompt("while it may not", 1))
        except DeniedError as error:
            said.append(str(error))
        return bool(said)

    await until(denied, BACK_S, what="the requester is told")
    assert "does not let this user publish on kv.transfer.b." in said[0]
    place.restore()

    async def may() -> bool:
        with suppress(DeniedError):
            return await queued(place.publisher, "while it may again")
        return False

    await until(may, BACK_S, what="the requester may ask again")


async def test_a_requester_whose_credential_is_withdrawn_hears_bus_unavailable_until_it_is_back(
    place: GuardedTown,
) -> None:
    key = read_credential(place.credential(GATEWAY)).key
    assert await queued(place.publisher, "with a credential")
    place.change({key: new_credential(GATEWAY, "kv").key})

    async def out() -> bool:
        handle = await place.publisher.transfer(source="a", destination="b", prompt=prompt("without", 1))
        verdict = await handle.verdict(wait_s=0)
        return verdict.verdict == "refused" and verdict.reason.startswith("bus_unavailable")

    await until(out, BACK_S, what="a request is refused, as a value")
    place.restore()

    async def back() -> bool:
        return await queued(place.publisher, "with its credential again")

    await until(back, BACK_S, what="the requester asks again, over a new connection")


async def test_a_follower_whose_right_ends_misses_nothing_once_it_is_back(place: GuardedTown) -> None:
    key = read_credential(place.credential(DASH)).key
    bus = await place.connect(DASH)
    heard: list[str] = []
    hear = heard.append

    async def follow() -> None:
        async with aclosing(Subscriber(bus, TOPICS).facts(settle=False)) as items:
            async for item in items:
                if isinstance(item, Seen) and isinstance(item.event.body, TransferStep):
                    hear(item.event.body.text)

    async def says(text: str) -> None:
        body = TransferStep(transfer="t", request_hash="0" * 32, step="x", text=text)
        data = place.encoded(body, speaker="a", member="m0", epoch=1)
        assert isinstance(await place.bus.store(TOPICS.facts("a"), data, message_id=text), Stored)

    following = asyncio.create_task(follow())
    await says("before")
    await until(lambda: heard == ["before"])
    place.change({key: new_credential(DASH, "kv").key})
    await until(lambda: not bus.health().connected, BACK_S, what="the follower is out")
    await says("meanwhile")
    place.restore()
    await until(lambda: bus.health().connected, BACK_S, what="the follower is back")
    await says("after")
    await until(lambda: len(heard) == 3, BACK_S, what="nothing is missing")
    assert heard == ["before", "meanwhile", "after"]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await bus.close()


class Gate:
    """Stands between a client and its broker, and can say what the broker says to a user whose time is over."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._broker = broker
        self._clients: list[asyncio.StreamWriter] = []
        self._carriers: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._enter, "127.0.0.1", 0)
        try:
            yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            self.expire()
            await asyncio.gather(*self._carriers, return_exceptions=True)

    def expire(self) -> None:
        """End every session as the server does at the end of a credential's time."""
        for client in self._clients:
            client.write(b"-ERR 'User Authentication Expired'\r\n")
            client.close()
        self._clients.clear()

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._broker.port)
        self._clients.append(writer)
        self._carriers += [asyncio.create_task(self._carry(*ends)) for ends in ((reader, ours), (theirs, writer))]

    @staticmethod
    async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()
        sink.close()
        with suppress(OSError):
            await sink.wait_closed()


async def test_a_session_that_expires_is_followed_by_another_with_its_subscriptions(broker: EmbeddedBroker) -> None:
    gate, heard = Gate(broker), list[bytes]()

    async def hear(delivery: Delivery) -> None:
        heard.append(delivery.data)

    async with gate.open() as url:
        bus = await NatsBus.connect(url, name="t", token=broker.token, limits=EMBEDDED)
        await bus.ensure_assets()
        await bus.subscribe(TOPICS.heartbeat("a"), hear)
        async with Publisher(bus=bus) as publisher:
            for number in range(3):
                assert await queued(publisher, f"in session {number}")
                gate.expire()
                await until(lambda number=number: sessions(bus) > number, BACK_S, what="a session follows")  # type: ignore[misc]
                await bus.publish(TOPICS.heartbeat("a"), b"%d" % number)
                await until(lambda number=number: len(heard) == number + 1, what="it hears what it heard before")  # type: ignore[misc]
            assert await bus.queued(TOPICS.transfer_filter("b")) == 3
        assert heard == [b"0", b"1", b"2"]
        await bus.close()


def sessions(bus: NatsBus) -> int:
    """How many sessions have followed the first one, if there is one now."""
    counters = bus.health().counters
    return counters.get("rebuilt", 0) + counters.get("reconnected", 0) if bus.health().connected else 0
