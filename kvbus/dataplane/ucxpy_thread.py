"""The thread that owns ucx-py: connections, the gets of each attempt, and what is known of their ends.

Everything that touches UCX happens here. A get has ended once it has called back, or has returned None; nothing else
ends one, and in particular nothing that this thread could do.
"""

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvbus.dataplane.reader import PEERS_MAX, Outbox, Pace, Pair, Progress
from kvbus.dataplane.reading import Run, Segment, limits_for
from kvbus.dataplane.ucxpy_api import Api, Bytes, Endpoint, Memory, Remote, features
from kvbus.errors import BackendError
from kvbus.grants import UcxAccess
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Change, Failed
from kvbus.pool.memory import PoolMemory

GETS_UNDER_WAY_MAX = 256
"""Of one attempt; UCX works them off one after another, and a cancel waits for them all."""
BYTES_UNDER_WAY_MAX = 32 << 20
"""Of one attempt, as with our own binding: a cancel waits for these."""
CALL_S = 10.0
"""For opening UCX, and for registering a pool: up to a second on a starved host."""
IDLE_S = 1.0
"""Nothing depends on it: should a wake be lost, the thread looks again this soon."""
LOOK_S = 0.001
"""Between two looks while gets are under way: reads over shared memory raise no event."""
CLOSE_S = 2.0
"""For the flushes before the end: a peer that answers takes milliseconds; to the others nothing is closed."""

LEFT_OPEN: list[object] = []
"""What could not be closed: ucx-py closes whatever is forgotten, and would wait in there for a peer. One entry a reader
that ended so."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Link:
    """One connection; `keys` by their packed form. `is_stuck`: gets on it did not end, so that nothing is added."""

    peer: str
    endpoint: Endpoint
    keys: dict[bytes, object] = field(default_factory=dict)
    is_stuck: bool = False


@dataclass(slots=True, eq=False)
class _Get:
    attempt: "Attempt"
    length_bytes: int
    has_ended: bool = False


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt: its segments one after another, of each the payload first, then the generation records (P2)."""

    progress: Progress
    link: Link
    remote: Remote
    segments: Iterator[Segment]
    pool: Bytes
    scratch: Bytes = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    """Where one segment's generation records land; kept for as long as a get may write there."""
    segment: Segment | None = None
    is_after: bool = False
    ready: deque[tuple[int, Bytes]] = field(default_factory=deque)
    gets: int = 0
    has_asked: bool = False
    bytes_under_way: int = 0
    stuck_at: float | None = None
    is_told: bool = False

    def go_on(self) -> bool:
        """Line up what comes next, once nothing is under way or in line; False where that is nothing."""
        if self.segment is not None and not self.is_after:
            self.is_after = True
            self.scratch = np.empty(sum(span.length_bytes for span in self.segment.spans), dtype=np.uint8)
            self._line_up(self.segment.spans, self.scratch)
            return True
        if self.segment is not None:
            self.progress.verified(self.segment, self.segment.unchanged_rows(self.scratch.data))
        self.segment, self.is_after = next(self.segments, None), False
        if self.segment is None:
            return False
        self._line_up(self.segment.runs, self.pool)
        return True

    def _line_up(self, runs: Iterable[Run], local: Bytes) -> None:
        self.ready.extend((run.source, local[run.local : run.local + run.length_bytes]) for run in runs)


class UcxPyThread:
    """One UCX of ucx-py's making and the thread that drives it; `post` and `call` are for other threads."""

    def __init__(
        self,
        api: Api,
        outbox: Outbox,
        *,
        config: Mapping[str, str],
        rate_limit_bytes_s: float | None,
        cancel_wait_s: float,
        wake: Callable[[], None],
    ) -> None:
        self.failure = ""
        self.gets = self.length_bytes = 0
        self.links: dict[tuple[str, int, bytes], Link] = {}
        self.attempts: dict[Pair, Attempt] = {}
        self._api, self._outbox, self._config, self._wake = api, outbox, dict(config), wake
        self._pace, self._limits = Pace(rate_limit_bytes_s), limits_for(rate_limit_bytes_s)
        self._cancel_wait_s = cancel_wait_s
        self._registered: list[Memory] = []
        self._commands: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._lock = threading.Lock()
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._event_fd, select.POLLIN)
        self._accepting, self._stopping, self._is_open = True, False, False
        self._thread = threading.Thread(target=self._run, name="kvbus-ucx-py", daemon=True)
        self._thread.start()

    # --------------------------------------------------------------------------------------------- from any thread

    def post(self, command: Callable[[], None], drop: Callable[[], None] = lambda: None) -> bool:
        """Run a command on the thread, or `drop` in its stead where it ends first; False where it has ended."""
        with self._lock:
            if not self._accepting:
                return False
            self._commands.append((command, drop))
            os.eventfd_write(self._event_fd, 1)
        return True

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the thread; raises what it raised, BackendError where no answer comes."""
        ended, raised = threading.Event(), list[Exception]()

        def run() -> None:
            try:
                function()
            except Exception as error:  # noqa: BLE001 - the caller's function: what it raises is the caller's
                raised.append(error)
            ended.set()

        def drop() -> None:
            raised.append(BackendError(self.failure or "the ucx-py thread has ended"))
            ended.set()

        if not self.post(run, drop) or not ended.wait(CALL_S):
            raise BackendError(self.failure or f"the ucx-py thread does not answer within {CALL_S:g} s")
        if raised:
            raise raised[0]

    def close(self) -> bool:
        """End the thread, and close what closes; False if it has not ended within its bounds."""
        self.post(self._stop)
        self._thread.join(CLOSE_S + CALL_S)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------------------------------------ on the thread

    def open(self) -> None:
        """Open UCX; whatever ucx-py raises."""
        self._context = self._api.UCXContext(self._config, feature_flags=tuple(features(self._api)))
        self._worker = self._api.UCXWorker(self._context)
        self._poll.register(self._worker.init_blocking_progress_mode(), select.POLLIN)
        self._is_open = True

    def register(self, memory: PoolMemory) -> UcxAccess:
        """Let UCX use a pool, and return what a peer needs to read it."""
        handle = self._context.map(memory.whole)
        self._registered.append(handle)
        return UcxAccess(address=bytes(self._worker.get_address()), rkey=bytes(handle.pack_rkey()))

    def start(self, progress: Progress, memory: PoolMemory) -> None:
        """Begin an attempt; one that gets no connection was never submitted."""
        try:
            link, remote = self._linked(progress)
            attempt = Attempt(progress, link, remote, progress.plan.segments(self._limits), memory.whole)
        except Exception as error:  # noqa: BLE001 - foreign code, and nothing has been asked of the peer's memory
            self.never(progress, FailureClass.PEER_LOST, f"no connection to {progress.order.peer}: {error}")
            return
        self.attempts[progress.pair] = attempt

    def never(self, progress: Progress, failure: FailureClass, text: str) -> None:
        """Tell of an attempt of which nothing escaped."""
        progress.fail(failure, text)
        self._outbox.report(progress.change(Evidence.NEVER_SUBMITTED))

    def dropped(self, progress: Progress) -> None:
        """Tell of an attempt before whose turn the thread ended."""
        self.never(progress, FailureClass.TRANSPORT, self.failure or "the ucx-py thread has ended")

    def stop(self, failure: FailureClass, text: str, *, pair: Pair | None = None, peer: str | None = None) -> None:
        """Post nothing more for the attempts that are meant: all, without a name."""
        for attempt in self.attempts.values():
            if pair in {None, attempt.progress.pair} and peer in {None, attempt.link.peer}:
                attempt.progress.fail(failure, text)

    def _linked(self, progress: Progress) -> tuple[Link, Remote]:
        grant, peer, api = progress.plan.grant, progress.order.peer, self._api
        if grant.ucx is None:
            raise BackendError("the grant offers no ucx access")
        key = (peer, grant.lender_epoch, grant.ucx.address)
        link = self.links.get(key)
        if link is not None and link.is_stuck:
            raise BackendError("reads over its connection did not end when they were asked to; start this worker again")
        if link is None or not link.endpoint.is_alive():
            if len(self.links) >= PEERS_MAX:
                raise BackendError(f"{PEERS_MAX} connections are open, and ucx-py closes none; start this worker again")
            address = api.UCXAddress.from_buffer(grant.ucx.address)
            endpoint = api.UCXEndpoint.create_from_worker_address(self._worker, address, endpoint_error_handling=True)
            link = self.links[key] = Link(peer, endpoint)
        packed = grant.ucx.rkey
        if packed not in link.keys:
            link.keys[packed] = link.endpoint.unpack_rkey(api.PackedRemoteKey.from_buffer(packed))
        return link, api.RemoteMemory(link.keys[packed], grant.pool.base, grant.pool.length_bytes)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._round()
        except BaseException as error:  # nobody stands above this thread: unsaid, it would end silently
            self.failure = f"the ucx-py thread has failed: {error!r}"[:500]
            log.critical("%s; start this worker again", self.failure, exc_info=error)
        with self._lock:
            self._accepting = False
            commands, self._commands = self._commands, deque()
            os.close(self._event_fd)
        for _, drop in commands:
            _told(drop)
        for ticket, attempt in self.attempts:  # nothing here ends an access: their leases stay (contract 41)
            text = self.failure or "ucx-py was left open, with reads under way"
            if not self.attempts[ticket, attempt].is_told:
                change = Change(ticket, attempt, Failed(FailureClass.UNCERTAIN, text), None, text)
                _told(partial(self._outbox.report, change))
        if self.failure or not self._closed():
            LEFT_OPEN.append(self)
        _told(self._wake)

    def _round(self) -> None:
        for _ in range(len(self._commands)):
            self._commands.popleft()[0]()
        now, wait_s = time.monotonic(), IDLE_S
        if self._is_open:
            self._worker.progress()
            for attempt in tuple(self.attempts.values()):
                wait_s = min(wait_s, self._step(attempt, now))
        if not wait_s or self._commands or self._stopping or (self._is_open and not self._worker.arm()):
            return
        for fd, _ in self._poll.poll(wait_s * 1000):
            if fd == self._event_fd:
                os.eventfd_read(self._event_fd)

    def _step(self, attempt: Attempt, now: float) -> float:
        """Post what may be posted for one attempt, or end it; return how long the thread may wait for it."""
        progress = attempt.progress
        if progress.stop is None and not attempt.link.endpoint.is_alive():
            progress.fail(FailureClass.PEER_LOST, "the connection to the source broke")
        if progress.stop is not None:
            attempt.ready.clear()
            return self._wind_up(attempt, now)
        if not (attempt.gets or attempt.ready) and not attempt.go_on():
            return self._wind_up(attempt, now)
        while attempt.ready and attempt.gets < GETS_UNDER_WAY_MAX and attempt.bytes_under_way < BYTES_UNDER_WAY_MAX:
            if wait_s := self._pace.wait_s(now):
                return min(wait_s, LOOK_S) if attempt.gets else wait_s
            source, local = attempt.ready.popleft()
            self._get(attempt, source, local)
            self._pace.spend(len(local), now)
            if attempt.progress.stop is not None:  # posting it failed
                break
        return LOOK_S if attempt.gets else 0

    def _get(self, attempt: Attempt, source: int, local: Bytes) -> None:
        get = _Get(attempt, len(local))
        attempt.gets, attempt.bytes_under_way = attempt.gets + 1, attempt.bytes_under_way + get.length_bytes
        self.gets += 1
        attempt.has_asked = True
        try:
            ended = partial(self._ended, get)
            request = attempt.remote.get_nb(local, ended, cb_args=(), cb_kwargs={}, offset=source, size=len(local))
        except Exception as error:  # noqa: BLE001 - foreign code: it raises instead of posting
            self._ended(get, None, error)
            return
        if request is None:  # it has ended already, and mostly without calling back
            self._ended(get, None, None)

    def _ended(self, get: _Get, _request: object, exception: BaseException | None) -> None:
        """Note the end of a get, once; called from inside `progress`, where nothing may be raised."""
        if get.has_ended:
            return
        get.has_ended = True
        attempt = get.attempt
        attempt.gets, attempt.bytes_under_way = attempt.gets - 1, attempt.bytes_under_way - get.length_bytes
        self.length_bytes += get.length_bytes
        if exception is not None:
            attempt.progress.fail(FailureClass.PEER_LOST, f"a read failed: {exception}")

    def _wind_up(self, attempt: Attempt, now: float) -> float:
        """End an attempt with whose gets all is over; say of the others that nobody knows when they are."""
        ticket, number = attempt.progress.pair
        if not attempt.gets:
            del self.attempts[ticket, number]
            evidence = Evidence.COMPLETED if attempt.has_asked else Evidence.NEVER_SUBMITTED
            change = attempt.progress.change(evidence)
            self._outbox.report(Change(ticket, number, None, evidence) if attempt.is_told else change)
            return 0
        if attempt.stuck_at is None:
            attempt.stuck_at = now + self._cancel_wait_s
        elif now > attempt.stuck_at and not attempt.is_told:
            attempt.is_told = attempt.link.is_stuck = True
            why = attempt.progress.stop.text if attempt.progress.stop else ""
            text = f"{attempt.gets} reads from {attempt.link.peer} have not ended, and ucx-py cannot end them ({why})"
            log.warning("T%d: %s; its pages stay out of use until they do", ticket, text)
            self._outbox.report(Change(ticket, number, Failed(FailureClass.UNCERTAIN, text), None, text))
        return LOOK_S

    def _stop(self) -> None:
        self._stopping = True

    def _closed(self) -> bool:
        """Close connections that a flush shows to be at rest, then UCX; False where one of them is not."""
        if not self._is_open:
            return True
        open_links = [link for link in self.links.values() if not link.is_stuck and link.endpoint.is_alive()]
        waiting = {id(link) for link in open_links}
        for link in open_links:
            if link.endpoint.flush(partial(_flushed, waiting, id(link))) is None:
                waiting.discard(id(link))
        ends_at = time.monotonic() + CLOSE_S
        while waiting and time.monotonic() < ends_at:
            self._worker.progress()
            self._poll.poll(LOOK_S * 1000)
        if waiting or self.attempts or any(link.is_stuck for link in self.links.values()):
            return False
        for part in (*(link.endpoint for link in self.links.values()), self._worker, *self._registered, self._context):
            try:
                part.close()
            except Exception as error:  # noqa: BLE001 - it raises for a connection that has broken, and has closed it
                log.info("ucx-py closed with a word: %s", error)
        return True


def _told(call: Callable[[], None]) -> None:
    """Make one of the last calls of a thread that ends, and log what it raises."""
    try:
        call()
    except Exception:
        log.exception("a last word of the ucx-py thread raised")


def _flushed(waiting: set[int], number: int, *_ended: object) -> None:
    waiting.discard(number)
