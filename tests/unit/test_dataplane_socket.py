"""The socket reader between two processes: sources that stand still, lie, or are not there; and choosing among readers.

What every reader promises stands in test_dataplane_readers.py.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from pydantic import ValidationError

from kvbus.dataplane import socket_wire as wire
from kvbus.dataplane.choosing import ChoosingReader
from kvbus.dataplane.memory import MemoryReader
from kvbus.dataplane.reading import record_of
from kvbus.dataplane.socket_reader import SocketReader, SocketReaderSettings
from kvbus.dataplane.socket_wire import Header, Kind
from kvbus.grants import Grant, MemoryAccess, SocketAccess
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Cancelled, Delivered, Failed, SubmissionRejectedError
from kvbus.pool.memory import PoolMemory
from kvbus.testing.contracts import check_backend
from tests.unit.helpers.contract_makers import reading_case
from tests.unit.helpers.lending_process import (
    LENDER_EPOCH,
    PAGE_BYTES,
    READER_EPOCH,
    LendingProcess,
    layout,
    lending_process,
    reader_key,
)
from tests.unit.helpers.reader_contract import SLOW_BYTES_S
from tests.unit.helpers.reader_side import Side, arrived_of, check_rows, socket_side
from tests.waiting import wait_until

ALL = range(200)
SEALED_ONCE = 2
"""The generation of a page that was filled once."""


@pytest.fixture(scope="module")
def lender() -> Iterator[LendingProcess]:
    with lending_process() as process:
        yield process


def questions(side: Side) -> int:
    assert isinstance(side.reader, SocketReader)
    return side.reader.statistics().questions


def some_moved(side: Side) -> Callable[[], bool]:
    return lambda: side.bytes_moved() > 20 * PAGE_BYTES


# ------------------------------------------------------------------------------------------ sources that stand still


def test_an_attempt_at_a_source_that_stands_still_ends_at_once_when_it_is_cancelled() -> None:  # contract 39, 41
    with lending_process() as source, socket_side() as side:
        grant = source.grant(ALL)
        side.submit(source.grant((0,)), (255,), ticket=2)
        side.end_of(ticket=2)  # the connection is up
        source.freeze()
        side.submit(grant, ALL)
        wait_until(lambda: questions(side) >= 2)
        side.reader.cancel(1, 1)
        change = side.end_of()
        assert (type(change.result), change.evidence) == (Cancelled, Evidence.COMPLETED)
        moved = side.bytes_moved()
        source.thaw()
        side.submit(source.grant((1,)), (254,), ticket=3)
        assert arrived_of(side.end_of(ticket=3)) == (True,)  # behind everything that was still to come
        assert side.bytes_moved() == moved + PAGE_BYTES


def test_isolating_a_source_that_stands_still_closes_its_connection_by_force() -> None:  # contract 41, R18
    # Planted fault that this catches: bytes of an ended attempt that land in its pages.
    with lending_process() as source, socket_side(rate_limit_bytes_s=SLOW_BYTES_S) as side:
        grant = source.grant(ALL)
        side.submit(grant, ALL)
        wait_until(some_moved(side))
        source.freeze()
        asked = questions(side)
        wait_until(lambda: questions(side) >= asked + 2)
        side.reader.isolate("A")
        change = side.end_of()
        assert change.evidence is Evidence.ENDPOINT_DESTROYED
        assert 0 < check_rows(side, change, ALL, ALL) < len(ALL)
        moved = side.bytes_moved()
        source.thaw()
        assert source.ask("ended", 50.0) == ((grant.ticket,), ())  # the source knows, too
        assert side.bytes_moved() == moved


def test_a_closed_lease_ends_its_attempt_and_delivers_what_was_whole(lender: LendingProcess) -> None:
    with socket_side(rate_limit_bytes_s=SLOW_BYTES_S) as side:
        grant, other = lender.grant(ALL), lender.grant((3,))
        side.submit(grant, ALL)
        wait_until(some_moved(side))
        lender.ask("close", grant.ticket)
        change = side.end_of()
        assert isinstance(change.result, Delivered)
        assert change.result.failure is FailureClass.PEER_LOST
        assert 0 < check_rows(side, change, ALL, ALL) < len(ALL)
        side.submit(other, (255,), ticket=2)  # over the same connection
        assert arrived_of(side.end_of(ticket=2)) == (True,)
        assert isinstance(side.reader, SocketReader)
        assert side.reader.statistics().connections == 1


def test_the_wrong_secret_is_refused_and_nothing_moves(lender: LendingProcess) -> None:
    with socket_side() as side:
        offer = lender.grant((1,)).socket
        assert offer is not None
        forged = SocketAccess(addresses=offer.addresses, port=offer.port, secret=b"x" * 32)
        side.submit(lender.grant((1, 2)).model_copy(update={"socket": forged}), (1, 2))
        change = side.end_of()
        assert isinstance(change.result, Failed)
        assert change.result.failure is FailureClass.GRANT_REFUSED
        assert "not opened" in change.text
        assert side.bytes_moved() == 0


# ------------------------------------------------------------------------------------------------ sources that lie


def hello() -> bytes:
    return wire.hello(LENDER_EPOCH, bytes(16))


LIES = {
    "another program": b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n",
    "another epoch": wire.hello(LENDER_EPOCH + 1, bytes(16)),
    "another version": Header(Kind.HELLO, 9, 0, LENDER_EPOCH, wire.HELLO_BYTES).encode() + b"kvbs" + bytes(16),
    "hello twice": hello() + hello(),
    "an answer to nothing": hello() + Header(Kind.DATA, 0, 2, 9, 2 * PAGE_BYTES).encode(),
    "an answer with other rows": hello() + Header(Kind.DATA, 0, 3, 1, 3 * PAGE_BYTES).encode(),
    "an answer that is too long": hello() + Header(Kind.DATA, 0, 2, 1, 1 << 50).encode() + bytes(1000),
    "a mask that does not fit": hello() + Header(Kind.DATA, 1, 2, 1, 2 * PAGE_BYTES).encode() + b"\x00\x01",
    "a refusal of nothing": hello() + wire.refused(77, wire.Why.NOT_LENT, "no", of_question=True),
    "an endless refusal": hello() + Header(Kind.REFUSED, 1, 1, 1, 1 << 40).encode(),
}


@contextlib.contextmanager
def acting(act: Callable[[socket.socket], None]) -> Iterator[int]:
    """A listener whose first visitor meets this."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def meet() -> None:
            with listener.accept()[0] as peer:
                act(peer)

        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        thread.join(60)


@contextlib.contextmanager
def liar(data: bytes, *, stays: bool = True) -> Iterator[int]:
    """A listener that says this to whoever comes, once it was asked something, and stays connected or not."""
    ended = threading.Event()

    def lie(peer: socket.socket) -> None:
        first, rest = data[: len(hello())], data[len(hello()) :]
        peer.sendall(first)
        if rest or not stays:
            peer.recv(1)
            peer.sendall(rest)
        if stays:
            ended.wait(100)

    with acting(lie) as port:
        try:
            yield port
        finally:
            ended.set()


@pytest.mark.parametrize("data", LIES.values(), ids=LIES.keys())
def test_a_source_that_breaks_the_protocol_ends_its_own_attempts_only(data: bytes, lender: LendingProcess) -> None:
    with liar(data) as port, socket_side() as side:
        offer = SocketAccess(addresses=("127.0.0.1",), port=port, secret=b"s" * 32)
        side.submit(lender.grant((1, 2), socket=offer), (1, 2))
        side.submit(lender.grant((3,), reader=reader_key("t2")), (3,), ticket=2, peer="C")
        change = side.end_of()
        assert isinstance(change.result, Failed)
        assert change.result.failure is FailureClass.GRANT_REFUSED
        assert change.evidence in {Evidence.NEVER_SUBMITTED, Evidence.ENDPOINT_DESTROYED}
        assert arrived_of(side.end_of(ticket=2)) == (True,)
        assert side.bytes_moved() == PAGE_BYTES


def test_bytes_without_the_grants_records_behind_them_do_not_count(lender: LendingProcess) -> None:  # P2
    # Planted fault that this catches: counting a block when its bytes have come.
    grant = lender.grant((1, 2))
    stale = b"\x01" * wire.tail_bytes(2)
    whole = wire.state(wire.State.WHOLE) + stale[wire.STATE_BYTES :]
    answer = Header(Kind.DATA, 0, 2, 1, 2 * PAGE_BYTES).encode() + b"\x07" * 2 * PAGE_BYTES + whole
    with liar(hello() + answer) as port, socket_side() as side:
        offer = SocketAccess(addresses=("127.0.0.1",), port=port, secret=b"s" * 32)
        side.submit(grant.model_copy(update={"socket": offer}), (1, 2))
        change = side.end_of()
        assert isinstance(change.result, Failed)
        assert change.result.failure is FailureClass.PAGE_CHANGED


# -------------------------------------------------------------------------------------- bytes that come in pieces


def offer_of(port: int) -> SocketAccess:
    return SocketAccess(addresses=("127.0.0.1",), port=port, secret=b"s" * 32)


def hear_question(peer: socket.socket) -> Header:
    """Take what the reader says, up to its next question."""
    while True:
        header = Header.decode(peer.recv(wire.HEADER_BYTES, socket.MSG_WAITALL))
        if header.length:
            peer.recv(header.length, socket.MSG_WAITALL)
        if header.kind == Kind.READ:
            return header


def answer_to(question: Header, byte: int, page_bytes: int) -> bytes:
    """A sound answer whose pages are all of this byte."""
    rows = question.rows
    head = Header(Kind.DATA, 0, rows, question.number, rows * page_bytes).encode()
    records = record_of(LENDER_EPOCH, SEALED_ONCE) * rows
    return head + bytes([byte]) * (rows * page_bytes) + wire.state(wire.State.WHOLE) + records


def test_after_a_cancel_in_the_middle_of_a_block_its_bytes_land_nowhere() -> None:  # contract 41
    # Planted fault that this catches: places of an ended attempt that are still to be filled.
    page_bytes, cancelled = 2 << 20, threading.Event()

    def act(peer: socket.socket) -> None:
        peer.sendall(hello())
        answer = answer_to(hear_question(peer), 7, page_bytes)
        peer.sendall(answer[: 3 << 20])
        cancelled.wait(100)
        peer.sendall(answer[3 << 20 :])
        peer.sendall(answer_to(hear_question(peer), 9, page_bytes))

    with (
        lending_process(page_bytes=page_bytes, pages=3) as source,
        acting(act) as port,
        socket_side(page_bytes=page_bytes, pages=3) as side,
    ):
        side.submit(source.grant((0, 1), socket=offer_of(port)), (0, 1))
        wait_until(lambda: side.memory.page_bytes(0)[0] == 7)
        side.reader.cancel(1, 1)
        change = side.end_of()
        assert (type(change.result), change.evidence) == (Cancelled, Evidence.COMPLETED)
        for page in (0, 1):
            side.memory.page_bytes(page)[:] = 0
        cancelled.set()
        side.submit(source.grant((2,), socket=offer_of(port)), (2,), ticket=2)
        assert arrived_of(side.end_of(ticket=2)) == (True,)  # behind everything that was still to come
        assert side.holds(2, 9)
        assert side.bytes_moved() == page_bytes


def test_a_block_that_comes_in_small_pieces_arrives(lender: LendingProcess) -> None:
    # Planted fault that this catches: a thread that sleeps until more has come than is still to come.
    rows = range(20)

    def act(peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(hello())
        answer = answer_to(hear_question(peer), 7, PAGE_BYTES)
        for first in range(0, len(answer), 50_001):
            peer.sendall(answer[first : first + 50_001])
        peer.recv(1)  # the reader's last word

    with acting(act) as port, socket_side() as side:
        side.submit(lender.grant(rows, socket=offer_of(port)), rows)
        assert arrived_of(side.end_of()) == (True,) * len(rows)
        assert all(side.holds(page, 7) for page in rows)


def test_a_source_that_leaves_in_the_middle_of_a_block_ends_its_attempt_at_once(lender: LendingProcess) -> None:
    rows = range(20)

    def act(peer: socket.socket) -> None:
        peer.sendall(hello())
        peer.sendall(answer_to(hear_question(peer), 7, PAGE_BYTES)[:100_000])  # less than the thread is woken for

    with acting(act) as port, socket_side() as side:
        side.submit(lender.grant(rows, socket=offer_of(port)), rows)
        change = side.end_of()
        assert isinstance(change.result, Failed)
        assert (change.result.failure, change.evidence) == (FailureClass.PEER_LOST, Evidence.ENDPOINT_DESTROYED)


# --------------------------------------------------------------------------------------------- sources not there


def test_a_source_that_accepts_and_says_nothing_was_never_asked(lender: LendingProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, socket_side(wire_up_s=0.1) as side:
        offer = SocketAccess(addresses=("127.0.0.1",), port=silent.getsockname()[1], secret=b"s" * 32)
        side.submit(lender.grant((1, 2), socket=offer), (1, 2))
        change = side.end_of()
        assert (type(change.result), change.evidence) == (Failed, Evidence.NEVER_SUBMITTED)
        assert "in time" in change.text


def test_of_several_addresses_one_that_answers_is_enough(lender: LendingProcess) -> None:
    with socket_side() as side:
        grant = lender.grant((1,))
        assert grant.socket is not None
        several = grant.socket.model_copy(update={"addresses": ("::1", "127.0.0.9", "127.0.0.1")})
        with pytest.raises(ValidationError, match="addresses"):
            SocketAccess(addresses=("a.host",), port=1, secret=b"s" * 32)
        side.submit(grant.model_copy(update={"socket": several}), (1,))
        assert arrived_of(side.end_of()) == (True,)
        nobody = several.model_copy(update={"addresses": ("::1", "127.0.0.9")})
        side.submit(lender.grant((1,), socket=nobody), (1,), ticket=2)
        change = side.end_of(ticket=2)
        assert (type(change.result), change.evidence) == (Failed, Evidence.NEVER_SUBMITTED)
        assert "no connection to A" in change.text


# -------------------------------------------------------------------------------------------------------- choosing


@contextlib.contextmanager
def choosing_side(
    *,
    page_bytes: int = PAGE_BYTES,
    pages: int = 256,
    rate_limit_bytes_s: float | None = None,
    socket_first: bool = False,
) -> Iterator[Side]:
    """A reader that prefers memory and falls back to the socket, or the other way round."""
    woken = threading.Event()
    by_memory = MemoryReader(wake=woken.set, rate_limit_bytes_s=rate_limit_bytes_s)
    by_socket = SocketReader(wake=woken.set, settings=SocketReaderSettings(rate_limit_bytes_s=rate_limit_bytes_s))
    memory = PoolMemory.create(layout(page_bytes), pages, READER_EPOCH)
    for one in (by_memory, by_socket):
        one.start()
        one.register(memory)
    chooser = ChoosingReader("auto", (by_socket, by_memory) if socket_first else (by_memory, by_socket))
    side = Side(chooser, memory, woken, None)
    side.by_socket = by_socket  # type: ignore[attr-defined]
    try:
        yield side
    finally:
        chooser.shutdown(5.0)
        chooser.release_hold()


def went_by_socket(side: Side) -> bool:
    return bool(side.by_socket.statistics().questions)  # type: ignore[attr-defined]


def elsewhere(grant: Grant) -> Grant:
    """The grant as a source in another container gives it: its descriptor is of a process that is not here."""
    assert grant.memory is not None
    process = grant.memory.process.model_copy(update={"pid_namespace": 1})
    return grant.model_copy(update={"memory": MemoryAccess(process=process, fd=grant.memory.fd)})


def test_a_chooser_keeps_the_contract(lender: LendingProcess) -> None:
    check_backend(reading_case(choosing_side, lender))


def test_a_chooser_takes_what_it_prefers_and_the_next_where_nothing_has_escaped(lender: LendingProcess) -> None:
    with choosing_side() as side:
        side.submit(lender.grant((1,)), (1,))
        assert arrived_of(side.end_of()) == (True,)
        assert not went_by_socket(side)
        side.submit(elsewhere(lender.grant((2,))), (2,), ticket=2)
        change = side.end_of(ticket=2)
        assert (arrived_of(change), change.evidence) == ((True,), Evidence.COMPLETED)
        assert went_by_socket(side)
        assert len(side.seen) == 2  # that the first one failed is nobody's business
        side.submit(lender.grant((3,), memory=None), (3,), ticket=3)
        assert arrived_of(side.end_of(ticket=3)) == (True,)


def test_a_chooser_does_not_go_on_with_what_was_asked_for(lender: LendingProcess) -> None:
    # Planted fault that this catches: going on after any failure, although the source was told that access has ended.
    with liar(hello(), stays=False) as port, choosing_side(socket_first=True) as side:
        offer = SocketAccess(addresses=("127.0.0.1",), port=port, secret=b"s" * 32)
        side.submit(lender.grant((1, 2), socket=offer), (1, 2))
        change = side.end_of()
        assert isinstance(change.result, Failed)
        assert (change.result.failure, change.evidence) == (FailureClass.PEER_LOST, Evidence.ENDPOINT_DESTROYED)
        assert side.bytes_moved() == 0


def test_a_chooser_does_not_go_on_with_what_was_cancelled_refused_or_isolated(lender: LendingProcess) -> None:
    with choosing_side() as side:
        with pytest.raises(SubmissionRejectedError) as caught:
            side.submit(lender.grant((1,), memory=None, socket=None), (1,))
        assert caught.value.failure is FailureClass.GRANT_REFUSED
        with pytest.raises(SubmissionRejectedError):
            side.submit(lender.grant((1,), fingerprint="another"), (1,))
        side.submit(elsewhere(lender.grant((2,))), (2,), ticket=2)
        side.reader.cancel(2, 1)
        change = side.end_of(ticket=2)
        assert change.evidence is not None
        assert not went_by_socket(side)
        side.submit(lender.grant((3,)), (3,), ticket=3)
        side.end_of(ticket=3)
        side.reader.isolate("A")
        with pytest.raises(SubmissionRejectedError) as caught:
            side.submit(lender.grant((4,)), (4,), ticket=4)
        assert caught.value.failure is FailureClass.PEER_LOST
        again = lender.grant((5,), lender_epoch=LENDER_EPOCH + 1, memory=None)  # a later run is another process
        side.submit(again, (5,), ticket=5)
        assert "another run of the source" in side.end_of(ticket=5).text
