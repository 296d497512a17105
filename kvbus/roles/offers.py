"""What a grant offers one reader: those ways to the pool that it asked for, that exist, and that lead there."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from kvbus.dataplane.socket_server import SocketPlace
from kvbus.dataplane.socket_wire import SECRET_BYTES
from kvbus.events import LendRequested, ReaderKey
from kvbus.grants import MemoryAccess, SocketAccess, UcxAccess
from kvbus.ledger.lending import Key
from kvbus.processes import same_host, same_loopback

CHECKED_TRANSPORTS = frozenset({"ucx", "memory", "socket"})
"""All read by `dataplane.reading.plan`, into host memory, and compare generations after reading (P2)."""


@dataclass(frozen=True, slots=True)
class LenderName:
    """Who lends: what stands in each grant."""

    instance: str
    member: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PoolAccess:
    """The ways in which readers may reach the pool."""

    ucx: UcxAccess | None
    memory: MemoryAccess | None
    socket: SocketPlace | None = None
    ucx_is_local: bool = False
    """Whether UCX listens on loopback only: elsewhere its address would lead a reader to its own host."""
    ucx_works: Callable[[], bool] = lambda: True
    """Whether UCX's thread answers readers now: a plane that has failed is offered to nobody any more."""
    socket_works: Callable[[], bool] = lambda: True
    """The same of the page server's thread."""

    def names(self) -> tuple[str, ...]:
        """Name them, in the order of preference."""
        return tuple(name for name in ("ucx", "memory", "socket") if getattr(self, name) is not None)

    def offer(self, asked: LendRequested) -> "Offer":
        """Return what this reader is offered; a socket comes with a secret of this lease alone."""
        place = self.socket if "socket" in asked.transports and self.socket_works() else None
        memory = self.memory if "memory" in asked.transports else None
        ucx = self.ucx if "ucx" in asked.transports and self.ucx_works() else None
        if place is not None and _on_loopback(place) and not same_loopback(asked.process, asked.network):
            place = None  # it would lead a reader to whatever listens there on its own host
        if place is not None and not same_host(asked.process):
            memory = None  # the pool's descriptor means nothing there; left out, it keeps the lease closable
            ucx = None if self.ucx_is_local else ucx
        return Offer(
            ucx=ucx,
            memory=memory,
            socket=None if place is None else _socket_access(place),
        )


@dataclass(frozen=True, slots=True)
class Offer:
    """One lease's ways to the pool."""

    ucx: UcxAccess | None
    memory: MemoryAccess | None
    socket: SocketAccess | None

    @property
    def secret(self) -> bytes:
        """What the reader proves to know at the page server; empty where it is not served."""
        return b"" if self.socket is None else self.socket.secret

    @property
    def by_socket_only(self) -> bool:
        """Whether nothing but the page server leads to the pages, so that closing the lease there ends access."""
        return self.socket is not None and self.ucx is None and self.memory is None


def _socket_access(place: SocketPlace) -> SocketAccess:
    return SocketAccess(addresses=place.addresses, port=place.port, secret=secrets.token_bytes(SECRET_BYTES))


def _on_loopback(place: SocketPlace) -> bool:
    return all(ip_address(address).is_loopback for address in place.addresses)


def looks(asked: LendRequested) -> bool:
    """Return whether every transport that the reader may use is one whose readers look after reading."""
    return set(asked.transports) <= CHECKED_TRANSPORTS


def key_of(key: ReaderKey) -> Key:
    """Return a reader key as the lender's book keeps it."""
    return key.instance, key.member, key.epoch, key.transfer, key.attempt, key.rank
