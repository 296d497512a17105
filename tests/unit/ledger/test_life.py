"""A lease moves as the table in held.py says, and every move of the table happens."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.held import LIFE, Stage, stage_of
from kvbus.ledger.types import Delivered, SubmissionRejectedError
from tests.unit.ledger.bench import HELD_BACK, Bench

USUAL = "grant advance assign deliver end whole fail collect settle finish".split()
SELDOM = "refuse reject raise abandon cancel spoil".split()
STEPS = [*USUAL * 12, *SELDOM]


class Walk:
    """One write lease, moved at random; notes where its bits say that it stands after each call."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.bench = Bench()
        self.ticket, self.lease = self.bench.write(hint=HELD_BACK, granted=False)
        self.stages = [Stage.TAKEN]
        self.assigned = False

    def run(self, steps: int) -> list[tuple[Stage, Stage]]:
        """Take so many steps; return the moves."""
        for _ in range(steps):
            if self.ticket not in self.bench.holder.tickets():
                break
            self.step(self.chance.choice(STEPS))
            self.note()
        return [move for move in pairwise(self.stages) if move[0] is not move[1]]

    def note(self) -> None:
        holder = self.bench.holder
        bits = holder.bits(self.ticket)
        if self.ticket not in holder.tickets():
            facts = holder.collect()
            bits = dict(zip(facts.tickets, facts.bits, strict=True))[self.ticket]
        self.stages.append(stage_of(bits))

    def step(self, name: str) -> None:
        holder, pull, lease = self.bench.holder, self.bench.pull, self.lease
        calls: dict[str, Callable[[], object]] = {
            "advance": holder.advance,
            "collect": holder.collect,
            "finish": holder.finish,
            "settle": lambda: holder.settle([self.ticket]),
            "abandon": lambda: holder.abandon(self.ticket, FailureClass.DEADLINE, "the budget is spent"),
            "cancel": lambda: holder.cancel(self.ticket, "not wanted"),
            "reject": lambda: pull.faults.plant("submit", SubmissionRejectedError(FailureClass.TRANSPORT, "not now")),
            "raise": lambda: pull.faults.plant("submit", OSError("gone")),
            "spoil": lambda: lease.faults.plant("release", OSError("the pool is gone")),
        }
        if name in calls:
            calls[name]()
        elif name == "assign":  # only once its pages are known: granted and submitted are then two calls
            if self.stages[-1] is Stage.GRANTED and not self.assigned:
                self.assigned = True
                holder.assign(self.ticket, "go")
        elif name in {"grant", "refuse"}:
            if not lease.granted:
                getattr(lease, name)()
        elif (self.ticket, 1) in pull.open:
            self.answer(name)

    def answer(self, name: str) -> None:
        rows = (True,) * self.lease.rows
        if name == "deliver":
            self.bench.pull.answer(self.ticket, Delivered(rows, 1), None)
        elif name == "fail":
            self.bench.pull.fail(self.ticket, evidence=Evidence.COMPLETED)
        elif name in {"end", "whole"}:
            self.bench.pull.answer(self.ticket, Delivered(rows, 1) if name == "whole" else None, Evidence.COMPLETED)


def test_a_lease_moves_as_the_table_says_and_every_move_of_it_happens() -> None:
    # contract 1, 43
    seen: set[tuple[Stage, Stage]] = set()
    for seed in range(1_500):
        moves = Walk(seed).run(60)
        assert set(moves) <= LIFE, f"seed {seed}: {moves}"
        seen.update(moves)
    assert seen == LIFE


@pytest.mark.parametrize("end", [Stage.RETURNED, Stage.RETURN_FAILED])
def test_every_way_to_a_return_leads_through_access_end(end: Stage) -> None:
    # contract 1
    assert {before for before, after in LIFE if after is end} == {Stage.ACCESS_ENDED}
    assert not [after for before, after in LIFE if before is end]
