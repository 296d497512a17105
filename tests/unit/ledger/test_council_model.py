"""Members, restarts, silences, zombies and new terms at random, held against what must be true of any log of decisions.

Every message may be late, lost or doubled; the log alone is in order, and its fence lets only those append who have
read all of it. The oracle knows every member at once, which no member does.
"""

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbus.ledger.agreement import Decision
from kvbus.ledger.attendance import GONE_S, Attendance
from kvbus.ledger.council import Council, Report
from kvbus.ledger.facts import Evidence, Fact
from kvbus.ledger.shares import ENDED, Heard, Share, ShareBook, ShareStage

WHOLE = int(Fact.TAKEN | Fact.DELIVERED | Fact.ACCESS_ENDED | Evidence.COMPLETED)
GIVEN_UP = int(Fact.FAILED | Fact.ABANDONED | Fact.ACCESS_ENDED | Evidence.NEVER_SUBMITTED)
PROMISED = {ShareStage.SETTLED, ShareStage.VISIBLE}
NAMES = ("m0", "m1", "m2")
PATIENCE_S = 60.0
REST_TURNS = 400
MEMBER = st.integers(0, 5)
"""Whose turn it is, counted round and round over two or three members."""


class Member:
    """One run of one member, with all that it holds and believes."""

    def __init__(self, name: str, epoch: int, now: float, names: tuple[str, ...]) -> None:
        self.name = name
        self.book = ShareBook(name, epoch)
        self.attendance = Attendance(members=names, me=name, began_at=now)
        self.read = 0
        self.said = 0
        self.tickets = 0
        self.council: Council | None = None

    def report(self) -> Report:
        self.said += 1
        shares = tuple(replace(share, parties=()) for share in self.book.rows())
        return Report(self.name, self.book.epoch, self.said, self.book.term, self.book.n, shares)


class CouncilMachine(RuleBasedStateMachine):
    """Checks after each step, and drives everything to rest at the end."""

    @initialize(count=st.sampled_from([2, 3]))
    def begin(self, count: int) -> None:
        self.names = NAMES[:count]
        self.ranks = {name: rank for rank, name in enumerate(self.names)}
        self.now = 0.0
        self.epochs = 0
        self.log: list[Decision] = []
        self.said: list[Report] = []
        self.proposed = 0
        self.ends: dict[str, str] = {}
        self.members = {name: self._started(name) for name in self.names}
        self._calm(10, self.names)

    def _started(self, name: str) -> Member:
        self.epochs += 1
        return Member(name, self.epochs, self.now, self.names)

    def _at(self, place: int) -> Member:
        return self.members[self.names[place % len(self.names)]]

    # ------------------------------------------------------------------------------------------------ what may happen

    @rule(seconds=st.sampled_from([0.1, 1.0, GONE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(turns=st.integers(1, 4))
    def all_are_heard(self, turns: int) -> None:
        self._calm(turns, self.names)

    @rule(away=MEMBER, restart=st.booleans(), turns=st.sampled_from([2, 50]))
    def all_but_one_are_heard(self, away: int, turns: int, *, restart: bool) -> None:
        names = [name for name in self.names if name != self._at(away).name]
        if restart:
            self.members[names[0]] = self._started(names[0])
        self._calm(turns, names)

    @rule(whose=MEMBER, by=MEMBER)
    def a_heartbeat_comes(self, whose: int, by: int) -> None:
        other = self._at(whose)
        self._at(by).attendance.heard(self.now, other.name, other.book.epoch)

    @rule(whose=MEMBER, count=st.integers(1, 5))
    def a_member_reads(self, whose: int, count: int) -> None:
        for _ in range(count):
            self._read_one(self._at(whose))

    @rule(whose=MEMBER, at=st.integers(0, 200))
    def a_member_is_told_again(self, whose: int, at: int) -> None:
        member = self._at(whose)
        if member.read:
            acts = member.book.hear(self.log[at % member.read])
            assert acts.heard in {Heard.REPEATED, Heard.REFUSED}

    @rule(whose=MEMBER, by=MEMBER)
    def a_report_comes(self, whose: int, by: int) -> None:
        report = self._at(whose).report()
        self.said.append(report)
        self._bring(report, self._at(by))

    @precondition(lambda self: bool(self.said))
    @rule(at=st.integers(0, 500), by=MEMBER)
    def an_old_report_comes(self, at: int, by: int) -> None:
        report = self.said[at % len(self.said)]
        known = self._at(by).attendance.epoch_of(report.member)
        if known:  # who has heard of nobody yet cannot tell an old run from the present one
            self._bring(report, self._at(by))

    @rule()
    def a_transfer_is_proposed(self) -> None:
        for member in self.members.values():
            if member.council is not None and member.council.leads:
                self.proposed += 1
                member.council.propose(f"t{self.proposed}", self.now + PATIENCE_S)

    @rule(whose=MEMBER, at=st.integers(0, 9), hi=st.integers(0, 8))
    def pages_arrive(self, whose: int, at: int, hi: int) -> None:
        if share := self._live(whose, at):
            self._complete(self._at(whose), share, WHOLE, hi)

    @rule(whose=MEMBER, at=st.integers(0, 9))
    def a_member_gives_up(self, whose: int, at: int) -> None:
        share, book = self._live(whose, at), self._at(whose).book
        if share and book.may_give_up(share.transfer):
            if share.ticket:
                book.note(share.ticket, GIVEN_UP, 0, 0)
            else:
                book.refuse(share.transfer)

    @rule(whose=MEMBER, at=st.integers(0, 9))
    def a_transfer_is_cancelled(self, whose: int, at: int) -> None:
        council = self._at(whose).council
        if (share := self._live(whose, at)) and council is not None:
            council.cancel(share.transfer, "no longer wanted")

    @rule(whose=MEMBER)
    def a_member_starts_again(self, whose: int) -> None:
        name = self._at(whose).name
        self.members[name] = self._started(name)

    @rule(whose=MEMBER)
    def a_member_tries_to_lead(self, whose: int) -> None:
        self._try_to_lead(self._at(whose))

    def _try_to_lead(self, member: Member) -> None:
        member.attendance.heard(self.now, member.name, member.book.epoch)
        me, coordinator = (member.name, member.book.epoch), member.book.coordinator
        if member.council is None and member.attendance.should_lead(
            self.now, None if coordinator == me else coordinator
        ):
            self._lead(member)

    @rule(whose=MEMBER, count=st.integers(1, 4))
    def a_coordinator_decides(self, whose: int, count: int) -> None:
        for _ in range(count):
            self._decide(self._at(whose))

    # --------------------------------------------------------------------------------------------------- how it happens

    def _live(self, whose: int, at: int) -> Share | None:
        shares = [share for share in self._at(whose).book.rows() if share.stage not in ENDED]
        return shares[at % len(shares)] if shares else None

    def _complete(self, member: Member, share: Share, bits: int, hi: int) -> None:
        if not share.ticket and not share.complete:
            member.tickets += 1
            member.book.leased(share.transfer, member.tickets)
        if share.ticket and not share.complete:
            member.book.note(share.ticket, bits, 0, hi)

    def _bring(self, report: Report, member: Member) -> None:
        if member.council is not None:
            member.council.report(self.now, report)
        else:
            member.attendance.heard(self.now, report.member, report.epoch)

    def _read_one(self, member: Member) -> None:
        if member.read == len(self.log):
            return
        decision = self.log[member.read]
        member.read += 1
        self._apply(member, decision)

    def _apply(self, member: Member, decision: Decision) -> None:
        acts = member.book.hear(decision)
        assert acts.heard in {Heard.APPLIED, Heard.REFUSED}
        if decision.kind == "term" and decision.parties[0].epoch != member.book.epoch:
            member.council = None
        if acts.over is None:
            return
        share = acts.over
        if acts.show:
            self._check_show(member, share)
        if share.stage is ShareStage.VISIBLE and not acts.show and share.ticket:
            assert share.bits & Fact.ABANDONED, f"{share} was promised, and is not shown"
        assert self.ends.setdefault(share.transfer, share.stage.value) == share.stage.value, f"{share} ended two ways"

    def _check_show(self, member: Member, share: Share) -> None:
        """Nobody shows before all parties that still run have promised (P10)."""
        assert len(share.parties) == len(self.names)
        for party in share.parties:
            other = self.members[party.member]
            if other is not member and other.book.epoch == party.epoch:
                theirs = other.book.of(share.transfer)
                assert theirs is not None, f"{member.name} shows {share.transfer}, {other.name} holds nothing of it"
                assert theirs.stage in PROMISED, f"{member.name} shows {share.transfer}, {other.name} has not promised"

    def _lead(self, member: Member) -> None:
        book = member.book
        me = (member.name, book.epoch)
        member.council = Council(
            member.attendance, me=me, ranks=self.ranks, term=book.term + 1, n=book.n, previous=book.head_id
        )
        self._append(member, member.council.term_record())

    def _append(self, member: Member, decision: Decision) -> None:
        """The fence: only who has read all that stands there may append; who may not leads no more."""
        if member.read != len(self.log) or member.council is None:
            member.council = None
            return
        last = self.log[-1] if self.log else None
        assert decision.previous == (last.decision_id if last else "")
        assert decision.n == (last.n + 1 if last else 1)
        assert last is None or decision.term >= last.term
        self.log.append(decision)
        member.read += 1
        member.council.appended(decision)
        self._apply(member, decision)

    def _decide(self, member: Member) -> None:
        council = member.council
        if council is None:
            return
        if council.outranked_by:
            self._lead(member)
            return
        own = member.report()
        council.report(self.now, replace(own, shares=tuple(map(replace, member.book.rows()))))
        due = council.next(self.now)
        assert council.next(self.now) == due, "another answer before the first stood in the log"
        if due is not None:
            self._append(member, due)

    # ----------------------------------------------------------------------------------------------- what must be true

    @invariant()
    def the_log_says_one_end_of_each_transfer(self) -> None:
        ends: dict[str, Decision] = {}
        for decision in self.log:
            if decision.kind in {"visible", "void"}:
                first = ends.setdefault(decision.transfer, decision)
                same = (decision.kind, decision.lo, decision.hi) == (first.kind, first.lo, first.hi)
                assert same, f"{decision} after {first}"

    @invariant()
    def at_most_one_coordinator_can_append(self) -> None:
        able = [one.name for one in self.members.values() if one.council and one.read == len(self.log)]
        assert len(able) <= 1

    def teardown(self) -> None:
        """Let everybody be heard again: every transfer ends at every member."""
        for _ in range(REST_TURNS):
            for member in self.members.values():
                for share in member.book.rows():
                    if share.stage not in ENDED:
                        self._complete(member, share, WHOLE, 4)
            self._calm(1, self.names)
            if self._is_at_rest():
                return
        left = {name: member.book.rows() for name, member in self.members.items()}
        councils = {name: member.council.open_transfers for name, member in self.members.items() if member.council}
        raise AssertionError(f"not at rest: {left} {councils}")

    def _calm(self, turns: int, names: Iterable[str]) -> None:
        """Let these hear each other, each have its turn, and time pass."""
        for _ in range(turns):
            self.now += 0.25
            for name in names:
                self._turn(self.members[name], [self.members[other] for other in names])

    def _turn(self, member: Member, around: Iterable[Member]) -> None:
        while member.read < len(self.log):
            self._read_one(member)
        for other in around:
            member.attendance.heard(self.now, other.name, other.book.epoch)
            if other is not member and other.council is not None:
                other.council.report(self.now, member.report())
        if member.council is None:
            self._try_to_lead(member)
        while member.council is not None and member.read == len(self.log):
            length = len(self.log)
            self._decide(member)
            if len(self.log) == length:
                break

    def _is_at_rest(self) -> bool:
        books = all(not member.book.live for member in self.members.values())
        return books and not sum(one.council.open_transfers for one in self.members.values() if one.council)


TestCouncilMachine = CouncilMachine.TestCase
TestCouncilMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
