"""The data plane of one member: by which transports it reads, and by which its pool can be reached.

`auto` takes all that work here, and the planner picks one for each order: what is missing on this host is said once,
at the start, and left out. A transport that was named is the only one, and its absence is an error.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from kvbus.config import WorkerSettings, ucx_library
from kvbus.dataplane.choosing import ChoosingReader, Lanes
from kvbus.dataplane.memory import MemoryReader
from kvbus.dataplane.planner import Planner, costs_of
from kvbus.dataplane.socket_lending import ServedLending
from kvbus.dataplane.socket_reader import SocketReader, SocketReaderSettings
from kvbus.dataplane.socket_server import SocketPlace, SocketServer
from kvbus.dataplane.ucp_context import DEFAULT_SETTINGS
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
    """The parts that move bytes, started; `transports` names how this member can read.

    `ucx_tls`: the transports that UCX may take here, in its own words; empty where there is no UCX.
    """

    reader: ChoosingReader
    transports: tuple[str, ...]
    access: PoolAccess
    lending: ServedLending
    plane: UcxPlane | None
    ucx_tls: str = ""


def open_data_plane(settings: WorkerSettings, pool: PoolSide, wake: Callable[[], None]) -> DataPlane:
    """Start the chosen transports over the pool; ConfigError or BackendError where one that was named cannot start.

    What has started by then ends again, and the pool is nobody's: a next try begins from nothing.
    """
    planner = Planner(identity(), costs_of(settings.transport_costs))
    with ExitStack() as undo:
        opened = _open(settings, pool, wake, planner, undo)
        undo.pop_all()
    pool.memory.export()  # from here on it stays mapped: engines, peers and grants know its place
    return opened


def _open(
    settings: WorkerSettings, pool: PoolSide, wake: Callable[[], None], planner: Planner, undo: ExitStack
) -> DataPlane:
    """Start what was chosen, UCX last: once it knows a pool, that stays mapped for as long as the process lives."""
    chosen, lanes = settings.backend, dict[str, Lanes]()
    server, place = _server(settings, pool, wake) if chosen in {"socket", "auto"} else (None, None)
    if server is not None:
        undo.callback(server.close)
    backends, others = list[Backend](), list[Backend]()  # both in the order of preference
    if chosen in {"memory", "auto"}:
        others.append(_memory_reader(settings, pool, wake))
        undo.callback(others[-1].release_hold)
    if server is not None:
        others.append(_socket_reader(settings, pool, wake))
        undo.callback(others[-1].release_hold)
    plane, ucx_access = _ucx(settings, pool, wake) if chosen in {"ucx", "auto"} else (None, None)
    if plane is not None:
        by_ucx = UcxReader(plane, wake=wake, settings=UcxReaderSettings(rate_limit_bytes_s=_rate(settings)))
        backends.append(by_ucx)
        lanes[by_ucx.name] = by_ucx.lanes
    by_ucxpy = None
    if chosen == "ucx-py":
        by_ucxpy, ucx_access = _ucxpy(settings, pool, wake)
        backends.append(by_ucxpy)
    backends += others
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
            socket_works=lambda: server is not None and server.works,
        ),
        lending=ServedLending(wake=wake, server=server),
        plane=plane,
        ucx_tls=ucx_settings(settings)["TLS"] if ucx_access is not None else "",
    )


def ucx_settings(settings: WorkerSettings) -> dict[str, str]:
    """Return what this worker asks of UCX itself; the environment's UCX variables cannot undo it."""
    return {"NET_DEVICES": settings.network_devices, "TLS": settings.ucx_tls or DEFAULT_SETTINGS["TLS"]}


def _ucx(
    settings: WorkerSettings, pool: PoolSide, wake: Callable[[], None]
) -> tuple[UcxPlane, UcxAccess] | tuple[None, None]:
    plane = UcxPlane(wake=wake, settings=ucx_settings(settings), library_path=ucx_library())
    try:
        plane.start()
        return plane, plane.register(pool.memory, pool.layout.rank)
    except (ConfigError, BackendError) as error:
        plane.close()
        if settings.backend != "auto":
            raise
        log.warning("UCX cannot be used here, pages go over memory and sockets: %s", error)
        return None, None


def _ucxpy(settings: WorkerSettings, pool: PoolSide, wake: Callable[[], None]) -> tuple[UcxPyReader, UcxAccess]:
    reader = UcxPyReader(wake=wake, settings=ucx_settings(settings), rate_limit_bytes_s=_rate(settings))
    reader.start()
    try:
        return reader, reader.register(pool.memory, pool.layout.rank)
    except BackendError:
        reader.release_hold()
        raise


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
