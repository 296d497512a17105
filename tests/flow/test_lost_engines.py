"""Engines that die, and sources that compute for long: what was pinned or lent comes back, and answers go on.

The toy computes slowly here, so that it can be caught at work.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.engines.base import Token
from kvbus.engines.link import EngineError
from kvbus.publisher import TransferHandle
from tests.flow.town import BLOCK, OUTCOME_S, TOPICS, Town, is_alive, prompt, town
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

SLOW = {"work_rounds": 25_000}
"""About 10 ms a token: some four seconds for the long prompt, twice what a source takes before it says `computing`."""
LONG_BLOCKS = 12
SHORT_BLOCKS = 2
REPORT_S = 30.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await asyncio.gather(running.start("a", options=SLOW), running.start("b", allow=["a"], options=SLOW))
        yield running


async def while_computing(pair: Town, name: str, *, budget_s: float = 60.0) -> TransferHandle:
    """A transfer whose source computes now."""
    handle = await pair.ask(prompt(name, LONG_BLOCKS), budget_s=budget_s)
    await pair.step("b", handle.request_hash, "computing")
    return handle


async def until_engine(pair: Town, name: str, old_pid: int) -> None:
    """Wait until a worker has started its engine again, and that engine answers."""

    async def answers() -> bool:
        try:
            return bool((await pair.answer(name, prompt("awake", 0), max_tokens=1)).end.tokens)
        except EngineError:
            return False

    await until(answers, what=f"the engine of {name} is back")
    assert pair.workers[name].engine_pid() != old_pid
    pair.started.add(pair.workers[name].engine_pid())


async def test_an_engine_killed_in_the_middle_of_a_staged_answer_gives_its_pins_back(pair: Town) -> None:
    ids = prompt("staged answer", SHORT_BLOCKS + 6)  # the rest is computed, while what was staged is pinned
    staged = ids[: SHORT_BLOCKS * BLOCK]
    cold = await pair.cold("b", ids)
    assert (await pair.stage(staged)).outcome == "settled"
    old_pid = pair.workers["b"].engine_pid()
    answer = asyncio.ensure_future(pair.answer("b", ids))
    await until(lambda: holds_a_lease(pair, "b"), what="the engine has pinned what was staged")
    assert await pair.evict("b", staged) == 0

    os.kill(old_pid, signal.SIGKILL)

    with pytest.raises(EngineError):
        await answer
    await pair.at_rest("b")
    assert not is_alive(old_pid)
    assert await pair.held("b", staged) == SHORT_BLOCKS  # the pages outlive the engine
    await until_engine(pair, "b", old_pid)
    again = await pair.answer("b", ids)
    assert again.end.tokens == cold
    assert again.end.cached_tokens == SHORT_BLOCKS * BLOCK
    await pair.at_rest()


async def test_an_engine_killed_between_two_tokens_ends_that_answer_only(pair: Town) -> None:
    ids = prompt("between tokens", SHORT_BLOCKS)
    cold = await pair.cold("b", ids)
    old_pid = pair.workers["b"].engine_pid()
    seen: list[int] = []

    def kill_at_the_first_token(token: Token) -> None:
        if not seen:
            os.kill(old_pid, signal.SIGKILL)
        seen.append(token.token)

    def answer() -> None:
        with pair.workers["b"].client() as client:
            client.generate(ids=ids, max_tokens=4_000, store=False, on_token=kill_at_the_first_token)

    with pytest.raises(EngineError):
        await asyncio.to_thread(answer)

    assert seen[0] == cold[0]
    await pair.at_rest("b")
    await until_engine(pair, "b", old_pid)
    assert await pair.cold("b", ids) == cold


async def test_an_engine_killed_while_it_computes_for_a_peer_fails_that_transfer_only(pair: Town) -> None:
    handle = await while_computing(pair, "prefill killed")
    assert (await pair.stats("a"))["pages_writing"] == LONG_BLOCKS
    old_pid = pair.workers["a"].engine_pid()

    os.kill(old_pid, signal.SIGKILL)
    outcome = await handle.outcome(REPORT_S)

    assert outcome is not None
    assert (outcome.outcome, outcome.failure, outcome.pages_moved) == ("failed", "engine_lost", 0)
    assert outcome.evidence == ("never_submitted",)
    await pair.at_rest()
    await until_engine(pair, "a", old_pid)
    ids = prompt("after the loss", SHORT_BLOCKS)
    assert (await pair.stage(ids)).outcome == "settled"
    assert (await pair.answer("b", ids)).end.tokens == await pair.cold("b", ids)
    await pair.at_rest()


async def test_a_source_that_stops_while_it_computes_fails_at_the_deadline_and_lets_go_afterwards(pair: Town) -> None:
    ids = prompt("stopped", LONG_BLOCKS)
    handle = await pair.ask(ids, budget_s=2.0)
    await pair.step("b", handle.request_hash, "asking")

    pair.workers["a"].signal(signal.SIGSTOP)
    try:
        outcome = await handle.outcome(2.0 + REPORT_S)  # the budget, and what the end of a transfer may take
        assert outcome is not None
        assert (outcome.outcome, outcome.failure, outcome.pages_moved) == ("failed", "deadline", 0)
        assert outcome.evidence == ("never_submitted",)
        assert (await pair.stats("b"))["releases_unconfirmed"] == 1
        assert (await pair.stats("b"))["pages_writing"] == 0
    finally:
        pair.workers["a"].signal(signal.SIGCONT)

    await pair.at_rest()
    assert (await pair.stage(prompt("goes on", SHORT_BLOCKS), budget_s=60)).outcome == "settled"
    await pair.at_rest()


async def test_a_transfer_cancelled_while_the_source_computes_moves_nothing(pair: Town) -> None:
    handle = await while_computing(pair, "cancelled early")

    assert await pair.publisher.cancel(handle.request_hash, "b")
    outcome = await handle.outcome(REPORT_S)

    assert outcome is not None
    assert (outcome.outcome, outcome.pages_moved, outcome.evidence) == ("cancelled", 0, ("never_submitted",))
    await pair.at_rest()


async def test_a_reader_that_dies_while_its_source_computes_is_lent_nothing(pair: Town) -> None:
    await while_computing(pair, "reader died")
    before = (await pair.stats("a"))["lending_submissions"]

    pair.workers["b"].kill()

    await until(lambda: computed(pair, "reader died"), OUTCOME_S, what="a has computed the prompt to its end")
    await pair.at_rest("a")
    assert (await pair.stats("a"))["lending_submissions"] == before
    await pair.start_again("b")

    async def is_off_the_queue() -> bool:
        return await pair.bus.queued(TOPICS.transfer_filter("b")) == 0

    await until(is_off_the_queue, OUTCOME_S, what="b's next run has ended what the one before died over")
    await pair.at_rest()


async def holds_a_lease(pair: Town, name: str) -> bool:
    return (await pair.stats(name))["leases_held"] == 1


async def computed(pair: Town, name: str) -> bool:
    return await pair.held("a", prompt(name, LONG_BLOCKS)) == LONG_BLOCKS


# P4, P18
async def test_a_release_that_a_stopping_member_could_not_tell_is_told_by_its_next_run(pair: Town) -> None:
    owed = pair.workers["b"].socket.with_suffix(".owed")
    pair.workers["a"].signal(signal.SIGSTOP)
    try:
        handle = await pair.ask(prompt("owed", LONG_BLOCKS), budget_s=4.0)
        outcome = await handle.outcome(4.0 + REPORT_S)
        assert outcome is not None
        assert outcome.failure == "deadline"
        pair.workers["b"].signal(signal.SIGTERM)
        await until(lambda: not pair.workers["b"].alive)
        assert owed.exists(), pair.workers["b"].log.read_text()
        await pair.start_again("b")
        assert (await pair.stats("b"))["releases_unconfirmed"] == 1
    finally:
        pair.workers["a"].signal(signal.SIGCONT)
    await pair.at_rest()
    assert (await pair.stats("b"))["releases_unconfirmed"] == 0
    pair.workers["b"].signal(signal.SIGTERM)
    await until(lambda: not pair.workers["b"].alive)
    assert not owed.exists()
    await pair.start_again("b")
