"""Requests of a gateway whose connection breaks under them, or that nobody takes: a place is never held for nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvbus.testing.bus import MemoryBroker
from tests.unit.gateway_parts import Stage, prompt, stage
from tests.unit.helpers.cut_bus import CutBus
from tests.waiting import until


@asynccontextmanager
async def cut_stage() -> AsyncIterator[tuple[Stage, CutBus]]:
    """A gateway with one place, whose connection breaks under the first request."""
    broker = MemoryBroker(clock=lambda: 0.0)
    cut = CutBus(broker)
    buses = iter([broker.connect(), broker.connect(), cut])  # those of a and b, and the gateway's own
    async with stage(lambda: next(buses), inflight_max=1) as one:
        yield one, cut


async def restore(one: Stage, cut: CutBus) -> None:
    cut.restore()
    await one.parts.directory.refresh()


# H18, H19
async def test_a_request_that_was_lost_for_good_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.submitting.AWAY_S", 0.1)
    async with cut_stage() as (one, cut):
        answered = (await one.ask(prompt=prompt())).json()
        assert (answered["status"], answered["reason"][:16]) == ("accepted", "bus_unavailable:")
        told = await one.record(answered["request_hash"], 30)
        assert (told["status"], str(told["reason"])[:25]) == ("failed", "refused: bus_unavailable:")
        await restore(one, cut)
        again = (await one.ask(prompt=prompt())).json()
        assert again["status"] == "accepted"
        assert (await one.record(again["request_hash"]))["status"] == "transferred"
        stats = await one.stats()
        assert (stats["fired"], stats["failed"], stats["transferred"], stats["inflight"]) == (2, 1, 1, 0)


# H13, H19
async def test_a_request_that_was_lost_with_a_connection_that_comes_back_is_served_all_the_same() -> None:
    async with cut_stage() as (one, cut):
        answered = (await one.ask(prompt=prompt())).json()
        assert answered["status"] == "accepted"
        await restore(one, cut)
        assert (await one.record(answered["request_hash"]))["status"] == "transferred"
        stats = await one.stats()
        assert (stats["fired"], stats["transferred"], stats["inflight"]) == (1, 1, 0)


# H18, H19
async def test_a_request_that_nobody_takes_is_never_said_to_run_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("VERDICT_WAIT_S", 0.05), ("QUEUE_WAIT_S", 0.05), ("SLACK_S", 0.05)):
        monkeypatch.setattr(f"kvbus.gateway.runs.{name}", value)
    async with stage(present=False, inflight_max=1) as one:
        request_hash = (await one.ask(prompt=prompt(), budget_s=0.5)).json()["request_hash"]
        seen: list[object] = []

        async def has_ended() -> bool:
            seen.append((await one.record(request_hash, 0))["status"])
            return seen[-1] not in {"queued", "running"}

        await until(has_ended)
        assert set(seen) == {"queued", "failed"}
        assert (await one.stats())["inflight"] == 0


async def test_of_clients_that_come_at_once_no_more_follow_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbus.gateway.streams.CLIENTS_MAX", 1)
    async with stage(names=("a",)) as one:
        late = type(one.played["a"])("late", one.bus)
        await late.register()  # not looked up yet: the door has to wait for that
        path = "/instances/late/v1/kv_transfer/events"
        asking = [one.client.send(one.client.build_request("GET", path), stream=True) for _ in range(4)]
        answers = await asyncio.gather(*asking)
        assert sorted(answered.status_code for answered in answers) == [200, 503, 503, 503]
        for answered in answers:
            await answered.aclose()
