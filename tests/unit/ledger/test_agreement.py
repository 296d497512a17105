"""One decision for one transfer: what all parties have, or nothing."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.ledger.agreement import Agreement, Decision, Party
from kvbus.ledger.facts import Fact

ENDED = int(Fact.TAKEN | Fact.SUBMITTED | Fact.DELIVERED | Fact.ACCESS_ENDED)
RESULT_ONLY = int(Fact.TAKEN | Fact.SUBMITTED | Fact.DELIVERED)
PARTIES = (Party("m0", 7, 0, 11), Party("m0", 7, 1, 12), Party("m1", 9, 2, 11))


def opened() -> Agreement:
    agreement = Agreement(term=3)
    agreement.open("t1", PARTIES)
    return agreement


def test_one_party_that_reported_all_is_settled_at_once() -> None:
    agreement = Agreement(term=1)
    only = Party("m0", 7, 0, 5)
    agreement.open("t1", (only,))
    assert agreement.report(only.key, ENDED, lo=2, hi=6) == Decision("settle", "t1", 1, 2, "1.1", (only,), 2, 6)
    assert not agreement.is_open("t1")


def test_no_decision_before_the_last_party_has_both_result_and_access_end() -> None:
    # contract 3, R6, R7
    agreement = opened()
    for party in PARTIES[:2]:
        assert agreement.report(party.key, ENDED, lo=0, hi=4) is None
    assert agreement.report(PARTIES[2].key, RESULT_ONLY, lo=0, hi=4) is None
    assert agreement.awaits(PARTIES[2].key)
    decision = agreement.report(PARTIES[2].key, ENDED, lo=0, hi=4)
    assert decision is not None
    assert (decision.kind, decision.parties) == ("settle", PARTIES)
    assert not agreement.awaits(PARTIES[2].key)


def test_access_end_without_a_result_is_not_enough() -> None:
    agreement = Agreement(term=1)
    agreement.open("t1", PARTIES[:1])
    assert agreement.report(PARTIES[0].key, int(Fact.TAKEN | Fact.ACCESS_ENDED), lo=0, hi=0) is None


def test_bounds_are_the_largest_floor_and_the_smallest_end() -> None:
    # contract 26
    agreement = opened()
    agreement.report(PARTIES[0].key, ENDED, lo=1, hi=9)
    agreement.report(PARTIES[1].key, ENDED, lo=3, hi=8)
    decision = agreement.report(PARTIES[2].key, ENDED, lo=2, hi=10)
    assert decision is not None
    assert (decision.lo, decision.hi) == (3, 8)


def test_bounds_that_have_nothing_in_common_are_empty() -> None:
    # contract 26
    agreement = opened()
    agreement.report(PARTIES[0].key, ENDED, lo=5, hi=9)
    agreement.report(PARTIES[1].key, ENDED, lo=0, hi=4)
    decision = agreement.report(PARTIES[2].key, ENDED, lo=0, hi=9)
    assert decision is not None
    assert (decision.kind, decision.lo, decision.hi) == ("settle", 0, 0)


def test_two_different_bounds_of_one_party_void_the_transfer() -> None:
    # P17
    agreement = opened()
    agreement.report(PARTIES[0].key, RESULT_ONLY, lo=0, hi=4)
    decision = agreement.report(PARTIES[0].key, ENDED, lo=0, hi=5)
    assert decision is not None
    assert decision.kind == "void"
    assert "two different bounds" in decision.reason
    assert not agreement.is_open("t1")


def test_two_different_results_of_one_party_void_the_transfer() -> None:
    # P17, contract 44
    agreement = opened()
    agreement.report(PARTIES[0].key, int(Fact.DELIVERED), lo=0, hi=4)
    decision = agreement.report(PARTIES[0].key, int(Fact.FAILED), lo=0, hi=4)
    assert decision is not None
    assert decision.kind == "void"
    assert "two different results" in decision.reason


@pytest.mark.parametrize("key", [("m0", 7, 99), ("m0", 8, 11), ("m9", 7, 11)])
def test_words_of_unknown_tickets_epochs_and_members_change_nothing(key: tuple[str, int, int]) -> None:
    # contract 48, P16
    agreement = opened()
    assert agreement.report(key, ENDED, lo=0, hi=4) is None
    assert not agreement.awaits(key)
    for party in PARTIES[:2]:
        agreement.report(party.key, ENDED, lo=0, hi=4)
    assert agreement.is_open("t1")


def test_words_after_the_decision_change_nothing() -> None:
    # contract 5, contract 48
    agreement = opened()
    for party in PARTIES:
        agreement.report(party.key, ENDED, lo=0, hi=4)
    head = agreement.head
    assert all(agreement.report(party.key, ENDED, lo=0, hi=9) is None for party in PARTIES)
    assert agreement.head == head


def test_a_transfer_needs_parties_and_is_opened_once() -> None:
    # P12
    agreement = opened()
    for parties in ((), PARTIES):
        with pytest.raises(ValueError, match="open already, or has no parties"):
            agreement.open("t1" if parties else "t2", parties)


def test_a_ticket_belongs_to_one_open_transfer() -> None:
    # contract 11, P12
    agreement = opened()
    with pytest.raises(ValueError, match="two parties"):
        agreement.open("t2", (Party("m0", 7, 5, 11),))
    with pytest.raises(ValueError, match="two parties"):
        agreement.open("t3", (Party("m5", 7, 0, 1), Party("m5", 7, 1, 1)))
    assert not agreement.is_open("t2")


def test_decisions_form_one_chain() -> None:
    # P15
    agreement = Agreement(term=4)
    decisions = [agreement.open("t1", PARTIES[:1]), agreement.open("t2", PARTIES[1:])]
    decisions.append(agreement.void("t2", "a member came back under a new epoch"))
    settled = agreement.report(PARTIES[0].key, ENDED, lo=0, hi=1)
    assert settled is not None
    decisions.append(settled)
    assert [one.n for one in decisions] == [1, 2, 3, 4]
    assert [one.previous for one in decisions] == ["", "4.1", "4.2", "4.3"]
    assert [one.kind for one in decisions] == ["open", "open", "void", "settle"]
    assert agreement.head == 4


line = st.tuples(st.integers(0, 2), st.sampled_from([int(Fact.TAKEN), RESULT_ONLY, ENDED]))


@settings(deadline=None)
@given(st.lists(line, max_size=20), st.permutations(range(3)))
def test_repeats_and_any_order_give_the_same_single_decision(noise: list[tuple[int, int]], order: list[int]) -> None:
    # P17
    bounds = [(1, 9), (3, 8), (2, 10)]
    agreement = opened()
    words = [*noise, *((which, ENDED) for which in order), *noise]
    said = [
        agreement.report(PARTIES[which].key, bits, lo=bounds[which][0], hi=bounds[which][1]) for which, bits in words
    ]
    decisions = [one for one in said if one is not None]
    assert [(one.kind, one.lo, one.hi) for one in decisions] == [("settle", 3, 8)]


def test_every_order_of_three_words_settles_on_the_last() -> None:
    for order in itertools.permutations(PARTIES):
        agreement = opened()
        said = [agreement.report(party.key, ENDED, lo=0, hi=4) for party in order]
        assert [one is not None for one in said] == [False, False, True]


def test_one_rank_that_gave_up_voids_the_transfer_for_all() -> None:
    # P11: the others have the bytes, but no name may become visible
    agreement = opened()
    for party in PARTIES[:2]:
        assert agreement.report(party.key, ENDED, lo=0, hi=4) is None
    decision = agreement.report(PARTIES[2].key, ENDED | int(Fact.ABANDONED), lo=0, hi=0)
    assert decision is not None
    assert (decision.kind, decision.parties) == ("void", PARTIES)
