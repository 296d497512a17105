"""An instance's cache by HTTP: look, pin, unpin, evict, forget; against real workers, one and several members."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.caching import PINS_MAX, CacheAsked, CacheChangeAsked, NamesForgotten
from kvbus.gateway.serving import running as gateway_running
from kvbus.gateway.serving import served
from kvbus.gateway.settings import GatewaySettings
from kvbus.parts import Prompt
from kvbus.topics import Command
from tests.flow.members import MEMBERS
from tests.flow.town import ANSWER_S, BLOCK, TOPICS, Town, prompt, town
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGES = 192
ROOM = PAGES - 2_048 // BLOCK
"""What peers and pins may take up: the pool, less the engine's longest prompt."""


@asynccontextmanager
async def http(running: Town, instance: str) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway in front of a town, and a client of one instance's base URL."""
    broker = running.broker
    bus = await NatsBus.connect(broker.url, name="gateway", token=broker.token, limits=EMBEDDED)
    settings = GatewaySettings(source_allow="a")
    async with (
        gateway_running(settings, bus, TOPICS) as parts,
        served(parts) as url,
        httpx.AsyncClient(base_url=f"{url}/instances/{instance}", timeout=60) as client,
    ):
        yield client
    await bus.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await asyncio.gather(running.start("a"), running.start("b", allow=["a"], pages=PAGES, backend="memory"))
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def b(pair: Town) -> AsyncIterator[httpx.AsyncClient]:
    async with http(pair, "b") as client:
        yield client


async def answer(ask: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
    """What the door says; a member that is too busy to answer is asked again."""
    answers: list[httpx.Response] = []

    async def answered() -> bool:
        answers.append(await ask())
        if answers[-1].status_code != 503:
            return True
        assert "does not answer" in answers[-1].json()["error"], answers[-1].text
        return False

    await until(answered, what="the members answer about their caches")
    return answers[-1]


async def post(client: httpx.AsyncClient, action: str, status: int = 200, **body: object) -> dict[str, Any]:
    answered = await answer(lambda: client.post(f"/v1/kv_cache/{action}", json=body))
    assert answered.status_code == status, answered.text
    return dict(answered.json())


async def cache(client: httpx.AsyncClient) -> dict[str, Any]:
    answered = await answer(lambda: client.get("/v1/kv_cache"))
    assert answered.status_code == 200, answered.text
    return dict(answered.json()["members"])


async def bring(client: httpx.AsyncClient, ids: list[int]) -> str:
    """Have a prompt brought, and return what the gateway said to the request."""
    asked = (await client.post("/v1/kv_transfer", json={"source": "a", "prompt": ids})).json()
    told = await client.get(f"/v1/kv_transfer/{asked['request_hash']}", params={"wait_s": 30})
    assert told.json()["status"] == "transferred", told.text
    return str(asked["status"])


async def test_what_is_held_of_a_prompt_is_told_and_dropped_on_demand_and_may_be_brought_again(
    pair: Town, b: httpx.AsyncClient
) -> None:
    ids = prompt("evicted", 3)
    assert (await post(b, "look", prompt=ids))["blocks_held"] == 0
    assert await bring(b, ids) == "accepted"
    assert await post(b, "look", prompt=ids) == {"instance": "b", "blocks_wanted": 3, "blocks_held": 3}
    assert await bring(b, ids) == "deduped"

    assert (await post(b, "evict", prompt=ids))["blocks"] == 3

    assert (await post(b, "look", prompt=ids))["blocks_held"] == 0
    assert await bring(b, ids) == "accepted"
    assert await pair.held("b", ids) == 3


# P26
async def test_a_pin_keeps_a_prompt_from_eviction_until_it_is_let_go(pair: Town, b: httpx.AsyncClient) -> None:
    ids = prompt("pinned", 4)
    refused = await post(b, "pin", 409, prompt=ids)
    assert "none of the 4 blocks is held" in refused["error"]
    await bring(b, ids)

    pinned = await post(b, "pin", prompt=ids, pin="system")
    assert (pinned["pin"], pinned["blocks"]) == ("system", 4)
    assert (await post(b, "pin", prompt=ids, pin="system"))["blocks"] == 4  # a repeat changes nothing
    (row,) = (await cache(b))["m0"]["pins"]
    assert (row["pin"], row["blocks"]) == ("system", 4)
    assert (await post(b, "evict", prompt=ids))["blocks"] == 0
    for number in range(PAGES // 40 + 1):  # more than the pool holds
        await bring(b, prompt(f"others {number}", 40))
    assert await pair.held("b", ids) == 4

    assert (await post(b, "unpin", pin="system"))["blocks"] == 4
    assert (await post(b, "evict", prompt=ids))["blocks"] == 4
    await post(b, "unpin", 409, pin="system")
    await pair.at_rest()


# P26
async def test_pins_leave_the_engine_its_longest_prompt(pair: Town, b: httpx.AsyncClient) -> None:
    pinned: list[str] = []
    for number in range(ROOM // 40):
        ids = prompt(f"many {number}", 40)
        await bring(b, ids)
        pinned.append((await post(b, "pin", prompt=ids))["pin"])
    assert len(set(pinned)) == len(pinned)
    with pair.workers["b"].client() as local:
        local.generate(ids=prompt("one more", 40), max_tokens=1, store=True)

    refused = await post(b, "pin", 409, prompt=prompt("one more", 40))

    assert f"more than may be kept: {ROOM} in all" in refused["error"]
    longest = prompt("longest", 2_048 // BLOCK, extra=0)
    answer = await pair.answer("b", longest[:-8], store=True, max_tokens=1)
    assert answer.end.cached_tokens == 0
    assert await pair.held("b", longest[:-8]) == 2_048 // BLOCK - 1
    for name in pinned:
        await post(b, "unpin", pin=name)
    await pair.at_rest()


async def test_after_forgetting_nothing_is_held_or_pinned_and_all_gateways_hear_of_it(
    pair: Town, b: httpx.AsyncClient
) -> None:
    ids = prompt("forgotten", 2)
    async with http(pair, "b") as other:
        assert await bring(other, ids) == "accepted"  # and is remembered there
        await post(b, "pin", prompt=ids)
        assert await bring(other, ids) == "deduped"

        assert (await post(b, "forget"))["blocks"] > 0

        assert (await post(b, "look", prompt=ids))["blocks_held"] == 0
        assert (await cache(b))["m0"]["pins"] == []

        async def heard() -> bool:
            return any(isinstance(event.body, NamesForgotten) for event in await pair.events("b"))

        await until(heard)

        async def brought_again() -> bool:
            asked = (await other.post("/v1/kv_transfer", json={"source": "a", "prompt": ids})).json()
            return bool(asked["status"] == "accepted")

        await until(brought_again)
    await pair.at_rest()


@pytest.mark.parametrize(
    ("action", "body", "status"),
    [
        ("pin", {}, 400),
        ("pin", {"prompt": ""}, 400),
        ("pin", {"prompt": 5}, 400),
        ("pin", {"prompt": "x", "pin": "n" * 65}, 400),
        ("unpin", {}, 400),
        ("unpin", {"pin": 7}, 400),
        ("unpin", {"pin": "nobody's"}, 409),
        ("evict", {"messages": []}, 400),
        ("look", {"prompt": None}, 400),
        ("look", {"prompt": [2**32]}, 400),
        ("look", {"prompt": "x" * 1_000_000}, 400),
        ("look", {"prompt": "x", "destination": "nobody"}, 400),
    ],
)
async def test_a_question_that_does_not_fit_is_refused_in_words(
    b: httpx.AsyncClient, action: str, body: dict[str, object], status: int
) -> None:
    assert len((await post(b, action, status, **body))["error"]) > 10


async def test_a_member_has_so_many_pins_and_no_more(pair: Town, b: httpx.AsyncClient) -> None:
    ids = prompt("one of many", 1)
    await bring(b, ids)
    subject, packed = (
        TOPICS.command("b", Command.CACHE, "m0"),
        Prompt(tokens=b"".join(i.to_bytes(4, "little") for i in ids)),
    )
    for number in range(PINS_MAX):
        asked = CacheChangeAsked(action="pin", pin=f"p{number}", prompt=packed)
        assert isinstance(await pair.bus.request(subject, pair.encoded(asked), wait_s=ANSWER_S), bytes)
    refused = await post(b, "pin", 409, prompt=ids, pin="one too many")
    assert f"{PINS_MAX} prompts are pinned already" in refused["error"]
    assert len((await cache(b))["m0"]["pins"]) == PINS_MAX
    await post(b, "forget")
    assert isinstance(await pair.bus.request(subject, pair.encoded(CacheAsked()), wait_s=ANSWER_S), bytes)
    await pair.at_rest()


@pytest.mark.slow
async def test_all_members_of_an_instance_are_asked(folder: Path) -> None:
    state = folder / "m"
    state.mkdir()
    async with town(state) as running:
        await running.start_all("b", MEMBERS, allow=["a"], backend="memory")
        async with http(running, "b") as client:
            assert set(await cache(client)) == set(MEMBERS)
            ids = prompt("never there", 2)
            assert (await post(client, "look", prompt=ids))["blocks_wanted"] == 2
            await post(client, "pin", 409, prompt=ids)
            assert (await post(client, "evict", prompt=ids))["blocks"] == 0
