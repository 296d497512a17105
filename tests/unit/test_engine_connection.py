"""The worker's end of a local connection: it neither waits for a peer that does not read, nor buffers without end."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from kvbus.engines.connection import OUTGOING_MAX_BYTES, Connection
from kvbus.engines.link import BlockingLink, Frame
from tests.waiting import until

MEGABYTE = "x" * ((1 << 20) - 100)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)  # noqa: FBT003 - the socket's own signature
    with ours, theirs:
        yield ours, theirs


def received(peer: socket.socket, count: int) -> list[Frame]:
    reading = BlockingLink(peer)
    frames = [reading.receive(60) for _ in range(count)]
    return [frame for frame in frames if frame is not None]


async def test_what_the_kernel_does_not_take_at_once_follows_in_order(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = sockets
    connection = Connection(asyncio.get_running_loop(), ours)
    for number in range(8):
        connection.send("say", number, text=MEGABYTE)
    frames = await asyncio.to_thread(received, theirs, 8)
    assert [(frame["id"], frame["text"]) for frame in frames] == [(number, MEGABYTE) for number in range(8)]
    await connection.close()


async def test_a_last_word_is_flushed_before_the_connection_closes(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = sockets
    connection = Connection(asyncio.get_running_loop(), ours)
    connection.send("say", 1, text=MEGABYTE)
    connection.send("error", 2, text="the last word")
    reading = asyncio.create_task(asyncio.to_thread(received, theirs, 3))
    await connection.close()
    assert [frame["op"] for frame in await reading] == ["say", "error"]
    await connection.close()


async def test_a_peer_that_reads_nothing_is_hung_up_on(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = sockets
    connection = Connection(asyncio.get_running_loop(), ours)
    receiving = asyncio.create_task(connection.receive())
    for number in range(OUTGOING_MAX_BYTES // len(MEGABYTE) + 4):
        connection.send("say", number, text=MEGABYTE)
    assert await asyncio.wait_for(receiving, 60) is None
    connection.send("say", 99, text="nothing is queued any more")
    assert "outgoing_bytes=0" in repr(connection) or await asyncio.wait_for(connection.receive(), 60) is None
    await connection.close()


async def test_a_peer_that_closed_is_not_connected_even_with_unread_words_of_its(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = sockets
    connection = Connection(asyncio.get_running_loop(), ours)
    assert connection.is_connected()
    theirs.sendall(b"some bytes")
    assert connection.is_connected()
    theirs.close()
    assert not connection.is_connected()
    connection.send("say", 1)
    await until(lambda: not connection.is_connected())
    await connection.close()
