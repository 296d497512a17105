"""A new coordinator against what an earlier term left behind: who has applied what, told by members in any order.

The simulated world brings coordinators to death seldom between one member's applying an end and another's. Here each
transfer was left in some such state, and the oracle knows how it ended, if any member has applied its end.
"""

import random
from dataclasses import dataclass

from kvbus.errors import KvbusError
from kvbus.ledger.agreement import Decision, Party
from kvbus.ledger.attendance import Attendance
from kvbus.ledger.council import Council, Report
from kvbus.ledger.facts import Fact
from kvbus.ledger.shares import ENDED, Share, ShareStage
from kvbus.testing.sim.searches.found import BrokenPromiseError, Found, require

ROUNDS = 40
TRANSFERS = 4
DECISIONS_MAX = 64
"""Three words end a transfer; a coordinator that has not come to an end after so many repeats itself."""
MEMBERS = {"m0": 11, "m1": 7, "m2": 9}
TERM, EARLIER_TERM = 5, 4
NOW = 1.0
WHOLE = int(Fact.TAKEN | Fact.DELIVERED | Fact.ACCESS_ENDED)
KINDS = {ShareStage.VISIBLE: "visible", ShareStage.VOID: "void"}
LEFT = {
    ShareStage.VISIBLE: (ShareStage.VISIBLE, ShareStage.SETTLED),
    ShareStage.VOID: (ShareStage.VOID, ShareStage.SETTLED, ShareStage.OPEN),
    None: (ShareStage.SETTLED, ShareStage.OPEN),
}
"""In which stages the members' shares may stand of a transfer that has ended so, or has not."""


@dataclass(slots=True)
class _Transfer:
    """One transfer as the earlier term left it: each member's share, and its end if some member has applied one."""

    shares: dict[str, Share]

    @property
    def end(self) -> ShareStage | None:
        return next((share.stage for share in self.shares.values() if share.stage in ENDED), None)


class _Search:
    def __init__(self, seed: int) -> None:
        self.step = 0
        self._random = random.Random(f"{seed}:council")

    def run(self) -> None:
        for self.step in range(1, ROUNDS + 1):
            self._one_term()

    def _one_term(self) -> None:
        ranks = {name: rank for rank, name in enumerate(MEMBERS)}
        attendance = Attendance(members=tuple(MEMBERS), me="m0", began_at=0.0)
        council = Council(attendance, me=("m0", MEMBERS["m0"]), ranks=ranks, term=TERM, n=0, previous="")
        transfers = {f"t{number}": self._left_behind(f"t{number}") for number in range(TRANSFERS)}
        record = council.next(NOW)
        require(record is not None and record.kind == "term", f"a term begins with {record}")
        if record is not None:
            council.appended(record)
        self._hear_members(council, transfers)
        for sequence in range(2, DECISIONS_MAX):
            decision = council.next(NOW)
            if decision is None:
                self._check_ends(transfers)
                return
            self._check(decision, transfers[decision.transfer])
            council.appended(decision)
            _apply(decision, transfers[decision.transfer])
            for member in MEMBERS:
                council.report(NOW, _report(member, transfers, sequence, TERM, decision.n))
        require(holds=False, text=f"{DECISIONS_MAX} decisions, and no end")

    def _left_behind(self, transfer: str) -> _Transfer:
        draw = self._random
        end = draw.choice((ShareStage.VISIBLE, ShareStage.VOID, None))
        parties = tuple(Party(name, epoch, rank, rank + 1) for rank, (name, epoch) in enumerate(MEMBERS.items()))
        shares: dict[str, Share] = {}
        for party in parties:
            stage = draw.choice(LEFT[end])
            bits = WHOLE if stage is not ShareStage.OPEN or draw.random() < 0.7 else int(Fact.TAKEN)
            shares[party.member] = Share(transfer, parties, party.rank, party.ticket, bits, 0, 4, stage)
        return _Transfer(shares)

    def _hear_members(self, council: Council, transfers: dict[str, _Transfer]) -> None:
        """Let all report, some of the earlier term first; nothing is decided before the last has reported (P13)."""
        members = self._random.sample(sorted(MEMBERS), len(MEMBERS))
        for at, member in enumerate(members):
            if self._random.random() < 0.5:
                council.report(NOW, _report(member, transfers, 0, EARLIER_TERM, 9))
            decision = council.next(NOW)
            waits = ", ".join(members[at:])
            require(decision is None, f"{decision and decision.kind} is decided, and {waits} has not reported")
            council.report(NOW, _report(member, transfers, 1, TERM, 1))

    def _check_ends(self, transfers: dict[str, _Transfer]) -> None:
        """What a member has ended has ended everywhere, once the coordinator has no more to say."""
        for transfer, one in transfers.items():
            stages = {share.stage for share in one.shares.values()}
            require(one.end is None or len(stages) == 1, f"{transfer} was left as {' and '.join(sorted(stages))}")

    def _check(self, decision: Decision, transfer: _Transfer) -> None:
        end = transfer.end
        if end is not None:
            text = f"{decision.transfer} is to be {KINDS[end]}, as a member has applied, and is {decision.kind}"
            require(decision.kind == KINDS[end], f"{text} now")
        elif decision.kind == "visible":
            open_at = [name for name, share in transfer.shares.items() if share.stage is ShareStage.OPEN]
            require(not open_at, f"{decision.transfer} is shown, and {', '.join(open_at)} has promised nothing")


def _report(member: str, transfers: dict[str, _Transfer], sequence: int, term: int, n: int) -> Report:
    shares = tuple(transfer.shares[member] for transfer in transfers.values())
    return Report(member, MEMBERS[member], sequence, term, n, shares)


def _apply(decision: Decision, transfer: _Transfer) -> None:
    """Apply a decision at every member: a promise, or the end."""
    for share in transfer.shares.values():
        if share.stage in ENDED:
            continue
        if decision.kind == "settle":
            share.stage = ShareStage.SETTLED if share.complete else share.stage
        else:
            share.stage = ShareStage.VISIBLE if decision.kind == "visible" else ShareStage.VOID


def search(seed: int) -> Found | None:
    """Begin some terms from a seed; return the first decision that was wrong."""
    one = _Search(seed)
    try:
        one.run()
    except (BrokenPromiseError, KvbusError) as error:
        return Found(str(error), one.step)
    return None
