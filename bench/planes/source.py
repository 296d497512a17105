"""The source process: a filled pool, lent by kvbus's own roles over each of its transports, and a plain socket beside.

Everything between a question and the end of its lease is what a worker runs: look-up, pins, generations, the signed
grant, and the notice that ends the lease. Only the bus is not there: questions come over a local socket.
"""

import asyncio
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from dataplane_socket import TCP_ONLY, layout, serve_plain, views_of
from planes.cases import source_order
from planes.heartbeat import Beats, Heartbeat

from kvbus.dataplane.socket_lending import ServedLending
from kvbus.dataplane.socket_server import SocketServer
from kvbus.dataplane.ucx_plane import UcxPlane
from kvbus.engines.base import Prefilled
from kvbus.engines.desk import Refusal
from kvbus.events import decode
from kvbus.grants import LenderKey, MemoryAccess
from kvbus.ledger.agreement import Agreement, Decision
from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import LeaseFacts
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.lending import LendBook
from kvbus.ledger.types import Direction
from kvbus.parts import ProcessIdentity
from kvbus.pool.memory import PoolMemory
from kvbus.processes import ProcessWatch, identity
from kvbus.roles.poolside import PoolSide
from kvbus.roles.prefills import Prefiller
from kvbus.roles.recorder import Recorder
from kvbus.roles.rounds import Rounds
from kvbus.roles.source import LenderName, PoolAccess, Source
from kvbus.testing.bus import MemoryBus
from kvbus.topics import Topics

SOURCE_EPOCH = 5 << 32 | 1
BLOCK_TOKENS = 32
VOCAB_SIZE = 256
SALT = "bench"
LENDERS = ("ucx", "ucx-tcp")
"""Two planes, each with a source of its own; the page server belongs to the first."""
FRAME = struct.Struct("<BI")
"""Which lender a question is for, and its length; an answer's first byte means nothing."""


@dataclass(frozen=True)
class Told:
    """What the source says of itself."""

    pid: int
    fd: int
    base: int
    length_bytes: int
    pages_offset: int
    page_stride: int
    verify_key: bytes
    fingerprint: str
    process: ProcessIdentity


class Unrecorded:
    """Takes what a round would record: the bus is not measured here."""

    def facts(self, facts: LeaseFacts) -> None:
        """Take one batch."""

    def decision(self, decision: Decision) -> None:
        """Take one decision."""


class NoEngine:
    """A port and a desk that nobody asks for anything."""

    async def prefill(self, ids: tuple[int, ...], salt: str, budget_s: float) -> Prefilled | Refusal:
        """Compute nothing."""
        return Refusal(f"no engine here for {len(ids)} tokens of {salt!r} within {budget_s} s")

    def release(self, handle: int) -> None:
        """Release nothing."""


def tokens_of(pages: int) -> list[int]:
    """Return the prompt whose pages are lent: no two of its blocks have one name."""
    return [token % VOCAB_SIZE for token in range(pages * BLOCK_TOKENS)]


def content(memory: PoolMemory, page: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return what a page of the source holds: no two pages hold the same."""
    bytes_ = _ramp(memory.layout.page_bytes) ^ np.uint8((page * 7 + seed) % 251)
    bytes_[:8] = np.frombuffer(struct.pack("<II", page, seed), dtype=np.uint8)
    return bytes_


@lru_cache(maxsize=1)
def _ramp(length_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.arange(length_bytes, dtype=np.uint64).astype(np.uint8)


def fill(pool: PoolSide, order: list[int]) -> None:
    """Bring content in as an engine does, such that the n-th name of the prompt lies on page `order[n]`."""
    pages = pool.memory.page_count
    names = pool.names(tokens_of(pages), SALT)
    lease = pool.lender.lend_write(None, range(pages), for_peer=False, salt=SALT)
    view = lease.poll()
    if view is None or view.pages != tuple(range(pages)):
        raise RuntimeError(f"the pool did not give all of its pages, in order: {lease.failure}")
    at = {page: number for number, page in enumerate(order)}
    lease.name_rows([names[at[page]] for page in view.pages])
    for page in view.pages:
        pool.memory.page_bytes(page)[:] = content(pool.memory, page)
    lease.mark_arrived([True] * pages)
    lease.release()


class Lenders:
    """The pool and what lends it; all methods but `start` belong to the loop's thread."""

    def __init__(self, page_bytes: int, pages: int, *, contiguous: bool) -> None:
        self.pool = PoolSide.create(
            layout(page_bytes), pages=pages, tokens_max=BLOCK_TOKENS, vocab_size=VOCAB_SIZE, epoch=SOURCE_EPOCH
        )
        self.pool.memory.export()
        fill(self.pool, source_order(pages, contiguous=contiguous))
        self.key = LenderKey.generate()
        self.planes: dict[str, UcxPlane] = {}
        self.sources: dict[str, Source] = {}

    def start(self) -> None:
        """Start planes and page server, and the role over each plane."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self.round)

        server = SocketServer(wake=wake)
        server.register(self.pool.memory)
        place = server.start()
        self.lending = ServedLending(wake=lambda: None, server=server)
        holder = LeaseHolder(bindings=[Binding("lending", self.lending, Direction.READ)], lenders=[self.pool.lender])
        self.rounds = Rounds(
            holder=holder, agreement=Agreement(term=SOURCE_EPOCH), sink=Unrecorded(), member="m0", epoch=SOURCE_EPOCH
        )
        by_memory = MemoryAccess(process=identity(), fd=self.pool.memory.fd)
        for name, settings in zip(LENDERS, ({}, TCP_ONLY), strict=True):
            plane = UcxPlane(wake=wake, settings=settings)
            plane.start()
            access = PoolAccess(plane.register(self.pool.memory), by_memory, place)
            self.planes[name], self.sources[name] = plane, self.source(access, loop)

    def source(self, access: PoolAccess, loop: asyncio.AbstractEventLoop) -> Source:
        """Return the role that lends by these ways."""
        return Source(
            name=LenderName("A", "m0", SOURCE_EPOCH),
            pool=self.pool,
            access=access,
            rounds=self.rounds,
            lending=self.lending,
            key=self.key,
            book=LendBook(entries_max=64),
            prefiller=Prefiller(port=NoEngine(), desk=NoEngine()),
            recorder=Recorder(
                bus=MemoryBus(), topics=Topics(), instance="A", member="m0", epoch=SOURCE_EPOCH, unix_ns=time.time_ns
            ),
            watch=ProcessWatch(loop),
            clock=time.monotonic,
        )

    def round(self) -> None:
        """Do what a worker does when it is woken."""
        for name, plane in self.planes.items():
            for notice in plane.notices():
                self.sources[name].released(notice.key, notice.nonce)
        self.rounds.run()
        for reader in self.lending.closed_here():
            self.sources["ucx"].released(reader.key, reader.nonce)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the questions of one connection."""
        while True:
            try:
                which, length = FRAME.unpack(await reader.readexactly(FRAME.size))
            except asyncio.IncompleteReadError:
                return
            question = decode(await reader.readexactly(length))
            data = await self.sources[LENDERS[which]].answer(question)
            writer.write(FRAME.pack(which, len(data)) + data)


def serve_pages(pool: PoolSide, pages: list[int]) -> int:
    """Serve these pages by a plain socket from now on, to one reader; return its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    serve: Callable[[], None] = partial(serve_plain, listener, views_of(pool.memory, pages))
    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def rewrite(pool: PoolSide, pages: list[int], seed: int) -> None:
    """Write other content into pages, with generations raised before and sealed after it, although they may be lent."""
    pool.memory.generations.raise_pages(pages)
    for page in pages:
        pool.memory.page_bytes(page)[:] = content(pool.memory, page, seed)
    pool.memory.generations.seal_pages(pages)


def beat(pool: PoolSide) -> None:
    """Measure from now on how late this process's loop is."""
    del pool
    HEARTBEATS.append(Heartbeat())
    HEARTBEATS[-1].start()


def beats(pool: PoolSide) -> Beats:
    """Return what was measured since."""
    del pool
    return HEARTBEATS.pop().stop()


HEARTBEATS: list[Heartbeat] = []
"""The one that ticks now, if any."""
COMMANDS: dict[str, Callable[..., object]] = {
    "serve": serve_pages, "rewrite": rewrite, "beat": beat, "beats": beats,
}  # fmt: skip


async def serve(pipe: Connection, path: Path, page_bytes: int, pages: int, *, contiguous: bool) -> None:
    """Lend until the pipe closes."""
    lenders = Lenders(page_bytes, pages, contiguous=contiguous)
    lenders.start()
    server = await asyncio.start_unix_server(lenders.answer, path, limit=1 << 20)
    loop = asyncio.get_running_loop()
    memory = lenders.pool.memory
    pipe.send(
        Told(
            pid=os.getpid(),
            fd=memory.fd,
            base=memory.address,
            length_bytes=memory.length_bytes,
            pages_offset=memory.pages_offset,
            page_stride=memory.page_stride,
            verify_key=lenders.key.verify_key,
            fingerprint=memory.fingerprint,
            process=identity(),
        )
    )
    ended = asyncio.Event()

    def command() -> None:
        try:
            verb, *arguments = pipe.recv()
        except EOFError:
            ended.set()
            return
        pipe.send(COMMANDS[verb](lenders.pool, *arguments))

    loop.add_reader(pipe.fileno(), command)
    async with server:
        await ended.wait()


def run_source(pipe: Connection, path: Path, page_bytes: int, pages: int, *, contiguous: bool) -> None:
    """Be the source process."""
    asyncio.run(serve(pipe, path, page_bytes, pages, contiguous=contiguous))
