"""Real workers under changed messages on every subject that they hear: they go on, and nothing of it stays."""

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.events import (
    LeaseReleased,
    LendRequested,
    PlanAsked,
    StatsAsked,
    TransferCancelRequested,
    TransferRequested,
)
from kvbus.names import request_hash, token_bytes
from kvbus.parts import ProcessIdentity, Prompt, ReaderKey
from kvbus.processes import identity
from kvbus.topics import Command, Query
from tests.flow.members import assert_audit_is_clean
from tests.flow.town import TOPICS, Town, prompt, town
from tests.fuzz.mutating import inputs
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEED = random.SystemRandom().randrange(1 << 32)
MESSAGES = 250
"""On each subject."""
AT_ONCE = 50
QUEUED = 150
EMPTY_S = 100.0
EPOCH = 1 << 32 | 9


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await asyncio.gather(running.start("a"), running.start("b", allow=["a"]))
        yield running


def ended_process() -> ProcessIdentity:
    """A reader of which the source knows that it is gone, so that no changed question keeps a lease."""
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    who = identity(child.pid)
    child.communicate()
    return who


def request(pair: Town, number: int) -> bytes:
    """A request that would be refused, since nobody is called so."""
    asked = Prompt(tokens=token_bytes(prompt(f"fuzz {number}", 1)))
    own = request_hash(model="", salt="", source="nobody", prompt=asked.canonical())
    body = TransferRequested(
        request_id=f"tester.{number}", request_hash=own, requester="tester", source="nobody", destination="b",
        prompt=asked, on_miss="fail", budget_s=5.0,
    )  # fmt: skip
    return pair.encoded(body)


def originals(pair: Town, instance: str) -> dict[str, tuple[bytes, ...]]:
    """The subjects that an instance answers on, and what is rightly said there."""
    key = ReaderKey(instance="tester", member="m0", epoch=EPOCH, transfer="t", attempt=1, rank=0)
    lend = LendRequested(
        key=key, nonce=b"n" * 16, fingerprint=pair.registered["a"].record.fingerprint, names=b"x" * 32, first_block=0,
        on_miss="fail", budget_s=1.0, wait_s=0.0, process=ended_process(), transports=("memory",),
    )  # fmt: skip
    said = {
        TOPICS.command(instance, Command.LEASE, "m0"): (lend, LeaseReleased(key=key, nonce=b"n" * 16)),
        TOPICS.command(instance, Command.PLAN, "m0"): (PlanAsked(transfer="t"),),
        TOPICS.command(instance, Command.CANCEL): (TransferCancelRequested(request_hash="0" * 32),),
        TOPICS.query(instance, Query.STATS): (StatsAsked(),),
    }
    found = {subject: tuple(map(pair.encoded, bodies)) for subject, bodies in said.items()}
    return {**found, TOPICS.command(instance, Command.TRANSFER): (request(pair, 1),)}


def changed(seeds: tuple[bytes, ...], name: str, count: int) -> Iterator[bytes]:
    return islice(inputs(seeds, random.Random(f"{SEED} {name}")), count)


async def bombard(pair: Town, subject: str, seeds: tuple[bytes, ...]) -> None:
    """Ask all of it, many at a time; what is malformed has no answer, and nobody waits for one."""
    for number, data in enumerate(changed(seeds, subject, MESSAGES)):
        await pair.bus.publish(subject, data)
        if number % AT_ONCE == 0:
            await pair.stats(subject.split(".")[2])  # the worker has come as far as this


async def queue(pair: Town) -> None:
    """Store changed requests under hashes that are not theirs."""
    for number, data in enumerate(changed((request(pair, 2), request(pair, 3)), "queue", QUEUED)):
        await pair.bus.store(TOPICS.transfer("b", f"{number:032x}"), data, message_id=f"fuzz.{SEED}.{number}")


async def test_workers_that_hear_changed_messages_everywhere_settle_a_transfer_and_their_audit_is_clean(
    pair: Town,
) -> None:
    print(f"seed {SEED}")  # noqa: T201 - a failure shows it
    pids = {name: worker.pid for name, worker in pair.workers.items()}
    for name in pids:
        for subject, seeds in originals(pair, name).items():
            await bombard(pair, subject, seeds)
    await queue(pair)

    async def empty() -> bool:
        return await pair.bus.queued(TOPICS.transfer_filter("b")) == 0

    await until(empty, EMPTY_S, what="every changed request has left the queue")
    outcome = await pair.stage(prompt("after the storm", 4))
    assert (outcome.outcome, outcome.pages_moved) == ("settled", 4)
    assert await pair.held("b", prompt("after the storm", 4)) == 4
    for name, pid in pids.items():
        stats = await pair.stats(name)
        assert stats["messages_malformed"] > MESSAGES, "it heard what was sent"
        assert (pair.workers[name].pid, pair.workers[name].alive) == (pid, True)
    await pair.at_rest()
    await assert_audit_is_clean(pair)
