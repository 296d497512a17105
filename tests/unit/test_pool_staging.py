"""Leases on slots wait in line; what a freed request leaves behind is copied nowhere; the lender keeps the contract."""

import contextlib
import itertools
from collections.abc import Iterator

import pytest

from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import Evidence, Fact
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Direction, Lease, LeaseView, SubmitMode
from kvbus.names import page_names
from kvbus.pool import staging
from kvbus.pool.lease import PoolLease
from kvbus.pool.memory import PoolMemory
from kvbus.pool.staging import SlotBytes, StagingLender
from kvbus.testing.cases import LenderCase
from kvbus.testing.contracts import check_lender
from kvbus.testing.ledger_parts import ManualBackend
from tests.unit.pool_parts import EPOCH, TOY, names_of

NAMES = names_of(8)


class Cache:
    """An engine's own cache: blocks of requests in arrays; it may be told to raise at a block."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, int], bytes] = {}
        self.raises_at: set[tuple[str, int]] = set()

    def copy_out(self, request: str, ordinal: int, slot: SlotBytes) -> None:
        self.strike(request, ordinal)
        slot[:] = bytearray(self.blocks.get((request, ordinal), bytes(len(slot))))

    def copy_in(self, request: str, ordinal: int, slot: SlotBytes) -> None:
        self.strike(request, ordinal)
        self.blocks[request, ordinal] = slot.tobytes()

    def strike(self, request: str, ordinal: int) -> None:
        if (request, ordinal) in self.raises_at:
            raise OSError("the stream failed")


class Staged:
    """A lender of few slots over a cache; `lend` opens a request for each lease."""

    def __init__(self, slots: int = 4) -> None:
        self.cache, self.memory = Cache(), PoolMemory.create(TOY, slots, EPOCH)
        self.lender = StagingLender(self.memory, self.cache, name="staging")
        self._numbers = itertools.count(1)

    def lend(self, rows: int, direction: Direction = Direction.WRITE, request: str = "") -> PoolLease:
        if not request:
            request = f"r{next(self._numbers)}"
            self.lender.open_request(request)
        lend = self.lender.lend_read if direction is Direction.READ else self.lender.lend_write
        return lend(request, NAMES[:rows], range(rows))

    def round(self) -> list[int]:
        changed = list(self.lender.progress())
        self.lender.check()
        return changed

    def fills(self, lease: PoolLease, byte: int, *, arrived: bool = True) -> None:
        """Write into the lease's slots, mark it and give it back."""
        for slot in view_of(lease).pages:
            self.memory.page_bytes(slot)[:] = byte
        lease.mark_arrived([arrived] * len(lease.pages))
        lease.release()
        self.lender.check()


@pytest.fixture
def staged() -> Staged:
    return Staged()


def view_of(lease: PoolLease) -> LeaseView:
    view = lease.poll()
    assert view is not None, lease.failure
    return view


def waits(lease: PoolLease) -> bool:
    return lease.failure is None and lease.poll() is None


# ---------------------------------------------------------------------------------------------------------- in a line


def test_leases_wait_in_order_and_none_overtakes(staged: Staged) -> None:
    # contract 20, 12
    first, large, small = staged.lend(3), staged.lend(4), staged.lend(1)
    assert staged.round() == [first.lease_id]
    assert waits(large)
    assert waits(small), "it would fit, but another one stands before it"
    view_of(first)
    staged.fills(first, 1)
    assert staged.round() == [large.lease_id]
    assert waits(small)
    view = view_of(large)
    staged.fills(large, 2)
    assert staged.round() == [small.lease_id]
    assert view_of(small).counters > view.counters[:1]


def test_a_lease_without_rows_stands_in_no_line(staged: Staged) -> None:
    # contract 20
    staged.lend(3)
    waiting = staged.lend(4)
    staged.round()
    for direction in Direction:
        empty = staged.lend(0, direction)
        assert view_of(empty).pages == ()
    assert waits(waiting)


def test_a_lease_that_waits_and_is_released_makes_room_for_those_behind(staged: Staged) -> None:
    # contract 20, 15
    staged.lend(3)
    large, small = staged.lend(4), staged.lend(1)
    staged.round()
    large.release()
    assert staged.round() == [small.lease_id]


def test_a_lease_that_needs_more_than_there_will_ever_be_fails_and_blocks_nobody(staged: Staged) -> None:
    # contract 20, 13
    staged.cache.raises_at = {("broken", 0)}
    staged.lender.open_request("broken")
    broken = staged.lend(1, Direction.READ, "broken")
    large, small = staged.lend(4), staged.lend(2)
    assert staged.round() == [broken.lease_id, large.lease_id, small.lease_id]
    assert broken.failure is not None
    assert "the stream failed" in broken.failure.text
    assert large.failure is not None
    assert "4 slots asked for, only 3 are left for good" in large.failure.text
    assert len(view_of(small).pages) == 2
    assert staged.lender.statistics().lost == 1


def test_a_request_whose_lease_failed_in_line_may_be_written_again(staged: Staged) -> None:
    # contract 23, 13
    staged.cache.raises_at = {("broken", 0)}
    for request in ("broken", "large"):
        staged.lender.open_request(request)
    staged.lend(1, Direction.READ, "broken")
    large = staged.lend(4, request="large")
    staged.round()
    assert large.failure is not None
    assert staged.lend(2, request="large").failure is None


def test_a_slot_that_a_failed_copy_may_still_touch_is_never_used_again(staged: Staged) -> None:
    # contract 20, 18
    staged.cache.raises_at = {("broken", 0)}
    staged.lender.open_request("broken")
    staged.lend(1, Direction.READ, "broken")
    staged.round()
    lost = set(range(4)) - {slot for lease in [staged.lend(1) for _ in range(4)] for slot in granted(staged, lease)}
    assert len(lost) == 1
    assert staged.lender.statistics().waiting == 1


def granted(staged: Staged, lease: PoolLease) -> tuple[int, ...]:
    staged.round()
    view = lease.poll()
    return view.pages if view else ()


def test_a_line_that_is_too_long_takes_nobody_more(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    # contract 20, 50
    monkeypatch.setattr(staging, "WAITING_MAX", 2)
    staged.lend(4)
    staged.lend(1)
    refused = staged.lend(1)
    assert refused.failure is not None
    assert "2 leases wait already" in refused.failure.text


# ----------------------------------------------------------------------------------------------------- freed requests


def test_when_a_request_is_freed_its_waiting_leases_fail_and_others_go_on(staged: Staged) -> None:
    # contract 21
    staged.lend(4)
    staged.lender.open_request("freed")
    gone, other = staged.lend(1, request="freed"), staged.lend(1)
    staged.round()
    staged.lender.free_request("freed")
    assert gone.failure is not None
    assert "was freed" in gone.failure.text
    assert staged.round() == [gone.lease_id]
    assert waits(other)
    assert staged.lend(1, request="freed").failure is not None, "it is open no more"


def test_a_granted_read_of_a_freed_request_still_gives_what_was_there(staged: Staged) -> None:
    # contract 21
    staged.lender.open_request("freed")
    staged.cache.blocks["freed", 0] = bytes([7]) * TOY.page_bytes
    lease = staged.lend(1, Direction.READ, "freed")
    staged.round()
    (slot,) = view_of(lease).pages
    staged.lender.free_request("freed")
    staged.cache.blocks["freed", 0] = bytes([9]) * TOY.page_bytes  # somebody else's by now
    staged.round()
    assert set(staged.memory.page_bytes(slot)) == {7}
    assert staged.memory.generations.counters((slot,)) == view_of(lease).counters
    lease.release()
    assert staged.lender.statistics().free == 4


@pytest.mark.parametrize("reopened", [False, True])
def test_a_granted_write_of_a_freed_request_copies_nothing(staged: Staged, *, reopened: bool) -> None:
    # contract 21, 17
    staged.lender.open_request("freed")
    lease = staged.lend(2, request="freed")
    staged.round()
    view_of(lease)
    staged.lender.free_request("freed")
    if reopened:
        staged.lender.open_request("freed")
        staged.cache.blocks["freed", 0] = b"its next life"
    assert lease.bounds((True, True)) == (0, 0), "nothing to resume from"
    before = dict(staged.cache.blocks)
    staged.fills(lease, 5)
    assert staged.cache.blocks == before
    assert staged.lender.statistics().free == 4


# -------------------------------------------------------------------------------------------------- writes, one by one


def test_rows_that_arrived_are_copied_in_when_the_lease_comes_back_and_others_are_not(staged: Staged) -> None:
    # contract 17, 25
    staged.lender.open_request("r")
    lease = staged.lend(2, request="r")
    staged.round()
    for slot in view_of(lease).pages:
        staged.memory.page_bytes(slot)[:] = 5
    lease.mark_arrived((True, False))
    assert staged.cache.blocks == {}
    lease.release()
    assert staged.cache.blocks == {("r", 0): bytes([5]) * TOY.page_bytes}


def test_slots_of_a_write_that_was_seen_and_not_marked_stay_out_until_it_is(staged: Staged) -> None:
    # contract 18, 20
    lease, next_in_line = staged.lend(2), staged.lend(3)
    staged.round()
    view_of(lease)
    lease.release()
    assert staged.round() == []
    assert staged.lender.statistics().unmarked == 2
    lease.mark_arrived((False, False))
    assert staged.round() == [next_in_line.lease_id]


def test_a_write_released_before_its_view_was_seen_needs_no_mark_and_brings_nothing(staged: Staged) -> None:
    # contract 19
    lease = staged.lend(4)
    staged.round()
    lease.release()
    assert staged.lender.statistics().free == 4
    assert staged.cache.blocks == {}


def test_a_second_write_into_a_request_is_refused_until_the_first_came_back(staged: Staged) -> None:
    # contract 23, R22
    staged.lender.open_request("r")
    first = staged.lend(1, request="r")
    second = staged.lend(1, request="r")
    assert second.failure is not None
    assert "being written already" in second.failure.text
    staged.round()
    second.release()
    assert staged.lend(1, request="r").failure is not None, "the refused one opened no way"
    view_of(first)
    staged.fills(first, 1)
    assert staged.lend(1, request="r").failure is None


def test_where_what_arrived_cannot_be_copied_in_the_return_fails_once_and_the_lender_stops() -> None:
    # contract 7, 17
    staged = Staged()
    pull = ManualBackend("pull")
    holder = LeaseHolder(bindings=[Binding("pull", pull, Direction.WRITE)], lenders=[staged.lender])
    staged.lender.open_request("r")
    staged.cache.raises_at = {("r", 1)}
    mode = SubmitMode("pull", Direction.WRITE)
    ticket = holder.take(staged.lend(3, request="r"), mode, "grant", now=0.0, peer="peer", transfer="t")
    holder.advance()
    pull.deliver(ticket, evidence=Evidence.COMPLETED)
    holder.collect()
    holder.settle([ticket])
    holder.finish()
    facts = holder.collect()
    bits = {number: bits for number, _, bits, _, _ in facts.lines}[ticket]
    assert bits & Fact.RETURN_FAILED
    assert not bits & Fact.CONSUMED
    assert holder.statistics().lenders_stopped == ("staging",)
    assert set(staged.cache.blocks) == {("r", 0)}


def test_slots_are_not_fenced(staged: Staged) -> None:
    # P5
    staged.lender.open_request("r")
    lease = staged.lend(1, Direction.READ, "r")
    staged.round()
    counters = view_of(lease).counters
    assert lease.fence() is not None
    assert not lease.fenced
    assert staged.memory.generations.counters(lease.pages) == counters


# ------------------------------------------------------------------------------------------------------- the contract


@contextlib.contextmanager
def staging_case() -> Iterator[LenderCase]:
    staged = Staged(slots=12)
    lender, prompts = staged.lender, itertools.count(1)
    named: dict[tuple[str, int], bytes] = {}

    def names(rows: int) -> tuple[bytes, ...]:
        return page_names(TOY.namespace("salt"), [next(prompts)] * (TOY.block_tokens * rows), TOY.block_tokens)

    def lend(direction: Direction, rows: int) -> Lease:
        wanted, request = names(rows), f"q{next(prompts)}"
        lender.open_request(request)
        if direction is Direction.READ:
            return lender.lend_read(request, wanted, range(rows))
        named.update({(request, row): name for row, name in enumerate(wanted)})
        return lender.lend_write(request, wanted, range(rows))

    two = names(2)
    lender.open_request("r")
    yield LenderCase(
        lender,
        lend,
        refused=lambda: lender.lend_write("freed", names(2), range(2)),
        faults=(
            lambda: lender.lend_write("r", two, (3, 1)),
            lambda: lender.lend_write("r", two, (-1, 0)),
            lambda: lender.lend_write("r", two, (0,)),
            lambda: lender.lend_write("r", (two[0], two[0]), (0, 1)),
            lambda: lender.lend_write("r", [bytes([n]) * 16 for n in range(13)], range(13)),
            lambda: lender.lend_read("r", (b"short", two[0]), (0, 1)),
            lambda: lender.open_request("r"),
            lambda: lender.free_request("never opened"),
        ),
        state=lambda: (lender.statistics().free, lender.statistics().lent, lender.statistics().unmarked),
        content=lambda: {named[place] for place in staged.cache.blocks},
    )
    lender.check()


def test_it_keeps_the_contract_of_lenders() -> None:
    # contract 10–19, 25, 27, 28, 48
    check_lender(staging_case)
