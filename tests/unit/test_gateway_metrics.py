"""`/metrics` of a gateway: its own numbers, what members answer, and that neither grows with what clients send."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from starlette.types import ASGIApp, Message

from kvbus.events import HeartbeatSeen, InstanceRecord, StatsAnswered, StatsAsked, decode
from kvbus.gateway.app import application
from kvbus.gateway.directory import Directory
from kvbus.gateway.metering import ELSEWHERE
from kvbus.gateway.roll import FRESH_S, KEEP_S, MEMBERS_MAX, Roll
from kvbus.processes import identity
from kvbus.roles.registry import Registered
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Query
from kvbus.transport import Delivery
from tests.exposed import Exposed, well_named
from tests.unit.gateway_parts import TOPICS, Played, Stage, prompt, stage
from tests.waiting import until

PATH = "/v1/kv_transfer"


async def scraped(gateway: Stage) -> Exposed:
    """The metrics as they stand now, also for who asks a second time within the second that scrapes share."""
    answered = await gateway.client.get("/metrics")
    assert answered.status_code == 200, answered.text
    assert answered.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Exposed(answered.text)


async def tell(played: Played, **counters: float) -> None:
    """Have a played instance answer for its counters from now on."""

    async def answer(delivery: Delivery) -> bytes:
        assert isinstance(decode(delivery.data).body, StatsAsked)
        return played.said(StatsAnswered(counters=dict(counters)))

    await played.bus.respond(TOPICS.query(played.name, Query.STATS, "m0"), answer)


# R24, H29
async def test_what_a_gateway_counts_stands_there_and_adds_up() -> None:
    async with stage() as gateway:
        gateway.b.settles = False
        for name in ("one", "two", "three"):
            assert (await gateway.ask(prompt=prompt(name))).status_code == 202
        await gateway.b.end(await gateway.b.taken(3), "failed")
        await gateway.b.end(gateway.b.requests[0])
        await until(lambda: gateway.parts.transfers.statistics("b").inflight == 1, what="two have ended")
        assert (await gateway.ask(prompt=prompt("one"))).status_code == 202
        assert (await gateway.client.post(PATH, json={"source": "evil", "prompt": "x"})).status_code == 403
        assert (await gateway.client.post(PATH, content=b"no json")).status_code == 400
        assert (await gateway.client.get("/instances/b/v1/kv_transfer/stats")).status_code == 200
        assert (await gateway.client.get("/nowhere")).status_code == 404
        told = await scraped(gateway)

        name = "kvbus_gateway_transfers"
        fired, transferred, failed, inflight, deduped = (
            told.value(f"{name}_{word}", destination="b")
            for word in ("fired_total", "transferred_total", "failed_total", "inflight", "deduped_total")
        )
        assert (fired, transferred, failed, inflight, deduped) == (3, 1, 1, 1, 1)
        refused = {one.labels["reason"]: one.value for one in told.of("kvbus_gateway_requests_refused_total")}
        assert {word: count for word, count in refused.items() if count} == {"bad_request": 1, "source": 1}
        http = "kvbus_gateway_http_requests_total"
        assert told.value(http, method="POST", route=PATH, status="2xx") == 4
        assert told.value(http, method="POST", route=PATH, status="4xx") == 2
        assert told.value(http, method="GET", route=f"{PATH}/stats", status="2xx") == 1, "below an instance: the same"
        assert told.value(http, method="GET", route=ELSEWHERE, status="4xx") == 1
        assert (told.value("kvbus_gateway_feed_listening"), told.value("kvbus_gateway_stale")) == (1, 0)
        well_named(told)


async def test_followers_are_counted_while_they_follow() -> None:
    async with stage() as gateway:
        async with gateway.client.stream("GET", f"{PATH}/events") as following:
            assert await anext(following.aiter_lines()) == ": kvbus"
            assert (await scraped(gateway)).value("kvbus_gateway_followers") == 1
        await until(lambda: gateway.parts.feed.clients == 0, what="it has gone")
        assert (await scraped(gateway)).value("kvbus_gateway_followers") == 0


async def test_a_member_that_answers_is_up_with_what_it_counts_and_one_that_does_not_is_down() -> None:
    async with stage() as gateway:
        await tell(gateway.b, leases_held=3, memory_submissions=2, memory_ended_peer_ack=2)
        told = await scraped(gateway)
        assert {one.labels["instance"]: one.value for one in told.of("kvbus_member_up")} == {"a": 0, "b": 1}
        assert told.value("kvbus_leases_held", instance="b", member="m0") == 3
        assert told.value("kvbus_binding_ends_total", instance="b", binding="memory", evidence="peer_ack") == 2
        assert told.labels("kvbus_leases_held", "instance") == {"b"}
        assert told.value("kvbus_member_info", instance="a", engine="toy", model="toy", version="1") == 1
        well_named(told)


async def test_two_thousand_prompts_and_paths_make_no_series_more() -> None:
    async with stage(inflight_max=50) as gateway:  # 50 become transfers, the others find no place
        await tell(gateway.b, leases_held=1)
        gateway.b.settles = False
        app = application(gateway.parts)
        ask = {"source": "a", "destination": "b"}
        assert await said_to(app, "POST", PATH, ask | {"prompt": prompt("first")}) == 202
        assert await said_to(app, "GET", f"{PATH}/{0:032x}") == 404
        assert await said_to(app, "BREW", "/pot/first") == 404
        series = len((await scraped(gateway)).samples)
        for number in range(2_000):
            assert await said_to(app, "POST", PATH, ask | {"prompt": prompt(str(number))}) == 202
            if number % 10 == 0:
                assert await said_to(app, "GET", f"{PATH}/{number:032x}") == 404
                assert await said_to(app, f"BREW{number}", f"/pot/{number}") == 404
        told = await scraped(gateway)
        assert told.value("kvbus_gateway_transfers_fired_total", destination="b") == 50
        assert told.value("kvbus_gateway_transfers_skipped_busy_total", destination="b") == 1_951
        assert told.value("kvbus_gateway_http_requests_total", method=ELSEWHERE, route=ELSEWHERE, status="4xx") == 201
        assert len(told.samples) == series + 1, "one: the scrapes themselves are counted from the second on"


async def said_to(app: ASGIApp, method: str, path: str, body: object = None) -> int:
    """The status that an application answers to a request, without a socket between."""
    status: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode(), "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])

    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [(b"host", b"localhost")], "root_path": "", "scheme": "http", "server": ("localhost", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    return status[0]


async def test_what_a_gateway_does_not_hear_any_more_is_stale() -> None:
    broker = MemoryBroker(clock=lambda: 0.0)
    async with stage(broker.connect) as gateway:
        assert (await scraped(gateway)).value("kvbus_gateway_stale") == 0
        bus = gateway.bus
        assert isinstance(bus, MemoryBus)
        bus.cut()
        try:
            told = await scraped(gateway)
            assert (told.value("kvbus_gateway_bus_connected"), told.value("kvbus_gateway_stale")) == (0, 1)
        finally:
            bus.restore()


# ------------------------------------------------------------------------------------------------------- the roll call


@dataclass
class Hall:
    """A roll over a registry and a clock that the test moves by hand."""

    bus: MemoryBus
    directory: Directory
    now: float = 100.0
    asked: list[str] = field(default_factory=list)
    roll: Roll = field(init=False)

    def __post_init__(self) -> None:
        self.roll = Roll(self.bus, TOPICS, self.directory, "tester", clock=lambda: self.now)

    def registered(self, *names: str, epoch: int = 1) -> None:
        """Have the registry hold these instances, and nobody else."""
        record = InstanceRecord(
            verify_key=b"k" * 32, fingerprint="f", model="toy", engine="toy", block_tokens=32, ranks=1, page_bytes=64,
            pages=8, process=identity(), transports=("memory",), version="1", urls=None,
        )  # fmt: skip
        self.directory._members = {name: {"m0": Registered(name, "m0", epoch, record)} for name in names}

    async def later(self, seconds: float) -> dict[str, float]:
        """Call the roll after some time; who is on it, and for how long each has been silent."""
        self.now += seconds
        return {one.instance: one.silent_s(self.now) for one in await self.roll.call()}


@asynccontextmanager
async def hall() -> AsyncIterator[Hall]:
    bus = MemoryBroker(clock=lambda: 0.0).connect()
    try:
        yield Hall(bus, Directory(bus))
    finally:
        await bus.close()


async def test_a_member_that_falls_silent_is_missed_for_an_hour_and_then_forgotten() -> None:
    async with hall() as here:
        beats = Played("b", here.bus)
        here.registered("b")
        assert await here.later(0) == {"b": 0}
        await here.bus.publish(TOPICS.heartbeat("b"), beats.said(_beat()))
        await until(lambda: here.roll.members["b", "m0"].beat_at is not None, what="a heartbeat is heard")
        here.registered()
        assert await here.later(20) == {"b": 20}
        assert await here.later(KEEP_S - 21) == {"b": KEEP_S - 1}
        assert await here.later(2) == {}


@pytest.mark.parametrize("state", ["draining", "drained", "leaving"])
async def test_a_member_that_said_that_it_goes_is_forgotten_with_its_record(state: str) -> None:
    async with hall() as here:
        here.directory.fresh = True
        played = Played("b", here.bus)
        here.registered("a", "b", "c", epoch=played.epoch)
        await here.later(0)
        await here.bus.publish(TOPICS.heartbeat("b"), played.said(_beat(state)))
        await until(lambda: here.roll.members["b", "m0"].state == state, what="it is heard")
        assert set(await here.later(20)) == {"a", "b", "c"}, "its record stands"
        here.registered("a", epoch=played.epoch)
        assert set(await here.later(10)) == {"a", "c"}, "c went without a word"
        here.registered("a", "b", epoch=played.epoch + 1)
        await here.later(1)
        here.registered("a")
        assert set(await here.later(10)) == {"a", "b", "c"}, "its next run said nothing of going"


async def test_a_registry_that_cannot_be_read_lets_nobody_go_and_one_that_stays_after_all_is_missed() -> None:
    async with hall() as here:
        played = Played("b", here.bus)
        here.registered("b", epoch=played.epoch)
        await here.later(0)
        await here.bus.publish(TOPICS.heartbeat("b"), played.said(_beat("draining")))
        await until(lambda: here.roll.members["b", "m0"].state == "draining", what="it is heard")
        here.registered()
        assert set(await here.later(10)) == {"b"}, "nobody knows whether its record is gone"
        here.registered("b", epoch=played.epoch)
        await here.later(1)
        await here.bus.publish(TOPICS.heartbeat("b"), played.said(_beat()))
        await until(lambda: here.roll.members["b", "m0"].state == "", what="it stays after all")
        here.directory.fresh = True
        here.registered()
        assert set(await here.later(10)) == {"b"}


async def test_heartbeats_of_who_is_not_registered_and_of_who_speaks_for_others_count_for_nothing() -> None:
    async with hall() as here:
        here.registered("b")
        await here.later(0)
        for name, subject in (("nobody", "nobody"), ("b", "a")):
            await here.bus.publish(TOPICS.heartbeat(subject), Played(name, here.bus).said(_beat()))
        await here.bus.publish(TOPICS.heartbeat("b"), b"no event")
        assert await here.later(5) == {"b": 5}


async def test_scrapes_within_a_second_share_one_call() -> None:
    async with hall() as here:
        here.registered("b")
        played, counted = Played("b", here.bus), []

        async def answer(_delivery: Delivery) -> bytes:
            counted.append(1)
            return played.said(StatsAnswered(counters={"leases_held": 1}))

        await here.bus.respond(TOPICS.query("b", Query.STATS, "m0"), answer)
        await asyncio.gather(*(here.roll.call() for _ in range(10)))
        assert len(counted) == 1
        await here.later(FRESH_S)
        assert len(counted) == 2


async def test_an_answer_in_another_name_is_none() -> None:
    async with hall() as here:
        here.registered("a", "b")
        other = Played("a", here.bus)

        async def answer(_delivery: Delivery) -> bytes:
            return other.said(StatsAnswered(counters={"leases_held": 1}))

        for name in ("a", "b"):
            await here.bus.respond(TOPICS.query(name, Query.STATS, "m0"), answer)
        found = {one.instance: one.counted for one in await here.roll.call()}
        assert found == {"a": {"leases_held": 1}, "b": None}


async def test_the_roll_is_bounded_and_makes_room_by_who_is_gone_longest() -> None:
    async with hall() as here:
        here.registered(*(f"i{place}" for place in range(MEMBERS_MAX + 5)))
        assert len(await here.later(0)) == MEMBERS_MAX
        here.registered(*(f"i{place}" for place in range(1, MEMBERS_MAX)))
        await here.later(10)
        here.registered(*(f"i{place}" for place in range(1, MEMBERS_MAX)), "new")
        found = await here.later(10)
        assert len(found) == MEMBERS_MAX
        assert "new" in found
        assert "i0" not in found


def _beat(state: str | None = None) -> HeartbeatSeen:
    return HeartbeatSeen(
        transfers_running=0, leases_held=0, pages_free=8, pages_cached=0, pages_lent=0, facts_sequence=1, settle_n=0,
        state=state,
    )  # fmt: skip
