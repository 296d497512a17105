"""One connection to one peer, and the attempts that read over it. Everything here runs on the UCX thread.

A link opens with a probe: one small get whose end proves that the peer answers. Only then do attempts post, round
robin, within a window; over tcp alone through strands (ucx_strands.py). A link that fails, or is broken on purpose, is
closed by force, and its attempts end when every request is terminal, never earlier: that is the evidence. A fault in
here, of whatever kind, breaks its link.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvbus.dataplane import ucp
from kvbus.dataplane.notices import NOTICE_AM_ID, Notice
from kvbus.dataplane.reader import Pace
from kvbus.dataplane.ucx_reading import Get, Reading, Scratch
from kvbus.dataplane.ucx_strands import STRANDS_MAX, Strands, Turns
from kvbus.errors import BackendError
from kvbus.ledger.facts import Evidence, FailureClass

GETS_IN_FLIGHT_MAX = 256
"""Of one peer, of up to eight pieces. UCX works them off in turn; more in line gains nothing and delays a cancel."""
BYTES_IN_FLIGHT_MAX = 32 << 20
"""Of one peer: 7 ms at 5 GB/s, so that a cancel seldom waits longer; four segments, so that reading never pauses."""
POSTS_A_STEP_MAX = 16
"""At 16 µs for eight small pieces, other peers and progress get their turn after a quarter of a millisecond."""
NOTICES_UNDER_WAY_MAX = 1024
"""Beyond that the peer does not take messages; the bus repeats each notice anyway."""

log = logging.getLogger(__name__)

POST_ERRORS = (BackendError, ValueError, TypeError)
"""What the binding raises before a call reaches UCX; a peer's grant may lead there, and only its attempt ends by it."""


@dataclass(slots=True)
class LinkCounters:
    """Counted over all links of a reader."""

    gets: int = 0
    length_bytes: int = 0
    failures: int = 0
    notices_sent: int = 0
    notices_lost: int = 0


class Link:
    """An endpoint to one peer in one epoch, and the attempts on it; `on_end` hears of each end, once.

    `connect` opens one more endpoint to there.
    """

    def __init__(
        self,
        peer: str,
        endpoint: ucp.Endpoint,
        *,
        scratch: Scratch,
        pace: Pace,
        counters: LinkCounters,
        wire_up_by: float,
        connect: Callable[[], ucp.Endpoint],
        on_end: Callable[["Link", Reading, Evidence], None],
    ) -> None:
        self.peer = peer
        self.scratch = scratch
        self.lanes: tuple[str, ...] = ()
        self.closed = False
        """Whether the endpoint is gone and every request has ended."""
        self._endpoint = endpoint
        self._pace = pace
        self._counters = counters
        self._wire_up_by = wire_up_by
        self._connect = connect
        self._on_end = on_end
        self._is_broken = False
        self._is_up = False
        self._strands: Strands | None = None
        self._closing: tuple[ucp.Closing, ...] = ()
        self._keys: dict[bytes, ucp.RemoteKey] = {}
        self._readings: deque[Reading] = deque()
        self._in_flight: deque[tuple[ucp.Request | Turns, Get]] = deque()
        self._bytes_in_flight = 0
        self._aborted: set[Reading] = set()
        self._notices: deque[ucp.Request] = deque()

    @property
    def closing(self) -> bool:
        """Whether no attempt can be added any more."""
        return bool(self._closing) or self._has_failed()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, so that closing it costs nobody anything."""
        return not (self._readings or self._in_flight or self._notices or self._closing)

    def add(self, reading: Reading, packed_key: bytes) -> None:
        """Let an attempt read over this link; the first one's probe goes out at once."""
        self._readings.append(reading)
        try:
            if packed_key not in self._keys:
                self._keys[packed_key] = self._endpoint.unpack_rkey(packed_key)
            reading.key, reading.packed_key = self._keys[packed_key], packed_key
            if not self._is_up and not self._in_flight:
                self._post(reading.probe())
        except POST_ERRORS as error:
            reading.stop(FailureClass.TRANSPORT, str(error))

    def step(self, now: float) -> float | None:
        """Note what has ended and post what may be posted; return as `Task.step` does."""
        if self._closing:
            self._finish_close()
            return 0
        self._collect()
        if self._has_failed():
            self.close(FailureClass.PEER_LOST, "the connection to the source broke")
            return 0
        while self._notices and self._notices[0].status() != ucp.IN_PROGRESS:
            self._notices.popleft()
        wait_s = self._post_ready(now) if self._is_up else None
        for reading in [reading for reading in self._readings if reading.ended]:
            self._end(reading, Evidence.COMPLETED)
        self._close_if_overdue(now)
        if self._in_flight or self._notices or self._closing:
            return 0
        return wait_s

    def close(self, failure: FailureClass, text: str) -> None:
        """End every access by force; attempts end once every request is terminal."""
        if self._closing:
            return
        if self._has_failed():
            self._counters.failures += 1
        self._aborted = {get.reading for request, get in self._in_flight if request.status() == ucp.IN_PROGRESS}
        self._closing = tuple(endpoint.close(force=True) for endpoint in self._endpoints())
        for reading in self._readings:
            reading.stop(failure, text)

    def break_by(self, error: Exception) -> None:
        """Close by force after something raised that nobody expected; the second time it is raised again.

        Then the close itself does not work, and this thread cannot say when the access of its attempts has ended.
        """
        if self._is_broken:
            raise error
        self._is_broken = True
        log.error("the connection to %s is closed, a fault of ours broke it: %r", self.peer, error, exc_info=error)
        self._counters.failures += 1
        self.close(FailureClass.TRANSPORT, f"a fault of ours broke the connection to {self.peer}: {error!r}")

    def send_notice(self, notice: Notice) -> None:
        """Tell the source that an attempt's access has ended; a lost notice is repeated over the bus."""
        if self._closing or len(self._notices) >= NOTICES_UNDER_WAY_MAX:
            self._counters.notices_lost += 1
            return
        try:
            self._notices.append(self._endpoint.send_am(NOTICE_AM_ID, b"", notice.encode()))
        except BackendError:
            self._counters.notices_lost += 1
            return
        self._counters.notices_sent += 1

    def _post_ready(self, now: float) -> float | None:
        """Post round robin while the window and the pace allow; return how long the pace makes the next one wait."""
        readings, limited = self._readings, self._pace.is_limited
        posts = turns = 0
        while posts < POSTS_A_STEP_MAX and turns < len(readings):
            if self._is_full():
                return 0
            reading = readings[0]
            if not reading.ready and not reading.refill():
                readings.rotate(-1)
                turns += 1
                continue
            if limited and (wait_s := self._pace.wait_s(now)):
                return wait_s
            get = reading.ready.popleft()
            try:
                self._post(get)
            except BackendError as error:
                reading.stop(FailureClass.PEER_LOST, f"the connection to the source broke: {error}")
            if limited:
                self._pace.spend(get.length_bytes, now)
            readings.rotate(-1)
            posts, turns = posts + 1, 0
        return 0 if posts else None

    def _is_full(self) -> bool:
        gets_max = STRANDS_MAX if self._strands else GETS_IN_FLIGHT_MAX
        return len(self._in_flight) >= gets_max or self._bytes_in_flight >= BYTES_IN_FLIGHT_MAX

    def _post(self, get: Get) -> None:
        reading, _, pieces, length_bytes, handle = get
        if reading.key is None:
            raise BackendError("the attempt has no key of the peer's memory")
        if self._strands:
            self._in_flight.append((self._strands.read(pieces, reading.packed_key, handle), get))
        else:
            self._in_flight.append((self._endpoint.get_all(pieces, reading.key, handle), get))
        reading.in_flight += 1
        self._bytes_in_flight += length_bytes
        self._counters.gets += len(pieces)

    def _collect(self) -> None:
        in_flight, freed = self._in_flight, 0
        while in_flight:
            request, get = in_flight[0]
            status = request.status()
            if status == ucp.IN_PROGRESS:
                break
            in_flight.popleft()
            freed += get.length_bytes
            if not self._is_up and status == ucp.OK:
                self._come_up()
            get.reading.get_ended(get, is_whole=status == ucp.OK)
        self._bytes_in_flight -= freed
        self._counters.length_bytes += freed
        for request, _ in in_flight if self._strands else ():
            request.status()  # posts what comes next

    def _come_up(self) -> None:
        self._is_up, self.lanes = True, tuple(self._endpoint.lanes())
        if all(lane.startswith("tcp/") for lane in self.lanes):
            self._strands = Strands(self._endpoint, self._connect)
        log.info("reads from %s go over %s", self.peer, ", ".join(self.lanes))

    def _endpoints(self) -> tuple[ucp.Endpoint, ...]:
        return (self._endpoint, *(self._strands.others if self._strands else ()))

    def _has_failed(self) -> bool:
        return self._endpoint.failed or (self._strands is not None and self._strands.failed)

    def _close_if_overdue(self, now: float) -> None:
        """Break a link that does not move: the forced close, not the time, is what ends the access."""
        if not self._is_up and self._in_flight and now > self._wire_up_by:
            self.close(FailureClass.PEER_LOST, "the source did not answer the connection in time")
        elif any(reading.cancel_by is not None and now > reading.cancel_by for reading in self._readings):
            # The others on this link would not move either: they end with it rather than wait for the same peer.
            self.close(FailureClass.PEER_LOST, "the connection was closed: a cancelled read on it did not end in time")

    def _finish_close(self) -> None:
        if any(closing.status() == ucp.IN_PROGRESS for closing in self._closing):
            return
        if any(endpoint.unfinished() for endpoint in self._endpoints()):
            return
        self._in_flight.clear()
        self.closed = True
        for reading in tuple(self._readings):
            reading.in_flight = 0
            forced = reading in self._aborted
            self._end(reading, Evidence.ENDPOINT_DESTROYED if forced else Evidence.COMPLETED)

    def _end(self, reading: Reading, evidence: Evidence) -> None:
        self._readings.remove(reading)
        try:
            self.scratch.forget(reading)
        finally:  # whatever else goes wrong, its evidence stands, and nobody would tell of it later
            self._on_end(self, reading, evidence)
