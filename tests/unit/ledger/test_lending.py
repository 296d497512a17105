"""The lender's book: a repeated question never lends twice, and a closed key never lends again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.ledger import lending
from kvbus.ledger.lending import UNCLAIMED_S, Key, LendBook, LendState

NONCE = b"n" * 16


def key(attempt: int = 1, *, transfer: str = "t1", epoch: int = 7, member: str = "m0", rank: int = 0) -> Key:
    return ("b", member, epoch, transfer, attempt, rank)


def test_a_repeated_question_finds_exactly_what_was_lent() -> None:
    # P18
    book = LendBook(entries_max=4)
    entry = book.open(key(), NONCE, now=1.0)
    assert entry.state is LendState.COMPUTING
    book.grant(key(), ticket=5, grant=b"grant", signature=b"sig")
    found = book.find(key())
    assert found is entry
    assert (found.state, found.ticket, found.grant, found.signature, found.asked_at) == (
        LendState.GRANTED, 5, b"grant", b"sig", 1.0,
    )  # fmt: skip


def test_a_key_is_opened_once() -> None:
    # P18
    book = LendBook(entries_max=4)
    book.open(key(), NONCE, now=0.0)
    with pytest.raises(ValueError, match="opened before"):
        book.open(key(), NONCE, now=0.0)
    book.close(key(), NONCE)
    with pytest.raises(ValueError, match="opened before"):
        book.open(key(), NONCE, now=0.0)


def test_each_part_of_a_key_makes_another_reader() -> None:
    # P4, contract 48
    book = LendBook(entries_max=10)
    others = [key(), key(2), key(transfer="t2"), key(epoch=8), key(member="m1"), key(rank=1)]
    for one in others:
        book.open(one, NONCE, now=0.0)
    assert len(book) == len(others)
    book.close(key(), NONCE)
    assert [book.find(one) is None for one in others] == [True] + [False] * 5


def test_a_close_is_repeated_without_effect_and_leaves_a_tombstone() -> None:
    # P18
    book = LendBook(entries_max=4)
    entry = book.open(key(), NONCE, now=0.0)
    assert book.close(key(), NONCE) is entry
    assert entry.state is LendState.CLOSED
    assert book.close(key(), NONCE) is None
    assert (book.is_closed(key(), NONCE), book.find(key()), len(book)) == (True, None, 0)


def test_a_close_that_overtakes_its_question_refuses_the_question() -> None:
    # P18, contract 49
    book = LendBook(entries_max=4)
    assert book.close(key(), NONCE) is None
    assert book.is_closed(key(), NONCE)
    with pytest.raises(ValueError, match="opened before"):
        book.open(key(), NONCE, now=0.0)


def test_a_refused_key_may_ask_again() -> None:
    book = LendBook(entries_max=4)
    book.open(key(), NONCE, now=0.0)
    book.forget(key())
    book.forget(key())
    assert not book.is_closed(key(), NONCE)
    book.open(key(), NONCE, now=1.0)


def test_a_full_book_takes_no_new_reader() -> None:
    # contract 50
    book = LendBook(entries_max=2)
    book.open(key(1), NONCE, now=0.0)
    assert not book.is_full()
    book.open(key(2), NONCE, now=0.0)
    assert book.is_full()
    with pytest.raises(ValueError, match="full"):
        book.open(key(3), NONCE, now=0.0)
    book.close(key(1), NONCE)
    book.open(key(3), NONCE, now=0.0)


def test_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    # contract 50
    book = LendBook(entries_max=2)
    for attempt in range(lending.TOMBSTONES_MAX + 3):
        book.close(key(attempt), NONCE)
    assert not book.is_closed(key(2), NONCE)
    assert book.is_closed(key(3), NONCE)
    assert book.is_closed(key(lending.TOMBSTONES_MAX + 2), NONCE)


def test_the_keys_of_one_reader_process_are_those_of_its_epoch() -> None:
    # P4
    book = LendBook(entries_max=10)
    for one in (key(), key(2), key(epoch=8), key(member="m1")):
        book.open(one, NONCE, now=0.0)
    book.close(key(2), NONCE)
    assert book.keys_of("b", "m0", 7) == [key()]
    assert book.keys_of("x", "m0", 7) == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["ask", "close", "forget"]), st.integers(0, 4)), max_size=60))
def test_a_closed_key_never_lends_again(steps: list[tuple[str, int]]) -> None:
    # P18
    book = LendBook(entries_max=3)
    closed: set[int] = set()
    for what, attempt in steps:
        one = key(attempt)
        if what == "ask" and not book.is_closed(one, NONCE) and book.find(one) is None and not book.is_full():
            book.open(one, NONCE, now=0.0)
        elif what == "close":
            book.close(one, NONCE)
            closed.add(attempt)
        elif what == "forget":
            book.forget(one)
        assert len(book) <= 3
        assert {a for a in range(5) if book.is_closed(key(a), NONCE)} == closed
        assert all(book.find(key(a)) is None for a in closed)


def test_a_word_that_overtakes_its_question_keeps_the_question_from_lending() -> None:
    # P18, contract 49
    book = LendBook(entries_max=4)
    assert book.close(key(), NONCE) is None
    assert book.is_closed(key(), NONCE)
    with pytest.raises(ValueError, match="opened before"):
        book.open(key(), NONCE, now=0.0)


def test_somebody_elses_word_closes_nothing_of_the_readers() -> None:
    book = LendBook(entries_max=4)
    book.close(key(), b"m" * 16)
    assert not book.is_closed(key(), NONCE)
    assert book.open(key(), NONCE, now=0.0).nonce == NONCE


def test_refusals_that_nobody_comes_back_for_are_forgotten_and_nothing_else_is() -> None:
    book = LendBook(entries_max=4)
    book.open(key(1), NONCE, now=0.0).refusal = ("source_misses", "not here")
    book.open(key(2), NONCE, now=0.0)
    book.open(key(3), NONCE, now=0.0)
    book.grant(key(3), ticket=5, grant=b"grant", signature=b"sig")
    book.sweep(UNCLAIMED_S)
    assert len(book) == 3
    book.sweep(UNCLAIMED_S + 0.1)
    assert (book.find(key(1)), len(book)) == (None, 2)
