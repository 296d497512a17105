"""The coordinator's book where an instance has several members: their states in, one decision at a time out.

A coordinator is a member whose term record stands in the instance's log. It knows what the members last reported
(`shares.py`), and derives from that what the log should say next; the caller appends it with a fence and tells whether
it stands there. Nothing is decided that is not in the log, so a coordinator that was replaced has decided nothing.

A new coordinator decides only after every member has reported to its term (P13). For one that is silent, or lives and
does not report, it does not wait for ever: it has read the log itself. What any member has applied is decided again in
the same words (P15); what none has, goes on or is voided.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvbus.ledger.agreement import Decision, Party, common_bounds
from kvbus.ledger.attendance import Attendance
from kvbus.ledger.facts import RESULT_BITS, Fact
from kvbus.ledger.shares import ENDED, SHARES_MAX, TERM_MAX, Share, ShareStage

ADOPTED_S = 10.0
"""What a transfer of an earlier term may still take; its own deadline died with the coordinator that kept it."""

GATHER_S = 30.0
"""How long a new term waits for a member that lives and does not report: three times what a silent one is given."""
LAG_S = 10.0
"""A member that lives and has not applied in so long what the log had then does not see it there: ten heartbeats that
named the log's head to it."""

_ABANDONED = int(Fact.ABANDONED)


@dataclass(frozen=True, slots=True)
class Report:
    """What a member said last: `sequence` grows, `term` and `n` are its place in the log, shares all that it holds."""

    member: str
    epoch: int
    sequence: int
    term: int
    n: int
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A transfer that is to be opened, and when it is given up if the members do not agree."""

    transfer: str
    give_up_at: float


@dataclass(slots=True)
class _Known:
    """What one member reported last, by transfer."""

    report: Report
    shares: dict[str, Share]


@dataclass(slots=True)
class _Case:
    """One transfer that is not over at every member. `decided_n` is the number of its last decision in this term.

    `bound_to` is the end that some member applied in an earlier term: no other may be decided (P15).
    """

    transfer: str
    parties: tuple[Party, ...]
    give_up_at: float
    decided_n: int
    stage: ShareStage = ShareStage.OPEN
    bound_to: ShareStage | None = None
    lo: int = 0
    hi: int = 0
    contradiction: str = ""


class Council:
    """One member's view as the coordinator of a term. Built anew for each term; it starts by writing its record."""

    def __init__(
        self, attendance: Attendance, *, me: tuple[str, int], ranks: dict[str, int], term: int, n: int, previous: str
    ) -> None:
        self._attendance = attendance
        self._me = me
        self._ranks = ranks
        self._term = term
        self._n = n
        self._previous = previous
        self._known: dict[str, _Known] = {}
        self._proposed: deque[_Proposal] = deque()
        self._cases: dict[str, _Case] = {}
        self._cancels: dict[str, str] = {}
        self._recorded = False
        self._gathered = False
        self._outranked_by = 0
        self._looked_at: tuple[float, int] | None = None
        self._lagging: frozenset[str] = frozenset()
        self._began_at = 0.0
        self._strays: dict[str, None] = {}

    @property
    def outranked_by(self) -> int:
        """A term that a member knows and this one is below: the log lost it, and only a higher one will be heard."""
        return self._outranked_by

    @property
    def leads(self) -> bool:
        """True once its term stands in the log and the members' states are known."""
        return self._gathered

    @property
    def open_transfers(self) -> int:
        """Transfers that are not over at every member, and those that wait to be opened."""
        return len(self._cases) + len(self._proposed)

    # ------------------------------------------------------------------------------------------------- what it hears

    def report(self, now: float, report: Report) -> None:
        """Take what a member holds; older words than its last, or of a run that was replaced, change nothing."""
        if not self._attendance.heard(now, report.member, report.epoch):
            return
        if self._term < report.term < TERM_MAX:
            self._outranked_by = max(self._outranked_by, report.term)
        known = self._known.get(report.member)
        if known is not None and known.report.epoch == report.epoch:
            self._compare(known, report)
        if known is None or known.report.epoch != report.epoch or report.sequence > known.report.sequence:
            self._known[report.member] = _Known(report, {share.transfer: share for share in report.shares})
            if self._gathered and report.term == self._term and report.n >= self._n:
                self._notice_strays(report)

    def _notice_strays(self, report: Report) -> None:
        """A member that came late may hold what nobody else knew of when this term gathered: that is decided too."""
        for share in report.shares:
            if share.stage not in ENDED and share.transfer not in self._cases:
                self._strays[share.transfer] = None

    def _compare(self, known: _Known, report: Report) -> None:
        """Bounds come with the result, and stay: a member that reports others contradicts itself (P17)."""
        for share in report.shares:
            before, case = known.shares.get(share.transfer), self._cases.get(share.transfer)
            if before is None or case is None or share.stage in ENDED or not before.bits & share.bits & RESULT_BITS:
                continue
            if (before.lo, before.hi) != (share.lo, share.hi):
                case.contradiction = f"{report.member} gave two different bounds"

    def away(self, now: float) -> tuple[str, ...]:
        """Return the members that could take part in nothing now: not there, or not following this term's log yet."""
        absent = set(self._attendance.absent(now))
        return tuple(name for name in self._ranks if name in absent or not self._follows(name))

    def _follows(self, member: str) -> bool:
        known = self._known.get(member)
        if known is None or known.report.epoch != self._attendance.epoch_of(member):
            return False
        return known.report.term == self._term

    def propose(self, transfer: str, give_up_at: float) -> bool:
        """Ask that a transfer be opened; False where so many are under way that the members could not keep them."""
        if self.open_transfers >= SHARES_MAX:
            return False
        self._proposed.append(_Proposal(transfer, give_up_at))
        return True

    def cancel(self, transfer: str, text: str) -> bool:
        """Ask that every member stop its share; False for a transfer that is not open over the members."""
        if transfer not in self._cases:
            return False
        self._cancels.setdefault(transfer, text)
        return True

    # ----------------------------------------------------------------------------------------------- what it decides

    def next(self, now: float) -> Decision | None:
        """Return what the log should say next, or None while nothing is due; it is decided once it was `appended`."""
        if not self._recorded:
            return self.term_record()
        if not self._gathered and not self._gather(now):
            return None
        if self._strays:
            self._adopt(now, self._strays)
            self._strays = {}
        for transfer, text in self._cancels.items():
            return self._decision("cancel", transfer, (), reason=text)
        for case in list(self._cases.values()):
            if case.stage in ENDED:
                if all(self._needs_no_more(now, case, party) for party in case.parties):
                    del self._cases[case.transfer]
            elif (decision := self._about(now, case)) is not None:
                return decision
        return self._opening(now)

    def is_unheard(self, now: float) -> bool:
        """Whether a member that lives has not applied in time what stands in the log; asked now and then.

        The log may have lost what this term wrote, which shows only when something is appended: so that is due then.
        """
        if self._looked_at is None:
            self._looked_at = now, self._n
        since, n = self._looked_at
        if not self._recorded or now - since < LAG_S:
            return False
        before, self._lagging = self._lagging, frozenset(name for name in self._ranks if self._lags(now, name, n))
        self._looked_at = now, self._n
        if before & self._lagging:  # what was appended since did not help: the log has lost what it missed
            self._outranked_by = max(self._outranked_by, self._term)
        return bool(self._lagging)

    def _lags(self, now: float, member: str, n: int) -> bool:
        known = self._known.get(member)
        if self._attendance.is_silent(now, member):
            return False
        return known is None or (known.report.term, known.report.n) < (self._term, n)

    def term_record(self) -> Decision:
        """Return the record of this term: at first, and again well before the log forgets it (P14)."""
        return self._decision("term", "", (Party(*self._me, 0, 0),))

    def appended(self, decision: Decision) -> None:
        """Note that a decision stands in the log: from here on it is one."""
        self._n, self._previous = decision.n, decision.decision_id
        match decision.kind:
            case "term":
                self._recorded = True
            case "open":
                proposal = self._proposed.popleft()
                case = _Case(decision.transfer, decision.parties, proposal.give_up_at, decision.n)
                self._cases[decision.transfer] = case
            case "cancel":
                del self._cancels[decision.transfer]
            case _:
                case = self._cases[decision.transfer]
                case.stage, case.decided_n = _STAGES[decision.kind], decision.n
                case.lo, case.hi = decision.lo, decision.hi

    # ------------------------------------------------------------------------------------------------- a term begins

    def _gather(self, now: float) -> bool:
        """Wait until every member has reported to this term, or is not heard of; then know what is under way."""
        self._began_at = self._began_at or now
        for name in self._ranks:
            known = self._known.get(name)
            answered = known is not None and known.report.term == self._term
            if not answered and not self._attendance.is_silent(now, name) and now - self._began_at < GATHER_S:
                return False
        self._gathered = True
        self._adopt(now, self._reported())
        return True

    def _adopt(self, now: float, transfers: Iterable[str]) -> None:
        """Take over transfers of earlier terms that are not over everywhere."""
        reported = self._reported()
        for transfer in transfers:
            if transfer in reported and transfer not in self._cases:
                case = self._adopted(now, transfer, reported[transfer])
                if not self._is_over_everywhere(case):
                    self._cases[transfer] = case

    def _reported(self) -> dict[str, tuple[Party, ...]]:
        """Return every transfer that somebody holds or remembers, with the parties that are known of it.

        Only this member's own shares say who all the parties are; the others name themselves.
        """
        found: dict[str, dict[tuple[str, int], Party]] = {}
        for name, known in self._known.items():
            for share in known.shares.values():
                parties = found.setdefault(share.transfer, {})
                for party in share.parties:
                    parties.setdefault((party.member, party.epoch), party)
                parties[name, known.report.epoch] = Party(name, known.report.epoch, share.rank, share.ticket)
        return {transfer: tuple(parties.values()) for transfer, parties in found.items()}

    def _adopted(self, now: float, transfer: str, parties: tuple[Party, ...]) -> _Case:
        """Return a transfer of an earlier term as the members left it; what one has ended, all end that way (P15)."""
        case = _Case(transfer, parties, now + ADOPTED_S, decided_n=0)
        for share in self._shares_in(case):
            if share is not None and share.stage in ENDED and case.bound_to is not ShareStage.VISIBLE:
                case.bound_to, case.lo, case.hi = share.stage, share.lo, share.hi
        return case

    def _is_over_everywhere(self, case: _Case) -> bool:
        """Whether every party that still runs has ended a transfer, and all of them in one way."""
        stages: set[ShareStage] = set()
        for party, share in zip(case.parties, self._shares_in(case), strict=True):
            if share is not None:
                stages.add(share.stage)
            elif not self._attendance.is_replaced(party.member, party.epoch):
                return False
        return len(stages) == 1 and stages <= ENDED

    # ---------------------------------------------------------------------------------------------------- one transfer

    def _about(self, now: float, case: _Case) -> Decision | None:
        """Return what is to be said of a transfer that has not ended, or None while it waits for its members."""
        shares = self._shares_in(case)
        if case.bound_to is ShareStage.VISIBLE:
            return self._word("visible", case, shares)
        if reason := self._obstacle(now, case, shares):
            return self._word("void", case, shares, reason)
        whole = [share for share in shares if share is not None]
        if len(whole) < len(shares):
            return None
        if case.stage is ShareStage.OPEN and all(share.complete for share in whole):
            case.lo, case.hi = common_bounds((share.lo, share.hi) for share in whole)
            return self._word("settle", case, shares)
        if case.stage is ShareStage.SETTLED and all(share.stage is ShareStage.SETTLED for share in whole):
            return self._word("visible", case, shares)
        return None

    def _obstacle(self, now: float, case: _Case, shares: list[Share | None]) -> str:
        """Return why a transfer cannot be settled any more, or "" while it can."""
        if case.bound_to is ShareStage.VOID or case.contradiction:
            return case.contradiction or "it was voided in an earlier term"
        if len(case.parties) < len(self._ranks):
            return "the share of a member is not known"
        for party, share in zip(case.parties, shares, strict=True):
            if self._attendance.is_replaced(party.member, party.epoch):
                return f"{party.member} started again: what its last run held is gone"
            if share is None and self._has_heard(case, party):
                return f"{party.member} holds nothing of it"
            if share is not None and share.bits & _ABANDONED:
                return f"{party.member} gave its share up{f': {share.reason}' if share.reason else ''}"
            if share is not None and (share.bits & RESULT_BITS).bit_count() > 1:
                return f"{party.member} gave two different results"
        return "the members did not agree in time" if now >= case.give_up_at else ""

    def _has_heard(self, case: _Case, party: Party) -> bool:
        """Whether a party has applied this transfer's last decision of the term; what it reports is its answer."""
        known = self._known.get(party.member)
        if known is None or known.report.epoch != party.epoch:
            return False
        return known.report.term == self._term and known.report.n >= case.decided_n

    def _needs_no_more(self, now: float, case: _Case, party: Party) -> bool:
        """Whether a party need not be waited for: it applied the end, is another run now, or is not heard of."""
        attendance = self._attendance
        if attendance.is_replaced(party.member, party.epoch) or attendance.is_silent(now, party.member):
            return True
        return self._has_heard(case, party)

    def _shares_in(self, case: _Case) -> list[Share | None]:
        """Return each party's share as it was reported last, or None."""
        found: list[Share | None] = []
        for party in case.parties:
            known = self._known.get(party.member)
            found.append(known.shares.get(case.transfer) if known and known.report.epoch == party.epoch else None)
        return found

    def _opening(self, now: float) -> Decision | None:
        """Return the word that opens the next transfer, while all members are there to take part."""
        while self._proposed and now >= self._proposed[0].give_up_at:
            self._proposed.popleft()
        if not self._proposed or self.away(now):
            return None
        epochs = {name: self._attendance.epoch_of(name) for name in self._ranks}
        parties = tuple(Party(name, epochs[name], rank, 0) for name, rank in self._ranks.items())
        return self._decision("open", self._proposed[0].transfer, parties)

    def _word(self, kind: str, case: _Case, shares: list[Share | None], reason: str = "") -> Decision:
        parties = tuple(
            Party(party.member, party.epoch, party.rank, share.ticket if share else party.ticket)
            for party, share in zip(case.parties, shares, strict=True)
        )
        lo, hi = (0, 0) if kind == "void" else (case.lo, case.hi)
        return self._decision(kind, case.transfer, parties, lo=lo, hi=hi, reason=reason)

    def _decision(
        self, kind: str, transfer: str, parties: tuple[Party, ...], *, lo: int = 0, hi: int = 0, reason: str = ""
    ) -> Decision:
        return Decision(kind, transfer, self._term, self._n + 1, self._previous, parties, lo, hi, reason)


_STAGES = {"settle": ShareStage.SETTLED, "visible": ShareStage.VISIBLE, "void": ShareStage.VOID}
