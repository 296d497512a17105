"""What only the memory reader has: a descriptor of another process, which must be the pool that was granted."""

import gc
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvbus.columns import column
from kvbus.dataplane import memory as memory_module
from kvbus.dataplane.copying import SMALL_BYTES_MAX, TURN_BYTES_MAX
from kvbus.dataplane.cutting import Limits, Records, matching
from kvbus.dataplane.memory import AT_ONCE_BYTES, FEW_PAGES, MemoryReader, _Reading, map_source, mismatch
from kvbus.dataplane.reader import Progress
from kvbus.dataplane.reading import LocalPool, ReadOrder, limits_for, plan, verify
from kvbus.errors import BackendError, PeerError
from kvbus.grants import Grant, MemoryAccess
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Delivered, Direction, Failed, LeaseView, Order, SubmissionRejectedError
from kvbus.pool.memory import PoolMemory, PoolPlan
from kvbus.processes import identity
from tests.unit.helpers.lending_process import (
    LENDER_EPOCH,
    PAGE_BYTES,
    READER_EPOCH,
    LendingProcess,
    content,
    fill,
    geometry_of,
    layout,
    lending_process,
    reader_key,
)
from tests.unit.helpers.reader_side import Side, arrived_of, check_rows, memory_side
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def lender() -> Iterator[LendingProcess]:
    with lending_process() as process:
        yield process


def never_read(side: Side, access: MemoryAccess, lender: LendingProcess, ticket: int = 1) -> Failed:
    """Submit with this access and return the failure; nothing may have moved."""
    side.submit(lender.grant((1,), memory=access), (1,), ticket=ticket)
    change = side.end_of(ticket)
    assert isinstance(change.result, Failed)
    assert change.evidence is Evidence.NEVER_SUBMITTED
    assert side.bytes_moved() == 0
    return change.result


def test_a_descriptor_that_is_no_pool_is_refused(lender: LendingProcess) -> None:
    reading_end, writing_end = os.pipe()
    try:
        with memory_side() as side, open("/etc/hostname", "rb") as plain:  # noqa: PTH123 - its descriptor is the point
            for ticket, fd in enumerate((reading_end, plain.fileno()), 1):
                failed = never_read(side, MemoryAccess(process=identity(), fd=fd), lender, ticket)
                assert failed.failure is FailureClass.GRANT_REFUSED
    finally:
        os.close(reading_end)
        os.close(writing_end)


def test_another_pool_than_the_grants_is_refused(lender: LendingProcess) -> None:  # contract 47, 48
    for pages, epoch, word in ((256, LENDER_EPOCH + 1, "epoch"), (255, LENDER_EPOCH, "length_bytes")):
        other = PoolMemory.create(layout(), pages, epoch)
        with memory_side() as side:
            failed = never_read(side, MemoryAccess(process=identity(), fd=other.fd), lender)
            assert failed.failure is FailureClass.GRANT_REFUSED
            assert word in failed.text
        other.close()


def test_every_part_of_the_geometry_is_compared(lender: LendingProcess) -> None:
    pool = PoolMemory.create(layout(), 4, LENDER_EPOCH)
    geometry = geometry_of(pool)
    honest = lender.grant((1,), pool=geometry)
    assert mismatch(pool, honest) is None
    for field in ("length_bytes", "generations_offset", "pages_offset", "page_stride", "page_bytes", "page_count"):
        forged = geometry.model_copy(update={field: getattr(geometry, field) + 1})
        assert field in (mismatch(pool, lender.grant((1,), pool=forged)) or "")
    assert "fingerprint" in (mismatch(pool, lender.grant((1,), pool=geometry, fingerprint="f")) or "")
    pool.close()


def test_a_lender_that_is_gone_or_elsewhere_is_not_opened(lender: LendingProcess) -> None:
    described = lender.described.memory
    elsewhere = described.model_copy(update={"process": described.process.model_copy(update={"boot_id": "x"})})
    reused = described.model_copy(update={"process": described.process.model_copy(update={"start_ticks": 1})})
    with memory_side() as side:
        for ticket, access in enumerate((elsewhere, reused), 1):
            assert never_read(side, access, lender, ticket).failure is FailureClass.PEER_LOST
    with pytest.raises(BackendError, match="cannot be opened"):
        map_source(described.model_copy(update={"fd": 9999}))


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_no_descriptor_is_left_open_by_a_refusal() -> None:
    gc.collect()  # what earlier tests left to be closed is closed now, and makes no room for one of ours
    before = open_descriptors()
    reading_end, writing_end = os.pipe()
    with pytest.raises(PeerError):
        map_source(MemoryAccess(process=identity(), fd=reading_end))
    os.close(reading_end)
    os.close(writing_end)
    assert open_descriptors() <= before


def test_a_mapping_outlives_its_lender() -> None:
    with memory_side() as side:
        with lending_process() as source:
            side.submit(source.grant((1,)), (1,))
            side.end_of()
            grant = source.grant((7,), reader=reader_key("t2"))
        side.submit(grant, (2,), ticket=2)
        assert arrived_of(side.end_of(2)) == (True,)
        assert side.holds(2, content(7))


def test_two_processes_under_one_name_are_not_mixed_up(lender: LendingProcess) -> None:
    with lending_process(pages=8) as other, memory_side() as side:
        side.submit(lender.grant((1,)), (1,))
        assert arrived_of(side.end_of()) == (True,)
        other.ask("rewrite", [3])
        counters = (other.described.counters[3] + 2).to_bytes(8, "little")
        side.submit(other.grant((3,), counters=counters, reader=reader_key("t2")), (2,), ticket=2)
        assert arrived_of(side.end_of(2)) == (True,)
        assert side.holds(2, content(3, seed=100))


def test_mappings_are_bounded_and_those_in_use_stay(monkeypatch: pytest.MonkeyPatch, lender: LendingProcess) -> None:
    monkeypatch.setattr(memory_module, "MAPPINGS_MAX", 2)
    pools = [PoolMemory.create(layout(), 2, LENDER_EPOCH + n) for n in range(4)]
    with memory_side() as side:
        opened = []
        for n, pool in enumerate(pools):
            fill(pool, (0, 1))
            grant = lender.grant(
                (1,),
                lender_epoch=LENDER_EPOCH + n,
                pool=geometry_of(pool),
                counters=(2).to_bytes(8, "little"),
                memory=MemoryAccess(process=identity(), fd=pool.fd),
            )
            side.submit(grant, (n,), ticket=n + 1)
            assert arrived_of(side.end_of(n + 1)) == (True,)
            assert side.holds(n, content(1))
            opened.append(open_descriptors())
        assert isinstance(side.reader, MemoryReader)
        assert side.reader.statistics().mappings == 2
        assert opened[0] < opened[1] == opened[2] == opened[3]  # the others were unmapped, and not only forgotten
        assert side.reader.statistics().length_bytes == 4 * PAGE_BYTES
    for pool in pools:
        pool.close()


POOL_PAGES = 512
GATHERED_AND_SLICED = pytest.mark.parametrize("page_bytes", [4 << 10, SMALL_BYTES_MAX, PAGE_BYTES])


def place_of(row: int) -> int:
    """The page here to which a row goes: its neighbours go elsewhere."""
    return row * 29 % POOL_PAGES


def reading_of(
    pages: Sequence[int], page_bytes: int, limits: Limits | None = None
) -> tuple[_Reading, PoolMemory, PoolMemory]:
    """An attempt at pages of a pool, which go to another one of that size."""
    source, target = (
        PoolMemory.create(layout(page_bytes), POOL_PAGES, epoch) for epoch in (LENDER_EPOCH, READER_EPOCH)
    )
    fill(source, range(POOL_PAGES))
    grant = Grant(
        lender_instance="A", lender_member="m0", lender_epoch=LENDER_EPOCH, reader=reader_key(), ticket=1, rank=0,
        fingerprint=source.fingerprint, nonce=b"n" * 16, pool=geometry_of(source), pages=column(pages, 4),
        counters=column(source.generations.counters(pages), 8), memory=MemoryAccess(process=identity(), fd=source.fd),
    )  # fmt: skip
    rows = tuple(range(len(pages)))
    places = tuple(map(place_of, rows))
    view = LeaseView(target.fingerprint, 0, READER_EPOCH, rows, (b"n" * 16,) * len(rows), places, (1,) * len(rows))
    order = Order(1, 1, view, Direction.WRITE, ReadOrder(grant), "A", None)
    progress = Progress(order, plan(order, LocalPool.of(target), "memory"))
    return _Reading(progress, source, target, limits or Limits()), source, target


@GATHERED_AND_SLICED
def test_each_page_goes_to_its_place_and_small_ones_share_turns_of_a_mebibyte(page_bytes: int) -> None:
    pages = [row * 37 % POOL_PAGES for row in range(500)]
    reading, _, target = reading_of(pages, page_bytes)
    copied = []
    reading.advance()
    while reading.next_turn is not None:
        copied.append(reading.next_turn())
        reading.advance()
    assert max(copied) <= TURN_BYTES_MAX
    assert sum(copied) == 500 * page_bytes
    assert len(copied) == -(-500 * page_bytes // TURN_BYTES_MAX)
    assert reading.progress.change(Evidence.COMPLETED).result == Delivered((True,) * 500, 500 * page_bytes)
    assert all((target.page_bytes(place_of(row)) == content(page)).all() for row, page in enumerate(pages))
    assert not any(target.page_bytes(place_of(row)).any() for row in range(500, POOL_PAGES))


@GATHERED_AND_SLICED
def test_a_page_rewritten_after_its_last_byte_was_copied_does_not_count(page_bytes: int) -> None:  # P2
    reading, source, _ = reading_of(range(POOL_PAGES), page_bytes, Limits(segment_bytes=256 * page_bytes))
    reading.advance()
    while reading.next_turn is not None:
        reading.next_turn()
        if reading.progress.length_bytes == 0:  # at last all of the first segment is here, and was not looked at yet
            fill(source, (3, 200), seed=9)
        reading.advance()
    result = reading.progress.change(Evidence.COMPLETED).result
    assert isinstance(result, Delivered)
    assert [row for row, whole in enumerate(result.arrived) if not whole] == [3, 200]


def test_a_rate_limit_finer_than_a_page_is_kept() -> None:
    reading, _, target = reading_of((5, 9), 4 << 10, limits_for(1.0))
    assert limits_for(1.0).run_bytes == 4096
    fine, _, _ = reading_of((5, 9), SMALL_BYTES_MAX, limits_for(1.0))
    for one in (reading, fine):
        one.advance()
        while one.next_turn is not None:
            assert one.next_turn() == 4096
            one.advance()
        assert one.progress.length_bytes == 2 * one.progress.plan.local.page_bytes
    assert (target.page_bytes(place_of(1)) == content(9)).all()


def test_what_has_changed_before_it_is_read_is_not_copied() -> None:
    reading, source, target = reading_of(range(64), 4 << 10)
    fill(source, range(64), seed=5)
    reading.advance()
    assert reading.next_turn is None
    assert reading.progress.change(Evidence.COMPLETED).result == Failed(
        FailureClass.PAGE_CHANGED, reading_text(reading)
    )
    assert not target.whole[target.pages_offset :].any()


def reading_text(reading: _Reading) -> str:
    return reading.progress.change(Evidence.COMPLETED).text


@pytest.mark.parametrize("looks", [0, 1, 3])
def test_want_of_memory_ends_one_attempt_with_evidence_and_no_other(
    looks: int, monkeypatch: pytest.MonkeyPatch, lender: LendingProcess
) -> None:  # contract 41
    seen: list[int] = []

    def starved(found: Records, expected: Records) -> NDArray[np.bool_]:
        seen.append(len(found))
        if len(seen) == looks + 1:
            raise MemoryError
        return matching(found, expected)

    monkeypatch.setattr(memory_module, "matching", starved)
    with memory_side(rate_limit_bytes_s=64 << 20) as side:  # several segments, each looked at twice
        side.submit(lender.grant(range(200)), range(200))
        change = side.end_of()
        assert change.evidence is (Evidence.COMPLETED if looks else Evidence.NEVER_SUBMITTED)
        assert "no memory" in change.text
        if looks < 2:
            assert isinstance(change.result, Failed)
        else:
            assert 0 < check_rows(side, change, range(200), range(200)) < 200
        side.submit(lender.grant((1,), reader=reader_key("t2")), (1,), ticket=2)
        assert arrived_of(side.end_of(2)) == (True,)


def test_a_reader_that_was_not_started_or_has_no_pool_refuses(lender: LendingProcess) -> None:
    with memory_side() as side:
        order = side.order(lender.grant((1,)), (1,))
    reader = MemoryReader(wake=lambda: None)
    with pytest.raises(SubmissionRejectedError, match="no pool"):
        reader.submit(order)
    reader.register(PoolMemory.create(layout(), 2, READER_EPOCH))
    with pytest.raises(SubmissionRejectedError, match="not started"):
        reader.submit(order)
    with pytest.raises(ValueError, match="has a pool"):
        reader.register(PoolMemory.create(layout(), 2, READER_EPOCH))
    assert reader.shutdown(0.0) == ()
    reader.release_hold()


def sleeps(side: Side) -> bool:
    assert isinstance(side.reader, MemoryReader)
    return side.reader._sleeps


def rested(side: Side, lender: LendingProcess) -> threading.Condition:
    """Let the lender's pool be mapped and the reader's thread sleep; holding what is returned keeps it asleep."""
    assert isinstance(side.reader, MemoryReader)
    side.submit(lender.grant((1,)), (1,))
    side.end_of()
    wait_until(lambda: sleeps(side))
    return side.reader._turn


def test_a_few_pages_of_a_pool_that_is_mapped_are_here_when_submit_returns(lender: LendingProcess) -> None:
    most = AT_ONCE_BYTES // PAGE_BYTES
    assert most <= FEW_PAGES
    with memory_side() as side:
        side.submit(lender.grant((1,)), (1,))
        assert arrived_of(side.end_of()) == (True,)
        wait_until(lambda: sleeps(side))
        side.woken.clear()
        side.submit(lender.grant(range(most), reader=reader_key("t2")), range(most), ticket=2)
        assert side.woken.is_set()  # after the change was listed
        (change,) = side.reader.changes()
        assert check_rows(side, change, range(most), range(most)) == most
        assert change.evidence is Evidence.COMPLETED
        assert side.reader.shutdown(0.0) == ()


def test_more_pages_than_few_are_left_to_the_thread(lender: LendingProcess) -> None:
    pages = range(AT_ONCE_BYTES // PAGE_BYTES + 1)
    with memory_side() as side:
        turn = rested(side, lender)
        with turn:  # the thread cannot go on
            side.submit(lender.grant(pages, reader=reader_key("t2")), pages, ticket=2)
            assert side.reader.changes() == []
        assert check_rows(side, side.end_of(2), pages, pages) == len(pages)


def test_several_small_orders_in_a_row_are_read_at_once_up_to_what_one_may_be(lender: LendingProcess) -> None:
    # Planted fault that this catches: the bound counts each order alone.
    most = AT_ONCE_BYTES // PAGE_BYTES
    with memory_side() as side:
        turn = rested(side, lender)
        with turn:  # the thread cannot go on
            side.submit(lender.grant(range(most - 1), reader=reader_key("t2")), range(most - 1), ticket=2)
            side.submit(lender.grant((most, most + 1), reader=reader_key("t3")), (most, most + 1), ticket=3)
            (change,) = side.reader.changes()
            assert change.ticket == 2
        assert arrived_of(side.end_of(3)) == (True, True)


def test_a_pool_that_is_another_one_by_now_is_refused_at_once_too(lender: LendingProcess) -> None:  # contract 47, 48
    with memory_side() as side:
        side.submit(lender.grant((1,)), (1,))
        side.end_of()
        wait_until(lambda: sleeps(side))
        geometry = lender.described.geometry
        stated = PoolPlan.sized(geometry.page_count - 1, page_bytes=PAGE_BYTES, page_stride=geometry.page_stride)
        changes = {name: getattr(stated, name) for name in ("length_bytes", "generations_offset", "pages_offset")}
        forged = geometry.model_copy(update={"page_count": geometry.page_count - 1, **changes})
        side.submit(lender.grant((2,), pool=forged, reader=reader_key("t2")), (2,), ticket=2)
        change = side.end_of(2)
        assert change.evidence is Evidence.NEVER_SUBMITTED
        assert isinstance(change.result, Failed)
        assert change.result.failure is FailureClass.GRANT_REFUSED
        assert side.bytes_moved() == PAGE_BYTES


@GATHERED_AND_SLICED
def test_of_few_pages_those_rewritten_after_or_before_their_copy_do_not_count(page_bytes: int) -> None:  # P2
    reading, source, target = reading_of(range(FEW_PAGES), page_bytes)
    fill(source, (2,), seed=5)  # before anything was read
    reading.advance()
    while reading.next_turn is not None:
        reading.next_turn()
        if (target.page_bytes(place_of(7)) == content(7)).all():  # it is here, and was not looked at yet
            fill(source, (7,), seed=9)
        reading.advance()
    change = reading.progress.change(Evidence.COMPLETED)
    assert isinstance(change.result, Delivered)
    assert [row for row, whole in enumerate(change.result.arrived) if not whole] == [2, 7]
    assert change.changed == 2
    assert not target.page_bytes(place_of(2)).any()


def test_a_page_that_was_not_copied_does_not_count_whatever_its_record_says_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # P2
    looks: list[bytes] = []

    def first_not(record: bytes, epoch: int, counter: int) -> bool:
        looks.append(record)
        return len(looks) > 1 and verify(record, epoch, counter)

    monkeypatch.setattr(memory_module, "verify", first_not)
    reading, _, target = reading_of((3, 4), PAGE_BYTES)
    reading.advance()
    while reading.next_turn is not None:
        reading.next_turn()
        reading.advance()
    result = reading.progress.change(Evidence.COMPLETED).result
    assert isinstance(result, Delivered)
    assert result.arrived == (False, True)
    assert not target.page_bytes(place_of(0)).any()
