"""A lender's answer that cannot be one stops its domain, as an exception would; and what a batch's columns hold."""

from typing import Any

import pytest

from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.foreign import Foreign
from kvbus.ledger.types import Delivered, Direction, LeaseView
from kvbus.testing.ledger_parts import ListedLease, ListedLender
from tests.unit.ledger.bench import Bench


class Odd(ListedLease):
    """A lease that answers what it was told to."""

    answer: Any = None

    def poll(self) -> LeaseView | None:
        view: LeaseView | None = self.answer
        return view

    def bounds(self, arrived: object) -> tuple[int, int]:
        del arrived
        if isinstance(self.answer, Exception):
            raise self.answer
        bounds: tuple[int, int] = self.answer
        return bounds


def view_of(rows: int, **changes: object) -> LeaseView:
    view = ListedLender().lend(Direction.WRITE, rows).poll()
    assert view is not None
    return view._replace(**changes)  # type: ignore[arg-type] # some are wrong on purpose


def odd(answer: object) -> Odd:
    lease = Odd(ListedLender(), 1, Direction.WRITE, view_of(1))
    lease.answer = answer
    return lease


def test_a_view_whose_columns_are_whole_is_handed_on_unchanged() -> None:
    # R3, R21
    view = view_of(2)
    foreign = Foreign([], [])
    assert foreign.poll(odd(view)) is view
    assert not foreign.stopped_lenders


@pytest.mark.parametrize("column", ["pages", "counters", "names", "ordinals"])
@pytest.mark.parametrize("rows", [[1, 2], (1,), (1, 2, 3), None])
def test_a_view_with_a_column_of_another_kind_or_length_stops_its_lender(column: str, rows: object) -> None:
    # R21
    foreign = Foreign([], [])
    assert foreign.poll(odd(view_of(2, **{column: rows}))) is None
    assert "poll answered" in foreign.stopped_lenders["lender"]
    assert [detail.failure for detail in foreign.details] == [FailureClass.LENDER_STOPPED]


def test_bounds_are_a_pair_of_integers() -> None:
    # R21
    foreign = Foreign([], [])
    assert foreign.bounds(odd((2, 3)), (True,)) == (2, 3)
    assert not foreign.stopped_lenders


@pytest.mark.parametrize("said", [None, (1,), (1, 2, 3), [1, 2], (1, "2"), ("1", 2), (True, False), (1.0, 2), "12"])
def test_bounds_that_are_anything_else_count_as_none_and_stop_their_lender(said: object) -> None:
    # R21
    foreign = Foreign([], [])
    assert foreign.bounds(odd(said), (True,)) == (0, 0)
    assert "bounds answered" in foreign.stopped_lenders["lender"]


def test_bounds_that_raise_count_as_none_and_stop_their_lender() -> None:
    # R21
    foreign = Foreign([], [])
    assert foreign.bounds(odd(RuntimeError("planted")), (True,)) == (0, 0)
    assert "bounds raised RuntimeError('planted')" in foreign.stopped_lenders["lender"]


def test_a_batch_names_rank_and_bounds_of_each_lease_that_changed() -> None:
    # R5
    bench = Bench(lender=ListedLender(rank=3))
    (first, _), (second, _) = bench.submitted_write(2), bench.submitted_write(3)
    bench.pull.answer(second, Delivered((True, True, False), 2_000), Evidence.COMPLETED)
    tickets, ranks, _, lows, ends = bench.holder.collect().columns
    assert (tickets, ranks, lows, ends) == ((second,), (3,), (0,), (2,))
    bench.pull.answer(first, Delivered((True, True), 2_000), Evidence.COMPLETED)
    bench.round(second)
    tickets, ranks, _, lows, ends = bench.holder.collect().columns
    assert (tickets, ranks, lows, ends) == ((second,), (3,), (0,), (2,))
