"""The page server: what it serves, what it refuses, and that a closed lease gives no further byte."""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from kvbus.dataplane import socket_server
from kvbus.dataplane import socket_wire as wire
from kvbus.dataplane.reading import record_of
from kvbus.dataplane.socket_server import Served, SocketPlace, SocketServer
from kvbus.dataplane.socket_wire import Header, Kind, State, Why
from kvbus.errors import BackendError, ConfigError
from kvbus.pool.memory import PoolMemory
from tests.unit.helpers.lending_process import LENDER_EPOCH, content, fill, layout
from tests.unit.helpers.socket_peer import Peer, peer_of
from tests.waiting import wait_until

PAGE_BYTES = 64 << 10
PAGES = 256
SECRET = b"s" * wire.SECRET_BYTES
OTHER = b"o" * wire.SECRET_BYTES
SMALL_BUFFER_BYTES = 64 << 10


class Serving:
    """A server in this process, its pool, and what it has said."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.memory = PoolMemory.create(layout(PAGE_BYTES), PAGES, LENDER_EPOCH)
        fill(self.memory, range(PAGES))
        self.server = SocketServer(wake=self.woken.set)
        self.server.register(self.memory)
        self.place = self.server.start()
        self.ended: list[int] = []
        self.released: list[int] = []

    def lend(self, ticket: int, pages: range, secret: bytes = SECRET) -> None:
        self.server.open(Served(ticket, 0, secret, pages, self.counters(pages)))

    def counters(self, pages: range) -> tuple[int, ...]:
        return self.memory.generations.counters(pages)

    def has_ended(self, ticket: int) -> bool:
        self.ended += self.server.ended()
        self.released += self.server.released()
        return ticket in self.ended

    def reads(self, ticket: int, page: int, secret: bytes = SECRET) -> bool:
        """Whether a fresh reader gets this page whole."""
        with peer_of(self.place) as peer:
            peer.open(ticket, secret)
            peer.ask(ticket, [page], self.counters(range(page, page + 1)))
            header, rows = peer.head()
            return rows == [0] and peer.receive(header.length) == bytes([content(page)]) * PAGE_BYTES


@pytest.fixture
def serving() -> Iterator[Serving]:
    one = Serving()
    try:
        yield one
    finally:
        assert one.server.close()


def refusals(serving: Serving, why: Why) -> int:
    return serving.server.statistics().refused.get(why.name.lower(), 0)


# ------------------------------------------------------------------------------------------------- what it serves


def test_lent_pages_come_in_the_asked_order_with_their_records_behind_them(serving: Serving) -> None:  # P2
    serving.lend(7, range(10, 30))
    with peer_of(serving.place) as peer:
        assert peer.epoch == LENDER_EPOCH
        peer.open(7, SECRET)
        peer.ask(7, [20, 11, 12], [2, 2, 2])
        header, rows = peer.head()
        assert (header.number, rows, header.length) == (1, [0, 1, 2], 3 * PAGE_BYTES)
        assert peer.receive(header.length) == b"".join(bytes([content(page)]) * PAGE_BYTES for page in (20, 11, 12))
        assert peer.tail(3) == (State.WHOLE, [record_of(LENDER_EPOCH, 2)] * 3)
        peer.release(7)
        wait_until(lambda: serving.has_ended(7))
    assert serving.released == [7]


def test_a_page_that_changed_before_is_not_sent_and_others_are(serving: Serving) -> None:
    serving.lend(7, range(3))
    serving.memory.generations.raise_pages([1])
    with peer_of(serving.place) as peer:
        peer.open(7, SECRET)
        peer.ask(7, [0, 1, 2], [2, 2, 2])
        header, rows = peer.head()
        assert rows == [0, 2]
        assert peer.receive(header.length) == bytes([content(0)]) * PAGE_BYTES + bytes([content(2)]) * PAGE_BYTES
        _, records = peer.tail(3)
        assert [record == record_of(LENDER_EPOCH, 2) for record in records] == [True, False, True]


def test_the_records_are_read_after_the_last_byte_was_sent(serving: Serving) -> None:  # P2
    # Planted fault that this catches: the records read when the answer begins.
    serving.lend(7, range(PAGES))
    with peer_of(serving.place, receive_bytes=SMALL_BUFFER_BYTES) as peer:
        peer.open(7, SECRET)
        peer.ask(7, range(PAGES), [2] * PAGES)
        header, rows = peer.head()
        assert rows == list(range(PAGES))
        first = peer.receive(PAGE_BYTES)
        fill(serving.memory, range(PAGES), seed=100)  # most of it has not left: 16 MiB do not fit any buffer here
        rest = peer.receive(header.length - PAGE_BYTES)
        assert first == bytes([content(0)]) * PAGE_BYTES
        assert rest[-1] == content(PAGES - 1, 100)
        state, records = peer.tail(PAGES)
        assert state == State.WHOLE
        assert record_of(LENDER_EPOCH, 2) not in records


# ------------------------------------------------------------------------------------------------- what it refuses


def test_without_its_secret_a_lease_is_not_read(serving: Serving) -> None:
    serving.lend(7, range(4))
    for ticket, secret in ((7, OTHER), (8, SECRET)):
        with peer_of(serving.place) as peer:
            peer.open(ticket, secret)
            header, text = peer.frame()
            assert (header.kind, header.status, header.rows) == (Kind.REFUSED, Why.UNKNOWN_LEASE, 0)
            assert text.decode() == f"T{ticket} is not lent to you"
            peer.ask(ticket, [0], [2])
            header, _ = peer.frame()
            assert (header.kind, header.status, header.rows) == (Kind.REFUSED, Why.UNKNOWN_LEASE, 1)
    assert serving.server.statistics().length_bytes < 1000
    assert serving.reads(7, 0)


def test_a_proof_is_good_for_its_own_connection_only(serving: Serving) -> None:
    serving.lend(7, range(4))
    with peer_of(serving.place) as first, peer_of(serving.place) as second:
        second.sock.sendall(wire.opening(SECRET, first.challenge, 7))
        header, _ = second.frame()
        assert header.status == Why.UNKNOWN_LEASE


@pytest.mark.parametrize(
    ("page", "counter", "said"),
    [
        (4, 2, "page 4 is not lent under T7"),
        (PAGES + 5, 2, f"page {PAGES + 5} is not lent under T7"),
        ((1 << 32) - 1, 2, "is not lent under T7"),
        (3, 4, "page 3 is lent under T7 in another generation"),
    ],
)
def test_a_page_that_is_not_lent_is_refused_and_the_connection_lives(
    serving: Serving, page: int, counter: int, said: str
) -> None:
    serving.lend(7, range(4))
    with peer_of(serving.place) as peer:
        peer.open(7, SECRET)
        peer.ask(7, [2, page], [2, counter])
        header, text = peer.frame()
        assert (header.kind, header.status, header.number) == (Kind.REFUSED, Why.NOT_LENT, 1)
        assert said in text.decode()
        peer.ask(7, [2], [2])
        header, _ = peer.head()
        assert peer.receive(header.length) == bytes([content(2)]) * PAGE_BYTES
    assert refusals(serving, Why.NOT_LENT) == 1


HUGE = 1 << 40
MALFORMED = {
    "no kind": (b"\xff" * wire.HEADER_BYTES, Why.MALFORMED),
    "a server's kind": (Header(Kind.DATA, 0, 1, 1, 0).encode(), Why.MALFORMED),
    "a long opening": (Header(Kind.OPEN, 0, 0, 7, HUGE).encode(), Why.MALFORMED),
    "no pages": (Header(Kind.READ, 0, 0, 1, 8).encode(), Why.TOO_MANY),
    "too many pages": (Header(Kind.READ, 0, wire.ROWS_MAX + 1, 1, 8 + 12 * (wire.ROWS_MAX + 1)).encode(), Why.TOO_MANY),
    "a count that does not fit its length": (Header(Kind.READ, 0, 5, 1, HUGE).encode(), Why.MALFORMED),
    "a release with a body": (Header(Kind.RELEASE, 0, 0, 7, 9).encode(), Why.MALFORMED),
    "another protocol": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", Why.MALFORMED),
}


@pytest.mark.parametrize(("data", "why"), MALFORMED.values(), ids=MALFORMED.keys())
def test_nonsense_ends_its_connection_with_a_reason_and_no_other(serving: Serving, data: bytes, why: Why) -> None:
    serving.lend(7, range(4))
    serving.lend(9, range(4, 8))
    with peer_of(serving.place) as sound, peer_of(serving.place) as peer:
        sound.open(9, SECRET)
        peer.open(7, SECRET)
        peer.sock.sendall(data)
        header, text = peer.frame()
        assert (header.kind, header.status, bool(text)) == (Kind.REFUSED, why, True)
        assert peer.is_closed()
        sound.ask(9, [5], [2])
        header, _ = sound.head()
        assert sound.receive(header.length) == bytes([content(5)]) * PAGE_BYTES
    assert refusals(serving, why) == 1


def test_who_asks_more_than_the_window_is_cut_off(serving: Serving) -> None:
    serving.lend(7, range(PAGES))
    with peer_of(serving.place, receive_bytes=SMALL_BUFFER_BYTES) as peer:
        peer.open(7, SECRET)
        with contextlib.suppress(ConnectionError):
            for _ in range(3 * wire.REQUESTS_MAX):
                peer.ask(7, range(PAGES), [2] * PAGES)
        wait_until(lambda: refusals(serving, Why.TOO_MANY) == 1)
        assert peer.is_closed()


def test_who_guesses_is_cut_off(serving: Serving) -> None:
    with peer_of(serving.place) as peer:
        with contextlib.suppress(ConnectionError):
            for ticket in range(10_000):
                peer.open(ticket, SECRET)
        assert peer.is_closed()
    assert refusals(serving, Why.UNKNOWN_LEASE) < 100


def test_refusals_are_logged_once_and_counted(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            with peer_of(serving.place) as peer:
                peer.sock.sendall(b"\xff" * wire.HEADER_BYTES)
                assert peer.is_closed()
    assert refusals(serving, Why.MALFORMED) == 5
    assert [record.levelname for record in caplog.records if "refused a reader" in record.message] == ["WARNING"]


def test_a_reader_that_takes_nothing_holds_up_nobody_and_costs_no_memory(serving: Serving) -> None:
    serving.lend(7, range(PAGES))
    with peer_of(serving.place, receive_bytes=SMALL_BUFFER_BYTES) as slow:
        slow.open(7, SECRET)
        for _ in range(4):
            slow.ask(7, range(PAGES), [2] * PAGES)
        slow.head()
        for page in range(20):
            serving.lend(100 + page, range(PAGES))
            assert serving.reads(100 + page, page)
        assert slow.receive(PAGE_BYTES) == bytes([content(0)]) * PAGE_BYTES
        # What waits are questions; of pages the kernel holds what fits its own buffers.
        assert serving.server.statistics().length_bytes < 64 * PAGE_BYTES + (16 << 20)


def test_connections_are_bounded_and_idle_ones_make_room(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_server, "CONNECTIONS_MAX", 3)
    serving.lend(7, range(4))
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(peer_of(serving.place))
        busy.open(7, SECRET)
        idle = [stack.enter_context(peer_of(serving.place)) for _ in range(2)]
        newcomer = stack.enter_context(peer_of(serving.place))
        assert idle[0].is_closed()
        for one in (idle[1], newcomer):
            one.open(7, SECRET)
        wait_until(lambda: serving.server.statistics().connections == 3)
        for one in (busy, idle[1], newcomer):
            one.ask(7, [1], [2])
            assert one.receive(one.head()[0].length) == bytes([content(1)]) * PAGE_BYTES
        with socket.create_connection((serving.place.addresses[0], serving.place.port)) as refused:
            header = Header.decode(refused.recv(wire.HEADER_BYTES))  # all have a lease now: it hears why, and no HELLO
            assert (header.kind, header.status) == (Kind.REFUSED, Why.FULL)
    assert refusals(serving, Why.FULL) == 1


def test_half_open_and_idle_connections_are_closed(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    serving.lend(7, range(4))
    serving.lend(8, range(4))
    with peer_of(serving.place) as reader, peer_of(serving.place) as idle, peer_of(serving.place) as half_open:
        reader.open(7, SECRET)
        idle.open(8, SECRET)
        idle.release(8)
        wait_until(lambda: serving.has_ended(8))
        half_open.sock.sendall(b"\x03")
        monkeypatch.setattr(socket_server, "OPEN_S", 0.05)  # from here on, so that a slow machine closes no other
        monkeypatch.setattr(socket_server, "IDLE_S", 0.2)
        assert half_open.is_closed()
        assert idle.is_closed()
        reader.ask(7, [1], [2])  # one with a lease is not closed for being quiet
        assert reader.receive(reader.head()[0].length) == bytes([content(1)]) * PAGE_BYTES


def test_what_cannot_be_served_is_said_when_it_is_opened(serving: Serving) -> None:
    for served in (
        Served(7, 1, SECRET, (1,), (2,)),
        Served(7, 0, SECRET, (PAGES,), (2,)),
        Served(7, 0, SECRET, (-1,), (2,)),
        Served(7, 0, SECRET, (), ()),
        Served(7, 0, SECRET, (1, 2), (2,)),
    ):
        with pytest.raises(BackendError):
            serving.server.open(served)
    serving.lend(7, range(4))
    with pytest.raises(BackendError):
        serving.lend(7, range(4))


def test_an_address_that_cannot_be_used_is_an_error_that_says_what_to_do(serving: Serving) -> None:
    for address, port in (("127.0.0.1", serving.place.port), ("192.0.2.1", 0)):
        with pytest.raises(ConfigError, match="--socket-address"):
            SocketServer(wake=lambda: None, address=address, port=port).start()


# --------------------------------------------------------------------------------------------- when access has ended


def test_after_a_close_no_byte_of_the_pages_is_read(serving: Serving) -> None:  # P7
    # Planted fault that this catches: an answer under way goes on with the pages of the closed lease.
    serving.lend(7, range(PAGES))
    with peer_of(serving.place, receive_bytes=SMALL_BUFFER_BYTES) as peer:
        peer.open(7, SECRET)
        for _ in range(3):
            peer.ask(7, range(PAGES), [2] * PAGES)
        header, _ = peer.head()
        serving.server.close_lease(7)
        wait_until(lambda: serving.has_ended(7))
        marker = 252  # what no page holds
        for page in range(PAGES):
            serving.memory.page_bytes(page)[:] = marker
        data = peer.receive(header.length)
        assert marker not in data
        assert data[-1] == 0
        state, records = peer.tail(PAGES)
        assert (state, set(records)) == (State.CLOSED, {bytes(32)})
        for _ in range(2):  # whether they were in line before, or come after
            header, _ = peer.frame()
            assert (header.kind, header.status in {Why.CLOSED, Why.UNKNOWN_LEASE}) == (Kind.REFUSED, True)
        peer.ask(7, [1], [2])
        assert peer.frame()[0].status == Why.UNKNOWN_LEASE
        peer.open(7, SECRET)
        assert peer.frame()[0].status == Why.UNKNOWN_LEASE
    assert serving.released == []


def test_a_lease_ends_with_the_last_connection_that_opened_it(serving: Serving) -> None:
    serving.lend(7, range(4))
    with peer_of(serving.place) as first:
        first.open(7, SECRET)
        with peer_of(serving.place) as second:
            second.open(7, SECRET)
            second.ask(7, [1], [2])
            second.head()
        wait_until(lambda: serving.server.statistics().connections == 1)
        first.ask(7, [1], [2])
        assert first.receive(first.head()[0].length) == bytes([content(1)]) * PAGE_BYTES
        assert not serving.has_ended(7)
    wait_until(lambda: serving.has_ended(7))
    assert serving.released == []
    assert serving.server.statistics().lost == 1


def test_a_lease_that_nobody_has_opened_stays_open(serving: Serving) -> None:
    serving.lend(7, range(4))
    with pytest.MonkeyPatch.context() as patched, peer_of(serving.place) as stranger:
        patched.setattr(socket_server, "OPEN_S", 0.0)
        patched.setattr(socket_server, "IDLE_S", 0.0)
        assert stranger.is_closed()  # who comes and goes, as time does
    assert not serving.has_ended(7)
    assert serving.reads(7, 1)


def stuck_reader(pipe: Connection, place: SocketPlace) -> None:
    """Run in a child: open lease 7, take the head of an answer, and then nothing more."""
    peer = Peer(place, receive_bytes=SMALL_BUFFER_BYTES)
    peer.open(7, SECRET)
    peer.ask(7, range(PAGES), [2] * PAGES)
    peer.head()
    pipe.send(os.getpid())
    pipe.recv()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_reader_ends_its_lease_and_a_stopped_one_does_not(serving: Serving, how: signal.Signals) -> None:
    # Planted fault that this catches: a stalled connection that is closed after a while.
    serving.lend(7, range(PAGES))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=stuck_reader, args=(theirs, serving.place), daemon=True)
    process.start()
    try:
        os.kill(ours.recv(), how)
        if how == signal.SIGSTOP:
            sweeps = serving.server.sweeps
            wait_until(lambda: serving.server.sweeps >= sweeps + 3)
            assert not serving.has_ended(7)
            serving.server.close_lease(7)  # somebody isolates it
        wait_until(lambda: serving.has_ended(7))
    finally:
        process.kill()
        process.join(60)


def test_closing_the_server_ends_every_lease(serving: Serving) -> None:
    for ticket in (7, 8):
        serving.lend(ticket, range(4))
    with peer_of(serving.place) as peer:
        peer.open(7, SECRET)
        assert serving.server.close()
        assert peer.is_closed()
    assert serving.has_ended(7)
    assert serving.has_ended(8)
    with pytest.raises(BackendError):
        serving.lend(9, range(4))
    assert serving.server.close()
    assert "connections=0" in repr(serving.server)
