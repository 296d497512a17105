"""What is read, in which order, and what counts: arithmetic, checked by carrying plans out on plain bytes."""

import mmap
import struct
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.dataplane.cutting import SPAN_GAP_RECORDS_MAX
from kvbus.dataplane.reader import EPOCHS_MAX, PEERS_MAX, Isolation, Outbox, Pace, Progress
from kvbus.dataplane.reading import (
    RUN_BYTES_MAX,
    SCRATCH_BYTES,
    SEGMENT_BYTES_MAX,
    Limits,
    LocalPool,
    Plan,
    ReadOrder,
    limits_for,
    plan,
    record_of,
    verify,
)
from kvbus.dataplane.ucp import REQUESTS_MAX
from kvbus.dataplane.ucx_link import GETS_IN_FLIGHT_MAX, NOTICES_UNDER_WAY_MAX
from kvbus.dataplane.ucx_reading import PIECES_MAX, Get, Reading, Scratch
from kvbus.events import ReaderKey, column
from kvbus.grants import Expected, Grant, PoolGeometry, UcxAccess
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import (
    Cancelled,
    Change,
    Delivered,
    Direction,
    Failed,
    LeaseView,
    Order,
    SubmissionRejectedError,
)
from kvbus.pool.generations import RECORD_BYTES, decode
from kvbus.pool.memory import HEADER_BYTES, PoolPlan

READER = ReaderKey(instance="B", member="m0", epoch=9, transfer="t1", attempt=1, rank=0)
PAGE = 64
EPOCH = 5


def geometry(pages: int, page_bytes: int = PAGE, stride: int = PAGE) -> PoolGeometry:
    own = PoolPlan.sized(pages, page_bytes=page_bytes, page_stride=stride)
    return PoolGeometry(
        base=1 << 20,
        length_bytes=own.length_bytes,
        generations_offset=own.generations_offset,
        pages_offset=own.pages_offset,
        page_stride=stride,
        page_bytes=page_bytes,
        page_count=pages,
    )


def local(pages: int, page_bytes: int = PAGE, stride: int = PAGE) -> LocalPool:
    own = PoolPlan.sized(pages, page_bytes=page_bytes, page_stride=stride)
    return LocalPool("f1", 1 << 30, own.length_bytes, own.pages_offset, stride, page_bytes, pages)


def grant(geometry_: PoolGeometry, rows: tuple[int, ...], **changes: object) -> Grant:
    fields: dict[str, object] = {
        "lender_instance": "A",
        "lender_member": "m0",
        "lender_epoch": EPOCH,
        "reader": READER,
        "ticket": 1,
        "rank": 0,
        "fingerprint": "f1",
        "nonce": b"n" * 16,
        "pool": geometry_,
        "pages": column(rows, 4),
        "counters": column((2 * page + 2 for page in rows), 8),
        "ucx": UcxAccess(address=b"a", rkey=b"k"),
    }
    return Grant.model_validate({**fields, **changes})


def order(hint: object, pages: tuple[int, ...], **changes: object) -> Order:
    count = len(pages)
    view = LeaseView("f1", 0, 9, tuple(range(count)), (b"n",) * count, pages, (1,) * count)
    return Order(1, 1, view, Direction.WRITE, hint, "A", None)._replace(**changes)  # type: ignore[arg-type]


def carry_out(checked: Plan, limits: Limits, source: bytes, target: bytearray) -> list[int]:
    """Read as a backend would, get by get, and return the rows that verify."""
    rows: list[int] = []
    for segment in checked.segments(limits):
        for run in segment.runs:
            assert 0 < run.length_bytes <= limits.run_bytes
            target[run.local : run.local + run.length_bytes] = source[run.source : run.source + run.length_bytes]
        scratch = bytearray(SCRATCH_BYTES)
        for span in segment.spans:
            assert span.local + span.length_bytes <= SCRATCH_BYTES
            scratch[span.local : span.local + span.length_bytes] = source[span.source : span.source + span.length_bytes]
        rows.extend(segment.unchanged_rows(memoryview(scratch)))
    return rows


def source_bytes(pool: PoolGeometry) -> bytearray:
    memory = bytearray(pool.length_bytes)
    for page in range(pool.page_count):
        at = pool.generations_offset + RECORD_BYTES * page
        memory[at : at + RECORD_BYTES] = record_of(EPOCH, 2 * page + 2)
        start = pool.pages_offset + pool.page_stride * page
        memory[start : start + pool.page_bytes] = struct.pack("<I", page + 1) * (pool.page_bytes // 4)
    return memory


@settings(max_examples=150, deadline=None)
@given(
    pages=st.lists(st.integers(0, 47), min_size=1, max_size=48, unique=True),
    shuffled=st.randoms(use_true_random=False),
    is_contiguous=st.booleans(),
    stride=st.sampled_from([PAGE, PAGE + 16]),
    run_bytes=st.sampled_from([16, PAGE, 3 * PAGE, 1 << 20]),
    segment_bytes=st.sampled_from([1, 5 * PAGE, 1 << 20]),
)
def test_a_plan_moves_each_page_to_its_place_and_touches_nothing_else(
    *, pages: list[int], shuffled: object, is_contiguous: bool, stride: int, run_bytes: int, segment_bytes: int
) -> None:
    source_pages = tuple(sorted(pages) if is_contiguous else pages)
    targets = list(range(48))
    if not is_contiguous:
        shuffled.shuffle(targets)  # type: ignore[attr-defined]
    pool, place = geometry(48, stride=stride), local(48, stride=stride)
    checked = plan(order(ReadOrder(grant(pool, source_pages)), tuple(targets[: len(pages)])), place, "ucx")
    source, target = source_bytes(pool), bytearray(place.length_bytes)
    rows = carry_out(checked, Limits(run_bytes, segment_bytes), bytes(source), target)
    assert sorted(rows) == list(range(len(pages)))
    wanted = bytearray(place.length_bytes)
    for row, page in enumerate(source_pages):
        start = place.pages_offset + stride * targets[row]
        wanted[start : start + PAGE] = struct.pack("<I", page + 1) * (PAGE // 4)
    assert target == wanted


def test_neighbours_on_both_sides_are_one_get_and_others_are_not() -> None:
    checked = plan(order(ReadOrder(grant(geometry(32), (4, 5, 6, 9, 10))), (0, 1, 2, 3, 7)), local(32), "ucx")
    (segment,) = checked.segments(Limits())
    assert [run.length_bytes // PAGE for run in segment.runs] == [3, 1, 1]
    assert len(segment.spans) == 1


def test_padding_between_pages_is_never_read() -> None:
    padded = PAGE + 32
    checked = plan(
        order(ReadOrder(grant(geometry(8, stride=padded), (0, 1, 2))), (0, 1, 2)), local(8, stride=padded), "ucx"
    )
    (segment,) = checked.segments(Limits())
    assert [run.length_bytes for run in segment.runs] == [PAGE] * 3


def test_long_runs_are_split_and_segments_follow_the_prompt() -> None:
    page_bytes = 2 << 20
    pages = tuple(range(16))
    checked = plan(
        order(ReadOrder(grant(geometry(16, page_bytes, page_bytes), pages)), pages),
        local(16, page_bytes, page_bytes),
        "ucx",
    )
    segments = list(checked.segments(Limits()))
    assert [segment.rows for segment in segments] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert all(run.length_bytes <= RUN_BYTES_MAX for segment in segments for run in segment.runs)
    assert all(sum(run.length_bytes for run in segment.runs) <= SEGMENT_BYTES_MAX for segment in segments)


def test_records_far_apart_never_overflow_the_scratch() -> None:
    pages = tuple(range(0, 1_000_000, 900))
    checked = plan(order(ReadOrder(grant(geometry(1_000_000), pages)), tuple(range(len(pages)))), local(2000), "ucx")
    for segment in checked.segments(Limits()):
        assert sum(span.length_bytes for span in segment.spans) <= SCRATCH_BYTES
        for row, at in zip(segment.rows, segment.records, strict=True):
            span = next(span for span in segment.spans if span.local <= at < span.local + span.length_bytes)
            assert span.source + at - span.local == HEADER_BYTES + RECORD_BYTES * pages[row]


@settings(max_examples=150, deadline=None)
@given(
    near=st.sets(st.integers(0, 60_000), min_size=1, max_size=60),
    far=st.sets(st.integers(190_000, 200_000), max_size=40),
)
def test_every_record_is_read_by_exactly_one_of_few_spans(*, near: set[int], far: set[int]) -> None:
    pages = sorted(near | far)
    checked = plan(
        order(ReadOrder(grant(geometry(200_001), tuple(pages))), tuple(range(len(pages)))), local(128), "ucx"
    )
    (segment,) = checked.segments(Limits())
    ends = [0, *(span.local + span.length_bytes for span in segment.spans)]
    assert [span.local for span in segment.spans] == ends[:-1]  # side by side, so that none lands on another
    assert ends[-1] <= SCRATCH_BYTES
    for page, at in zip(pages, segment.records, strict=True):
        span = next(span for span in segment.spans if span.local <= at < span.local + span.length_bytes)
        assert span.source + at - span.local == HEADER_BYTES + RECORD_BYTES * page
    wide = [one for one, two in pairwise(pages) if two - one > SPAN_GAP_RECORDS_MAX]
    covered = ends[-1] // RECORD_BYTES
    if pages[-1] - pages[0] < SPAN_GAP_RECORDS_MAX:
        assert len(segment.spans) == 1
    assert len(wide) + 1 <= len(segment.spans) <= len(pages)
    assert len(segment.spans) == len(wide) + 1 or covered + SPAN_GAP_RECORDS_MAX > SCRATCH_BYTES // RECORD_BYTES


def test_a_row_counts_by_its_own_record_only() -> None:  # P2
    pool = geometry(16)
    checked = plan(order(ReadOrder(grant(pool, (9, 2, 5, 3))), (0, 1, 2, 3)), local(16), "ucx")
    source = source_bytes(pool)
    at = pool.generations_offset + RECORD_BYTES * 5
    source[at : at + RECORD_BYTES] = record_of(EPOCH, 14)
    assert sorted(carry_out(checked, Limits(), bytes(source), bytearray(checked.local.length_bytes))) == [0, 1, 3]
    for word in range(4):  # whichever word of it is torn
        torn = source_bytes(pool)
        torn[at + 8 * word] ^= 1
        assert sorted(carry_out(checked, Limits(), bytes(torn), bytearray(checked.local.length_bytes))) == [0, 1, 3]


def test_a_record_counts_only_if_it_is_the_grants() -> None:  # P1, P2
    record = record_of(EPOCH, 512)
    assert verify(record, EPOCH, 512)
    assert decode(record) is not None
    assert not verify(record, EPOCH, 510)
    assert not verify(record, EPOCH + 1, 512)
    torn = bytearray(record)
    torn[8:16] = struct.pack("<Q", 0x01FF)  # one word of a raise has landed, its complement has not
    assert decode(bytes(torn)) is None
    assert not verify(bytes(torn), EPOCH, 0x01FF)
    assert not verify(bytes(torn), EPOCH, 512)


def test_rows_beyond_the_grant_do_not_arrive() -> None:
    checked = plan(order(ReadOrder(grant(geometry(8), (1, 2))), (0, 1, 2, 3)), local(8), "ucx")
    target = bytearray(checked.local.length_bytes)
    assert carry_out(checked, Limits(), bytes(source_bytes(geometry(8))), target) == [0, 1]
    assert checked.rows_wanted == 4


def refused(order_: Order, place: LocalPool | None = None, transport: str = "ucx") -> str:
    with pytest.raises(SubmissionRejectedError) as caught:
        plan(order_, place or local(8), transport)
    assert caught.value.failure is FailureClass.GRANT_REFUSED
    return caught.value.text


WIDE = geometry(8)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pages": column((1, 8), 4)}, "outside the pool"),
        ({"pages": column((1, 1), 4)}, "granted twice"),
        ({"counters": column((2, 3), 8)}, "not sealed"),
        ({"fingerprint": "f2"}, "fingerprint is f2"),
        ({"rank": 1}, "for rank 1"),
        ({"pool": WIDE.model_copy(update={"pages_offset": 8})}, "overlaps the pages"),
        ({"pool": WIDE.model_copy(update={"page_count": 9})}, "do not fit the pool"),
        ({"pool": WIDE.model_copy(update={"length_bytes": 500})}, "do not fit the pool"),
        ({"pool": WIDE.model_copy(update={"page_bytes": 128, "page_stride": 128})}, "expected 64"),
        ({"pool": WIDE.model_copy(update={"pages_offset": WIDE.pages_offset - 1})}, "pages_offset of the granted pool"),
        ({"pool": WIDE.model_copy(update={"generations_offset": 4_088})}, "generations_offset of the granted pool"),
        ({"ucx": None}, "offers no ucx access"),
    ],
)
def test_a_forged_grant_is_refused_before_anything_escapes(changes: dict[str, object], reason: str) -> None:
    # contract 32, 47
    assert reason in refused(order(ReadOrder(grant(WIDE, (1, 2), **changes)), (0, 1)))


def test_a_grant_of_another_epoch_than_asked_is_refused() -> None:  # contract 48
    expected = Expected(READER, "A", EPOCH + 1, "f1", PAGE, 2)
    assert "another epoch" in refused(order(ReadOrder(grant(WIDE, (1, 2)), expected), (0, 1)))


def test_a_lease_that_does_not_fit_the_local_pool_is_refused() -> None:
    hint = ReadOrder(grant(WIDE, (1, 2)))
    assert "outside the local pool" in refused(order(hint, (0, 8)))
    assert "one local page twice" in refused(order(hint, (1, 1)))
    assert "2 pages granted, 1 asked" in refused(order(hint, (1,)))
    elsewhere = order(hint, (0, 1))
    elsewhere = elsewhere._replace(view=elsewhere.view._replace(pool="f2"))
    assert "lease is for pool f2" in refused(elsewhere)
    assert "do not fit the local pool" in refused(order(hint, (0, 1)), replace(local(8), length_bytes=64))
    assert "fills write leases" in refused(order(hint, (0, 1), direction=Direction.READ))
    assert "expected a ReadOrder" in refused(order("grant", (0, 1)))


def test_a_rate_limit_cuts_finer_and_none_does_not() -> None:
    assert limits_for(None) == Limits()
    assert limits_for(1 << 20).run_bytes < 64 << 10
    assert limits_for(1.0).run_bytes == 4096
    assert limits_for(1e12) == Limits()


def gets_of(page_bytes: int, limits: Limits) -> list[Get]:
    """What a UCX attempt has ready at first, for 40 pages that lie apart."""
    pages = tuple(range(0, 80, 2))
    pool, place = geometry(80, page_bytes, page_bytes), local(80, page_bytes, page_bytes)
    order_ = order(ReadOrder(grant(pool, pages)), pages)
    handle: Any = "the pool's"
    scratch = Scratch(mmap.mmap(-1, Scratch.length_bytes()), 1 << 20, handle)
    reading = Reading(Progress(order_, plan(order_, place, "ucx")), limits, scratch, handle, reads_before=False)
    assert reading.refill()
    return list(reading.ready)


@pytest.mark.parametrize(("page_bytes", "together"), [(4 << 10, 8), (64 << 10, 8), (128 << 10, 4), (1 << 20, 1)])
def test_small_pages_are_posted_a_few_together_and_large_ones_alone(page_bytes: int, together: int) -> None:
    gets = gets_of(page_bytes, Limits())
    pieces = [piece for get in gets for piece in get.pieces]
    assert {len(get.pieces) for get in gets[:-1]} <= {together}
    assert all(get.length_bytes == sum(length for _, length, _ in get.pieces) for get in gets)
    rows = min(40, SEGMENT_BYTES_MAX // page_bytes)
    first = PoolPlan.sized(80, page_bytes=page_bytes, page_stride=page_bytes).pages_offset
    places = [first + 2 * page_bytes * row for row in range(rows)]
    assert pieces == [((1 << 30) + place, page_bytes, (1 << 20) + place) for place in places]


def test_what_is_posted_together_stays_within_a_rate_limits_share() -> None:
    limits = limits_for(1 << 20)
    gets = gets_of(16 << 10, limits)
    assert max(get.length_bytes for get in gets) <= limits.run_bytes < 4 * (16 << 10)
    assert {len(get.pieces) for get in gets[:-1]} == {3}


def test_what_a_link_may_have_under_way_fits_its_endpoint() -> None:
    assert GETS_IN_FLIGHT_MAX * PIECES_MAX + NOTICES_UNDER_WAY_MAX < REQUESTS_MAX


def test_a_pace_makes_the_next_operation_pay_for_the_last() -> None:
    pace = Pace(1000.0)
    assert pace.wait_s(50.0) == 0
    pace.spend(500, 50.0)
    assert pace.wait_s(50.0) == pytest.approx(0.5)
    assert pace.wait_s(50.6) == 0
    free = Pace(None)
    free.spend(1 << 40, 1.0)
    assert free.wait_s(1.0) == 0


# ------------------------------------------------------------------------------------------ results and isolation


def progress(pages: tuple[int, ...] = (1, 2), wanted: int = 2) -> Progress:
    order_ = order(ReadOrder(grant(WIDE, pages)), tuple(range(wanted)))
    return Progress(order_, plan(order_, local(8), "ucx"))


def test_whole_delivery_needs_no_words() -> None:
    made = progress()
    (segment,) = made.plan.segments(Limits())
    made.verified(segment, segment.rows)
    assert made.change(Evidence.COMPLETED) == Change(1, 1, Delivered((True, True), 2 * PAGE), Evidence.COMPLETED, "")


def test_changed_pages_are_not_delivered_and_are_named() -> None:  # P2
    made = progress()
    (segment,) = made.plan.segments(Limits())
    made.verified(segment, (1,))
    change = made.change(Evidence.COMPLETED)
    assert change.result == Delivered((False, True), PAGE, FailureClass.PAGE_CHANGED)
    assert "1 of 2 pages arrived: 1 pages were rewritten" in change.text


def test_nothing_but_changed_pages_is_a_failure() -> None:
    made = progress()
    (segment,) = made.plan.segments(Limits())
    made.verified(segment, ())
    change = made.change(Evidence.COMPLETED)
    assert change.result == Failed(FailureClass.PAGE_CHANGED, change.text)


def test_the_first_reason_to_stop_stands() -> None:
    made = progress()
    made.fail(FailureClass.PEER_LOST, "the source is gone")
    made.fail(FailureClass.CANCELLED, "cancelled")
    change = made.change(Evidence.ENDPOINT_DESTROYED)
    assert change.result == Failed(FailureClass.PEER_LOST, change.text)
    assert "the source is gone" in change.text
    stopped = progress()
    stopped.fail(FailureClass.CANCELLED, "cancelled")
    assert stopped.change(Evidence.COMPLETED).result == Cancelled((False, False), 0)


def test_a_short_grant_is_explained() -> None:
    made = progress(pages=(1,))
    (segment,) = made.plan.segments(Limits())
    made.verified(segment, segment.rows)
    change = made.change(Evidence.COMPLETED)
    assert change.result == Delivered((True, False), PAGE)
    assert "the grant covers 1 of 2 pages" in change.text


def test_an_isolation_binds_the_epochs_seen_until_then() -> None:
    isolation = Isolation()
    assert not isolation.refuses("A", 1)
    isolation.isolate("A")
    assert isolation.refuses("A", 1)
    assert not isolation.refuses("A", 2)
    assert not isolation.refuses("C", 1)
    isolation.isolate("D")
    assert isolation.refuses("D", 4)
    assert not isolation.refuses("D", 5)
    assert isolation.peers() == ("A", "D")


def test_what_an_isolation_remembers_is_bounded() -> None:
    isolation = Isolation()
    for n in range(PEERS_MAX + 10):
        isolation.refuses(f"p{n}", 1)
        isolation.isolate(f"p{n}")
    for epoch in range(EPOCHS_MAX + 10):
        isolation.refuses("A", epoch)
    assert len(isolation.peers()) < PEERS_MAX
    assert len(isolation._seen) <= PEERS_MAX
    assert len(isolation._seen["A"]) == EPOCHS_MAX


def test_the_wake_comes_after_the_change_is_listed() -> None:  # R9
    listed: list[int] = []
    outbox = Outbox(lambda: listed.append(len(outbox._changes)))
    outbox.open((1, 1))
    outbox.report(Change(1, 1, Failed(FailureClass.TRANSPORT, "x")))
    assert outbox.unfinished() == ((1, 1),)
    outbox.report(Change(1, 1, evidence=Evidence.COMPLETED))
    assert listed == [1, 2]
    assert outbox.unfinished() == ()
    assert len(outbox.drain()) == 2
    assert outbox.drain() == []


def test_an_attempt_is_cancelled_at_most_once() -> None:  # contract 39
    outbox = Outbox(lambda: None)
    outbox.open((1, 1))
    with pytest.raises(SubmissionRejectedError):
        outbox.open((1, 1))
    assert outbox.first_cancel((1, 1))
    assert not outbox.first_cancel((1, 1))
    assert not outbox.first_cancel((2, 1))
    outbox.withdraw((1, 1))
    assert outbox.unfinished() == ()
