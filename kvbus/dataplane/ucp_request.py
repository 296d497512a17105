"""What UCX does for an endpoint: one operation, several gets posted together, and the endpoint's own end.

A request that has ended is exact evidence: a get that has ended, well or not, writes nothing any more.
"""

from collections import deque
from typing import Protocol

from kvbus.dataplane.ucp_abi import IN_PROGRESS, OK, Library
from kvbus.dataplane.ucp_context import MemoryHandle
from kvbus.errors import BackendError


class Poster(Protocol):
    """What requests need of their endpoint."""

    @property
    def library(self) -> Library:
        """UCX."""

    def require_own_process(self) -> None:
        """Refuse use after a fork (BackendError)."""

    def unfinished(self) -> int:
        """Count the requests that have not ended."""

    def request_ended(self, request: "Request", status: int) -> None:
        """Note the end of a request."""

    def release(self) -> None:
        """Give up the keys."""


class Request:
    """One operation under way; `status` tells how it stands, and is exact evidence once it has ended.

    UCX cannot cancel a get: the only abort is the forced close of its endpoint.
    """

    __slots__ = ("_handle", "_kept", "_status", "count", "endpoint")

    def __init__(self, endpoint: Poster, handle: int | None, status: int, kept: object = None) -> None:
        self.endpoint = endpoint
        self.count = 1
        """How many of UCX's requests it stands for."""
        self._handle = handle
        self._status = status
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
        self.endpoint.request_ended(self, status)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.endpoint.library.status_text(self._status)!r}>"


class Batch(Request):
    """Gets that were posted together: in progress until all of them have ended, and OK only if all are.

    Each is one of UCX's own requests, and is looked at in the order of posting; the first error stands.
    """

    __slots__ = ("_failure", "_handles", "_memory")

    def __init__(self, endpoint: Poster, handles: "deque[int]", memory: MemoryHandle, failure: int = OK) -> None:
        super().__init__(endpoint, None, IN_PROGRESS if handles else failure)
        self.count = len(handles)
        self._handles = handles
        self._memory = memory
        self._failure = failure

    def status(self) -> int:
        """Return IN_PROGRESS, OK, or UCX's negative error code; it changes only after `Worker.progress`."""
        if self._status != IN_PROGRESS:
            return self._status
        endpoint, handles = self.endpoint, self._handles
        endpoint.require_own_process()
        check, free = endpoint.library.request_check_status, endpoint.library.request_free
        while handles:
            status = check(handles[0])
            if status == IN_PROGRESS:
                return status
            free(handles.popleft())
            self._failure = self._failure or status
        self._status = self._failure
        self._memory.in_flight -= self.count
        endpoint.request_ended(self, self._status)
        return self._status


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
