"""Following transfers by server-sent events: in order, from where one left off, and each client at its own cost."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, MutableMapping
from typing import Any

import httpx
import pytest

from kvbus.events import EventsBatch, Header, TransferStep, encode
from kvbus.gateway.feed import CLIENT_QUEUE_MAX, CLIENTS_MAX, RECENT_MAX, Client, Feed, Told, frame, frames
from kvbus.gateway.streams import EventStream
from kvbus.subscriber import Seen
from kvbus.testing.bus import MemoryBus
from tests.unit.gateway_parts import TOPICS, Stage, prompt, stage
from tests.waiting import DEADLINE_S, until

EVENTS = "/v1/kv_transfer/events"
HASH = "ab" * 16


@pytest.fixture
async def gateway() -> AsyncIterator[Stage]:
    async with stage() as running:
        yield running


def feed() -> Feed:
    return Feed(MemoryBus(), TOPICS)


def told(place: int, name: str = "step") -> Told:
    return Told(name, place, str(place).encode())


async def read(client: Client) -> list[Told | int | None]:
    """What a client has waiting."""
    items: list[Told | int | None] = []
    while (item := await client.next(0.0)) is not None:
        items.append(item)
    return items


async def heard(answer: httpx.Response, count: int) -> list[tuple[str, str, dict[str, Any]]]:
    """The next events of a stream: id, name and data."""
    found: list[tuple[str, str, dict[str, Any]]] = []
    fields: dict[str, str] = {}
    async with asyncio.timeout(DEADLINE_S):
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            fields[name] = value
            if line == "" and "data" in fields:
                found.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
                fields = {}
                if len(found) == count:
                    break
    return found


# H13
async def test_steps_and_outcomes_are_told_as_they_happen(gateway: Stage) -> None:
    gateway.b.settles = False
    async with gateway.client.stream("GET", EVENTS) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        await until(lambda: gateway.parts.feed.clients == 1)
        await gateway.ask(prompt=prompt())
        request = await gateway.b.taken()
        await gateway.b.step(request, "accepted")
        await gateway.b.end(request)
        (_, first, step), (_, second, outcome) = await heard(answer, 2)
    assert (first, step["step"], step["request_hash"]) == ("step", "accepted", request.request_hash)
    assert (second, outcome["outcome"], outcome["destination"]) == ("outcome", "settled", "b")
    await until(lambda: gateway.parts.feed.clients == 0, what="who has gone is forgotten")


async def test_a_client_goes_on_from_the_last_event_that_it_saw(gateway: Stage) -> None:
    for number in range(3):
        await gateway.ask(prompt=prompt(f"{number}"))
    async with gateway.client.stream("GET", EVENTS, params={"after": 0}) as answer:
        places = [int(place) for place, _, _ in await heard(answer, 3)]
    assert places == sorted(places)
    async with gateway.client.stream("GET", EVENTS, headers={"last-event-id": f"{places[0]}"}) as answer:
        assert [int(place) for place, _, _ in await heard(answer, 2)] == places[1:]


async def test_a_client_may_follow_one_request_or_one_instance() -> None:
    async with stage(names=("a", "b", "c")) as one:
        hashes = [(await one.ask(prompt=prompt(name), destination=name)).json()["request_hash"] for name in ("b", "c")]
        for path, query, expected in (
            (EVENTS, {"request_hash": hashes[1]}, "c"),
            ("/instances/b" + EVENTS, {}, "b"),
        ):
            async with one.client.stream("GET", path, params={"after": 0, **query}) as answer:
                ((_, _, outcome),) = await heard(answer, 1)
            assert outcome["destination"] == expected


@pytest.mark.parametrize("query", ["request_hash=zz", "after=-1", "after=1e3", "after=x"])
async def test_a_parameter_that_does_not_fit_is_refused(gateway: Stage, query: str) -> None:
    assert (await gateway.client.get(f"{EVENTS}?{query}")).status_code == 400


async def test_a_client_that_reads_too_slowly_is_told_how_much_it_lost_and_costs_others_nothing() -> None:
    one = feed()
    slow = one.join(lambda _: True, queue_max=3)
    quick = one.join(lambda _: True)
    for place in range(1, 11):
        one.tell(told(place))

    assert await read(quick) == [told(place) for place in range(1, 11)]
    assert await read(slow) == [told(1), told(2), told(3), 7]
    one.tell(told(11))
    assert await read(slow) == [told(11)]
    slow.close()
    assert frame(told(3)) == b"id: 3\nevent: step\ndata: 3\n\n"


async def test_the_loss_is_told_in_the_stream() -> None:
    client = Client(lambda _: True, queue_max=1)
    client.tell(told(1))
    client.tell(told(2))
    client.close()
    said = [data async for data in frames(client, quiet_s=0.0)]
    assert said[0] == b": kvbus\n\n"
    assert said[1] == frame(told(1))
    assert b"event: lagged" in said[2]
    assert b"1 messages were dropped" in said[2]


async def test_who_comes_back_too_late_is_told_that_something_is_missing() -> None:
    one = feed()
    for place in range(1, RECENT_MAX + 11):
        one.tell(told(place))

    late = await read(one.join(lambda _: True, after=5, queue_max=RECENT_MAX + 1))
    assert isinstance(late[0], Told)
    assert late[0].name == "lagged"
    assert late[1] == told(11)
    on_time = await read(one.join(lambda _: True, after=RECENT_MAX + 8))
    assert on_time == [told(RECENT_MAX + 9), told(RECENT_MAX + 10)]


async def test_events_of_one_batch_have_places_of_their_own(gateway: Stage) -> None:
    header = {"i": "b", "m": "m0", "e": 1, "t": 1}
    steps = [TransferStep(transfer="T1", request_hash=HASH, step=f"s{number}") for number in range(3)]
    events = tuple(
        encode(Header.model_validate({"k": step.KIND, "s": 100 + number, **header}), step)
        for number, step in enumerate(steps)
    )
    await gateway.b.report(EventsBatch(events=events))
    async with gateway.client.stream("GET", EVENTS, params={"after": 0}) as answer:
        told = await heard(answer, 3)
    assert [step["step"] for _, _, step in told] == ["s0", "s1", "s2"]
    async with gateway.client.stream("GET", EVENTS, params={"after": told[0][0]}) as answer:
        assert [step["step"] for _, _, step in await heard(answer, 2)] == ["s1", "s2"]


class Heard:
    """A follower that notes what it hears."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def hear(self, seen: Seen) -> Iterable[Told]:
        if isinstance(seen.event.body, TransferStep):
            self.steps.append(seen.event.body.step)
        return ()


async def test_what_was_before_is_no_news_though_nobody_is_registered_who_said_it() -> None:
    bus, heard = MemoryBus(), Heard()

    async def say(number: int) -> None:
        body = TransferStep(transfer="T", request_hash=HASH, step=f"s{number}")
        header = Header(k=body.KIND, i="gone", m="m0", e=1, s=number, t=number)
        await bus.store(TOPICS.facts("gone"), encode(header, body), message_id=f"{number}")

    for number in range(1, 6):
        await say(number)
    one = Feed(bus, TOPICS)
    one.follow(heard)
    running = asyncio.ensure_future(one.run())
    await until(lambda: one.listening)
    await until(lambda: len(bus.broker.listeners) > 0, what="it is subscribed")
    await say(6)
    await until(lambda: "s6" in heard.steps)
    assert heard.steps == ["s6"]
    (missing,) = await read(one.join(lambda _: True, after=0))
    assert isinstance(missing, Told)
    assert missing.name == "lagged", "who asks for what was before is told that it is not here"
    running.cancel()
    await bus.close()


async def test_a_quiet_stream_shows_that_it_lives() -> None:
    client = Client(lambda _: True, queue_max=1)
    said = frames(client, quiet_s=0.01)
    assert [await anext(said) for _ in range(3)] == [b": kvbus\n\n", b": quiet\n\n", b": quiet\n\n"]


async def test_a_client_that_stops_reading_is_dropped() -> None:
    one = feed()
    client = one.join(lambda _: True)
    one.tell(told(1))
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)
        if b"data" in message.get("body", b""):
            await asyncio.Event().wait()  # its buffers are full, and stay so

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        return {}

    async with asyncio.timeout(60):
        await EventStream(one, client, send_wait_s=0.05)({"type": "http"}, receive, send)

    assert client.dropped
    assert one.clients == 0
    assert [message["type"] for message in sent].count("http.response.start") == 1


async def test_a_stalled_connection_holds_a_bounded_queue_while_others_hear_everything(gateway: Stage) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    writer.write(f"GET {EVENTS} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
    feed = gateway.parts.feed
    await until(lambda: feed.clients == 1)
    (stalled,) = feed._clients
    quick = feed.join(lambda _: True)
    most = 40_000

    heard = 0
    for place in range(1, most + 1):
        feed.tell(Told("step", place, b"x" * 500))
        if place % 500 == 0:
            heard += len(await read(quick))
            await until(lambda: True)
    assert heard == most
    assert len(stalled._queue) <= CLIENT_QUEUE_MAX
    assert stalled._lost > 0
    writer.close()
    await until(lambda: stalled not in feed._clients, what="who has gone is forgotten")
    del reader


async def test_there_is_room_for_so_many_clients_and_no_more(gateway: Stage) -> None:
    feed = gateway.parts.feed
    clients = [feed.join(lambda _: True) for _ in range(CLIENTS_MAX)]
    answered = await gateway.client.get(EVENTS)
    assert (answered.status_code, answered.headers["retry-after"]) == (503, "10")
    for client in clients:
        feed.leave(client)
    async with gateway.client.stream("GET", EVENTS) as followed:
        assert followed.status_code == 200


async def test_streams_end_when_the_gateway_does() -> None:
    async with stage() as one:
        stream = await one.client.send(one.client.build_request("GET", EVENTS), stream=True)
        await until(lambda: one.parts.feed.clients == 1)
        one.parts.feed.close()
        assert [line async for line in stream.aiter_lines() if line] == [": kvbus"]


async def test_facts_are_heard_again_after_the_broker_was_away() -> None:
    async with stage() as one:
        bus = one.bus
        assert isinstance(bus, MemoryBus)
        bus.cut()
        ready = await one.client.get("/ready")
        assert (ready.status_code, ready.json()["missing"][0]) == (503, "the bus is away")
        assert (await one.ask(prompt=prompt())).status_code == 503
        assert (await one.client.get("/health")).json()["bus"] == "away"
        assert (await one.client.get("/instances/b/v1/kv_cache")).status_code == 503
        bus.restore()
        answered = (await one.ask(prompt=prompt())).json()
        assert (await one.record(answered["request_hash"]))["status"] == "transferred"
        assert (await one.client.get("/ready")).json() == {"ready": True, "missing": []}


async def test_a_gateway_whose_instances_all_drain_is_not_ready_and_one_that_serves_another_is() -> None:
    async with stage() as one:
        for name in ("a", "b"):
            assert (await one.client.get("/ready")).status_code == 200
            one.played[name].state = "draining"
            await one.played[name].register()
            await one.parts.directory.refresh()
        ready = await one.client.get("/ready")
        assert (ready.status_code, ready.json()["missing"]) == (503, ["draining: a, b"])
    async with stage(instances=("b",)) as one:
        one.played["b"].state = "drained"
        await one.played["b"].register()
        await one.parts.directory.refresh()
        assert (await one.client.get("/ready")).json()["missing"] == ["draining: b"]
