"""A rolling restart of all instances under load: no request fails, no answer is wrong, nothing is lost or leaked.

Each instance takes from both others. Requests come at twenty a second, whatever becomes of those before them.
"""

import asyncio
import itertools
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.errors import KvbusError
from kvbus.patience import Staged
from tests.flow.members import assert_audit_is_clean
from tests.flow.town import Town, prompt, town
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

NAMES = ("a", "b", "c")
PAIRS = tuple(itertools.permutations(NAMES, 2))
PERIOD_S = 0.05
OPEN_MAX = 60
"""Three seconds of requests."""
PATIENCE_S = 180.0
"""A worker's start takes a second, and on a starved machine half a minute; each request may meet two of them."""
BLOCKS = 2
SETTLES_AFTER = 20
"""So many requests settle between two restarts: each instance is back, and serves."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        for name in NAMES:
            others = [other for other in NAMES if other != name]
            await running.start(name, backend="memory", allow=others, inflight_max=32)
        yield running


@dataclass(slots=True)
class Load:
    """Requests at a steady rate, and what came of each."""

    three: Town
    ended: list[tuple[str, list[int], Staged]] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    async def run(self) -> None:
        """Ask until cancelled; a machine that does not keep up asks less often, rather than ever more at once."""
        for number, (source, destination) in enumerate(itertools.cycle(PAIRS)):
            await until(lambda: len(self.tasks) < OPEN_MAX, 120, what="requests end")
            task = asyncio.create_task(self._one(number, source, destination))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            await asyncio.sleep(PERIOD_S)  # noqa: TID251 - the rate is what the test is about

    async def _one(self, number: int, source: str, destination: str) -> None:
        ids = prompt(f"rolling {number}", BLOCKS)
        try:
            staged = await self.three.publisher.stage(
                source=source, destination=destination, prompt=ids, patience_s=PATIENCE_S
            )
        except KvbusError as error:
            self.failed.append(f"{number} from {source} to {destination}: {error}")
            return
        self.ended.append((destination, ids, staged))
        if not staged.settled:
            why = f"{staged.outcome.failure}: {staged.outcome.reason}" if staged.outcome else f"{staged.verdict}"
            self.failed.append(f"{number} from {source} to {destination}: {why} ({staged.tries} tries)")
        if number % 3 == 0:  # an answer costs as much as several transfers
            self.answers[await self._answer(destination, ids)] += 1

    async def _answer(self, destination: str, ids: list[int]) -> str:
        """How an answer that uses what was brought compares with one that computes all of it."""
        try:
            warm = await self.three.answer(destination, ids)
            cold = await self.three.answer(destination, ids, reuse=False)
        except (KvbusError, OSError):
            return "away"  # it is being restarted
        return "right" if warm.end.tokens == cold.end.tokens else "wrong"


def settled_since(load: Load) -> Callable[[], bool]:
    """Whether enough requests have ended since now."""
    before = len(load.ended)
    return lambda: len(load.ended) >= before + SETTLES_AFTER


async def test_no_request_fails_and_no_answer_is_wrong_while_all_instances_are_restarted(three: Town) -> None:
    load = Load(three)
    asking = asyncio.create_task(load.run())
    await until(settled_since(load), 100, what="requests settle before the restarts")
    for name in NAMES:
        three.workers[name].signal(signal.SIGTERM)
        await until(lambda name=name: not three.workers[name].alive, 60, what=f"{name} has ended")  # type: ignore[misc]
        assert three.workers[name].process.returncode == 0
        await three.start_again(name)
        await until(settled_since(load), 100, what=f"requests settle after the restart of {name}")
    asking.cancel()
    await until(lambda: not load.tasks, PATIENCE_S + 60, what="all requests have ended")

    assert load.failed == [], "\n".join(load.failed)
    assert load.answers["wrong"] == 0
    assert load.answers["right"] > load.answers["away"]
    await three.at_rest()
    await assert_audit_is_clean(three)
