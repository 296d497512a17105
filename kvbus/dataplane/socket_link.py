"""One connection to one source, and the attempts that read over it. Everything here runs on the reader's thread.

Questions go out some way ahead of their answers. Bytes land straight in the pages where they belong, by `recvmsg`
calls that never wait; so between two calls nobody touches a page, and an attempt can end at any time: what the source
still sends for it goes to a place that nobody reads.
"""

import contextlib
import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbus.dataplane import socket_wire as wire
from kvbus.dataplane.reader import Pace
from kvbus.dataplane.socket_reading import Block, Reading
from kvbus.dataplane.socket_receiving import Inbound
from kvbus.dataplane.socket_wire import Header, State, Why
from kvbus.errors import PeerError
from kvbus.ledger.facts import Evidence, FailureClass

WINDOW_BYTES = 32 << 20
"""Asked for and not answered, of one source, two blocks at least: 15 ms at 2 GB/s, and more than a round trip of 10 ms
needs at 10 Gbit/s."""
CALLS_A_TURN_MAX = 4
"""Then other sources, cancels and questions come to their turn; a call copies for some milliseconds at most."""
OUT_BYTES_MAX = 1 << 20
"""Questions and releases that the source has not taken; beyond that a release is left to the bus."""
IDLE_S = 30.0
"""A connection without attempts is closed after that, long before the source would do it."""
KEEPALIVE_S = (10, 5, 3)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LinkCounters:
    """Counted over all links of a reader."""

    questions: int = 0
    length_bytes: int = 0
    failures: int = 0
    releases_sent: int = 0
    releases_lost: int = 0


@dataclass(frozen=True, slots=True)
class LinkTools:
    """What the links of one reader share."""

    epoll: select.epoll
    pace: Pace
    counters: LinkCounters
    wire_up_s: float
    on_socket: Callable[["Link", int, int], None]
    """(link, descriptor before, descriptor now), -1 for none."""
    on_end: Callable[["Link", Reading, Evidence], None]


class Link:
    """A connection to one source in one epoch; the reader's thread drives it by `handle` and `step`."""

    def __init__(self, peer: str, addresses: tuple[str, ...], port: int, *, epoch: int, tools: LinkTools) -> None:
        self.peer = peer
        self.closed = False
        self._epoch = epoch
        self._tools = tools
        self._port = port
        self._addresses = deque(addresses)
        self._sock: socket.socket | None = None
        self._challenge: bytes | None = None
        self._up_by = time.monotonic() + tools.wire_up_s
        self._why_not = "it offers no address"
        self._said = ""
        self._readings: deque[Reading] = deque()
        self._opened: set[int] = set()
        self._inbound = Inbound(self)
        self._number = 0
        self._out = bytearray()
        self._armed = False
        self._idle_since = time.monotonic()

    @property
    def idle(self) -> bool:
        """Whether no attempt needs it."""
        return not self._readings

    @property
    def is_cut(self) -> bool:
        """Whether it was closed and has no socket any more: no byte of its source can land."""
        return self.closed and self._sock is None

    def add(self, reading: Reading) -> None:
        """Let an attempt read over this link."""
        self._readings.append(reading)
        if self._sock is None:
            self._connect()

    def stop(self, reading: Reading, failure: FailureClass, text: str) -> None:
        """End one attempt at once: no call that lets bytes land is under way, and what comes for it lands nowhere."""
        reading.stop(failure, text)
        self._end(reading, Evidence.COMPLETED if reading.was_asked else Evidence.NEVER_SUBMITTED)

    def handle(self, mask: int) -> None:
        """React to what the kernel says of the socket."""
        try:
            if self._challenge is None and mask & (select.EPOLLOUT | select.EPOLLERR) and not self._has_connected():
                return
            if mask & select.EPOLLOUT:
                self._flush()
            if mask & (select.EPOLLIN | select.EPOLLERR | select.EPOLLHUP):
                self._receive()
        except OSError as error:
            self._broke(error.strerror or str(error))
        except PeerError as error:
            self.close(FailureClass.GRANT_REFUSED, f"{self.peer} does not keep the protocol: {error}")

    def step(self, now: float) -> float | None:
        """Ask for what may be asked for; return how long the thread may sleep, None without limit."""
        if self.closed:
            return None
        if self._challenge is None:
            if now > self._up_by:
                self.close(FailureClass.PEER_LOST, "the source did not answer the connection in time")
            return 1.0
        if not self._readings:
            if now - self._idle_since > IDLE_S and not self._inbound.asked:
                self.close(FailureClass.NONE, "")
            return None
        try:
            wait_s = self._ask(now)
            self._flush()
        except OSError as error:
            self._broke(error.strerror or str(error))
            return None
        return wait_s

    def close(self, failure: FailureClass, text: str) -> None:
        """Shut the connection by force: no byte can land from here on, and every attempt on it ends. Repeatable."""
        if self.closed and not self._readings:
            return
        self.closed = True
        self._drop_socket()
        waiting = {one.block.reading for one in self._inbound.asked}
        for reading in tuple(self._readings):
            reading.stop(failure, text)
            forced = Evidence.ENDPOINT_DESTROYED if reading in waiting else Evidence.COMPLETED
            self._end(reading, forced if reading.was_asked else Evidence.NEVER_SUBMITTED)
        self._inbound.reset()

    def break_by(self, error: Exception) -> None:
        """Close it after a fault of this process, such as no memory; what reads over other links goes on."""
        log.warning("the connection to %s is given up", self.peer, exc_info=error)
        self._tools.counters.failures += 1
        self.close(FailureClass.TRANSPORT, f"the connection to {self.peer} was given up: {error!r}")

    # ----------------------------------------------------------------------------------------------------- connecting

    def _connect(self) -> None:
        """Try the next address; without one left the link is closed."""
        while self._addresses:
            address = self._addresses.popleft()
            try:
                self._sock = self._socket_to(address)
            except OSError as error:  # nobody is there, or no descriptors or no memory are left here
                self._why_not = f"{address} port {self._port}: {error.strerror}"
                continue
            self._armed = True
            self._tools.on_socket(self, -1, self._sock.fileno())
            self._inbound.reset()
            return
        self.close(FailureClass.PEER_LOST, f"no connection to {self.peer}: {self._why_not}")

    def _socket_to(self, address: str) -> socket.socket:
        """Return a socket that connects to an address, and of which the thread hears; OSError where that cannot be."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(BlockingIOError):
                sock.connect((address, self._port))
            self._tools.epoll.register(sock, select.EPOLLIN | select.EPOLLOUT)
        except BaseException:
            sock.close()
            raise
        return sock

    def _has_connected(self) -> bool:
        """Look what came of the connection; False if another address is tried instead."""
        sock = self._socket()
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._why_not = f"port {self._port}: {os.strerror(error)}"
            self._drop_socket()
            self._connect()
            return False
        idle, interval, count = KEEPALIVE_S
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
        return True

    def _socket(self) -> socket.socket:
        if self._sock is None:
            raise PeerError("the connection is closed")
        return self._sock

    def _drop_socket(self) -> None:
        sock, self._sock = self._sock, None
        if sock is None:
            return
        self._tools.on_socket(self, sock.fileno(), -1)
        try:
            with contextlib.suppress(OSError):
                self._tools.epoll.unregister(sock)
                sock.shutdown(socket.SHUT_RDWR)
        finally:
            sock.close()

    def _broke(self, reason: str) -> None:
        self._tools.counters.failures += 1
        said = f": {self._said}" if self._said else ""
        self.close(FailureClass.PEER_LOST, f"the connection to the source broke ({reason}){said}")

    # -------------------------------------------------------------------------------------------------------- asking

    def _ask(self, now: float) -> float | None:
        """Ask round robin while the window and the pace allow; return how long the pace makes the next one wait."""
        readings, pace = self._readings, self._tools.pace
        turns = 0
        inbound = self._inbound
        while turns < len(readings) and len(inbound.asked) < wire.REQUESTS_MAX:
            if inbound.asked and inbound.bytes_asked >= WINDOW_BYTES:
                return None
            reading = readings[0]
            readings.rotate(-1)
            turns += 1
            if not reading.has_more:
                continue
            if wait_s := pace.wait_s(now):
                readings.rotate(1)
                return wait_s
            block = reading.next_block()
            self._ask_for(block)
            pace.spend(block.length_bytes, now)
            turns = 0
        return None

    def _ask_for(self, block: Block) -> None:
        reading = block.reading
        offer = reading.progress.plan.grant.socket
        if reading.ticket not in self._opened and offer is not None and self._challenge is not None:
            self._out += wire.opening(offer.secret, self._challenge, reading.ticket)
            self._opened.add(reading.ticket)
        self._number += 1
        self._out += block.question(self._number)
        self._inbound.expect(self._number, block)
        self._tools.counters.questions += 1

    def release(self, ticket: int) -> None:
        """Tell the source that access under a lease has ended; a word that is lost comes again over the bus."""
        if ticket not in self._opened:
            return
        self._opened.discard(ticket)
        if self.closed or len(self._out) > OUT_BYTES_MAX:
            self._tools.counters.releases_lost += 1
            return
        self._out += wire.release(ticket)
        self._tools.counters.releases_sent += 1
        try:
            self._flush()
        except OSError as error:
            self._broke(error.strerror or str(error))

    def _flush(self) -> None:
        sock = self._socket()
        if self._out and self._challenge is not None:
            with contextlib.suppress(BlockingIOError):
                sent = sock.send(self._out)
                del self._out[:sent]
        wanted = bool(self._out) and self._challenge is not None
        if wanted != self._armed:
            self._tools.epoll.modify(sock, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))
            self._armed = wanted

    # ----------------------------------------------------------------------------------------------------- receiving

    def _receive(self) -> None:
        sock = self._socket()
        for _ in range(CALLS_A_TURN_MAX):
            received = self._inbound.receive(sock)
            if not received:
                return
            self._tools.counters.length_bytes += received
            if self.closed or self._inbound.is_within:
                return

    def took_hello(self, header: Header, body: bytes) -> None:
        """Note the source's challenge, if it is the run of the source that the grants are of."""
        challenge = wire.challenge_of(body, header.status)
        if self._challenge is not None or header.number != self._epoch:
            raise PeerError("another run of the source answers at its address", epoch=header.number)
        self._challenge = challenge

    def took_refusal(self, header: Header, text: str, block: Block | None) -> None:
        """End the attempt whose question was refused; what is said of the connection is kept for its end."""
        if block is None:
            self._said = text
            return
        reading = block.reading
        lost = header.status == Why.CLOSED or reading.was_served
        reading.stop(FailureClass.PEER_LOST if lost else FailureClass.GRANT_REFUSED, f"the source refused: {text}")
        self._end_if_over(reading)

    def took_block(self, block: Block, kept: NDArray[np.bool_] | None, tail: memoryview) -> None:
        """Count what the records behind a block's bytes prove."""
        reading = block.reading
        if reading.progress.stop is None:
            if wire.ticket_of(tail) == State.WHOLE:
                reading.was_served = True
                block.verify(kept, tail[wire.STATE_BYTES :])
            else:
                reading.stop(FailureClass.PEER_LOST, "the source closed the lease")
        self._end_if_over(reading)

    # -------------------------------------------------------------------------------------------------------- ending

    def _end_if_over(self, reading: Reading) -> None:
        if reading.ended and reading in self._readings:
            self._end(reading, Evidence.COMPLETED)

    def _end(self, reading: Reading, evidence: Evidence) -> None:
        if not self.closed:
            self._inbound.divert(reading)  # first: where it fails, nothing has been said of this attempt
        self._readings.remove(reading)
        self._idle_since = time.monotonic()
        self._tools.on_end(self, reading, evidence)
