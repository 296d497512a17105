"""A reader's end of the page server's protocol that does as a test says, sound or not."""

import contextlib
import socket
from collections.abc import Iterator, Sequence

import numpy as np

from kvbus.dataplane import socket_wire as wire
from kvbus.dataplane.socket_server import SocketPlace
from kvbus.dataplane.socket_wire import Header, Kind, Status

ANSWER_S = 120.0


class Peer:
    """One connection."""

    def __init__(self, place: SocketPlace, *, receive_bytes: int | None = None) -> None:
        self.sock = socket.socket()
        if receive_bytes is not None:  # a small buffer keeps the rest of an answer at the server
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect((place.addresses[0], place.port))
        header, body = self.frame()
        self.epoch = header.number
        self.challenge = wire.challenge_of(body, header.status)
        self.numbers = 0

    def receive(self, length_bytes: int) -> bytes:
        """So many bytes; ConnectionError where the server closes before."""
        data = bytearray()
        while len(data) < length_bytes:
            part = self.sock.recv(min(1 << 20, length_bytes - len(data)))
            if not part:
                raise ConnectionResetError(f"closed after {len(data)} of {length_bytes} bytes")
            data += part
        return bytes(data)

    def frame(self) -> tuple[Header, bytes]:
        """The next frame that is no data."""
        header = Header.decode(self.receive(wire.HEADER_BYTES))
        assert header.kind != Kind.DATA
        return header, self.receive(header.length)

    def open(self, ticket: int, secret: bytes) -> None:
        self.sock.sendall(wire.opening(secret, self.challenge, ticket))

    def ask(self, ticket: int, pages: Sequence[int], counters: Sequence[int]) -> None:
        self.numbers += 1
        columns = np.array(pages, dtype=np.uint32).tobytes(), np.array(counters, dtype=np.uint64).tobytes()
        self.sock.sendall(wire.question(self.numbers, ticket, *columns))

    def release(self, ticket: int) -> None:
        self.sock.sendall(wire.release(ticket))

    def head(self) -> tuple[Header, list[int]]:
        """The head of an answer: its header, and which rows' bytes follow."""
        header = Header.decode(self.receive(wire.HEADER_BYTES))
        assert header.kind == Kind.DATA, header
        if header.status == Status.ALL:
            return header, list(range(header.rows))
        return header, [row for row, kept in enumerate(self.receive(header.rows)) if kept]

    def tail(self, rows: int) -> tuple[int, list[bytes]]:
        """The end of an answer: its state, and one record a row."""
        data = self.receive(wire.tail_bytes(rows))
        records = data[wire.STATE_BYTES :]
        return wire.ticket_of(data), [records[at : at + 32] for at in range(0, len(records), 32)]

    def is_closed(self) -> bool:
        """Whether the server closes the connection, within the deadline; whatever it still says is skipped."""
        try:
            while self.sock.recv(1 << 20):
                pass
        except ConnectionError:
            pass
        return True

    def close(self) -> None:
        self.sock.close()


@contextlib.contextmanager
def peer_of(place: SocketPlace, *, receive_bytes: int | None = None) -> Iterator[Peer]:
    peer = Peer(place, receive_bytes=receive_bytes)
    try:
        yield peer
    finally:
        peer.close()
