"""Workers that die or stop in the middle of a transfer, and transfers that are cancelled there.

Instance b reads at 0.6 MB/s, so that a transfer of 36 pages is caught halfway. Whatever happens, pages are committed
whole or not at all, leases come back on evidence only, and b answers with the tokens that computing gives.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.errors import BusError
from kvbus.events import LeaseGranted, OutcomeFixed, TransferOutcome
from kvbus.publisher import TransferHandle
from kvbus.roles.registry import lookup
from kvbus.transport import Delivery
from tests.flow.pool_eye import eye_on
from tests.flow.town import BLOCK, OUTCOME_S, PAGE_BYTES, TOPICS, Town, prompt, town
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

BLOCKS = 36
RATE_BYTES_S = 600_000
"""Four seconds for a transfer, one of them until it is caught."""
HALFWAY_ROW = 6
LAST_ROWS = 30
"""What comes behind takes less time than a worker that is told to end gives it."""
REPORT_S = 30.0
"""The promise: within ten seconds the destination reports the loss. Three times that, where others want the core."""
BUDGET_S = 3.2
"""Ends while a transfer of four seconds is read, also where it began late."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await asyncio.gather(running.start("a"), running.start("b", allow=["a"], rate_limit_bytes_s=RATE_BYTES_S))
        yield running


async def halfway(pair: Town, ids: list[int], row: int = HALFWAY_ROW) -> TransferHandle:
    """A transfer of which some rows have arrived and many have not."""
    eye = await eye_on(pair, "b")
    handle = await pair.ask(ids)
    verdict = await handle.verdict(OUTCOME_S)
    assert verdict.verdict == "accepted", verdict
    await eye.until_row(verdict.transfer, row)
    return handle


async def ended(handle: TransferHandle, wait_s: float = OUTCOME_S) -> TransferOutcome:
    outcome = await handle.outcome(wait_s)
    assert outcome is not None, f"no outcome within {wait_s:g} s"
    return outcome


async def assert_only_whole_pages(pair: Town, ids: list[int], outcome: TransferOutcome) -> None:
    """What b kept is exactly the prefix that arrived whole, and it answers as computing does."""
    assert 0 < outcome.pages_moved < BLOCKS
    assert outcome.length_bytes == outcome.pages_moved * PAGE_BYTES
    assert await pair.held("b", ids) == outcome.pages_moved
    staged = await pair.answer("b", ids)
    assert staged.end.cached_tokens == outcome.pages_moved * BLOCK
    assert staged.end.tokens == await pair.cold("b", ids)


async def assert_let_go_only_after_access_had_ended(pair: Town, request_hash: str, transfer: str) -> None:
    """B told its source that its access has ended after the attempt's end was reported with evidence, never before."""
    told = await pair.step("b", request_hash, "access_ended")
    assert told.text == "completed"
    assert await evidence_of(pair, "b", transfer) == "completed"
    bodies = [event.body for event in await pair.events("b")]
    (ticket,) = (body.ticket for body in bodies if isinstance(body, LeaseGranted) and body.transfer == transfer)
    (end,) = (body for body in bodies if isinstance(body, OutcomeFixed) and body.ticket == ticket)
    assert bodies.index(end) < bodies.index(told)


async def test_a_killed_source_is_reported_in_time_and_its_successor_serves(pair: Town) -> None:
    ids = prompt("source killed", BLOCKS)
    handle = await halfway(pair, ids)

    pair.workers["a"].kill()
    outcome = await ended(handle, REPORT_S)

    assert outcome.outcome == "failed"
    assert outcome.failure in {"peer_lost", "transport"}
    assert outcome.reason
    assert outcome.evidence
    assert set(outcome.evidence) <= {"completed", "endpoint_destroyed", "process_dead"}
    await assert_only_whole_pages(pair, ids, outcome)
    old = pair.registered["a"].epoch
    await pair.start_again("a")
    assert pair.registered["a"].epoch != old
    again = await pair.stage(ids)
    assert (again.outcome, again.pages_held + again.pages_moved) == ("settled", BLOCKS)
    assert (await pair.answer("b", ids)).end.tokens == await pair.cold("b", ids)
    await pair.at_rest()


async def test_mapped_pages_outlive_their_killed_source_and_nothing_is_owed_to_the_dead(folder: Path) -> None:
    (folder / "mapped").mkdir()
    async with town(folder / "mapped") as pair:
        await asyncio.gather(
            pair.start("a", backend="memory"),
            pair.start("b", allow=["a"], backend="memory", rate_limit_bytes_s=RATE_BYTES_S),
        )
        ids = prompt("mapped", BLOCKS)
        handle = await halfway(pair, ids)

        pair.workers["a"].kill()
        outcome = await ended(handle, REPORT_S)

        assert (outcome.outcome, outcome.pages_moved, outcome.evidence) == ("settled", BLOCKS, ("completed",))
        assert (await pair.answer("b", ids)).end.tokens == await pair.cold("b", ids)
        await pair.at_rest("b")  # the release is repeated to a living process only
        gone = await pair.ask(prompt("asked of the dead", 2))
        failed = await gone.outcome(REPORT_S)
        if failed is None:  # the registry has forgotten it by now
            assert (await gone.verdict()).verdict == "refused"
        else:
            assert (failed.outcome, failed.failure, failed.pages_moved) == ("failed", "peer_lost", 0)
        await pair.at_rest("b")


@pytest.mark.contract("P6")
async def test_a_killed_destination_gives_the_lease_back_and_its_successor_runs_the_request_once(pair: Town) -> None:
    ids = prompt("destination killed", BLOCKS)
    handle = await halfway(pair, ids)
    transfer = (await handle.verdict()).transfer
    assert (await pair.stats("a"))["leases_held"] == 1

    pair.workers["b"].kill()

    await pair.at_rest("a")
    assert await evidence_of(pair, "a", transfer) == "process_dead"
    await pair.start_again("b")
    outcomes: list[TransferOutcome] = []

    async def redelivered() -> bool:
        events = [event.body for event in await pair.events("b")]
        ours = [body for body in events if isinstance(body, TransferOutcome)]
        outcomes[:] = [body for body in ours if body.request_hash == handle.request_hash]
        return bool(outcomes)

    await until(redelivered, OUTCOME_S, what="the successor runs the request")
    await pair.at_rest()
    await redelivered()
    assert [outcome.outcome for outcome in outcomes] == ["settled"]
    assert outcomes[0].pages_moved == BLOCKS
    assert (await pair.stats("b"))["fired"] == 1
    assert (await pair.answer("b", ids)).end.tokens == await pair.cold("b", ids)
    heard = await ended(handle, REPORT_S)
    assert heard == outcomes[0]
    repeat = await pair.verdict(ids)
    assert (repeat.verdict, repeat.transfer) == ("deduped", outcomes[0].transfer)


async def test_a_source_that_stands_still_after_its_grant_does_not_hold_up_the_reading(pair: Town) -> None:
    ids = prompt("source stopped", BLOCKS)
    handle = await halfway(pair, ids)

    pair.workers["a"].signal(signal.SIGSTOP)
    try:
        outcome = await ended(handle)
        assert (outcome.outcome, outcome.pages_moved) == ("settled", BLOCKS)
        staged = await pair.answer("b", ids)
    finally:
        pair.workers["a"].signal(signal.SIGCONT)

    assert staged.end.tokens == await pair.cold("b", ids)
    await pair.at_rest()


async def test_a_lease_is_not_timed_a_reader_that_stands_still_keeps_it_until_it_has_let_go(pair: Town) -> None:
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
    await assert_only_whole_pages(pair, ids, outcome)
    await pair.at_rest()


async def test_a_broker_that_dies_and_comes_back_costs_neither_pages_nor_facts(pair: Town) -> None:
    ids = prompt("broker lost", BLOCKS)
    handle = await halfway(pair, ids)
    transfer = (await handle.verdict()).transfer

    pair.broker.kill()
    await pair.broker.start()

    await until(partial(outcome_is_reported, pair, handle.request_hash), OUTCOME_S, what="the outcome is in the facts")
    assert await pair.held("b", ids) == BLOCKS
    assert (await pair.answer("b", ids)).end.tokens == await pair.cold("b", ids)
    assert await evidence_of(pair, "a", transfer) == "peer_ack"
    assert await evidence_of(pair, "b", transfer) == "completed"
    await pair.at_rest()
    await until(partial(is_registered, pair, "a"), what="a is registered again")
    assert (await pair.stage(prompt("after the broker", 2))).outcome == "settled"
    await pair.at_rest()


async def heartbeats(pair: Town, name: str, count: int) -> None:
    """Wait for so many heartbeats of an instance: one a second."""
    heard: list[Delivery] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(delivery)

    subscription = await pair.bus.subscribe(TOPICS.heartbeat(name), hear)
    try:
        await until(lambda: len(heard) >= count, 60, what=f"{count} heartbeats of {name}")
    finally:
        await subscription.close()


async def outcome_is_reported(pair: Town, request_hash: str) -> bool:
    """Whether b's facts say that the request settled; False while the broker is away."""
    try:
        bodies = [event.body for event in await pair.events("b")]
    except BusError:
        return False
    ours = [body for body in bodies if isinstance(body, TransferOutcome) and body.request_hash == request_hash]
    return [body.outcome for body in ours] == ["settled"]


async def is_registered(pair: Town, name: str) -> bool:
    return bool(await lookup(pair.bus, name))


async def test_a_cancelled_transfer_keeps_what_arrived_whole(pair: Town) -> None:
    ids = prompt("cancelled", BLOCKS)
    handle = await halfway(pair, ids)

    assert await pair.publisher.cancel(handle.request_hash, "b")
    outcome = await ended(handle, REPORT_S)

    assert (outcome.outcome, outcome.failure) == ("cancelled", "cancelled")
    assert "cancelled by" in outcome.reason
    assert outcome.evidence == ("completed",)
    await assert_only_whole_pages(pair, ids, outcome)
    await assert_let_go_only_after_access_had_ended(pair, handle.request_hash, outcome.transfer)
    await pair.at_rest()
    again = await pair.stage(ids)  # and it may be asked for again at once
    assert (again.outcome, again.pages_held, again.pages_moved) == (
        "settled",
        outcome.pages_moved,
        BLOCKS - outcome.pages_moved,
    )
    await pair.at_rest()


@pytest.mark.contract("P4")
async def test_the_source_keeps_its_pages_until_the_reader_has_let_go(pair: Town) -> None:
    ids = prompt("kept", BLOCKS)
    handle = await halfway(pair, ids)

    assert await pair.evict("a", ids) == 0  # all of them are lent
    assert (await pair.stats("a"))["leases_held"] == 1

    outcome = await ended(handle)
    assert (outcome.outcome, outcome.pages_moved) == ("settled", BLOCKS)
    assert (await pair.answer("b", ids)).end.tokens == await pair.cold("b", ids)
    await pair.at_rest()
    assert await pair.evict("a", ids) == BLOCKS


async def test_a_transfer_whose_budget_ends_while_it_reads_keeps_what_arrived_whole(pair: Town) -> None:
    ids = prompt("budget", BLOCKS)

    outcome = await pair.stage(ids, budget_s=BUDGET_S)

    assert (outcome.outcome, outcome.failure) == ("failed", "deadline")
    assert f"the budget of {BUDGET_S:g} s is spent" in outcome.reason
    await assert_only_whole_pages(pair, ids, outcome)
    await pair.at_rest()


async def test_a_worker_told_to_end_finishes_what_it_reads_and_reports_it(pair: Town) -> None:
    ids = prompt("told to end", BLOCKS)
    handle = await halfway(pair, ids, LAST_ROWS)

    pair.workers["b"].signal(signal.SIGTERM)
    outcome = await ended(handle, REPORT_S)

    assert (outcome.outcome, outcome.pages_moved) == ("settled", BLOCKS)
    await until(lambda: not pair.workers["b"].alive, 60, what="b has ended")
    assert pair.workers["b"].process.returncode == 0
    await pair.at_rest("a")
    assert await evidence_of(pair, "a", outcome.transfer) == "peer_ack"
    await pair.start_again("b")


async def evidence_of(pair: Town, name: str, transfer: str) -> str:
    """By which evidence access to a transfer's lease ended there, once that is reported."""
    found: list[str] = []

    async def reported() -> bool:
        bodies = [event.body for event in await pair.events(name)]
        tickets = {body.ticket for body in bodies if isinstance(body, LeaseGranted) and body.transfer == transfer}
        found[:] = [body.evidence for body in bodies if isinstance(body, OutcomeFixed) and body.ticket in tickets]
        return bool(found)

    await until(reported, what=f"{name} reports how access ended")
    assert len(found) == 1
    return found[0]
