"""What two real workers count of a transfer, and what they forget when they are told to."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.flow.town import BLOCK, PAGE_BYTES, Town, prompt, town

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Town]:
    with tempfile.TemporaryDirectory(prefix="kvflow-") as name:
        async with town(Path(name)) as running:
            await asyncio.gather(
                running.start("a", backend="memory"), running.start("b", backend="memory", allow=["a"])
            )
            yield running


async def test_both_sides_count_a_transfer_and_hold_nothing_in_vain_afterwards(pair: Town) -> None:
    # R24, R20, R19
    outcome = await pair.stage(prompt("counted", 5))
    assert outcome.outcome == "settled"
    await pair.at_rest()
    source, destination = await pair.stats("a"), await pair.stats("b")
    assert (source["lending_submissions"], source["lending_ended_peer_ack"]) == (1, 1)
    assert source["engine-write_bytes"] == 5 * PAGE_BYTES
    assert (destination["memory_submissions"], destination["memory_deliveries"]) == (1, 1)
    assert (destination["memory_ended_completed"], destination["memory_recomputed"]) == (1, 0)
    assert destination["memory_bytes"] == destination["transfers_bytes"] == 5 * PAGE_BYTES
    assert (destination["transfers_ended"], destination["transfers_settled"]) == (1, 1)
    for counters in (source, destination):
        assert counters["pool0_stopped"] == counters["holding_blocking"] == counters["holding_pages"] == 0
        assert counters["pages_lent"] == counters["pages_bound"] == counters["leases_retained"] == 0


async def test_what_a_worker_was_told_to_forget_is_staged_anew_and_found_again(pair: Town) -> None:
    # contract 24
    ids = prompt("forgotten", 4)
    await pair.stage(ids)
    await pair.at_rest()
    assert await pair.held("b", ids) == 4

    def forget() -> int:
        with pair.workers["b"].client() as client:
            return client.forget()

    assert await asyncio.to_thread(forget) >= 4
    assert await pair.held("b", ids) == 0
    assert (await pair.answer("b", ids, store=False)).end.cached_tokens == 0
    again = await pair.stage(ids)
    assert (again.outcome, again.pages_moved) == ("settled", 4)
    assert await pair.held("b", ids) == 4
    assert (await pair.answer("b", ids)).end.cached_tokens == 4 * BLOCK
