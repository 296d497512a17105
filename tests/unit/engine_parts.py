"""A small real desk over a real pool, and a worker's port with engines in their own processes around it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from kvbus.engines.base import End, Token
from kvbus.engines.calls import Generation
from kvbus.engines.client import LocalClient
from kvbus.engines.desk import Allocated, Hello, Matched, Refusal, Welcome, Where
from kvbus.engines.port import EnginePort
from kvbus.errors import PeerError
from kvbus.names import page_names
from kvbus.pool.layout import PageLayout
from kvbus.pool.lease import PoolLease
from kvbus.pool.lender import PoolLender, lender_over
from kvbus.pool.memory import PoolMemory
from kvbus.pool.pins import PinSet
from tests.waiting import until

ROOT = Path(__file__).parents[2]
EPOCH = 3 << 32 | 0xBEEF
CLOSE_S = 60.0
"""An engine ends within five seconds; a busy machine takes its time to run it at all."""
TOY: dict[str, object] = {"block_tokens": 8, "page_bytes": 4096, "work_rounds": 4, "tokens_max": 2048}
PROMPT = "The worker is the truth about its memory; the bus carries reports. " * 3
Result = TypeVar("Result")


class SmallDesk:
    """The desk of one pool without ledger or bus: leases straight from the lender."""

    def __init__(self, pages: int = 64) -> None:
        self.pages = pages
        self.lender: PoolLender | None = None
        self.grants_fewer = False
        self.gone = 0
        self.left = 0
        self.hellos: list[Hello] = []
        self._handles: dict[int, tuple[tuple[bytes, ...], PinSet]] = {}
        self._writes: dict[int, PoolLease] = {}
        self._workers_own: set[int] = set()

    @property
    def pool(self) -> PoolLender:
        if self.lender is None:
            raise PeerError("there is no pool before an engine has attached")
        return self.lender

    def welcome(self, hello: Hello) -> Welcome | Refusal:
        layout = PageLayout.from_plain(hello.layout)
        if self.lender is None:
            memory = PoolMemory.create(layout, self.pages, EPOCH)
            self.lender = lender_over(memory, name="pool", engine_reserve_pages=0)
        if layout.fingerprint() != self.pool.memory.fingerprint:
            return Refusal("this worker's pool has another layout")
        self.hellos.append(hello)
        fd = self.pool.memory.fd
        return Welcome(fd, EPOCH, self.pages, layout.block_tokens, layout.fingerprint())

    def match(self, ids: tuple[int, ...], salt: str) -> Matched:
        pins = self.pool.pin_set(for_peer=False)
        names = self._names(ids, salt)
        pins.pin(names)
        self._handles[pins.set_id] = (names, pins)
        return Matched(pins.set_id, pins.pages, self.pool.memory.digests.of(pins.pages))

    def spoiled(self, handle: int, block: int) -> None:
        pages = self._handles[handle][1].pages
        assert self.pool.quarantine((pages[block],)) == 1

    def alloc(self, handle: int, first_block: int, count: int) -> Allocated | Refusal:
        names, pins = self._handles[handle]
        failure = self.pool.refusal(count, for_peer=False)
        pages = self.pool.statistics().pages
        room = pages.free + pages.idle if self.grants_fewer else 0
        if failure is not None and not room:
            return Refusal(failure.text)
        count = count if failure is None else room
        wanted = names[first_block : first_block + count]
        lease = self.pool.lend_write(wanted, range(first_block, first_block + len(wanted)), pins=pins, for_peer=False)
        view = lease.poll()
        if view is None:
            return Refusal(lease.failure.text if lease.failure else "refused")
        self._writes[lease.lease_id] = lease
        return Allocated(lease.lease_id, view.pages)

    def commit(self, write: int) -> None:
        self._end_write(write, whole=True)

    def abandon(self, write: int) -> None:
        self._end_write(write, whole=False)

    def release(self, handle: int) -> None:
        if handle not in self._handles:
            raise PeerError("no such handle", handle=handle)
        self._workers_own.discard(handle)
        self._handles.pop(handle)[1].drop()

    def forget(self) -> int:
        return self.pool.forget_names()

    def hand_over(self, handle: int) -> None:
        if handle not in self._handles:
            raise PeerError("no such handle", handle=handle)
        self._workers_own.add(handle)

    def engine_left(self) -> None:
        self.left += 1
        self._give_all_back()

    def engine_gone(self) -> None:
        self.gone += 1
        self._give_all_back()

    def _give_all_back(self) -> None:
        for write in tuple(self._writes):
            self.abandon(write)
        for handle in set(self._handles) - self._workers_own:
            self.release(handle)

    def held(self, ids: tuple[int, ...], salt: str) -> int:
        return len(self.pool.pages_held(self._names(ids, salt)))

    def evict(self, ids: tuple[int, ...], salt: str) -> int:
        return self.pool.evict(self._names(ids, salt))

    def where(self, ids: tuple[int, ...], salt: str) -> Where | Refusal:
        pages = self.pool.pages_held(self._names(ids, salt))
        if not pages:
            return Refusal("nothing of this prompt is held here")
        memory = self.pool.memory
        stride, size = memory.page_stride, memory.layout.page_bytes
        return Where(os.getpid(), memory.fd, memory.pages_offset, stride, size, tuple(pages))

    def stats(self) -> Mapping[str, int | float | str]:
        return {"handles": len(self._handles), "writes": len(self._writes)}

    def check_nothing_held(self) -> None:
        """Every handle and every write was given back, and the pool agrees."""
        assert not self._handles
        assert not self._writes
        self.pool.check()
        assert self.pool.statistics().pages.pinned == 0

    def _end_write(self, write: int, *, whole: bool) -> None:
        lease = self._writes.pop(write)
        lease.mark_arrived([whole] * len(lease.pages))
        lease.release()

    def _names(self, ids: tuple[int, ...], salt: str) -> tuple[bytes, ...]:
        layout = self.pool.memory.layout
        return page_names(layout.namespace(salt), ids, layout.block_tokens)


class DeskCalls:
    """The desk as an engine's session calls it, without a socket between them."""

    def __init__(self, desk: SmallDesk) -> None:
        self._desk = desk

    def match(self, ids: Sequence[int], salt: str) -> tuple[int, tuple[int, ...]]:
        matched = self._desk.match(tuple(ids), salt)
        return matched.handle, matched.pages

    def alloc(self, handle: int, first_block: int, count: int) -> tuple[int, tuple[int, ...]] | str:
        allocated = self._desk.alloc(handle, first_block, count)
        return allocated.text if isinstance(allocated, Refusal) else (allocated.write, allocated.pages)

    def commit(self, write: int) -> None:
        self._desk.commit(write)

    def abandon(self, write: int) -> None:
        self._desk.abandon(write)

    def release(self, handle: int) -> None:
        self._desk.release(handle)

    def forget(self) -> int:
        return self._desk.forget()


class Worker:
    """A port with its desk, and the engine processes that a test starts for it."""

    def __init__(self, folder: Path, pages: int = 64) -> None:
        self.path = folder / "kvbus" / "engine.sock"
        self.desk = SmallDesk(pages)
        self.attached: list[Hello] = []
        self.lost: list[str] = []
        self.port = EnginePort(self.path, self.desk, self.attached.append, self.lost.append)
        self.processes: list[subprocess.Popen[bytes]] = []

    def spawn(self, engine: str = "toy", options: Mapping[str, object] = TOY) -> "subprocess.Popen[bytes]":
        """Start an engine process without waiting for it."""
        command = [sys.executable, "-m", "kvbus.engines.process", "--engine", engine, "--socket", str(self.path)]
        process = subprocess.Popen([*command, "--options", json.dumps(dict(options))], cwd=ROOT)
        self.processes.append(process)
        return process

    async def start_engine(
        self, engine: str = "toy", options: Mapping[str, object] = TOY, deadline_s: float = 100.0
    ) -> "subprocess.Popen[bytes]":
        """Start an engine process and return once it has attached."""
        before = len(self.attached)
        process = self.spawn(engine, options)
        await until(lambda: len(self.attached) > before, deadline_s, "the engine attaches")
        return process

    async def ask(self, question: Callable[[LocalClient], Result]) -> Result:
        """Ask as a client does, from a thread: the client blocks."""

        def connected() -> Result:
            with LocalClient(self.path) as client:
                return question(client)

        return await asyncio.to_thread(connected)


@asynccontextmanager
async def worker_with(folder: Path, pages: int = 64) -> AsyncIterator[Worker]:
    """A listening worker; its engines are ended with it, and nothing may be left held."""
    worker = Worker(folder, pages)
    await worker.port.start()
    try:
        yield worker
    finally:
        ended = await worker.port.close(CLOSE_S)
        for process in worker.processes:
            if not ended:
                process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(process.wait, CLOSE_S)
    if worker.desk.lender is not None:
        worker.desk.check_nothing_held()


async def answer_of(generation: Generation) -> tuple[list[Token], End | Refusal]:
    """Everything that a generation gives."""
    tokens: list[Token] = []
    with generation:
        async for step in generation:
            if not isinstance(step, Token):
                return tokens, step
            tokens.append(step)
    raise AssertionError("the generation ended without an end")
