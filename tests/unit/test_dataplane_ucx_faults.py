"""Faults of our own in the UCX thread: one of an attempt ends with its connection, one of the plane ends loudly.

Everything that raises here was planted; planes, connections and processes are real. An exception that left the thread
unheard would fail the test by itself: warnings are errors.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from kvbus.dataplane import ucp
from kvbus.dataplane.reader import Progress
from kvbus.dataplane.reading import ReadOrder, Segment
from kvbus.dataplane.ucx import UcxReader
from kvbus.dataplane.ucx_plane import UcxPlane
from kvbus.dataplane.ucx_reading import Reading
from kvbus.errors import BackendError
from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import Evidence, Fact, FailureClass, LeaseFacts
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Change, Direction, Failed, SubmissionRejectedError, SubmitMode
from kvbus.pool.lender import PoolLender, lender_over
from kvbus.pool.memory import PoolMemory
from tests.unit.helpers.lending_process import READER_EPOCH, LendingProcess, layout, lending_process, reader_key
from tests.unit.helpers.reader_side import TCP_ONLY, Side, arrived_of, check_rows, ucx_side
from tests.waiting import wait_until

ALL = range(100)
WIDE = range(128)  # 8 MiB of pages: whatever segments it is cut into, there is more than a probe
PLANTED = "planted fault"


@pytest.fixture(scope="module")
def lender() -> Iterator[LendingProcess]:
    with lending_process() as process:
        yield process


@pytest.fixture
def frozen() -> Iterator[LendingProcess]:
    """A lender of one test, which freezes it once it is connected."""
    with lending_process(settings=TCP_ONLY) as process:
        yield process


@dataclass
class Heard:
    """What a side said: its changes in order, and what it raised instead."""

    side: Side
    raised: list[str] = field(default_factory=list)

    def changes(self, ticket: int) -> list[Change]:
        try:
            self.side.drain()
        except BackendError as error:
            self.raised.append(str(error))
        return [change for change in self.side.seen if change.ticket == ticket]

    def evidence(self, ticket: int) -> list[Evidence]:
        return [change.evidence for change in self.changes(ticket) if change.evidence is not None]


def plane_of(side: Side) -> UcxPlane:
    assert side.plane is not None
    return side.plane


def failure_of(change: Change) -> FailureClass:
    assert isinstance(change.result, Failed), change
    return change.result.failure


def plant(monkeypatch: pytest.MonkeyPatch, progress: type[Progress]) -> None:
    monkeypatch.setattr("kvbus.dataplane.ucx.Progress", progress)


class Unverifiable(Progress):
    """Of ticket 1: the bytes have arrived, and looking at them raises."""

    def verified(self, segment: Segment, unchanged: Sequence[int]) -> None:
        if self.order.ticket == 1:
            raise RuntimeError(PLANTED)
        super().verified(segment, unchanged)


class Untellable(Progress):
    """Of ticket 1: what arrived cannot be put into words."""

    def change(self, evidence: Evidence) -> Change:
        if self.order.ticket == 1:
            raise KeyError(PLANTED)
        return super().change(evidence)


class Unstoppable(Progress):
    """Of ticket 1: saying that it ends early raises, once."""

    def fail(self, failure: FailureClass, text: str) -> None:
        if self.order.ticket == 1 and failure is FailureClass.CANCELLED:
            raise ZeroDivisionError(PLANTED)
        super().fail(failure, text)


# ------------------------------------------------------------------------------------------ of an attempt, of a link


def test_a_fault_in_an_attempt_fails_it_by_name_and_ends_its_connection_alone(
    lender: LendingProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # R21, contract 40, 41
    # Planted fault that this catches: `UcxReader._step_link` without its handler; the thread then ends.
    plant(monkeypatch, Unverifiable)
    caplog.set_level(logging.ERROR, logger="kvbus")
    with ucx_side(rate_limit_bytes_s=64 << 20) as side:
        side.submit(lender.grant(WIDE, reader=reader_key("other")), WIDE, ticket=2, peer="C")
        side.submit(lender.grant(ALL), range(128, 228))
        change = side.end_of(1)
        assert failure_of(change) is FailureClass.TRANSPORT
        assert "a fault of ours broke the connection to A" in change.text
        assert PLANTED in change.text
        assert change.evidence in {Evidence.COMPLETED, Evidence.ENDPOINT_DESTROYED}
        assert check_rows(side, side.end_of(2), WIDE, WIDE) == len(WIDE)
        side.submit(lender.grant((7,), reader=reader_key("again")), (250,), ticket=3)  # over a new connection
        assert arrived_of(side.end_of(3)) == (True,)
        assert plane_of(side).failure == ""
        assert isinstance(side.reader, UcxReader)
        assert side.reader.statistics().failures == 1
    assert PLANTED in caplog.text


def test_whoever_reads_over_the_same_connection_ends_with_it_and_with_evidence(
    lender: LendingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Unverifiable)
    with ucx_side(rate_limit_bytes_s=8 << 20) as side:
        side.submit(lender.grant((1,)), (200,))
        side.submit(lender.grant(WIDE, reader=reader_key("sibling")), WIDE, ticket=2)
        assert failure_of(side.end_of(1)) is FailureClass.TRANSPORT
        sibling = side.end_of(2)
        assert "a fault of ours broke the connection" in sibling.text
        assert sibling.evidence is not None
        assert plane_of(side).failure == ""


def test_evidence_stands_where_the_result_cannot_be_told(
    lender: LendingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Untellable)
    with ucx_side() as side:
        side.submit(lender.grant(ALL), ALL)
        change = side.end_of(1)
        assert (failure_of(change), change.evidence) == (FailureClass.TRANSPORT, Evidence.COMPLETED)
        assert PLANTED in change.text
        side.submit(lender.grant((7,), reader=reader_key("again")), (200,), ticket=2)
        assert arrived_of(side.end_of(2)) == (True,)


def test_a_cancel_that_raises_breaks_the_connection_that_it_was_for(
    lender: LendingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Unstoppable)
    with ucx_side(rate_limit_bytes_s=8 << 20) as side:
        side.submit(lender.grant(WIDE), WIDE)
        side.reader.cancel(1, 1)
        change = side.end_of(1)
        assert "a fault of ours broke the connection" in change.text
        assert change.evidence is not None
        assert plane_of(side).failure == ""


def test_an_attempt_that_cannot_begin_was_never_submitted(
    lender: LendingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:  # contract 32
    class NoReading(Reading):
        def __init__(self, *_arguments: object, **_settings: object) -> None:
            raise RuntimeError(PLANTED)

    with ucx_side() as side:
        with monkeypatch.context() as planted:
            planted.setattr("kvbus.dataplane.ucx.Reading", NoReading)
            side.submit(lender.grant(ALL), ALL)
            change = side.end_of(1)
        assert change.evidence is Evidence.NEVER_SUBMITTED
        assert PLANTED in change.text
        side.submit(lender.grant(ALL, reader=reader_key("again")), ALL, ticket=2)
        assert check_rows(side, side.end_of(2), ALL, ALL) == 100


def test_a_wake_signal_that_raises_costs_the_connection_and_no_evidence(lender: LendingProcess) -> None:
    calls: list[int] = []

    def wake() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError(PLANTED)

    with ucx_side(on_wake=wake) as side:
        side.submit(lender.grant(ALL), ALL)
        assert side.end_of(1).evidence is Evidence.COMPLETED
        side.submit(lender.grant((7,), reader=reader_key("again")), (200,), ticket=2)
        assert arrived_of(side.end_of(2)) == (True,)
        assert plane_of(side).failure == ""


# ------------------------------------------------------------------------------------------------------ of the plane


class BadTask:
    """Something that the thread drives, and that nobody contains."""

    def step(self, now: float) -> float | None:
        raise RuntimeError(f"{PLANTED} at {now:.0f}")

    def failed(self, text: str) -> None:
        raise RuntimeError(f"{PLANTED} after {text}")

    def closed(self, *, is_quiet: bool) -> None:
        raise RuntimeError(f"{PLANTED}, quiet: {is_quiet}")


def begin_on_frozen(side: Side, source: LendingProcess) -> None:
    """Have ticket 2 wait for a peer that stands still: its gets are under way, and stay so."""
    assert isinstance(side.reader, UcxReader)
    reader = side.reader
    side.submit(source.grant((1,)), (200,))
    assert arrived_of(side.end_of(1)) == (True,)
    grant = source.grant(ALL, reader=reader_key("t2"))
    source.freeze()
    before = reader.statistics().gets
    side.submit(grant, ALL, ticket=2)
    wait_until(lambda: reader.statistics().gets > before)


def test_a_fault_of_the_plane_is_told_to_all_and_the_forced_close_is_the_evidence(
    frozen: LendingProcess, caplog: pytest.LogCaptureFixture
) -> None:  # contract 33, 40, 41, R14
    # Planted fault that this catches: `UcxPlane._run` without its handler; nobody hears of ticket 2 ever again.
    caplog.set_level(logging.CRITICAL, logger="kvbus")
    with ucx_side(settings=TCP_ONLY) as side:
        begin_on_frozen(side, frozen)
        heard = Heard(side)
        assert plane_of(side).attach(BadTask())
        wait_until(lambda: heard.evidence(2))
        first, second = heard.changes(2)
        assert failure_of(first) is FailureClass.UNCERTAIN
        assert first.evidence is None, "the result came before anybody knew how access ends"
        assert PLANTED in first.text
        assert (second.result, second.evidence) == (None, Evidence.ENDPOINT_DESTROYED)
        assert len(heard.raised) == 1, "whoever holds the leases hears of it once, as of a backend that raises"
        assert PLANTED in heard.raised[0]
        assert not plane_of(side).statistics().running
        assert PLANTED in plane_of(side).statistics().failure
        with pytest.raises(SubmissionRejectedError, match=PLANTED):
            side.submit(frozen.grant((3,), reader=reader_key("t3")), (201,), ticket=3)
        with pytest.raises(BackendError, match=PLANTED):
            plane_of(side).call(lambda: None)
        assert side.reader.shutdown(5.0) == ()
        assert plane_of(side).close()
    assert "nothing is read by UCX any more" in caplog.text


def test_what_stood_in_line_was_never_submitted_and_callers_are_answered(lender: LendingProcess) -> None:
    gate, answers = threading.Event(), list[str]()

    def stand_still_then_raise() -> None:
        assert gate.wait(60)
        raise RuntimeError(PLANTED)

    def ask(plane: UcxPlane) -> None:
        try:
            plane.call(lambda: None)
        except BackendError as error:
            answers.append(str(error))

    with ucx_side() as side:
        plane = plane_of(side)
        plane.post(stand_still_then_raise)
        side.submit(lender.grant(ALL), ALL)
        asker = threading.Thread(target=ask, args=(plane,))
        asker.start()
        wait_until(lambda: len(plane._commands) == 3)  # the reader's own, the attempt's start, the question
        gate.set()
        heard = Heard(side)
        wait_until(lambda: heard.evidence(1))
        (change,) = heard.changes(1)
        assert (failure_of(change), change.evidence) == (FailureClass.TRANSPORT, Evidence.NEVER_SUBMITTED)
        assert side.bytes_moved() == 0
        asker.join(60)
        assert answers
        assert PLANTED in answers[0]


class Unclosable:
    """An endpoint of ours that does everything but close."""

    def __init__(self, endpoint: ucp.Endpoint) -> None:
        self._endpoint = endpoint

    def __getattr__(self, name: str) -> object:
        return getattr(self._endpoint, name)

    def close(self, *, force: bool) -> ucp.Closing:
        raise RuntimeError(f"{PLANTED}, force: {force}")


def test_a_connection_that_cannot_be_closed_is_a_fault_of_the_plane(frozen: LendingProcess) -> None:
    with ucx_side(settings=TCP_ONLY) as side:
        begin_on_frozen(side, frozen)
        reader, heard = side.reader, Heard(side)
        assert isinstance(reader, UcxReader)
        (link,) = reader._links.values()
        real = link._endpoint
        plane_of(side).call(lambda: setattr(link, "_endpoint", Unclosable(real)))
        reader.isolate("A")
        wait_until(lambda: heard.evidence(2))
        assert [change.evidence for change in heard.changes(2)] == [None, Evidence.ENDPOINT_DESTROYED]
        assert real.unfinished() == 0
        assert PLANTED in plane_of(side).failure


class NeverClosed:
    """A UCX context whose end cannot be had: what it may still do, it may do for ever."""

    def close(self) -> None:
        raise BackendError(PLANTED)


def test_without_a_close_that_succeeds_there_is_no_evidence_and_the_lease_stays_for_good(
    frozen: LendingProcess,
) -> None:  # contract 41, 55
    # Planted fault that this catches: `UcxReader.closed` that reports evidence whatever `is_quiet` says.
    with ucx_side(settings=TCP_ONLY) as side:
        begin_on_frozen(side, frozen)
        plane, heard = plane_of(side), Heard(side)
        real = plane._context
        plane.call(lambda: setattr(plane, "_context", NeverClosed()))
        try:
            plane.attach(BadTask())
            wait_until(lambda: plane.close(0.1))  # the thread has ended, and has said all that it will ever say
            assert heard.changes(2) == []  # it raised instead
            (change,) = heard.changes(2)
            assert (failure_of(change), change.evidence) == (FailureClass.UNCERTAIN, None)
            assert side.reader.shutdown(0.1) == ((2, 1),)
        finally:
            real.close()


def test_a_fault_while_ucx_opens_reaches_whoever_starts_the_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors() -> object:
        raise OSError(24, PLANTED)

    monkeypatch.setattr("kvbus.dataplane.ucx_plane.select.epoll", no_descriptors)
    plane = UcxPlane(wake=lambda: None)
    with pytest.raises(BackendError, match="could not be opened"):
        plane.start()
    assert plane.close()


# ------------------------------------------------------------------------------------------------------ at the ledger


def held_by(memory: PoolMemory, reader: UcxReader) -> tuple[LeaseHolder, PoolLender]:
    pool = lender_over(memory, name="pool0", engine_reserve_pages=8)
    return LeaseHolder(bindings=[Binding("ucx", reader, Direction.WRITE)], lenders=[pool]), pool


def names(count: int) -> tuple[bytes, ...]:
    return tuple(bytes([number]) * 16 for number in range(1, count + 1))


def run_round(holder: LeaseHolder) -> LeaseFacts:
    facts = holder.collect()
    holder.settle([ticket for ticket, _, bits, _, _ in facts.lines if bits & Fact.ACCESS_ENDED])
    holder.advance()
    holder.finish()
    return facts


@pytest.mark.parametrize("closes", [True, False], ids=["ucx closes", "ucx does not close"])
def test_the_ledger_stops_the_binding_and_takes_pages_back_only_on_evidence(
    frozen: LendingProcess, *, closes: bool
) -> None:  # R14, contract 1, 33
    plane = UcxPlane(wake=lambda: None, settings=TCP_ONLY)
    plane.start()
    memory = PoolMemory.create(layout(), 64, READER_EPOCH)
    plane.register(memory)
    reader = UcxReader(plane, wake=lambda: None)
    holder, pool = held_by(memory, reader)
    grant = frozen.grant(range(16))
    frozen.freeze()
    real = plane._context
    try:
        lease = pool.lend_write(names(16), range(16), salt="")
        ticket = holder.take(lease, SubmitMode("ucx", Direction.WRITE), ReadOrder(grant), now=0.0, peer="A")
        holder.advance()
        wait_until(lambda: reader.statistics().gets > 0)
        if not closes:
            plane.call(lambda: setattr(plane, "_context", NeverClosed()))
        details: list[str] = []
        plane.attach(BadTask())
        wait_until(lambda: plane.close(0.1))
        for _ in range(6):
            details += [f"{detail.failure.name} {detail.text}" for detail in run_round(holder).details]
        assert any(text.startswith("BINDING_STOPPED ucx: changes raised") and PLANTED in text for text in details)
        assert any(text.startswith("UNCERTAIN") for text in details)
        assert (holder.bits(ticket) == 0) is closes, "the lease is back exactly where access has ended"
        assert pool.statistics().writes == (0 if closes else 1)
        assert holder.statistics().retained == (0 if closes else 1)
        pool.check()
        holder.check()
    finally:
        real.close()
