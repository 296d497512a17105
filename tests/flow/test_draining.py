"""Draining an instance, and stopping one: nothing is refused that may wait, nothing runs twice, nothing is forced.

Instance b reads at 0.3 MB/s, so that its transfers can be seen running.
"""

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.draining import DrainAnswered, DrainAsked
from kvbus.events import HeartbeatSeen, LeaseGranted, TransferOutcome, TransferStep, decode
from kvbus.publisher import TransferHandle
from kvbus.roles.registry import lookup
from kvbus.topics import Command
from kvbus.transport import Delivery
from tests.flow.command_line import kvbus
from tests.flow.members import assert_audit_is_clean
from tests.flow.town import ANSWER_S, OUTCOME_S, TOPICS, Town, prompt, town
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

SLOW_BLOCKS = 24
"""Five seconds."""
LONG_BLOCKS = 62
"""Thirteen seconds: longer than a worker that is told to stop waits, however late the test saw it begin."""
BUDGET_S = 120.0
SOON_S = 30.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await asyncio.gather(
            running.start("a", backend="memory", pages=256),
            running.start("b", backend="memory", allow=["a"], rate_limit_bytes_s=300_000, pages=256),
        )
        yield running


async def drain(pair: Town, name: str, **asked: object) -> DrainAnswered:
    """Ask an instance's member, as an operator."""
    body = DrainAsked.model_validate(asked)
    subject = TOPICS.command(name, Command.DRAIN, "m0")
    answer = await pair.bus.request(subject, pair.encoded(body, speaker="operator"), wait_s=ANSWER_S)
    assert isinstance(answer, bytes), answer
    answered = decode(answer).body
    assert isinstance(answered, DrainAnswered)
    return answered


async def moving(pair: Town, name: str, blocks: int = SLOW_BLOCKS) -> TransferHandle:
    """A transfer whose pages are being read."""
    handle = await pair.ask(prompt(name, blocks), budget_s=BUDGET_S)
    await pair.step("b", handle.request_hash, "moving")
    return handle


async def outcome_of(handle: TransferHandle) -> TransferOutcome:
    outcome = await handle.outcome(OUTCOME_S)
    assert outcome is not None, "no outcome came"
    return outcome


async def runs_of(pair: Town, request_hash: str) -> list[str]:
    """The transfers that a request has become, in their order."""
    steps = [event.body for event in await pair.events("b")]
    return [
        step.transfer
        for step in steps
        if isinstance(step, TransferStep) and step.step == "accepted" and step.request_hash == request_hash
    ]


async def test_a_draining_destination_finishes_what_runs_refuses_what_comes_and_takes_part_again(pair: Town) -> None:
    running = await moving(pair, "runs on")
    answered = await drain(pair, "b", action="drain")
    assert (answered.state, answered.transfers_running) == ("draining", 1)
    (held,) = answered.holding
    assert (held.direction, held.peer, held.pages, held.quiet) == ("write", "a", SLOW_BLOCKS, False)

    refused = await pair.verdict(prompt("comes late", 2))
    assert refused.verdict == "refused"
    assert refused.reason == "draining: b takes nothing new; ask another instance"
    assert (await outcome_of(running)).outcome == "settled"

    async def drained() -> bool:
        return (await drain(pair, "b")).state == "drained"

    await until(drained, what="b is drained")
    assert (await drain(pair, "b", action="undo")).state == ""
    assert (await pair.stage(prompt("comes late", 2))).outcome == "settled"
    await pair.at_rest()


async def test_a_drain_is_seen_in_heartbeats_and_in_the_registry_at_once(pair: Town) -> None:
    beats: list[str | None] = []

    async def hear(delivery: Delivery) -> None:
        body = decode(delivery.data).body
        assert isinstance(body, HeartbeatSeen)
        beats.append(body.state)

    subscription = await pair.bus.subscribe(TOPICS.heartbeat("b"), hear)
    await drain(pair, "b", action="drain")

    async def registered() -> bool:
        (record,) = await lookup(pair.bus, "b")
        return record.record.state == "drained"

    await until(registered, SOON_S, what="the registry says that b is drained")
    await until(lambda: "drained" in beats, SOON_S, what="a heartbeat says so")
    await drain(pair, "b", action="undo")
    await until(lambda: beats[-1] is None, SOON_S, what="it takes part again")
    await subscription.close()


# contract 53
@pytest.mark.contract("R16")
async def test_a_draining_source_keeps_what_it_lent_until_its_reader_lets_go(pair: Town) -> None:
    ids = prompt("lent while draining", SLOW_BLOCKS)
    handle = await moving(pair, "lent while draining")

    answered = await drain(pair, "a", action="drain", leave=True)

    assert answered.state == "draining"
    (held,) = answered.holding
    assert (held.direction, held.peer, held.pages) == ("read", "b", SLOW_BLOCKS)
    assert await pair.evict("a", ids) == 0  # all of them are lent
    other = await pair.ask(prompt("not lent any more", 2))
    failed = await outcome_of(other)
    assert (failed.outcome, failed.failure) == ("failed", "shutdown")
    assert failed.reason == "draining: a is leaving and lends no more"
    assert (await drain(pair, "a")).state == "draining"
    assert pair.workers["a"].alive
    assert (await outcome_of(handle)).outcome == "settled"

    await until(lambda: not pair.workers["a"].alive, 60, what="a has left")
    assert pair.workers["a"].process.returncode == 0
    assert (await pair.answer("b", ids)).end.tokens == await pair.cold("b", ids)
    await pair.start_again("a")
    assert (await pair.stage(prompt("not lent any more", 2))).outcome == "settled"
    await pair.at_rest()


# P20, P22
@pytest.mark.contract("P22")
async def test_a_worker_that_stops_leaves_requests_to_its_next_run_and_none_runs_twice_or_is_refused(
    pair: Town,
) -> None:
    long = await moving(pair, "too long to finish", LONG_BLOCKS)
    pair.workers["b"].signal(signal.SIGTERM)
    queued = [await pair.ask(prompt(f"queued at a stop {number}", 2)) for number in range(3)]
    await until(lambda: not pair.workers["b"].alive, 60, what="b has ended")
    assert pair.workers["b"].process.returncode == 0
    assert await pair.held("a", prompt("too long to finish", LONG_BLOCKS)) == LONG_BLOCKS
    await pair.at_rest("a")  # what was lent to the run that stopped is back
    assert not long._outcome.done()  # nobody was told that it ended

    before = time.monotonic()
    await pair.start_again("b")
    outcomes = [await outcome_of(handle) for handle in (*queued, long)]
    assert [outcome.outcome for outcome in outcomes] == ["settled"] * 4
    assert time.monotonic() - before < OUTCOME_S

    first, second = await runs_of(pair, long.request_hash)
    told = [event for event in await pair.events("b") if isinstance(event.body, TransferOutcome)]
    ends = {event.body.transfer: (event.body.outcome, event.header.c) for event in told}  # type: ignore[union-attr]
    assert ends[first] == ("cancelled", "")
    assert ends[second] == ("settled", long.request.request_id)
    assert outcomes[-1].transfer == second
    await pair.step("b", long.request_hash, "handed_back")
    for handle in queued:
        assert len(await runs_of(pair, handle.request_hash)) == 1
    granted = [event.body for event in await pair.events("b") if isinstance(event.body, LeaseGranted)]
    assert sum(lease.transfer == second for lease in granted) == 1
    await pair.at_rest()
    await assert_audit_is_clean(pair)


async def test_a_drain_for_a_restart_keeps_the_queue_and_its_worker_leaves_when_nothing_is_held(pair: Town) -> None:
    running = await moving(pair, "before the restart")
    answered = await drain(pair, "b", action="drain", requests="keep", leave=True)
    assert answered.state == "draining"
    waits = await pair.ask(prompt("waits for the next run", 2))
    assert (await outcome_of(running)).outcome == "settled"

    await until(lambda: not pair.workers["b"].alive, 60, what="b has left")
    assert pair.workers["b"].process.returncode == 0
    assert not waits._verdict.done()
    await pair.start_again("b")

    assert (await outcome_of(waits)).outcome == "settled"
    await pair.at_rest()
    await assert_audit_is_clean(pair)


async def command(pair: Town, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command as a person does, against this town's broker."""
    broker = ("--nats", pair.broker.url, "--token", pair.broker.token or "")
    return await asyncio.to_thread(kvbus, *arguments, *broker, state=pair.folder / "state")


# contract 53
async def test_the_command_names_what_holds_an_instance_when_its_budget_ends_and_frees_nothing(pair: Town) -> None:
    ids = prompt("holds it", LONG_BLOCKS)
    handle = await moving(pair, "holds it", LONG_BLOCKS)
    transfer = (await handle.verdict()).transfer

    pair.workers["b"].signal(signal.SIGSTOP)  # it reads on when it goes on: no time that passes ends its lease

    told = await command(pair, "drain", "a", "--stay", "--budget", "0.1")

    assert told.returncode == 1, told.stderr
    assert "a/m0: draining" in told.stdout
    assert f"b reads {LONG_BLOCKS} pages under T" in told.stdout
    assert f"for {transfer}" in told.stdout
    assert await pair.evict("a", ids) == 0
    pair.workers["b"].signal(signal.SIGCONT)
    undone = await command(pair, "drain", "a", "--undo", "--json")
    assert undone.returncode == 0, undone.stderr
    assert [one["state"] for one in json.loads(undone.stdout)["members"]] == [""]
    assert (await outcome_of(handle)).outcome == "settled"
    await pair.at_rest()


async def test_the_command_waits_until_a_worker_has_left_or_is_drained(pair: Town) -> None:
    stays = await command(pair, "drain", "b", "--stay", "--json")
    assert stays.returncode == 0, stays.stderr
    assert [one["state"] for one in json.loads(stays.stdout)["members"]] == ["drained"]
    assert pair.workers["b"].alive
    assert (await pair.verdict(prompt("refused meanwhile", 2))).verdict == "refused"

    leaves = await command(pair, "drain", "b", "--restart")
    assert leaves.returncode == 0, leaves.stderr
    assert "b/m0: left" in leaves.stdout
    await until(lambda: not pair.workers["b"].alive, 60, what="b has ended")
    nobody = await command(pair, "drain", "nobody")
    assert nobody.returncode == 2
    assert "no worker of 'nobody' is registered" in nobody.stderr
    await pair.start_again("b")
