"""The UCX worker: progress, wake-ups and incoming messages."""

import ctypes
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from kvbus.dataplane import ucp_abi as abi
from kvbus.dataplane.ucp_abi import IN_PROGRESS, OK
from kvbus.dataplane.ucp_context import Context, Owned, require_count
from kvbus.errors import BackendError

AM_BYTES_MAX: Final = 4096
"""Header and body of one message together: messages carry notices, pages travel by get."""
AM_ID_MAX: Final = 255
"""UCX keeps a table as long as the highest id."""
HANDLER_ERRORS_KEPT: Final = 16
"""Enough to see what goes wrong; the count goes on."""
CLOSE_ROUNDS_MAX: Final = 100_000
"""Progress calls that `Worker.close` grants its forced closes: each ends in microseconds, or copies 8 MiB."""


class Ending(Protocol):
    """A close under way."""

    def status(self) -> int:
        """Return IN_PROGRESS until it has ended."""
        ...


class Connection(Protocol):
    """What a worker needs of its endpoints: to end them."""

    def close(self, *, force: bool) -> Ending:
        """Begin to close."""
        ...


class Worker(Owned):
    """Connections, messages and progress, driven by one thread at a time.

    `progress` must be called while requests are unfinished (a get over cma advances only in there, and raises
    no event), and on the reading side of tcp also whenever the event descriptor is readable.
    """

    def __init__(self, context: Context, handle: int, am_header_bytes_max: int) -> None:
        super().__init__(context.library, "worker", handle)
        self.context = context
        self.am_header_bytes_max = am_header_bytes_max
        self.endpoints: set[Connection] = set()
        """Open ones and ones whose close is under way: UCX may still call back into them."""
        self.handler_errors: deque[BaseException] = deque(maxlen=HANDLER_ERRORS_KEPT)
        self.handler_errors_count = 0
        self.messages_refused_count = 0
        self._handlers: dict[int, object] = {}
        self._progressing = False

    @classmethod
    def open(cls, context: Context) -> "Worker":
        """Open a worker on this context, which closes it when it is itself closed."""
        library = context.library
        params = abi.WorkerParams(field_mask=abi.WORKER_PARAM_THREAD_MODE, thread_mode=abi.THREAD_MODE_SERIALIZED)
        out = ctypes.c_void_p()
        status = library.worker_create(context.live_handle(), ctypes.byref(params), ctypes.byref(out))
        context.check(status, "open a worker")
        attributes = abi.WorkerAttributes(field_mask=abi.WORKER_ATTR_MAX_AM_HEADER)
        context.check(library.worker_query(out, ctypes.byref(attributes)), "query the worker")
        worker = cls(context, out.value or 0, attributes.max_am_header)
        context.users.add(worker)
        return worker

    def address(self) -> bytes:
        """Give the bytes with which a peer connects; hand them out only inside a granted lease."""
        handle = self.live_handle()
        out, size = ctypes.c_void_p(), ctypes.c_size_t()
        status = self.library.worker_get_address(handle, ctypes.byref(out), ctypes.byref(size))
        self.check(status, "give the worker's address")
        try:
            return ctypes.string_at(out.value or 0, size.value)
        finally:
            self.library.worker_release_address(handle, out)

    def progress(self) -> int:
        """Do pending work with the GIL released; 0 when there was none.

        One call copies at most CMA_TX_QUOTA segments, so deadlines and closes can come between two calls.
        """
        handle = self._handle_outside_callbacks("progress")
        self._progressing = True
        try:
            return self.library.worker_progress(handle)
        finally:
            self._progressing = False

    def event_fd(self) -> int:
        """Give the descriptor that becomes readable on events; UCX owns it, so never close it."""
        out = ctypes.c_int()
        self.check(self.library.worker_get_efd(self.live_handle(), ctypes.byref(out)), "give its event descriptor")
        return out.value

    def arm(self) -> bool:
        """Ask for an event before blocking on the descriptor; False if progress must be called first."""
        status = self.library.worker_arm(self.live_handle())
        if status == abi.BUSY:
            return False
        self.check(status, "arm the worker")
        return True

    def signal(self) -> None:
        """Wake the thread that blocks on the event descriptor: the one call that any thread may make.

        Not concurrently with `close`.
        """
        self.check(self.library.worker_signal(self.live_handle()), "signal the worker")

    def set_am_handler(self, am_id: int, handler: Callable[[bytes, bytes], None]) -> None:
        """Call `handler(header, body)`, both copies, for each message with this id, from inside `progress`.

        What it raises is kept in `handler_errors`, never passed into C. Messages larger than AM_BYTES_MAX, or
        sent by rendezvous, are dropped and counted: no kvbus peer sends them.
        """
        handle = self.live_handle()
        require_count("am_id", am_id, 0, AM_ID_MAX)
        if not callable(handler):
            raise TypeError(f"handler: a function expected, got {type(handler).__name__}")
        callback = abi.AM_CALLBACK(self._receiver(handler))
        params = abi.AmHandlerParams(
            field_mask=abi.AM_HANDLER_ID | abi.AM_HANDLER_FLAGS | abi.AM_HANDLER_CALLBACK,
            id=am_id,
            flags=abi.AM_WHOLE_MESSAGE,
            cb=ctypes.cast(callback, ctypes.c_void_p),
        )
        status = self.library.worker_set_am_recv_handler(handle, ctypes.byref(params))
        self.check(status, f"set the handler of message id {am_id}")
        self._handlers[am_id] = callback  # ctypes frees the C side with the object

    def _receiver(self, handler: Callable[[bytes, bytes], None]) -> Callable[..., int]:
        def receive(
            _arg: int,
            header: int,
            header_size: int,
            data: int,
            size: int,
            param: "ctypes._Pointer[abi.AmReceiveParams]",
        ) -> int:
            try:
                if param.contents.recv_attr & abi.AM_RECV_RENDEZVOUS or header_size + size > AM_BYTES_MAX:
                    self.messages_refused_count += 1
                else:
                    handler(
                        ctypes.string_at(header, header_size) if header_size else b"",
                        ctypes.string_at(data, size) if size else b"",
                    )
            except BaseException as error:  # noqa: BLE001 - the caller above is C: nothing may pass into it
                self.handler_errors.append(error)
                self.handler_errors_count += 1
            return OK

        return receive

    def close(self) -> None:
        """Force-close every endpoint, then the worker; repeats do nothing.

        Afterwards every request has ended and nothing of this worker touches memory. BackendError, with the
        worker still open, if a close does not end within CLOSE_ROUNDS_MAX progress calls; only a graceful one
        was seen to hang (on a frozen peer).
        """
        if self.handle is None:
            return
        handle = self._handle_outside_callbacks("close")
        closes = [endpoint.close(force=True) for endpoint in tuple(self.endpoints)]
        for _ in range(CLOSE_ROUNDS_MAX):
            closes = [close for close in closes if close.status() == IN_PROGRESS]
            if not closes:
                break
            self.progress()
        else:
            raise BackendError(f"{len(closes)} endpoints did not close; end this process to end their access")
        self.library.worker_destroy(handle)
        self.handle = None
        self._handlers.clear()
        self.context.users.discard(self)

    def _handle_outside_callbacks(self, action: str) -> int:
        handle = self.live_handle()
        if self._progressing:
            raise BackendError(f"{action} was called from inside a UCX callback; note the fact and return instead")
        return handle
