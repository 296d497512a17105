"""What only the memory reader has: a descriptor of another process, which must be the pool that was granted."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.dataplane import memory as memory_module
from kvbus.dataplane.memory import MemoryReader, map_source, mismatch
from kvbus.errors import BackendError, PeerError
from kvbus.grants import MemoryAccess
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Failed, SubmissionRejectedError
from kvbus.pool.memory import PoolMemory
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
from tests.unit.helpers.reader_side import Side, arrived_of, memory_side


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


def test_no_descriptor_is_left_open_by_a_refusal() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    reading_end, writing_end = os.pipe()
    with pytest.raises(PeerError):
        map_source(MemoryAccess(process=identity(), fd=reading_end))
    os.close(reading_end)
    os.close(writing_end)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


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
        assert isinstance(side.reader, MemoryReader)
        assert side.reader.statistics().mappings == 2
        assert side.reader.statistics().length_bytes == 4 * PAGE_BYTES
    for pool in pools:
        pool.close()


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
