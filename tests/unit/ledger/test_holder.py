"""The holder keeps each lease until its evidence is there, and returns it exactly once."""

import itertools

import pytest

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.facts import AttemptRow, Evidence, Fact, FailureClass, GrantedRow, OutcomeRow, fact_names
from kvbus.ledger.types import (
    Change,
    Containment,
    Delivered,
    Direction,
    Order,
    SubmissionRejectedError,
    SubmitMode,
)
from kvbus.testing.ledger_parts import ListedLender, ManualBackend
from tests.unit.ledger.bench import CONSUMED, HELD_BACK, PULL, RETURNED, SERVE, Bench

NOT_EVIDENCE = ("cancel", "abandon", "isolate", "settle", "result", "silence", "shutdown")


# ------------------------------------------------------------------------------------------- ownership and return


def test_a_write_goes_back_once_result_access_end_and_settle_are_there() -> None:
    bench = Bench()
    ticket, lease = bench.submitted_write(rows=2)
    bench.pull.deliver(ticket)
    bench.round(ticket)
    assert lease.releases == 1
    assert lease.marks == [(True, True)]
    assert len(bench.lender.content) == 2
    assert bench.holder.tickets() == set()
    assert bench.reported(ticket) & (RETURNED | CONSUMED) == RETURNED | CONSUMED


@pytest.mark.parametrize("given", ["".join(c) for n in range(3) for c in itertools.combinations("RAS", n)])
def test_a_write_stays_while_any_one_of_the_three_conditions_is_missing(given: str) -> None:
    # contract 1, contract 3
    bench = Bench()
    ticket, lease = bench.submitted_write()
    if "R" in given:
        bench.pull.deliver(ticket, evidence=None)
    if "A" in given:
        bench.pull.end(ticket)
    for _ in range(3):
        bench.round(*([ticket] if "S" in given else []))
    assert lease.releases == 0
    assert bench.holder.tickets() == {ticket}
    # and what was missing is all that was missing
    if "R" not in given:
        bench.pull.answer(ticket, Delivered((True,), 1_000), None)
    if "A" not in given:
        bench.pull.end(ticket)
    bench.round(ticket)
    assert lease.releases == 1


def test_a_read_goes_back_when_access_ended_and_needs_no_settle() -> None:
    # contract 2
    bench = Bench()
    ticket, lease = bench.submitted_read()
    bench.serve.deliver(ticket, evidence=None)
    bench.round()
    assert lease.releases == 0
    bench.serve.end(ticket, Evidence.PEER_ACK)
    bench.round()
    assert lease.releases == 1
    assert lease.marks == []
    assert bench.reported(ticket) & Fact.EVIDENCE_PEER_ACK


def test_an_abandoned_write_is_returned_as_discarded_and_only_when_agreed() -> None:
    # contract 4, R6: abandoned writes too are returned everywhere, through the log
    bench = Bench()
    ticket, lease = bench.submitted_write()
    bench.holder.abandon(ticket, FailureClass.DEADLINE, "the budget is spent")
    bench.pull.end(ticket)
    bench.round()
    assert lease.releases == 0
    bench.round(ticket)
    assert lease.releases == 1
    assert lease.marks == [(False,)]
    assert bench.lender.content == set()


def test_abandonment_is_sticky_against_a_later_success() -> None:
    # contract 4
    bench = Bench()
    ticket, lease = bench.submitted_write()
    bench.holder.abandon(ticket, FailureClass.DEADLINE, "the budget is spent")
    bench.pull.deliver(ticket)
    bench.round(ticket)
    assert lease.marks == [(False,)]
    bits = bench.reported(ticket)
    assert bits & Fact.ABANDONED
    assert not bits & (Fact.DELIVERED | Fact.CONSUMED)


def test_what_was_delivered_before_the_lease_was_abandoned_does_not_count() -> None:
    # contract 4
    bench = Bench()
    ticket, lease = bench.submitted_write()
    bench.pull.deliver(ticket)
    bench.round()
    bench.holder.abandon(ticket, FailureClass.DEADLINE, "the members did not agree")
    bench.round(ticket)
    assert lease.marks == [(False,)]
    assert not bench.reported(ticket) & Fact.CONSUMED


def test_a_second_abandon_changes_nothing() -> None:
    bench = Bench()
    ticket, _ = bench.submitted_write()
    bench.holder.abandon(ticket, FailureClass.DEADLINE, "first")
    bench.holder.abandon(ticket, FailureClass.CANCELLED, "second")
    bench.round()
    assert [(d.failure, d.text) for d in bench.details] == [(FailureClass.DEADLINE, "first")]
    assert len(bench.pull.cancels) == 1


def test_a_second_settle_of_a_returned_ticket_is_ignored() -> None:
    # contract 5
    bench = Bench()
    ticket, lease = bench.submitted_write()
    bench.pull.deliver(ticket)
    bench.round(ticket)
    assert bench.holder.settle([ticket, ticket]) == ()
    bench.round(ticket)
    assert (lease.releases, len(lease.marks), lease.polls) == (1, 1, 1)


def test_a_settle_of_a_ticket_never_given_is_named_and_changes_nothing() -> None:
    # contract 48
    bench = Bench()
    ticket, _ = bench.write()
    assert bench.holder.settle([ticket, ticket + 1, 0, -3]) == (ticket + 1, 0, -3)


def test_a_lease_is_never_polled_again_once_its_view_was_seen() -> None:
    # contract 6
    bench = Bench()
    ticket, lease = bench.submitted_write()
    bench.lender.list_changed(lease.lease_id)
    bench.round()
    bench.pull.deliver(ticket)
    bench.lender.list_changed(lease.lease_id)
    bench.round(ticket)
    assert lease.polls == 1


def test_a_return_that_raises_is_never_tried_again_and_stops_the_lender() -> None:
    # contract 7
    bench = Bench()
    ticket, lease = bench.submitted_write()
    lease.faults.plant("release", OSError("pool is gone"))
    bench.pull.deliver(ticket)
    bench.round(ticket)
    lease.faults.remove("release")
    for _ in range(3):
        bench.round(ticket)
    assert lease.releases == 1
    bits = bench.reported(ticket)
    assert bits & Fact.RETURN_FAILED
    assert not bits & RETURNED
    assert bench.holder.statistics().lenders_stopped == ("lender",)


def test_a_mark_that_raises_is_not_followed_by_a_release() -> None:
    # contract 7
    bench = Bench()
    ticket, lease = bench.submitted_write()
    lease.faults.plant("mark_arrived", OSError("pool is gone"))
    bench.pull.deliver(ticket)
    bench.round(ticket)
    bench.round(ticket)
    assert lease.releases == 0
    assert bench.reported(ticket) & Fact.RETURN_FAILED


def test_a_failing_return_retains_what_else_its_lender_lent_also_in_the_same_round() -> None:
    # contract 7
    bench = Bench()
    first, first_lease = bench.submitted_write()
    second, second_lease = bench.submitted_write()
    third, third_lease = bench.submitted_write()
    first_lease.faults.plant("release", OSError("pool is gone"))
    bench.pull.deliver(first)
    bench.pull.deliver(second)
    bench.round(first, second)
    bench.pull.deliver(third)
    bench.round(first, second, third)
    assert (first_lease.releases, second_lease.releases, third_lease.releases) == (1, 0, 0)
    assert bench.holder.tickets() == {second, third}
    assert bench.reported(second) & Fact.LENDER_STOPPED


def test_another_lenders_leases_go_on_when_one_lender_is_stopped() -> None:
    # contract 7, R21
    bench = Bench()
    ticket, lease = bench.submitted_write()
    lease.faults.plant("release", OSError("pool is gone"))
    bench.pull.deliver(ticket)
    bench.round(ticket)
    other = bench.other_lender.lend(Direction.WRITE)
    other_ticket = bench.holder.take(other, PULL, "grant", now=0.0, peer="peer")
    bench.round()
    bench.pull.deliver(other_ticket)
    bench.round(other_ticket)
    assert other.releases == 1


def test_an_attempt_is_kept_after_its_lease_was_given_up_until_its_evidence_came() -> None:
    # contract 8
    bench = Bench()
    ticket, lease = bench.submitted_write()
    bench.holder.abandon(ticket, FailureClass.DEADLINE, "the budget is spent")
    for _ in range(5):
        bench.round(ticket)
    assert bench.holder.statistics().bindings[0].open_attempts == 1
    assert lease.releases == 0
    bench.pull.answer(ticket, Delivered((True,), 1_000), Evidence.COMPLETED)
    bench.round(ticket)
    assert lease.releases == 1
    assert bench.holder.statistics().bindings[0].open_attempts == 0


def test_dropping_every_reference_to_a_lease_frees_nothing() -> None:
    # contract 9
    bench = Bench()
    ticket, lease = bench.submitted_write()
    lease_id = lease.lease_id
    del lease
    bench.round(ticket)
    assert lease_id in bench.lender.out


def test_one_lease_cannot_be_taken_twice() -> None:
    # contract 10, contract 11
    bench = Bench()
    _, lease = bench.write()
    with pytest.raises(ValueError, match="held already"):
        bench.holder.take(lease, PULL, now=0.0)
    bench.holder.check()


def test_one_lease_cannot_be_given_two_orders() -> None:
    # contract 11
    bench = Bench()
    ticket, _ = bench.write(hint=HELD_BACK)
    bench.holder.assign(ticket, "grant")
    with pytest.raises(LedgerContradictionError, match="second order"):
        bench.holder.assign(ticket, "another grant")


# ------------------------------------------------------------------------------------------------ lease and lender


def test_a_waiting_lease_is_polled_when_its_lender_lists_it_and_not_before() -> None:
    # contract 12, R4
    bench = Bench()
    ticket, lease = bench.write(granted=False)
    for _ in range(4):
        bench.round()
    assert lease.polls == 1
    lease.grant()
    bench.round()
    assert lease.polls == 2
    assert ticket in bench.pull.orders


def test_the_backend_gets_the_lease_view_unchanged() -> None:
    # contract 12, R3
    bench = Bench()
    ticket, lease = bench.submitted_write(rows=3)
    assert bench.pull.orders[ticket].view is lease.poll()
    assert bench.holder.view(ticket) is bench.pull.orders[ticket].view


def test_a_failed_lease_is_a_fact_and_is_released_all_the_same() -> None:
    # contract 13, contract 15
    bench = Bench()
    ticket, lease = bench.write(granted=False)
    lease.refuse("no room")
    bench.round()
    bench.round(ticket)
    assert (lease.releases, lease.marks) == (1, [])
    bits = bench.reported(ticket)
    assert bits & Fact.FAILED
    assert bits & Fact.EVIDENCE_NEVER_SUBMITTED
    assert bench.details[0].failure is FailureClass.LEASE_REFUSED
    assert ticket not in bench.pull.orders


def test_a_write_is_marked_once_after_its_view_and_before_its_release() -> None:
    # contract 14
    bench = Bench()
    ticket, lease = bench.submitted_write(rows=3)
    bench.pull.deliver(ticket, [True, False, True])
    bench.round(ticket)
    assert lease.marks == [(True, False, True)]
    assert len(bench.lender.content) == 2


def test_a_lease_given_up_before_its_view_needs_no_mark() -> None:
    # contract 15
    bench = Bench()
    ticket, lease = bench.write(granted=False)
    bench.holder.abandon(ticket, FailureClass.CANCELLED, "not wanted any more")
    lease.grant()
    bench.round(ticket)
    assert (lease.marks, lease.releases, lease.polls) == ([], 1, 0)


def test_arguments_that_fit_nothing_raise_before_anything_changes() -> None:
    # contract 16, R2
    bench = Bench()
    lease = bench.lender.lend(Direction.WRITE)
    for mode in (SubmitMode("nowhere", Direction.WRITE), SERVE, SubmitMode("pull", Direction.READ)):
        with pytest.raises(ValueError, match="binding"):
            bench.holder.take(lease, mode, now=0.0)
    with pytest.raises(ValueError, match="no lender named 'stranger'"):
        bench.holder.take(ListedLender("stranger").lend(Direction.WRITE), PULL, now=0.0)
    assert bench.holder.tickets() == set()
    assert bench.holder.statistics().taken == 0


# -------------------------------------------------------------------------------------------- backends and attempts


def test_the_first_result_stands_and_a_repeat_of_it_changes_nothing() -> None:
    # contract 29
    bench = Bench()
    ticket, lease = bench.submitted_write()
    bench.pull.deliver(ticket, evidence=None)
    bench.pull.deliver(ticket, evidence=None)
    bench.pull.end(ticket)
    bench.round(ticket)
    assert lease.marks == [(True,)]
    assert bench.holder.statistics().bindings[0].contradictions == 0
    assert bench.holder.statistics().bindings[0].deliveries == 1


def test_a_miss_is_delivered_with_no_row_and_a_transport_failure_is_failed() -> None:
    # contract 30
    bench = Bench()
    missed, _ = bench.submitted_write()
    broken, _ = bench.submitted_write()
    bench.pull.deliver(missed, [False])
    bench.pull.fail(broken, evidence=Evidence.COMPLETED)
    bench.round()
    assert bench.bits[missed] & Fact.DELIVERED
    assert bench.bits[broken] & Fact.FAILED
    assert [d.ticket for d in bench.details] == [broken]


@pytest.mark.parametrize("mask", [(), (True,), (True, True, True)])
def test_a_mask_that_does_not_fit_the_rows_fails_the_lease_and_spares_the_lender(mask: tuple[bool, ...]) -> None:
    # contract 31, contract 47
    bench = Bench()
    ticket, lease = bench.submitted_write(rows=2)
    bench.pull.answer(ticket, Delivered(mask, 0), Evidence.COMPLETED)
    bench.round(ticket)
    assert lease.marks == [(False, False)]
    assert lease.releases == 1
    assert bench.details[0].failure is FailureClass.CONTRADICTION
    assert bench.holder.statistics().lenders_stopped == ()
    assert bench.holder.statistics().bindings[0].contradictions == 1


def test_after_a_failure_no_row_counts() -> None:
    # contract 31
    bench = Bench()
    ticket, lease = bench.submitted_write(rows=2)
    bench.pull.fail(ticket, evidence=Evidence.COMPLETED)
    bench.round(ticket)
    assert lease.marks == [(False, False)]
    assert not bench.reported(ticket) & CONSUMED


def test_a_rejected_submission_is_evidence_that_nothing_escaped() -> None:
    # contract 32, contract 41
    bench = Bench()
    ticket, lease = bench.write()
    bench.pull.faults.plant("submit", SubmissionRejectedError(FailureClass.GRANT_REFUSED, "another reader's grant"))
    bench.round()
    bench.round(ticket)
    assert lease.releases == 1
    bits = bench.reported(ticket)
    assert bits & Fact.EVIDENCE_NEVER_SUBMITTED
    assert not bits & Fact.SUBMITTED
    statistics = bench.holder.statistics().bindings[0]
    assert (statistics.rejections, statistics.open_attempts) == (1, 0)


def test_an_unknown_error_of_submit_keeps_the_lease_until_the_backend_has_evidence() -> None:
    # contract 33, R14
    bench = Bench()
    ticket, lease = bench.write()
    bench.pull.faults.plant("submit", RuntimeError("surprise"))
    bench.round()
    for _ in range(3):
        bench.round(ticket)
    assert lease.releases == 0
    assert bench.reported(ticket) & Fact.UNCERTAIN
    assert bench.bits[ticket] & Fact.FAILED
    bench.pull.end(ticket)
    bench.round()
    assert lease.releases == 1
    assert lease.marks == [(False,)]


def test_an_uncertain_submission_isolates_its_peer_and_no_other() -> None:
    # R14, R18
    bench = Bench(containment=Containment.ISOLATE_PEER)
    bench.write(peer="bad")
    bench.pull.faults.plant("submit", RuntimeError("surprise"))
    bench.round()
    bench.pull.faults.remove("submit")
    assert bench.pull.isolations == ["bad"]
    refused, _ = bench.write(peer="bad")
    accepted, _ = bench.write(peer="good")
    bench.round()
    assert refused not in bench.pull.orders
    assert accepted in bench.pull.orders


def test_an_uncertain_submission_stops_the_binding_where_that_is_its_containment() -> None:
    # R14
    bench = Bench(containment=Containment.STOP_BINDING)
    bench.write()
    waiting, _ = bench.write(granted=False)
    bench.pull.faults.plant("submit", RuntimeError("surprise"))
    bench.round()
    bench.pull.faults.remove("submit")
    ticket, _ = bench.write(peer="good")
    bench.round()
    assert ticket not in bench.pull.orders
    assert bench.bits[ticket] & Fact.FAILED
    assert not bench.holder.statistics().bindings[0].accepting
    assert waiting in bench.holder.tickets()


def test_evidence_for_one_attempt_frees_no_other() -> None:
    # contract 34, contract 41
    bench = Bench()
    first, first_lease = bench.submitted_write()
    second, second_lease = bench.submitted_write()
    bench.pull.deliver(first)
    bench.pull.deliver(second, evidence=None)
    bench.round(first, second)
    assert (first_lease.releases, second_lease.releases) == (1, 0)


def test_a_cancel_is_sent_at_most_once_and_frees_nothing() -> None:
    # contract 39, contract 40
    bench = Bench()
    ticket, lease = bench.submitted_write()
    for _ in range(3):
        bench.holder.cancel(ticket, "not wanted any more")
        bench.round(ticket)
    assert bench.pull.cancels == [(ticket, 1)]
    assert lease.releases == 0


def test_what_arrived_whole_before_a_cancel_counts() -> None:
    # R12
    bench = Bench()
    ticket, lease = bench.submitted_write(rows=3)
    bench.holder.cancel(ticket, "the budget is spent")
    bench.pull.stop(ticket, [True, True, False], evidence=Evidence.COMPLETED)
    bench.round(ticket)
    assert lease.marks == [(True, True, False)]
    assert bench.reported(ticket) & (Fact.CANCELLED | Fact.CONSUMED) == Fact.CANCELLED | Fact.CONSUMED


def test_a_failing_cancel_does_not_reach_other_leases() -> None:
    # contract 39, R21
    bench = Bench()
    first, _ = bench.submitted_write()
    second, second_lease = bench.submitted_write()
    bench.pull.faults.plant("cancel", RuntimeError("surprise"))
    bench.holder.cancel(first, "stop")
    bench.holder.cancel(second, "stop")
    bench.pull.deliver(second)
    bench.round(second)
    assert second_lease.releases == 1


def test_a_cancel_before_submission_means_that_nothing_is_ever_submitted() -> None:
    # contract 49, P3
    bench = Bench()
    ticket, lease = bench.write(hint=HELD_BACK)
    bench.round()
    bench.holder.cancel(ticket, "stop")
    bench.holder.assign(ticket, "grant")
    bench.round()
    bench.round(ticket)
    assert ticket not in bench.pull.orders
    assert lease.releases == 1
    assert bench.reported(ticket) & Fact.CANCELLED


# -------------------------------------------------------------------------------------------------------- evidence


def do_what_is_no_evidence(bench: Bench, what: str, ticket: int, reader: int) -> None:
    for one, binding, backend in ((ticket, "pull", bench.pull), (reader, "serve", bench.serve)):
        match what:
            case "cancel":
                bench.holder.cancel(one, "stop")
            case "abandon":
                bench.holder.abandon(one, FailureClass.DEADLINE, "the budget is spent")
            case "isolate":
                bench.holder.isolate(binding, "peer", "it does not move")
            case "settle":
                bench.holder.settle([one])
            case "result":
                backend.fail(one, FailureClass.PEER_LOST)
            case "shutdown":
                bench.holder.shutdown(0.1)
            case _:
                assert what == "silence"


@pytest.mark.parametrize("what", NOT_EVIDENCE)
def test_nothing_but_evidence_ends_access(what: str) -> None:
    # contract 40, P5
    bench = Bench()
    ticket, lease = bench.submitted_write()
    reader, read_lease = bench.submitted_read()
    do_what_is_no_evidence(bench, what, ticket, reader)
    for _ in range(20):
        bench.round(ticket, reader)
    assert (lease.releases, read_lease.releases) == (0, 0)
    assert not (bench.bits[ticket] | bench.bits[reader]) & Fact.ACCESS_ENDED


@pytest.mark.parametrize("evidence", list(Evidence))
def test_each_kind_of_evidence_ends_access_under_its_own_bit(evidence: Evidence) -> None:
    # contract 41
    bench = Bench()
    ticket, lease = bench.submitted_write()
    bench.pull.deliver(ticket, evidence=evidence)
    bench.round(ticket)
    assert lease.releases == 1
    assert bench.reported(ticket) & int(evidence)


def test_a_lease_counts_as_accessed_before_its_order_leaves() -> None:
    # contract 42
    seen: list[int] = []

    class Watching(ManualBackend):
        def submit(self, order: Order) -> None:
            seen.append(bench.holder.statistics().bindings[0].open_attempts)
            super().submit(order)

    bench = Bench(pull=Watching("pull"))
    bench.submitted_write()
    assert seen == [1]


def test_doubt_leaves_only_by_evidence_for_the_same_attempt() -> None:
    # contract 43
    bench = Bench()
    ticket, lease = bench.write()
    bench.pull.faults.plant("submit", RuntimeError("surprise"))
    bench.round()
    bench.pull.tell(Change(ticket, 2, None, Evidence.COMPLETED))
    bench.serve.tell(Change(ticket, 1, None, Evidence.COMPLETED))
    bench.pull.tell(Change(ticket + 1, 1, None, Evidence.COMPLETED))
    bench.round(ticket)
    bench.round(ticket)
    assert lease.releases == 0
    statistics = bench.holder.statistics()
    assert [record.contradictions for record in statistics.bindings] == [2, 1]


def test_a_contradicting_result_makes_later_evidence_worthless() -> None:
    # contract 44
    bench = Bench()
    ticket, lease = bench.submitted_write()
    bench.pull.deliver(ticket, evidence=None)
    bench.pull.fail(ticket, evidence=Evidence.COMPLETED)
    bench.pull.end(ticket)
    for _ in range(3):
        bench.round(ticket)
    assert lease.releases == 0
    assert not bench.bits[ticket] & Fact.ACCESS_ENDED, "nobody may tell the source that access has ended"
    assert any(d.failure is FailureClass.CONTRADICTION for d in bench.details)
    assert bench.holder.statistics().retained == 1


def test_a_contradiction_after_access_end_keeps_the_lease() -> None:
    # contract 44
    bench = Bench()
    ticket, lease = bench.submitted_write()
    bench.pull.deliver(ticket)
    bench.pull.fail(ticket)
    bench.round(ticket)
    assert lease.releases == 0


def test_an_answer_for_a_lease_that_was_not_submitted_advances_nothing() -> None:
    # contract 44
    bench = Bench()
    ticket, _ = bench.write(hint=HELD_BACK)
    bench.round()
    bench.pull.tell(Change(ticket, 0, Delivered((True,), 1_000), Evidence.COMPLETED))
    bench.round()
    assert not bench.holder.bits(ticket) & (Fact.DELIVERED | Fact.ACCESS_ENDED)


def test_a_late_word_about_a_returned_lease_changes_nothing_and_loses_nothing() -> None:
    # contract 45, contract 46
    bench = Bench()
    ticket, lease = bench.submitted_write()
    bench.holder.abandon(ticket, FailureClass.DEADLINE, "the budget is spent")
    bench.pull.end(ticket, Evidence.ENDPOINT_DESTROYED)
    bench.round(ticket)
    assert lease.releases == 1
    bits = bench.reported(ticket)
    bench.pull.deliver(ticket)
    bench.round(ticket)
    assert (lease.releases, bench.reported(ticket)) == (1, bits)


def test_success_after_failure_frees_memory_and_does_not_change_the_outcome() -> None:
    # contract 46
    bench = Bench()
    ticket, lease = bench.write()
    bench.pull.faults.plant("submit", RuntimeError("surprise"))
    bench.round()
    bench.pull.deliver(ticket)
    bench.round(ticket)
    assert lease.releases == 1
    assert lease.marks == [(False,)]
    assert not bench.reported(ticket) & (Fact.DELIVERED | Fact.CONSUMED)


def test_tickets_are_never_reused() -> None:
    # contract 48
    bench = Bench()
    tickets = []
    for _ in range(5):
        ticket, _ = bench.submitted_write()
        bench.pull.deliver(ticket)
        bench.round(ticket)
        tickets.append(ticket)
    assert tickets == sorted(set(tickets))


# -------------------------------------------------------------------------------------------------------- shutdown


def test_shutdown_is_complete_only_when_all_came_back_and_the_hold_is_released_last() -> None:
    # contract 54, contract 55, contract 56, R15
    bench = Bench()
    ticket, lease = bench.submitted_write()
    first = bench.holder.shutdown(0.5)
    assert (first.complete, first.held, first.retained) == (False, 1, 1)
    assert first.bindings_open == ("pull",)
    assert bench.pull.cancels == [(ticket, 1)]
    assert bench.pull.holds_released == 0
    bench.pull.end(ticket)
    second = bench.holder.shutdown(0.5)
    assert second.complete
    assert lease.releases == 1
    assert lease.marks == [(False,)]
    assert (bench.pull.holds_released, bench.serve.holds_released) == (1, 1)
    assert bench.holder.shutdown(0.5) == second
    assert bench.pull.holds_released == 1


def test_an_incomplete_shutdown_keeps_everything_however_often_it_is_repeated() -> None:
    # contract 54, contract 56, R16
    bench = Bench()
    bench.submitted_write()
    _, read_lease = bench.submitted_read()
    for _ in range(10):
        assert not bench.holder.shutdown(0.0).complete
    assert read_lease.releases == 0
    assert len(bench.lender.out) == 2
    assert bench.pull.holds_released + bench.serve.holds_released == 0


def test_what_was_agreed_before_shutdown_still_becomes_content() -> None:
    bench = Bench()
    ticket, lease = bench.submitted_write()
    bench.pull.deliver(ticket, evidence=None)
    bench.round(ticket)
    bench.holder.shutdown(0.0)
    bench.pull.end(ticket)
    assert bench.holder.shutdown(0.0).complete
    assert lease.marks == [(True,)]


def test_shutdown_gives_up_what_was_settled_before_its_result_was_fixed() -> None:
    # contract 54; found by the model
    bench = Bench()
    ticket, lease = bench.write(hint=HELD_BACK)
    bench.round(ticket)
    assert bench.holder.shutdown(0.0).complete
    assert lease.releases == 1


def test_a_lease_taken_during_shutdown_is_owned_and_becomes_a_fact() -> None:
    # R2, R17, contract 10
    bench = Bench()
    bench.submitted_write()
    bench.holder.shutdown(0.0)
    ticket, lease = bench.write()
    bench.round()
    assert bench.bits[ticket] & Fact.FAILED
    assert bench.details[-1].failure is FailureClass.SHUTDOWN
    bench.holder.shutdown(0.0)
    assert lease.releases == 1


@pytest.mark.parametrize("method", ["shutdown", "changes", "release_hold", "cancel"])
def test_shutdown_never_raises_and_is_not_complete_while_a_backend_does(method: str) -> None:
    # R15, R16, contract 35
    bench = Bench()
    ticket, _ = bench.submitted_write()
    bench.pull.faults.plant(method, RuntimeError("surprise"))
    left = bench.holder.shutdown(0.0)
    bench.pull.end(ticket)
    for _ in range(3):
        left = bench.holder.shutdown(0.0)
    assert left.complete is (method == "cancel")
    bench.round()
    assert any(method in d.text for d in bench.details) or method in {"changes", "cancel", "shutdown"}


def test_a_hold_is_never_released_under_a_lease_whose_return_failed() -> None:
    # contract 55
    bench = Bench()
    ticket, lease = bench.submitted_write()
    lease.faults.plant("release", OSError("pool is gone"))
    bench.pull.deliver(ticket)
    bench.round(ticket)
    left = [bench.holder.shutdown(0.0) for _ in range(3)]
    assert {(one.complete, one.bindings_open) for one in left} == {(False, ("pull",))}
    assert bench.pull.holds_released == 0


# ------------------------------------------------------------------------------------------ the redesign's rules


def test_taking_always_takes_also_when_the_binding_is_stopped() -> None:
    # R2
    bench = Bench()
    bench.pull.faults.plant("changes", RuntimeError("surprise"))
    bench.round()
    bench.pull.faults.remove("changes")
    ticket, lease = bench.write()
    bench.round()
    assert bench.bits[ticket] & Fact.FAILED
    bench.round(ticket)
    assert lease.releases == 1


def test_taking_from_a_stopped_lender_is_a_fact_and_the_lease_is_retained() -> None:
    # R2, R5, contract 7
    bench = Bench()
    bench.lender.faults.plant("progress", RuntimeError("surprise"))
    bench.round()
    ticket, lease = bench.write()
    bench.round(ticket)
    bench.round(ticket)
    assert bench.bits[ticket] & Fact.LENDER_STOPPED
    assert (lease.releases, lease.polls) == (0, 0)


def test_hint_and_timeout_go_to_the_backend_as_they_came() -> None:
    # R3
    bench = Bench()
    hint = object()
    lease = bench.lender.lend(Direction.WRITE)
    ticket = bench.holder.take(lease, PULL, hint, 1.5, now=0.0, peer="peer")
    bench.round()
    order = bench.pull.orders[ticket]
    assert order.hint is hint
    assert (order.timeout_s, order.peer, order.direction, order.attempt) == (1.5, "peer", Direction.WRITE, 1)


def test_an_order_given_before_or_after_the_grant_is_submitted_once() -> None:
    bench = Bench()
    early, early_lease = bench.write(hint=HELD_BACK, granted=False)
    late, _ = bench.write(hint=HELD_BACK)
    bench.holder.assign(early, "grant")
    bench.round()
    assert bench.pull.orders == {}
    early_lease.grant()
    bench.holder.assign(late, "grant")
    bench.round()
    assert set(bench.pull.orders) == {early, late}
    assert bench.holder.statistics().bindings[0].submissions == 2


def test_an_idle_round_asks_each_part_once_whatever_is_held() -> None:
    # R4
    bench = Bench(retained_max=10_000)
    for _ in range(500):
        bench.write(hint=HELD_BACK)
        bench.write(granted=False)
    bench.round()
    bench.note(bench.holder.collect())
    before = (bench.pull.changes_calls, bench.lender.progress_calls, sum(x.polls for x in bench.lender.out.values()))
    assert not bench.round()
    after = (bench.pull.changes_calls, bench.lender.progress_calls, sum(x.polls for x in bench.lender.out.values()))
    assert after == (before[0] + 1, before[1] + 1, before[2])


def test_only_what_changed_is_reported() -> None:
    # R4, R5
    bench = Bench()
    tickets = [bench.submitted_write()[0] for _ in range(5)]
    bench.round()
    bench.round()
    bench.pull.deliver(tickets[2])
    assert [line[0] for line in bench.round().lines] == [tickets[2]]


def test_a_lender_with_unsettled_decisions_is_passed_over() -> None:
    # R4
    bench = Bench()
    ticket, lease = bench.write(granted=False)
    bench.round()
    lease.grant()
    bench.holder.advance({"lender"})
    assert ticket not in bench.pull.orders
    bench.holder.advance()
    assert ticket in bench.pull.orders


def test_the_bounds_of_a_write_are_zero_until_the_result_is_fixed_and_then_written_once() -> None:
    # R5, P17
    bench = Bench()
    lease = bench.lender.lend(Direction.WRITE, 4, first_ordinal=10)
    ticket = bench.holder.take(lease, PULL, "grant", now=0.0)
    facts = bench.round()
    assert facts.columns[3:] == [(0,), (0,)]
    bench.round()
    bench.pull.deliver(ticket, [True, True, False, True])
    facts = bench.round()
    assert facts.columns[3:] == [(10,), (12,)]
    facts = bench.round(ticket)
    assert lease.bounds_asked == 1


def test_the_audit_rows_tell_a_leases_story() -> None:
    # R5
    bench = Bench()
    ticket, lease = bench.submitted_write(rows=2)
    view = bench.holder.view(ticket)
    assert view is not None
    bench.pull.deliver(ticket, [True, False])
    rows = [row for _ in range(3) for row in bench.round(ticket).rows]
    assert rows == [
        GrantedRow(ticket, "t1", 0, True, "lender", "peer", view.pages, view.counters),  # noqa: FBT003 - a column
        AttemptRow(ticket, 1, "pull", "peer"),
        OutcomeRow(ticket, 1, "delivered", 1, 1_000, "completed", FailureClass.NONE, ""),
    ]
    assert lease.rank == 0


def test_a_binding_that_retains_too_much_takes_no_more_work() -> None:
    # R18
    bench = Bench(retained_max=2)
    for _ in range(2):
        ticket, _ = bench.submitted_write()
        bench.holder.abandon(ticket, FailureClass.DEADLINE, "the budget is spent")
    refused, _ = bench.write()
    bench.round()
    assert refused not in bench.pull.orders
    assert "retains 2 leases" in bench.details[-1].text
    first = min(bench.pull.orders)
    bench.pull.end(first)
    bench.round(first)
    ticket, _ = bench.submitted_write()


def test_an_isolated_peer_is_told_to_the_backend_once_and_readmitted_on_request() -> None:
    # R18
    bench = Bench()
    waiting, _ = bench.write(hint=HELD_BACK)
    bench.round()
    bench.holder.isolate("pull", "peer", "it does not move")
    bench.holder.isolate("pull", "peer", "it does not move")
    assert bench.pull.isolations == ["peer"]
    bench.holder.assign(waiting, "grant")
    bench.round()
    assert waiting not in bench.pull.orders
    bench.holder.readmit("pull", "peer")
    ticket, _ = bench.submitted_write()
    assert ticket in bench.pull.orders


def test_a_stopped_binding_lets_its_memory_go_once_it_retains_nothing() -> None:
    # R14, R15, contract 55
    bench = Bench()
    ticket, lease = bench.submitted_write()
    bench.pull.faults.plant("isolate", RuntimeError("surprise"))
    bench.holder.isolate("pull", "other", "it does not move")
    bench.round()
    assert bench.pull.holds_released == 0
    bench.pull.deliver(ticket)
    bench.round(ticket)
    assert lease.releases == 1
    assert bench.pull.holds_released == 1
    calls = bench.pull.changes_calls
    bench.round()
    assert bench.pull.changes_calls == calls, "a backend whose memory is gone is left alone"


@pytest.mark.parametrize("method", ["poll", "failure", "bounds", "release", "mark_arrived"])
def test_a_lease_that_raises_stops_its_lender_and_never_the_worker(method: str) -> None:
    # R21
    bench = Bench()
    ticket, lease = bench.write(granted=method != "failure")
    lease.faults.plant(method, KeyError("surprise"))
    bench.round()
    if ticket in bench.pull.orders:
        bench.pull.deliver(ticket)
    for _ in range(3):
        bench.round(ticket)
    assert lease.faults.raised == [method]
    assert bench.holder.statistics().lenders_stopped == ("lender",)
    assert any(d.failure is FailureClass.LENDER_STOPPED and method in d.text for d in bench.details) or (
        method in {"release", "mark_arrived"}
    )


@pytest.mark.parametrize("method", ["changes", "cancel", "isolate"])
def test_a_backend_that_raises_stops_its_binding_and_no_other(method: str) -> None:
    # R21
    bench = Bench()
    ticket, _ = bench.submitted_write()
    bench.pull.faults.plant(method, ValueError("surprise"))
    bench.holder.cancel(ticket, "stop")
    bench.holder.isolate("pull", "peer", "it does not move")
    bench.round()
    pull, serve = bench.holder.statistics().bindings
    assert (pull.accepting, serve.accepting) == (False, True)
    bench.submitted_read()


def test_misuse_of_a_ticket_is_a_contradiction_of_ours() -> None:
    bench = Bench()
    with pytest.raises(LedgerContradictionError, match="no such lease is held"):
        bench.holder.assign(7, "grant")
    with pytest.raises(LedgerContradictionError, match="no such lease is held"):
        bench.holder.cancel(7, "stop")
    with pytest.raises(LedgerContradictionError, match="no such lease is held"):
        bench.holder.abandon(7, FailureClass.CANCELLED, "stop")


def test_the_holder_says_what_it_holds() -> None:
    bench = Bench()
    assert repr(bench.holder) == "<LeaseHolder held=0 retained=0 oldest=none>"
    assert (bench.holder.view(1), bench.holder.bits(1)) == (None, 0)
    ticket, _ = bench.submitted_write()
    bench.holder.abandon(ticket, FailureClass.DEADLINE, "the budget is spent")
    assert repr(bench.holder) == f"<LeaseHolder held=1 retained=1 oldest=T{ticket}>"
    assert "abandoned" in fact_names(bench.holder.bits(ticket))
    statistics = bench.holder.statistics()
    assert (statistics.taken, statistics.held, statistics.returned, statistics.retained) == (1, 1, 0, 1)
