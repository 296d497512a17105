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
SELDOM = "refuse reject raise abandon cancel spoil fence fence".split()
STEPS = [*USUAL * 12, *SELDOM]


class Walk:
    """One lease, moved at random; notes where its bits say that it stands after each call."""

    def __init__(self, seed: int, *, reads: bool) -> None:
        self.chance = random.Random(seed)
        self.bench = Bench()
        lend = self.bench.read if reads else self.bench.write
        self.ticket, self.lease = lend(hint=HELD_BACK, granted=False)
        self.backend = self.bench.serve if reads else self.bench.pull
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
            bits = {ticket: bits for ticket, _, bits, _, _ in facts.lines}[self.ticket]
        self.stages.append(stage_of(bits))

    def step(self, name: str) -> None:
        holder, lease, faults = self.bench.holder, self.lease, self.backend.faults
        calls: dict[str, Callable[[], object]] = {
            "advance": holder.advance,
            "collect": holder.collect,
            "finish": holder.finish,
            "settle": lambda: holder.settle([self.ticket]),
            "abandon": lambda: holder.abandon(self.ticket, FailureClass.DEADLINE, "the budget is spent"),
            "cancel": lambda: holder.cancel(self.ticket, "not wanted"),
            "fence": self.fence,
            "reject": lambda: faults.plant("submit", SubmissionRejectedError(FailureClass.TRANSPORT, "not now")),
            "raise": lambda: faults.plant("submit", OSError("gone")),
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
        elif (self.ticket, 1) in self.backend.open:
            self.answer(name)

    def fence(self) -> None:
        holder, binding = self.bench.holder, self.lease.direction.name
        if self.stages[-1] in {Stage.SUBMITTED, Stage.RETAINED}:  # isolated earlier, it would never be submitted
            holder.isolate({"READ": "serve", "WRITE": "pull"}[binding], "peer", "silent")
        holder.fence(self.ticket, "silent")

    def answer(self, name: str) -> None:
        rows = (True,) * self.lease.rows
        if name == "deliver":
            self.backend.answer(self.ticket, Delivered(rows, 1), None)
        elif name == "fail":
            self.backend.fail(self.ticket, evidence=Evidence.COMPLETED)
        elif name in {"end", "whole"}:
            self.backend.answer(self.ticket, Delivered(rows, 1) if name == "whole" else None, Evidence.COMPLETED)


def test_a_lease_moves_as_the_table_says_and_every_move_of_it_happens() -> None:
    # contract 1, 43; P5
    seen: set[tuple[Stage, Stage]] = set()
    for seed in range(1_500):
        moves = Walk(seed, reads=False).run(60)
        assert set(moves) <= LIFE, f"seed {seed}: {moves}"
        seen.update(moves)
    fenced = {move for move in LIFE if Stage.FENCED in move}
    assert seen == LIFE - fenced, "a write is never fenced"
    for seed in range(1_500):
        moves = Walk(seed, reads=True).run(60)
        assert set(moves) <= LIFE, f"seed {seed}: {moves}"
        seen.update(moves)
    assert seen == LIFE


@pytest.mark.parametrize("end", [Stage.RETURNED, Stage.RETURN_FAILED])
def test_every_way_to_a_return_leads_through_access_end_or_a_fence(end: Stage) -> None:
    # contract 1; P5
    assert {before for before, after in LIFE if after is end} == {Stage.ACCESS_ENDED, Stage.FENCED}
    assert not [after for before, after in LIFE if before is end]
