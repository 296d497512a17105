"""Both reading backends between real processes: what arrives, what does not, and when access has ended."""

from collections.abc import Callable, Iterator

import pytest

from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Delivered, Failed
from tests.unit.helpers.lending_process import PAGE_BYTES, LendingProcess, content, lending_process, reader_key
from tests.unit.helpers.reader_contract import PROMISES, SLOW_BYTES_S, cancelled_rows, check_reader
from tests.unit.helpers.reader_side import MAKERS, Maker, Side, arrived_of, check_rows, memory_side
from tests.waiting import wait_until

EVERY = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
ALL = range(100)


@pytest.fixture(scope="module")
def lender() -> Iterator[LendingProcess]:
    """A lender that lives through many tests; one that dies is made for its test.

    Pages from 256 on are for tests that rewrite pages: each reader has a hundred of its own.
    """
    with lending_process(pages=256 + 100 * len(MAKERS)) as process:
        yield process


@pytest.fixture
def own_pages(maker: Maker) -> range:
    """The pages that a test of this reader may rewrite; one test a page, for a rewritten page keeps no grant."""
    first = 256 + 100 * list(MAKERS.values()).index(maker)
    return range(first, first + 100)


@EVERY
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_a_reader_keeps_its_promise(
    maker: Maker, promise: Callable[[Side, LendingProcess], None], lender: LendingProcess
) -> None:
    with maker() as side:
        promise(side, lender)


def test_the_contract_checker_runs_them_all(lender: LendingProcess) -> None:
    check_reader(memory_side, lender)


def a_segment_and_more_moved(side: Side) -> Callable[[], bool]:
    return lambda: side.bytes_moved() > 20 * PAGE_BYTES


@EVERY
def test_pages_rewritten_midway_are_not_delivered_and_others_are(
    maker: Maker, lender: LendingProcess, own_pages: range
) -> None:  # P2
    # Planted fault that this catches: counting a segment when its bytes have arrived, without the after-read.
    source = own_pages[1:]
    with maker(rate_limit_bytes_s=SLOW_BYTES_S / 2) as side:  # three seconds, so that the middle is met
        side.submit(lender.grant(source), range(99))
        # The first segment is verified by then, and the second is in its middle.
        wait_until(a_segment_and_more_moved(side))
        lender.ask("rewrite", list(source))
        change = side.end_of()
        assert isinstance(change.result, Delivered)
        assert change.result.failure is FailureClass.PAGE_CHANGED
        assert 0 < check_rows(side, change, range(99), source) < 99  # none of those that count has the new bytes
        assert "were rewritten" in change.text


@EVERY
def test_many_small_scattered_pages_arrive_each_in_its_place_but_for_those_rewritten(maker: Maker) -> None:  # P2
    pages, places = ([row * step % 700 for row in range(600)] for step in (37, 29))
    with lending_process(page_bytes=4096, pages=700) as source, maker(page_bytes=4096, pages=700) as side:
        side.submit(source.grant(pages), places)
        assert check_rows(side, side.end_of(), places, pages) == 600
        source.ask("rewrite", pages[10:20])
        side.submit(source.grant(pages, reader=reader_key("t2")), places, ticket=2)
        change = side.end_of(ticket=2)
        assert check_rows(side, change, places, pages) == 590
        assert [row for row, whole in enumerate(arrived_of(change)) if not whole] == list(range(10, 20))


@EVERY
def test_a_page_being_written_is_not_delivered(maker: Maker, lender: LendingProcess, own_pages: range) -> None:  # P1
    page = own_pages[0]
    grant = lender.grant((2, page, 4))
    lender.ask("raise", [page])
    with maker() as side:
        side.submit(grant, (2, 3, 4))
        assert arrived_of(side.end_of()) == (True, False, True)


@EVERY
def test_a_source_killed_midway_leaves_whole_pages_and_evidence(maker: Maker) -> None:
    with lending_process() as source, maker(rate_limit_bytes_s=SLOW_BYTES_S / 2) as side:
        side.submit(source.grant(ALL), ALL)
        wait_until(a_segment_and_more_moved(side))
        source.kill()
        change = side.end_of()
        assert change.evidence in {Evidence.COMPLETED, Evidence.ENDPOINT_DESTROYED}
        if side.reader.name == "memory":  # the mapping outlives its lender: all pages are there, and verified
            assert check_rows(side, change, ALL, ALL) == 100
            return
        if isinstance(change.result, Failed):
            assert change.result.failure is FailureClass.PEER_LOST
        else:
            arrived = arrived_of(change)
            kept = check_rows(side, change, ALL, ALL)
            assert 0 < kept < 100
            assert arrived[:kept] == (True,) * kept  # a prefix of the prompt, which is what is useful
        assert "broke" in change.text
        moved = side.bytes_moved()
        side.submit(source.grant((1,)), (1,), ticket=2)  # a dead peer's address still fails with an end
        assert isinstance(side.end_of(ticket=2).result, Failed)
        assert side.bytes_moved() == moved


@EVERY
def test_after_a_cancel_no_byte_lands(maker: Maker, lender: LendingProcess) -> None:  # contract 39, 41
    with maker(rate_limit_bytes_s=SLOW_BYTES_S / 2) as side:
        side.submit(lender.grant(ALL), ALL)
        wait_until(a_segment_and_more_moved(side))
        assert cancelled_rows(side, ALL, ALL) < 100
        # The next transfer makes the reader's thread go through everything that could still be in line.
        side.submit(lender.grant((5,), reader=reader_key("t2")), (200,), ticket=2)
        assert arrived_of(side.end_of(ticket=2)) == (True,)
        assert side.holds(200, content(5))
        assert side.bytes_moved() == PAGE_BYTES


@EVERY
def test_a_shutdown_midway_ends_with_evidence(maker: Maker, lender: LendingProcess) -> None:  # contract 54
    with maker(rate_limit_bytes_s=SLOW_BYTES_S) as side:
        for ticket in (1, 2, 3):
            side.submit(
                lender.grant(range(50), reader=reader_key(f"t{ticket}")),
                range(50 * ticket, 50 * ticket + 50),
                ticket=ticket,
            )
        wait_until(a_segment_and_more_moved(side))
        assert side.reader.shutdown(30.0) == ()
        moved = side.bytes_moved()
        ends = [side.end_of(ticket) for ticket in (1, 2, 3)]
        assert all(change.evidence in {Evidence.COMPLETED, Evidence.ENDPOINT_DESTROYED} for change in ends)
        side.reader.release_hold()
        assert side.bytes_moved() == moved


@EVERY
def test_an_isolation_midway_ends_that_peers_attempts_only(maker: Maker, lender: LendingProcess) -> None:
    with maker(rate_limit_bytes_s=SLOW_BYTES_S) as side:
        side.submit(lender.grant(ALL), ALL)
        side.submit(lender.grant(range(10), reader=reader_key("t2")), range(200, 210), ticket=2, peer="C")
        wait_until(a_segment_and_more_moved(side))
        side.reader.isolate("A")
        change = side.end_of()
        assert "isolated" in change.text
        assert change.evidence in {Evidence.COMPLETED, Evidence.ENDPOINT_DESTROYED}
        assert arrived_of(side.end_of(ticket=2)) == (True,) * 10


@EVERY
def test_two_peers_share_a_rate_limit(maker: Maker, lender: LendingProcess) -> None:
    with lending_process() as other, maker(rate_limit_bytes_s=SLOW_BYTES_S) as side:
        side.submit(lender.grant(ALL), ALL)
        side.submit(other.grant(ALL, reader=reader_key("t2")), range(100, 200), ticket=2, peer="C")

        def moved(pages: range) -> int:
            return sum(int((side.memory.page_bytes(page) != 0).sum()) for page in pages)

        one, two = range(100), range(100, 200)
        wait_until(lambda: moved(one) > 0 and moved(two) > 0)  # a connection takes its time: until then one has it all
        before = moved(one), moved(two)
        # Long enough that a pause of one of them does not tell.
        wait_until(lambda: moved(range(200)) > sum(before) + 80 * PAGE_BYTES)
        first, second = moved(one) - before[0], moved(two) - before[1]
        assert min(first, second) > max(first, second) / 4
        side.reader.shutdown(10.0)


@EVERY
def test_submitting_does_not_wait_for_the_bytes(maker: Maker, lender: LendingProcess) -> None:
    with maker(rate_limit_bytes_s=SLOW_BYTES_S) as side:
        side.submit(lender.grant(ALL), ALL)
        assert side.drain() == []
        assert side.bytes_moved() < 100 * PAGE_BYTES
        side.reader.cancel(1, 1)
        assert side.end_of().evidence is not None
