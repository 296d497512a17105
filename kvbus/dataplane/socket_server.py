"""The source's end of the socket transport: serves lent pages to those who were lent them, and can stop doing so.

Unlike a one-sided read, every byte that leaves here is sent by this process. So the source checks each question against
what is lent right now, and knows when access has ended: once its thread has put a lease aside, no byte of those pages
is read for it again. That is evidence of the source's own (`endpoint_destroyed`). A lease is closed because somebody
asked for that, or because every connection on which it was opened has ended; never because time has passed.
"""

import logging
import os
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvbus.dataplane import socket_wire as wire
from kvbus.dataplane.reader import ATTEMPTS_MAX
from kvbus.dataplane.socket_pool import PoolBytes
from kvbus.dataplane.socket_serving import Connection, Lease, RefusalError
from kvbus.dataplane.socket_wire import Why
from kvbus.errors import BackendError, ConfigError
from kvbus.pool.memory import PoolMemory

CONNECTIONS_MAX = 256
"""One a reading worker, each one open file: a quarter of the usual soft limit of 1,024."""
LEASES_MAX = 4 * ATTEMPTS_MAX
"""As many as are lent at once."""
OPEN_S = 10.0
"""For the first lease of a connection: one round trip. What has opened none after that is no reader."""
IDLE_S = 120.0
"""Of a connection without any lease; readers close theirs much earlier."""
SWEEP_S = 1.0
"""How often silent connections are looked for; nothing else depends on it."""
KEEPALIVE_S = (10, 5, 3)
"""Idle time, interval, count: a host that is gone is noticed after 25 s, one that only stands still is not affected."""
BACKLOG = 64
WRITES_A_TURN = 2
"""Some megabytes at most; then other readers, and commands, come to their turn."""
JOIN_S = 5.0
"""The thread looks up after each batch of a megabyte; only a stopped machine meets this."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SocketPlace:
    """Where a server is reached: numeric addresses in the order of preference, and the port."""

    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True, slots=True)
class Served:
    """What is opened to a reader: the pages of one lease in their generations, under a secret of its own."""

    ticket: int
    rank: int
    secret: bytes
    pages: Sequence[int]
    counters: Sequence[int]


@dataclass(frozen=True, slots=True)
class SocketServerStatistics:
    """Counters of the server. `lost` leases were closed because their connections ended; `refused` counts by reason."""

    connections: int
    accepted: int
    leases: int
    questions: int
    length_bytes: int
    lost: int
    refused: Mapping[str, int]


class SocketServer:
    """Serves registered pools over TCP in one thread of its own; `wake` is raised when `ended` or `released` has news.

    `wake` is called from that thread: the caller makes that safe, and it must not raise. The other methods belong to
    one thread, the lender's.
    """

    def __init__(
        self, *, wake: Callable[[], None], address: str = "127.0.0.1", port: int = 0, advertise: Sequence[str] = ()
    ) -> None:
        self._wake = wake
        self._address = address
        self._asked_port = port
        self._advertise = tuple(advertise) or (address,)
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()  # at most two for each lease
        self._ended: list[int] = []
        self._released: list[int] = []
        self._known: set[int] = set()
        self._thread: threading.Thread | None = None
        self._stopping = False
        # From here on: the server thread's.
        self._pools: dict[int, tuple[PoolBytes, int]] = {}
        self._epoch = 0
        self._leases: dict[int, Lease] = {}
        self._connections: dict[int, Connection] = {}
        self._armed: set[int] = set()
        self._refused: Counter[str] = Counter()
        self._accepted = self._lost = self._questions = self._length_bytes = 0
        self._next_sweep = 0.0
        self.sweeps = 0
        """How often silent connections were looked for."""

    def __repr__(self) -> str:
        return f"<SocketServer connections={len(self._connections)} leases={len(self._leases)}>"

    # ------------------------------------------------------------------------------------------------ from the lender

    @property
    def works(self) -> bool:
        """Whether its thread serves: not before `start`, and not any more once it was closed or has failed."""
        return self._thread is not None and not self._stopping

    def start(self) -> SocketPlace:
        """Listen and start the thread; return where readers reach it. ConfigError where the address cannot be used."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        try:
            self._listener = socket.create_server((self._address, self._asked_port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"the page server cannot listen on {self._address} port {self._asked_port}: {error.strerror}; "
                "give another --socket-address or --socket-port"
            ) from error
        self._listener.settimeout(0.0)
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._epoll.register(self._event_fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="kvbus-socket-server", daemon=True)
        self._thread.start()
        return SocketPlace(self._advertise, int(self._listener.getsockname()[1]))

    def register(self, memory: PoolMemory, rank: int = 0) -> None:
        """Let leases of this rank's pool be opened. One pool a rank, all of one epoch; before the first lease."""
        if rank in self._pools:
            raise ValueError(f"rank {rank} has a pool already")
        self._pools[rank] = (PoolBytes(memory, writable=False), memory.epoch)
        self._epoch = memory.epoch

    def open(self, served: Served) -> None:
        """Serve a lease from now on; BackendError where that cannot be. Call it before the grant leaves."""
        if served.rank not in self._pools or len(self._known) >= LEASES_MAX:
            raise BackendError(f"rank {served.rank} has no pool here, or {LEASES_MAX} leases are open")
        if served.ticket in self._known:
            raise BackendError(f"T{served.ticket} is served already")
        pool, epoch = self._pools[served.rank]
        if not served.pages or not 0 <= min(served.pages) <= max(served.pages) < pool.page_count:
            raise BackendError(f"T{served.ticket} names no page, or one outside the pool of {pool.page_count}")
        if len(served.pages) != len(served.counters):
            raise BackendError(f"T{served.ticket} has {len(served.pages)} pages, {len(served.counters)} generations")
        lease = Lease(served.ticket, served.secret, pool, epoch)
        lease.cover(np.array(served.pages, dtype=np.int64), np.array(served.counters, dtype=np.uint64))
        self._known.add(served.ticket)
        if not self._post(lambda: self._leases.__setitem__(served.ticket, lease)):
            raise BackendError("the page server does not run")

    def close_lease(self, ticket: int) -> None:
        """Stop serving a lease, soon; `ended` names it once nothing will be read for it again. Harmless to repeat."""
        self._post(lambda: self._close_lease(ticket))

    def ended(self) -> Sequence[int]:
        """Return and forget the tickets of leases that are served no more: no byte of them is read from now on."""
        with self._lock:
            ended, self._ended = self._ended, []
        self._known.difference_update(ended)
        return ended

    def released(self) -> Sequence[int]:
        """Return and forget the tickets whose readers said that their access has ended; each has ended here, too."""
        with self._lock:
            released, self._released = self._released, []
        return released

    def statistics(self) -> SocketServerStatistics:
        """Return the counters as they stand."""
        connections = tuple(self._connections.values())
        return SocketServerStatistics(
            connections=len(connections),
            accepted=self._accepted,
            leases=len(self._leases),
            questions=self._questions + sum(one.questions for one in connections),
            length_bytes=self._length_bytes + sum(one.length_bytes for one in connections),
            lost=self._lost,
            refused=dict(self._refused),
        )

    def close(self, budget_s: float = JOIN_S) -> bool:
        """Close every connection and end the thread; False if it has not ended within the budget. Can be repeated."""
        if self._thread is None:
            return True
        self._post(self._stop)
        self._thread.join(budget_s)
        return not self._thread.is_alive()

    def _post(self, command: Callable[[], None]) -> bool:
        with self._lock:
            if self._stopping or self._thread is None:
                return False
            self._commands.append(command)
            os.eventfd_write(self._event_fd, 1)
        return True

    # ------------------------------------------------------------------------------------------ on the server thread

    def lease(self, ticket: int) -> Lease | None:
        """Return the lease that is lent under a ticket now."""
        self._run_commands()  # a lease that was opened before its grant left is known before its reader asks
        return self._leases.get(ticket)

    def let_go(self, lease: Lease) -> None:
        """Close a lease by its reader's word, and pass the word on."""
        if self._leases.get(lease.ticket) is lease:
            self._close_lease(lease.ticket, released=True)

    def note_refusal(self, why: Why, text: str) -> None:
        """Count a refusal; the first of its kind is logged, so that a peer's nonsense cannot fill the log."""
        name = why.name.lower()
        self._refused[name] += 1
        if self._refused[name] == 1:
            log.warning("the page server refused a reader (%s): %s; further ones are only counted", name, text)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception:
            log.exception("the page server's thread has failed: it serves no more, and what it served has ended")
            self._stop()
        self._run_commands()
        self._end()

    def _turn(self) -> None:
        events = self._epoll.poll(SWEEP_S)
        self._run_commands()
        now = time.monotonic()
        for fd, mask in events:
            if fd == self._event_fd:
                os.eventfd_read(fd)
            elif fd == self._listener.fileno():
                self._accept(now)
            elif fd in self._connections:
                self._serve(self._connections[fd], mask, now)
        if now >= self._next_sweep:
            self._sweep(now)

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True

    def _end(self) -> None:
        for connection in tuple(self._connections.values()):
            self._drop(connection)
        for ticket in tuple(self._leases):
            self._close_lease(ticket)
        self._epoll.close()
        self._listener.close()
        os.close(self._event_fd)

    def _close_lease(self, ticket: int, *, released: bool = False) -> None:
        lease = self._leases.pop(ticket, None)
        if lease is None:
            return
        lease.is_closed = True  # connections look at this before each send, on this very thread
        for connection in lease.connections:
            connection.leases.pop(ticket, None)
        with self._lock:
            self._ended.append(ticket)
            if released:
                self._released.append(ticket)
        self._wake()

    def _accept(self, now: float) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptors are left, or the peer has gone already
            self.note_refusal(Why.FULL, f"a connection could not be accepted: {error.strerror}")
            self._epoll.modify(self._listener, 0)  # until the next sweep
            return
        sock.settimeout(0.0)
        if len(self._connections) >= CONNECTIONS_MAX and not self._make_room():
            self.note_refusal(Why.FULL, f"{CONNECTIONS_MAX} connections are open")
            _send_last(sock, wire.refused(0, Why.FULL, f"{CONNECTIONS_MAX} connections are open", of_question=False))
            sock.close()
            return
        try:
            _tune(sock)
            connection = Connection(sock, self, epoch=self._epoch, now=now)
            self._epoll.register(sock, select.EPOLLIN)
        except Exception as error:  # noqa: BLE001 - its connection ends by it, and nothing else
            self.note_refusal(Why.FULL, f"a connection could not be served: {error!r}")
            sock.close()
            return
        self._accepted += 1
        self._connections[sock.fileno()] = connection
        self._serve(connection, 0, now)

    def _make_room(self) -> bool:
        """Close the connection that is quiet for the longest time, among those without a lease."""
        idle = [one for one in self._connections.values() if not one.leases]
        if not idle:
            return False
        self._drop(min(idle, key=lambda one: one.quiet_since))
        return True

    def _serve(self, connection: Connection, mask: int, now: float) -> None:
        """Let a connection read and write a little, so that all others come to their turn."""
        fd = connection.sock.fileno()
        try:
            if mask & ~select.EPOLLOUT and not connection.read(now):
                self._drop(connection)
                return
            for _ in range(WRITES_A_TURN):
                if not connection.write():
                    break
        except RefusalError as refusal:
            self.note_refusal(refusal.why, str(refusal))
            if not connection.is_answering:
                _send_last(connection.sock, wire.refused(0, refusal.why, str(refusal), of_question=False))
            self._drop(connection)
            return
        except OSError:
            self._drop(connection)
            return
        except Exception as error:  # such as no memory: its leases end by it, and no others (R21)
            log.warning("a reader's connection is given up", exc_info=error)
            self._drop(connection)
            return
        self._arm(fd, wanted=connection.has_output)

    def _arm(self, fd: int, *, wanted: bool) -> None:
        if wanted != (fd in self._armed):
            self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))
            self._armed ^= {fd}

    def _drop(self, connection: Connection) -> None:
        """End a connection, and every lease that was open on it alone."""
        fd = connection.sock.fileno()
        self._armed.discard(fd)
        del self._connections[fd]
        try:
            self._epoll.unregister(fd)
        finally:
            connection.sock.close()
        self._questions += connection.questions
        self._length_bytes += connection.length_bytes
        for lease in tuple(connection.leases.values()):
            lease.connections.discard(connection)
            if not lease.connections:
                self._lost += 1
                self._close_lease(lease.ticket)

    def _sweep(self, now: float) -> None:
        self.sweeps += 1
        self._next_sweep = now + SWEEP_S
        self._epoll.modify(self._listener, select.EPOLLIN)
        for connection in tuple(self._connections.values()):
            if connection.leases:
                if connection.host_is_silent():
                    self._drop(connection)
                continue
            if now - connection.since > OPEN_S and not connection.has_opened:
                self.note_refusal(Why.MALFORMED, f"a connection opened no lease within {OPEN_S:g} s")
                self._drop(connection)
            elif now - connection.quiet_since > IDLE_S:
                self._drop(connection)


def _tune(sock: socket.socket) -> None:
    idle, interval, count = KEEPALIVE_S
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)


def _send_last(sock: socket.socket, frame: bytes) -> None:
    """Say why, if the socket takes it at once; the connection ends anyway."""
    try:
        sock.send(frame)
    except OSError:
        return
