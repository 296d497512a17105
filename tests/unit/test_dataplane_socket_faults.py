"""Sockets where this process has no descriptors, no memory, or a fault of its own: what ends, is said, and goes on.

Faults are planted where the kernel or an allocation could raise them; all else is real.
"""

import contextlib
import resource
from collections.abc import Callable, Iterator

import pytest

from kvbus.dataplane.choosing import ChoosingReader
from kvbus.dataplane.socket_link import Link
from kvbus.dataplane.socket_reader import SocketReader
from kvbus.dataplane.socket_receiving import Inbound
from kvbus.dataplane.socket_server import Served, SocketServer
from kvbus.dataplane.socket_serving import Connection
from kvbus.errors import BackendError
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Failed, SubmissionRejectedError
from kvbus.pool.memory import PoolMemory
from tests.unit.helpers.lending_process import (
    LENDER_EPOCH,
    PAGE_BYTES,
    LendingProcess,
    fill,
    layout,
    lending_process,
    reader_key,
)
from tests.unit.helpers.reader_side import Side, arrived_of, socket_side
from tests.unit.helpers.socket_peer import peer_of
from tests.waiting import wait_until

SECRET = b"s" * 32


@pytest.fixture(scope="module")
def lender() -> Iterator[LendingProcess]:
    with lending_process() as process:
        yield process


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """A process in which no descriptor can be opened; those that are open stay."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def failing(times: int, error: Exception, then: Callable[..., object]) -> Callable[..., object]:
    """A method that fails so many times and is itself afterwards."""
    left = [times]

    def method(*arguments: object, **named: object) -> object:
        if left[0] > 0:
            left[0] -= 1
            raise error
        return then(*arguments, **named)

    return method


def goes_on(side: Side, lender: LendingProcess, *, ticket: int) -> None:
    """Another source, as the reader sees it, is read to its end."""
    side.submit(lender.grant((5,), reader=reader_key(f"t{ticket}")), (255,), ticket=ticket, peer="C")
    assert arrived_of(side.end_of(ticket=ticket)) == (True,)


@pytest.mark.contract("R21")
def test_without_descriptors_an_attempt_was_never_submitted_and_the_next_one_arrives(lender: LendingProcess) -> None:
    with socket_side() as side:
        grant = lender.grant((1, 2))
        with no_descriptors():
            side.submit(grant, (1, 2))
            change = side.end_of()
        assert change.evidence is Evidence.NEVER_SUBMITTED
        assert isinstance(change.result, Failed)
        assert change.result.failure is FailureClass.PEER_LOST
        assert "Too many open files" in change.text
        goes_on(side, lender, ticket=2)


@pytest.mark.contract("R21")
@pytest.mark.parametrize("where", [(Inbound, "receive"), (Link, "add"), (Link, "step")], ids=lambda one: str(one[1]))
def test_a_fault_over_one_connection_ends_what_it_reads_by_force_and_nothing_else(
    lender: LendingProcess, monkeypatch: pytest.MonkeyPatch, where: tuple[type, str]
) -> None:
    kind, name = where
    with socket_side() as side:
        grant = lender.grant((1, 2))
        monkeypatch.setattr(kind, name, failing(1, MemoryError("planted"), getattr(kind, name)))
        side.submit(grant, (1, 2))
        change = side.end_of()
        assert isinstance(change.result, Failed)
        assert change.result.failure is FailureClass.TRANSPORT
        assert "planted" in change.text
        assert change.evidence in {Evidence.NEVER_SUBMITTED, Evidence.ENDPOINT_DESTROYED}
        goes_on(side, lender, ticket=2)


@pytest.mark.contract("R21")
def test_a_reader_whose_thread_has_failed_closes_its_connections_says_so_once_and_takes_nothing_more(
    lender: LendingProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with lending_process() as source, socket_side() as side:
        assert isinstance(side.reader, SocketReader)
        source_grant, later = source.grant((1, 2)), lender.grant((3,))
        source.freeze()
        side.submit(source_grant, (1, 2))
        reader = side.reader
        wait_until(lambda: reader.statistics().connections == 1)
        monkeypatch.setattr(SocketReader, "_step", failing(1, RuntimeError("planted"), SocketReader._step))
        chooser = ChoosingReader("socket", [reader])

        def told() -> str:
            try:
                side.seen += chooser.changes()
            except BackendError as error:
                return str(error)
            return ""

        wait_until(lambda: "planted" in told())
        wait_until(lambda: told() == "" and side.seen)
        assert [(change.ticket, change.evidence is None) for change in side.seen] == [(1, False)]
        assert side.bytes_moved() == 0
        with pytest.raises(SubmissionRejectedError, match="planted"):
            side.submit(later, (3,), ticket=2)
        assert reader.shutdown(5.0) == ()
        assert "planted" in caplog.text
        source.thaw()


@contextlib.contextmanager
def serving() -> Iterator[tuple[SocketServer, Callable[[int], None]]]:
    """A page server, and how to lend one page under a ticket."""
    memory = PoolMemory.create(layout(PAGE_BYTES), 8, LENDER_EPOCH)
    fill(memory, range(8))
    server = SocketServer(wake=lambda: None)
    server.register(memory)

    def lend(ticket: int) -> None:
        server.open(Served(ticket, 0, SECRET, (ticket,), memory.generations.counters((ticket,))))

    try:
        yield server, lend
    finally:
        assert server.close()


def until_ended(server: SocketServer, count: int) -> list[int]:
    """Wait until so many leases have ended, and return which."""
    ended: list[int] = []

    def all_of_them() -> bool:
        ended.extend(server.ended())
        return len(ended) >= count

    wait_until(all_of_them)
    return ended


@pytest.mark.contract("R21")
@pytest.mark.parametrize("name", ["read", "write"])
def test_a_fault_while_one_reader_is_served_ends_its_leases_and_no_others(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with serving() as (server, lend):
        place = server.start()
        lend(1)
        lend(2)
        with peer_of(place) as first, peer_of(place) as second:
            for peer, ticket in ((first, 1), (second, 2)):
                peer.open(ticket, SECRET)
                peer.ask(ticket, [ticket], [2])
                header, _ = peer.head()
                peer.receive(header.length)
                peer.tail(1)
            sound = getattr(Connection, name)

            def fails_for_the_first(self: Connection, *arguments: object) -> object:
                if 1 in self.leases:
                    raise MemoryError("planted")
                return sound(self, *arguments)

            monkeypatch.setattr(Connection, name, fails_for_the_first)
            with contextlib.suppress(ConnectionError):  # its turn before may have met the fault already
                first.ask(1, [1], [2])
            assert until_ended(server, 1) == [1]
            second.ask(2, [2], [2])
            assert second.head()[1] == [0]


@pytest.mark.contract("R21")
def test_a_server_whose_thread_has_failed_has_ended_every_lease_and_serves_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as (server, lend):
        place = server.start()
        lend(1)
        lend(2)
        with peer_of(place) as peer:
            peer.open(1, SECRET)
            monkeypatch.setattr(SocketServer, "_sweep", failing(1, RuntimeError("planted"), SocketServer._sweep))
            assert sorted(until_ended(server, 2)) == [1, 2]
            assert peer.is_closed()
        assert not server.works
        with pytest.raises(BackendError, match="does not run"):
            lend(3)
