"""Scattered pages, and the two calls that send them or let bytes land in them.

Python's own `sendmsg` and `recvmsg_into` take a list of buffers. Each page needs an object of its own then, which costs
0.8 us at both ends together, where moving its 4 KiB costs 1.4. Here the kernel's list (struct iovec: address, length)
is a table that numpy makes, and a call takes it as it stands. Whoever names an address answers for it: `PoolBytes`
looks at each page first. Between two calls as little as possible happens in Python: copying has emptied the processor's
caches, and then each line costs several times what it does in a loop of its own.
"""

import ctypes
import errno
import functools
import os
import socket
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.uint64]
"""Addresses of pages, in the order in which their bytes are sent."""
Call = Callable[..., int]

RANGES_A_CALL_MAX = 1024
"""The kernel takes no more."""
_ROW_BYTES = 16
_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class _Message(ctypes.Structure):
    """The kernel's struct msghdr."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("ranges", ctypes.c_void_p),
        ("ranges_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class Ranges:
    """A head, pages and a tail that are worked off in order, and how far that is; any of the three may be missing.

    `keep` is what the pages lie in; it lives as long as the ranges do.
    """

    def __init__(
        self,
        head: bytearray | None = None,
        places: Places | None = None,
        page_bytes: int = 0,
        tail: bytearray | None = None,
        *,
        keep: object = None,
    ) -> None:
        pages = 0 if places is None else len(places)
        self._pages_from = 1 if head else 0
        self._pages_to = self._pages_from + pages
        self._rows = self._pages_to + (1 if tail else 0)
        table = self._table = np.empty(2 * self._rows, dtype=np.uint64)
        words = self._words = table.data
        self._head_bytes, tail_bytes = 0, 0
        if head:
            words[0], words[1] = address_of(head), len(head)
            self._head_bytes = len(head)
        if places is not None:
            table[2 * self._pages_from : 2 * self._pages_to : 2] = places
            table[2 * self._pages_from + 1 : 2 * self._pages_to : 2] = page_bytes
        if tail:
            words[-2], words[-1] = address_of(tail), len(tail)
            tail_bytes = len(tail)
        self._address = address_of(words) if self._rows else 0
        self._message = _Message(ranges=self._address, ranges_count=min(self._rows, RANGES_A_CALL_MAX))
        self._keep = (keep, head, tail)
        self._page_bytes = page_bytes
        self._at = 0
        self._row = self._begun = 0  # where that is
        self.left_bytes = self._head_bytes + pages * page_bytes + tail_bytes
        """How many bytes are still to be worked off."""

    def send(self, sock: socket.socket) -> int:
        """Send what the socket takes of the rest in one call; BlockingIOError where it takes nothing now."""
        return self._call(_calls()[0], sock)

    def receive(self, sock: socket.socket) -> int:
        """Let what is there land in the rest in one call; BlockingIOError where nothing is, 0 where nothing will be."""
        return self._call(_calls()[1], sock)

    def divert(self, place: int) -> None:
        """Let the rest of the pages be the one at this address, again and again; head and tail stay."""
        self._table[2 * max(self._row, self._pages_from) : 2 * self._pages_to : 2] = place

    def _call(self, call: Call, sock: socket.socket) -> int:
        while (moved := call(sock.fileno(), self._message, _FLAGS)) < 0:
            if (number := ctypes.get_errno()) != errno.EINTR:
                raise OSError(number, os.strerror(number))
        self.left_bytes -= moved
        if moved and self.left_bytes:
            self._advance(moved)
        return moved

    def _advance(self, length_bytes: int) -> None:
        """Note that so many bytes more were worked off, and cut them off the first row that is left."""
        self._at += length_bytes
        row, begun = 0, self._at
        if begun >= self._head_bytes:
            page, begun = divmod(begun - self._head_bytes, self._page_bytes) if self._page_bytes else (0, begun)
            row = self._pages_from + page
            if row >= self._pages_to:
                begun += (row - self._pages_to) * self._page_bytes
                row = self._pages_to
        cut = begun - self._begun if row == self._row else begun
        self._words[2 * row] += cut
        self._words[2 * row + 1] -= cut
        self._row, self._begun = row, begun
        self._message.ranges = self._address + _ROW_BYTES * row
        self._message.ranges_count = min(self._rows - row, RANGES_A_CALL_MAX)


def address_of(buffer: bytearray | memoryview) -> int:
    """Return where a buffer is that is not empty; its caller keeps it, and a bytearray's size must not change."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@functools.cache
def _calls() -> tuple[Call, Call]:
    """Return the C library's `sendmsg` and `recvmsg`; both let other threads run meanwhile."""
    library = ctypes.CDLL(None, use_errno=True)
    for call in (library.sendmsg, library.recvmsg):
        call.argtypes = (ctypes.c_int, ctypes.POINTER(_Message), ctypes.c_int)
        call.restype = ctypes.c_ssize_t
    return library.sendmsg, library.recvmsg
