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
from typing import Final, NoReturn

from kvbus.dataplane import ucp_abi as abi
from kvbus.dataplane.ucp_abi import CANCELED, IN_PROGRESS, OK, Library, load
from kvbus.dataplane.ucp_context import (
    DEFAULT_SETTINGS,
    PINNED_SETTINGS,
    Context,
    MemoryHandle,
    Owned,
    require_bytes,
    require_count,
    require_range,
    require_type,
)
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
    "Closing",
    "Context",
    "Endpoint",
    "Library",
    "MemoryHandle",
    "RemoteKey",
    "Request",
    "Worker",
    "load",
]

REQUESTS_MAX: Final = 4096
"""Unfinished requests of one endpoint: twice the 2k beyond which more in flight brought no speed."""
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


class Request:
    """One operation under way; `status` tells how it stands, and is exact evidence once it has ended.

    A get that has ended, well or not, writes nothing any more. UCX cannot cancel one: the only abort is the
    forced close of its endpoint.
    """

    __slots__ = ("_handle", "_kept", "_memory", "_status", "endpoint")

    def __init__(
        self,
        endpoint: "Endpoint",
        handle: int | None,
        status: int,
        memory: MemoryHandle | None = None,
        kept: object = None,
    ) -> None:
        self.endpoint = endpoint
        self._handle = handle
        self._status = status
        self._memory = memory
        self._kept = kept  # what UCX reads until the end

    def status(self) -> int:
        """Return IN_PROGRESS, OK, or UCX's negative error code; it changes only after `Worker.progress`."""
        if self._status == IN_PROGRESS:
            self.endpoint.require_own_process()
            status = self.endpoint.library.request_check_status(self._handle)
            if status != IN_PROGRESS:
                self._end(status)
        return self._status

    def status_text(self) -> str:
        """Give UCX's own words for the status."""
        return self.endpoint.library.status_text(self.status())

    def free(self) -> None:
        """Give the request up; BackendError while it is in progress, for it is the evidence of its end.

        A request whose end `status` has seen is already free in UCX, so this is for those that look no
        further.
        """
        if self.status() == IN_PROGRESS:
            raise BackendError("the request is in progress; drive Worker.progress, or close its endpoint by force")

    def _end(self, status: int) -> None:
        self._status = status
        self.endpoint.library.request_free(self._handle)
        self._handle = self._kept = None
        if self._memory is not None:
            self._memory.in_flight -= 1
            self._memory = None
        self.endpoint.request_ended(self, status)

    def __repr__(self) -> str:
        return f"<Request {self.endpoint.library.status_text(self._status)!r}>"


class Closing(Request):
    """A close under way; it ends only when every request of its endpoint has ended too.

    UCX's own close is weaker: over cma it returned at once while 200 gets stood in a queue, and later progress
    calls still wrote all of them (measured on 1.21).
    """

    __slots__ = ()

    def status(self) -> int:
        """Return IN_PROGRESS while anything of this endpoint may still touch memory."""
        status = super().status()
        if status == IN_PROGRESS or self.endpoint.unfinished():
            return IN_PROGRESS
        self.endpoint.release()
        return status


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
        # One expression says yes, and the slow words below say why not: posting is the hot path (ten calls that
        # each checked one thing cost 4 us, UCX's own part 1 us).
        if not (
            type(local_address) is type(length_bytes) is type(remote_address) is int
            and type(rkey) is RemoteKey
            and type(memory) is MemoryHandle
            and 0 < length_bytes <= memory.end - local_address
            and memory.address <= local_address
            and 0 < remote_address <= _ADDRESS_END - length_bytes
            and rkey.endpoint is self
            and memory.context is self.worker.context
            and rkey.handle is not None
            and memory.handle is not None
            and self.handle is not None
            and self.failure is None
            and len(self._requests) < REQUESTS_MAX
            and os.getpid() == self.pid
        ):
            self._refuse_get(local_address, length_bytes, remote_address, rkey, memory)
        raw = self.library.get_nbx(
            self.handle, local_address, length_bytes, remote_address, rkey.handle, memory.get_params_address
        )
        return self._posted(raw, "post a get", memory)

    def _refuse_get(
        self,
        local_address: int,
        length_bytes: int,
        remote_address: int,
        rkey: RemoteKey,
        memory: MemoryHandle,
    ) -> NoReturn:
        """Raise what is wrong with this get, by the name of its field."""
        self._usable_handle()
        require_range("local_address", local_address, length_bytes)
        require_range("remote_address", remote_address, length_bytes)
        require_type("rkey", rkey, RemoteKey)
        require_type("memory", memory, MemoryHandle)
        if rkey.endpoint is not self or memory.context is not self.worker.context:
            raise ValueError("rkey, memory: of another endpoint or context")
        if memory.closed or rkey.closed:
            raise BackendError("rkey, memory: closed; unpack the key or map the memory again")
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
        self._requests.discard(request)
        if status < 0 and self.closing is None and self.failure is None:
            self.failure = status

    def release(self) -> None:
        """Give up the keys; only `Closing` calls this, once no request can use them any more."""
        for remote_key in self._remote_keys:
            remote_key.destroy()
        self._remote_keys.clear()
        self.worker.endpoints.discard(self)

    def _usable_handle(self) -> int:
        handle = self.live_handle()
        if self.failure is not None:
            raise BackendError(
                f"the endpoint has failed ({self.library.status_text(self.failure)}); "
                "close it by force and connect again",
                status=self.failure,
            )
        if len(self._requests) >= REQUESTS_MAX:
            raise BackendError(f"{REQUESTS_MAX} requests are unfinished on this endpoint; look at their status first")
        return handle

    def _posted(self, raw: int | None, action: str, memory: MemoryHandle | None = None, kept: object = None) -> Request:
        if raw is not None and raw < _ERROR_POINTER_MIN:
            request = Request(self, raw, IN_PROGRESS, memory, kept)
            self._requests.add(request)
            if memory is not None:
                memory.in_flight += 1
            return request
        status = _pointer_status(raw)
        if status < 0 and self.failure is None:
            self.failure = status
        self.check(status, action)
        return Request(self, None, OK)

    def _on_error(self, _arg: int | None, _endpoint: int | None, status: int) -> None:
        if self.failure is None:
            self.failure = status


def _pointer_status(raw: int | None) -> int:
    if raw is None:
        return OK
    return raw - 2**64 if raw >= _ERROR_POINTER_MIN else IN_PROGRESS


def _padded(blob: bytes) -> "ctypes.Array[ctypes.c_char]":
    return ctypes.create_string_buffer(blob, len(blob) + BLOB_PADDING_BYTES)
