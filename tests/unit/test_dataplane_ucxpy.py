"""The adapter for ucx-py: how its absence is told, and its logic over real sockets between processes.

ucx-py itself cannot be installed here; `helpers/ucp_over_sockets.py` has the same calls and the same habits.
"""

import contextlib
import importlib
import logging
import multiprocessing
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import cast

import pytest

from kvbus.dataplane import ucxpy_api
from kvbus.dataplane.socket_server import SocketPlace
from kvbus.dataplane.ucxpy import UcxPyReader
from kvbus.errors import BackendError, ConfigError
from kvbus.grants import MemoryAccess
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Cancelled, Change, Failed, SubmissionRejectedError
from kvbus.pool.memory import PoolMemory
from kvbus.processes import identity
from tests.unit.helpers import ucp_over_sockets
from tests.unit.helpers.lending_process import (
    ANSWER_S,
    LENDER_EPOCH,
    READER_EPOCH,
    Described,
    LendingProcess,
    fill,
    geometry_of,
    layout,
    reader_key,
)
from tests.unit.helpers.reader_side import Side, arrived_of, check_rows
from tests.waiting import wait_until

API = cast("ucxpy_api.Api", ucp_over_sockets)
PAGES = 128
ALL = range(100)
SLOW_BYTES_S = 4 << 20


def serve(pipe: Connection) -> None:
    """Run in the child: lend a pool through the adapter, until the pipe closes."""
    memory = PoolMemory.create(layout(), PAGES, LENDER_EPOCH)
    fill(memory, range(PAGES))
    lender = UcxPyReader(wake=lambda: None, api=API)
    lender.start()
    pipe.send(
        Described(
            process=identity(),
            geometry=geometry_of(memory),
            fingerprint=memory.fingerprint,
            counters=memory.generations.counters(range(PAGES)),
            ucx=lender.register(memory),
            memory=MemoryAccess(process=identity(), fd=memory.fd),
            socket=SocketPlace(addresses=("127.0.0.1",), port=1),
        )
    )
    while True:
        verb, pages = pipe.recv()
        if verb == "rewrite":
            fill(memory, pages, seed=100)
        pipe.send(None)


@contextlib.contextmanager
def lending() -> Iterator[LendingProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        source = LendingProcess(ours)
        source.answers = False  # there is no page server to tell of a grant
        yield source
    finally:
        process.kill()
        process.join(ANSWER_S)
        ours.close()


@pytest.fixture(scope="module")
def lender() -> Iterator[LendingProcess]:
    with lending() as process:
        yield process


@contextlib.contextmanager
def reading(*, rate_limit_bytes_s: float | None = None, cancel_wait_s: float = 0.2) -> Iterator[Side]:
    woken = threading.Event()
    reader = UcxPyReader(wake=woken.set, rate_limit_bytes_s=rate_limit_bytes_s, cancel_wait_s=cancel_wait_s, api=API)
    reader.start()
    memory = PoolMemory.create(layout(), 256, READER_EPOCH)
    reader.register(memory)
    try:
        yield Side(reader, memory, woken, None)
    finally:
        reader.shutdown(5.0)
        reader.release_hold()


def reader_of(side: Side) -> UcxPyReader:
    assert isinstance(side.reader, UcxPyReader)
    return side.reader


def said(side: Side, ticket: int) -> list[Change]:
    return [change for change in side.drain() if change.ticket == ticket]


# ------------------------------------------------------------------------------------------------------ its absence


def test_without_ucx_py_the_error_says_what_to_install_and_why() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ucp")
    reader = UcxPyReader(wake=lambda: None)
    with pytest.raises(ConfigError) as raised:
        reader.start()
    for words in ("--transport ucx-py", "ucx-py", "conda", "stubs", "--transport ucx speaks UCX as well", "'ucp'"):
        assert words in str(raised.value)
    assert reader.shutdown(0.0) == ()
    reader.release_hold()


def test_ucx_py_is_imported_when_it_is_asked_for_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(importlib, "import_module", asked.append)
    reader = UcxPyReader(wake=lambda: None)
    assert asked == []
    with pytest.raises(BackendError):  # what was imported here is nothing
        reader.start()
    assert asked == ["ucp._libs.ucx_api"]


# --------------------------------------------------------------------------------------------------------- its logic


def test_pages_come_whole_and_the_evidence_is_the_end_of_every_get(lender: LendingProcess) -> None:  # contract 41
    with reading() as side:
        side.submit(lender.grant(ALL), ALL)
        change = side.end_of()
        assert check_rows(side, change, ALL, ALL) == 100
        assert change.evidence is Evidence.COMPLETED
        side.submit(lender.grant((7, 3)), (201, 202), ticket=2)
        assert check_rows(side, side.end_of(2), (201, 202), (7, 3)) == 2
        assert reader_of(side).statistics().endpoints == 1
        assert reader_of(side).name == "ucx"


def test_a_get_that_ends_while_it_is_posted_counts_once(
    lender: LendingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucp_over_sockets.RemoteMemory, "at_once", True)
    with reading() as side:
        side.submit(lender.grant(ALL), ALL)
        assert check_rows(side, side.end_of(), ALL, ALL) == 100


def test_pages_that_were_rewritten_are_not_delivered() -> None:  # P2
    with lending() as source, reading() as side:
        grant = source.grant(ALL)
        source.ask("rewrite", (3, 50))
        side.submit(grant, ALL)
        change = side.end_of()
        assert check_rows(side, change, ALL, ALL) == 98
        assert [row for row, there in enumerate(arrived_of(change)) if not there] == [3, 50]
        assert change.changed == 2


def test_a_cancel_ends_what_is_under_way_and_no_more(lender: LendingProcess) -> None:  # contract 39
    with reading(rate_limit_bytes_s=SLOW_BYTES_S) as side:
        side.submit(lender.grant(ALL), ALL)
        wait_until(lambda: reader_of(side).statistics().gets > 2)
        side.reader.cancel(1, 1)
        change = side.end_of()
        assert isinstance(change.result, Cancelled)
        assert change.evidence is Evidence.COMPLETED
        assert 0 < reader_of(side).statistics().gets < 40


def test_a_peer_that_stands_still_leaves_no_evidence_until_it_moves_and_gets_nothing_more(
    caplog: pytest.LogCaptureFixture,
) -> None:  # contract 40, 41
    # Planted fault that this catches: evidence with the cancel, or after `cancel_wait_s`.
    caplog.set_level(logging.WARNING, logger="kvbus")
    with lending() as source, reading() as side:
        side.submit(source.grant((1,)), (200,))
        side.end_of()
        source.freeze()
        side.submit(source.grant(ALL), ALL, ticket=2)
        wait_until(lambda: reader_of(side).statistics().gets > 2)
        side.reader.cancel(2, 1)
        wait_until(lambda: said(side, 2))
        (told,) = said(side, 2)
        assert isinstance(told.result, Failed)
        assert (told.result.failure, told.evidence) == (FailureClass.UNCERTAIN, None)
        assert "ucx-py cannot end them" in told.text
        assert side.reader.shutdown(0.1) == ((2, 1),)
        side.reader._is_shut = False  # type: ignore[attr-defined] # to see that this peer is refused for its own sake
        side.submit(source.grant((5,), reader=reader_key("t3")), (210,), ticket=3)
        refused = side.end_of(3)
        assert refused.evidence is Evidence.NEVER_SUBMITTED
        assert "start this worker again" in refused.text
        assert reader_of(side).statistics().stuck == ("A",)
        source.thaw()
        source.answers = False
        wait_until(lambda: len(said(side, 2)) == 2)
        assert said(side, 2)[1] == Change(2, 1, None, Evidence.COMPLETED)
    assert "its pages stay out of use" in caplog.text


def test_a_peer_that_dies_ends_every_get_and_the_next_connection_is_refused(lender: LendingProcess) -> None:
    with lending() as source, reading(rate_limit_bytes_s=SLOW_BYTES_S) as side:
        side.submit(source.grant(ALL), ALL)
        wait_until(lambda: reader_of(side).statistics().gets > 2)
        source.kill()
        change = side.end_of()
        assert change.evidence is Evidence.COMPLETED
        assert "broke" in change.text or "a read failed" in change.text
        side.submit(source.grant((5,), reader=reader_key("t2")), (210,), ticket=2)
        assert side.end_of(2).evidence is Evidence.NEVER_SUBMITTED
        side.submit(lender.grant((5,), reader=reader_key("t3")), (211,), ticket=3, peer="C")
        assert arrived_of(side.end_of(3)) == (True,)


def test_an_isolated_peer_is_refused_and_its_attempts_end_with_their_gets(lender: LendingProcess) -> None:
    with reading(rate_limit_bytes_s=SLOW_BYTES_S) as side:
        side.submit(lender.grant(ALL), ALL)
        wait_until(lambda: reader_of(side).statistics().gets > 2)
        side.reader.isolate("A")
        change = side.end_of()
        assert change.evidence is Evidence.COMPLETED
        assert "isolated" in change.text
        with pytest.raises(SubmissionRejectedError, match="isolated"):
            side.submit(lender.grant((1,)), (200,), ticket=2)


def test_a_forged_range_is_refused_before_anything_is_posted(lender: LendingProcess) -> None:  # contract 47
    with reading() as side:
        pool = lender.described.geometry.model_copy(update={"pages_offset": 1 << 30})
        with pytest.raises(SubmissionRejectedError):
            side.submit(lender.grant((1,), pool=pool), (1,))
        assert reader_of(side).statistics().gets == 0


def test_a_fault_of_the_thread_is_told_once_and_is_evidence_of_nothing(
    lender: LendingProcess, monkeypatch: pytest.MonkeyPatch
) -> None:  # contract 33, 41
    def broken(_worker: ucp_over_sockets.UCXWorker) -> int:
        raise RuntimeError("planted fault")

    with reading(rate_limit_bytes_s=SLOW_BYTES_S) as side:
        side.submit(lender.grant(ALL), ALL)
        wait_until(lambda: reader_of(side).statistics().gets > 2)
        monkeypatch.setattr(ucp_over_sockets.UCXWorker, "progress", broken)
        wait_until(lambda: reader_of(side).failure)
        with pytest.raises(BackendError, match="planted fault"):
            side.reader.changes()
        wait_until(lambda: said(side, 1))
        (told,) = said(side, 1)
        assert isinstance(told.result, Failed)
        assert (told.result.failure, told.evidence) == (FailureClass.UNCERTAIN, None)
        with pytest.raises(SubmissionRejectedError, match="planted fault"):
            side.submit(lender.grant((1,), reader=reader_key("t2")), (200,), ticket=2)
        assert side.reader.shutdown(0.1) == ((1, 1),)


def test_a_ucx_that_cannot_open_is_told_to_whoever_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_self: object, *_arguments: object, **_settings: object) -> None:
        raise ucp_over_sockets.UCXError("no such transport")

    monkeypatch.setattr(ucp_over_sockets.UCXContext, "__init__", broken)
    with pytest.raises(BackendError, match="no such transport"):
        UcxPyReader(wake=lambda: None, api=API).start()


def test_one_pool_a_rank_and_none_before_the_start() -> None:
    memory = PoolMemory.create(layout(), 4, READER_EPOCH)
    with pytest.raises(BackendError, match="not started"):
        UcxPyReader(wake=lambda: None, api=API).register(memory)
    with reading() as side, pytest.raises(ValueError, match="rank 0"):
        reader_of(side).register(memory)
