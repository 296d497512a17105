"""Fences on a real pool: who reads late delivers nothing, and gets only bytes of the salt that it was lent."""

from collections.abc import Callable

import pytest

from kvbus.dataplane.reading import Limits, LocalPool, Plan, ReadOrder, plan
from kvbus.errors import LedgerContradictionError
from kvbus.events import ReaderKey, column
from kvbus.grants import Grant, MemoryAccess, PoolGeometry
from kvbus.ledger.types import Direction, LeaseView, Order
from kvbus.pool.allocator import PageState
from kvbus.pool.lease import PoolLease
from kvbus.pool.lender import PoolLender
from kvbus.pool.memory import PoolMemory
from kvbus.processes import identity
from tests.unit.pool_parts import EPOCH, TOY, names_of, small_lender

NAMES, OTHERS = names_of(4), names_of(8, prompt=2)
LENT = 0xA1
LATER = 0xB2


def write(lender: PoolLender, names: tuple[bytes, ...], byte: int, *, salt: str | None, for_peer: bool = False) -> None:
    lease = lender.lend_write(names, range(len(names)), for_peer=for_peer, salt=salt)
    view = lease.poll()
    assert view is not None, lease.failure
    for page in view.pages:
        lender.memory.page_bytes(page)[:] = byte
    lease.mark_arrived([True] * len(names))
    lease.release()


def lent(lender: PoolLender, count: int = 4) -> PoolLease:
    lease = lender.lend_read(NAMES[:count])
    assert lease.poll() is not None
    return lease


def fenced(lender: PoolLender, lease: PoolLease) -> None:
    assert lease.fence() is None
    lender.check()
    lease.release()
    lender.check()


def prepared(pages: int = 8, reserve: int = 0) -> tuple[PoolLender, PoolLease]:
    """A pool whose content of salt `s` a frozen reader was lent."""
    lender = small_lender(pages, reserve)
    write(lender, NAMES, LENT, salt="s")
    return lender, lent(lender)


class LateReader:
    """A reader by the plan that every reading backend follows; a test says when it copies, and when it looks."""

    def __init__(self, lender: PoolLender, lease: PoolLease) -> None:
        source, self.memory = lender.memory, PoolMemory.create(TOY, 8, EPOCH + 1)
        self.source = source
        key = ReaderKey(instance="B", member="m0", epoch=7, transfer="t", attempt=1, rank=0)
        geometry = PoolGeometry(
            base=source.address,
            length_bytes=source.length_bytes,
            generations_offset=source.generations_offset,
            pages_offset=source.pages_offset,
            page_stride=source.page_stride,
            page_bytes=TOY.page_bytes,
            page_count=source.page_count,
        )
        grant = Grant(
            lender_instance="A",
            lender_member="m0",
            lender_epoch=EPOCH,
            reader=key,
            ticket=1,
            rank=0,
            fingerprint=source.fingerprint,
            nonce=b"n" * 16,
            pool=geometry,
            pages=column(lease.pages, 4),
            counters=column(lease.counters, 8),
            memory=MemoryAccess(process=identity(), fd=source.fd),
            checked=True,
        )
        rows = len(lease.pages)
        view = LeaseView(
            self.memory.fingerprint, 0, EPOCH + 1, tuple(range(rows)), NAMES[:rows], tuple(range(rows)), (1,) * rows
        )
        order = Order(1, 1, view, Direction.WRITE, ReadOrder(grant), "A", None)
        self.plan: Plan = plan(order, LocalPool.of(self.memory), "memory")

    def copy(self) -> None:
        """Read all pages."""
        whole = self.source._whole()
        mine = self.memory._whole()
        for segment in self.plan.segments(Limits()):
            for run in segment.runs:
                mine[run.local : run.local + run.length_bytes] = whole[run.source : run.source + run.length_bytes]

    def look(self) -> tuple[int, ...]:
        """Read the generations; return the rows that may be delivered."""
        whole = self.source._whole()
        rows: list[int] = []
        for segment in self.plan.segments(Limits()):
            scratch = bytearray(512 << 10)
            for run in segment.spans:
                scratch[run.local : run.local + run.length_bytes] = whole[
                    run.source : run.source + run.length_bytes
                ].tobytes()
            rows += segment.unchanged_rows(memoryview(scratch))
        return tuple(sorted(rows))

    def bytes_landed(self) -> set[int]:
        """What stands in its own pages."""
        return {int(byte) for row in range(len(self.plan.local_pages)) for byte in self.memory.page_bytes(row)}


def test_a_reader_that_nobody_fenced_delivers_what_it_reads_late() -> None:
    lender, lease = prepared()
    reader = LateReader(lender, lease)
    reader.copy()
    assert reader.look() == (0, 1, 2, 3)
    assert reader.bytes_landed() == {LENT}


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("copies_first", [False, True])
def test_a_fenced_reader_that_reads_late_delivers_nothing(*, copies_first: bool, reused: bool) -> None:
    # P5, P1, P2
    lender, lease = prepared()
    reader = LateReader(lender, lease)
    if copies_first:
        reader.copy()
    fenced(lender, lease)
    if reused:
        write(lender, OTHERS[:8], LATER, salt="s")
    if not copies_first:
        reader.copy()
    assert reader.look() == ()
    assert reader.bytes_landed() == {LATER if reused and not copies_first else LENT}


def test_generations_are_raised_before_a_fenced_page_becomes_free() -> None:
    # P5, P1
    lender, lease = prepared()
    assert lease.fence() is None
    generations, allocator = lender.memory.generations, lender._allocator
    assert all(counter % 2 for counter in generations.counters(lease.pages)), "raised while they are still lent"
    assert not any(allocator.state(page) is PageState.FREE for page in lease.pages)
    lease.release()
    assert all(allocator.state(page) is PageState.FREE for page in lease.pages)


def test_a_fenced_page_is_found_by_nobody_and_its_name_may_come_again() -> None:
    # P5, contract 24
    lender, lease = prepared()
    assert lease.fence() is None
    assert lender.held(NAMES) == [False] * 4
    lease.release()
    write(lender, NAMES, LATER, salt="s")
    assert lender.held(NAMES) == [True] * 4
    lender.check()


def test_what_lands_at_a_fenced_reader_is_of_the_salt_that_it_was_lent() -> None:
    # P5
    lender, lease = prepared()
    reader = LateReader(lender, lease)
    fenced(lender, lease)
    text = refused(lender.lend_write(OTHERS[:5], range(5), for_peer=False, salt="another tenant"))
    assert "4 can be had" in text
    assert "4 may only take content of the salt that a fenced reader was lent" in text
    refused(lender.lend_write(OTHERS[:5], range(5), for_peer=False))  # nobody says of which salt it is
    write(lender, OTHERS[:4], LATER, salt="another tenant")
    reader.copy()
    assert reader.bytes_landed() == {LENT}
    lender.evict(OTHERS)
    write(lender, OTHERS[:8], LATER, salt="s")
    lender.check()


def test_content_of_its_salt_stays_bound_while_it_is_cached_and_evicted() -> None:
    # P5
    lender, lease = prepared()
    fenced(lender, lease)
    write(lender, OTHERS[:8], LATER, salt="s")  # the whole pool, bound pages among them
    assert lender.room("another tenant") == 4
    write(lender, names_of(4, prompt=3), LENT, salt="another tenant")
    assert not set(lender.pages_held(names_of(4, prompt=3))) & set(lease.pages)
    lender.check()


def test_pages_of_a_reader_that_is_gone_are_as_any_others() -> None:
    # P5, P4
    lender, lease = prepared()
    fenced(lender, lease)
    assert lender.lift(lease.lease_id)
    assert not lender.lift(lease.lease_id)
    write(lender, OTHERS[:8], LATER, salt="another tenant")
    assert lender.statistics().pages.bound == 0
    lender.check()


def test_a_page_that_two_frozen_readers_held_is_bound_until_both_are_gone() -> None:
    # P5, P4
    lender, first = prepared()
    second = lent(lender, 2)
    fenced(lender, first)
    assert lender.held(NAMES) == [True, True, False, False], "the other reader's pages are still lent"
    reader = LateReader(lender, first)
    assert reader.look() == (0, 1), "whole, unchanged and under their names: what was lent"
    fenced(lender, second)
    assert reader.look() == ()
    assert lender.lift(first.lease_id)
    assert lender.room("another tenant") == 6
    assert lender.lift(second.lease_id)
    assert lender.room("another tenant") == 8
    lender.check()


def test_others_who_read_a_page_go_on_undisturbed() -> None:
    # P5, P9
    lender, lease = prepared()
    other = lent(lender)
    reader = LateReader(lender, other)
    fenced(lender, lease)
    reader.copy()
    assert reader.look() == (0, 1, 2, 3)
    other.release()
    lender.check()


def test_a_page_that_another_reader_held_too_is_bound_when_that_one_has_left() -> None:
    # P5
    lender, lease = prepared()
    other, reader = lent(lender), LateReader(lender, lease)
    fenced(lender, lease)
    other.release()
    assert lender.held(NAMES) == [True] * 4
    assert lender.room("another tenant") == 4
    write(lender, OTHERS[:4], LATER, salt="another tenant")
    lender.evict(NAMES)
    assert lender.room("another tenant") == 4, "its own ones, which may be evicted for it"
    reader.copy()
    assert reader.bytes_landed() == {LENT}
    lender.check()


def test_bound_pages_count_as_taken_up_so_that_any_longest_prompt_fits() -> None:
    # P26, P5
    lender, lease = prepared(pages=8, reserve=4)
    fenced(lender, lease)
    state = lender.statistics().pages
    assert (state.claimed, state.bound) == (4, 4)
    assert "4 of at most 4 are lent" in refused(lender.lend_write(OTHERS[:1], (0,), salt="another tenant"))
    peers = lender.lend_write(OTHERS[:4], range(4), salt="s")  # the very pages that are taken up already
    assert peers.failure is None
    assert set(peers.pages) == set(lease.pages)
    assert lender.lend_write(OTHERS[:5][4:], (0,), salt="s").failure is not None
    write(lender, names_of(4, prompt=3), LATER, salt="another tenant")  # the engine's longest prompt
    lender.check()


def test_pages_whose_salt_nobody_told_are_not_fenced_and_nothing_changes() -> None:
    # P5
    lender = small_lender()
    write(lender, NAMES[:2], LENT, salt="s")
    write(lender, NAMES[2:], LENT, salt=None)
    lease = lent(lender)
    before = lender.statistics()
    failure = lease.fence()
    assert failure is not None
    assert "of which salt the content of 2 of its pages is" in failure.text
    assert not lease.fenced
    assert lender.statistics() == before
    lender.check()


@pytest.mark.parametrize(
    "out",
    [
        lambda lender: lender.lend_write(OTHERS[:1], (0,), salt="s"),
        lambda lender: lender.lend_read(OTHERS, whole=True),
        lambda lender: released(lender.lend_read(NAMES)),
        lambda lender: again(lender.lend_read(NAMES)),
    ],
)
def test_only_a_read_that_is_out_can_be_fenced_and_once(out: Callable[[PoolLender], PoolLease]) -> None:
    # P5: never a write
    lender, _ = prepared()
    lease = out(lender)
    with pytest.raises(LedgerContradictionError, match="read lease that is out"):
        lease.fence()


def released(lease: PoolLease) -> PoolLease:
    lease.release()
    return lease


def again(lease: PoolLease) -> PoolLease:
    assert lease.fence() is None
    return lease


def refused(lease: PoolLease) -> str:
    assert lease.failure is not None
    return lease.failure.text
