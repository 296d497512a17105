"""Every reading backend against bytes that no generation tells of: what differs from its digest is not delivered."""

import os
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvbus.columns import column
from kvbus.dataplane.reader import BLOCKS_NAMED_MAX
from kvbus.grants import Grant
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Delivered, Failed, SubmissionRejectedError
from kvbus.pool.digests import DigestMode, digest_of
from tests.unit.helpers.lending_process import PAGE_BYTES, LendingProcess, content, lending_process
from tests.unit.helpers.reader_contract import SLOW_BYTES_S
from tests.unit.helpers.reader_side import MAKERS, Maker, arrived_of, check_rows
from tests.waiting import wait_until

EVERY = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())


@pytest.fixture(scope="module")
def lender() -> Iterator[LendingProcess]:
    """A lender whose pages are flipped and flipped back: each test leaves them as they were."""
    with lending_process() as process:
        yield process


def flip(lender: LendingProcess, page: int, offset: int = PAGE_BYTES - 1) -> None:
    """Change one bit of a lent page as no lease allows: its generation stays what it is."""
    geometry, told = lender.described.geometry, lender.described.memory
    at = geometry.pages_offset + page * geometry.page_stride + offset
    descriptor = os.open(f"/proc/{told.process.pid}/fd/{told.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        byte = os.pread(descriptor, 1, at)[0]
        os.pwrite(descriptor, bytes([byte ^ 0x10]), at)
    finally:
        os.close(descriptor)


def digests_of(pages: Sequence[int]) -> list[int]:
    """The digests that the lender's pages had when they were sealed."""
    return [digest_of(np.full(PAGE_BYTES, content(page), dtype=np.uint8)) for page in pages]


def grant_of(lender: LendingProcess, pages: Sequence[int]) -> Grant:
    return lender.grant(pages, digests=column(digests_of(pages), 8))


@EVERY
@pytest.mark.parametrize("offset", [0, PAGE_BYTES // 2, PAGE_BYTES - 1])
def test_a_bit_flipped_at_the_source_keeps_its_page_from_delivery_and_no_other(
    maker: Maker, lender: LendingProcess, offset: int
) -> None:  # P2
    # Planted faults that this catches: no comparison in `Progress.verified`; its result not left out.
    source, local = tuple(range(20, 60)), tuple(range(100, 140))
    grant = grant_of(lender, source)
    flip(lender, 27, offset)
    try:
        with maker() as side:
            side.memory.digests.turn_on(DigestMode.GRANT)
            side.submit(grant, local)
            change = side.end_of()
            differing = side.memory.digests.differing
    finally:
        flip(lender, 27, offset)
    assert change.result == Delivered((True,) * 7 + (False,) + (True,) * 32, 39 * PAGE_BYTES, FailureClass.PAGE_DIFFERS)
    assert change.evidence is Evidence.COMPLETED
    assert check_rows(side, change, local, source) == 39
    assert "1 pages arrived with other bytes than their digests say: block 7 of page 27" in change.text
    assert differing == 1


@EVERY
def test_whole_pages_are_delivered_as_without_digests(maker: Maker, lender: LendingProcess) -> None:
    source = tuple(range(0, 200, 2))
    with maker() as side:
        side.memory.digests.turn_on(DigestMode.GRANT)
        side.submit(grant_of(lender, source), range(100))
        change = side.end_of()
        assert change.result == Delivered((True,) * 100, 100 * PAGE_BYTES)
        assert check_rows(side, change, range(100), source) == 100
        assert side.memory.digests.differing == 0


@EVERY
def test_where_one_side_makes_or_compares_none_pages_arrive_as_they_are(maker: Maker, lender: LendingProcess) -> None:
    source = (30, 31)
    grant = grant_of(lender, source)
    flip(lender, 30)
    try:
        with maker() as side:
            side.submit(grant, (1, 2))  # this side's digests are off
            assert arrived_of(side.end_of()) == (True, True)
            side.memory.digests.turn_on(DigestMode.GRANT)
            side.submit(lender.grant(source), (3, 4), ticket=2)  # and here the source's
            assert arrived_of(side.end_of(ticket=2)) == (True, True)
            side.submit(grant_of(lender, source), (5, 6), ticket=3)
            assert arrived_of(side.end_of(ticket=3)) == (False, True)
    finally:
        flip(lender, 30)


@EVERY
def test_a_transfer_of_which_every_page_differs_fails_and_names_some(maker: Maker, lender: LendingProcess) -> None:
    source = tuple(range(40))
    grant = lender.grant(source, digests=column(digests_of([page + 1 for page in source]), 8))
    with maker() as side:
        side.memory.digests.turn_on(DigestMode.GRANT)
        side.submit(grant, range(40))
        change = side.end_of()
        assert change.result == Failed(FailureClass.PAGE_DIFFERS, change.text)
        assert "block 0 of page 0, block 1 of page 1" in change.text
        assert change.text.endswith(f"and {40 - BLOCKS_NAMED_MAX} more")
        assert len(change.text) < 2_000
        assert side.memory.digests.differing == 40


@EVERY
@pytest.mark.parametrize("digests", [0, 1, 3])
def test_a_grant_with_another_number_of_digests_than_pages_moves_nothing(
    maker: Maker, lender: LendingProcess, digests: int
) -> None:  # contract 32, 47
    grant = lender.grant((1, 2), digests=column(digests_of(range(digests)), 8))
    with maker() as side:
        with pytest.raises(SubmissionRejectedError, match=f"2 pages but {digests} digests") as caught:
            side.submit(grant, (1, 2))
        assert caught.value.failure is FailureClass.GRANT_REFUSED
        assert side.bytes_moved() == 0


@EVERY
def test_a_bit_flipped_midway_is_noticed_in_the_pages_read_after_it(maker: Maker, lender: LendingProcess) -> None:
    pages = tuple(range(100))
    grant = grant_of(lender, pages)
    with maker(rate_limit_bytes_s=SLOW_BYTES_S / 2) as side:  # three seconds, so that the middle is met
        side.memory.digests.turn_on(DigestMode.GRANT)
        side.submit(grant, pages)
        wait_until(lambda: side.bytes_moved() > 20 * PAGE_BYTES)
        flip(lender, 99)
        try:
            change = side.end_of()
        finally:
            flip(lender, 99)
        assert arrived_of(change) == (True,) * 99 + (False,)
        assert "block 99 of page 99" in change.text
