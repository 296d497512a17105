"""Who is there: runs are told apart by epoch, silence is counted from the last word, one member tries to lead first."""

import pytest

from kvbus.ledger.attendance import EPOCHS_MAX, GONE_S, TURN_S, Attendance

NAMES = ("m0", "m1", "m2")


def attendance(me: str = "m1", *, began_at: float = 0.0, here: tuple[str, ...] = NAMES) -> Attendance:
    """Return what `me` knows when it has heard each of these once, each in the epoch 10 plus its place."""
    book = Attendance(members=NAMES, me=me, began_at=began_at)
    for name in here:
        assert book.heard(began_at, name, 10 + NAMES.index(name))
    return book


# P16, contract 48
def test_a_run_that_was_replaced_is_not_heard_any_more_whatever_its_number() -> None:
    book = attendance()
    assert book.heard(1.0, "m0", 3)  # a lower number: epochs are compared for equality
    assert book.epoch_of("m0") == 3
    assert book.is_replaced("m0", 10)
    assert not book.is_replaced("m0", 3)
    assert not book.heard(2.0, "m0", 10)
    assert book.epoch_of("m0") == 3


# P16
def test_a_late_word_of_a_dead_run_shuts_nobody_out_for_good() -> None:
    book = attendance(here=("m1", "m2"))
    assert book.heard(1.0, "m0", 22)
    assert book.heard(1.1, "m0", 21)  # its last run: who never heard of either before cannot tell
    assert not book.heard(2.0, "m0", 22)
    assert not book.heard(1.1 + GONE_S, "m0", 22)
    assert book.heard(1.2 + GONE_S, "m0", 22)
    assert book.epoch_of("m0") == 22
    assert book.is_replaced("m0", 21)
    assert not book.heard(1.3 + GONE_S, "m0", 21)


# contract 44
def test_a_stranger_is_no_member_and_nobody_waits_for_it() -> None:
    book = attendance()
    assert not book.heard(1.0, "m9", 5)
    assert book.epoch_of("m9") == 0
    assert book.is_silent(1.0, "m9")
    assert book.is_replaced("m9", 5)
    assert book.absent(1.0) == ()


def test_a_member_that_was_never_heard_of_is_absent_but_not_yet_silent() -> None:
    book = attendance(here=("m1",))
    assert book.absent(1.0) == ("m0", "m2")
    assert not book.is_silent(GONE_S, "m0")
    assert book.is_silent(GONE_S + 0.1, "m0")
    assert not book.is_replaced("m0", 10)


def test_silence_is_counted_from_the_last_word() -> None:
    book = attendance(began_at=100.0)
    assert not book.is_silent(100.0 + GONE_S, "m0")
    assert book.heard(105.0, "m0", 10)
    assert not book.is_silent(105.0 + GONE_S, "m0")
    assert book.is_silent(105.1 + GONE_S, "m0")
    assert book.absent(105.1 + GONE_S) == NAMES


# contract 50
def test_replaced_runs_are_remembered_up_to_a_bound() -> None:
    book = attendance()
    for epoch in range(100, 100 + EPOCHS_MAX + 1):
        assert book.heard(1.0, "m0", epoch)
    assert not book.heard(1.0, "m0", 100)
    assert book.heard(1.0, "m0", 10)  # so long ago that it is not known any more


# P13
@pytest.mark.parametrize(("me", "turn"), [("m0", 1), ("m1", 2), ("m2", 3)])
def test_where_nobody_leads_the_first_that_is_there_tries_before_the_others(me: str, turn: int) -> None:
    book = attendance(me)
    assert not book.should_lead(TURN_S * turn - 0.1, None)
    assert book.should_lead(TURN_S * turn, None)


def test_a_member_does_not_wait_for_those_before_it_that_are_not_there() -> None:
    book = attendance("m2", here=("m1", "m2"))
    assert not book.should_lead(TURN_S, None)
    assert book.should_lead(TURN_S * 2, None)


# P13
def test_nobody_tries_to_lead_while_the_coordinator_is_heard_of() -> None:
    book = attendance()
    assert not book.should_lead(GONE_S, ("m0", 10))
    assert not book.should_lead(GONE_S + TURN_S - 0.1, ("m0", 10))
    assert book.should_lead(GONE_S + TURN_S, ("m0", 10))


def test_a_coordinator_that_started_again_or_is_no_member_leads_no_more() -> None:
    book = attendance("m0")
    assert book.should_lead(TURN_S, ("m1", 9))
    assert book.should_lead(TURN_S, ("m9", 1))
    assert not book.should_lead(TURN_S, ("m1", 11))
