"""Whole workers that move pages over plain sockets: settled, killed on either side, standing still, and chosen.

Instance b reads at 0.6 MB/s where a transfer of 36 pages has to be caught halfway.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.flow.pool_eye import eye_on
from tests.flow.test_lost_workers import (
    BLOCKS,
    BUDGET_S,
    HALFWAY_ROW,
    RATE_BYTES_S,
    REPORT_S,
    assert_let_go_only_after_access_had_ended,
    assert_only_whole_pages,
    ended,
    evidence_of,
    halfway,
    heartbeats,
)
from tests.flow.town import OUTCOME_S, PAGE_BYTES, Town, prompt, town
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[Town]:
    (folder / "sockets").mkdir()
    async with town(folder / "sockets") as running:
        await asyncio.gather(
            running.start("a", backend="socket"),
            running.start("b", allow=["a"], backend="socket", rate_limit_bytes_s=RATE_BYTES_S),
        )
        yield running


async def test_a_transfer_over_sockets_settles_and_the_tokens_are_the_same(pair: Town) -> None:
    ids = prompt("by socket", 8)
    outcome = await pair.stage(ids)
    assert (outcome.outcome, outcome.pages_moved, outcome.evidence) == ("settled", 8, ("completed",))
    assert outcome.length_bytes == 8 * PAGE_BYTES
    assert pair.registered["a"].record.transports == ("socket",)
    assert (await pair.answer("b", ids)).end.tokens == await pair.cold("b", ids)
    assert await evidence_of(pair, "a", outcome.transfer) == "peer_ack"
    assert await evidence_of(pair, "b", outcome.transfer) == "completed"
    await pair.at_rest()


@pytest.mark.contract("P7")
async def test_a_killed_reader_gives_its_lease_back(pair: Town) -> None:
    ids = prompt("destination killed", BLOCKS)
    handle = await halfway(pair, ids)
    transfer = (await handle.verdict()).transfer
    assert (await pair.stats("a"))["leases_held"] == 1

    pair.workers["b"].kill()

    await pair.at_rest("a")
    assert await evidence_of(pair, "a", transfer) in {"endpoint_destroyed", "process_dead"}  # whichever is seen first
    await pair.start_again("b")
    outcome = await ended(handle)
    assert (outcome.outcome, outcome.pages_moved) == ("settled", BLOCKS)
    await pair.at_rest()


async def test_a_killed_source_is_reported_in_time_and_its_successor_serves(pair: Town) -> None:
    ids = prompt("source killed", BLOCKS)
    handle = await halfway(pair, ids)

    pair.workers["a"].kill()
    outcome = await ended(handle, REPORT_S)

    assert (outcome.outcome, outcome.failure) == ("failed", "peer_lost")
    assert set(outcome.evidence) <= {"completed", "endpoint_destroyed"}
    await assert_only_whole_pages(pair, ids, outcome)
    await pair.start_again("a")
    again = await pair.stage(ids)
    assert (again.outcome, again.pages_held + again.pages_moved) == ("settled", BLOCKS)
    await pair.at_rest()


async def test_a_source_that_stands_still_costs_the_deadline_and_no_page(pair: Town) -> None:
    ids = prompt("source stopped", BLOCKS)
    eye = await eye_on(pair, "b")
    handle = await pair.ask(ids, budget_s=BUDGET_S)
    await eye.until_row((await handle.verdict(OUTCOME_S)).transfer, HALFWAY_ROW)

    pair.workers["a"].signal(signal.SIGSTOP)
    try:
        outcome = await ended(handle, REPORT_S)
        assert (outcome.outcome, outcome.failure, outcome.evidence) == ("failed", "deadline", ("completed",))
        await assert_only_whole_pages(pair, ids, outcome)
    finally:
        pair.workers["a"].signal(signal.SIGCONT)
    await assert_let_go_only_after_access_had_ended(pair, handle.request_hash, outcome.transfer)
    await pair.at_rest()


async def test_a_reader_that_stands_still_keeps_its_lease_until_it_has_let_go(pair: Town) -> None:
    ids = prompt("reader stopped", BLOCKS)
    eye = await eye_on(pair, "b")
    handle = await pair.ask(ids, budget_s=BUDGET_S)
    await eye.until_row((await handle.verdict(OUTCOME_S)).transfer, HALFWAY_ROW)

    pair.workers["b"].signal(signal.SIGSTOP)
    try:
        await heartbeats(pair, "a", 5)  # the budget has long been spent
        assert (await pair.stats("a"))["leases_held"] == 1
        assert await pair.evict("a", ids) == 0
    finally:
        pair.workers["b"].signal(signal.SIGCONT)

    outcome = await ended(handle, REPORT_S)
    assert (outcome.outcome, outcome.failure) == ("failed", "deadline")
    await pair.at_rest()


async def test_a_source_that_shuts_down_takes_its_pages_back_from_a_reader_that_stands_still(pair: Town) -> None:
    ids = prompt("source leaves", BLOCKS)
    handle = await halfway(pair, ids)
    transfer = (await handle.verdict()).transfer

    pair.workers["b"].signal(signal.SIGSTOP)
    try:
        pair.workers["a"].signal(signal.SIGTERM)
        await until(lambda: not pair.workers["a"].alive, 60, what="the source has ended")
        assert await evidence_of(pair, "a", transfer) == "endpoint_destroyed"
        assert "not complete" not in pair.workers["a"].log.read_text()
    finally:
        pair.workers["b"].signal(signal.SIGCONT)
    outcome = await ended(handle, REPORT_S)
    assert outcome.outcome == "failed"
    await pair.start_again("a")
    await pair.at_rest()


async def test_a_reader_takes_what_both_have_and_a_socket_where_that_is_all(folder: Path) -> None:
    (folder / "mixed").mkdir()
    async with town(folder / "mixed") as mixed:
        await asyncio.gather(
            mixed.start("a", backend="socket"),
            mixed.start("c", backend="memory"),
            mixed.start("b", allow=["a", "c"], backend="auto"),
        )
        assert set(mixed.registered["b"].record.transports) >= {"memory", "socket"}
        for source in ("a", "c"):
            ids = prompt(f"from {source}", 4)
            outcome = await mixed.stage(ids, source=source)
            assert (outcome.outcome, outcome.pages_moved) == ("settled", 4), outcome
        await mixed.at_rest()
