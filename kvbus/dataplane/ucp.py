"""A thin binding of the UCX calls that kvbus needs: one-sided gets, small messages, forced close.

Nothing here starts a thread or waits: the one thread that owns a context calls everything and drives it with
`Worker.progress` (`Worker.signal` alone may come from elsewhere). The wheel's UCX is built without checks of
its own, so a wrong argument is refused here before UCX can crash on it; a range inside the *peer's* memory
cannot be checked by anyone but the caller: UCX reads whatever address it is given.

Forking: a forked child would keep the parent's sockets open, and the peer would then never see the parent
die. Every object knows the process that made it and refuses to work in another; start children by spawn.
"""

import ctypes
import os
import re
from collections import deque
from collections.abc import Sequence
from typing import Final, NoReturn

from kvbus.dataplane import ucp_abi as abi
from kvbus.dataplane.ucp_abi import CANCELED, IN_PROGRESS, OK, Library, load
from kvbus.dataplane.ucp_context import (
    DEFAULT_SETTINGS,
    PINNED_SETTINGS,
    TURN_BYTES_MAX,
    Context,
    MemoryHandle,
    Owned,
    require_bytes,
    require_count,
    require_range,
    require_type,
)
from kvbus.dataplane.ucp_request import Batch, Closing, Request
from kvbus.dataplane.ucp_worker import AM_BYTES_MAX, AM_ID_MAX, Worker
from kvbus.errors import BackendError

__all__ = [
    "AM_BYTES_MAX",
    "CANCELED",
    "DEFAULT_SETTINGS",
    "IN_PROGRESS",
    "OK",
    "PINNED_SETTINGS",
    "REQUESTS_MAX",
    "TURN_BYTES_MAX",
    "Batch",
    "Closing",
    "Context",
    "Endpoint",
    "Library",
    "MemoryHandle",
    "Piece",
    "RemoteKey",
    "Request",
    "Worker",
    "load",
]

REQUESTS_MAX: Final = 4096
"""Unfinished requests of one endpoint: twice the 2k beyond which more in flight brought no speed."""
Piece = tuple[int, int, int]
"""Local address, length in bytes, remote address."""
REMOTE_KEYS_MAX: Final = 256
"""Keys of one endpoint: a peer has a handful of pools, and each is unpacked once per connection."""
BLOB_BYTES_MAX: Final = 16384
"""Addresses of 81-217 bytes and keys of 9-11 bytes were seen; many network devices make them longer."""
BLOB_PADDING_BYTES: Final = 4096
"""UCX parses addresses and keys without knowing where they end: a cut one runs into these zeros."""
_ERROR_POINTER_MIN: Final = 2**64 - 100
_ADDRESS_END: Final = 2**64
_LANE: Final = re.compile(r"lane\[\d+\]:\s+\d+:([^\s.]+)")


class RemoteKey(Owned):
    """The right to read one peer's memory over one endpoint; the endpoint gives it up when it closes."""

    def __init__(self, endpoint: "Endpoint", handle: int) -> None:
        super().__init__(endpoint.library, "remote key", handle)
        self.endpoint = endpoint

    def destroy(self) -> None:
        """Give the key up; only its endpoint calls this, once no request uses the key any more."""
        if self.handle is not None:
            self.library.rkey_destroy(self.handle)
            self.handle = None


class Endpoint(Owned):
    """A connection to one peer's worker, with error handling on: a dead peer ends every request with an
    error.

    One endpoint per peer, so that isolating a peer ends only its own transfers. A failed endpoint refuses
    every post: UCX may crash on a get over one. It is never repaired: close it by force and open another.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.library, "endpoint", None)
        self.worker = worker
        self.failure: int | None = None
        """UCX's status when the endpoint failed."""
        self.closing: Closing | None = None
        """The close under way or ended; None while the endpoint is open."""
        self._requests: set[Request] = set()
        self._posted_count = 0
        self._remote_keys: list[RemoteKey] = []
        self._error_callback = abi.ERROR_CALLBACK(self._on_error)

    @classmethod
    def open(cls, worker: Worker, address: bytes) -> "Endpoint":
        """Begin to connect; the wire-up ends during later progress on both sides.

        The address must come out of a grant that was checked: UCX trusts its content. BackendError if no
        transport leads there.
        """
        worker_handle = worker.live_handle()
        require_bytes("address", address, 1, BLOB_BYTES_MAX)
        endpoint = cls(worker)
        buffer = _padded(address)
        params = abi.EndpointParams(
            field_mask=abi.EP_PARAM_ADDRESS | abi.EP_PARAM_ERR_MODE | abi.EP_PARAM_ERR_HANDLER,
            address=ctypes.addressof(buffer),
            err_mode=abi.ERR_MODE_PEER,
            err_handler=abi.ErrorHandler(cb=ctypes.cast(endpoint._error_callback, ctypes.c_void_p)),
        )
        out = ctypes.c_void_p()
        status = worker.library.ep_create(worker_handle, ctypes.byref(params), ctypes.byref(out))
        worker.check(status, "connect to this address")
        endpoint.handle = out.value
        worker.endpoints.add(endpoint)
        return endpoint

    @property
    def failed(self) -> bool:
        """Whether the connection broke; requests may still be ending then."""
        return self.failure is not None

    def unfinished(self) -> int:
        """Count the requests that have not ended; after a forced close, 0 is the evidence that access
        ended.
        """
        return sum(request.status() == IN_PROGRESS for request in tuple(self._requests))

    def unpack_rkey(self, packed: bytes) -> RemoteKey:
        """Make a peer's key usable on this endpoint; like the address, it must come out of a checked
        grant.
        """
        handle = self._usable_handle()
        require_bytes("packed", packed, 1, BLOB_BYTES_MAX)
        if len(self._remote_keys) >= REMOTE_KEYS_MAX:
            raise BackendError(f"{REMOTE_KEYS_MAX} keys are open on this endpoint; keep and reuse them")
        buffer, out = _padded(packed), ctypes.c_void_p()
        status = self.library.ep_rkey_unpack(handle, ctypes.addressof(buffer), ctypes.byref(out))
        self.check(status, "unpack the peer's key")
        remote_key = RemoteKey(self, out.value or 0)
        self._remote_keys.append(remote_key)
        return remote_key

    def get(
        self,
        local_address: int,
        length_bytes: int,
        remote_address: int,
        rkey: RemoteKey,
        memory: MemoryHandle,
    ) -> Request:
        """Post a read of the peer's memory into ours; BackendError if the endpoint cannot take it.

        The remote range must lie inside granted pages, which only the caller can check.
        """
        return self.get_all(((local_address, length_bytes, remote_address),), rkey, memory)

    def get_all(self, pieces: Sequence[Piece], rkey: RemoteKey, memory: MemoryHandle) -> Batch:
        """Post a read for each piece, as `get` does, and return what ends when all of them have.

        Nothing is posted where one is refused. Where UCX itself fails midway, the batch holds those that it has taken,
        and ends with that error: they may write until then.
        """
        # One expression says yes, and the slow words below say why not: posting is the hot path (ten calls that
        # each checked one thing cost 4 us, UCX's own part 1 us).
        if not (
            type(rkey) is RemoteKey
            and type(memory) is MemoryHandle
            and rkey.endpoint is self
            and memory.context is self.worker.context
            and rkey.handle is not None
            and memory.handle is not None
            and self.handle is not None
            and self.failure is None
            and 0 < len(pieces) <= REQUESTS_MAX - self._posted_count
            and os.getpid() == self.pid
        ):
            self._refuse_get(pieces, rkey, memory)
        first, end = memory.address, memory.end
        for local, length, remote in pieces:
            if not (
                type(local) is type(length) is type(remote) is int
                and first <= local
                and 0 < length <= end - local
                and 0 < remote <= _ADDRESS_END - length
            ):
                self._refuse_get(((local, length, remote),), rkey, memory)
        return self._post_all(pieces, rkey.handle, memory)

    def _post_all(self, pieces: Sequence[Piece], key: int, memory: MemoryHandle) -> Batch:
        post, handle, params = self.library.get_nbx, self.handle, memory.get_params_address
        handles: deque[int] = deque()
        failure = OK
        for local, length, remote in pieces:
            raw = post(handle, local, length, remote, key, params)
            if raw is None:
                continue
            if raw >= _ERROR_POINTER_MIN:
                failure = self.failure = _pointer_status(raw)
                break
            handles.append(raw)
        batch = Batch(self, handles, memory, failure)
        if handles:
            self._note_posted(batch)
            memory.in_flight += len(handles)
        else:
            self.check(failure, "post a get")
        return batch

    def _refuse_get(self, pieces: Sequence[Piece], rkey: RemoteKey, memory: MemoryHandle) -> NoReturn:
        """Raise what is wrong with these gets, by the name of its field."""
        require_count("pieces", len(pieces), 1, REQUESTS_MAX)
        self._usable_handle(len(pieces))
        require_type("rkey", rkey, RemoteKey)
        require_type("memory", memory, MemoryHandle)
        for local_address, length_bytes, remote_address in pieces:
            require_range("local_address", local_address, length_bytes)
            require_range("remote_address", remote_address, length_bytes)
        if rkey.endpoint is not self or memory.context is not self.worker.context:
            raise ValueError("rkey, memory: of another endpoint or context")
        if memory.closed or rkey.closed:
            raise BackendError("rkey, memory: closed; unpack the key or map the memory again")
        for local_address, length_bytes, _ in pieces:
            memory.require_range(local_address, length_bytes)
        raise TypeError("rkey, memory: subclasses are not accepted")

    def send_am(self, am_id: int, header: bytes, body: bytes = b"") -> Request:
        """Send a small message, always eagerly; both parts are kept alive until the request ends.

        An ended request means sent, not received: what must be known to have arrived needs an answer.
        """
        handle = self._usable_handle()
        require_count("am_id", am_id, 0, AM_ID_MAX)
        require_bytes("header", header, 0, min(AM_BYTES_MAX, self.worker.am_header_bytes_max))
        require_bytes("body", body, 0, AM_BYTES_MAX - len(header))
        params = abi.RequestParams(
            op_attr_mask=abi.OP_FLAGS | abi.OP_MEMORY_TYPE,
            flags=abi.AM_SEND_EAGER | abi.AM_SEND_COPY_HEADER,
            memory_type=abi.MEMORY_TYPE_HOST,
        )
        raw = self.library.am_send_nbx(
            handle, am_id, header or None, len(header), body or None, len(body), ctypes.addressof(params)
        )
        return self._posted(raw, "send a message", kept=(header, body))

    def flush(self) -> Request:
        """Post a request that ends once everything posted before it has ended.

        Unlike a get over cma, it may need the peer to take part: on a frozen one it can stay in progress for ever.
        """
        params = abi.RequestParams()
        raw = self.library.ep_flush_nbx(self._usable_handle(), ctypes.addressof(params))
        return self._posted(raw, "flush the endpoint")

    def close(self, *, force: bool) -> Closing:
        """Begin to close, and return what ends once nothing of this endpoint can touch memory; repeats return it.

        By force, requests over tcp end at once with CANCELED; gets over cma that are already queued still run to
        their end in later progress calls, so the caller's cap on bytes in flight bounds how long a close takes.
        Gracefully, UCX flushes first: on a frozen peer that never ends, and it cannot be forced afterwards, so
        it is refused while requests are unfinished. A failed endpoint is closed by force in any case.
        """
        if self.closing is not None:
            return self.closing
        handle = self.live_handle()
        force = force or self.failed
        if not force and (count := self.unfinished()):
            raise BackendError(f"{count} requests are unfinished; end them first, or close by force")
        params = abi.RequestParams()
        if force:
            params.op_attr_mask, params.flags = abi.OP_FLAGS, abi.EP_CLOSE_FORCE
        self.handle = None  # before the call: whatever it returns, the endpoint cannot be used again
        raw = self.library.ep_close_nbx(handle, ctypes.byref(params))
        # Even with an error status, UCX has released the endpoint.
        self.closing = Closing(self, raw, _pointer_status(raw))
        self.closing.status()  # notes an end that came at once
        return self.closing

    def lanes(self) -> list[str]:
        """Name the transports and devices in use, such as `tcp/lo` and `cma/memory`, for logs and warnings."""
        return _LANE.findall(self.description())

    def description(self) -> str:
        """Give UCX's own description of the connection and of the protocols that it chose."""
        handle = self.live_handle()
        return abi.captured_text(lambda stream: self.library.ep_print_info(handle, stream))

    def request_ended(self, request: Request, status: int) -> None:
        """Note the end of a request; an error counts as the endpoint's failure, ahead of UCX's own call."""
        if request in self._requests:
            self._requests.remove(request)
            self._posted_count -= request.count
        if status < 0 and self.closing is None and self.failure is None:
            self.failure = status

    def release(self) -> None:
        """Give up the keys; only `Closing` calls this, once no request can use them any more."""
        for remote_key in self._remote_keys:
            remote_key.destroy()
        self._remote_keys.clear()
        self.worker.endpoints.discard(self)

    def _usable_handle(self, count: int = 1) -> int:
        handle = self.live_handle()
        if self.failure is not None:
            raise BackendError(
                f"the endpoint has failed ({self.library.status_text(self.failure)}); "
                "close it by force and connect again",
                status=self.failure,
            )
        if self._posted_count + count > REQUESTS_MAX:
            posted = f"{self._posted_count} of {REQUESTS_MAX} requests"
            raise BackendError(f"{posted} are unfinished on this endpoint; look at their status first")
        return handle

    def _posted(self, raw: int | None, action: str, kept: object = None) -> Request:
        if raw is not None and raw < _ERROR_POINTER_MIN:
            request = Request(self, raw, IN_PROGRESS, kept)
            self._note_posted(request)
            return request
        status = _pointer_status(raw)
        if status < 0 and self.failure is None:
            self.failure = status
        self.check(status, action)
        return Request(self, None, OK)

    def _note_posted(self, request: Request) -> None:
        self._requests.add(request)
        self._posted_count += request.count

    def _on_error(self, _arg: int | None, _endpoint: int | None, status: int) -> None:
        if self.failure is None:
            self.failure = status


def _pointer_status(raw: int | None) -> int:
    if raw is None:
        return OK
    return raw - 2**64 if raw >= _ERROR_POINTER_MIN else IN_PROGRESS


def _padded(blob: bytes) -> "ctypes.Array[ctypes.c_char]":
    return ctypes.create_string_buffer(blob, len(blob) + BLOB_PADDING_BYTES)
