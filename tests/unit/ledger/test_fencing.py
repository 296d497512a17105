"""A read lease may go back fenced: on request, after isolation, with FENCED as a class of its own; a write never."""

import pytest

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.facts import EVIDENCE_BITS, Evidence, Fact, FailureClass, LeaseFacts, OutcomeRow
from kvbus.ledger.held import Stage, stage_of
from kvbus.ledger.types import Delivered, LeaseFailure
from kvbus.testing.ledger_parts import ListedLease
from tests.unit.ledger.bench import HELD_BACK, RETURNED, Bench

SILENT = "its host has no power"


def lent(bench: Bench, *, isolated: bool = True, rows: int = 2) -> tuple[int, ListedLease]:
    """A read lease whose reader may be reading; isolated unless said otherwise."""
    ticket, lease = bench.submitted_read(rows)
    if isolated:
        bench.holder.isolate("serve", "peer", SILENT)
    bench.round()
    return ticket, lease


def stays(bench: Bench, ticket: int, lease: ListedLease) -> None:
    """The lease is held as before, and nobody has raised anything."""
    bench.round()
    assert ticket in bench.holder.tickets()
    assert not bench.holder.bits(ticket) & Fact.FENCED
    assert (lease.fences, lease.releases) == (0, 0)


def rows_of(facts: LeaseFacts) -> list[OutcomeRow]:
    return [row for row in facts.rows if isinstance(row, OutcomeRow)]


def test_a_fenced_read_goes_back_once_and_access_is_not_said_to_have_ended() -> None:
    # P5, contract 1, 2
    bench = Bench()
    ticket, lease = lent(bench)
    assert bench.holder.fence(ticket, SILENT) == ""
    assert stage_of(bench.holder.bits(ticket)) is Stage.FENCED
    assert (lease.fences, lease.releases) == (1, 0), "raised first, returned by the round"
    facts = bench.round()
    assert [(row.evidence, row.failure, row.text) for row in rows_of(facts)] == [
        ("fenced", FailureClass.PEER_LOST, SILENT)
    ]
    bits = bench.reported(ticket)
    assert bits & Fact.FENCED
    assert bits & RETURNED
    assert not bits & (Fact.ACCESS_ENDED | EVIDENCE_BITS | Fact.SETTLED | Fact.CONSUMED)
    assert lease.releases == 1
    assert bench.holder.statistics().bindings[1].ends == {"fenced": 1}
    assert bench.holder.statistics().bindings[1].open_attempts == 0


def test_a_read_that_was_given_up_before_is_fenced_too() -> None:
    # P5, contract 8
    bench = Bench()
    ticket, lease = lent(bench)
    bench.holder.abandon(ticket, FailureClass.DEADLINE, "nobody waits")
    bench.round()
    assert bench.holder.statistics().bindings[1].retained == 1
    assert bench.holder.fence(ticket, SILENT) == ""
    bench.round()
    assert lease.releases == 1
    assert bench.holder.statistics().bindings[1].retained == 0


def test_a_reader_that_is_not_isolated_is_not_fenced() -> None:
    # P5
    bench = Bench()
    ticket, lease = lent(bench, isolated=False)
    assert "not isolated" in bench.holder.fence(ticket, SILENT)
    stays(bench, ticket, lease)


@pytest.mark.parametrize("isolated", [False, True])
def test_no_time_no_round_and_no_shutdown_fences(*, isolated: bool) -> None:
    # P5, contract 40, R13
    bench = Bench()
    ticket, lease = lent(bench, isolated=isolated)
    bench.holder.cancel(ticket, "not wanted")
    bench.holder.abandon(ticket, FailureClass.DEADLINE, "the budget is spent")
    for _ in range(100):
        bench.round()
        bench.holder.shutdown(0.0)
    stays(bench, ticket, lease)


def test_a_write_is_never_fenced() -> None:
    # P5
    bench = Bench()
    ticket, lease = bench.submitted_write()
    bench.holder.isolate("pull", "peer", SILENT)
    assert "a write is never fenced" in bench.holder.fence(ticket, SILENT)
    stays(bench, ticket, lease)


def test_a_write_that_carries_the_bit_all_the_same_stays() -> None:
    # P5, contract 3: asserted at a second place
    bench = Bench()
    ticket, lease = bench.submitted_write()
    bench.holder._held[ticket].fence()  # as a fault would
    bench.holder.settle([ticket])
    bench.holder.finish()
    assert ticket in bench.holder.tickets()
    assert lease.releases == 0


def test_where_nobody_reads_there_is_nothing_to_fence() -> None:
    # P5, contract 5
    bench = Bench()
    waiting, lease = bench.read(hint=HELD_BACK)
    bench.round()
    assert "nothing to fence" in bench.holder.fence(waiting, SILENT)
    stays(bench, waiting, lease)
    ended, _ = lent(bench)
    bench.serve.deliver(ended, evidence=Evidence.PEER_ACK)
    bench.holder.collect()
    assert "nothing to fence" in bench.holder.fence(ended, SILENT)
    bench.holder.finish()
    with pytest.raises(LedgerContradictionError):
        bench.holder.fence(ended, SILENT)


def test_what_the_lender_refuses_stays_as_it_is() -> None:
    # P5
    bench = Bench()
    ticket, lease = lent(bench)
    bench.lender.fence_refused = LeaseFailure(FailureClass.LEASE_REFUSED, "nobody knows its salt")
    assert bench.holder.fence(ticket, SILENT) == "nobody knows its salt"
    stays(bench, ticket, lease)
    bench.lender.fence_refused = None
    assert bench.holder.fence(ticket, SILENT) == ""


def test_a_lender_that_cannot_raise_generations_is_stopped_and_keeps_the_lease() -> None:
    # P5, R21, contract 7
    bench = Bench()
    ticket, lease = lent(bench)
    lease.faults.plant("fence", OSError("the table cannot be written"))
    assert "lender 'lender' is stopped" in bench.holder.fence(ticket, SILENT)
    stays(bench, ticket, lease)
    assert "lender is stopped" in bench.holder.fence(ticket, SILENT)


@pytest.mark.parametrize("method", ["fence_refusal", "fenced"])
def test_a_backend_that_raises_stops_its_binding_alone(method: str) -> None:
    # P5, R21
    bench = Bench()
    ticket, lease = lent(bench)
    bench.serve.faults.plant(method, OSError("gone"))
    answer = bench.holder.fence(ticket, SILENT)
    assert not bench.holder.statistics().bindings[1].accepting
    if method == "fence_refusal":
        assert "is stopped" in answer
        stays(bench, ticket, lease)
    else:  # the generations were raised: nothing that the backend says can make its reader deliver
        assert answer == ""
        bench.round()
        assert lease.releases == 1


def test_the_word_of_a_backend_that_contradicted_itself_fences_nothing() -> None:
    # P5, contract 44
    bench = Bench()
    ticket, lease = lent(bench)
    bench.serve.answer(ticket, Delivered((True, True), 1), None)
    bench.round()
    bench.serve.answer(ticket, Delivered((True, False), 1), None)
    bench.round()
    assert "contradicted itself" in bench.holder.fence(ticket, SILENT)
    stays(bench, ticket, lease)


def test_what_cannot_be_fenced_says_so() -> None:
    # P5, R11
    class Plain(ListedLease):
        fence = None  # type: ignore[assignment]

    bench = Bench()
    ticket, lease = lent(bench)
    lease.__class__ = Plain
    assert "cannot fence" in bench.holder.fence(ticket, SILENT)


def test_the_last_word_of_a_fenced_reader_returns_nothing_twice() -> None:
    # P5, contract 1, 5, 44
    bench = Bench()
    ticket, lease = lent(bench)
    bench.holder.fence(ticket, SILENT)
    bench.serve.deliver(ticket, evidence=Evidence.PEER_ACK)  # it was fenced just as it spoke
    bench.round()
    bench.serve.deliver(ticket, evidence=Evidence.PEER_ACK)
    bench.round()
    assert lease.releases == 1
    assert not bench.reported(ticket) & Fact.ACCESS_ENDED
