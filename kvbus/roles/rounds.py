"""The round: local facts, agreement, settle, advance, finish; run whenever something changed, and once a second.

An instance with one member agrees with itself in the same round, in process, and records the decision; where there are
several, the leases of a transfer wait for their word (`council.py`). The round is one synchronous step on the worker's
loop: whoever changed something may run it at once and find its leases moved on.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvbus.ledger.agreement import Agreement, Decision
from kvbus.ledger.facts import RESULT_BITS, Fact, FactDetail, FailureClass, LeaseFacts, OutcomeRow
from kvbus.ledger.holder import LeaseHolder

PASSES_MAX = 8
"""A lease goes from taken to returned in four passes; what is still changing after eight waits for the next round."""
_DECIDED = Fact.RETURNED | Fact.SETTLED
_ACCESS_ENDED = int(Fact.ACCESS_ENDED)


class FactsSink(Protocol):
    """Where a round's facts and decisions go: the recorder, towards the bus."""

    def facts(self, facts: LeaseFacts) -> None:
        """Take one batch, in order."""

    def decision(self, decision: Decision) -> None:
        """Take one decision, in order."""


class TransferFacts(Protocol):
    """Who follows transfers: hears the lines, rows and details that a batch holds."""

    def on_line(self, ticket: int, bits: int, lo: int, hi: int) -> None:
        """One line of the columns."""

    def on_outcome(self, row: OutcomeRow) -> None:
        """An attempt ended."""

    def on_detail(self, detail: FactDetail) -> None:
        """Why something failed."""


class Group(Protocol):
    """The other members of the instance, where it has several: they decide about a transfer's leases together."""

    def note(self, ticket: int, bits: int, lo: int, hi: int) -> bool:
        """Take note of a line of facts; True where its lease waits for the instance's decision."""


@dataclass(slots=True)
class RoundStatistics:
    """How many rounds ran, and how many lines of facts they had."""

    rounds: int = 0
    lines: int = 0
    unknown_tickets: int = 0


class Rounds:
    """Runs rounds for one member: `run` does one now, `shared` one for several who do not need it each."""

    def __init__(self, *, holder: LeaseHolder, agreement: Agreement, sink: FactsSink, member: str, epoch: int) -> None:
        self.holder = holder
        self.agreement = agreement
        self.statistics = RoundStatistics()
        self.group: Group | None = None
        self._sink = sink
        self._member = member
        self._epoch = epoch
        self._followers: list[TransferFacts] = []
        self._running = False
        self._again = False
        self._due = False

    def follow(self, follower: TransferFacts) -> None:
        """Let a follower hear each batch, after it was recorded."""
        self._followers.append(follower)

    def run(self) -> None:
        """Run passes until nothing is left to do; a call from inside a pass asks for one more instead.

        What a backend has to say later on it wakes the worker for; a lender is asked again after a change or a tick.
        """
        if self._running:
            self._again = True
            return
        self._running = True
        try:
            for _ in range(PASSES_MAX):
                self._again = False
                if not self._pass() and not self._again:
                    break
            self._due = False  # not where a pass raised: whoever waits for this round runs one then
        finally:
            self._running = False

    async def shared(self) -> None:
        """Run a round in the next turn of the loop: one for all who wait for it by then, whose leases it moves on."""
        self.call_for()
        await asyncio.sleep(0)
        self.run_due()

    def call_for(self) -> None:
        """Make a round due: whoever calls for it calls `run_due` in its next turn; one before that serves as well."""
        self._due = True

    def run_due(self) -> None:
        """Run the round that was called for, if none has run since."""
        if self._due:
            self.run()

    def decide(self, make: Callable[[Agreement], Decision]) -> Decision:
        """Make a decision outside a pass (open, void) and record it."""
        decision = make(self.agreement)
        self._sink.decision(decision)
        return decision

    def apply(self, decision: Decision) -> None:
        """Settle our tickets in a decision; what was voided is given up first, so that nothing of it counts (P10)."""
        ours = [
            party.ticket for party in decision.parties if (party.member, party.epoch) == (self._member, self._epoch)
        ]
        if decision.kind == "void":
            for ticket in ours:
                if self.holder.bits(ticket):
                    self.holder.abandon(ticket, FailureClass.CONTRADICTION, decision.reason)
        self.statistics.unknown_tickets += len(self.holder.settle(ours))

    def _pass(self) -> bool:
        holder = self.holder
        facts = holder.collect()
        has_facts = bool(facts)
        self.statistics.rounds += 1
        if has_facts:
            self._sink.facts(facts)
            if tickets := self._agree(facts):
                holder.settle(tickets)
        holder.advance()
        holder.finish()
        if has_facts:
            self._tell(facts)
        return holder.has_work

    def _agree(self, facts: LeaseFacts) -> list[int]:
        """Apply what is decided by these facts; return the tickets that no transfer shares and that may go back now."""
        self.statistics.lines += len(facts.lines)
        tickets: list[int] = []
        for ticket, _, bits, lo, hi in facts.lines:
            # Also what goes back at a shutdown without the others: a share that was given up is promised no more (P11).
            if self.group is not None and self.group.note(ticket, bits, lo, hi):
                continue
            if bits & _DECIDED:
                continue
            party_key = (self._member, self._epoch, ticket)
            decision = self.agreement.report(party_key, bits, lo=lo, hi=hi)
            if decision is not None:
                self._sink.decision(decision)
                self.apply(decision)
            elif bits & _ACCESS_ENDED and bits & RESULT_BITS and not self.agreement.awaits(party_key):
                tickets.append(ticket)
        return tickets

    def _tell(self, facts: LeaseFacts) -> None:
        for follower in self._followers:
            for detail in facts.details:
                follower.on_detail(detail)
            for row in facts.rows:
                if isinstance(row, OutcomeRow):
                    follower.on_outcome(row)
            for ticket, _, bits, lo, hi in facts.lines:
                follower.on_line(ticket, bits, lo, hi)
