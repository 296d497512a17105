"""A reader dies while its source stands still, with what it asked for unread: the source goes on, and lives.

Over tcp the source's own UCX answers each get, by messages of its process. Where a second message finds the connection
broken, UCX aborts that process (`ucp_get_req_handler`, UCX 1.21); a reader therefore asks for one message at a time, on
each of several connections.
"""

import contextlib
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from kvbus.dataplane import ucp
from kvbus.dataplane.ucx import UcxReader
from kvbus.dataplane.ucx_plane import UcxPlane
from kvbus.errors import BackendError
from kvbus.grants import Grant
from kvbus.pool.memory import PoolMemory
from tests.unit.helpers.lending_process import READER_EPOCH, LendingProcess, layout, lending_process, reader_key
from tests.unit.helpers.reader_side import TCP_ONLY, check_rows, ucx_side
from tests.waiting import wait_until

ONE_RUN = range(100)
"""6.4 MB in one piece on both sides: one get, whose answer takes many messages."""
SCATTERED = tuple(page * 37 % 256 for page in range(100))
"""A hundred gets."""
ANSWER_S = 60.0
GET_BYTES = 41
"""What UCX 1.21 sends for one get over tcp."""
ESTABLISHED = "01"


def read_until_killed(pipe: Connection, settings: Mapping[str, str]) -> None:
    """In the child: connect by a first grant, ask for the pages of a second one, and say so."""
    with ucx_side(settings=settings) as side:
        first: Grant = pipe.recv()
        side.submit(first, range(len(first.page_indexes())))
        side.end_of(1)
        assert isinstance(side.reader, UcxReader)
        reader, before = side.reader, side.reader.statistics().gets
        pipe.send("connected")
        grant: Grant = pipe.recv()
        side.submit(grant, range(len(grant.page_indexes())), ticket=2)
        wait_until(lambda: reader.statistics().gets > before)
        pipe.send("asked")
        pipe.recv()  # nothing comes any more


@dataclass
class Reader:
    """A handle on the child."""

    process: BaseProcess
    pipe: Connection

    def hear(self, word: str) -> None:
        assert self.pipe.poll(ANSWER_S), f"the reader did not get so far: {word}"
        assert self.pipe.recv() == word

    def kill(self) -> None:
        self.process.kill()
        self.process.join(ANSWER_S)


@contextlib.contextmanager
def reading_process(settings: Mapping[str, str]) -> Iterator[Reader]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=read_until_killed, args=(theirs, settings), daemon=True)
    process.start()
    theirs.close()
    reader = Reader(process, ours)
    try:
        yield reader
    finally:
        reader.kill()
        ours.close()


def die_unread(source: LendingProcess, settings: Mapping[str, str], pages: Sequence[int]) -> None:
    """Have a reader of its own ask a source that stands still for these pages, and die; the source goes on."""
    with reading_process(settings) as reader:
        reader.pipe.send(source.grant((1,)))
        reader.hear("connected")
        grant = source.grant(pages, reader=reader_key("unread"))
        source.freeze()
        reader.pipe.send(grant)
        reader.hear("asked")
        reader.kill()
    source.thaw()


def gets_unread(pid: int) -> list[int]:
    """How many whole gets stand in each of a process's connections, by the kernel's count of unread bytes."""
    inodes = {
        link.removeprefix("socket:[").removesuffix("]")
        for fd in Path(f"/proc/{pid}/fd").iterdir()
        if (link := str(fd.readlink())).startswith("socket:[")
    }
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [int(row[4].split(":")[1], 16) // GET_BYTES for row in rows if row[3] == ESTABLISHED and row[9] in inodes]


@pytest.mark.parametrize("settings", [TCP_ONLY, {}], ids=["tcp", "cma"])
def test_a_source_that_stood_still_while_its_reader_died_lives_and_lends_on(settings: dict[str, str]) -> None:
    # Seen to fail over tcp with two gets at a time on a connection, and with gets of several messages: UCX ends the
    # source, "Fatal: unexpected error: Endpoint timeout".
    with lending_process(settings=settings) as source:
        for pages in (ONE_RUN, SCATTERED):
            die_unread(source, settings, pages)
            with ucx_side(settings=settings) as side:
                side.submit(source.grant(pages, reader=reader_key("after")), range(100))
                assert check_rows(side, side.end_of(), range(100), pages) == 100


def test_over_tcp_no_connection_has_more_than_one_get_unread() -> None:
    with lending_process(settings=TCP_ONLY) as source, reading_process(TCP_ONLY) as reader:
        reader.pipe.send(source.grant(SCATTERED))  # over all of its connections
        reader.hear("connected")
        assert source.ask("notices", 10.0)  # what it had to say has been read
        grant = source.grant(SCATTERED, reader=reader_key("unread"))
        source.freeze()
        reader.pipe.send(grant)
        reader.hear("asked")
        wait_until(lambda: any(gets_unread(source.pid)), what="a get stands unread")
        assert set(gets_unread(source.pid)) <= {0, 1}


def test_ucx_sends_nothing_of_its_own_and_reads_and_lends_over_separate_connections() -> None:
    # Either would be a message into a connection that a reader has closed, or leave one there unread.
    assert ucp.DEFAULT_SETTINGS["KEEPALIVE_INTERVAL"] == "inf"
    plane = UcxPlane(wake=lambda: None)
    plane.start()
    try:
        lent_at = plane.register(PoolMemory.create(layout(), 2, READER_EPOCH)).address
        assert lent_at != plane.call(plane.worker.address)
    finally:
        plane.close()


def test_a_connection_whose_strands_cannot_be_opened_is_read_over_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[ucp.Endpoint] = []
    real = ucp.Endpoint.open

    def once(worker: ucp.Worker, address: bytes) -> ucp.Endpoint:
        if opened:
            raise BackendError("no more of them")
        opened.append(real(worker, address))
        return opened[-1]

    monkeypatch.setattr(ucp.Endpoint, "open", once)
    with lending_process(settings=TCP_ONLY) as source, ucx_side(settings=TCP_ONLY) as side:
        for ticket, pages in enumerate((ONE_RUN, SCATTERED), 1):
            side.submit(source.grant(pages, reader=reader_key(f"t{ticket}")), range(100), ticket=ticket)
            assert check_rows(side, side.end_of(ticket), range(100), pages) == 100
