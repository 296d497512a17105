"""What only the UCX plane has: notices to the lender, frozen peers, forced closes, its thread and its sleep."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.dataplane import ucp
from kvbus.dataplane.notices import NOTICE_AM_ID, Notice
from kvbus.dataplane.ucx import UcxPlane, UcxReader
from kvbus.errors import BackendError, ConfigError, PeerError
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Cancelled, Failed, SubmissionRejectedError
from kvbus.pool.memory import PoolMemory
from tests.unit.helpers.lending_process import (
    PAGE_BYTES,
    READER_EPOCH,
    LendingProcess,
    layout,
    lending_process,
    reader_key,
)
from tests.unit.helpers.reader_contract import SLOW_BYTES_S
from tests.unit.helpers.reader_side import TCP_ONLY, Side, arrived_of, check_rows, ucx_side
from tests.waiting import until, wait_until

ALL = range(100)
AFTERWARDS_S = 0.2  # how long a second notice is waited for, which must not come
DELIVERY_S = 50.0


@pytest.fixture(scope="module")
def lender() -> Iterator[LendingProcess]:
    with lending_process() as process:
        yield process


@contextlib.contextmanager
def running_plane() -> Iterator[UcxPlane]:
    plane = UcxPlane(wake=lambda: None)
    plane.start()
    try:
        yield plane
    finally:
        plane.close()


# -------------------------------------------------------------------------------------------------------- notices


def notices_at(lender: LendingProcess, wait_s: float) -> tuple[Notice, ...]:
    notices = lender.ask("notices", wait_s)
    assert isinstance(notices, tuple)
    return notices


def test_the_lender_hears_of_each_end_once_with_key_and_nonce(lender: LendingProcess) -> None:  # P4
    key, nonce = reader_key("noticed", attempt=3), b"q" * 16
    with ucx_side() as side:
        side.submit(lender.grant(ALL, reader=key, nonce=nonce), ALL)
        side.end_of()
        assert notices_at(lender, DELIVERY_S) == (Notice(key, nonce),)
        assert notices_at(lender, AFTERWARDS_S) == ()
        assert isinstance(side.reader, UcxReader)
        reader = side.reader
        wait_until(lambda: reader.statistics().notices_sent == 1)


def test_a_cancelled_attempt_is_noticed_too_and_a_refused_one_is_not(lender: LendingProcess) -> None:
    with ucx_side(rate_limit_bytes_s=SLOW_BYTES_S) as side:
        with pytest.raises(SubmissionRejectedError):
            side.submit(lender.grant((1, 2), reader=reader_key("refused")), (3,))
        side.submit(lender.grant(ALL, reader=reader_key("cancelled")), ALL)
        side.reader.cancel(1, 1)
        side.end_of()
        (notice,) = notices_at(lender, DELIVERY_S)
        assert notice.key.transfer == "cancelled"


def test_what_is_no_notice_is_counted_and_ignored() -> None:
    with running_plane() as plane:
        memory = PoolMemory.create(layout(), 2, READER_EPOCH)
        access = plane.register(memory)
        good = Notice(reader_key(), b"n" * 16)
        context = ucp.Context.open(ucp.load())
        try:
            worker = ucp.Worker.open(context)
            endpoint = ucp.Endpoint.open(worker, access.address)
            for body in (b"", b"\xc1", b"\x80", Notice(reader_key(), b"").encode()[:-3], good.encode()):
                endpoint.send_am(NOTICE_AM_ID, b"", body)

            def counted() -> bool:
                worker.progress()
                return plane.statistics().messages_refused == 4 and plane.statistics().notices_received == 1

            wait_until(counted)
        finally:
            context.close()
        assert plane.notices() == (good,)
        assert plane.notices() == ()


def test_a_notice_survives_its_bytes() -> None:
    notice = Notice(reader_key(), b"n" * 16)
    assert Notice.decode(notice.encode()) == notice
    with pytest.raises(PeerError, match="nonce"):
        Notice.decode(b"\x80")


# ----------------------------------------------------------------------------------------------- peers that stand


def posted_gets(side: Side) -> int:
    assert isinstance(side.reader, UcxReader)
    return side.reader.statistics().gets


def test_a_cancel_on_a_frozen_peer_ends_by_force_and_nothing_lands_later() -> None:  # contract 39–41, P3
    with (
        lending_process(settings=TCP_ONLY) as source,
        ucx_side(settings=TCP_ONLY, cancel_wait_s=0.3) as side,
    ):
        side.submit(source.grant((1,)), (200,))
        side.end_of()
        source.freeze()
        before = posted_gets(side)
        side.submit(source.grant(ALL), ALL, ticket=2)
        side.submit(source.grant(ALL, reader=reader_key("t3")), range(100, 200), ticket=3)
        wait_until(lambda: posted_gets(side) >= before + 2)
        assert len(side.drain()) == 1  # no time of ours ends a read
        side.reader.cancel(2, 1)
        cancelled, other = side.end_of(2), side.end_of(3)
        assert isinstance(cancelled.result, Cancelled)
        assert cancelled.evidence is Evidence.ENDPOINT_DESTROYED
        assert isinstance(other.result, Failed)
        assert other.result.failure is FailureClass.PEER_LOST
        assert "cancelled read" in other.text
        moved = side.bytes_moved()
        source.thaw()
        side.submit(source.grant((5,), reader=reader_key("t4")), (210,), ticket=4)  # over a new connection
        assert arrived_of(side.end_of(4)) == (True,)
        assert side.bytes_moved() == moved + PAGE_BYTES


def test_isolating_a_frozen_peer_is_evidence_at_once() -> None:
    with lending_process(settings=TCP_ONLY) as source, ucx_side(settings=TCP_ONLY) as side:
        side.submit(source.grant((1,)), (200,))
        side.end_of()
        source.freeze()
        before = posted_gets(side)
        side.submit(source.grant(ALL), ALL, ticket=2)
        wait_until(lambda: posted_gets(side) > before)
        side.reader.isolate("A")
        change = side.end_of(2)
        assert change.evidence is Evidence.ENDPOINT_DESTROYED
        assert isinstance(change.result, Failed)
        assert "isolated" in change.result.text


def test_a_peer_that_never_answers_a_connection_fails_the_attempt_by_force() -> None:
    with (
        lending_process(settings=TCP_ONLY) as source,
        ucx_side(settings=TCP_ONLY, wire_up_s=0.3) as side,
    ):
        source.freeze()
        side.submit(source.grant(ALL), ALL)
        change = side.end_of()
        assert isinstance(change.result, Failed)
        assert change.result.failure is FailureClass.PEER_LOST
        assert change.evidence is Evidence.ENDPOINT_DESTROYED
        assert side.bytes_moved() == 0


def test_a_frozen_peer_holds_up_no_other(lender: LendingProcess) -> None:
    with lending_process(settings=TCP_ONLY) as frozen, ucx_side(settings=TCP_ONLY) as side:
        side.submit(frozen.grant((1,)), (200,))
        side.end_of()
        frozen.freeze()
        side.submit(frozen.grant(ALL), ALL, ticket=2)
        side.submit(lender.grant(ALL, reader=reader_key("t3")), range(100, 200), ticket=3, peer="C")
        assert sum(arrived_of(side.end_of(3))) == 100
        assert len(side.seen) == 2
        assert side.reader.shutdown(30.0) == ()


def test_an_address_whose_process_is_gone_fails_the_attempt() -> None:
    with lending_process() as source:
        grant = source.grant((1,))
    with ucx_side() as side:
        side.submit(grant, (1,))
        change = side.end_of()
        assert isinstance(change.result, Failed)
        assert change.result.failure is FailureClass.PEER_LOST
        assert side.bytes_moved() == 0


# -------------------------------------------------------------------------------------------- the thread and loop


async def test_the_loop_is_touched_by_the_wake_signal_alone(lender: LendingProcess) -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(enabled=True)  # a call from another thread than its own then raises
    woken, callers = asyncio.Event(), set[str]()

    def wake() -> None:
        callers.add(threading.current_thread().name)
        loop.call_soon_threadsafe(woken.set)

    with running_plane() as plane:
        memory = PoolMemory.create(layout(), 128, READER_EPOCH)
        plane.register(memory)
        reader = UcxReader(plane, wake=wake)
        side = Side(reader, memory, threading.Event(), plane)
        side.submit(lender.grant(ALL), ALL)
        await asyncio.wait_for(woken.wait(), 60)
        (change,) = reader.changes()  # listed before the signal was raised
        assert check_rows(side, change, ALL, ALL) == 100
        assert callers == {"kvbus-ucx"}
        reader.shutdown(5.0)


async def test_the_loop_runs_on_while_bytes_move(lender: LendingProcess) -> None:
    turns = 0
    with ucx_side(rate_limit_bytes_s=2 * SLOW_BYTES_S) as side:
        side.submit(lender.grant(ALL), ALL)

        def ended() -> bool:
            nonlocal turns
            turns += 1
            return bool(side.drain())

        await until(ended)
        assert turns > 3


def test_an_idle_thread_sleeps() -> None:
    with running_plane() as plane:
        wait_until(lambda: plane.statistics().rounds > 0)
        first, began = plane.statistics().rounds, time.monotonic()
        wait_until(lambda: plane.statistics().rounds >= first + 2)
        rounds_per_s = (plane.statistics().rounds - first) / (time.monotonic() - began)
        assert rounds_per_s < 200  # a spinning thread makes a hundred thousand


def test_a_plane_that_cannot_open_says_why_and_leaves_no_thread() -> None:
    plane = UcxPlane(wake=lambda: None, settings={"TLS": "no_such_transport"})
    with pytest.raises(ConfigError):
        plane.start()
    assert plane.close()
    assert not plane.statistics().running
    with pytest.raises(BackendError, match="does not run"):
        plane.call(lambda: None)


def test_a_plane_starts_once_and_closes_as_often_as_asked() -> None:
    plane = UcxPlane(wake=lambda: None)
    assert plane.close()
    plane.start()
    with pytest.raises(BackendError, match="started before"):
        plane.start()
    assert "running" in repr(plane)
    assert plane.close()
    assert plane.close()
    assert "stopped" in repr(plane)
    assert not plane.post(lambda: None)


def test_one_pool_a_rank_and_none_twice() -> None:  # contract 35
    with running_plane() as plane:
        memory = PoolMemory.create(layout(), 2, READER_EPOCH)
        plane.register(memory)
        with pytest.raises(ValueError, match="registered already"):
            plane.register(PoolMemory.create(layout(), 2, READER_EPOCH))
        with pytest.raises(ValueError, match="overlaps"):
            plane.register(memory, rank=1)
        plane.register(PoolMemory.create(layout(), 2, READER_EPOCH), rank=1)
        assert plane.statistics().pools == 2


def test_a_reader_without_a_pool_or_a_thread_refuses(lender: LendingProcess) -> None:
    with ucx_side() as side:
        order = side.order(lender.grant((1,)), (1,))
    plane = UcxPlane(wake=lambda: None)
    with pytest.raises(SubmissionRejectedError, match="no pool"):
        UcxReader(plane, wake=lambda: None).submit(order)
    stopped = UcxReader(side.plane or plane, wake=lambda: None)
    with pytest.raises(SubmissionRejectedError):
        stopped.submit(order)


def test_reading_generations_ahead_saves_the_bytes_of_what_has_changed(lender: LendingProcess) -> None:
    with ucx_side(reads_before=True) as side:
        side.submit(lender.grant(ALL), ALL)
        assert check_rows(side, side.end_of(), ALL, ALL) == 100
        moved = side.bytes_moved()
        side.submit(lender.grant(ALL, counters=(8).to_bytes(8, "little") * 100), range(100, 200), ticket=2)
        assert isinstance(side.end_of(2).result, Failed)
        assert side.bytes_moved() == moved


def test_the_lanes_are_known_once_connected(lender: LendingProcess) -> None:
    with ucx_side() as side:
        side.submit(lender.grant((1,)), (1,))
        side.end_of()
        assert isinstance(side.reader, UcxReader)
        assert any(lane.startswith("tcp/") for lane in side.reader.statistics().lanes["A"])
        assert "endpoints=1" in repr(side.reader)


@pytest.mark.parametrize("chosen", ["", "ucx.log"])
def test_what_ucx_complains_of_is_not_among_what_a_command_prints(tmp_path: Path, chosen: str) -> None:
    program = (
        "from kvbus.dataplane.ucp_abi import load\n"
        "from kvbus.dataplane.ucp_context import Context\n"
        "try: Context.open(load(), {'TLS': 'nonsense'})\n"
        "except Exception as error: print(type(error).__name__)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    log = tmp_path / chosen if chosen else None
    if log is not None:  # an operator's own choice stands
        environment["UCX_LOG_FILE"] = str(log)
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "ConfigError\n"
    assert "'nonsense' is not available" in (ran.stderr if log is None else log.read_text())
