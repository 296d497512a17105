"""The data plane of one member: by which transports it reads, and by which its pool can be reached.

`auto` takes all that work here, and the planner picks one for each order: what is missing on this host is said once,
at the start, and left out. A transport that was named is the only one, and its absence is an error.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvbus.config import WorkerSettings, ucx_library
from kvbus.dataplane.choosing import ChoosingReader, Lanes
from kvbus.dataplane.memory import MemoryReader
from kvbus.dataplane.planner import Planner, costs_of
from kvbus.dataplane.socket_lending import ServedLending
from kvbus.dataplane.socket_reader import SocketReader, SocketReaderSettings
from kvbus.dataplane.socket_server import SocketPlace, SocketServer
from kvbus.dataplane.ucx import UcxReader, UcxReaderSettings
from kvbus.dataplane.ucx_plane import UcxPlane
from kvbus.dataplane.ucxpy import UcxPyReader
from kvbus.errors import BackendError, ConfigError
from kvbus.grants import MemoryAccess, UcxAccess
from kvbus.ledger.types import Backend
from kvbus.processes import identity
from kvbus.roles.offers import PoolAccess
from kvbus.roles.poolside import PoolSide

LOOPBACK = "lo"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DataPlane:
    """The parts that move bytes, started; `transports` names how this member can read."""

    reader: ChoosingReader
    transports: tuple[str, ...]
    access: PoolAccess
    lending: ServedLending
    plane: UcxPlane | None


def open_data_plane(settings: WorkerSettings, pool: PoolSide, wake: Callable[[], None]) -> DataPlane:
    """Start the chosen transports over the pool; ConfigError or BackendError where one that was named cannot start."""
    planner = Planner(identity(), costs_of(settings.transport_costs))
    pool.memory.export()  # from here on it stays mapped: engines, peers and grants know its place
    chosen, backends, lanes = settings.backend, list[Backend](), dict[str, Lanes]()
    plane, ucx_access = _ucx(settings, pool, wake) if chosen in {"ucx", "auto"} else (None, None)
    if plane is not None:
        by_ucx = UcxReader(plane, wake=wake, settings=UcxReaderSettings(rate_limit_bytes_s=_rate(settings)))
        backends.append(by_ucx)
        lanes[by_ucx.name] = by_ucx.lanes
    by_ucxpy = None
    if chosen == "ucx-py":
        by_ucxpy, ucx_access = _ucxpy(settings, pool, wake)
        backends.append(by_ucxpy)
    if chosen in {"memory", "auto"}:
        backends.append(_memory_reader(settings, pool, wake))
    server, place = _server(settings, pool, wake) if chosen in {"socket", "auto"} else (None, None)
    if server is not None:
        backends.append(_socket_reader(settings, pool, wake))
    # Whoever chose the socket alone wants its pages reached by nothing else.
    memory = None if chosen == "socket" else MemoryAccess(process=identity(), fd=pool.memory.fd)
    return DataPlane(
        reader=ChoosingReader(chosen, backends, planner=planner, lanes=lanes),
        transports=tuple(backend.name for backend in backends),
        access=PoolAccess(
            ucx=ucx_access,
            memory=memory,
            socket=place,
            ucx_is_local=settings.network_devices == LOOPBACK,
            ucx_works=lambda: not (plane.failure if plane else by_ucxpy.failure if by_ucxpy else ""),
        ),
        lending=ServedLending(wake=wake, server=server),
        plane=plane,
    )


def _ucx(
    settings: WorkerSettings, pool: PoolSide, wake: Callable[[], None]
) -> tuple[UcxPlane, UcxAccess] | tuple[None, None]:
    devices = {"NET_DEVICES": settings.network_devices}
    plane = UcxPlane(wake=wake, settings=devices, library_path=ucx_library())
    try:
        plane.start()
        return plane, plane.register(pool.memory, pool.layout.rank)
    except (ConfigError, BackendError) as error:
        if settings.backend != "auto":
            raise
        log.warning("UCX cannot be used here, pages go over memory and sockets: %s", error)
        plane.close()
        return None, None


def _ucxpy(settings: WorkerSettings, pool: PoolSide, wake: Callable[[], None]) -> tuple[UcxPyReader, UcxAccess]:
    devices = {"NET_DEVICES": settings.network_devices}
    reader = UcxPyReader(wake=wake, settings=devices, rate_limit_bytes_s=_rate(settings))
    reader.start()
    return reader, reader.register(pool.memory, pool.layout.rank)


def _memory_reader(settings: WorkerSettings, pool: PoolSide, wake: Callable[[], None]) -> MemoryReader:
    reader = MemoryReader(wake=wake, rate_limit_bytes_s=_rate(settings))
    reader.register(pool.memory, pool.layout.rank)
    reader.start()
    return reader


def _socket_reader(settings: WorkerSettings, pool: PoolSide, wake: Callable[[], None]) -> SocketReader:
    reader = SocketReader(wake=wake, settings=SocketReaderSettings(rate_limit_bytes_s=_rate(settings)))
    reader.register(pool.memory, pool.layout.rank)
    reader.start()
    return reader


def _server(settings: WorkerSettings, pool: PoolSide, wake: Callable[[], None]) -> tuple[SocketServer, SocketPlace]:
    server = SocketServer(
        wake=wake,
        address=settings.socket_address,
        port=settings.socket_port,
        advertise=settings.socket_advertise,
    )
    server.register(pool.memory, pool.layout.rank)
    return server, server.start()


def _rate(settings: WorkerSettings) -> float | None:
    return settings.rate_limit_bytes_s or None
