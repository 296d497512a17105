"""What a source sends over one connection: frames are taken apart, and pages' bytes land straight in their places.

At any time it is known what comes next: a header, a body, or an answer's pages and their end. Who waits for no bytes
any more has its places exchanged for one that nobody reads.
"""

import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvbus.dataplane import socket_wire as wire
from kvbus.dataplane.socket_calls import Ranges
from kvbus.dataplane.socket_reading import Block, Reading
from kvbus.dataplane.socket_wire import Header, Kind, Status
from kvbus.errors import PeerError

WAKE_BYTES = 1 << 20
"""Where so much is still to come, the thread is woken for no less. With a wake for every packet, each end spent a third
of its time asleep while the other one worked, and the processor's caches were filled anew each time."""

Filled = Callable[[], None]
Kept = NDArray[np.bool_] | None


class Listener(Protocol):
    """Who hears what was received."""

    def took_hello(self, header: Header, body: bytes) -> None:
        """A HELLO."""

    def took_refusal(self, header: Header, text: str, block: Block | None) -> None:
        """A refusal: of a block, or of something else."""

    def took_block(self, block: Block, kept: Kept, tail: memoryview) -> None:
        """All bytes of a block, and what stood behind them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question whose answer has not come."""

    number: int
    block: Block


class Inbound:
    """The receiving half of a connection; PeerError out of `receive` means that the source breaks the protocol."""

    def __init__(self, listener: Listener) -> None:
        self.asked: deque[Asked] = deque()
        """Oldest first, as the answers come."""
        self.bytes_asked = 0
        self._listener = listener
        self._next = Ranges()
        self._filled: Filled = self.reset
        self._is_within = False
        self._is_filling = False  # whether the pages of an answer are landing, or its end
        self._woken_for = 1
        self.reset()

    def reset(self) -> None:
        """Expect a first frame, and no answers."""
        self.asked.clear()
        self.bytes_asked = 0
        self._woken_for = 1
        self._expect_header()

    def expect(self, number: int, block: Block) -> None:
        """Note a question that goes out now."""
        self.asked.append(Asked(number, block))
        self.bytes_asked += block.length_bytes

    @property
    def is_within(self) -> bool:
        """Whether the last call took all that was there, and left some of what comes next to wait for."""
        return self._is_within

    def receive(self, sock: socket.socket) -> int:
        """Let the bytes that are there land where they belong; return how many, 0 if there are none now."""
        try:
            received = self._next.receive(sock)
        except BlockingIOError:
            self._wait_for(sock)
            return 0
        if not received:
            raise ConnectionResetError(0, "it was closed by the source")
        self._is_within = bool(self._next.left_bytes)
        if self._is_within:
            self._wait_for(sock)
        else:
            self._filled()
        return received

    def _wait_for(self, sock: socket.socket) -> None:
        """Have the thread woken once all is there that is waited for, or WAKE_BYTES of it, or the connection ends.

        The kernel wakes it earlier where its own room for the connection fills up.
        """
        wanted = min(WAKE_BYTES, self._next.left_bytes)
        if wanted != self._woken_for:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            self._woken_for = wanted

    def divert(self, reading: Reading) -> None:
        """Let nothing more land in the pages of an attempt that has ended in the middle of an answer."""
        if self._is_filling and self.asked[0].block.reading is reading:
            self._next.divert(reading.pool.spare)

    def _await(self, buffer: bytearray, filled: Filled) -> None:
        self._next, self._filled = Ranges(buffer), filled

    def _expect_header(self) -> None:
        buffer = bytearray(wire.HEADER_BYTES)
        self._is_filling = False
        self._await(buffer, lambda: self._take_header(Header.decode(buffer)))

    def _take_header(self, header: Header) -> None:
        if header.kind == Kind.DATA:
            self._take_data(header)
        elif header.kind == Kind.HELLO and header.length == wire.HELLO_BYTES:
            self._expect_body(header.length, lambda body: self._listener.took_hello(header, body))
        elif header.kind == Kind.REFUSED and 0 < header.length <= wire.TEXT_MAX_BYTES:
            self._expect_body(header.length, lambda body: self._take_refusal(header, body))
        else:
            raise PeerError("unexpected frame", kind=header.kind, length=header.length)

    def _expect_body(self, length_bytes: int, take: Callable[[bytes], None]) -> None:
        buffer = bytearray(length_bytes)

        def filled() -> None:
            self._expect_header()
            take(bytes(buffer))

        self._await(buffer, filled)

    def _take_refusal(self, header: Header, body: bytes) -> None:
        block = self._answered(header.number) if header.rows else None
        self._listener.took_refusal(header, body.decode(errors="replace"), block)

    def _answered(self, number: int) -> Block:
        """Take the oldest question off the list, which is the one that is answered."""
        if not self.asked or self.asked[0].number != number:
            raise PeerError("an answer to no question, or out of order", number=number)
        block = self.asked.popleft().block
        self.bytes_asked -= block.length_bytes
        block.reading.asked -= 1
        return block

    def _take_data(self, header: Header) -> None:
        oldest = self.asked[0] if self.asked else None
        if oldest is None or oldest.number != header.number or header.rows != len(oldest.block.rows):
            raise PeerError("an answer to no question, or out of order", number=header.number)
        if header.status == Status.ALL:
            self._expect_pages(header, oldest, None)
            return
        mask = bytearray(header.rows)

        def filled() -> None:
            self._expect_pages(header, oldest, np.frombuffer(mask, dtype=np.uint8).astype(bool))

        self._await(mask, filled)

    def _expect_pages(self, header: Header, asked: Asked, kept: Kept) -> None:
        rows = header.rows if kept is None else int(kept.sum())
        pool = asked.block.reading.pool
        if header.length != rows * pool.page_bytes:
            raise PeerError("an answer of another length than its pages", length=header.length, rows=rows)
        running = asked.block.reading.progress.stop is None
        places = asked.block.places_of(kept) if running else pool.spare_places(rows)
        tail = bytearray(wire.tail_bytes(header.rows))

        def filled() -> None:
            self._expect_header()
            self._listener.took_block(self._answered(header.number), kept, memoryview(tail))

        self._next, self._filled = Ranges(None, places, pool.page_bytes, tail, keep=pool), filled
        self._is_filling = True
