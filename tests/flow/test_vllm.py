"""Two real vLLM servers and a transformers engine, tiny: what one computed the others answer from, token for token."""

import asyncio
import http.client
import json
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from kvbus.commands.poison import flip_sign_bits, flip_top_exponent_bits
from tests.flow.town import BLOCK, Town, town
from tests.flow.vllm_servers import VllmServer, attached, registered, require_vllm, start_server
from tests.tiny_llama import VOCAB_SIZE, make_tiny_llama
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.timeout(900)]

CACHE_BYTES = 3 << 19
"""96 blocks of the tiny model: three long prompts fill it, so that vLLM preempts now and then."""
MIXED_REQUESTS = 300
AT_A_TIME = 8
TROUBLE = ("AssertionError", "Traceback", "EngineDeadError", "nobody awaits")


@dataclass(slots=True)
class Servers:
    """A town with vLLM at a and b, and transformers at c."""

    town: Town
    vllm: dict[str, VllmServer] = field(default_factory=dict)

    async def complete(self, name: str, ids: Sequence[int], *, max_tokens: int = 16, salt: str = "") -> tuple[int, ...]:
        """What a vLLM answers."""
        server = self.vllm[name]
        answered = await asyncio.to_thread(server.complete, ids, max_tokens=max_tokens, salt=salt)
        return answered.tokens

    async def hits(self, name: str) -> float:
        """How many tokens a vLLM took from kvbus so far."""
        return await asyncio.to_thread(self.vllm[name].external_hits)


def prompt(name: str, blocks: int, extra: int = 5) -> list[int]:
    """Token ids of the tiny model's that no other name shares."""
    pick = random.Random(name)
    return [pick.randrange(3, VOCAB_SIZE) for _ in range(blocks * BLOCK + extra)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[Servers]:
    require_vllm()
    with tempfile.TemporaryDirectory(prefix="kvvllm-") as name:
        folder = Path(name)
        model = make_tiny_llama(folder / "tiny")
        async with town(folder) as running:
            built = Servers(running)
            try:
                for own, other in (("a", "b"), ("b", "a")):
                    arguments = ["--instance", own, "--engine", "vllm", "--pages", "256", "--backend", "ucx"]
                    arguments += ["--allow", other, "--allow", "c"]
                    worker = running.workers[own] = running._spawn(own, arguments)
                    built.vllm[own] = start_server(folder, worker.socket, own, model, cache_bytes=CACHE_BYTES)
                await asyncio.gather(*(server.ready() for server in built.vllm.values()))
                await asyncio.gather(*(attached(running.workers[own]) for own in built.vllm))
                await registered(running, *built.vllm)
                await running.start("c", engine="transformers", options={"folder": str(model)}, allow=["a", "b"])
                yield built
            finally:
                for server in built.vllm.values():
                    server.end()


async def test_a_prompt_prefilled_on_one_server_is_answered_by_the_other_with_the_same_tokens(servers: Servers) -> None:
    ids = prompt("there", 31)
    first = await servers.complete("a", ids)
    assert len(set(first)) > 2
    assert await servers.town.held("a", ids) == 31
    before = await servers.hits("b")

    outcome = await servers.town.stage(ids)

    assert (outcome.outcome, outcome.pages_moved) == ("settled", 31)
    assert await servers.complete("b", ids) == first
    assert await servers.hits("b") - before == 31 * BLOCK
    await servers.town.at_rest()


async def test_a_prompt_that_nobody_has_is_prefilled_through_the_sources_server(servers: Servers) -> None:
    ids = prompt("missing", 12)
    before = await servers.hits("b")
    outcome = await servers.town.stage(ids)
    assert (outcome.outcome, outcome.pages_moved) == ("settled", 12)
    assert await servers.complete("b", ids) == await servers.complete("a", ids)
    assert await servers.hits("b") - before == 12 * BLOCK
    await servers.town.at_rest()


@pytest.mark.parametrize(("source", "destination"), [("c", "b"), ("a", "c")])
async def test_vllm_and_transformers_take_each_others_pages(servers: Servers, source: str, destination: str) -> None:
    ids = prompt(f"{source} to {destination}", 9)
    cold = await servers.town.cold(destination, ids)
    outcome = await servers.town.stage(ids, source=source, destination=destination)
    assert (outcome.outcome, outcome.pages_moved) == ("settled", 9), outcome.reason

    staged = await servers.town.answer(destination, ids)

    assert staged.end.tokens == cold
    assert await servers.town.cold(source, ids) == cold
    if destination == "c":
        assert staged.end.cached_tokens == 9 * BLOCK
    await servers.town.at_rest()


async def test_a_changed_page_changes_the_answer_so_it_is_the_pages_that_are_read(servers: Servers) -> None:
    # Signs alone: the server goes on, and its attention over a block multiplies by zero what a sequence does not reach,
    # so that what is no number there would spoil the answer of whoever gets the block next.
    ids = prompt("poisoned", 8)
    right = await servers.complete("a", ids)
    assert (await servers.town.stage(ids)).outcome == "settled"
    with servers.town.workers["b"].client() as client:
        where = client.where(ids)
        flip_sign_bits(where, where.pages[1])
    assert await servers.complete("b", ids) != right


async def test_a_prompt_under_another_salt_is_not_found(servers: Servers) -> None:
    ids = prompt("salted", 6)
    first = await servers.complete("a", ids)
    assert (await servers.town.stage(ids)).outcome == "settled"
    before = await servers.hits("b")
    assert await servers.complete("b", ids, salt="another") == first
    assert await servers.hits("b") == before


async def test_three_hundred_mixed_requests_are_answered_right_and_leave_nothing_behind(servers: Servers) -> None:
    pick = random.Random(300)
    prompts = [prompt(f"mixed {number}", pick.randrange(1, 14), pick.randrange(BLOCK)) for number in range(24)]
    right = [await servers.complete("a", ids, max_tokens=24, salt=f"cold {row}") for row, ids in enumerate(prompts)]
    plan = [
        (pick.choice("ab"), pick.randrange(len(prompts)), pick.random() * 0.4 if row % 3 == 0 else None)
        for row in range(MIXED_REQUESTS)
    ]
    gate = asyncio.Semaphore(AT_A_TIME)
    wrong: list[str] = []

    async def one(name: str, row: int, abort_after_s: float | None) -> None:
        async with gate:
            if abort_after_s is not None:
                await asyncio.to_thread(begin_and_leave, servers.vllm[name], prompts[row], abort_after_s)
            elif (got := await servers.complete(name, prompts[row], max_tokens=24)) != right[row]:
                wrong.append(f"{name} said {got} to prompt {row}, expected {right[row]}")

    async def move() -> int:
        settled = 0
        while True:
            source, destination = pick.sample("ab", 2)
            ids = prompts[pick.randrange(len(prompts))] + [pick.randrange(3, VOCAB_SIZE) for _ in range(BLOCK)]
            with suppress(TimeoutError):
                settled += (await servers.town.stage(ids, source=source, destination=destination)).outcome == "settled"
            moved.append(settled)

    moved: list[int] = []
    mover = asyncio.create_task(move())
    await asyncio.gather(*(one(*each) for each in plan))
    mover.cancel()
    with suppress(asyncio.CancelledError):
        await mover

    assert not wrong, wrong[:3]
    assert moved[-1] > 3
    for name, server in servers.vllm.items():
        await until(partial(asyncio.to_thread, server.is_empty), what=f"all blocks of vLLM {name} are free")
        log = server.log.read_text()
        assert not [word for word in TROUBLE if word in log]
    await servers.town.at_rest()


async def test_a_worker_that_dies_costs_no_answer_and_the_next_one_is_attached_to(servers: Servers) -> None:
    ids, other = prompt("before", 10), prompt("after", 10)
    right = await servers.complete("a", ids)
    servers.town.workers["b"].kill()
    assert await servers.complete("b", ids) == right

    arguments = [*servers.town.workers["b"].arguments, "--digests", "always"]
    servers.town.workers["b"] = servers.town._spawn("b", arguments)
    await attached(servers.town.workers["b"])
    await registered(servers.town, "b")
    before = await servers.hits("b")
    assert (await servers.town.stage(other)).outcome == "settled"
    assert await servers.complete("b", other) == await servers.complete("a", other)
    assert await servers.hits("b") - before == 10 * BLOCK


async def test_with_digests_a_changed_page_is_refused_by_the_engine_and_computed(servers: Servers) -> None:
    ids = prompt("noticed", 8)
    right = await servers.complete("a", ids)
    assert (await servers.town.stage(ids)).outcome == "settled"
    with servers.town.workers["b"].client() as client:
        where = client.where(ids)
        flip_top_exponent_bits(where, where.pages[3])
    assert await servers.complete("b", ids) == right
    assert (await servers.town.counters("b"))["pages_spoiled"] == 1


async def test_a_vllm_that_is_killed_leaves_its_worker_nothing_to_wait_for(servers: Servers) -> None:
    server = servers.vllm["b"]
    await asyncio.to_thread(begin_and_leave, server, prompt("last", 30), 0.2)
    server.kill()

    async def returned() -> bool:
        counters = await servers.town.counters("b")
        return not (counters["leases_held"] or counters["pages_writing"])

    await until(returned, what="the dead engine's leases have gone back")


def begin_and_leave(server: VllmServer, ids: Sequence[int], after_s: float) -> None:
    """Ask for a long answer, and hang up after a while, whatever came until then."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=after_s + 0.001)
    body = {"model": "tiny", "prompt": list(ids), "max_tokens": 200, "stream": True, "ignore_eos": True}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return
    finally:
        connection.close()
