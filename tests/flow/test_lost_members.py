"""Members of an instance that die, stop or lose the broker in the middle of a transfer that all of them share.

The members of b read at 0.5 MB/s, so that a transfer of 36 pages is caught halfway. Whatever happens, a prompt's pages
show at both members or at neither, leases come back on evidence only, and both answer as computing does.
"""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.errors import BusError
from kvbus.events import TransferOutcome
from kvbus.publisher import TransferHandle
from tests.flow.members import MEMBERS, assert_audit_is_clean, decisions, kinds, leader, until_decided
from tests.flow.pool_eye import eye_on
from tests.flow.town import OUTCOME_S, REST_S, Town, prompt, town
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

BLOCKS = 36
RATE_BYTES_S = 500_000
HALFWAY_ROW = 10
TAKE_OVER_S = 60.0
"""The promise: ten heartbeats without a sign of the coordinator, and a turn of one and a half seconds or two.

Four times that, where others want the core."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await asyncio.gather(
            running.start_all("a", MEMBERS, backend="memory"),
            running.start_all("b", MEMBERS, backend="memory", allow=["a"], rate_limit_bytes_s=RATE_BYTES_S),
        )
        await leader(running)
        yield running


async def halfway(pair: Town, ids: list[int], *, budget_s: float = 30.0) -> tuple[TransferHandle, str]:
    """A transfer of which both members have some rows, and neither has all."""
    eyes = [await eye_on(pair, f"b/{member}") for member in MEMBERS]
    handle = await pair.ask(ids, budget_s=budget_s)
    verdict = await handle.verdict(OUTCOME_S)
    assert verdict.verdict == "accepted", verdict
    await asyncio.gather(*(eye.until_row(verdict.transfer, HALFWAY_ROW) for eye in eyes))
    return handle, verdict.transfer


async def ended(handle: TransferHandle, wait_s: float = OUTCOME_S) -> TransferOutcome:
    outcome = await handle.outcome(wait_s)
    assert outcome is not None, f"no outcome within {wait_s:g} s"
    return outcome


async def the_next_is_served(pair: Town, name: str) -> None:
    """Both members have all of another prompt, and answer as computing does."""
    ids = prompt(name, 4)
    await until(lambda: staged(pair, ids), OUTCOME_S, what="a request is served")
    # Whoever leads tells the outcome as soon as it shows its pages; the other one hears of that by the same log.
    await until(lambda: all_held(pair, ids, 4), what="both members show the pages")
    for member in MEMBERS:
        assert (await pair.answer(f"b/{member}", ids)).end.tokens == await pair.cold(f"b/{member}", ids)


async def staged(pair: Town, ids: list[int]) -> bool:
    """Ask for a prompt; False where nobody takes it on, or it does not settle."""
    handle = await pair.ask(ids)
    if (await handle.verdict(OUTCOME_S)).verdict != "accepted":
        return False
    outcome = await handle.outcome(OUTCOME_S)
    return outcome is not None and outcome.outcome == "settled"


async def held(pair: Town, ids: list[int]) -> set[int]:
    return {await pair.held(f"b/{member}", ids) for member in MEMBERS}


async def assets_stand(pair: Town) -> bool:
    try:
        await pair.bus.ensure_assets()
    except BusError:
        return False
    return True


async def all_held(pair: Town, ids: list[int], blocks: int) -> bool:
    return await held(pair, ids) == {blocks}


def other(name: str) -> str:
    return {"b/m0": "b/m1", "b/m1": "b/m0"}[name]


# P10, P13
async def test_a_killed_leader_is_followed_by_another_member_that_voids_what_was_open_and_runs_it_again(
    pair: Town,
) -> None:
    ids = prompt("leader killed", BLOCKS)
    led = await leader(pair)
    handle, transfer = await halfway(pair, ids, budget_s=60.0)

    pair.workers[led].kill()

    assert await leader(pair, wait_s=TAKE_OVER_S) == other(led)
    await until_decided(pair, transfer, "void", OUTCOME_S)
    assert await kinds(pair, transfer) == ["open", "void"]
    await until(partial(holds_nothing, pair, other(led)), REST_S, what="the other member has given its pages back")
    assert await pair.held(other(led), ids) == 0
    await pair.at_rest("a/m0", "a/m1")
    await pair.start_again(led)
    outcome = await ended(handle)
    assert (outcome.outcome, outcome.pages_moved) == ("settled", BLOCKS), outcome
    assert outcome.transfer != transfer
    await until(lambda: all_held(pair, ids, BLOCKS), what="both members show the pages")
    await the_next_is_served(pair, "after the leader")
    await pair.at_rest()


async def holds_nothing(pair: Town, name: str) -> bool:
    counters = await pair.counters(name)
    return not any(counters[owed] for owed in ("leases_held", "pages_writing", "pages_quarantined"))


async def test_a_killed_follower_costs_the_transfer_and_nothing_else(pair: Town) -> None:
    ids = prompt("follower killed", BLOCKS)
    lost = other(await leader(pair))
    handle, transfer = await halfway(pair, ids)

    pair.workers[lost].kill()
    await pair.start_again(lost)

    await until_decided(pair, transfer, "void", OUTCOME_S)
    outcome = await ended(handle)
    assert outcome.outcome == "failed", outcome
    assert await held(pair, ids) == {0}
    await the_next_is_served(pair, "after the follower")
    await pair.at_rest()


# P12, 49
async def test_a_cancelled_transfer_stops_at_both_members_and_settles_what_both_have(pair: Town) -> None:
    ids = prompt("cancelled", BLOCKS)
    handle, transfer = await halfway(pair, ids)

    assert await pair.publisher.cancel(handle.request_hash, "b")

    outcome = await ended(handle)
    assert (outcome.outcome, outcome.failure) == ("cancelled", "cancelled"), outcome
    assert await kinds(pair, transfer) == ["open", "cancel", "settle", "visible"]
    await pair.at_rest()
    assert 0 < outcome.hi < BLOCKS
    assert min(await held(pair, ids)) == outcome.hi
    for member in MEMBERS:
        assert (await pair.answer(f"b/{member}", ids)).end.tokens == await pair.cold(f"b/{member}", ids)


# P11
async def test_a_stopped_follower_holds_its_pages_past_the_deadline_and_gives_all_back_when_it_goes_on(
    pair: Town,
) -> None:
    ids = prompt("follower stopped", BLOCKS)
    stopped = other(await leader(pair))
    handle, transfer = await halfway(pair, ids, budget_s=6.0)
    source = stopped.replace("b/", "a/")

    pair.workers[stopped].signal(signal.SIGSTOP)
    try:
        outcome = await ended(handle)
        assert outcome.outcome == "failed", outcome
        await until_decided(pair, transfer, "void", OUTCOME_S)
        await pair.at_rest(other(stopped))
        assert await pair.held(other(stopped), ids) == 0
        assert (await pair.counters(source))["leases_held"] == 1, "a reader that stands still may read on"
    finally:
        pair.workers[stopped].signal(signal.SIGCONT)

    await pair.at_rest()
    assert await held(pair, ids) == {0}
    assert "visible" not in await kinds(pair, transfer)
    await the_next_is_served(pair, "after the stop")
    await pair.at_rest()


# P13
async def test_a_leader_that_stands_still_is_followed_and_decides_nothing_when_it_goes_on(pair: Town) -> None:
    ids = prompt("leader stopped", BLOCKS)
    led = await leader(pair)
    handle, transfer = await halfway(pair, ids)

    pair.workers[led].signal(signal.SIGSTOP)
    try:
        await until(lambda: is_led_by(pair, other(led)), TAKE_OVER_S, what="the other member leads")
        await until_decided(pair, transfer, "void", OUTCOME_S)
    finally:
        pair.workers[led].signal(signal.SIGCONT)

    outcome = await ended(handle)
    assert outcome.outcome == "failed" or outcome.transfer != transfer, outcome
    await until(lambda: agree_on_the_leader(pair), what="one member leads, and both know it")
    log = await decisions(pair, transfer)
    (voided,) = (event for event in log if event.header.k == "void")
    assert f"b/{voided.header.m}" == other(led)
    assert "visible" not in await kinds(pair, transfer)
    await the_next_is_served(pair, "after the leader stood still")
    await pair.at_rest()


async def is_led_by(pair: Town, name: str) -> bool:
    return bool((await pair.counters(name))["settle_leads"])


async def agree_on_the_leader(pair: Town) -> bool:
    counters = [await pair.counters(f"b/{member}") for member in MEMBERS]
    return sum(one["settle_leads"] for one in counters) == 1 and len({one["settle_term"] for one in counters}) == 1


async def test_a_leader_that_is_told_to_stop_agrees_with_the_others_first_and_is_followed(pair: Town) -> None:
    ids = prompt("leader leaves", BLOCKS)
    led = await leader(pair)
    _, transfer = await halfway(pair, ids, budget_s=60.0)

    pair.workers[led].signal(signal.SIGTERM)
    await until(lambda: not pair.workers[led].alive, 60, what="it has ended")

    assert pair.workers[led].process.returncode == 0
    assert await leader(pair, wait_s=TAKE_OVER_S) == other(led)
    assert (await kinds(pair, transfer))[-1] in {"visible", "void"}
    await pair.start_again(led)
    await the_next_is_served(pair, "after the leader left")
    await pair.at_rest()


async def test_a_broker_that_comes_back_with_its_store_costs_no_decision(pair: Town) -> None:
    ids = prompt("broker lost", BLOCKS)
    _, transfer = await halfway(pair, ids)

    pair.broker.kill()
    await pair.broker.start()

    async def over() -> bool:
        try:
            return bool({"visible", "void"} & set(await kinds(pair, transfer)))
        except BusError:
            return False

    await until(over, OUTCOME_S, what="the transfer is over")
    assert len(await held(pair, ids)) == 1
    await leader(pair)
    await the_next_is_served(pair, "after the broker")
    await pair.at_rest()


async def test_what_all_of_this_recorded_is_clean(pair: Town) -> None:
    await pair.at_rest()
    await assert_audit_is_clean(pair)


# P15
async def test_a_broker_that_comes_back_empty_is_given_a_new_term(pair: Town) -> None:
    before = {name: (await pair.counters(name))["settle_term"] for name in ("b/m0", "b/m1")}
    ids = prompt("broker emptied", BLOCKS)
    await halfway(pair, ids)

    pair.broker.kill()
    shutil.rmtree(pair.broker.folder / "store")
    await pair.broker.start()
    await until(lambda: assets_stand(pair), what="the tester is back, and has made streams and buckets anew")

    async def both_in_a_new_term() -> bool:
        terms = [(await pair.counters(name))["settle_term"] for name in before]
        return len(set(terms)) == 1 and terms[0] > max(before.values())

    await until(both_in_a_new_term, what="both members are in a new term")
    await leader(pair)
    await the_next_is_served(pair, "after the empty broker")
    await pair.at_rest(deadline_s=2 * REST_S)
    assert len(await held(pair, ids)) == 1
    assert not await decisions(pair, "nobody's")
