"""Every row that there is: a fault, the parts that it needs, and how long service may be away."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.chaos_broker import brokers, clients, members, rights
from bench.chaos_broker.follower import Follower
from bench.chaos_broker.load import Load
from bench.chaos_broker.scene import Scene
from bench.chaos_broker.stage import Stage, clustered, single
from bench.chaos_broker.table import Row
from tests.flow.guarded import DASH
from tests.flow.members import MEMBERS

Fault = Callable[[Scene], Awaitable[None]]
Opening = Callable[[Path, str], AbstractAsyncContextManager[Stage]]

LEAD_S, TAIL_S = 2.0, 2.0
"""Of steady load before the fault, and after service is back."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be filled.

    `back_s`: how long service may be away. `members`: of each instance, where there are several. `take_s`: what the
    follower takes for a message. `takes_s`: about how long the row runs, to begin the longest first.
    """

    name: str
    fault: Fault
    back_s: float
    may_fail: bool = True
    opening: Opening = single
    members: Sequence[str] = ()
    take_s: float = 0.0
    takes_s: float = 20.0

    def run(self, plant: str) -> Row:
        """Run the row; what it raises is a finding."""
        row = Row(self.name, self.back_s, may_fail=self.may_fail)
        try:
            with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
                asyncio.run(self._play(Path(folder), row, plant))
        except Exception as error:  # noqa: BLE001 - what a fault raises is a finding of its row
            row.problems.append(f"{type(error).__name__}: {error}")
        return row

    async def _play(self, folder: Path, row: Row, plant: str) -> None:
        async with self.opening(folder, plant) as stage:
            await stage.begin(*self.members)
            row.problems += stage.findings
            row.notes += stage.remarks
            follower = Follower(await stage.enter("follower", DASH), self.take_s)
            scene = Scene(stage, row, Load(stage, row.fault), follower)
            try:
                with clients.pending_limit() if self.take_s else nullcontext():
                    follower.start()
                    scene.load.start()
                    await scene.served()
                await asyncio.sleep(LEAD_S)
                await self.fault(scene)
                await scene.served()
                await asyncio.sleep(TAIL_S)
                await scene.reckon()
            finally:
                await scene.load.stop()
                await follower.close()


CASES: Sequence[Case] = (
    Case("broker killed, back after 3 s", partial(brokers.killed, away_s=3.0), 3 + 10),
    Case("broker killed, back after 30 s", partial(brokers.killed, away_s=30.0), 30 + 10, takes_s=50),
    Case("broker back with an empty store", brokers.emptied, 15),
    Case("broker stopped for 12 s", brokers.stopped, 12 + 10),
    Case(
        "leader killed, ten times",
        partial(brokers.leaders_killed, kills=brokers.LEADER_KILLS),
        brokers.ELECTED_S,
        opening=clustered,
        takes_s=150,
    ),
    Case("lame duck", brokers.lame_duck, 10, opening=clustered),
    Case("two of three nodes dead", brokers.two_down, brokers.TWO_DOWN_S + brokers.ELECTED_S, opening=clustered),
    Case("a callback that raises", clients.raising, 1 + 10),
    Case("an oversized event", clients.oversized, 5, may_fail=False),
    Case("a slow subscriber", clients.slow, 5, may_fail=False, take_s=clients.TAKE_S),
    Case("duplicate, reordered, old epoch", clients.injected, 15),
    Case("two coordinators at once", members.two_coordinators, 20, members=MEMBERS),
    Case("a clock jump", members.clock_jumped, 10),
    Case("permission removed", rights.right_removed, 4 + 10, opening=rights.opening),
    Case("credentials expired", rights.credentials_expired, 4 + 10, opening=rights.opening),
    Case("first connect to nothing", rights.connected_early, 1 + 10, opening=rights.nothing_there),
)


def chosen(only: Sequence[str]) -> list[Case]:
    """Return the cases whose names hold one of these words; all without a word."""
    names = {case.name for case in CASES}
    return [
        case
        for case in CASES
        if not only or any(word == case.name or (word not in names and word in case.name) for word in only)
    ]
