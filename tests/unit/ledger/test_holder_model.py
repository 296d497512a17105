"""The holder against a simple model: whatever happens in whatever order, each lease goes back once, on evidence.

Rules are single steps, so that every interleaving of takes, answers, decisions and faults of foreign code comes up.
The model knows what was said to whom, and nothing of the holder's insides.
"""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbus.ledger.facts import RESULT_BITS, Evidence, Fact, FailureClass
from kvbus.ledger.types import (
    Cancelled,
    Change,
    Containment,
    Delivered,
    Direction,
    Failed,
    Result,
    SubmissionRejectedError,
    SubmitMode,
)
from kvbus.testing.ledger_parts import ListedLease, ManualBackend
from tests.unit.ledger.bench import HELD_BACK, PULL, SERVE, Bench

UNCERTAIN = RuntimeError("surprise")
REJECTED = SubmissionRejectedError(FailureClass.GRANT_REFUSED, "another reader's grant")
BACKEND_FAULTS = {
    "uncertain": ("submit", UNCERTAIN),
    "rejected": ("submit", REJECTED),
    "changes": ("changes", UNCERTAIN),
    "cancel": ("cancel", UNCERTAIN),
    "isolate": ("isolate", UNCERTAIN),
    "shutdown": ("shutdown", UNCERTAIN),
}
LEASE_FAULTS = ("poll", "failure", "bounds", "mark_arrived", "release")


@dataclass
class Known:
    """What the model knows of one ticket."""

    lease: ListedLease
    backend: ManualBackend
    held_back: bool
    given_up: bool = False
    said: Result | None = None
    contradicted: bool = False
    evidence: bool = False
    settled: bool = False
    was_returned: bool = False


class HolderModel(RuleBasedStateMachine):
    """One holder, two lenders, two backends."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Known] = {}
        self.told: dict[str, list[Change]] = {"pull": [], "serve": []}
        self.faulty = False
        self.bench = Bench(containment=Containment.ISOLATE_PEER, retained_max=6)

    @initialize(faulty=st.booleans())
    def choose(self, *, faulty: bool) -> None:
        """Half of the runs have faults; in the others more work gets through, since nothing stops."""
        self.faulty = faulty
        for mode in (PULL, PULL, SERVE):
            self.take_and_submit(mode=mode, rows=2)

    # ------------------------------------------------------------------------------------------------- our own acts

    @rule(
        mode=st.sampled_from([PULL, SERVE]),
        rows=st.integers(0, 3),
        peer=st.sampled_from(["p", "q", ""]),
        granted_then_held_back=st.tuples(st.booleans(), st.booleans()),
        which=st.integers(0, 1),
    )
    def take(
        self, *, mode: SubmitMode, rows: int, peer: str, granted_then_held_back: tuple[bool, bool], which: int
    ) -> None:
        granted, held_back = granted_then_held_back
        lender = (self.bench.lender, self.bench.other_lender)[which]
        lease = lender.lend(mode.direction, rows, granted=granted)
        hint = HELD_BACK if held_back else "order"
        ticket = self.bench.holder.take(lease, mode, hint, now=0.0, peer=peer)
        assert ticket not in self.known
        self.known[ticket] = Known(lease, self.bench.pull if mode is PULL else self.bench.serve, held_back)

    @rule(mode=st.sampled_from([PULL, SERVE]), rows=st.integers(0, 3))
    def take_and_submit(self, *, mode: SubmitMode, rows: int) -> None:
        """The common way in, in one step: without it few runs would get as far as a backend."""
        self.take(mode=mode, rows=rows, peer="p", granted_then_held_back=(True, False), which=0)
        self.advance()

    @precondition(lambda self: self.waiting_for_orders())
    @rule(data=st.data())
    def assign(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.waiting_for_orders()))
        self.bench.holder.assign(ticket, "order")
        self.known[ticket].held_back = False

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.held()))
        if not self.submitted(ticket):
            self.known[ticket].given_up = True
        self.bench.holder.cancel(ticket, "stop")

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.held()))
        self.known[ticket].given_up = True
        self.bench.holder.abandon(ticket, FailureClass.DEADLINE, "the budget is spent")

    @precondition(lambda self: self.faulty)
    @rule(binding=st.sampled_from(["pull", "serve"]), peer=st.sampled_from(["p", "q"]), back=st.booleans())
    def isolate(self, *, binding: str, peer: str, back: bool) -> None:
        if back:
            self.bench.holder.readmit(binding, peer)
        else:
            self.bench.holder.isolate(binding, peer, "it does not move")

    # --------------------------------------------------------------------------------------------- what others do

    @precondition(lambda self: self.known)
    @rule(data=st.data(), refuse=st.booleans())
    def decide_lease(self, *, data: st.DataObject, refuse: bool) -> None:
        lease = self.known[data.draw(st.sampled_from(sorted(self.known)))].lease
        if refuse and not lease.granted:
            lease.refuse()
        else:
            lease.grant()

    @precondition(lambda self: self.open())
    @rule(
        data=st.data(),
        result=st.sampled_from(["none", "all", "all", "some", "stop", "fail", "short"]),
        evidence=st.sampled_from([None, *Evidence]),
    )
    def answer(self, data: st.DataObject, result: str, evidence: Evidence | None) -> None:
        ticket = data.draw(st.sampled_from(self.open()))
        rows = self.known[ticket].lease.rows
        results: dict[str, Result | None] = {
            "none": None,
            "all": Delivered((True,) * rows, rows),
            "some": Delivered((False,) * rows, 0),
            "stop": Cancelled((True,) * rows, rows),
            "fail": Failed(FailureClass.TRANSPORT, "the transport failed"),
            "short": Delivered((True,) * (rows + 1), 0),
        }
        self.tell(self.known[ticket].backend, Change(ticket, 1, results[result], evidence))

    @precondition(lambda self: self.open())
    @rule(data=st.data(), give_up=st.booleans())
    def deliver_and_go_round(self, *, data: st.DataObject, give_up: bool) -> None:
        """A common story in one step: everything arrives, and sometimes it is given up before it is agreed."""
        ticket = data.draw(st.sampled_from(self.open()))
        rows = self.known[ticket].lease.rows
        result = Delivered((True,) * rows, rows)
        self.tell(self.known[ticket].backend, Change(ticket, 1, result, Evidence.COMPLETED))
        self.collect()
        if give_up and ticket in self.held():
            self.known[ticket].given_up = True
            self.bench.holder.abandon(ticket, FailureClass.DEADLINE, "the members did not agree")
        self.whole_round()

    @precondition(lambda self: self.faulty)
    @rule(ticket=st.integers(0, 12), attempt=st.sampled_from([0, 2]), binding=st.sampled_from(["pull", "serve"]))
    def answer_for_nobody(self, ticket: int, attempt: int, binding: str) -> None:
        backend = self.bench.pull if binding == "pull" else self.bench.serve
        backend.tell(Change(ticket, attempt, Delivered((True,), 1), Evidence.COMPLETED))

    @precondition(lambda self: self.faulty)
    @rule(binding=st.sampled_from(["pull", "serve"]), which=st.sampled_from(sorted(BACKEND_FAULTS)))
    def plant_in_backend(self, binding: str, which: str) -> None:
        backend = self.bench.pull if binding == "pull" else self.bench.serve
        backend.faults.plant(*BACKEND_FAULTS[which])

    @rule()
    def mend(self) -> None:
        for part in (self.bench.pull, self.bench.serve, self.bench.lender, self.bench.other_lender):
            part.faults.by_method.clear()

    @precondition(lambda self: self.faulty and self.known)
    @rule(data=st.data(), method=st.sampled_from(LEASE_FAULTS))
    def plant_in_lease(self, data: st.DataObject, method: str) -> None:
        self.known[data.draw(st.sampled_from(sorted(self.known)))].lease.faults.plant(method, UNCERTAIN)

    @precondition(lambda self: self.faulty)
    @rule()
    def plant_in_lender(self) -> None:
        self.bench.other_lender.faults.plant("progress", UNCERTAIN)

    # ------------------------------------------------------------------------------------------------ the round

    @rule()
    def collect(self) -> None:
        for name, backend in (("pull", self.bench.pull), ("serve", self.bench.serve)):
            if "changes" not in backend.faults.by_method and not backend.holds_released:
                changes, self.told[name] = self.told[name], []
                for change in changes:
                    self.hear(change)
        self.bench.note(self.bench.holder.collect())

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        tickets = data.draw(st.lists(st.sampled_from(sorted(self.known)), max_size=4))
        assert self.bench.holder.settle(tickets) == ()
        for ticket in tickets:
            self.known[ticket].settled |= ticket in self.bench.holder.tickets()

    @rule()
    def advance(self) -> None:
        self.bench.holder.advance()

    @rule()
    def finish(self) -> None:
        self.bench.holder.finish()
        stopped = set(self.bench.holder.statistics().lenders_stopped)
        for ticket, known in self.known.items():
            if known.was_returned:
                continue
            if known.lease.releases:
                assert self.may_return(ticket), f"T{ticket} went back without what it needs"
                known.was_returned = True
            elif known.lease.lender.name not in stopped:
                assert not self.may_return(ticket), f"T{ticket} could go back and was kept"

    @rule()
    def whole_round(self) -> None:
        self.collect()
        self.advance()
        self.bench.holder.settle(self.known)
        for ticket in self.held():
            self.known[ticket].settled = True
        self.finish()

    # ------------------------------------------------------------------------------------------ what always holds

    @invariant()
    def books_agree(self) -> None:
        self.bench.holder.check()

    @invariant()
    def exactly_the_unreturned_are_held(self) -> None:
        held = {
            ticket
            for ticket, known in self.known.items()
            if not known.lease.releases and "mark_arrived" not in known.lease.faults.raised
        }
        assert self.bench.holder.tickets() == held

    @invariant()
    def each_is_released_and_marked_at_most_once(self) -> None:
        for known in self.known.values():
            assert known.lease.releases <= 1
            assert len(known.lease.marks) <= 1

    @invariant()
    def nothing_is_released_under_an_open_attempt(self) -> None:
        # contract 1
        for ticket, known in self.known.items():
            if known.lease.releases:
                assert (ticket, 1) not in known.backend.open

    @invariant()
    def one_result_and_access_end_only_on_evidence(self) -> None:
        # contract 29, 41; P17
        for ticket, bits in self.bench.bits.items():
            assert (bits & RESULT_BITS).bit_count() <= 1
            known = self.known[ticket]
            if bits & Fact.ACCESS_ENDED and ticket in known.backend.orders:
                assert known.evidence

    @invariant()
    def content_came_only_from_deliveries(self) -> None:
        # contract 4, contract 46
        for known in self.known.values():
            for mask in known.lease.marks:
                if any(mask):
                    assert isinstance(known.said, Delivered | Cancelled)
                    assert known.said.arrived == mask
                    assert not known.given_up, "what was given up became content"

    @invariant()
    def a_hold_is_released_once_and_under_nothing(self) -> None:
        # contract 55
        for backend in (self.bench.pull, self.bench.serve):
            assert backend.holds_released <= 1
            assert not (backend.holds_released and backend.open)

    def teardown(self) -> None:
        """Mend everything and give all evidence: what no fault retains comes back."""
        self.mend()
        for known in self.known.values():
            known.lease.faults.by_method.clear()
        for ticket in self.open():
            self.tell(self.known[ticket].backend, Change(ticket, 1, None, Evidence.ENDPOINT_DESTROYED))
        for _ in range(3):
            self.collect()
            self.bench.holder.shutdown(0.0)
        for ticket in self.held():
            known = self.known[ticket]
            assert known.contradicted or known.lease.lender.name in self.bench.holder.statistics().lenders_stopped

    # ------------------------------------------------------------------------------------------------- the model

    def held(self) -> list[int]:
        return sorted(self.bench.holder.tickets())

    def waiting_for_orders(self) -> list[int]:
        return [ticket for ticket in self.held() if self.known[ticket].held_back]

    def submitted(self, ticket: int) -> bool:
        return ticket in self.known[ticket].backend.orders

    def open(self) -> list[int]:
        return [ticket for ticket, known in self.known.items() if (ticket, 1) in known.backend.open]

    def tell(self, backend: ManualBackend, change: Change) -> None:
        backend.tell(change)
        self.told[backend.name].append(change)

    def hear(self, change: Change) -> None:
        known = self.known[change.ticket]
        result = change.result
        if isinstance(result, Delivered | Cancelled) and known.lease.direction is Direction.WRITE:
            rows = known.lease.rows
            if len(result.arrived) != rows:
                result = Failed(
                    FailureClass.CONTRADICTION, f"the mask has {len(result.arrived)} rows, the lease {rows}"
                )
        if result is not None and known.said is not None and known.said != result:
            known.contradicted = True
            return
        known.said = known.said or result
        known.evidence |= change.evidence is not None and not known.contradicted

    def may_return(self, ticket: int) -> bool:
        known = self.known[ticket]
        fixed = known.given_up or known.said is not None or bool(self.bench.holder.bits(ticket) & Fact.FAILED)
        if ticket not in self.bench.holder.tickets():
            fixed = True  # gone; whether access had ended is what matters now
        ended = known.evidence or not self.submitted(ticket)
        agreed = known.settled or known.lease.direction is Direction.READ
        return fixed and ended and agreed and not known.contradicted


HolderModel.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestHolderModel = HolderModel.TestCase
