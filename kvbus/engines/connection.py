"""The worker's end of one local connection: frames over a raw non-blocking socket on an event loop.

asyncio's transports cannot pass descriptors, so the socket is driven through the loop directly. Sending never waits:
what the kernel does not take at once is queued, up to a bound, and a peer that lets it fill is hung up on.
"""

import asyncio
import contextlib
import os
import select
import socket
import struct
from collections import deque

from kvbus.engines.link import Frame, FrameBuffer, encode_frame
from kvbus.errors import PeerError

OUTGOING_MAX_BYTES = 16 << 20
"""Sixteen of the longest frames: more than an engine or client that reads at all ever leaves unread."""

FLUSH_TIMEOUT_S = 1.0
"""How long a last word may take to be read before the connection is closed over it."""

_RECEIVE_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Connection:
    """One accepted socket; one task receives, anybody on the loop sends."""

    def __init__(self, loop: asyncio.AbstractEventLoop, accepted: socket.socket) -> None:
        self._loop = loop
        self._socket = accepted
        self._buffer = FrameBuffer()
        self._outgoing: deque[memoryview] = deque()
        self._outgoing_bytes = 0
        self._flushed = asyncio.Event()
        self._is_open = True

    def __repr__(self) -> str:
        return f"<Connection fd={self._socket.fileno()} outgoing_bytes={self._outgoing_bytes}>"

    def peer(self) -> tuple[int, int]:
        """Return (pid, user id) of the process that connected, as the kernel noted them then."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, user, _ = _CREDENTIALS.unpack(raw)
        return pid, user

    def is_connected(self) -> bool:
        """Tell whether the peer still has its end open; whoever connected, or inherited it, then lives."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)  # seen also behind data that nobody has read yet
        return not poll.poll(0)

    async def receive(self) -> Frame | None:
        """Return the next frame, None once the peer has closed; PeerError if what came is no frame.

        Waits as long as the peer lives: the kernel closes its end with it.
        """
        while (frame := self._buffer.take()) is None:
            try:
                data = await self._loop.sock_recv(self._socket, _RECEIVE_BYTES)
            except OSError:
                return None
            if not data:
                return None
            self._buffer.feed(data)
        return frame

    def send(self, op: str, request_id: int, **fields: object) -> None:
        """Send one frame, or queue it; silently nothing if the peer is gone, which receive() reports."""
        self._write(encode_frame(op, request_id, fields), ())

    def send_with_descriptor(self, descriptor: int, op: str, request_id: int, **fields: object) -> None:
        """Send one frame with a duplicate of a file descriptor; only as the first word on a connection."""
        self._write(encode_frame(op, request_id, fields), (descriptor,))

    def hang_up(self) -> None:
        """End the connection both ways; the task in receive() wakes with None and closes."""
        self._is_open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Close, after what is queued was taken or FLUSH_TIMEOUT_S passed; may be called again."""
        if self._socket.fileno() < 0:
            return
        if self._is_open and self._outgoing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_TIMEOUT_S):
                    await self._flushed.wait()
        self.hang_up()
        self._drop_outgoing()
        self._socket.close()

    def _write(self, frame: bytes, descriptors: tuple[int, ...]) -> None:
        if not self._is_open:
            return
        rest = memoryview(frame)
        if not self._outgoing:
            rest = rest[self._offer(rest, descriptors) :]
        if not rest or not self._is_open:
            return
        if self._outgoing_bytes + len(rest) > OUTGOING_MAX_BYTES:
            self.hang_up()
            return
        self._outgoing.append(rest)
        self._outgoing_bytes += len(rest)
        self._flushed.clear()
        self._loop.add_writer(self._socket, self._flush)

    def _offer(self, data: memoryview, descriptors: tuple[int, ...] = ()) -> int:
        """Give the kernel what it takes now, and return how many bytes that were."""
        try:
            if descriptors:
                return socket.send_fds(self._socket, [data], list(descriptors))
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.hang_up()
            return 0

    def _flush(self) -> None:
        while self._outgoing:
            head = self._outgoing[0]
            taken = self._offer(head)
            if not self._is_open:
                break
            if not taken:
                return
            self._outgoing_bytes -= taken
            if taken < len(head):
                self._outgoing[0] = head[taken:]
            else:
                self._outgoing.popleft()
        self._drop_outgoing()

    def _drop_outgoing(self) -> None:
        self._loop.remove_writer(self._socket)
        self._outgoing.clear()
        self._outgoing_bytes = 0
        self._flushed.set()


def refuse_foreign(connection: Connection) -> int:
    """Return the pid of a peer of our own user; PeerError for anybody else, or for a process that has no pid here."""
    pid, user = connection.peer()
    if user != os.geteuid():
        raise PeerError("only processes of the worker's own user may connect", got=user, expected=os.geteuid())
    if pid <= 0:
        raise PeerError("the process that connects runs in another pid namespace; start it beside the worker")
    return pid
