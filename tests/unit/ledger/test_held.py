"""The bits of one lease, and the books over all of them."""

import pytest

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.binding import Binding
from kvbus.ledger.books import check_books
from kvbus.ledger.facts import EVIDENCE_BITS, RESULT_BITS, Evidence, Fact, FailureClass, LeaseFacts, fact_names
from kvbus.ledger.held import NOT_YET, Held
from kvbus.ledger.types import Cancelled, Delivered, Direction, Failed, SubmitMode
from kvbus.testing.ledger_parts import ListedLender, ManualBackend


def held(direction: Direction = Direction.WRITE, *, rows: int = 2, submitted: bool = True) -> Held:
    lease = ListedLender().lend(direction, rows)
    binding = Binding("pull", ManualBackend(), direction)
    one = Held(1, lease, SubmitMode("pull", direction), binding, "peer", "t1", NOT_YET, None, 0.0)
    one.view = lease.poll()
    if submitted:
        one.attempt, one.attempt_open = 1, True
    return one


def test_result_and_access_end_come_in_either_order() -> None:
    # contract 1
    result_first, evidence_first = held(), held()
    result_first.fix(Delivered((True, True), 2))
    assert not result_first.bits & Fact.ACCESS_ENDED
    assert result_first.retained
    result_first.end_attempt(Evidence.COMPLETED)
    evidence_first.end_attempt(Evidence.COMPLETED)
    assert not evidence_first.bits & Fact.ACCESS_ENDED, "a further attempt could still start"
    evidence_first.fix(Delivered((True, True), 2))
    assert result_first.bits == evidence_first.bits
    assert result_first.bits & Fact.ACCESS_ENDED
    assert not result_first.retained


@pytest.mark.parametrize(
    ("result", "bit", "arrived"),
    [
        (Delivered((True, False), 1), Fact.DELIVERED, (True, False)),
        (Failed(FailureClass.TRANSPORT, "x"), Fact.FAILED, (False, False)),
        (Cancelled((False, True), 1), Fact.CANCELLED, (False, True)),
    ],
)
def test_each_result_has_its_bit_and_its_rows(
    result: Delivered | Failed | Cancelled, bit: Fact, arrived: tuple[bool, ...]
) -> None:
    # contract 31, P17
    one = held()
    one.fix(result)
    assert one.bits & RESULT_BITS == int(bit)
    assert one.arrived == arrived
    assert one.closed


def test_what_was_never_submitted_ends_as_soon_as_its_result_is_fixed() -> None:
    # contract 41
    one = held(submitted=False)
    one.fix(Failed(FailureClass.CANCELLED, "stop"))
    assert one.bits & EVIDENCE_BITS == int(Fact.EVIDENCE_NEVER_SUBMITTED)
    assert one.bits & Fact.ACCESS_ENDED


@pytest.mark.parametrize("direction", list(Direction))
def test_only_writes_wait_for_a_settle(direction: Direction) -> None:
    # contract 2, contract 3
    one = held(direction)
    one.fix(Delivered((True, True), 2))
    assert not one.returnable
    one.end_attempt(Evidence.COMPLETED)
    assert one.returnable is (direction is Direction.READ)
    one.bits |= int(Fact.SETTLED)
    assert one.returnable


def test_a_suspect_lease_is_never_returnable() -> None:
    # contract 7, contract 44
    one = held()
    one.fix(Delivered((True, True), 2))
    one.end_attempt(Evidence.COMPLETED)
    one.bits |= int(Fact.SETTLED)
    one.suspect = True
    assert not one.returnable


def test_only_a_mask_of_the_right_length_counts_for_a_write() -> None:
    # contract 31, contract 47
    right, short = Delivered((True, True), 2), Delivered((True,), 1)
    assert held().checked(right) is right
    said = held().checked(short)
    assert isinstance(said, Failed)
    assert said.failure is FailureClass.CONTRADICTION
    assert isinstance(held().checked(Cancelled((), 0)), Failed)
    assert held(Direction.READ).checked(short) is short


def test_fact_names_come_in_the_order_in_which_a_lease_gathers_them() -> None:
    assert fact_names(int(Fact.RETURNED | Fact.TAKEN | Fact.DELIVERED)) == ("taken", "delivered", "returned")
    assert fact_names(0) == ()
    assert len(fact_names(-1 & (2**32 - 1))) == len(Fact)


def test_all_fact_bits_fit_their_column() -> None:
    assert max(int(fact) for fact in Fact) < 2**32
    assert RESULT_BITS & EVIDENCE_BITS == 0


def test_a_batch_is_falsy_only_while_nothing_changed() -> None:
    facts = LeaseFacts()
    assert not facts
    assert facts.columns == [(), (), (), (), ()]
    facts = LeaseFacts(lines=[(7, 1, int(Fact.TAKEN), 2, 3), (8, 0, 5, 0, 4)])
    assert facts
    assert facts.columns == [(7, 8), (1, 0), (int(Fact.TAKEN), 5), (2, 0), (3, 4)]


# -------------------------------------------------------------------------------------------------------- the books


def books(one: Held) -> None:
    check_books({1: one}, {("lender", 1): one}, [one.binding])


def sound() -> Held:
    one = held()
    one.binding.open_attempts = one.binding.unreturned = 1
    books(one)
    return one


def test_books_that_agree_pass() -> None:
    sound()


def test_a_lease_that_is_closed_without_a_result_is_found() -> None:
    one = sound()
    one.closed = True
    with pytest.raises(LedgerContradictionError, match="bits of its result differ"):
        books(one)


def test_a_lease_without_its_ticket_is_found() -> None:
    one = sound()
    with pytest.raises(LedgerContradictionError, match="books differ"):
        check_books({1: one}, {}, [one.binding])


def test_a_returned_lease_that_is_still_held_is_found() -> None:
    # contract 1
    one = sound()
    one.bits |= int(Fact.RETURNED)
    with pytest.raises(LedgerContradictionError, match="still held"):
        books(one)


def test_access_end_beside_an_open_attempt_is_found() -> None:
    # contract 1
    one = sound()
    one.bits |= int(Fact.ACCESS_ENDED)
    with pytest.raises(LedgerContradictionError, match="attempt is open"):
        books(one)


def test_uncounted_retention_is_found() -> None:
    # R18
    one = sound()
    one.fix(Failed(FailureClass.TRANSPORT, "x"))
    books(one)
    one.binding.retained.clear()
    with pytest.raises(LedgerContradictionError, match="not counted"):
        books(one)


def test_uncounted_attempts_and_returns_are_found() -> None:
    one = sound()
    one.binding.open_attempts = 2
    with pytest.raises(LedgerContradictionError, match="open attempts differ"):
        books(one)
    one.binding.open_attempts, one.binding.unreturned = 1, 0
    with pytest.raises(LedgerContradictionError, match="counts as returned"):
        books(one)
