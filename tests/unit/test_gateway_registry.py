"""What the doors answer while the registry changes or cannot be read: about who is there, the gateway looks first."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvbus.testing.bus import MemoryBus
from kvbus.topics import Command
from tests.unit.gateway_parts import TOPICS, Played, Stage, prompt, stage


@pytest.fixture
async def gateway() -> AsyncIterator[Stage]:
    async with stage() as running:
        yield running


async def arrived(one: Stage, name: str) -> Played:
    """An instance that has registered just now: the gateway's copy does not have it."""
    late = Played(name, one.bus)
    await late.register()
    assert name not in one.parts.directory.instances
    return late


async def test_all_who_name_a_source_that_has_just_registered_are_served() -> None:
    async with stage(names=("b",)) as one:
        await arrived(one, "a")
        answers = await asyncio.gather(*(one.ask(prompt=prompt(f"{number}")) for number in range(3)))
        assert [answered.status_code for answered in answers] == [202] * 3


# H23
async def test_the_base_url_of_a_listed_instance_that_has_just_registered_is_its_name() -> None:
    async with stage(names=("b",)) as one:
        await arrived(one, "a")
        answered = await one.ask(source=f"{one.url}/instances/a", prompt=prompt())
        assert answered.status_code == 202, answered.text


# H4
async def test_a_source_that_is_not_listed_is_refused_for_good_and_one_that_is_away_for_now(gateway: Stage) -> None:
    for source in ("evil", f"{gateway.url}/instances/evil"):
        unlisted = await gateway.ask(source=source, prompt=prompt())
        assert unlisted.status_code == 403
        assert "retry-after" not in unlisted.headers
    async with stage(source_allow="a,later") as one:
        away = await one.ask(source="later", prompt=prompt())
        assert (away.status_code, away.headers["retry-after"]) == (503, "1")
        assert "no registered instance answers to this source" in away.json()["error"]


# H4
async def test_while_the_registry_cannot_be_read_nobody_is_said_to_be_absent() -> None:
    async with stage(source_allow="a,later") as one:
        bus = one.bus
        assert isinstance(bus, MemoryBus)
        bus.cut()
        for source, status in (("later", 503), (f"{one.url}/instances/later", 503), ("evil", 403)):
            answered = await one.ask(source=source, prompt=prompt())
            assert answered.status_code == status, source
        unknown = await one.client.get("/instances/later/v1/kv_transfer/stats")
        assert (unknown.status_code, unknown.headers["retry-after"]) == (503, "1")
        assert (await one.client.get("/instances/later/v1/models")).status_code == 503
        bus.restore()
        assert (await one.client.get("/instances/later/v1/kv_transfer/stats")).status_code == 404


async def test_a_destinations_word_that_its_source_is_not_there_passes(gateway: Stage) -> None:
    gateway.b.word, gateway.b.reason = "refused", "no instance 'a' is registered: is its worker running?"
    answered = await gateway.ask(prompt=prompt())
    assert (answered.status_code, answered.headers["retry-after"]) == (503, "1")


async def test_a_gateway_that_serves_instances_by_name_finds_one_that_has_just_registered() -> None:
    async with stage(names=("a",), instances=("b",)) as one:
        absent = await one.client.get("/instances/b/v1/kv_cache")
        assert (absent.status_code, absent.json()["error"]) == (503, "no worker of b is registered")
        unmeant = await one.client.post("/instances/b/v1/completions", json={"prompt": "x"})
        assert unmeant.status_code == 503
        assert unmeant.json()["error"]["message"] == "no worker of b is registered"

        await arrived(one, "b")
        meant = await one.client.post("/instances/b/v1/completions", json={"prompt": "x"})
        assert "no worker that this gateway can reach" in meant.json()["error"]["message"]
    async with stage(names=("a",), instances=("b",)) as one:
        late = await arrived(one, "b")
        await late.bus.respond(TOPICS.command("b", Command.CACHE, "m0"), late._on_cache)
        shown = await one.client.get("/instances/b/v1/kv_cache")
        assert shown.status_code == 200, shown.text
