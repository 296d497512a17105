"""The mover: copies between vLLM's blocks and the kvbus pool, on one thread, and makes all calls for pages itself.

It is the engine as the kvbus worker knows it: it runs in the process that holds the KV, so what it touches ends on that
process's evidence. The link to the worker comes and goes (`vllm_link`); without one every load and store ends at once,
with nothing. Each that is put ends exactly once, in the order in which they were put.

    load:  match → copy → release            store:  match → alloc → copy → commit → release
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from kvbus.engines.base import WorkerCalls
from kvbus.engines.link import EngineError
from kvbus.engines.vllm_orders import Load, Store
from kvbus.engines.vllm_worker import Loaded, Stored
from kvbus.engines.worker_link import complain
from kvbus.names import tokens_from_bytes
from kvbus.pool.memory import PoolMemory

ORDERS_MAX = 1_024
"""What may wait for the mover. vLLM runs a few hundred requests at a time; what is more ends at once, with nothing."""

Answer = TypeVar("Answer")


class Copier(Protocol):
    """Copies and converts; see `vllm_pages`. Both return only when they touch the memory no more."""

    def load(self, pool: PoolMemory, pages: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy pages into vLLM's blocks."""

    def store(self, pool: PoolMemory, pages: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy vLLM's blocks into pages."""


class PageCalls(WorkerCalls, Protocol):
    """The kvbus worker as the mover asks it; `WorkerLink` is one. `closed` is set once it is gone."""

    closed: threading.Event


@dataclass(frozen=True, slots=True)
class Session:
    """One attachment to one kvbus worker, with the pool that it lends pages of."""

    calls: PageCalls
    pool: PoolMemory


@dataclass(frozen=True, slots=True)
class Kept:
    """A stored prompt whose handle was kept for who asked for it; blocks held before, and in all."""

    session: Session
    handle: int
    held_before: int
    blocks: int
    refused: str = ""
    cached_tokens: int = 0
    """How many of the prompt's tokens vLLM did not compute."""


class _Call(Generic[Answer]):
    """One call, which its caller may leave while it waits or runs; `undo` gets what it then gives."""

    def __init__(self, work: Callable[[Session], Answer], undo: Callable[[Session, Answer], None]) -> None:
        self._work = work
        self._undo = undo
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._given: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()

    def run(self, find: Callable[[], Session]) -> None:
        """Make the call, on the mover's thread."""
        if self._left.is_set():
            return
        try:
            session = find()
            given = self._work(session)
        except Exception as error:
            self._given.put(error)
            return
        with self._lock:
            is_left = self._left.is_set()
            if not is_left:
                self._given.put(given)
        if is_left:
            self._undo(session, given)

    def wait(self, timeout_s: float) -> Answer:
        """Return what the call gives; EngineError where it gives nothing in time, and then it leaves nothing behind."""
        try:
            given = self._given.get(timeout=timeout_s)
        except queue.Empty:
            given = self._leave(timeout_s)
        if isinstance(given, Exception):
            raise given
        return given

    def _leave(self, waited_s: float) -> Answer | Exception:
        with self._lock:
            self._left.set()
            try:
                return self._given.get_nowait()  # it came just now
            except queue.Empty:
                return EngineError("the connector did not get to this call in time", waited_s=waited_s)


def _nothing() -> None:
    """Do nothing: only the turn of the thread is wanted."""


class Mover:
    """See the module's head. `load`, `store`, `void`, `forget`, `take_ended` return at once; `run` is its thread."""

    def __init__(self, copier: Copier) -> None:
        self.session: Session | None = None
        self.counts = {"loaded_blocks": 0, "stored_blocks": 0, "failed": 0, "turned_away": 0}
        self._copier = copier
        self._orders: queue.Queue[Callable[[], None] | None] = queue.Queue(ORDERS_MAX)
        self._ended: deque[Loaded | Stored] = deque()  # at most one for each order that was put
        self._lock = threading.Lock()
        self._counting: set[str] = set()  # requests whose stores have neither ended nor been voided
        self._wanted: dict[str, queue.SimpleQueue[Kept]] = {}
        self._first: deque[Callable[[], None]] = deque()  # at most one for each open handle, and the ends of sessions
        self._left = threading.Event()
        self._left.set()
        self._over = threading.Event()
        self._forgets_asked = 0
        self._forgets_heard = 0  # the thread's own

    def __repr__(self) -> str:
        return f"<Mover attached={self.session is not None} waiting={self._orders.qsize()}>"

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is moved or waits to be, and nothing that has ended waits to be told."""
        return not self._orders.unfinished_tasks and not self._ended and not self._first

    @property
    def has_left(self) -> bool:
        """Whether nothing of a session that was detached is touched any more: the thread is back from all of it."""
        return self._left.is_set() or self._over.is_set()

    @property
    def is_out(self) -> bool:
        """Whether it has left, and has not come again since."""
        return self.session is None and self.has_left

    # Orders ---------------------------------------------------------------------------------------------------------

    def load(self, load: Load) -> None:
        """Begin a load; it ends in `take_ended`, whatever happens."""
        forgets = self._forgets_asked
        if not self._put(lambda: self._load(load, forgets)):
            self._ended.append(Loaded(load.request_id, load.block_ids))

    def store(self, store: Store) -> None:
        """Begin a store; it ends in `take_ended`, whatever happens."""
        with self._lock:
            self._counting.add(store.request_id)
        forgets = self._forgets_asked
        if not self._put(lambda: self._store(store, forgets)):
            self.void(store.request_id)
            self._ended.append(Stored(store.request_id))

    def void(self, request_id: str) -> None:
        """Let nothing count of a store that has not ended: what it may yet copy is other bytes."""
        with self._lock:
            self._counting.discard(request_id)

    def forget(self) -> None:
        """Have all names forgotten before anything that is put later; kept in mind until a worker has heard it.

        What was put before may still store, and is forgotten with the rest. So each order knows how many were asked for
        when it was put, and sees to it that those were heard; a queue that is full loses nothing by it.
        """
        with self._lock:
            self._forgets_asked = asked = self._forgets_asked + 1
        self._put(lambda: self._forget(asked))

    def take_ended(self) -> list[Loaded | Stored]:
        """Return what has ended since the last call."""
        ended: list[Loaded | Stored] = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def call(
        self, work: Callable[[Session], Answer], timeout_s: float, undo: Callable[[Session, Answer], None]
    ) -> Answer:
        """Have the mover's thread make a call to the worker, and return what it gives; not for vLLM's own threads.

        A call whose caller has left is not begun any more, and undone where it was under way.
        """
        call, forgets = _Call(work, undo), self._forgets_asked
        if not self._put(lambda: call.run(lambda: self._attached(forgets))):
            raise EngineError("the connector is busy: too many copies wait")
        return call.wait(timeout_s)

    # Marked stores --------------------------------------------------------------------------------------------------

    def expect(self, mark: str) -> "queue.SimpleQueue[Kept]":
        """From here on, whatever is stored under this mark keeps its handle, and comes through the queue."""
        waiting: queue.SimpleQueue[Kept] = queue.SimpleQueue()
        with self._lock:
            self._wanted[mark] = waiting
        return waiting

    def expect_no_more(self, mark: str, waiting: "queue.SimpleQueue[Kept]") -> None:
        """Nobody waits for this mark any more; what came for it and was not taken is given back."""
        with self._lock:
            self._wanted.pop(mark, None)
        while not waiting.empty():
            self.give_back(waiting.get_nowait())

    def give_back(self, kept: Kept) -> None:
        """Release a kept handle, unless its worker is gone."""
        self.let_go(kept.session.calls, kept.handle)

    def let_go(self, calls: PageCalls, handle: int) -> None:
        """Release a handle before all orders that wait, however many those are; unless its worker is gone."""

        def release() -> None:
            if not calls.closed.is_set():
                calls.release(handle)

        self._put_first(release)

    # The thread -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until `stop`."""
        try:
            self._work()
        finally:
            self._over.set()

    def _work(self) -> None:
        is_over = False
        while not is_over:
            work = self._orders.get()
            while self._first:
                self._guard(self._first.popleft())
            if work is None:
                is_over = True
            else:
                self._guard(work)
            # Here everything that was put before a forget has ended, also where the forget itself found no room.
            if self._orders.empty():
                self._guard(lambda: self._forget(self._forgets_asked))
            self._orders.task_done()

    def stop(self) -> None:
        """End the thread behind what was put already; where it cannot be told, it ends with the process."""
        self._put(None)

    def attach(self, session: Session) -> None:
        """A worker has taken this engine: it is asked from here on, first to forget what it has not heard of."""
        self.session = session
        self._wake()

    def detach(self) -> None:
        """The worker is gone; its pool is dropped once nobody copies any more, which `has_left` tells."""
        self._left = left = threading.Event()
        self.session = None  # only now: whoever sees none sees also that it has not left
        self._put_first(left.set)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except EngineError as error:
            session = self.session
            if session is not None and not session.calls.closed.is_set():
                complain(str(error))
        except Exception as error:  # foreign code copies here; the next order may work
            complain(f"a copy failed: {type(error).__name__}: {error}")

    def _load(self, load: Load, forgets: int) -> None:
        came = 0
        try:
            came = self._bring(load, forgets)
        finally:
            if came < len(load.block_ids):
                self.counts["failed"] += 1
            self._ended.append(Loaded(load.request_id, load.block_ids[came:]))

    def _bring(self, load: Load, forgets: int) -> int:
        """Copy what is there of a load, and return how many blocks that were."""
        session = self._attached(forgets)
        handle, pages = session.calls.match(tokens_from_bytes(load.ids), load.salt)
        try:
            there = pages[load.first_block : load.first_block + len(load.block_ids)]
            if there:
                self._copier.load(session.pool, there, load.block_ids[: len(there)])
        finally:
            session.calls.release(handle)
        self.counts["loaded_blocks"] += len(there)
        return len(there)

    def _store(self, store: Store, forgets: int) -> None:
        try:
            if not store.needs_mark or store.mark in self._wanted:
                self._keep(store, forgets)
        finally:
            with self._lock:
                self._counting.discard(store.request_id)
            self._ended.append(Stored(store.request_id))

    def _keep(self, store: Store, forgets: int) -> None:
        session = self._attached(forgets)
        handle, pages = session.calls.match(tokens_from_bytes(store.ids), store.salt)
        kept = Kept(session, handle, len(pages), len(pages), "", store.cached_tokens)
        try:
            if len(pages) < len(store.block_ids):
                kept = self._fill(session, store, kept)
        except BaseException:
            session.calls.release(handle)
            raise
        if not self._hand_over(store.mark, kept):
            session.calls.release(handle)

    def _fill(self, session: Session, store: Store, kept: Kept) -> Kept:
        """Copy the blocks that the pool lacks out, as far as it has room."""
        first, wanted = kept.held_before, len(store.block_ids)
        granted = session.calls.alloc(kept.handle, first, wanted - first)
        if isinstance(granted, str):
            return replace(kept, refused=granted)
        write, pages = granted
        try:
            self._copier.store(session.pool, pages, store.block_ids[first : first + len(pages)])
        except BaseException:
            session.calls.abandon(write)
            raise
        # What was voided up to here may have been read after others wrote it; what is voided later was not.
        if not self._counts(store.request_id):
            session.calls.abandon(write)
            return replace(kept, refused="the request was preempted: its blocks went to others")
        session.calls.commit(write)
        self.counts["stored_blocks"] += len(pages)
        blocks = first + len(pages)
        short = "" if blocks == wanted else f"the pool had room for {blocks} of {wanted} blocks"
        return replace(kept, blocks=blocks, refused=short)

    def _hand_over(self, mark: str, kept: Kept) -> bool:
        with self._lock:
            waiting = self._wanted.pop(mark, None)
            if waiting is not None:
                waiting.put(kept)
            return waiting is not None

    def _forget(self, asked: int) -> None:
        if self.session is not None:
            self._attached(asked)

    def _counts(self, request_id: str) -> bool:
        with self._lock:
            return request_id in self._counting

    def _attached(self, forgets: int) -> Session:
        """Return the session, once its worker has heard of all that was to be forgotten when an order was put."""
        session = self.session
        if session is None:
            raise EngineError("no kvbus worker is there")
        if self._forgets_heard < forgets:
            session.calls.forget()
            self._forgets_heard = forgets
        return session

    def _put_first(self, work: Callable[[], None]) -> None:
        self._first.append(work)
        self._wake()

    def _wake(self) -> None:
        """Have the thread look at what is not an order; where the queue is full it comes to that by itself."""
        with suppress(queue.Full):
            self._orders.put_nowait(_nothing)

    def _put(self, work: Callable[[], None] | None) -> bool:
        try:
            self._orders.put_nowait(work)
        except queue.Full:
            self.counts["turned_away"] += 1
            return False
        return True
