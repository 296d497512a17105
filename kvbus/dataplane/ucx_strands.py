"""Reading over tcp alone: several connections to one peer, on each one get under way, answered by one message.

Over tcp UCX cannot read another process's memory: that process's own UCX answers, by messages that its progress sends.
Where the kernel refuses one because the connection is broken, UCX 1.21 (`ucp_get_req_handler`) aborts the process that
answers, whatever error handling there is: a source that stood still while its reader died, and then went on. But into
a connection whose other end was closed in order the kernel takes one message more, and refuses the second. It is closed
in order where its dead reader had left nothing unread, which is so while that reader waits for its one answer.
"""

from collections import deque
from collections.abc import Callable, Sequence

from kvbus.dataplane import ucp
from kvbus.errors import BackendError

STRANDS_MAX = 4
"""Connections to one peer: two megabytes asked for, so that neither side waits for the other's turn."""


class Strands:
    """The connections to one peer: the link's own, and some more, opened here."""

    def __init__(self, first: ucp.Endpoint, connect: Callable[[], ucp.Endpoint]) -> None:
        self._endpoints = [first]
        self._free: list[int] = [0]
        self._keys: dict[tuple[int, bytes], ucp.RemoteKey] = {}
        try:
            while len(self._endpoints) < STRANDS_MAX:
                self._endpoints.append(connect())
                self._free.append(len(self._free))
        except BackendError:  # reading is slower over fewer, and the link's own will tell if the peer is gone
            pass

    @property
    def others(self) -> tuple[ucp.Endpoint, ...]:
        """Those that were opened here: whoever closes the link closes them with it."""
        return tuple(self._endpoints[1:])

    @property
    def failed(self) -> bool:
        """Whether one of them broke."""
        return any(endpoint.failed for endpoint in self._endpoints)

    def read(self, pieces: Sequence[ucp.Piece], packed_key: bytes, memory: ucp.MemoryHandle) -> "Turns":
        """Begin to read these pieces; ValueError, with nothing posted, for one that does not fit the memory."""
        for local, length, _ in pieces:
            memory.require_range(local, length)
        return Turns(self, pieces, packed_key, memory)

    def take(self) -> int | None:
        """Return a connection on which nothing is under way."""
        return self._free.pop() if self._free else None

    def give_back(self, strand: int) -> None:
        """Note that nothing is under way there any more."""
        self._free.append(strand)

    def post(self, strand: int, piece: ucp.Piece, packed_key: bytes, memory: ucp.MemoryHandle) -> ucp.Request:
        """Ask for one message."""
        endpoint = self._endpoints[strand]
        if (strand, packed_key) not in self._keys:
            self._keys[strand, packed_key] = endpoint.unpack_rkey(packed_key)
        return endpoint.get_all((piece,), self._keys[strand, packed_key], memory)


class Turns:
    """Pieces read in turn, over whatever strands are free; looking at the status posts what comes next.

    It ends with the last piece, or, once one has failed, with the last that is under way.
    """

    def __init__(
        self, strands: Strands, pieces: Sequence[ucp.Piece], packed_key: bytes, memory: ucp.MemoryHandle
    ) -> None:
        self._strands = strands
        self._packed_key = packed_key
        self._memory = memory
        self._left = deque(
            (local + at, min(ucp.TURN_BYTES_MAX, length - at), remote + at)
            for local, length, remote in pieces
            for at in range(0, length, ucp.TURN_BYTES_MAX)
        )
        self._under_way: list[tuple[ucp.Request, int]] = []
        self._failure = ucp.OK
        self._post()

    def status(self) -> int:
        """Return IN_PROGRESS, OK, or UCX's negative error code; it changes only after `Worker.progress`."""
        under_way, self._under_way = self._under_way, []
        for request, strand in under_way:
            status = request.status()
            if status == ucp.IN_PROGRESS:
                self._under_way.append((request, strand))
                continue
            self._strands.give_back(strand)
            self._failure = self._failure or status
        self._post()
        return ucp.IN_PROGRESS if self._left or self._under_way else self._failure

    def _post(self) -> None:
        if self._failure:
            self._left.clear()
        while self._left and (strand := self._strands.take()) is not None:
            try:
                request = self._strands.post(strand, self._left.popleft(), self._packed_key, self._memory)
            except BackendError:  # it has failed or was closed since; what is under way ends by itself
                self._failure = ucp.CANCELED
                self._left.clear()
                self._strands.give_back(strand)
                return
            self._under_way.append((request, strand))
