"""What holding costs is counted on the real holder: who blocks whom, what is kept in vain, and since when."""

import pytest

from kvbus.ledger.admission import AdmissionGate, Verdict
from kvbus.ledger.binding import BindingStatistics
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.held import Stage
from kvbus.ledger.holding import HoldingCost, holding_cost
from kvbus.ledger.types import Direction, SubmissionRejectedError
from tests.unit.ledger.bench import PULL, SERVE, Bench


def pull(bench: Bench) -> BindingStatistics:
    return bench.holder.statistics().bindings[0]


def serve(bench: Bench) -> BindingStatistics:
    return bench.holder.statistics().bindings[1]


def given_up(bench: Bench, rows: int = 3) -> int:
    """A write lease that nobody waits for any more, although bytes may still come in."""
    ticket, _ = bench.submitted_write(rows)
    bench.holder.abandon(ticket, FailureClass.DEADLINE, "the budget is spent")
    bench.round()
    return ticket


# ---------------------------------------------------------------------------------------------------------- who waits


def test_a_scheduler_sees_which_leases_keep_requests_from_running() -> None:
    # R19
    bench = Bench()
    assert bench.holder.blocking() == ()
    waiting, _ = bench.write(2, granted=False)
    moving, _ = bench.submitted_write(3)
    bench.submitted_read(4)  # whoever reads keeps nobody from running
    first, second = bench.holder.blocking()
    assert (first.ticket, first.transfer, first.pages, first.stage) == (waiting, "t1", 0, Stage.TAKEN)
    assert (second.ticket, second.lender, second.pages, second.stage) == (moving, "lender", 3, Stage.SUBMITTED)
    assert second.held_s(7.5) == 7.5


def test_a_lease_blocks_until_it_has_come_back_and_no_longer() -> None:
    # R19, contract 3, 25
    bench = Bench()
    ticket, _ = bench.submitted_write(2)
    bench.pull.deliver(ticket)
    bench.round()
    (blocking,) = bench.holder.blocking()
    assert blocking.stage is Stage.ACCESS_ENDED, "whole, and not settled yet"
    bench.round(ticket)
    assert bench.holder.blocking() == ()


def test_a_lease_that_belongs_to_no_transfer_blocks_nobody() -> None:
    # R19
    bench = Bench()
    bench.holder.take(bench.lender.lend(Direction.WRITE, 2), PULL, "own", now=0.0, peer="engine")
    bench.round()
    assert bench.holder.blocking() == ()


# -------------------------------------------------------------------------------------------------- what it all costs


def test_pages_of_leases_that_nobody_waits_for_are_counted_by_lender_and_by_binding() -> None:
    # R20, R18
    bench = Bench()
    lease = bench.other_lender.lend(Direction.READ, 5)
    other = bench.holder.take(lease, SERVE, "reader", now=4.0, peer="peer", transfer="t2")
    kept = given_up(bench)
    assert holding_cost(bench.holder.statistics()).pages_kept == {"lender": 3}, "in use, the others are no cost"
    bench.holder.abandon(other, FailureClass.DEADLINE, "nobody waits")
    bench.round()
    cost = holding_cost(bench.holder.statistics(), quarantined=2, bound=9)
    assert cost.pages_kept == {"lender": 3, "other": 5}
    assert cost.leases_retained == {"pull": 1, "serve": 1}
    assert cost.pages == 3 + 5 + 2, "what a fence binds to one salt is of use to that"
    assert (cost.oldest_s(10.0), serve(bench).retained_s(10.0)) == (10.0, 6.0)
    for ticket, backend in ((kept, bench.pull), (other, bench.serve)):
        backend.end(ticket)
    bench.round(kept)
    bench.round()
    cost = holding_cost(bench.holder.statistics())
    assert (cost.pages, cost.oldest_s(10.0), cost.leases_retained) == (0, 0.0, {"pull": 0, "serve": 0})


def test_a_lease_whose_pages_were_never_given_out_costs_nothing() -> None:
    # R20
    bench = Bench()
    ticket, _ = bench.write(4, granted=False)
    bench.holder.abandon(ticket, FailureClass.DEADLINE, "nobody waits")
    bench.round()
    assert holding_cost(bench.holder.statistics()).pages == 0


@pytest.mark.parametrize(("quarantined", "verdict"), [(0, Verdict.ACCEPTED), (4, Verdict.SKIPPED_BUSY)])
def test_admission_refuses_while_too_much_is_held_in_vain_and_quarantine_counts(
    quarantined: int, verdict: Verdict
) -> None:
    # R18, R20
    bench = Bench()
    given_up(bench, rows=4)
    gate = AdmissionGate(
        instance="b",
        source_allow=("a",),
        inflight_max=9,
        dedup_ttl_s=300.0,
        entries_max=100,
        holding=lambda: holding_cost(bench.holder.statistics(), quarantined=quarantined),
        pages_kept_max=8,
    )
    answer = gate.admit("h", request_id="r", source="a", transfer="t", now=0.0)
    assert answer.verdict is verdict
    if verdict is Verdict.SKIPPED_BUSY:
        assert "8 pages are out of use, fewer than 8 may be (4 of leases" in answer.reason
        assert gate.statistics().seen == 0, "it leaves nothing behind"
        bench.pull.end(1)
        bench.round(1)
        assert gate.admit("h", request_id="r", source="a", transfer="t", now=1.0).verdict is Verdict.ACCEPTED


def test_repeats_are_answered_before_anybody_asks_for_the_cost() -> None:
    # R20
    free = HoldingCost({}, {}, 0, 0, None)

    def cost() -> HoldingCost:
        asked.append(len(asked))
        return free

    asked: list[int] = []
    gate = AdmissionGate(
        instance="b",
        source_allow=("a",),
        inflight_max=9,
        dedup_ttl_s=300.0,
        entries_max=100,
        holding=cost,
        pages_kept_max=8,
    )
    assert gate.admit("h", request_id="r", source="a", transfer="t", now=0.0).verdict is Verdict.ACCEPTED
    assert gate.admit("h", request_id="r", source="a", transfer="t", now=0.0).verdict is Verdict.ADOPTED
    assert gate.admit("h", request_id="s", source="a", transfer="t", now=0.0).verdict is Verdict.DEDUPED
    assert asked == [0], "once, for the one new request"


# ----------------------------------------------------------------------------------------------------- least counters


def test_each_end_of_an_attempt_is_counted_by_its_kind() -> None:
    # R24
    bench = Bench()
    kinds = (Evidence.COMPLETED, Evidence.COMPLETED, Evidence.ENDPOINT_DESTROYED)
    for evidence in kinds:
        ticket, _ = bench.submitted_write(2)
        bench.pull.deliver(ticket, evidence=evidence)
        bench.round()
        bench.round(ticket)
    assert pull(bench).ends == {"completed": 2, "endpoint_destroyed": 1}
    assert (pull(bench).submissions, pull(bench).deliveries) == (3, 3)
    assert pull(bench).length_bytes == 6_000
    assert pull(bench).unreturned == 0


def test_bytes_are_those_of_what_counts() -> None:
    # R24, contract 46
    bench = Bench()
    late, _ = bench.submitted_write(2)
    bench.holder.abandon(late, FailureClass.DEADLINE, "the budget is spent")
    bench.pull.deliver(late)
    bench.round()
    failed, _ = bench.submitted_write(2)
    bench.pull.fail(failed, evidence=Evidence.COMPLETED)
    bench.round()
    assert pull(bench).length_bytes == 0


def test_content_that_did_not_come_whole_is_counted_as_left_to_compute() -> None:
    # R24
    bench = Bench()
    for arrived in ((True, True), (True, False)):
        ticket, _ = bench.submitted_write(2)
        bench.pull.deliver(ticket, arrived)
        bench.round()
        bench.round(ticket)
    assert pull(bench).recomputed == 1
    bench.pull.faults.plant("submit", SubmissionRejectedError(FailureClass.TRANSPORT, "not now"))
    ticket, _ = bench.write(2)
    bench.round()
    bench.round(ticket)
    bench.round()
    assert pull(bench).recomputed == 2
    read, _ = bench.submitted_read(2)
    bench.serve.fail(read, evidence=Evidence.PEER_ACK)
    bench.round()
    bench.round()
    assert serve(bench).recomputed == 0, "the source computes nothing"


def test_a_release_is_late_if_nobody_waited_for_the_lease_any_more() -> None:
    # R24, contract 8, 46
    bench = Bench()
    on_time, _ = bench.submitted_write()
    bench.pull.deliver(on_time)
    bench.round()
    bench.round(on_time)
    assert pull(bench).late_releases == 0
    late = given_up(bench)
    assert pull(bench).late_releases == 0
    bench.pull.end(late)
    bench.round(late)
    assert (pull(bench).late_releases, pull(bench).retained) == (1, 0)


def test_isolations_and_stopped_lenders_are_counted() -> None:
    # R24, R18
    bench = Bench()
    bench.holder.isolate("pull", "peer", "silent")
    bench.holder.isolate("pull", "peer", "silent")
    bench.lender.faults.plant("progress", OSError("gone"))
    bench.round()
    assert pull(bench).isolations == 1
    assert bench.holder.statistics().lenders_stopped == ("lender",)


def test_ages_are_of_the_time_that_is_given() -> None:
    # R24
    bench = Bench()
    assert pull(bench).retained_s(5.0) == 0.0
    given_up(bench)
    assert (pull(bench).retained_s(5.0), pull(bench).retained_s(8.5)) == (5.0, 8.5)
