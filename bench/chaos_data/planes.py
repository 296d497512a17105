"""What a bare member stands on: a pool, one transport over it, a file for its facts, and no engine."""

import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.chaos_data.content import layout
from bench.chaos_data.records import MemberSettings
from kvbus.dataplane.memory import MemoryReader
from kvbus.dataplane.socket_reader import SocketReader, SocketReaderSettings
from kvbus.dataplane.socket_server import SocketServer
from kvbus.dataplane.ucx import UcxReader, UcxReaderSettings
from kvbus.dataplane.ucx_plane import UcxPlane
from kvbus.engines.base import Prefilled
from kvbus.engines.desk import Refusal
from kvbus.grants import MemoryAccess
from kvbus.ledger.types import Backend
from kvbus.pool.allocator import PageAllocator
from kvbus.pool.index import ReuseIndex
from kvbus.pool.lender import PoolLender
from kvbus.pool.memory import PoolMemory
from kvbus.processes import identity
from kvbus.roles.offers import PoolAccess
from kvbus.roles.poolside import PoolSide
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.transport import NotStored, Stored

UCX_SETTINGS: Mapping[str, dict[str, str]] = {
    "cma": {},  # kvbus's own choice: tcp for control, cma for bytes
    "tcp": {"TLS": "tcp"},
    # Shared memory, by messages that the source must answer; without UCX asking, no death is seen there.
    "posix": {"TLS": "posix", "MM_ERROR_HANDLING": "y", "KEEPALIVE_INTERVAL": "1s"},
}
FRAME = struct.Struct("<II")
"""Of a facts file: the lengths of a subject and of its event, which follow."""


class FactsFile(MemoryBus):
    """A bus whose logs are also written to a file, one frame an event, so that they outlive a kill."""

    def __init__(self, broker: MemoryBroker, path: Path) -> None:
        super().__init__(broker)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    async def store(
        self, subject: str, data: bytes, *, message_id: str, wait_s: float = 5.0, after: int | None = None
    ) -> Stored | NotStored:
        """Store an event here and in the file."""
        name = subject.encode()
        os.write(self._descriptor, FRAME.pack(len(name), len(data)) + name + data)
        return await super().store(subject, data, message_id=message_id, wait_s=wait_s, after=after)


class NoEngine:
    """There is none: no prompt is computed for a peer."""

    async def prefill(self, ids: tuple[int, ...], salt: str, budget_s: float) -> Prefilled | Refusal:
        """Refuse: the pages that a fault needs are written by `Member.write`."""
        del ids, salt, budget_s
        return Refusal("a bare member has no engine")

    def release(self, handle: int) -> None:
        """Nothing was handed out."""


@dataclass(slots=True)
class Plane:
    """The data plane of one transport."""

    reader: Backend
    access: PoolAccess
    server: SocketServer | None = None
    ucx: UcxPlane | None = None


def open_pool(settings: MemberSettings, index: ReuseIndex) -> PoolSide:
    """Make a pool that keeps room for a prompt of one page, so that a transfer may take all others."""
    chosen, cap = layout(settings.page_bytes), settings.pages - 1
    memory = PoolMemory.create(chosen, settings.pages, settings.epoch)
    memory.export()
    allocator = PageAllocator(settings.pages)
    lender = PoolLender(memory, allocator, index, name="pool0", rank=0, lent_cap_pages=cap)
    return PoolSide(chosen, memory, allocator, lender, chosen.block_tokens, 256, cap)


def open_plane(settings: MemberSettings, pool: PoolSide, wake: Callable[[], None]) -> Plane:
    """Start one transport over a pool."""
    rate = settings.rate_limit_bytes_s
    if settings.transport == "memory":
        reader = MemoryReader(wake=wake, rate_limit_bytes_s=rate)
        reader.start()
        reader.register(pool.memory)
        return Plane(reader, PoolAccess(ucx=None, memory=MemoryAccess(process=identity(), fd=pool.memory.fd)))
    if settings.transport == "socket":
        server = SocketServer(wake=wake)
        server.register(pool.memory)
        chosen = SocketReaderSettings(rate_limit_bytes_s=rate, wire_up_s=settings.wire_up_s)
        by_socket = SocketReader(wake=wake, settings=chosen)
        by_socket.start()
        by_socket.register(pool.memory)
        return Plane(by_socket, PoolAccess(ucx=None, memory=None, socket=server.start()), server=server)
    plane = UcxPlane(wake=wake, settings=UCX_SETTINGS[settings.transport])
    plane.start()
    access = PoolAccess(ucx=plane.register(pool.memory), memory=None)
    wishes = UcxReaderSettings(
        rate_limit_bytes_s=rate, cancel_wait_s=settings.cancel_wait_s, wire_up_s=settings.wire_up_s
    )
    return Plane(UcxReader(plane, wake=wake, settings=wishes), access, ucx=plane)
