"""Leases on pages: what is lent, what a refusal changes, and when pages come back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.facts import FailureClass
from kvbus.ledger.types import Direction, LeaseView
from kvbus.pool.lease import PoolLease
from kvbus.pool.lender import PoolLender, lender_over
from tests.unit.pool_parts import EPOCH, TOY, fill, names_of, small_lender

NAMES = names_of(12)


def view_of(lease: PoolLease) -> LeaseView:
    view = lease.poll()
    assert view is not None, lease.failure
    return view


def counts(lender: PoolLender) -> tuple[int, int, int, int]:
    lender.check()
    pages = lender.statistics().pages
    return pages.free, pages.writing, pages.cached, pages.quarantined


def refused(lease: PoolLease) -> str:
    assert lease.poll() is None
    assert lease.failure is not None
    assert lease.failure.failure is FailureClass.LEASE_REFUSED
    return lease.failure.text


# --- lending for reading ---


@pytest.mark.contract("P9")
def test_the_longest_held_prefix_is_lent_with_its_generations() -> None:
    lender = small_lender()
    pages = fill(lender, NAMES[:3])
    lease = lender.lend_read(NAMES[:5], 7)
    view = view_of(lease)
    assert view == LeaseView(TOY.fingerprint(), 0, EPOCH, (7, 8, 9), NAMES[:3], pages, (2, 2, 2))
    assert lease.direction is Direction.READ
    assert lease.lender is lender
    assert (lease.rank, lender.rank, lender.name) == (0, 0, "pool")


@pytest.mark.contract("30")
def test_a_miss_is_an_empty_view_and_no_failure() -> None:
    lender = small_lender()
    assert view_of(lender.lend_read(NAMES[:2])).pages == ()
    assert view_of(lender.lend_read(())).pages == ()
    assert counts(lender) == (8, 0, 0, 0)


def test_a_whole_read_is_refused_with_numbers_where_something_is_missing() -> None:
    lender = small_lender()
    fill(lender, NAMES[:3])
    assert "5 pages asked for as a whole, only the first 3" in refused(lender.lend_read(NAMES[:5], whole=True))
    assert view_of(lender.lend_read(NAMES[:3], whole=True)).names == NAMES[:3]


@pytest.mark.contract("5")
def test_pages_lent_twice_come_back_when_both_readers_returned_them() -> None:
    lender = small_lender(3)
    fill(lender, NAMES[:3])
    first, second = lender.lend_read(NAMES[:3]), lender.lend_read(NAMES[:2])
    first.release()
    first.release()
    assert lender.evict(NAMES) == 1
    assert lender.held(NAMES[:3]) == [True, True, False]
    second.release()
    assert lender.evict(NAMES) == 2
    assert counts(lender) == (3, 0, 0, 0)


@pytest.mark.contract("P9")
def test_a_lent_page_is_never_evicted_for_room() -> None:
    lender = small_lender(4)
    fill(lender, NAMES[:4])
    lease = lender.lend_read(NAMES[:3])
    assert "2 pages asked for, 1 can be had: of 4, 0 are free, 1 may be evicted" in refused(
        lender.lend_write(names_of(2, prompt=2), (0, 1), for_peer=False)
    )
    assert lender.held(NAMES[:4]) == [True] * 4
    fill(lender, names_of(1, prompt=2), byte=9)
    assert lender.held(NAMES[:4]) == [True, True, True, False]
    for page in view_of(lease).pages:
        assert set(lender.memory.page_bytes(page)) == {1}
    lender.check()


def test_a_prompts_end_is_evicted_before_its_beginning() -> None:
    lender = small_lender(4)
    fill(lender, NAMES[:4])
    fill(lender, names_of(1, prompt=2))
    assert lender.held(NAMES[:4]) == [True, True, True, False]
    lender.lend_read(NAMES[:3]).release()
    fill(lender, names_of(2, prompt=3))
    assert lender.held(NAMES[:4]) == [True, True, False, False]


# --- lending for writing ---


@pytest.mark.contract("P1")
def test_generations_are_raised_before_the_view_is_handed_out() -> None:
    lender = small_lender()
    lease = lender.lend_write(NAMES[:2], (0, 1))
    generations = lender.memory.generations
    records = [generations.read(page) for page in lease.pages]
    assert [record.counter for record in records if record] == [1, 1]
    assert view_of(lease).counters == (1, 1)
    assert lease.direction is Direction.WRITE


@pytest.mark.contract("P1")
def test_a_page_that_was_evicted_for_room_has_a_new_generation_before_it_is_written() -> None:
    lender = small_lender(1)
    fill(lender, NAMES[:1])
    lease = lender.lend_write(NAMES[1:2], (0,))
    assert lender.held(NAMES[:2]) == [False, False]
    assert view_of(lease).counters == (3,)
    record = lender.memory.generations.read(0)
    assert record is not None
    assert not record.sealed


@pytest.mark.contract("12")
def test_the_view_is_the_same_each_time_and_none_after_failure() -> None:
    lender = small_lender(2)
    lease = lender.lend_write(NAMES[:2], (0, 1))
    assert lease.poll() is lease.poll()
    failed = lender.lend_write(NAMES[2:3], (0,))
    assert failed.poll() is None
    lease.release()
    failed.release()
    for released in (lease, failed):
        with pytest.raises(LedgerContradictionError, match="released lease is polled"):
            released.poll()


@pytest.mark.contract("13")
def test_a_refused_lease_changed_nothing() -> None:
    lender = small_lender(4, reserve=2)
    fill(lender, NAMES[:3])
    before = lender.statistics().pages
    failed = [
        lender.lend_write(names_of(3, prompt=2), (0, 1, 2)),
        lender.lend_read(NAMES[:3]),
        lender.lend_read(NAMES[:4], whole=True),
    ]
    assert all(lease.failure for lease in failed)
    assert lender.statistics().pages == before
    assert lender.held(NAMES[:4]) == [True, True, True, False]
    for lease in failed:
        lease.release()
        lease.release()
        assert lease.pages == lease.counters == ()
        assert lease.bounds([]) == (0, 0)
    assert lender.statistics().refusals == 3
    lender.check()


@pytest.mark.contract("16")
@pytest.mark.parametrize(
    ("names", "ordinals", "error"),
    [
        (NAMES[:2], (0,), ValueError),
        (NAMES[:2], (1, 0), ValueError),
        (NAMES[:2], (1, 1), ValueError),
        (NAMES[:2], (-1, 0), ValueError),
        (NAMES[:1], (1 << 32,), ValueError),
        (NAMES[:1], (True,), TypeError),
        (NAMES[:1], ("0",), TypeError),
        ((NAMES[0], NAMES[0]), (0, 1), ValueError),
        ((b"short",), (0,), ValueError),
        (("x" * 16,), (0,), TypeError),
        (NAMES[:9], tuple(range(9)), ValueError),
    ],
)
def test_argument_faults_raise_before_anything_changes(
    names: Sequence[bytes], ordinals: Sequence[int], error: type[Exception]
) -> None:
    lender = small_lender(8)
    with pytest.raises(error):
        lender.lend_write(names, ordinals)
    assert counts(lender) == (8, 0, 0, 0)
    assert lender.progress() == ()


@pytest.mark.contract("16")
def test_argument_faults_of_reads_and_of_page_lists_raise() -> None:
    lender = small_lender()
    with pytest.raises(ValueError, match="twice"):
        lender.lend_read([NAMES[0], NAMES[0]])
    with pytest.raises(ValueError, match="ordinal -1"):
        lender.lend_read(NAMES, -1)
    for page in (-1, 8, True):
        with pytest.raises(ValueError, match="outside the pool"):
            lender.quarantine([0, page])
    dropped = lender.pin_set()
    dropped.drop()
    with pytest.raises(ValueError, match="dropped"):
        lender.lend_write(NAMES[:1], (0,), pins=dropped)
    with pytest.raises(ValueError, match="reserve"):
        lender_over(lender.memory, name="pool", engine_reserve_pages=9)
    assert counts(lender) == (8, 0, 0, 0)


# --- marking and returning ---


@pytest.mark.contract("17")
def test_arrived_rows_become_content_and_the_others_free_pages() -> None:
    lender = small_lender()
    lease = lender.lend_write(NAMES[:3], (0, 1, 2))
    pages = view_of(lease).pages
    lease.mark_arrived([True, False, True])
    assert lender.held(NAMES[:3]) == [False] * 3
    lease.release()
    assert lender.held(NAMES[:3]) == [True, False, True]
    sealed = [record is not None and record.sealed for record in map(lender.memory.generations.read, pages)]
    assert sealed == [True, False, True]
    assert counts(lender) == (6, 0, 2, 0)


@pytest.mark.contract("14")
@pytest.mark.parametrize(
    ("mask", "error"),
    [
        ([True], ValueError),
        ([True, True, True], ValueError),
        ([1, 0], TypeError),
        ([True, None], TypeError),
        ("ab", TypeError),
        (b"ab", TypeError),
        (None, TypeError),
        ({0: True, 1: True}, TypeError),
        (np.array([1, 0]), TypeError),
        (np.array([[True, True]]), TypeError),
    ],
)
def test_a_wrong_mask_raises_and_records_nothing(mask: Sequence[bool], error: type[Exception]) -> None:
    lender = small_lender()
    lease = lender.lend_write(NAMES[:2], (0, 1))
    view_of(lease)
    with pytest.raises(error):
        lease.mark_arrived(mask)
    with pytest.raises(error):
        lease.bounds(mask)
    assert lease.arrived is None
    lease.mark_arrived([True, True])
    assert lease.arrived == (True, True)


def test_a_numpy_mask_serves_as_well() -> None:
    mask: Any = np.array([True, False])
    lease = small_lender().lend_write(NAMES[:2], (0, 1))
    assert lease.bounds(mask) == (0, 1)
    view_of(lease)
    lease.mark_arrived(mask)
    assert lease.arrived == (True, False)


@pytest.mark.contract("14")
def test_a_mark_out_of_turn_is_a_contradiction() -> None:
    lender = small_lender()
    fill(lender, NAMES[:1])
    lease = lender.lend_write(NAMES[1:2], (1,))
    with pytest.raises(LedgerContradictionError, match="nobody saw"):
        lease.mark_arrived([True])
    view_of(lease)
    lease.mark_arrived([True])
    with pytest.raises(LedgerContradictionError, match="twice"):
        lease.mark_arrived([True])
    lease.release()
    with pytest.raises(LedgerContradictionError, match="twice"):
        lease.mark_arrived([True])
    read = lender.lend_read(NAMES[:1])
    view_of(read)
    with pytest.raises(LedgerContradictionError, match="read lease"):
        read.mark_arrived([True])


@pytest.mark.contract("15")
def test_release_is_idempotent_in_every_state() -> None:
    lender = small_lender()
    fill(lender, NAMES[:2])
    read = lender.lend_read(NAMES[:2])
    unseen = lender.lend_write(NAMES[2:4], (2, 3))
    marked = lender.lend_write(NAMES[4:6], (4, 5))
    view_of(marked)
    marked.mark_arrived([True, False])
    for lease in (read, unseen, marked):
        lease.release()
        after = counts(lender)
        lease.release()
        assert counts(lender) == after
        assert lease.released
    assert counts(lender) == (5, 0, 3, 0)


@pytest.mark.contract("19")
def test_a_write_released_before_its_view_was_seen_needs_no_mark() -> None:
    lender = small_lender()
    fill(lender, NAMES[:2])
    lease = lender.lend_write(NAMES[2:4], (2, 3))
    lease.release()
    assert counts(lender) == (6, 0, 2, 0)
    with pytest.raises(LedgerContradictionError, match="nobody saw"):
        lease.mark_arrived([True, True])


@pytest.mark.contract("18")
def test_pages_of_a_seen_unmarked_lease_are_not_recycled() -> None:
    lender = small_lender(4)
    lease = lender.lend_write(NAMES[:3], (0, 1, 2))
    pages = view_of(lease).pages
    lease.release()
    assert counts(lender) == (1, 0, 0, 3)
    assert lender.statistics().unmarked == 1
    assert "3 quarantined" in refused(lender.lend_write(names_of(2, prompt=2), (0, 1), for_peer=False))
    with pytest.raises(ValueError, match="still lent"):
        lender.readmit(pages)
    lease.mark_arrived([True, False, True])
    assert lender.held(NAMES[:3]) == [True, False, True]
    assert counts(lender) == (2, 0, 2, 0)
    with pytest.raises(LedgerContradictionError, match="twice"):
        lease.mark_arrived([True, False, True])


@pytest.mark.contract("20")
def test_a_lease_without_rows_is_ready_at_once_and_leaves_nothing_behind() -> None:
    lender = small_lender(1)
    fill(lender, NAMES[:1])
    held = lender.lend_read(NAMES[:1])
    lease = lender.lend_write((), ())
    assert view_of(lease).pages == ()
    lease.release()
    lease.mark_arrived(())
    assert lender.statistics().unmarked == 0
    held.release()
    assert counts(lender) == (0, 0, 1, 0)


@pytest.mark.contract("9")
def test_forgetting_a_lease_frees_nothing() -> None:
    lender = small_lender(4)
    view_of(lender.lend_write(NAMES[:3], (0, 1, 2)))
    assert counts(lender) == (1, 3, 0, 0)


@pytest.mark.contract("P9")
def test_of_two_writers_of_one_name_the_first_stays_and_the_seconds_page_is_free() -> None:
    lender = small_lender(4)
    first, second = lender.lend_write(NAMES[:1], (0,)), lender.lend_write(NAMES[:1], (0,))
    winner, loser = view_of(first).pages[0], view_of(second).pages[0]
    for lease in (first, second):
        lease.mark_arrived([True])
    first.release()
    read = lender.lend_read(NAMES[:1])
    second.release()
    assert view_of(read).pages == (winner,)
    assert view_of(lender.lend_read(NAMES[:1])).pages == (winner,)
    record = lender.memory.generations.read(loser)
    assert record is not None
    assert not record.sealed
    assert counts(lender) == (3, 0, 1, 0)


def test_rows_may_be_named_once_filled() -> None:
    lender = small_lender()
    lease = lender.lend_write(None, (4, 5), for_peer=False)
    assert view_of(lease).names == (b"", b"")
    with pytest.raises(ValueError, match="1 names for 2 rows"):
        lease.name_rows(NAMES[4:5])
    lease.name_rows(NAMES[4:6])
    with pytest.raises(LedgerContradictionError, match="unnamed"):
        lease.name_rows(NAMES[4:6])
    lease.mark_arrived([True, True])
    lease.release()
    assert lender.held(NAMES[4:6]) == [True, True]
    unnamed = lender.lend_write(None, (6,), for_peer=False)
    view_of(unnamed)
    unnamed.mark_arrived([True])
    unnamed.release()
    assert counts(lender) == (6, 0, 2, 0)


# --- bounds ---


@pytest.mark.contract("28")
@pytest.mark.parametrize(
    ("ordinals", "arrived", "blocks", "bounds"),
    [
        ((0, 1, 2), (True, True, True), 0, (0, 3)),
        ((3, 4, 5), (True, True, False), 0, (3, 5)),
        ((3, 4, 5), (False, True, True), 0, (3, 3)),
        ((3, 5, 9), (True, True, True), 0, (3, 10)),
        ((3, 5, 9), (True, True, False), 0, (3, 9)),
        ((3, 4), (True, True), 8, (3, 8)),
        ((3, 4), (True, False), 8, (3, 4)),
        ((), (), 8, (8, 8)),
        ((), (), 0, (0, 0)),
    ],
)
def test_bounds_end_at_the_first_hole(
    ordinals: tuple[int, ...], arrived: tuple[bool, ...], blocks: int, bounds: tuple[int, int]
) -> None:
    lender = small_lender()
    lease = lender.lend_write(NAMES[: len(ordinals)], ordinals, prompt_blocks=blocks)
    assert lease.bounds(arrived) == bounds
    assert lease.arrived is None


@pytest.mark.contract("26")
def test_a_refused_lease_is_usable_only_up_to_where_it_would_have_begun() -> None:
    lender = small_lender(1)
    fill(lender, NAMES[:1])
    held = lender.pin_set(for_peer=False)
    assert held.pin(NAMES[:3]) == 1
    lease = lender.lend_write(NAMES[1:2], (1,), for_peer=False)
    assert lease.failure
    assert lease.bounds(()) == (1, 1)


# --- pins ---


@pytest.mark.contract("P9")
def test_committed_pages_come_back_pinned() -> None:
    lender = small_lender(3)
    pins = lender.pin_set()
    lease = lender.lend_write(NAMES[:3], (0, 1, 2), pins=pins)
    pages = view_of(lease).pages
    lease.mark_arrived([True, True, False])
    lease.release()
    assert set(pins.pages) == set(pages[:2])
    assert lender.evict(NAMES) == 0
    lender.check()
    pins.drop()
    pins.drop()
    assert lender.evict(NAMES) == 2
    assert counts(lender) == (3, 0, 0, 0)


@pytest.mark.contract("P9")
def test_the_loser_of_two_writers_pins_the_winners_page() -> None:
    lender = small_lender(3)
    pins = lender.pin_set()
    lease = lender.lend_write(NAMES[:1], (0,), pins=pins)
    view_of(lease)
    (winner,) = fill(lender, NAMES[:1])
    lease.mark_arrived([True])
    lease.release()
    assert pins.pages == (winner,)
    lender.check()


def test_pins_dropped_before_the_lease_came_back_pin_nothing() -> None:
    lender = small_lender(3)
    pins = lender.pin_set()
    lease = lender.lend_write(NAMES[:1], (0,), pins=pins)
    view_of(lease)
    pins.drop()
    lease.mark_arrived([True])
    lease.release()
    assert lender.evict(NAMES) == 1
    assert lender.statistics().pin_sets == 0
    with pytest.raises(LedgerContradictionError, match="dropped"):
        pins.pin(NAMES)


def test_a_set_pins_a_page_once() -> None:
    lender = small_lender(3)
    fill(lender, NAMES[:2])
    pins = lender.pin_set()
    assert pins.pin(NAMES) == 2
    assert pins.pin(NAMES) == 2
    assert len(pins) == 2
    lender.check()
    pins.drop()
    assert lender.statistics().pages.pinned == 0


# --- the cap (P26) ---


@pytest.mark.contract("P26")
def test_peers_leave_the_engine_its_longest_prompt() -> None:
    lender = small_lender(8, reserve=5)
    fill(lender, NAMES[:2])
    read = lender.lend_read(NAMES[:2])
    assert read.failure is None
    text = refused(lender.lend_write(names_of(2, prompt=2), (0, 1)))
    assert "2 more pages asked for, but 2 of at most 3 are lent" in text
    # A second reader of the same pages takes nothing away from the engine.
    assert lender.lend_read(NAMES[:2]).failure is None
    write = lender.lend_write(names_of(1, prompt=2), (0,))
    view_of(write)
    write.release()  # unmarked: quarantined pages count as well
    assert "quarantined (1)" in refused(lender.lend_write(names_of(1, prompt=3), (0,)))
    fill(lender, names_of(5, prompt=4))
    assert lender.statistics().refusals == 2
    lender.check()


@pytest.mark.contract("P26")
def test_frozen_readers_cannot_take_the_engines_pages() -> None:
    lender = small_lender(8, reserve=5)
    fill(lender, NAMES[:6])
    assert lender.lend_read(NAMES[:3]).failure is None
    assert "1 more pages" in refused(lender.lend_read(NAMES[3:4]))
    assert "3 more pages" in refused(lender.lend_read(NAMES[:6]))
    assert lender.lend_read(NAMES[:6], for_peer=False).failure is None


@pytest.mark.contract("P26")
def test_pinned_content_for_a_peer_counts_until_it_is_dropped() -> None:
    lender = small_lender(8, reserve=5)
    pins = lender.pin_set()
    lease = lender.lend_write(NAMES[:3], (0, 1, 2), pins=pins)
    view_of(lease)
    lease.mark_arrived([True] * 3)
    lease.release()
    assert lender.refusal(1) is not None
    assert lender.refusal(1, for_peer=False) is None
    assert lender.lend_read(NAMES[:3]).failure is None
    pins.drop()
    assert lender.refusal(1) is not None
    lender.check()


# --- quarantine, progress, and what is seen from outside ---


def test_a_quarantined_page_is_found_no_more_and_its_readers_run_on() -> None:
    lender = small_lender(3)
    pages = fill(lender, NAMES[:2])
    read = lender.lend_read(NAMES[:1])
    assert lender.quarantine((pages[0], 2, pages[0])) == 2
    assert lender.quarantine(pages[:1]) == 0
    assert lender.held(NAMES[:2]) == [False, True]
    with pytest.raises(ValueError, match="still lent"):
        lender.readmit(pages[:1])
    read.release()
    assert counts(lender) == (0, 0, 1, 2)
    lender.readmit((pages[0], 2))
    assert counts(lender) == (2, 0, 1, 0)
    with pytest.raises(ValueError, match="not quarantined"):
        lender.readmit(pages[:1])


def test_a_page_that_is_written_is_not_quarantined_over_its_leases_head() -> None:
    lender = small_lender(3)
    lease = lender.lend_write(NAMES[:1], (0,))
    with pytest.raises(ValueError, match="lent for writing"):
        lender.quarantine((2, *lease.pages))
    assert counts(lender) == (2, 1, 0, 0)


def test_progress_names_each_lease_once_and_none_that_was_returned() -> None:
    lender = small_lender(2)
    first = lender.lend_write(NAMES[:2], (0, 1))
    failed = lender.lend_write(NAMES[2:3], (2,))
    lender.lend_read(NAMES[:1]).release()
    assert lender.progress() == (first.lease_id, failed.lease_id)
    assert lender.progress() == ()


def test_a_lender_tells_what_it_has_out() -> None:
    lender = small_lender(8, reserve=1)
    fill(lender, NAMES[:2])
    lender.lend_read(NAMES[:2])
    lease = lender.lend_write(NAMES[2:4], (2, 3))
    lender.lend_write(NAMES[4:10], tuple(range(4, 10)))
    pins = lender.pin_set()
    shown = lender.statistics()
    assert (shown.reads, shown.writes, shown.failed, shown.unmarked, shown.pin_sets) == (1, 1, 1, 0, 1)
    assert (shown.lent_cap_pages, shown.refusals, shown.pages.claimed) == (7, 1, 4)
    assert repr(lender) == "<PoolLender pool rank=0 leases=3 free=4 cached=2 claimed=4/7>"
    assert "WRITE pages=2 lent" in repr(lease)
    lease.release()
    assert "released" in repr(lease)
    assert "pages=0" in repr(pins)
    pins.drop()
    assert "dropped" in repr(pins)


@pytest.mark.contract("P1")
def test_the_check_finds_a_lent_page_whose_generation_moved() -> None:
    lender = small_lender()
    fill(lender, NAMES[:1])
    lease = lender.lend_read(NAMES[:1])
    lender.memory.generations.raise_pages(lease.pages)
    with pytest.raises(LedgerContradictionError, match="changed its generation"):
        lender.check()


def test_the_check_finds_pins_without_owner_and_pages_without_lease() -> None:
    lender = small_lender()
    (page,) = fill(lender, NAMES[:1])
    lender._allocator.pin([page], for_peer=False)
    with pytest.raises(LedgerContradictionError, match="without owner"):
        lender.check()
    lender._allocator.unpin([page], for_peer=False)
    lender.check()
    lender._allocator.take(1, for_peer=False)
    with pytest.raises(LedgerContradictionError, match="differ"):
        lender.check()


def test_the_check_finds_a_cached_page_without_name() -> None:
    lender = small_lender()
    (page,) = fill(lender, NAMES[:1])
    lender._index.remove(page)
    with pytest.raises(LedgerContradictionError, match="named pages"):
        lender.check()
