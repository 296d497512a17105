"""The promises of every reading backend, checked between two processes: `check_reader(maker)`."""

import random
from collections.abc import Callable

import pytest

from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Backend, Cancelled, Delivered, Failed, SubmissionRejectedError
from tests.unit.helpers.lending_process import PAGE_BYTES, LendingProcess, reader_key
from tests.unit.helpers.reader_side import CANARY, Maker, Side, arrived_of, check_rows

SLOW_BYTES_S = 4 << 20
"""Sixty-four pages of 64 KiB a second, in segments of sixteen: a transfer of a hundred takes seconds."""


def check_reader(maker: Maker, lender: LendingProcess) -> None:
    """Run every promise that needs no death of the lender; a third-party backend can be given as well."""
    for promise in PROMISES:
        with maker() as side:
            promise(side, lender)


def contiguous_pages_arrive_byte_for_byte(side: Side, lender: LendingProcess) -> None:
    source, local = tuple(range(40, 140)), tuple(range(10, 110))
    side.submit(lender.grant(source), local)
    change = side.end_of()
    assert change.evidence is Evidence.COMPLETED
    assert change.result == Delivered((True,) * 100, 100 * PAGE_BYTES)
    assert check_rows(side, change, local, source) == 100
    assert side.bytes_moved() == 100 * PAGE_BYTES


def scattered_pages_arrive_byte_for_byte(side: Side, lender: LendingProcess) -> None:
    chance = random.Random(11)
    source, local = tuple(chance.sample(range(256), 150)), tuple(chance.sample(range(256), 150))
    side.submit(lender.grant(source), local)
    change = side.end_of()
    assert check_rows(side, change, local, source) == 150
    assert side.bytes_moved() == 150 * PAGE_BYTES


def rows_beyond_the_grant_stay_untouched(side: Side, lender: LendingProcess) -> None:
    side.submit(lender.grant((1, 2)), (5, 6, 7))
    change = side.end_of()
    assert arrived_of(change) == (True, True, False)
    assert side.holds(7, CANARY)
    assert "covers 2 of 3" in change.text


def a_page_rewritten_before_is_not_delivered(side: Side, lender: LendingProcess) -> None:  # P2
    grant = lender.grant((200, 201, 202))
    stale = lender.grant(
        (200, 201, 202), counters=grant.counters[:8] + (1 << 40).to_bytes(8, "little") + grant.counters[16:]
    )
    side.submit(stale, (1, 2, 3))
    change = side.end_of()
    assert arrived_of(change) == (True, False, True)
    assert "1 pages were rewritten" in change.text
    side.submit(lender.grant((203,), counters=(4).to_bytes(8, "little")), (4,), ticket=2)
    change = side.end_of(ticket=2)
    assert isinstance(change.result, Failed)
    assert change.result.failure is FailureClass.PAGE_CHANGED
    assert change.evidence is Evidence.COMPLETED


def an_epoch_that_is_not_the_tables_is_not_delivered(side: Side, lender: LendingProcess) -> None:  # contract 48
    side.submit(lender.grant((1, 2), lender_epoch=12345), (1, 2))
    change = side.end_of()
    assert isinstance(change.result, Failed)
    assert change.result.failure in {FailureClass.PAGE_CHANGED, FailureClass.GRANT_REFUSED}


def many_attempts_at_once_keep_apart(side: Side, lender: LendingProcess) -> None:
    for ticket in range(1, 9):
        first = 30 * (ticket - 1)
        grant = lender.grant(range(first, first + 30), reader=reader_key(f"t{ticket}"))
        side.submit(grant, range(first, first + 30), ticket=ticket)
    for ticket in range(1, 9):
        first = 30 * (ticket - 1)
        assert check_rows(side, side.end_of(ticket), range(first, first + 30), range(first, first + 30)) == 30
    assert len(side.seen) == 8


def refused_orders_move_nothing(side: Side, lender: LendingProcess) -> None:  # contract 32, 47
    geometry = lender.described.geometry
    for changes in (
        {"pool": geometry.model_copy(update={"pages_offset": 64})},
        {"pool": geometry.model_copy(update={"length_bytes": geometry.length_bytes // 2})},
        {"pages": (7).to_bytes(4, "little") * 2},
        {"pages": (1 << 20).to_bytes(4, "little") * 2},
        {"fingerprint": "another"},
        {"counters": (3).to_bytes(8, "little") * 2},
        {side.reader.name: None},
    ):
        grant = lender.grant((1, 2), **changes)
        with pytest.raises(SubmissionRejectedError) as caught:
            side.submit(grant, (1, 2))
        assert caught.value.failure is FailureClass.GRANT_REFUSED
    assert side.drain() == []
    assert side.bytes_moved() == 0
    assert side.reader.shutdown(0.0) == ()


def one_attempt_is_not_submitted_twice(side: Side, lender: LendingProcess) -> None:
    side.reader.cancel(1, 1)  # unknown yet: nothing to stop, nothing remembered
    grant = lender.grant(range(200))
    side.submit(grant, range(200))
    with pytest.raises(SubmissionRejectedError) as caught:
        side.submit(grant, range(200))
    assert caught.value.failure is FailureClass.CONTRADICTION
    assert sum(arrived_of(side.end_of())) == 200
    side.reader.cancel(1, 1)  # ended already
    side.submit(lender.grant((1,)), (1,), attempt=2)
    side.end_of(attempt=2)
    assert len(side.seen) == 2


def an_isolated_peer_gets_nothing_new_and_others_do(side: Side, lender: LendingProcess) -> None:
    side.submit(lender.grant((1,)), (1,))
    side.end_of()
    side.reader.isolate("A")
    with pytest.raises(SubmissionRejectedError) as caught:
        side.submit(lender.grant((2,)), (2,), ticket=2)
    assert caught.value.failure is FailureClass.PEER_LOST
    side.submit(lender.grant((2,)), (2,), ticket=3, peer="C")
    assert arrived_of(side.end_of(ticket=3)) == (True,)


def shutdown_can_be_repeated_and_refuses_work(side: Side, lender: LendingProcess) -> None:  # contract 56
    side.submit(lender.grant(range(256)), range(256))
    assert side.reader.shutdown(5.0) == ()
    assert side.reader.shutdown(0.0) == ()
    evidence = side.end_of().evidence
    never = evidence is Evidence.NEVER_SUBMITTED and side.bytes_moved() == 0  # it came before the first question
    assert never or evidence in {Evidence.COMPLETED, Evidence.ENDPOINT_DESTROYED}
    with pytest.raises(SubmissionRejectedError) as caught:
        side.submit(lender.grant((1,)), (1,), ticket=2)
    assert caught.value.failure is FailureClass.SHUTDOWN
    side.reader.release_hold()
    side.reader.release_hold()
    assert side.reader.shutdown(0.0) == ()


def it_is_a_backend_with_a_face(side: Side, lender: LendingProcess) -> None:
    backend: Backend = side.reader
    assert backend.name in repr(lender.grant((1,)))
    assert "Reader" in repr(backend)


PROMISES: tuple[Callable[[Side, LendingProcess], None], ...] = (
    contiguous_pages_arrive_byte_for_byte,
    scattered_pages_arrive_byte_for_byte,
    rows_beyond_the_grant_stay_untouched,
    a_page_rewritten_before_is_not_delivered,
    an_epoch_that_is_not_the_tables_is_not_delivered,
    many_attempts_at_once_keep_apart,
    refused_orders_move_nothing,
    one_attempt_is_not_submitted_twice,
    an_isolated_peer_gets_nothing_new_and_others_do,
    shutdown_can_be_repeated_and_refuses_work,
    it_is_a_backend_with_a_face,
)


def cancelled_rows(side: Side, local: range, source: range) -> int:
    """Cancel ticket 1 and return how many rows it kept; asserts that no byte lands after its evidence."""
    side.reader.cancel(1, 1)
    change = side.end_of()
    moved = side.bytes_moved()
    assert isinstance(change.result, Cancelled)
    assert change.evidence is not None
    kept = check_rows(side, change, local, source)
    assert change.result.length_bytes == kept * PAGE_BYTES
    for page in local:
        side.memory.page_bytes(page)[:] = CANARY
    assert moved >= kept * PAGE_BYTES
    return kept
