"""The local link between a worker, its engine and its clients: frames over a Unix stream socket.

A frame is a u32 little-endian length and one msgpack map with `op` and `id`, at most 1 MiB. Requests go both ways; the
ops in REPLIES answer the request of the same id that their receiver made, so both sides may count ids from one. Errors
have a `kind`: `refused` (the request cannot be served as it stands), `failed` (whoever answers has a fault), `broken`
(the frames make no sense; the connection is closed after it).
"""

import contextlib
import os
import socket
import struct
import threading
from pathlib import Path

from kvbus.codec import MESSAGE_LENGTH_MAX_BYTES, pack, unpack
from kvbus.errors import ConfigError, KvbusError, PeerError
from kvbus.names import token_bytes, tokens_from_bytes

Frame = dict[str, object]

REPLIES = frozenset({"welcome", "reply", "error", "token", "end"})
"""Ops that answer a request of their receiver; every other op is a request."""

PATH_LENGTH_MAX_BYTES = 107
"""A Unix socket's address holds 108 bytes on Linux, the last of them zero."""

SEND_TIMEOUT_S = 10.0
"""A peer that reads nothing for so long is hung: the loops on both ends read within milliseconds."""

_HEAD_BYTES = 4
_RECEIVE_BYTES = 1 << 16  # a Unix socket hands over about so much at once
_ID_MAX = 2**63 - 1
_OP_LENGTH_MAX = 32
_DESCRIPTORS_MAX = 1  # only a welcome carries one: the pool's


class EngineError(KvbusError):
    """The engine, or the link to it, failed: it is gone, silent beyond the deadline, or reports a fault of its own."""


class EngineRefusedError(EngineError):
    """Raised on a client's side only: worker or engine refused this request, and the text says why."""


def encode_frame(op: str, request_id: int, fields: Frame) -> bytes:
    """Return one frame's bytes; ValueError where it would be longer than the other side accepts."""
    body = pack({"op": op, "id": request_id, **fields})
    if len(body) > MESSAGE_LENGTH_MAX_BYTES:
        raise ValueError(f"frame {op!r} has {len(body)} bytes, at most {MESSAGE_LENGTH_MAX_BYTES} may travel")
    return struct.pack("<I", len(body)) + body


class FrameBuffer:
    """Cuts a stream of bytes into frames, without I/O; it holds at most one frame and what arrived behind it."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes as they came."""
        self._data += data

    def take(self) -> Frame | None:
        """Return the next whole frame, or None; PeerError if the bytes cannot be frames, and then they never will."""
        if len(self._data) < _HEAD_BYTES:
            return None
        length = int.from_bytes(self._data[:_HEAD_BYTES], "little")
        # Before waiting for the rest: a stray text read as a length would have us wait and buffer for ever.
        if not 0 < length <= MESSAGE_LENGTH_MAX_BYTES:
            raise PeerError(
                f"frame length must lie in 1…{MESSAGE_LENGTH_MAX_BYTES}; is this kvbus at the other end?", length=length
            )
        if len(self._data) < _HEAD_BYTES + length:
            return None
        body = bytes(self._data[_HEAD_BYTES : _HEAD_BYTES + length])
        del self._data[: _HEAD_BYTES + length]
        frame = unpack(body)
        if len(text(frame, "op")) > _OP_LENGTH_MAX:
            raise PeerError("frame field op is too long", length=len(text(frame, "op")), length_max=_OP_LENGTH_MAX)
        number(frame, "id")
        return frame


# ------------------------------------------------------------------------------------------------------------ fields


def number(frame: Frame, name: str, *, least: int = 0, most: int = _ID_MAX) -> int:
    """Return an integer field; PeerError unless it is one, within its bounds."""
    value = frame.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_kind(frame, name, "an integer")
    if not least <= value <= most:
        raise PeerError(f"frame field {name} is out of range", op=frame.get("op"), got=value, least=least, most=most)
    return value


def flag(frame: Frame, name: str, *, default: bool) -> bool:
    """Return a boolean field, or its default where it is absent."""
    value = frame.get(name, default)
    if not isinstance(value, bool):
        raise _wrong_kind(frame, name, "true or false")
    return value


def text(frame: Frame, name: str, default: str | None = None) -> str:
    """Return a string field, or its default where it is absent and has one."""
    value = frame.get(name, default)
    if not isinstance(value, str):
        raise _wrong_kind(frame, name, "a string")
    return value


def column(frame: Frame, name: str) -> tuple[int, ...]:
    """Return a field of little-endian u32 bytes as integers."""
    value = frame.get(name)
    if not isinstance(value, bytes):
        raise _wrong_kind(frame, name, "u32 little-endian bytes")
    try:
        return tokens_from_bytes(value)
    except ValueError as error:
        raise PeerError(f"frame field {name} must be u32 bytes, a multiple of 4 long", length=len(value)) from error


def mapping(frame: Frame, name: str) -> dict[str, object]:
    """Return a map field."""
    value = frame.get(name)
    if not isinstance(value, dict):
        raise _wrong_kind(frame, name, "a map")
    return value


def as_column(values: tuple[int, ...] | list[int]) -> bytes:
    """Return integers as little-endian u32 bytes; PeerError where one does not fit."""
    try:
        return token_bytes(values)
    except (OverflowError, TypeError) as error:
        raise PeerError("token ids and page numbers must be integers in 0…2**32-1", reason=str(error)) from error


def _wrong_kind(frame: Frame, name: str, expected: str) -> PeerError:
    got = type(frame[name]).__name__ if name in frame else "nothing"
    return PeerError(f"frame field {name} must be {expected}", op=repr(frame.get("op"))[:40], got=got)


# ----------------------------------------------------------------------------------------------------- blocking side


def check_path(path: Path) -> Path:
    """Return a socket's path; ConfigError where it is longer than the kernel allows."""
    if len(os.fsencode(path)) > PATH_LENGTH_MAX_BYTES:
        raise ConfigError(
            f"socket path is longer than the {PATH_LENGTH_MAX_BYTES} bytes that Linux allows; choose a shorter "
            "state folder",
            path=str(path),
        )
    return path


class BlockingLink:
    """One end of the link for a process without an event loop: an engine or a client.

    Any thread may send; one thread receives. `descriptors` holds the file descriptor that came with a welcome: it
    belongs to whoever takes it out.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.descriptors: list[int] = []
        self._socket = connected
        self._buffer = FrameBuffer()
        self._sending = threading.Lock()
        self._is_bounded = False

    def __repr__(self) -> str:
        return f"<BlockingLink fd={self._socket.fileno()}>"

    @classmethod
    def connect(cls, path: Path) -> "BlockingLink":
        """Connect to a worker's socket; EngineError if nobody listens there."""
        address = os.fspath(check_path(path))
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The kernel's own send timeout leaves receiving unbounded, which settimeout would not.
        bound = struct.pack("ll", int(SEND_TIMEOUT_S), 0)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        try:
            connected.connect(address)
        except OSError as error:
            connected.close()
            raise EngineError(
                f"no worker listens on {path}; start one, or name its socket", reason=error.strerror or str(error)
            ) from error
        return cls(connected)

    def send(self, op: str, request_id: int, **fields: object) -> None:
        """Send one frame; EngineError if the other side is gone, or reads nothing for SEND_TIMEOUT_S."""
        frame = encode_frame(op, request_id, fields)
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError as error:
            raise EngineError("the other side of the local link is gone", op=op, reason=str(error)) from error

    def receive(self, timeout_s: float | None) -> Frame | None:
        """Return the next frame, None once the other side has closed; TimeoutError after timeout_s without bytes.

        Without a timeout the wait is bounded by the other process's life: the kernel closes its end with it.
        """
        while (frame := self._buffer.take()) is None:
            self._bound_receiving(timeout_s)
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._socket, _RECEIVE_BYTES, _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError as error:
                raise TimeoutError("no frame within the time given") from error
            except OSError:
                return None  # reset or closed under us: the same as closed
            self.descriptors += descriptors
            if not data:
                return None
            self._buffer.feed(data)
        return frame

    def _bound_receiving(self, timeout_s: float | None) -> None:
        """Tell the kernel how long to wait; what it was told stays, so no bound has to be said too."""
        if timeout_s is None and not self._is_bounded:
            return
        self._is_bounded = timeout_s is not None
        bound = (0, 0) if timeout_s is None else (int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *bound))

    def hang_up(self) -> None:
        """End the link from any thread; the one in receive() wakes with None."""
        with contextlib.suppress(OSError):  # the other side may have been first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the link, and the descriptor if nobody took it; only for the thread that receives."""
        self.hang_up()
        while self.descriptors:
            os.close(self.descriptors.pop())
        self._socket.close()
