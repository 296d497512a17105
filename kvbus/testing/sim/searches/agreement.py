"""The agreement of several ranks against an oracle: reports in any order, repeated, stale, contradictory.

The oracle keeps for each transfer what each of its parties has said, and says what has to be decided, and when. Several
members meet here as parties only; whatever carries their words is not part of this search.
"""

import random
from dataclasses import dataclass, field

from kvbus.errors import KvbusError
from kvbus.ledger.agreement import Agreement, Decision, Party
from kvbus.ledger.facts import RESULT_BITS, Fact
from kvbus.testing.sim.searches.found import BrokenPromiseError, Found, broken, require

STEPS = 600
OPEN_MAX = 4
MEMBERS = {"m0": 3, "m1": 7, "m2": 5}
"""Members, and the epoch in which each runs."""
RESULTS = (int(Fact.DELIVERED), int(Fact.DELIVERED), int(Fact.FAILED), int(Fact.CANCELLED))
ENDED, ABANDONED = int(Fact.ACCESS_ENDED), int(Fact.ABANDONED)


@dataclass(slots=True)
class Said:
    """What one party has said so far: bits only turn on, bounds are those of its first result."""

    bits: int = 0
    bounds: tuple[int, int] | None = None


@dataclass(slots=True)
class Expected:
    """One open transfer as the oracle knows it."""

    parties: tuple[Party, ...]
    said: dict[Party, Said] = field(default_factory=dict)

    def hear(self, party: Party, bits: int, bounds: tuple[int, int]) -> tuple[str, int, int] | None:
        """Take note of a report; return kind and bounds of the decision that has to follow, or None."""
        said = self.said[party]
        said.bits |= bits
        if bits & RESULT_BITS:
            said.bounds = said.bounds or bounds
            if said.bounds != bounds or (said.bits & RESULT_BITS).bit_count() > 1:
                return "void", 0, 0
        if not all(one.bits & ENDED and one.bits & RESULT_BITS for one in self.said.values()):
            return None
        if any(one.bits & ABANDONED for one in self.said.values()):
            return "void", 0, 0
        held = [one.bounds for one in self.said.values() if one.bounds]
        lo, hi = max(lo for lo, _ in held), min(hi for _, hi in held)
        return ("settle", lo, hi) if lo <= hi else ("settle", 0, 0)


class _Search:
    def __init__(self, seed: int) -> None:
        self.step = 0
        self._random = random.Random(f"{seed}:agreement")
        self._agreement = Agreement(term=1)
        self._open: dict[str, Expected] = {}
        self._last: Decision | None = None
        self._tickets = self._transfers = 0

    def run(self) -> None:
        for self.step in range(1, STEPS + 1):
            draw = self._random.random()
            if not self._open or (draw < 0.1 and len(self._open) < OPEN_MAX):
                self._open_one()
            elif draw < 0.14:
                self._open_wrongly()
            elif draw < 0.2:
                self._report_in_another_epoch()
            else:
                self._report()

    def _open_one(self) -> None:
        self._transfers += 1
        transfer, parties = f"t{self._transfers}", self._parties()
        decision = self._agreement.open(transfer, parties)
        self._chained(decision)
        require((decision.kind, decision.parties) == ("open", parties), f"{transfer} was opened as {decision}")
        self._open[transfer] = Expected(parties, {party: Said() for party in parties})

    def _parties(self) -> tuple[Party, ...]:
        parties = []
        for rank in range(self._random.randint(1, 4)):
            member = self._random.choice(sorted(MEMBERS))
            self._tickets += 1
            parties.append(Party(member, MEMBERS[member], rank, self._tickets))
        return tuple(parties)

    def _open_wrongly(self) -> None:
        """Open what is open, or with a ticket that another transfer has: both have to be refused (P12)."""
        transfer = self._random.choice(sorted(self._open))
        if self._random.random() < 0.5:
            other, parties, what = transfer, self._parties(), f"{transfer} was opened a second time"
        else:
            parties = (self._random.choice(self._open[transfer].parties),)
            other, what = f"{transfer}-again", f"T{parties[0].ticket} of {transfer} serves a second transfer"
        try:
            self._agreement.open(other, parties)
        except (ValueError, KvbusError):
            return
        broken(what)

    def _report_in_another_epoch(self) -> None:
        party = self._random.choice(self._open[self._random.choice(sorted(self._open))].parties)
        epoch = party.epoch + self._random.choice((-2, -1, 1, 2))
        bits = self._random.choice(RESULTS) | ENDED
        decision = self._agreement.report((party.member, epoch, party.ticket), bits, lo=0, hi=9)
        require(decision is None, f"epoch {epoch} of {party.member} decided for epoch {party.epoch}")

    def _report(self) -> None:
        transfer = self._random.choice(sorted(self._open))
        expected = self._open[transfer]
        party = self._random.choice(expected.parties)
        bits, bounds = self._words(expected.said[party])
        due = expected.hear(party, bits, bounds)
        decision = self._agreement.report(party.key, bits, lo=bounds[0], hi=bounds[1])
        found = None if decision is None else (decision.kind, decision.lo, decision.hi)
        require(found == due, f"{transfer} has to come to {due}, and came to {found}")
        if decision is not None:
            self._chained(decision)
            same = (decision.transfer, decision.parties) == (transfer, expected.parties)
            require(same, f"the decision about {transfer} names {decision.transfer} {decision.parties}")
            require(not self._agreement.is_open(transfer), f"{transfer} is open after its decision")
            del self._open[transfer]

    def _words(self, said: Said) -> tuple[int, tuple[int, int]]:
        """Return a line of facts: some step on, or a repeat; seldom one that contradicts what was said before."""
        draw, bits = self._random, said.bits
        bounds = said.bounds or (draw.randint(0, 4), draw.randint(3, 8))
        kind = draw.random()
        if kind < 0.35 and not bits & RESULT_BITS:
            bits |= draw.choice(RESULTS)
        elif kind < 0.7:
            bits |= ENDED
        elif kind < 0.75:
            bits |= ABANDONED
        elif kind < 0.8 and bits & RESULT_BITS:
            if draw.random() < 0.5:
                bounds = bounds[0], bounds[1] + 1
            else:
                bits = bits & ~RESULT_BITS | draw.choice(RESULTS)
        return bits | int(Fact.TAKEN), bounds

    def _chained(self, decision: Decision) -> None:
        """Numbers are without gaps, and each decision names the one before (P15)."""
        n, previous = (self._last.n, self._last.decision_id) if self._last else (0, "")
        require(decision.n == n + 1, f"decision {decision.n} follows {n}")
        require(decision.previous == previous, f"decision {decision.n} names {decision.previous!r}, not {previous!r}")
        self._last = decision


def search(seed: int) -> Found | None:
    """Take some hundred steps from a seed; return the first that was wrong."""
    one = _Search(seed)
    try:
        one.run()
    except (BrokenPromiseError, KvbusError) as error:
        return Found(str(error), one.step)
    return None
