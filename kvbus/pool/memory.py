"""The pool's memory: one sealed memfd that worker and engine both map.

    header page | generation table, 32 bytes a page, padded to whole memory pages | pages at a constant stride

The worker creates it and passes the descriptor over the local socket (`multiprocessing.shared_memory` will not do: on
Python 3.11 an attacher's exit unlinks it). The file is sealed against shrinking and growing, so that no process that
holds the descriptor can pull memory away under another one's reads. A worker always makes a new pool; it never adopts
one whose earlier owner may still write (P8).

Once exported, the mapping stays for the life of the process: a peer may hold an address, and an unmapped target ends
the process when a read over TCP comes in.
"""

import fcntl
import json
import mmap
import os
import struct
import weakref
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbus.errors import ConfigError, PeerError
from kvbus.pool.digests import PageDigests
from kvbus.pool.generations import RECORD_BYTES, Generations
from kvbus.pool.host_memory import available_bytes
from kvbus.pool.layout import STRIDE_UNIT_BYTES, PageLayout

HEADER_BYTES: Final = STRIDE_UNIT_BYTES
PAGES_MAX: Final = 1 << 31
"""Page indexes travel as u32."""
POOL_MAX_BYTES: Final = 1 << 47
"""A grant carries a pool's length in 48 bits."""

_MAGIC: Final = b"kvbuspl\x01"
_VERSION: Final = 1
# magic, version, layout length, page count, page bytes, stride, generations offset, pages offset, length, epoch
_HEADER: Final = struct.Struct("<8sII7Q64s")
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_NAME: Final = "kvbus-pool"

_exported: Final[list["PoolMemory"]] = []
# Keeps exported mappings alive until the process ends. It grows by one per pool that a process exports, and each entry
# holds its pool's memory anyway, so the host's memory bounds it.


class Closing(StrEnum):
    """What `PoolMemory.close` did."""

    UNMAPPED = "unmapped"
    KEPT_EXPORTED = "kept: exported, peers may hold its address"
    KEPT_IN_USE = "kept: views on it are alive"


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Where things stand in a pool: counts, and offsets from its start in bytes."""

    page_count: int
    page_bytes: int
    page_stride: int
    generations_offset: int
    pages_offset: int
    length_bytes: int

    @classmethod
    def of(cls, layout: PageLayout, page_count: int) -> "PoolPlan":
        """Return the one plan that a layout and a page count give."""
        return cls.sized(page_count, page_bytes=layout.page_bytes, page_stride=layout.page_stride)

    @classmethod
    def sized(cls, page_count: int, *, page_bytes: int, page_stride: int) -> "PoolPlan":
        """Return the one plan for so many pages of a size and a stride."""
        table_end = HEADER_BYTES + RECORD_BYTES * page_count
        pages_offset = -(-table_end // STRIDE_UNIT_BYTES) * STRIDE_UNIT_BYTES
        return cls(
            page_count=page_count,
            page_bytes=page_bytes,
            page_stride=page_stride,
            generations_offset=HEADER_BYTES,
            pages_offset=pages_offset,
            length_bytes=pages_offset + page_stride * page_count,
        )


class PoolMemory:
    """A mapped pool; made by `create` (worker) or `attach` (engine), never by its constructor."""

    def __init__(self, fd: int, mapping: mmap.mmap, layout: PageLayout, plan: PoolPlan, epoch: int) -> None:
        self._fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)  # a pool that is dropped gives its descriptor back, too
        self._close_fd.atexit = False
        self._mapping = mapping
        self._layout = layout
        self._plan = plan
        self._is_exported = False
        self._bytes: NDArray[np.uint8] | None = None
        self._pages: NDArray[np.uint8] | None = None
        self._map_bytes()
        self._fingerprint = layout.fingerprint()
        self._generations = Generations(self._table(), epoch)
        self._digests = PageDigests(self._generations, plan.page_count)

    def __repr__(self) -> str:
        plan = self._plan
        return f"<PoolMemory pages={plan.page_count} of {plan.page_bytes} bytes fd={self._fd} {self._fingerprint[:8]}>"

    @classmethod
    def create(cls, layout: PageLayout, pages: int, epoch: int) -> "PoolMemory":
        """Return a new pool with all of its memory allocated and mapped, every page never written.

        Fresh memory is the slowest thing on the data path, so nothing is left to be touched first by a transfer.
        ConfigError where the layout is invalid or the host lacks the memory.
        """
        layout.require_valid()
        if type(pages) is not int or not 0 < pages <= PAGES_MAX:
            raise ConfigError(f"a pool of {pages!r} pages was asked for, expected 1…{PAGES_MAX}: set the pool's size")
        if not 0 < epoch < 1 << 63:
            raise ValueError(f"epoch must lie in 1…{(1 << 63) - 1}, got {epoch}")
        plan = PoolPlan.of(layout, pages)
        _require_memory(plan)
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _allocate(fd, plan)
            # F_SEAL_SEAL: whoever gets the descriptor cannot add a seal that stops the worker's own writing.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            mapping = _map(fd, plan.length_bytes, writable=True)
        except BaseException:
            os.close(fd)
            raise
        mapping[:HEADER_BYTES] = _header(layout, plan, epoch)
        memory = cls(fd, mapping, layout, plan, epoch)
        memory.generations.format()
        return memory

    @classmethod
    def attach(cls, fd: int, *, writable: bool, expected: PageLayout | None = None) -> "PoolMemory":
        """Return the pool behind a descriptor that another process created, mapped here; the descriptor is then ours.

        PeerError where it is no pool, or one whose header, length or seals do not fit; ConfigError where its layout is
        not `expected`. On an error the descriptor stays the caller's. The generation table is read-only here.
        """
        layout, plan, epoch = _read_header(fd)
        if expected is not None and expected.fingerprint() != layout.fingerprint():
            raise ConfigError(
                f"the pool's layout is {layout.to_plain()}, this engine's {expected.to_plain()}: "
                "attach the engine to the worker that was started for its model"
            )
        memory = cls(fd, _map(fd, plan.length_bytes, writable=writable), layout, plan, epoch)
        table = memory._table()
        table.flags.writeable = False
        memory.generations.map_to(table)
        return memory

    @property
    def fd(self) -> int:
        """The memfd's descriptor in this process."""
        return self._fd

    @property
    def layout(self) -> PageLayout:
        """What the pages' bytes mean."""
        return self._layout

    @property
    def fingerprint(self) -> str:
        """The layout's fingerprint, as grants and lease views carry it."""
        return self._fingerprint

    @property
    def epoch(self) -> int:
        """The epoch of the worker that made the pool."""
        return self._generations.epoch

    @property
    def generations(self) -> Generations:
        """The pool's generation table."""
        return self._generations

    @property
    def digests(self) -> PageDigests:
        """What the worker knows of its pages' bytes; turned off unless somebody turns it on."""
        return self._digests

    @property
    def address(self) -> int:
        """The first byte's address in this process."""
        if self._bytes is None:
            raise _closed()
        return self._address

    @property
    def page_count(self) -> int:
        """How many pages the pool has."""
        return self._plan.page_count

    @property
    def page_stride(self) -> int:
        """The distance between two pages in bytes."""
        return self._plan.page_stride

    @property
    def pages_offset(self) -> int:
        """Where page 0 starts, in bytes from `address`."""
        return self._plan.pages_offset

    @property
    def generations_offset(self) -> int:
        """Where the record of page 0 starts, in bytes from `address`."""
        return self._plan.generations_offset

    @property
    def length_bytes(self) -> int:
        """The length of the whole mapping in bytes."""
        return self._plan.length_bytes

    @property
    def whole(self) -> NDArray[np.uint8]:
        """All bytes of the pool, from `address` on, a view; ValueError once it was closed."""
        return self._whole()

    def page_bytes(self, page: int) -> NDArray[np.uint8]:
        """Return the content of a page as bytes, a view without its padding; IndexError outside the pool."""
        if self._pages is None:
            raise _closed()
        if not 0 <= page < len(self._pages):
            raise IndexError(f"page {page} is outside the pool of {self._plan.page_count} pages")
        content: NDArray[np.uint8] = self._pages[page]
        return content

    def page_array(self, page: int) -> NDArray[np.generic]:
        """Return the content of a page as the layout's elements in the layout's shape, a view."""
        return self.page_bytes(page).view(self._layout.element).reshape(self._layout.shape)

    def export(self) -> int:
        """Return the address, and keep the mapping for the life of the process: call it before an address leaves."""
        if not self._is_exported:
            self._is_exported = True
            _exported.append(self)
        return self.address

    def close(self) -> Closing:
        """Unmap the pool and close its descriptor if nobody can hold an address, and say what was the case."""
        if self._is_exported:
            return Closing.KEPT_EXPORTED
        if self._bytes is None:
            return Closing.UNMAPPED
        table = self._generations.map_to(None)
        self._bytes = self._pages = None
        writable = table is not None and table.flags.writeable
        del table
        try:
            self._mapping.close()
        except BufferError:
            self._map_bytes()
            table = self._table()
            table.flags.writeable = writable
            self._generations.map_to(table)
            return Closing.KEPT_IN_USE
        self._close_fd()
        return Closing.UNMAPPED

    def _map_bytes(self) -> None:
        plan = self._plan
        self._bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self._address = int(self._bytes.ctypes.data)
        rows = self._bytes[plan.pages_offset :].reshape(plan.page_count, plan.page_stride)
        self._pages = rows[:, : plan.page_bytes]

    def _whole(self) -> NDArray[np.uint8]:
        if self._bytes is None:
            raise _closed()
        return self._bytes

    def _table(self) -> NDArray[np.uint64]:
        start = self._plan.generations_offset
        end = start + RECORD_BYTES * self._plan.page_count
        return self._whole()[start:end].view(np.uint64).reshape(self._plan.page_count, RECORD_BYTES // 8)


def _closed() -> ValueError:
    return ValueError("the pool was closed")


def _require_memory(plan: PoolPlan) -> None:
    if plan.length_bytes > POOL_MAX_BYTES:
        raise ConfigError(_too_large(plan, f"a pool may have at most {POOL_MAX_BYTES} bytes"))
    available = available_bytes()
    if available is not None and plan.length_bytes > available:
        raise ConfigError(_too_large(plan, f"this host has {available} bytes of memory available"))


def _allocate(fd: int, plan: PoolPlan) -> None:
    os.ftruncate(fd, plan.length_bytes)
    try:
        os.posix_fallocate(fd, 0, plan.length_bytes)
    except OSError as error:
        raise ConfigError(_too_large(plan, f"the host refused: {error.strerror}")) from error


def _too_large(plan: PoolPlan, reason: str) -> str:
    return (
        f"a pool of {plan.page_count} pages, {plan.page_stride} bytes each, needs {plan.length_bytes} bytes; {reason}: "
        "lower the pool's page count"
    )


def _map(fd: int, length_bytes: int, *, writable: bool) -> mmap.mmap:
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return mmap.mmap(fd, length_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=access)


def _header(layout: PageLayout, plan: PoolPlan, epoch: int) -> bytes:
    text = json.dumps(layout.to_plain()).encode()
    head = _HEADER.pack(
        _MAGIC,
        _VERSION,
        len(text),
        plan.page_count,
        plan.page_bytes,
        plan.page_stride,
        plan.generations_offset,
        plan.pages_offset,
        plan.length_bytes,
        epoch,
        layout.fingerprint().encode(),
    )
    return (head + text).ljust(HEADER_BYTES, b"\0")


def _read_header(fd: int) -> tuple[PageLayout, PoolPlan, int]:
    try:
        length_bytes = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        raw = os.pread(fd, HEADER_BYTES, 0)
    except OSError as error:
        raise PeerError("the descriptor is no pool: it is no sealed memory file", reason=error.strerror) from error
    if seals & _SEALS != _SEALS:
        raise PeerError("the pool is not sealed against shrinking: whoever holds it could end this process")
    if len(raw) < HEADER_BYTES:
        raise PeerError("the descriptor is no pool: too short for a header", length_bytes=len(raw))
    magic, version, text_bytes, *numbers, epoch, fingerprint = _HEADER.unpack_from(raw)
    if magic != _MAGIC or version != _VERSION:
        raise PeerError("the descriptor is no pool of this version", magic=magic, version=version, expected=_VERSION)
    layout = _header_layout(raw[_HEADER.size : _HEADER.size + text_bytes])
    if layout.fingerprint().encode() != fingerprint.rstrip(b"\0"):
        raise PeerError("the pool's fingerprint is not that of its layout", fingerprint=fingerprint)
    stated = PoolPlan(*numbers)
    if not 0 < stated.page_count <= PAGES_MAX or stated != PoolPlan.of(layout, stated.page_count):
        raise PeerError("the pool's header contradicts its layout", stated=stated)
    if stated.length_bytes != length_bytes:
        raise PeerError("the pool's file has another length than its header says", length_bytes=length_bytes)
    return layout, stated, epoch


def _header_layout(text: bytes) -> PageLayout:
    try:
        return PageLayout.from_plain(json.loads(text))
    except (ValueError, ConfigError) as error:
        raise PeerError("the pool's header holds no layout", reason=str(error)[:200]) from error
