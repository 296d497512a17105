"""Foreign code: a fault of a backend or a lender stays with it, and what stops stays stopped."""

import pytest

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.binding import Binding, Kept
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.foreign import Foreign
from kvbus.ledger.types import Change, Containment, Direction, Order, SubmitMode
from kvbus.testing.ledger_parts import ListedLender, ManualBackend


def foreign(containment: Containment = Containment.ISOLATE_PEER) -> tuple[Foreign, Binding, ManualBackend]:
    backend = ManualBackend()
    binding = Binding("pull", backend, Direction.WRITE, containment)
    return Foreign([binding], [ListedLender()]), binding, backend


def test_the_first_reason_to_stop_stands_and_is_told_once() -> None:
    # R21
    one, binding, _ = foreign()
    one.stop(binding, "first")
    one.stop(binding, "second")
    assert binding.refusal("peer") == (FailureClass.BINDING_STOPPED, "binding 'pull' is stopped: first")
    assert [d.text for d in one.details] == ["pull: first"]
    one.stop_lender("lender", "first")
    one.stop_lender("lender", "second")
    assert one.stopped_lenders == {"lender": "first"}
    assert len(one.details) == 2


def test_what_a_call_returns_comes_through() -> None:
    one, binding, backend = foreign()
    assert one.call(binding, "name", lambda: backend.name) == "manual"
    assert one.call_lender(one.lenders["lender"], "name", lambda: "x") == "x"
    assert binding.stopped is None


@pytest.mark.parametrize("error", [ValueError("x"), LedgerContradictionError("x"), RecursionError("x")])
def test_any_exception_is_contained_and_shown(error: Exception) -> None:
    # R21
    one, binding, backend = foreign()
    backend.faults.plant("changes", error)
    assert one.call(binding, "changes", backend.changes) is None
    assert f"changes raised {error!r}" in binding.stop_text


def test_an_interrupt_is_not_contained() -> None:
    one, binding, _ = foreign()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.call(binding, "changes", interrupt)
    assert binding.stopped is None


def test_a_peer_is_isolated_once_and_others_are_not() -> None:
    # R18
    one, binding, backend = foreign()
    one.isolate(binding, "p", "it does not move")
    one.isolate(binding, "p", "it does not move")
    assert (backend.isolations, binding.isolations) == (["p"], 1)
    refusal = binding.refusal("p")
    assert refusal is not None
    assert refusal[0] is FailureClass.PEER_LOST
    assert binding.refusal("q") is None


@pytest.mark.parametrize(
    ("containment", "peer", "stops"),
    [
        (Containment.ISOLATE_PEER, "p", False),
        (Containment.ISOLATE_PEER, "", True),
        (Containment.STOP_BINDING, "p", True),
    ],
)
def test_an_uncertain_submission_is_contained_as_its_binding_says(
    containment: Containment, peer: str, *, stops: bool
) -> None:
    # R14
    one, binding, backend = foreign(containment)
    one.contain(binding, peer, "uncertain")
    assert (binding.stopped is not None) is stops
    assert backend.isolations == ([] if stops else ["p"])


def test_a_binding_retires_only_when_nothing_is_open_or_unreturned() -> None:
    # R14, contract 55
    one, binding, backend = foreign()
    one.retire()
    assert backend.shutdowns == []
    binding.unreturned = binding.open_attempts = 1
    one.stop(binding, "stop")
    one.retire()
    binding.open_attempts = 0
    one.retire()
    assert backend.holds_released == 0
    binding.unreturned = 0
    one.retire()
    one.retire()
    assert (backend.holds_released, binding.hold_released) == (1, True)
    assert len(backend.shutdowns) == 3


def test_a_hold_that_cannot_be_released_stays_held_and_is_told() -> None:
    # contract 35, contract 55
    one, binding, backend = foreign()
    backend.faults.plant("release_hold", OSError("busy"))
    one.stop(binding, "stop")
    one.retire()
    one.retire()
    assert not binding.hold_released
    assert backend.faults.raised == ["release_hold"]
    assert "release_hold raised" in one.details[-1].text


def test_bounds_of_a_stopped_lender_are_empty_and_not_asked_for() -> None:
    # contract 7
    one, _, _ = foreign()
    lender = one.lenders["lender"]
    assert isinstance(lender, ListedLender)
    lease = lender.lend(Direction.WRITE, 2)
    assert one.bounds(lease, (True, False)) == (0, 1)
    lease.faults.plant("bounds", OSError("gone"))
    assert one.bounds(lease, (True, True)) == (0, 0)
    assert one.bounds(lease, (True, True)) == (0, 0)
    assert lease.bounds_asked == 2


def test_a_binding_counts_what_it_did() -> None:
    # R24
    _, binding, _ = foreign()
    binding.retained.update({1: Kept("lender", 3, 5.0), 2: Kept("lender", 1, 4.0)})
    record = binding.statistics()
    assert (record.name, record.accepting, record.retained, record.submissions) == ("pull", True, 2, 0)
    binding.stopped = FailureClass.BINDING_STOPPED
    assert not binding.statistics().accepting


# ------------------------------------------------------------------------------- the parts that tests drive by hand


def test_the_listed_lease_keeps_the_contract_of_a_lease() -> None:
    # contract 12, 13, 14, 15, 16
    lender = ListedLender()
    lease = lender.lend(Direction.WRITE, 2, granted=False)
    assert lease.poll() is None
    with pytest.raises(LedgerContradictionError, match="out of turn"):
        lease.mark_arrived((True, True))
    lease.grant()
    lease.grant()
    view = lease.poll()
    assert view is not None
    assert lease.poll() is view
    assert view.counters == (1, 1)
    with pytest.raises(LedgerContradictionError, match="after its view"):
        lease.refuse()
    with pytest.raises(ValueError, match="send one bool for each"):
        lease.mark_arrived((True,))
    with pytest.raises(ValueError, match="send one bool for each"):
        lease.bounds((True,))
    lease.mark_arrived((True, False))
    with pytest.raises(LedgerContradictionError, match="out of turn"):
        lease.mark_arrived((True, False))
    assert (lease.bounds((True, True)), lease.bounds((True, False)), lease.bounds((False, True))) == (
        (0, 2), (0, 1), (0, 0),
    )  # fmt: skip
    lease.release()
    lease.release()
    with pytest.raises(LedgerContradictionError, match="released lease is polled"):
        lease.poll()
    assert lender.content == {view.names[0]}
    assert (lender.out, list(lender.progress()), list(lender.progress())) == ({}, [1], [])


def test_a_failed_listed_lease_stays_failed_and_reads_carry_no_mark() -> None:
    # contract 13, contract 14
    lender = ListedLender("l", rank=3)
    lease = lender.lend(Direction.READ, granted=False)
    lease.refuse("no room")
    lease.grant()
    assert lease.poll() is None
    assert lease.failure is not None
    assert lease.failure.text == "no room"
    read = lender.lend(Direction.READ)
    view = read.poll()
    assert view is not None
    assert (view.counters, view.rank, read.rank) == ((2,), 3, 3)
    with pytest.raises(LedgerContradictionError, match="out of turn"):
        read.mark_arrived((True,))
    assert [repr(one) for one in (lease, read, lender)] == [
        "<ListedLease l/1 READ failed>",
        "<ListedLease l/2 READ granted>",
        "<ListedLender l out=2 content=0>",
    ]


def test_the_manual_backend_keeps_orders_open_until_evidence() -> None:
    # contract 29, contract 34
    backend = ManualBackend()
    view = ListedLender().lend(Direction.WRITE, 2).poll()
    assert view is not None
    backend.submit(Order(4, 1, view, Direction.WRITE, "hint", "p", None))
    backend.stop(4, (True, False))
    assert list(backend.shutdown(0.5)) == [(4, 1)]
    with pytest.raises(LedgerContradictionError, match="out of turn"):
        backend.release_hold()
    backend.end(4, Evidence.PEER_ACK)
    first, second = backend.changes()
    assert first.result is not None
    assert second == Change(4, 1, None, Evidence.PEER_ACK)
    assert list(backend.changes()) == []
    backend.release_hold()
    with pytest.raises(LedgerContradictionError, match="out of turn"):
        backend.release_hold()
    assert repr(backend) == "<ManualBackend manual orders=1 open=0>"


def test_a_planted_fault_strikes_until_it_is_removed() -> None:
    backend = ManualBackend()
    backend.faults.plant("changes", OSError("x"))
    for _ in range(2):
        with pytest.raises(OSError, match="x"):
            backend.changes()
    backend.faults.remove("changes")
    backend.faults.remove("changes")
    assert backend.changes() == []
    assert backend.faults.raised == ["changes", "changes"]


def test_a_submit_mode_is_shared_by_all_leases_of_its_kind() -> None:
    # R3
    mode = SubmitMode("pull", Direction.WRITE)
    assert hash(mode) == hash(SubmitMode("pull", Direction.WRITE))
    with pytest.raises(AttributeError):
        mode.binding = "other"  # type: ignore[misc]
