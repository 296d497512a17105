"""The counter at which the local engine and local clients are served: synchronous, on the loop that owns the pool.

Everything that the engine holds is a lease at the holder, like a peer's: a read lease for the prefix that it matched, a
write lease for the pages that it fills. So facts, audit and shutdown know of it, and a dead engine's pages come back on
the evidence that its process has ended.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvbus.engines.desk import Allocated, Hello, Matched, Refusal, Welcome, Where
from kvbus.errors import BackendError, ConfigError, PeerError
from kvbus.ledger.facts import Fact
from kvbus.ledger.types import Direction, SubmitMode
from kvbus.pool.layout import PageLayout
from kvbus.pool.pins import PinSet
from kvbus.roles.local import LocalBackend
from kvbus.roles.poolside import PoolSide
from kvbus.roles.rounds import Rounds

log = logging.getLogger(__name__)

ENGINE_PEER = "engine"
READ_MODE = SubmitMode("engine-read", Direction.READ)
WRITE_MODE = SubmitMode("engine-write", Direction.WRITE)
HANDLES_MAX = 1_024
"""One engine computes one prompt at a time; a thousand open handles mean that it forgets to release them."""


@dataclass(slots=True)
class _Handle:
    """One prompt that the engine works on: its names, the lease on its cached prefix, the pins of what it stored.

    `forgotten`: all names were forgotten since, so what is computed from its prefix has no name.
    """

    names: tuple[bytes, ...]
    salt: str
    read_ticket: int
    pins: PinSet
    writes: set[int] = field(default_factory=set)
    engines: bool = True
    forgotten: bool = False


@dataclass(slots=True)
class _Write:
    handle: int
    ticket: int


class PoolDesk:
    """Serves engine and clients from one pool. `attach` makes the pool when the first engine says its layout."""

    def __init__(
        self,
        *,
        attach: Callable[[PageLayout, Hello], PoolSide],
        rounds: Callable[[], Rounds],
        reads: LocalBackend,
        writes: LocalBackend,
        clock: Callable[[], float],
        counters: Callable[[], Mapping[str, int | float | str]],
    ) -> None:
        self._attach = attach
        self._rounds = rounds
        self._reads = reads
        self._writes_backend = writes
        self._clock = clock
        self._counters = counters
        self._pool: PoolSide | None = None
        self._on_forget: Callable[[], None] | None = None
        self._on_evict: Callable[[], None] | None = None
        self._handles: dict[int, _Handle] = {}
        self._writes: dict[int, _Write] = {}
        self._next_id = 1

    # ------------------------------------------------------------------------------------------------------- engine

    def welcome(self, hello: Hello) -> Welcome | Refusal:
        """Make the pool for the first engine; a later one must have the same layout to get the same pool."""
        try:
            layout = PageLayout.from_plain(hello.layout)
            if self._pool is None:
                self._pool = self._attach(layout, hello)
        except (ConfigError, BackendError) as error:
            return Refusal(str(error))
        pool = self._pool
        if layout.fingerprint() != pool.layout.fingerprint():
            return Refusal(
                f"this worker's pool has layout {pool.layout.fingerprint()}, the engine's is {layout.fingerprint()}: "
                "start a new worker for another model or layout"
            )
        return Welcome(
            fd=pool.memory.fd,
            epoch=pool.memory.epoch,
            pages=pool.memory.page_count,
            block_tokens=layout.block_tokens,
            fingerprint=layout.fingerprint(),
        )

    def match(self, ids: tuple[int, ...], salt: str) -> Matched:
        """Lend the engine the longest cached prefix; the handle stands for the prompt from now on."""
        if len(self._handles) >= HANDLES_MAX:
            raise PeerError("too many open handles: release some", handles=len(self._handles))
        pool, rounds = self._ready(), self._rounds()
        names = pool.names(ids, salt)
        pool.prompts.note(names, salt)
        lease = pool.lender.lend_read(names, for_peer=False)
        ticket = rounds.holder.take(lease, READ_MODE, ENGINE_PEER, now=self._clock(), peer=ENGINE_PEER)
        rounds.run()
        view = rounds.holder.view(ticket)
        handle = self._new_id()
        self._handles[handle] = _Handle(names, salt, ticket, pool.lender.pin_set(for_peer=False))
        pages = view.pages if view else ()
        return Matched(handle, pages, pool.memory.digests.of(pages))

    def spoiled(self, handle: int, block: int) -> None:
        """Take a page out of use whose bytes are not those of its digest any more, under an unchanged generation.

        Whoever wrote it may write it again, so it stays in quarantine; who reads it goes on, and no reader that
        compares digests delivers it. The engine computes what was there, and stores it in another page.
        """
        held, pool = self._handle(handle), self._ready()
        view = self._rounds().holder.view(held.read_ticket)
        if view is None or block >= len(view.pages):
            raise PeerError("no page of this block was matched", handle=handle, block=block)
        page = view.pages[block]
        if pool.lender.quarantine((page,)):
            pool.memory.digests.spoiled += 1
            log.warning("page %d changed after it was sealed: it is out of use, see pages_spoiled", page)

    def alloc(self, handle: int, first_block: int, count: int) -> Allocated | Refusal:
        """Lend the engine free pages to fill, for as many of the blocks as there is room; their generations are odd."""
        held = self._handle(handle)
        if count < 1 or first_block < 0 or first_block + count > len(held.names):
            blocks = len(held.names)
            raise PeerError("blocks lie outside the prompt", first_block=first_block, count=count, blocks=blocks)
        if held.forgotten:
            return Refusal("all names were forgotten since this prompt was matched: release it, and match again")
        pool, rounds = self._ready(), self._rounds()
        room = min(count, pool.lender.room(held.salt))
        if room < 1:
            return Refusal(f"no page is free: all {pool.memory.page_count} are lent or pinned; try again later")
        names, ordinals = held.names[first_block : first_block + room], range(first_block, first_block + room)
        lease = pool.lender.lend_write(names, ordinals, pins=held.pins, for_peer=False, salt=held.salt)
        ticket = rounds.holder.take(lease, WRITE_MODE, ENGINE_PEER, now=self._clock(), peer=ENGINE_PEER)
        rounds.run()
        view = rounds.holder.view(ticket)
        if view is None or not rounds.holder.bits(ticket) & Fact.SUBMITTED:
            return Refusal(lease.failure.text if lease.failure else "this worker takes no new leases: it is stopping")
        write = self._new_id()
        self._writes[write] = _Write(handle, ticket)
        held.writes.add(write)
        return Allocated(write, view.pages)

    def commit(self, write: int) -> None:
        """Take filled pages back: they are content from now on, pinned under their handle (P9)."""
        self._end_write(write, whole=True)

    def abandon(self, write: int) -> None:
        """Take pages back of which nothing counts."""
        self._end_write(write, whole=False)

    def release(self, handle: int) -> None:
        """Drop what a handle holds; write leases that are still open under it stay until they are ended."""
        held = self._handle(handle)
        if held.writes:
            raise PeerError("end the handle's writes first", handle=handle, writes=len(held.writes))
        self._drop(handle)
        self._rounds().run()

    def forget(self) -> int:
        """Forget all names, since the same ones will stand for other content from now on; return how many those were.

        Who reads goes on. What the engine has matched it may use up, but stores nothing that it computes from it.
        """
        pool = self._ready()
        for held in self._handles.values():
            held.forgotten = True
        if self._on_forget is not None:
            self._on_forget()
        return pool.lender.forget_names()

    def follow_forgetting(self, on_forget: Callable[[], None], on_evict: Callable[[], None]) -> None:
        """Have the one who remembers what was brought here hear of it when all names are forgotten, or some are."""
        self._on_forget, self._on_evict = on_forget, on_evict

    def hand_over(self, handle: int) -> None:
        """The handle is the worker's from now on."""
        self._handle(handle).engines = False

    def engine_left(self) -> None:
        """The engine says that it touches nothing of what it held: the same as a word for each of them."""
        for write in tuple(self._writes):
            self.abandon(write)
        for handle in [number for number, held in self._handles.items() if held.engines]:
            self.release(handle)

    def engine_gone(self) -> None:
        """The engine's process is proved dead: end what it had open, and drop its handles."""
        if self._pool is None:
            return
        self._reads.engine_died()
        self._writes_backend.engine_died()
        self._writes.clear()
        for handle in [number for number, held in self._handles.items() if held.engines]:
            held = self._handles.pop(handle)
            held.pins.drop()
        self._rounds().run()

    # ------------------------------------------------------------------------------------------------------ clients

    def held(self, ids: tuple[int, ...], salt: str) -> int:
        """Return how many leading whole blocks of a prompt are here; pins nothing."""
        pool = self._ready()
        return len(pool.lender.pages_held(pool.names(ids, salt)))

    def evict(self, ids: tuple[int, ...], salt: str) -> int:
        """Forget the prompt's blocks that nobody holds; what brought them may run again."""
        pool = self._ready()
        evicted = pool.lender.evict(pool.names(ids, salt))
        if evicted and self._on_evict is not None:
            self._on_evict()
        return evicted

    def where(self, ids: tuple[int, ...], salt: str) -> Where | Refusal:
        """Say where the held prefix lies in this process, for tools that look at memory."""
        pool = self._ready()
        pages = pool.lender.pages_held(pool.names(ids, salt))
        if not pages:
            return Refusal("no block of this prompt is held here")
        memory = pool.memory
        stride, size = memory.page_stride, pool.layout.page_bytes
        return Where(os.getpid(), memory.fd, memory.pages_offset, stride, size, tuple(pages))

    def stats(self) -> Mapping[str, int | float | str]:
        """Return the worker's counters."""
        return self._counters()

    # ------------------------------------------------------------------------------------------------------- inside

    def _ready(self) -> PoolSide:
        if self._pool is None:
            raise PeerError("no engine has attached yet: there is no pool")
        return self._pool

    def _handle(self, handle: int) -> _Handle:
        held = self._handles.get(handle)
        if held is None:
            raise PeerError("no such handle", handle=handle)
        return held

    def _end_write(self, write: int, *, whole: bool) -> None:
        known = self._writes.pop(write, None)
        if known is None:
            raise PeerError("no such write", write=write)
        self._handles[known.handle].writes.discard(write)
        page_bytes = self._ready().layout.page_bytes
        self._writes_backend.completed(known.ticket, whole=whole, page_bytes=page_bytes)
        self._rounds().run()

    def _drop(self, handle: int) -> None:
        held = self._handles.pop(handle)
        self._reads.completed(held.read_ticket, whole=True, page_bytes=self._ready().layout.page_bytes)
        held.pins.drop()

    def _new_id(self) -> int:
        number, self._next_id = self._next_id, self._next_id + 1
        return number
