"""Generations: odd while written, even once sealed, torn where a reader catches a change half made."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvbus.errors import LedgerContradictionError
from kvbus.pool.generations import RECORD_BYTES, Generation, Generations, decode
from tests.unit.pool_parts import EPOCH

ALL_ONES = (1 << 64) - 1


def fresh(pages: int = 4) -> tuple[Generations, NDArray[np.uint64]]:
    table = np.zeros((pages, RECORD_BYTES // 8), dtype=np.uint64)
    generations = Generations(table, EPOCH)
    generations.format()
    return generations, table


@pytest.mark.contract("P1")
def test_a_page_is_odd_while_written_and_even_once_sealed() -> None:
    generations, _ = fresh()
    assert generations.read(2) == Generation(EPOCH, 0)
    assert generations.raise_pages([2]) == (1,)
    assert generations.read(2) == Generation(EPOCH, 1)
    assert generations.seal_pages([2]) == (2,)
    assert generations.read(2) == Generation(EPOCH, 2)
    assert generations.read(1) == Generation(EPOCH, 0)


@pytest.mark.contract("P1")
def test_only_an_even_counter_above_zero_is_sealed() -> None:
    assert [counter for counter in range(5) if Generation(EPOCH, counter).sealed] == [2, 4]


@pytest.mark.contract("48")
@given(st.lists(st.booleans(), max_size=40))
def test_no_counter_comes_twice(seals: list[bool]) -> None:
    generations, _ = fresh(1)
    seen = [0]
    for seal in seals:
        seen += generations.raise_pages([0])
        if seal:
            seen += generations.seal_pages([0])
    assert seen == sorted(set(seen))
    generations.check()


def test_sealing_what_nobody_writes_is_a_contradiction() -> None:
    generations, _ = fresh()
    generations.raise_pages([0])
    with pytest.raises(LedgerContradictionError, match="page=1"):
        generations.seal_pages([0, 1])
    assert generations.read(0) == Generation(EPOCH, 1)


@pytest.mark.contract("P2")
@given(st.integers(0, ALL_ONES - 1), st.integers(1, 31))
def test_a_read_torn_between_two_counters_is_recognised(counter: int, cut: int) -> None:
    """A reader may see the first bytes of one record and the last of the next, at any byte."""
    before, after = record(EPOCH, counter), record(EPOCH, counter + 1)
    for torn in (before[:cut] + after[cut:], after[:cut] + before[cut:]):
        assert torn in (before, after) or decode(torn) is None


@pytest.mark.contract("P2")
def test_the_carry_that_reads_as_an_older_counter_is_torn() -> None:
    torn = bytearray(record(EPOCH, 0x01FF))
    torn[8] = 0x00  # the low byte is new, the rest old: 0x0100
    assert decode(torn) is None


@pytest.mark.contract("P2")
def test_between_the_two_stores_of_a_change_nothing_can_be_read() -> None:
    generations, table = fresh(1)
    for change in (generations.raise_pages, generations.seal_pages):
        before = table.copy()
        change([0])
        columns = np.flatnonzero(before[0] != table[0])
        assert len(columns) == 2
        for column in columns:
            half = before.copy()
            half[0, column] = table[0, column]
            assert decode(half.tobytes()) is None


def test_only_whole_records_are_decoded() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        decode(b"\0" * 31)
    assert decode(b"\0" * 32) is None


def test_a_table_changed_from_outside_is_found_and_never_believed() -> None:
    generations, table = fresh()
    generations.raise_pages([3])
    generations.check()
    table[3, 1] = 41
    with pytest.raises(LedgerContradictionError, match="page=3"):
        generations.check()
    assert generations.counters([3]) == (1,)
    assert generations.seal_pages([3]) == (2,)
    generations.check()


def record(epoch: int, counter: int) -> bytes:
    words = (epoch, counter, epoch ^ ALL_ONES, counter ^ ALL_ONES)
    return b"".join(word.to_bytes(8, "little") for word in words)
