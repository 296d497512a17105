"""The gate: repeats, load and counters of one instance, whatever the order of what happens."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbus.gateway.gate import GateStatistics, TransferGate
from kvbus.gateway.records import Record
from kvbus.gateway.settings import GatewaySettings

TTL_S = 300.0
ENTRIES_MAX = 20_000


def gate(inflight_max: int = 4, ttl_s: float = TTL_S, entries_max: int = ENTRIES_MAX) -> TransferGate:
    return TransferGate(inflight_max=inflight_max, dedup_ttl_s=ttl_s, entries_max=entries_max)


def record(name: object = "h", now: float = 0.0) -> Record:
    return Record(f"{name}", "a", "b", "", now, 0.0)


def fired(one: TransferGate, name: object = "h", now: float = 0.0) -> Record:
    passed = one.enter(record(name, now))
    assert passed.word == "new", passed
    assert passed.record is not None
    one.fire(passed.record)
    return passed.record


def identity_holds(numbers: GateStatistics) -> bool:
    return numbers.fired == numbers.transferred + numbers.failed + numbers.inflight


# H9
def test_a_repeat_joins_until_the_dedup_time_has_passed_since_acceptance() -> None:
    one = gate()
    first = fired(one, now=10.0)
    one.end(first, "transferred")

    for now in (10.0, 200.0, 309.9):
        passed = one.enter(record(now=now))
        assert (passed.word, passed.record) == ("repeat", first)
        one.repeated(first)
    assert one.enter(record(now=310.0)).word == "new"
    assert one.statistics(310.0).deduped == 3


def test_a_repeat_joins_a_request_that_runs_however_long_it_takes() -> None:
    one = gate()
    first = fired(one)

    assert one.enter(record(now=10 * TTL_S)).record is first
    one.end(first, "transferred")
    assert one.enter(record(now=10 * TTL_S)).word == "new"


# H10, H11
def test_a_repeat_is_told_before_load_and_load_keeps_nothing() -> None:
    one = gate(inflight_max=2)
    first = fired(one, "first")
    fired(one, "second")

    assert one.enter(record("first")).word == "repeat"
    assert one.enter(record("third")).word == "busy"
    one.was_busy()
    assert len(one) == 2
    assert one.find("third") is None
    one.end(first, "transferred")
    assert one.enter(record("third")).word == "new"
    assert one.statistics(0.0).skipped_busy == 1


# H11
def test_a_cap_of_zero_is_always_busy() -> None:
    one = gate(inflight_max=0)
    assert one.enter(record()).word == "busy"
    assert len(one) == 0


def test_those_that_are_still_asked_about_count_toward_the_cap() -> None:
    one = gate(inflight_max=2)
    asking = [one.enter(record(name)).record for name in ("first", "second")]

    assert one.enter(record("third")).word == "busy"
    assert one.statistics(0.0).inflight == 0
    assert asking[0] is not None
    one.withdraw(asking[0])
    assert one.enter(record("third")).word == "new"
    assert one.statistics(0.0).fired == 0


# H12
def test_a_request_is_remembered_before_it_is_fired_and_counted_once_it_is() -> None:
    one = gate()
    passed = one.enter(record())
    assert one.enter(record()).word == "repeat"
    assert passed.record is not None
    one.fire(passed.record)
    numbers = one.statistics(0.0)
    assert (numbers.fired, numbers.inflight, numbers.seen) == (1, 1, 1)


# H17
@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_what_failed_may_be_tried_again_at_once_and_can_still_be_looked_at(status: str) -> None:
    one = gate()
    first = fired(one)
    one.end(first, status, reason="why")  # type: ignore[arg-type] # both are statuses

    assert one.find("h") is first
    assert one.enter(record()).word == "new"
    assert one.statistics(0.0).failed == 1


# H18
def test_an_end_is_counted_once() -> None:
    one = gate()
    first = fired(one)
    one.end(first, "failed")
    one.end(first, "transferred")

    numbers = one.statistics(0.0)
    assert (numbers.transferred, numbers.failed, numbers.inflight) == (0, 1, 0)
    assert first.status == "failed"


# H21
def test_the_end_of_an_old_transfer_forgets_no_later_one_of_the_same_prompt() -> None:
    one = gate()
    old = fired(one, now=0.0)
    one.end(old, "transferred")
    new = fired(one, now=TTL_S)
    one.end(old, "failed")

    assert one.enter(record(now=TTL_S)).record is new
    assert identity_holds(one.statistics(TTL_S))


# H21
def test_a_failed_request_that_grows_old_forgets_no_later_one_of_the_same_prompt() -> None:
    one = gate()
    one.end(fired(one, now=0.0), "failed")
    second = fired(one, now=200.0)
    one.end(second, "transferred")

    assert one.enter(record(now=TTL_S)).record is second


# H22
def test_a_dedup_time_of_zero_lets_repeats_join_only_what_runs() -> None:
    one = gate(ttl_s=0.0, inflight_max=1)
    first = fired(one)
    assert one.enter(record()).record is first
    assert one.enter(record("other")).word == "busy"
    one.end(first, "transferred")
    assert one.enter(record()).word == "new"
    assert one.statistics(0.0).seen == 1


# H24
def test_more_distinct_prompts_than_are_remembered_take_no_more_room() -> None:
    one = gate()
    for number in range(22_000):
        one.end(fired(one, number, now=number / 1_000), "transferred")

    numbers = one.statistics(22.0)
    assert numbers.seen == len(one) == ENTRIES_MAX
    assert (numbers.fired, numbers.transferred) == (22_000, 22_000)
    assert len(one._latest) == len(one._by_age) == ENTRIES_MAX
    assert one.enter(record(21_999, now=22.0)).word == "repeat"
    assert one.enter(record(0, now=22.0)).word == "new"  # the oldest made room


# H24
def test_what_fails_takes_no_more_room_either() -> None:
    one = gate(entries_max=100)
    for number in range(1_000):
        one.end(fired(one, number), "failed")
    assert len(one) == 0
    assert max(len(one._latest), len(one._by_age)) <= 100


# H24
def test_what_is_past_its_time_counts_no_more() -> None:
    one = gate()
    for number in range(100):
        one.end(fired(one, number), "transferred")
    assert one.statistics(TTL_S - 1).seen == 100
    assert one.statistics(TTL_S).seen == 0


# H24
def test_a_request_costs_the_same_however_much_is_remembered() -> None:
    costs = {}
    for remembered in (10, 1_000, 21_000):
        one = gate()
        for number in range(remembered):
            one.end(fired(one, number), "transferred")

        def new(one: TransferGate = one) -> None:
            one.end(fired(one, "new"), "transferred")

        def repeat(one: TransferGate = one) -> None:
            one.enter(record("new"))

        costs[remembered] = (lines_run(new), lines_run(repeat))

    assert costs[10] == costs[1_000]
    assert costs[21_000][0] <= costs[10][0] + 10  # one old request makes room
    assert costs[21_000][1] == costs[10][1]


# H24
def test_what_runs_is_never_dropped_to_make_room() -> None:
    one = gate(inflight_max=3, entries_max=3)
    running = fired(one, "running")
    for number in range(10):
        one.end(fired(one, number), "transferred")

    assert one.enter(record("running")).record is running
    one.end(running, "transferred")
    assert one.enter(record("running")).word == "new"  # it was past its turn, and ends with its transfer


# H25
def test_the_defaults_are_the_published_ones() -> None:
    defaults = GatewaySettings()
    assert (defaults.inflight_max, defaults.dedup_ttl_s, defaults.source_allow) == (4, 300.0, "")


def test_after_the_cache_was_forgotten_the_same_prompt_is_brought_again() -> None:
    one = gate()
    settled, running = fired(one, "settled"), fired(one, "running")
    one.end(settled, "transferred")
    one.forget_ended()

    assert one.enter(record("settled")).word == "new"
    assert one.enter(record("running")).record is running
    one.end(running, "transferred")
    assert one.enter(record("running")).word == "new"


def test_counters_of_several_instances_add_up() -> None:
    one, two = gate(), gate(inflight_max=3)
    fired(one)
    two.end(fired(two), "failed")

    total = one.statistics(0.0) + two.statistics(0.0)

    assert (total.fired, total.failed, total.inflight, total.max_inflight) == (2, 1, 1, 7)
    assert identity_holds(total)


# H19
class Gates(RuleBasedStateMachine):
    """Any order of events; a model of plain lists says what must be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.gate = gate(inflight_max=3, ttl_s=10.0, entries_max=5)
        self.asking: list[Record] = []
        self.running: list[Record] = []
        self.counted = dict.fromkeys(("fired", "transferred", "failed"), 0)

    @rule(name=st.sampled_from("abcdefgh"), later=st.floats(0, 4))
    def come(self, name: str, later: float) -> None:
        self.now += later
        passed = self.gate.enter(record(name, self.now))
        known = [one for one in (*self.asking, *self.running) if one.request_hash == name]
        if known:
            assert passed.record is known[0]
        elif passed.word == "new" and passed.record is not None:
            assert len(self.asking) + len(self.running) < 3
            self.asking.append(passed.record)
        elif passed.word == "busy":
            assert len(self.asking) + len(self.running) == 3
        else:
            assert passed.record is not None
            assert passed.record.status == "transferred"
            assert self.now - passed.record.accepted_at < 10.0

    @precondition(lambda self: self.asking)
    @rule(data=st.data(), verdict=st.sampled_from(["taken", "not taken"]))
    def hear_verdict(self, data: st.DataObject, verdict: str) -> None:
        one = self.asking.pop(data.draw(st.integers(0, len(self.asking) - 1)))
        if verdict == "taken":
            self.gate.fire(one)
            self.running.append(one)
            self.counted["fired"] += 1
        else:
            self.gate.withdraw(one)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), status=st.sampled_from(["transferred", "failed", "cancelled"]))
    def end(self, data: st.DataObject, status: str) -> None:
        one = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.gate.end(one, status)  # type: ignore[arg-type] # all three are statuses
        self.counted["transferred" if status == "transferred" else "failed"] += 1

    @rule()
    def forget(self) -> None:
        self.gate.forget_ended()

    @invariant()
    def counters_are_those_of_the_model(self) -> None:
        numbers = self.gate.statistics(self.now)
        assert identity_holds(numbers)
        assert {name: getattr(numbers, name) for name in self.counted} == self.counted
        assert numbers.inflight == len(self.running)
        assert numbers.seen <= 5 + 3
        assert len(self.gate._by_age) <= 5
        assert len(self.gate._latest) <= 5


Gates.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGates = Gates.TestCase


def lines_run(work: Callable[[], None]) -> int:
    """How many lines of Python a call runs: a cost that no other load on the machine changes."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Callable[[FrameType, str, object], Any]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
