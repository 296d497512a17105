"""Coming back to a stream of events: what was lost meanwhile is told, whatever became of the log; and heads alone."""

import asyncio
import json

import pytest

from kvbus.errors import BusError
from kvbus.events import Header, TransferStep, decode, encode
from kvbus.gateway.feed import PLACES, Client, Feed, Told
from kvbus.gateway.transfer_doors import TransferTeller
from kvbus.subscriber import Lagged, Seen
from kvbus.testing.bus import MemoryBus
from kvbus.topics import Family
from kvbus.transport import Handler, Subscription
from tests.unit.gateway_parts import TOPICS, Stage, stage
from tests.waiting import DEADLINE_S

EVENTS = "/v1/kv_transfer/events"
HASH = "ab" * 16


def followed() -> Feed:
    """A feed that tells its clients of steps."""
    one = Feed(MemoryBus(), TOPICS)
    one.follow(TransferTeller())
    return one


def stored(sequence: int, number: int) -> Seen:
    """A step as it is read from the log."""
    return Seen(Family.FACTS, sequence, decode(packed(number)))


def packed(number: int) -> bytes:
    """A step as it stands in the log."""
    body = TransferStep(transfer=f"T{number}", request_hash=HASH, step="accepted")
    header = Header(k=body.KIND, i="b", m="m0", e=1, s=number, t=number)
    return encode(header, body)


async def read(client: Client) -> list[Told | int | None]:
    """What a client has waiting."""
    items: list[Told | int | None] = []
    while (item := await client.next(0.0)) is not None:
        items.append(item)
    return items


def names(items: list[Told | int | None]) -> list[str]:
    """What a client was told, in short: the transfer of a step, or that something is missing."""
    found: list[str] = []
    for item in items:
        assert isinstance(item, Told)
        found.append(json.loads(item.data).get("transfer", "") if item.name == "step" else item.name)
    return found


@pytest.mark.parametrize("goes_on_at", [900, 3], ids=["a gap", "back in time"])
async def test_who_was_away_when_the_log_lost_something_hears_of_that_and_of_all_that_came_then(
    goes_on_at: int,
) -> None:
    one = followed()
    present = one.join(lambda _: True)
    for sequence in (500, 501):
        one._hear(stored(sequence, sequence))
    (first, last) = await read(present)
    assert isinstance(first, Told)
    assert isinstance(last, Told)

    one._hear(Lagged(Family.FACTS, "the log lost some of what it held", lost=True))
    for sequence in (goes_on_at, goes_on_at + 1):
        one._hear(stored(sequence, sequence))

    after = ["lagged", f"T{goes_on_at}", f"T{goes_on_at + 1}"]
    told_present = await read(present)
    assert names(told_present) == after
    places = [item.place for item in (first, last, *told_present) if isinstance(item, Told)]
    assert places == sorted(set(places))
    assert names(await read(one.join(lambda _: True, after=last.place))) == after
    assert names(await read(one.join(lambda _: True, after=first.place))) == ["T501", *after]
    assert names(await read(one.join(lambda _: True, after=places[-2]))) == after[2:]
    assert names(await read(one.join(lambda _: True, after=places[-1]))) == []
    assert one.losses == 1


async def test_a_place_that_the_log_does_not_have_is_said_to_miss_something() -> None:
    one = followed()
    one._hear(stored(3, 1))
    beyond = await read(one.join(lambda _: True, after=10**17))  # of a log that was lost since, or of another one
    assert names(beyond) == ["lagged"]
    one._hear(stored(4, 2))
    snapshot = stored(0, 3)  # what a member said when it was asked stands nowhere in the log
    one._hear(snapshot)
    assert names(await read(one.join(lambda _: True, after=3 * PLACES))) == ["T2"]


async def test_what_is_stored_while_facts_cannot_be_followed_yet_is_heard_once_they_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbus.gateway.feed.PAUSE_S", 0.01)

    class Reluctant(MemoryBus):
        refused = 0

        async def subscribe(self, subject: str, handler: Handler) -> Subscription:
            if self.refused < 2:
                self.refused += 1
                await self.store_step()
                raise BusError("no connection to the broker")
            return await super().subscribe(subject, handler)

        async def store_step(self) -> None:
            await self.store(TOPICS.facts("b"), packed(self.refused), message_id=f"{self.refused}")

    one = Feed(Reluctant(), TOPICS)
    one.follow(TransferTeller())
    client = one.join(lambda _: True)
    running = asyncio.ensure_future(one.run())
    async with asyncio.timeout(DEADLINE_S):
        heard = [await client.next(DEADLINE_S) for _ in range(2)]
    assert names(heard) == ["T1", "T2"]
    running.cancel()


@pytest.mark.parametrize("path", [EVENTS, "/v1/cluster/events"])
async def test_a_question_for_the_head_of_a_stream_ends_at_once_and_the_connection_goes_on(path: str) -> None:
    async with stage() as gateway:
        await ask_for_the_head(gateway, path)


async def ask_for_the_head(gateway: Stage, path: str) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for method, asked in (("HEAD", path), ("GET", "/health")):
        writer.write(f"{method} {asked} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        async with asyncio.timeout(DEADLINE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            if method == "HEAD":
                assert b"text/event-stream" in head
            else:
                assert b'"status": "ok"' in await reader.readuntil(b"}")
    assert (gateway.parts.feed.clients, gateway.parts.page.clients) == (0, 0)
    writer.close()
    await writer.wait_closed()
