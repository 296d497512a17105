"""The clock that is moved by hand, with parts of the ledger that live by it."""

import pytest

from kvbus.ledger.admission import AdmissionGate, Verdict
from kvbus.ledger.attendance import GONE_S, Attendance
from kvbus.testing.clock import HandClock


def test_it_stands_still_until_it_is_told_to_go_on() -> None:
    clock = HandClock(5.0)
    assert clock() == clock() == 5.0
    assert clock.advance(0.25) == clock() == 5.25
    assert repr(clock) == "<HandClock 5.25 s>"


def test_it_never_goes_back() -> None:
    clock = HandClock()
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1.0)
    assert clock() == 0.0


def test_a_request_is_remembered_for_as_long_as_the_clock_says() -> None:
    clock = HandClock()
    gate = AdmissionGate(instance="b", source_allow=("a",), inflight_max=4, dedup_ttl_s=10.0, entries_max=10)
    first = gate.admit("h", request_id="r1", source="a", transfer="t1", now=clock())
    gate.ended("h", settled=True)
    assert first.verdict is Verdict.ACCEPTED

    again = gate.repeat("h", request_id="r2", source="a", now=clock.advance(9.0))
    assert again is not None
    assert again.verdict is Verdict.DEDUPED
    assert gate.repeat("h", request_id="r3", source="a", now=clock.advance(2.0)) is None


def test_a_member_is_silent_once_the_clock_says_so() -> None:
    clock = HandClock(100.0)
    attendance = Attendance(members=("m0", "m1"), me="m0", began_at=clock())
    attendance.heard(clock(), "m1", 7)
    assert not attendance.is_silent(clock.advance(GONE_S), "m1")
    assert attendance.is_silent(clock.advance(0.001), "m1")
