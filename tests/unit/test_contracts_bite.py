"""The checkers bite, and the holder contains: what a broken third-party part does stays with its binding or domain."""

from collections.abc import Callable

import pytest

from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Direction, SubmitMode
from kvbus.testing.contracts import ContractViolationError, check_backend, check_lender
from kvbus.testing.ledger_parts import ListedLease, ListedLender, ManualBackend
from tests.unit.helpers import broken_backends, broken_lenders
from tests.unit.helpers.broken_backends import BROKEN, Blocks, Vendor
from tests.unit.helpers.broken_lenders import LENDERS, NONSENSE, NonsenseLender

BROKEN_MODE, SOUND_MODE = SubmitMode("broken", Direction.WRITE), SubmitMode("sound", Direction.WRITE)

EACH_BACKEND = pytest.mark.parametrize(("statement", "make"), BROKEN.values(), ids=BROKEN.keys())


@EACH_BACKEND
def test_a_broken_backend_is_named_with_the_statement_it_breaks(statement: str, make: Callable[[], Vendor]) -> None:
    with pytest.raises(ContractViolationError) as caught:
        check_backend(broken_backends.case_of(make))
    assert statement in {"", caught.value.statement}, str(caught.value)


@pytest.mark.parametrize(("statement", "make"), LENDERS.values(), ids=LENDERS.keys())
def test_a_broken_lender_is_named_with_the_statement_it_breaks(
    statement: str, make: Callable[[], ListedLender]
) -> None:
    with pytest.raises(ContractViolationError) as caught:
        check_lender(broken_lenders.case_of(make))
    assert caught.value.statement == statement, str(caught.value)


def test_a_call_that_does_not_return_is_named() -> None:
    # contract 29
    backend = Blocks()
    with pytest.raises(ContractViolationError, match="changes has not returned"):
        check_backend(broken_backends.case_of(lambda: backend), within_s=0.2)
    backend.let_go.set()


class Town:
    """A holder with one broken and one sound binding, and a lender for each."""

    def __init__(self, backend: Vendor, lender: ListedLender | None = None) -> None:
        self.broken, self.sound = backend, ManualBackend("sound")
        self.shaky = lender or ListedLender("shaky")
        self.firm = ListedLender("firm")
        bindings = [Binding("broken", backend, Direction.WRITE), Binding("sound", self.sound, Direction.WRITE)]
        self.holder = LeaseHolder(bindings=bindings, lenders=[self.shaky, self.firm])

    def round(self, *settled: int) -> None:
        """One round, with the books checked after each call."""
        self.holder.collect()
        self.holder.settle(settled)
        self.holder.check()
        self.holder.advance()
        self.holder.check()
        self.holder.finish()
        self.holder.check()

    def sound_lease(self) -> tuple[int, ListedLease]:
        """Take a lease that goes its way on the sound binding."""
        lease = self.firm.lend(Direction.WRITE, 2)
        return self.holder.take(lease, SOUND_MODE, "go", now=0.0, peer="p"), lease

    def sound_life(self) -> None:
        """A whole life of a lease on the sound side, told by its one return."""
        ticket, lease = self.sound_lease()
        self.round()
        assert ticket in self.sound.orders
        self.sound.deliver(ticket)
        self.round(ticket)
        self.round()
        assert (lease.releases, lease.marks) == (1, [(True, True)])


@EACH_BACKEND
def test_a_broken_backend_harms_nothing_but_its_binding(statement: str, make: Callable[[], Vendor]) -> None:
    # contract 33, 44, R14, R18, R21
    town = Town(make())
    running, its_lease = town.sound_lease()
    first, second, third = (town.shaky.lend(Direction.WRITE, 2) for _ in range(3))
    tickets = [town.holder.take(one, BROKEN_MODE, "go", now=0.0, peer="p") for one in (first, second, third)]
    town.round()
    if tickets[0] in town.broken.orders:
        town.broken.serve(tickets[0])
    town.round()
    town.holder.cancel(tickets[1], "not wanted")
    town.round()
    town.holder.abandon(tickets[2], FailureClass.DEADLINE, "the budget is spent")
    town.round()
    town.holder.isolate("broken", "p", "it does not move")
    town.round()
    town.sound_life()
    town.sound.deliver(running)
    town.round(running)
    assert its_lease.releases == 1
    assert all(lease.releases <= 1 for lease in (first, second, third))
    for _ in range(3):  # never raises, however often; frees nothing twice
        town.holder.shutdown(0.0)
        town.holder.check()
    assert all(lease.releases <= 1 for lease in (first, second, third))
    assert town.sound.holds_released == 1


@pytest.mark.parametrize("make", [broken_backends.NeverAnswers, broken_backends.GivesNoEvidence])
def test_without_evidence_a_lease_is_retained_for_ever(make: Callable[[], Vendor]) -> None:
    # contract 40, 54, R13, R16
    town = Town(make())
    lease = town.shaky.lend(Direction.WRITE, 2)
    ticket = town.holder.take(lease, BROKEN_MODE, "go", now=0.0, peer="p")
    town.round()
    town.broken.serve(ticket)
    for _ in range(20):
        town.round(ticket)
    left = town.holder.shutdown(0.0)
    assert (lease.releases, left.complete, left.held, left.bindings_open) == (0, False, 1, ("broken",))
    assert town.broken.holds_released == 0


def test_what_contradicts_itself_proves_nothing() -> None:
    # contract 44
    town = Town(broken_backends.ContradictsItself())
    lease = town.shaky.lend(Direction.WRITE, 2)
    ticket = town.holder.take(lease, BROKEN_MODE, "go", now=0.0, peer="p")
    town.round()
    town.broken.serve(ticket)
    for _ in range(3):
        town.round(ticket)
    assert lease.releases == 0
    assert town.holder.statistics().bindings[0].contradictions == 1


@pytest.mark.parametrize("nonsense", broken_backends.NONSENSE, ids=repr)
def test_nonsense_of_a_backend_stops_its_binding_and_ends_no_lease(nonsense: object) -> None:
    # contract 44, R21
    town = Town(broken_backends.TalksNonsense(nonsense))
    lease = town.shaky.lend(Direction.WRITE, 2)
    ticket = town.holder.take(lease, BROKEN_MODE, "go", now=0.0, peer="p")
    town.round()
    town.broken.serve(ticket)
    town.round(ticket)
    town.round(ticket)
    assert lease.releases == 0
    broken = town.holder.statistics().bindings[0]
    assert (broken.accepting, broken.contradictions) == (False, 1)
    town.broken.answer(ticket, None, Evidence.COMPLETED)  # what it says in order is still heard
    town.holder.abandon(ticket, FailureClass.DEADLINE, "the budget is spent")
    town.round(ticket)
    town.round(ticket)
    assert lease.releases == 1


@pytest.mark.parametrize("answers", NONSENSE, ids=repr)
def test_nonsense_of_a_lender_stays_in_its_domain(answers: dict[str, object]) -> None:
    # R21
    town = Town(Vendor("broken"), NonsenseLender("shaky", answers))
    running, its_lease = town.sound_lease()
    lease = town.shaky.lend(Direction.WRITE, 2)
    ticket = town.holder.take(lease, BROKEN_MODE, "go", now=0.0, peer="p")
    town.round()
    if ticket in town.broken.orders:
        town.broken.serve(ticket)
    town.round(ticket)
    town.sound_life()
    town.sound.deliver(running)
    town.round(running)
    assert its_lease.releases == 1
    assert lease.releases <= 1
    town.holder.shutdown(0.0)
    town.holder.check()


@pytest.mark.parametrize("method", ["poll", "failure", "bounds", "mark_arrived", "release"])
def test_a_lease_that_raises_stops_its_lenders_domain_only(method: str) -> None:
    # contract 7, R21
    town = Town(Vendor("broken"))
    lease = town.shaky.lend(Direction.WRITE, 2, granted=method != "failure")
    lease.faults.plant(method, broken_lenders.BOOM)
    ticket = town.holder.take(lease, BROKEN_MODE, "go", now=0.0, peer="p")
    town.round()
    if ticket in town.broken.orders:
        town.broken.serve(ticket)
    for _ in range(3):
        town.round(ticket)
    assert town.holder.statistics().lenders_stopped == ("shaky",)
    assert lease.releases <= 1
    town.sound_life()
