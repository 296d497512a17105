"""The calls of ucx-py that kvbus makes, over plain TCP: no UCX in it, but real processes, memory and connections.

It keeps the habits that matter: a get that ends while it is posted returns None and calls nobody back; gets cannot be
cancelled; `close` flushes, and so waits for a peer that stands still (here it raises after a while, so that a test
fails); a broken connection ends all gets over it with an exception.
"""

import contextlib
import ctypes
import enum
import itertools
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ASK = struct.Struct("<QQQQ")  # number, address, length, key; length 0 asks for a sign of life
TELL = struct.Struct("<QQ")  # number, length
CLOSE_S = 60.0
RUN_BYTES = 1 << 20

Bytes = NDArray[np.uint8]
Ended = Callable[..., None]


class UCXError(Exception):
    pass


class Feature(enum.Enum):
    RMA = 1
    AM = 2
    WAKEUP = 3


class UCXContext:
    def __init__(self, config_dict: Mapping[str, str], feature_flags: Sequence[Feature] = ()) -> None:
        assert config_dict["RNDV_THRESH"] == "inf"
        assert Feature.RMA in feature_flags
        self.regions: dict[int, tuple[int, int]] = {}

    def map(self, mem: Bytes) -> "UCXMemoryHandle":
        key = len(self.regions) + 1
        self.regions[key] = (mem.ctypes.data, mem.nbytes)
        return UCXMemoryHandle(key)

    def close(self) -> None:
        self.regions.clear()


@dataclass
class UCXMemoryHandle:
    key: int

    def pack_rkey(self) -> bytes:
        return self.key.to_bytes(8, "little")

    def close(self) -> None:
        pass


class _Buffer(bytes):
    """Bytes that only their own class makes."""

    @classmethod
    def from_buffer(cls, buffer: bytes) -> "_Buffer":
        return cls(buffer)


UCXAddress = PackedRemoteKey = _Buffer


class UCXWorker:
    def __init__(self, context: UCXContext) -> None:
        self.context = context
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(0)
        self.epoll = select.epoll()
        self.epoll.register(self.listener, select.EPOLLIN)
        self.asked: dict[int, _Asked] = {}
        self.endpoints: dict[int, UCXEndpoint] = {}
        self.depth = 0

    def init_blocking_progress_mode(self) -> int:
        return self.epoll.fileno()

    def get_address(self) -> bytes:
        return int(self.listener.getsockname()[1]).to_bytes(4, "little")

    def arm(self) -> bool:
        return not self.epoll.poll(0)

    def progress(self) -> int:
        assert self.depth == 0, "progress from inside a callback"
        self.depth, worked = 1, 0
        try:
            while events := self.epoll.poll(0):
                for fd, _ in events:
                    self._work_off(fd)
                    worked += 1
        finally:
            self.depth = 0
        return worked

    def _work_off(self, fd: int) -> None:
        if fd == self.listener.fileno():
            connection, _ = self.listener.accept()
            self.asked[connection.fileno()] = _Asked(self, connection)
            self.epoll.register(connection, select.EPOLLIN)
        elif fd in self.asked:
            self.asked[fd].serve()
        else:
            self.endpoints[fd].receive()

    def close(self) -> None:
        for one in self.asked.values():
            one.connection.close()
        self.epoll.close()
        self.listener.close()


class _Asked:
    """The lending end of a connection."""

    def __init__(self, worker: UCXWorker, connection: socket.socket) -> None:
        self.worker, self.connection = worker, connection
        self.connection.settimeout(CLOSE_S)

    def serve(self) -> None:
        try:
            data = self.connection.recv(ASK.size, socket.MSG_WAITALL)
            if len(data) == ASK.size:
                number, address, length, key = ASK.unpack(data)
                start, size = self.worker.context.regions.get(key, (0, 0))
                if length:
                    assert start <= address <= address + length <= start + size, "read outside of what is registered"
                self.connection.sendall(TELL.pack(number, length) + ctypes.string_at(address, length))
                return
        except OSError:
            pass
        del self.worker.asked[self.connection.fileno()]
        self.connection.close()


class UCXEndpoint:
    """The reading end."""

    def __init__(self, worker: UCXWorker, connection: socket.socket) -> None:
        self.worker, self.connection = worker, connection
        self.numbers = itertools.count(1)
        self.pending: dict[int, tuple[Bytes | None, Ended]] = {}
        self.come = bytearray()
        self.is_closed = self.is_broken = False

    @classmethod
    def create_from_worker_address(
        cls, worker: UCXWorker, address: bytes, *, endpoint_error_handling: bool
    ) -> "UCXEndpoint":
        assert endpoint_error_handling
        assert isinstance(address, _Buffer)
        try:
            connection = socket.create_connection(("127.0.0.1", int.from_bytes(address, "little")), timeout=CLOSE_S)
        except OSError as error:
            raise UCXError(f"no way there: {error}") from error
        endpoint = cls(worker, connection)
        worker.endpoints[connection.fileno()] = endpoint
        worker.epoll.register(connection, select.EPOLLIN)
        return endpoint

    def is_alive(self) -> bool:
        return not self.is_broken

    def info(self) -> str:
        return "tcp"

    def unpack_rkey(self, rkey: bytes) -> "UCXRkey":
        assert isinstance(rkey, _Buffer)
        return UCXRkey(self, int.from_bytes(rkey, "little"))

    def flush(self, cb_func: Ended) -> object:
        return self.ask(0, 0, 0, None, cb_func) if self.pending else None

    def ask(self, address: int, length: int, key: int, memory: Bytes | None, cb_func: Ended) -> object:
        if self.is_broken or self.is_closed:
            raise UCXError("endpoint error: connection reset")
        number = next(self.numbers)
        self.pending[number] = (memory, cb_func)
        try:
            self.connection.sendall(ASK.pack(number, address, length, key))
        except OSError as error:
            del self.pending[number]
            self.is_broken = True
            raise UCXError(str(error)) from error
        if RemoteMemory.at_once:
            self.pending[number] = (memory, lambda *_ended: None)
            while number in self.pending:
                self.receive()
            return None
        return number

    def receive(self) -> None:
        """Take what has come; the bytes of one answer land together."""
        try:
            data = self.connection.recv(RUN_BYTES)
            if not data:
                raise ConnectionResetError("the peer has gone")
        except OSError as error:
            self._broke(error)
            return
        self.come += data
        while len(self.come) >= TELL.size:
            number, length = TELL.unpack_from(self.come)
            if len(self.come) < TELL.size + length:
                return
            memory, cb_func = self.pending.pop(number)
            if memory is not None:
                memory[:length] = np.frombuffer(self.come, dtype=np.uint8, count=length, offset=TELL.size)
            self.come = self.come[TELL.size + length :]
            cb_func(number, None)

    def _broke(self, error: OSError) -> None:
        self.is_broken = True
        self._forget()
        pending, self.pending = self.pending, {}
        for number, (_, cb_func) in pending.items():
            cb_func(number, UCXError(str(error)))

    def _forget(self) -> None:
        with contextlib.suppress(ValueError, KeyError, OSError):
            self.worker.epoll.unregister(self.connection)
        self.worker.endpoints.pop(self.connection.fileno(), None)
        self.connection.close()

    def close(self) -> None:
        """Wait for what is under way, as a flush does; where the connection has broken, raise at once."""
        if self.is_broken:
            raise UCXError("Error while closing endpoint: connection reset")
        ends_at = time.monotonic() + CLOSE_S
        while self.pending and not self.is_broken:
            self.worker.progress()
            if time.monotonic() > ends_at:
                raise AssertionError("ucx-py would wait for this peer for ever")
        self.is_closed = True
        self._forget()


@dataclass
class UCXRkey:
    endpoint: UCXEndpoint
    key: int


class RemoteMemory:
    at_once = False
    """Whether every get ends while it is posted, as those that need no network do."""

    def __init__(self, rkey: UCXRkey, base: int, length: int) -> None:
        self.rkey, self.base, self.length = rkey, base, length

    def get_nb(
        self,
        memory: Bytes,
        cb_func: Ended,
        *,
        cb_args: tuple[object, ...] | None = None,
        cb_kwargs: dict[str, object] | None = None,
        offset: int = 0,
        size: int = 0,
    ) -> object:
        assert cb_args is not None, "ucx-py forgets its own defaults where a get ends early"
        assert cb_kwargs is not None
        if size + offset > self.length:
            raise IndexError("Out of bounds in UCX RMA interface")
        return self.rkey.endpoint.ask(self.base + offset, size, self.rkey.key, memory, cb_func)
