"""Prefixes moved by name from one instance to others: no prompt travels, the answers stay right, nothing is lost."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.caching import CacheAnswered, CacheAsked, CacheChangeAsked
from kvbus.events import PrefixAnswered, PrefixAsked, decode
from kvbus.parts import Prompt
from kvbus.topics import Command
from tests.flow.command_line import kvbus
from tests.flow.members import assert_audit_is_clean
from tests.flow.town import ANSWER_S, BLOCK, OUTCOME_S, TOPICS, Town, prompt, town
from tests.flow.wire_tap import tapped

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

USES = (3, 2, 1)
"""How often each of a test's prompts was asked for; 4 blocks each."""
BLOCKS = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def four(folder: Path) -> AsyncIterator[Town]:
    """Instances a, b, c, d; the others take from a."""
    async with town(folder) as running:
        starts = (running.start(name, backend="memory", allow=["a"] if name != "a" else []) for name in "abcd")
        await asyncio.gather(*starts)
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def hot(four: Town, request: pytest.FixtureRequest) -> list[list[int]]:
    """Three prompts that a has answered, the first one most often; nobody holds anything else."""
    for name in "abcd":
        asked = four.encoded(CacheChangeAsked(action="forget"))
        answer = await four.bus.request(TOPICS.command(name, Command.CACHE, "m0"), asked, wait_s=ANSWER_S)
        assert isinstance(answer, bytes)
    prompts = [prompt(f"{request.node.name} {uses}", BLOCKS) for uses in USES]
    for ids, uses in zip(prompts, USES, strict=True):
        for _ in range(uses):
            await four.answer("a", ids, store=True)
    return prompts


async def held(running: Town, name: str, prompts: list[list[int]]) -> list[int]:
    """How many blocks of each prompt an instance holds."""
    return [await running.held(name, ids) for ids in prompts]


async def command(running: Town, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command as a person does, against this town's broker."""
    broker = ("--nats", running.broker.url, "--token", running.broker.token or "")
    return await asyncio.to_thread(kvbus, *arguments, *broker, state=running.folder / "state")


async def look(running: Town, name: str) -> CacheAnswered:
    data = await running.bus.request(
        TOPICS.command(name, Command.CACHE, "m0"), running.encoded(CacheAsked(prefixes=16)), wait_s=ANSWER_S
    )
    assert isinstance(data, bytes)
    body = decode(data).body
    assert isinstance(body, CacheAnswered)
    return body


async def assert_answers_are_right(running: Town, name: str, prompts: list[list[int]]) -> None:
    """Each prompt is answered from what was brought, and as where it is computed."""
    for ids in prompts:
        warm = await running.answer(name, ids)
        assert warm.end.cached_tokens == BLOCKS * BLOCK
        assert warm.end.tokens == await running.cold("a", ids)


async def test_all_prefixes_of_an_instance_are_brought_to_another_and_none_is_dropped(
    four: Town, hot: list[list[int]]
) -> None:
    rows = (await look(four, "a")).prefixes
    assert rows is not None
    assert [(row.blocks, row.uses) for row in rows] == [(BLOCKS, 3), (BLOCKS, 2), (BLOCKS, 1)]
    said: list[bytes] = []
    async with tapped(four.broker, lambda _subject, _reply, data: said.append(data)):
        told = await command(four, "migrate", "--from", "a", "--to", "b", "--json")
    assert told.returncode == 0, told.stderr
    document = json.loads(told.stdout)
    assert (document["moved"], document["failed"], document["evicted"]) == (3, 0, 0)
    assert document["blocks_moved"] == 3 * BLOCKS
    assert await held(four, "a", hot) == await held(four, "b", hot) == [BLOCKS] * 3
    for ids in hot:
        tokens = b"".join(one.to_bytes(4, "little") for one in ids[:BLOCK])
        assert not [data for data in said if tokens in data]  # the prompt itself went nowhere
    await assert_answers_are_right(four, "b", hot)
    again = json.loads((await command(four, "migrate", "--from", "b", "--to", "a", "--json")).stdout)
    assert again["failed"] == 3  # a takes from nobody: each failure says so
    assert "allows no source" in again["prefixes"][0]["failure"]
    await four.at_rest()
    await assert_audit_is_clean(four)


async def test_a_migration_that_may_evict_drops_only_what_has_settled_and_nothing_where_one_failed(
    four: Town, hot: list[list[int]]
) -> None:
    refused = await command(four, "migrate", "--from", "a", "--to", "nobody", "--evict", "--patience", "1", "--json")
    assert refused.returncode == 1, refused.stderr
    assert json.loads(refused.stdout)["evicted"] == 0
    assert await held(four, "a", hot) == [BLOCKS] * 3

    told = await command(four, "migrate", "--from", "a", "--to", "b", "--prefixes", "2", "--evict")
    assert told.returncode == 0, told.stderr
    assert "a → b: 2 of 2 prefixes, 8 blocks" in told.stdout
    assert "8 blocks dropped at a" in told.stdout
    assert await held(four, "a", hot) == [0, 0, BLOCKS]
    assert await held(four, "b", hot) == [BLOCKS, BLOCKS, 0]
    await four.at_rest()


async def test_a_prefix_is_replicated_to_several_instances_by_the_first_digits_of_its_name(
    four: Town, hot: list[list[int]]
) -> None:
    listed = json.loads((await command(four, "replicate", "--from", "a", "--json")).stdout)["prefixes"]
    assert [one["uses"] for one in listed] == [3, 2, 1]

    one = await command(four, "replicate", listed[1]["prefix"][:8], "--from", "a", "--to", "b,c,d")
    assert one.returncode == 0, one.stderr
    assert [await held(four, name, hot) for name in "bcd"] == [[0, BLOCKS, 0]] * 3

    hottest = await command(four, "replicate", "--hot", "3", "--from", "a", "--to", "b, c, d", "--json")
    assert hottest.returncode == 0, hottest.stderr
    assert json.loads(hottest.stdout)["moved"] == 9
    for name in "bcd":
        await assert_answers_are_right(four, name, hot)
    unknown = await command(four, "replicate", "00000000", "--from", "a", "--to", "b")
    assert unknown.returncode == 2
    assert "stands for 0 of 3 prefixes" in unknown.stderr
    await four.at_rest()
    await assert_audit_is_clean(four)


async def test_a_name_that_the_source_does_not_hold_any_more_fails_the_request_with_its_reason(
    four: Town, hot: list[list[int]]
) -> None:
    handle = await four.publisher.transfer(source="a", destination="b", prompt=Prompt(prefix=b"x" * 16))
    outcome = await handle.outcome(OUTCOME_S)
    assert outcome is not None
    assert (outcome.outcome, outcome.failure) == ("failed", "source_misses")
    assert outcome.reason == "a holds no prefix of this name any more"
    await four.at_rest()


# contract 37, 47
async def test_names_are_told_only_for_a_layout_that_both_sides_have(four: Town, hot: list[list[int]]) -> None:
    rows = (await look(four, "a")).prefixes
    assert rows
    layout = four.registered["a"].record.fingerprint
    answers = []
    for fingerprint in (layout, "another"):
        asked = four.encoded(PrefixAsked(name=rows[0].name, fingerprint=fingerprint), speaker="b", member="m0", epoch=1)
        data = await four.bus.request(TOPICS.command("a", Command.LEASE, "m0"), asked, wait_s=ANSWER_S)
        assert isinstance(data, bytes)
        answers.append(decode(data).body)
    same, other = answers
    assert isinstance(same, PrefixAnswered)
    assert isinstance(other, PrefixAnswered)
    assert same.names[-16:] == rows[0].name
    assert (other.names, other.refusal[:26]) == (b"", "layout fingerprints differ")
