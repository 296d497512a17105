"""A transfer ends once, by its own moves, and its deadline never frees a page."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.facts import Fact, FailureClass
from kvbus.ledger.transfer import (
    STOP_WAIT_S,
    TRANSITIONS,
    Action,
    AskSource,
    CloseKey,
    GiveUp,
    IsolateSource,
    LeasePages,
    Phase,
    Read,
    Report,
    Stop,
    Transfer,
)

DELIVERED = int(Fact.TAKEN | Fact.GRANTED | Fact.SUBMITTED | Fact.DELIVERED)
ENDED = DELIVERED | int(Fact.ACCESS_ENDED | Fact.EVIDENCE_COMPLETED)
BACK = ENDED | int(Fact.SETTLED | Fact.RETURNED | Fact.CONSUMED)
GIVEN_UP = int(Fact.TAKEN | Fact.FAILED | Fact.ABANDONED | Fact.ACCESS_ENDED | Fact.EVIDENCE_NEVER_SUBMITTED)
FREE_AGAIN = GIVEN_UP | int(Fact.SETTLED | Fact.RETURNED)


def fresh(budget_s: float = 30.0) -> Transfer:
    return Transfer("t1", "h" * 32, "a", admitted_at=100.0, budget_s=budget_s)


def asking(*tickets: int, wanted: int = 10, held: int = 2) -> Transfer:
    one = fresh()
    assert one.resolved(101.0, prompt_tokens=330, blocks_wanted=wanted, blocks_held=held, prefix_held=held) == [
        LeasePages()
    ]
    assert one.leased(102.0, {ticket: rank for rank, ticket in enumerate(tickets or (7,))}) == [AskSource()]
    return one


def moving(*tickets: int, blocks: int = 8) -> Transfer:
    one = asking(*tickets)
    assert one.granted(103.0, blocks) == [Read()]
    return one


def deliver(one: Transfer, ticket: int, blocks: int, *, now: float = 104.0) -> list[Action]:
    one.arrived(ticket, blocks, 1_000 * blocks)
    return one.facts(now, ticket, ENDED, 2, 2 + blocks)


# ------------------------------------------------------------------------------------------------------ the good end


def test_a_transfer_that_gets_all_it_lacked_settles() -> None:
    one = moving()
    assert deliver(one, 7, 8) == [CloseKey()]
    assert one.phase is Phase.SETTLING
    assert not one.finished
    assert one.facts(105.0, 7, BACK, 2, 10) == [Report()]
    assert (one.outcome, one.failure, one.blocks_moved, one.length_bytes) == ("settled", FailureClass.NONE, 8, 8_000)
    assert (one.bounds, one.evidence, one.finished) == ((2, 10), ("completed",), True)
    timings = one.timings
    assert (timings.grant_s, timings.move_s, timings.total_s) == (1.0, 1.0, 5.0)


def test_nothing_is_asked_for_where_every_block_is_here() -> None:
    one = fresh()
    assert one.resolved(101.0, prompt_tokens=64, blocks_wanted=2, blocks_held=2, prefix_held=2) == [Report()]
    assert (one.outcome, one.finished, one.bounds) == ("settled", True, (2, 2))


def test_a_shorter_grant_that_arrives_whole_is_partial() -> None:
    one = moving(blocks=3)
    deliver(one, 7, 3)
    one.facts(105.0, 7, BACK, 2, 5)
    assert (one.outcome, one.reason, one.failure) == ("partial", "the source lent 3 of 8 blocks", FailureClass.NONE)


@pytest.mark.parametrize("arrived", [0, 5])
def test_fewer_blocks_than_were_lent_are_a_failure_and_stay_counted(arrived: int) -> None:
    # contract 46
    one = moving()
    deliver(one, 7, arrived)
    one.facts(105.0, 7, BACK, 2, 2 + arrived)
    assert (one.outcome, one.failure, one.blocks_moved) == ("failed", FailureClass.TRANSPORT, arrived)


def test_all_ranks_must_have_ended_before_the_source_hears_it() -> None:
    # P4, R6
    one = moving(7, 8)
    assert deliver(one, 7, 8) == []
    assert one.phase is Phase.MOVING
    assert deliver(one, 8, 6) == [CloseKey()]
    assert one.facts(105.0, 7, BACK, 2, 10) == []
    assert one.facts(106.0, 8, BACK, 2, 8) == [Report()]
    assert (one.blocks_moved, one.length_bytes, one.bounds) == (6, 14_000, (2, 8))


def test_bounds_of_ranks_that_have_nothing_in_common_are_empty() -> None:
    # contract 26
    one = moving(7, 8)
    one.facts(104.0, 7, ENDED, 5, 9)
    one.facts(104.0, 8, ENDED, 0, 3)
    assert one.bounds == (0, 0)


def test_content_whose_return_failed_is_not_called_settled() -> None:
    # contract 7
    one = moving()
    deliver(one, 7, 8)
    assert one.facts(105.0, 7, ENDED | int(Fact.SETTLED | Fact.RETURN_FAILED), 2, 10) == [Report()]
    assert (one.outcome, one.failure) == ("failed", FailureClass.LENDER_STOPPED)


def test_content_that_was_given_up_after_delivery_is_not_called_settled() -> None:
    # contract 4, P10
    one = moving()
    deliver(one, 7, 8)
    one.facts(105.0, 7, ENDED | int(Fact.SETTLED | Fact.ABANDONED | Fact.RETURNED), 2, 10)
    assert (one.outcome, one.failure) == ("failed", FailureClass.CONTRADICTION)


# ------------------------------------------------------------------------------------------------------- bad ends


def test_a_failure_before_any_lease_ends_at_once() -> None:
    one = fresh()
    assert one.failed(101.0, FailureClass.BAD_REQUEST, "the prompt is empty") == [Report()]
    assert (one.outcome, one.reason, one.finished) == ("failed", "the prompt is empty", True)


def test_a_refusal_by_the_source_gives_the_leases_up_and_waits_for_the_ledger() -> None:
    one = asking()
    actions = one.failed(103.0, FailureClass.SOURCE_MISSES, "not here")
    assert actions == [GiveUp(FailureClass.SOURCE_MISSES, "not here")]
    assert one.facts(104.0, 7, GIVEN_UP, 2, 2) == [CloseKey()]
    assert one.facts(105.0, 7, FREE_AGAIN, 2, 2) == [Report()]
    assert (one.outcome, one.failure) == ("failed", FailureClass.SOURCE_MISSES)


def test_a_lease_that_was_refused_ends_the_transfer_with_its_reason() -> None:
    one = asking()
    one.detail(7, FailureClass.LEASE_REFUSED, "the pool is full")
    bits = int(Fact.TAKEN | Fact.FAILED | Fact.ACCESS_ENDED | Fact.EVIDENCE_NEVER_SUBMITTED)
    assert one.facts(103.0, 7, bits, 0, 0) == [
        GiveUp(FailureClass.LEASE_REFUSED, "the pool is full"),
        CloseKey(),
    ]
    assert one.phase is Phase.SETTLING


def test_a_failure_while_bytes_move_is_the_leases_to_tell() -> None:
    one = moving()
    assert one.failed(104.0, FailureClass.PEER_LOST, "the source is gone") == []
    assert one.phase is Phase.MOVING
    one.detail(7, FailureClass.PEER_LOST, "the source is gone")
    one.detail(7, FailureClass.TRANSPORT, "and then this")
    one.detail(99, FailureClass.TRANSPORT, "of another transfer")
    assert (one.failure, one.reason) == (FailureClass.PEER_LOST, "the source is gone")


def test_a_late_grant_is_ignored() -> None:
    # P18
    one = asking()
    one.cancelled(103.0, FailureClass.CANCELLED, "not wanted any more")
    assert one.granted(104.0, 8) == []
    assert one.phase is Phase.STOPPING
    running = moving()
    assert running.granted(104.0, 3) == []
    assert running.blocks_granted == 8


@pytest.mark.parametrize("make", [fresh, asking, moving])
def test_a_cancel_is_named_as_the_outcome_wherever_it_comes(make: object) -> None:
    assert callable(make)
    one: Transfer = make()
    one.cancelled(103.5, FailureClass.CANCELLED, "not wanted any more")
    assert one.outcome == "cancelled"
    assert one.failure is FailureClass.CANCELLED
    assert one.cancelled(104.0, FailureClass.CANCELLED, "again") == []


def test_a_cancel_while_bytes_move_keeps_what_arrived() -> None:
    # R12
    one = moving()
    assert one.cancelled(104.0, FailureClass.CANCELLED, "not wanted any more") == [Stop("not wanted any more")]
    one.arrived(7, 5, 5_000)
    cancelled = int(Fact.TAKEN | Fact.SUBMITTED | Fact.CANCELLED | Fact.ACCESS_ENDED | Fact.EVIDENCE_COMPLETED)
    assert one.facts(104.5, 7, cancelled, 2, 7) == [CloseKey()]
    back = cancelled | int(Fact.SETTLED | Fact.RETURNED | Fact.CONSUMED)
    assert one.facts(105.0, 7, back, 2, 7) == [Report()]
    assert (one.outcome, one.blocks_moved, one.bounds) == ("cancelled", 5, (2, 7))


def test_a_cancel_after_access_ended_comes_too_late() -> None:
    one = moving()
    deliver(one, 7, 8)
    assert one.cancelled(104.5, FailureClass.CANCELLED, "not wanted any more") == []
    one.facts(105.0, 7, BACK, 2, 10)
    assert one.outcome == "settled"


# -------------------------------------------------------------------------------------------------------- deadline


def test_nothing_happens_before_the_deadline() -> None:
    # R12
    for make in (fresh, asking, moving):
        one = make()
        assert one.tick(129.9) == []
    assert fresh().remaining_s(120.0) == 10.0
    assert fresh().remaining_s(500.0) == 0.0


def test_the_deadline_stops_isolates_and_then_gives_the_request_back_but_frees_nothing() -> None:
    # R12, R18, contract 40
    one = moving()
    assert one.tick(130.0) == [Stop("the budget of 30 s is spent")]
    assert one.tick(130.0 + STOP_WAIT_S - 0.1) == []
    assert [type(action) for action in one.tick(130.0 + STOP_WAIT_S)] == [IsolateSource]
    assert one.isolated
    assert one.tick(130.0 + STOP_WAIT_S) == []
    given_back = one.tick(130.0 + 2 * STOP_WAIT_S)  # P11: a result that comes later does not count
    assert given_back == [GiveUp(FailureClass.DEADLINE, "the budget of 30 s is spent"), Report()]
    assert (one.phase, one.outcome, one.failure) == (Phase.ENDED, "failed", FailureClass.DEADLINE)
    assert not one.finished, "access has not ended: the source must still hear it one day"
    assert one.tick(1_000.0) == []


def test_a_retained_transfer_closes_its_key_when_access_ends_at_last() -> None:
    # P18, contract 46
    one = moving()
    for now in (130.0, 132.0, 134.0):
        one.tick(now)
    assert deliver(one, 7, 8, now=500.0) == [CloseKey()]
    assert one.finished
    assert one.facts(501.0, 7, BACK, 2, 10) == []
    assert (one.outcome, one.failure) == ("failed", FailureClass.DEADLINE)


def test_the_deadline_keeps_waiting_for_members_that_agree_and_then_gives_up() -> None:
    # P11
    one = moving()
    deliver(one, 7, 8, now=129.0)
    assert one.tick(130.0) == []
    assert one.tick(130.0 + 2 * STOP_WAIT_S) == [
        GiveUp(FailureClass.DEADLINE, "the members did not agree in time"),
        Report(),
    ]
    assert one.finished


def test_the_deadline_before_any_lease_ends_at_once_and_before_the_grant_gives_up() -> None:
    one = fresh()
    assert one.tick(130.0) == [Report()]
    other = asking()
    assert [type(action) for action in other.tick(130.0)] == [GiveUp]


# ------------------------------------------------------------------------------------------------ misuse and moves


def test_pages_are_leased_once_and_some() -> None:
    one = asking()
    with pytest.raises(LedgerContradictionError, match="leased twice"):
        one.leased(103.0, {9: 0})
    empty = fresh()
    empty.resolved(101.0, prompt_tokens=64, blocks_wanted=2, blocks_held=0, prefix_held=0)
    with pytest.raises(LedgerContradictionError, match="no pages leased"):
        empty.leased(102.0, {})


def test_a_move_that_is_not_in_the_table_is_a_contradiction() -> None:
    with pytest.raises(LedgerContradictionError, match="no such move"):
        fresh()._go(Phase.SETTLING)


def test_a_prompt_is_resolved_once() -> None:
    assert asking().resolved(103.0, prompt_tokens=1, blocks_wanted=1, blocks_held=0, prefix_held=0) == []


def test_words_about_other_tickets_change_nothing() -> None:
    one = moving()
    assert one.facts(104.0, 99, BACK, 0, 9) == []
    one.arrived(99, 3, 3)
    assert (one.phase, one.blocks_moved) == (Phase.MOVING, 0)


def test_a_transfer_says_where_it_stands() -> None:
    one = moving()
    assert repr(one) == "<Transfer t1 moving from a >"
    assert (one.timings.total_s, one.timings.move_s) == (0.0, 0.0)


@dataclass
class Driver:
    """Drives one transfer with arbitrary events, obeying only what a ledger promises: bits turn on."""

    one: Transfer = field(default_factory=fresh)
    now: float = 100.0
    bits: dict[int, int] = field(default_factory=lambda: dict.fromkeys((7, 8), int(Fact.TAKEN)))
    moves: set[tuple[Phase, Phase]] = field(default_factory=set)
    actions: list[Action] = field(default_factory=list)
    said_at_deadline: list[Action] = field(default_factory=list)

    def step(self, what: str, ticket: int, amount: int) -> None:
        before = self.one.phase
        said = self.act(what, ticket, amount)
        self.actions += said
        if what == "tick":
            self.said_at_deadline += said
        # One event makes at most two moves in a row: given up, and access ended by the same line.
        if self.one.phase is not before:
            self.moves.add((before, self.one.phase))

    def act(self, what: str, ticket: int, amount: int) -> list[Action]:
        one = self.one
        match what:
            case "resolved":
                return one.resolved(
                    self.now, prompt_tokens=1, blocks_wanted=4, blocks_held=amount % 5, prefix_held=amount % 5
                )
            case "leased" if one.phase is Phase.LEASING:
                return one.leased(self.now, {7: 0, 8: 1})
            case "granted":
                return one.granted(self.now, amount)
            case "failed":
                return one.failed(self.now, FailureClass.PEER_LOST, "gone")
            case "cancelled":
                return one.cancelled(self.now, FailureClass.CANCELLED, "stop")
            case "tick":
                self.now += amount
                return one.tick(self.now)
            case "result" | "ended" | "back" | "return_failed":
                return self.fact(what, ticket, amount)
            case _:
                return []

    def fact(self, what: str, ticket: int, amount: int) -> list[Action]:
        if ticket not in self.one.shares:
            return []
        bits = self.bits[ticket]
        result = int(Fact.DELIVERED | Fact.FAILED | Fact.CANCELLED)
        if what == "result" and not bits & result:
            bits |= int((Fact.DELIVERED, Fact.FAILED, Fact.CANCELLED)[amount % 3])
            self.one.arrived(ticket, 0 if bits & Fact.FAILED else amount % 5, amount)
        elif what == "ended" and bits & result:
            bits |= int(Fact.ACCESS_ENDED | Fact.EVIDENCE_COMPLETED)
        elif what == "back" and bits & Fact.ACCESS_ENDED and not bits & Fact.RETURN_FAILED:
            bits |= int(Fact.SETTLED | Fact.RETURNED | Fact.CONSUMED)
        elif what == "return_failed" and bits & Fact.ACCESS_ENDED and not bits & Fact.RETURNED:
            bits |= int(Fact.SETTLED | Fact.RETURN_FAILED)
        self.bits[ticket] = bits
        return self.one.facts(self.now, ticket, bits, 0, amount)


EVENTS = "resolved leased granted failed cancelled tick tick result result ended ended back back return_failed".split()
steps = st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from([7, 8]), st.integers(0, 40)), max_size=40)


def of_two(moves: set[tuple[Phase, Phase]]) -> set[tuple[Phase, Phase]]:
    """Return the pairs that are reached by two allowed moves in one event."""
    return {
        (first, last)
        for first, middle in TRANSITIONS
        for start, last in TRANSITIONS
        if middle is start and (first, last) in moves
    }


@settings(max_examples=300, deadline=None)
@given(steps)
def test_whatever_happens_a_transfer_makes_only_the_moves_of_its_table_and_reports_once(
    events: list[tuple[str, int, int]],
) -> None:
    # R12, contract 40
    driver = Driver()
    for what, ticket, amount in events:
        driver.step(what, ticket, amount)
    assert driver.moves - TRANSITIONS <= of_two(driver.moves)
    kinds = [type(action) for action in driver.actions]
    assert kinds.count(Report) == (driver.one.phase is Phase.ENDED)
    assert kinds.count(CloseKey) <= 1
    assert {type(action) for action in driver.said_at_deadline} <= {Stop, GiveUp, IsolateSource, Report}
    if CloseKey in kinds:
        assert all(driver.bits[ticket] & Fact.ACCESS_ENDED for ticket in driver.one.shares)
    if driver.one.phase is Phase.ENDED:
        assert driver.one.outcome in {"settled", "partial", "failed", "cancelled"}
    if driver.one.outcome == "settled" and driver.one.shares:
        assert all(driver.bits[ticket] & Fact.CONSUMED for ticket in driver.one.shares)


PATHS: dict[tuple[Phase, Phase], list[tuple[str, int, int]]] = {
    (Phase.RESOLVING, Phase.LEASING): [("resolved", 7, 0)],
    (Phase.RESOLVING, Phase.ENDED): [("failed", 7, 0)],
    (Phase.LEASING, Phase.ASKING): [("resolved", 7, 0), ("leased", 7, 0)],
    (Phase.LEASING, Phase.ENDED): [("resolved", 7, 0), ("cancelled", 7, 0)],
    (Phase.ASKING, Phase.MOVING): [("resolved", 7, 0), ("leased", 7, 0), ("granted", 7, 4)],
    (Phase.ASKING, Phase.STOPPING): [("resolved", 7, 0), ("leased", 7, 0), ("failed", 7, 0)],
}
_MOVING = PATHS[Phase.ASKING, Phase.MOVING]
_ENDED = [("result", 7, 3), ("result", 8, 3), ("ended", 7, 0), ("ended", 8, 0)]
PATHS |= {
    (Phase.MOVING, Phase.SETTLING): [*_MOVING, *_ENDED],
    (Phase.MOVING, Phase.STOPPING): [*_MOVING, ("tick", 7, 30)],
    (Phase.STOPPING, Phase.SETTLING): [*_MOVING, ("tick", 7, 30), *_ENDED],
    (Phase.STOPPING, Phase.ENDED): [*_MOVING, ("tick", 7, 30), ("tick", 7, 2), ("tick", 7, 2)],
    (Phase.SETTLING, Phase.ENDED): [*_MOVING, *_ENDED, ("back", 7, 0), ("back", 8, 0)],
}


def test_the_table_holds_no_move_that_cannot_be_reached() -> None:
    assert set(PATHS) == TRANSITIONS


@pytest.mark.parametrize("move", sorted(TRANSITIONS), ids="-".join)
def test_each_move_of_the_table_is_reached(move: tuple[Phase, Phase]) -> None:
    driver = Driver()
    for what, ticket, amount in PATHS[move]:
        driver.step(what, ticket, amount)
    assert move in driver.moves


def test_where_nothing_arrived_the_prompt_resumes_after_what_was_here_before() -> None:
    # contract 27
    one = fresh()
    one.resolved(101.0, prompt_tokens=330, blocks_wanted=10, blocks_held=5, prefix_held=3)
    one.leased(102.0, {7: 0})
    one.failed(103.0, FailureClass.PEER_LOST, "gone")
    assert one.bounds == (3, 3)
