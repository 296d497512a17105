"""The thread that owns UCX in this process, and what it does for others: hold pools, answer reads, pass on notices.

One thread makes every UCX call, because UCX's progress may run for milliseconds, and an event loop would stall that
long. It sleeps on UCX's event descriptor and its own while nothing is under way, and spins while something is: a read
over shared memory advances only inside `progress` and raises no event. As a lender the thread only has to be there:
wire-up and reads over TCP need its progress.

A fault of one attempt or one peer is its task's to contain. What gets past it is a fault of the plane: the thread says
so, loudly, closes UCX by force and ends. Only that close, where it succeeds, is evidence for what was under way.
"""

import logging
import mmap
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from kvbus.dataplane import ucp
from kvbus.dataplane.notices import NOTICE_AM_ID, Notice
from kvbus.dataplane.reading import LocalPool
from kvbus.errors import BackendError, KvbusError, PeerError
from kvbus.grants import UcxAccess
from kvbus.pool.memory import PoolMemory

CALL_S = 10.0
"""How long a caller waits for the thread's answer: one round takes milliseconds, a start up to a second under load."""
COMMANDS_MAX = 16_384
"""Each attempt puts at most two commands (submit, cancel) in line, and at most 4,096 attempts are under way."""
NOTICES_MAX = 65_536
"""As many as the lender keeps tombstones for; one that is dropped comes again over the bus."""
IDLE_S = 1.0
"""Nothing depends on it: should a wake be lost, the thread looks again this soon."""
PROGRESS_A_ROUND_MAX = 4
"""Two megabytes of large pages: 0.5 ms between two looks at commands, and a quarter of the rounds' own cost."""
QUIET_ROUNDS_MAX = 200
"""About 0.5 ms of spinning without any progress: ten round trips of TCP on one host."""
QUIET_SLEEP_S = 0.001
"""A wait for a peer that does not move costs a look per millisecond then, not a core."""

FAILURE_LENGTH_MAX = 500
"""Characters of what went wrong: it goes into facts, whose texts take 2,000."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class Task(Protocol):
    """Something that the thread drives."""

    def step(self, now: float) -> float | None:
        """Do what can be started now; return how long the thread may sleep: 0 not at all, None without limit.

        What it raises ends the plane, with everything that others read over it.
        """

    def failed(self, text: str) -> None:
        """The plane has failed: nothing more is posted, and what is under way may still touch memory."""

    def closed(self, *, is_quiet: bool) -> None:
        """The thread ends. `is_quiet`: UCX was closed by force, every request has ended, and none touches memory."""


@dataclass(frozen=True, slots=True)
class RegisteredPool:
    """A pool that UCX may write into and peers may read; the memory object keeps it mapped."""

    local: LocalPool
    handle: ucp.MemoryHandle
    memory: PoolMemory


@dataclass(frozen=True, slots=True)
class PlaneStatistics:
    """Counters of the thread: `messages_refused` were no notices, `notices_dropped` found the list full.

    `rounds` of the thread stand still while it sleeps, but for one look a second. `failure` says what ended it, if
    anything did; `messages_failed` raised where they were taken.
    """

    running: bool
    pools: int
    rounds: int
    notices_received: int
    notices_dropped: int
    messages_refused: int
    messages_failed: int
    failure: str


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to run on the thread; `drop` is called in its stead where the thread ends first."""

    run: Callable[[], None]
    drop: Callable[[], None] | None


class UcxPlane:
    """One UCX context and worker with the thread that drives them; `wake` is raised when a notice was listed.

    `wake` is called from the thread: the caller makes that safe, and it must not raise.
    `settings` are UCX's own, without the prefix, over the binding's defaults. `start` before anything else. Pools stay
    registered until `close`. A plane whose thread has failed says why in `failure`; nothing starts it again.
    """

    failure = ""

    def __init__(
        self,
        *,
        wake: Callable[[], None],
        settings: Mapping[str, str] | None = None,
        library_path: str | None = None,
    ) -> None:
        self._wake = wake
        self._settings = settings
        self._library_path = library_path
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._commands: deque[_Command] = deque()
        self._accepting = False
        self._stopping = False
        self._tasks: list[Task] = []
        self._pools: dict[int, RegisteredPool] = {}
        self._notices: deque[Notice] = deque()
        self._received = self._dropped = self._refused = self._failed_messages = self._quiet = self._rounds = 0

    def __repr__(self) -> str:
        return f"<UcxPlane {'running' if self._accepting else 'stopped'} pools={len(self._pools)}>"

    # ------------------------------------------------------------------------------------------ from any thread

    def start(self) -> None:
        """Start the thread and open UCX in it; ConfigError or BackendError as the binding raised it."""
        if self._thread is not None:
            raise BackendError("the UCX thread was started before; make a new UcxPlane")
        opened: Future[None] = Future()
        try:
            self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise BackendError(f"no descriptor for the UCX thread: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, args=(opened,), name="kvbus-ucx", daemon=True)
        self._thread.start()
        try:
            opened.result(CALL_S)
        except TimeoutError as error:
            raise BackendError(f"UCX did not open within {CALL_S:g} s; is the host starved?") from error

    def register(self, memory: PoolMemory, rank: int = 0) -> UcxAccess:
        """Let UCX use this rank's pool, and return what a grant needs to reach it. One pool a rank, none overlapping.

        The pool's mapping stays for the life of the process from here on: a peer may hold its address.
        """
        memory.export()
        return self.call(lambda: self._register(memory, rank))

    def pool(self, rank: int) -> RegisteredPool | None:
        """Return the pool of a rank."""
        return self._pools.get(rank)

    def attach(self, task: Task) -> bool:
        """Drive a task from now on, once a round; False if the thread does not run."""
        return self.post(lambda: self._tasks.append(task))

    def post(self, command: Callable[[], None], drop: Callable[[], None] | None = None) -> bool:
        """Run a command on the thread, soon and in order; False if it has ended or has too many commands in line.

        Where the thread ends before the command's turn it calls `drop` instead, once.
        """
        with self._lock:
            if not self._accepting or len(self._commands) >= COMMANDS_MAX:
                return False
            self._commands.append(_Command(command, drop))
            os.eventfd_write(self._event_fd, 1)
        return True

    def call(self, function: Callable[[], T], wait_s: float = CALL_S) -> T:
        """Run a function on the thread and return its value or raise what it raised; BackendError if it is late."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except Exception as error:  # noqa: BLE001 - the caller's function: what it raises is the caller's
                answer.set_exception(error)

        def drop() -> None:
            answer.set_exception(BackendError(f"the UCX thread has ended: {self.failure or 'it was closed'}"))

        if not self.post(run, drop):
            why = self.failure or "start it, or look at its statistics"
            raise BackendError(f"the UCX thread does not run, or is far behind: {why}")
        try:
            return answer.result(wait_s)
        except TimeoutError as error:
            raise BackendError(f"the UCX thread did not answer within {wait_s:g} s") from error

    def notices(self) -> Sequence[Notice]:
        """Return and forget the notices that readers sent, oldest first; the lender checks their nonces."""
        with self._lock:
            notices = tuple(self._notices)
            self._notices.clear()
        return notices

    def statistics(self) -> PlaneStatistics:
        """Return the counters as they stand."""
        return PlaneStatistics(
            running=self._accepting,
            pools=len(self._pools),
            rounds=self._rounds,
            notices_received=self._received,
            notices_dropped=self._dropped,
            messages_refused=self._refused,
            messages_failed=self._failed_messages,
            failure=self.failure,
        )

    def close(self, budget_s: float = CALL_S) -> bool:
        """Close UCX by force and end the thread; False if it has not ended within the budget. May be called again."""
        self.post(self._stop)
        if self._thread is None:
            return True
        self._thread.join(budget_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------------------------------- on the thread

    @property
    def worker(self) -> ucp.Worker:
        """UCX's worker for reading; no peer is told its address."""
        return self._reads

    def map_scratch(self, length_bytes: int) -> tuple[mmap.mmap, int, ucp.MemoryHandle]:
        """Return fresh memory that nobody is given the key of: the memory, its address, and UCX's handle.

        BackendError where the host has none: one connection fails then, and this thread goes on for all others.
        """
        try:
            memory = mmap.mmap(-1, length_bytes)
        except OSError as error:
            raise BackendError(f"no memory for a connection ({length_bytes} bytes): {error.strerror}") from error
        address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        return memory, address, self._context.map(address, length_bytes)

    def unmap_scratch(self, handle: ucp.MemoryHandle) -> None:
        """Take such memory from UCX again, once no get can write into it."""
        self._context.unmap(handle)

    def _run(self, opened: "Future[None]") -> None:
        try:
            self._open()
        except BaseException as error:  # noqa: BLE001 - nobody stands above this thread: `start` raises it
            os.close(self._event_fd)
            known = isinstance(error, KvbusError)
            opened.set_exception(error if known else BackendError(f"UCX could not be opened: {error!r}"))
            return
        self._accepting = True
        opened.set_result(None)
        try:
            while not self._stopping:
                self._round()
        except BaseException as error:  # noqa: BLE001 - nobody stands above this thread: unsaid, it would end silently
            self._fail(error)
        self._end()

    def _open(self) -> None:
        self._context = ucp.Context.open(ucp.load(self._library_path), self._settings)
        try:
            # Two, since between two workers UCX has one connection for both directions: a reader that dies with our
            # own gets unread would leave us a reset, by which UCX may abort this process (ucx_link.py).
            self._lends, self._reads = ucp.Worker.open(self._context), ucp.Worker.open(self._context)
            self._lends.set_am_handler(NOTICE_AM_ID, self._take_notice)
            self._epoll = select.epoll()
            for worker in (self._lends, self._reads):
                self._epoll.register(worker.event_fd(), select.EPOLLIN)
            self._epoll.register(self._event_fd, select.EPOLLIN)
        except BaseException:
            self._context.close()
            raise

    def _fail(self, error: BaseException) -> None:
        """Say that the plane has failed, to everybody who counts on it; UCX is closed next."""
        self.failure = f"the UCX thread has failed: {error!r}"[:FAILURE_LENGTH_MAX]
        log.critical("%s; nothing is read by UCX any more, start this worker again", self.failure, exc_info=error)
        for task in self._tasks:
            _told("failed", lambda task=task: task.failed(self.failure))  # type: ignore[misc]

    def _end(self) -> None:
        """Take nothing more, close UCX by force, and say whether that has ended every access."""
        with self._lock:
            self._accepting = False
            commands, self._commands = self._commands, deque()
            os.close(self._event_fd)
        for command in commands:
            if command.drop is not None:
                _told("drop", command.drop)
        is_quiet = _told("close", self._close_ucx)
        for task in self._tasks:
            _told("closed", lambda task=task: task.closed(is_quiet=is_quiet))  # type: ignore[misc]
        _told("wake", self._wake)

    def _close_ucx(self) -> None:
        self._epoll.close()
        self._context.close()
        self._pools.clear()

    def _round(self) -> None:
        self._rounds += 1
        for _ in range(len(self._commands)):
            self._commands.popleft().run()
        worked = self._lends.progress()
        for _ in range(PROGRESS_A_ROUND_MAX):
            if not self._reads.progress():
                break
            worked = 1
        now = time.monotonic()
        sleep_s = IDLE_S
        for task in self._tasks:
            asked = task.step(now)
            if asked is not None:
                sleep_s = min(sleep_s, asked)
        if worked:
            self._quiet = 0  # UCX raises no event for what it has not been asked to the end: never sleep after work
        elif sleep_s > 0:
            self._block(sleep_s)
        else:
            self._quiet += 1
            if self._quiet > QUIET_ROUNDS_MAX:
                self._block(QUIET_SLEEP_S)

    def _block(self, sleep_s: float) -> None:
        if self._commands or self._stopping or not (self._lends.arm() and self._reads.arm()):
            return
        for fd, _ in self._epoll.poll(sleep_s):
            if fd == self._event_fd:
                os.eventfd_read(self._event_fd)

    def _stop(self) -> None:
        self._stopping = True

    def _register(self, memory: PoolMemory, rank: int) -> UcxAccess:
        for known_rank, known in self._pools.items():
            apart = (
                known.local.address + known.local.length_bytes <= memory.address
                or memory.address + memory.length_bytes <= known.local.address
            )
            if known_rank == rank or not apart:
                raise ValueError(f"rank {rank}: the pool of rank {known_rank} is registered already, or overlaps")
        handle = self._context.map(memory.address, memory.length_bytes)
        access = UcxAccess(address=self._lends.address(), rkey=self._context.pack_rkey(handle))
        self._pools[rank] = RegisteredPool(LocalPool.of(memory), handle, memory)
        return access

    def _take_notice(self, _header: bytes, body: bytes) -> None:
        try:
            notice = Notice.decode(body)
        except PeerError:
            self._refused += 1
            return
        except Exception:
            # The bus repeats each notice, so one that cannot be taken costs time and no page.
            self._failed_messages += 1
            log.exception("a reader's notice could not be taken")
            return
        with self._lock:
            self._received += 1
            if len(self._notices) >= NOTICES_MAX:
                self._dropped += 1
                return
            self._notices.append(notice)
        _told("wake", self._wake)


def _told(what: str, call: Callable[[], None]) -> bool:
    """Make one of the last calls of a thread that ends; return whether it was made whole, and log what it raised."""
    try:
        call()
    except Exception:
        log.exception("%s raised in the UCX thread", what)
        return False
    return True
