"""The three answers to what the source lacks: compute it, lend the prefix that is there, or fail."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.events import TransferStep
from tests.flow.town import BLOCK, Town, prompt, town

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await asyncio.gather(running.start("a"), running.start("b", allow=["a"]))
        yield running


async def test_prefill_has_the_source_compute_what_it_lacks_and_keeps_it_there(pair: Town) -> None:
    ids = prompt("prefill", 6)
    assert await pair.held("a", ids) == 0

    outcome = await pair.stage(ids, on_miss="prefill")

    assert (outcome.outcome, outcome.pages_moved) == ("settled", 6)
    assert await pair.held("a", ids) == 6
    assert (await pair.answer("b", ids)).end.tokens == await pair.cold("b", ids)
    await pair.at_rest()


async def test_a_transfer_reports_its_steps_in_order(pair: Town) -> None:
    outcome = await pair.stage(prompt("steps", 60))
    await pair.step("b", outcome.request_hash, "access_ended")

    steps = [event.body for event in await pair.events("b") if isinstance(event.body, TransferStep)]
    names = [step.step for step in steps if step.transfer == outcome.transfer]
    expected = ["accepted", "resolved", "leased", "asking", "granted", "moving", "access_ended"]
    assert [name for name in names if name in expected] == expected
    await pair.at_rest()


async def test_partial_gives_exactly_the_prefix_that_the_source_holds(pair: Town) -> None:
    ids = prompt("partial", 9)
    await pair.answer("a", ids[: 5 * BLOCK + 1], store=True)

    outcome = await pair.stage(ids, on_miss="partial")

    assert (outcome.outcome, outcome.reason) == ("partial", "the source lent 5 of 9 blocks")
    assert (outcome.pages_wanted, outcome.pages_moved, outcome.lo, outcome.hi) == (9, 5, 0, 5)
    assert await pair.held("b", ids) == 5
    assert await pair.held("a", ids) == 5  # nothing was computed for it
    staged = await pair.answer("b", ids)
    assert staged.end.cached_tokens == 5 * BLOCK
    assert staged.end.tokens == await pair.cold("b", ids)
    await pair.at_rest()


async def test_partial_of_all_that_is_wanted_is_settled(pair: Town) -> None:
    ids = prompt("whole", 4)
    await pair.answer("a", ids, store=True)

    assert (await pair.stage(ids, on_miss="partial")).outcome == "settled"
    await pair.at_rest()


async def test_partial_with_nothing_there_fails_and_moves_nothing(pair: Town) -> None:
    ids = prompt("nothing", 4)

    outcome = await pair.stage(ids, on_miss="partial")

    assert (outcome.outcome, outcome.failure) == ("failed", "source_misses")
    assert "a holds 0 of the 4 blocks, and on_miss is 'partial'" in outcome.reason
    assert (outcome.pages_moved, outcome.length_bytes, outcome.evidence) == (0, 0, ("never_submitted",))
    assert await pair.held("b", ids) == await pair.held("a", ids) == 0
    await pair.at_rest()


async def test_partial_extends_the_prefix_that_the_destination_holds(pair: Town) -> None:
    ids = prompt("extends", 8)
    await pair.answer("b", ids[: 3 * BLOCK + 1], store=True)
    await pair.answer("a", ids[: 6 * BLOCK + 1], store=True)

    outcome = await pair.stage(ids, on_miss="partial")

    assert (outcome.outcome, outcome.pages_held, outcome.pages_moved) == ("partial", 3, 3)
    assert await pair.held("b", ids) == 6
    assert (await pair.answer("b", ids)).end.tokens == await pair.cold("b", ids)
    await pair.at_rest()


@pytest.mark.parametrize("held", [0, 3])
async def test_fail_fails_where_the_source_lacks_a_block(pair: Town, held: int) -> None:
    ids = prompt(f"fail {held}", 4)
    if held:
        await pair.answer("a", ids[: held * BLOCK + 1], store=True)

    outcome = await pair.stage(ids, on_miss="fail")

    assert (outcome.outcome, outcome.failure) == ("failed", "source_misses")
    assert f"a holds {held} of the 4 blocks, and on_miss is 'fail'" in outcome.reason
    assert await pair.held("b", ids) == 0
    assert await pair.held("a", ids) == held
    await pair.at_rest()


async def test_fail_settles_where_the_source_has_all(pair: Town) -> None:
    ids = prompt("has all", 4)
    await pair.answer("a", ids, store=True)

    outcome = await pair.stage(ids, on_miss="fail")

    assert (outcome.outcome, outcome.pages_moved) == ("settled", 4)
    assert (await pair.answer("b", ids)).end.tokens == await pair.cold("b", ids)
    await pair.at_rest()


async def test_a_prompt_shorter_than_a_block_has_nothing_to_move(pair: Town) -> None:
    outcome = await pair.stage(prompt("short", 0, extra=BLOCK - 1))

    assert (outcome.outcome, outcome.pages_wanted, outcome.pages_moved) == ("settled", 0, 0)
    await pair.at_rest()
