"""A lending process for the tests of readers: a filled pool, reachable by UCX and by memory, driven over a pipe."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from kvbus.dataplane.socket_server import Served, SocketPlace, SocketServer
from kvbus.dataplane.socket_wire import SECRET_BYTES
from kvbus.dataplane.ucx import UcxPlane
from kvbus.errors import BackendError
from kvbus.events import ProcessIdentity, ReaderKey, column
from kvbus.grants import Grant, MemoryAccess, PoolGeometry, SocketAccess, UcxAccess
from kvbus.pool.layout import PageLayout
from kvbus.pool.memory import PoolMemory
from kvbus.processes import identity
from tests.waiting import stand_still

PAGE_BYTES = 64 << 10
LENDER_EPOCH = 5 << 32 | 0xA11CE
READER_EPOCH = 9 << 32 | 0xB0B
ANSWER_S = 120.0  # a start on a starved machine takes seconds; a hang takes for ever


def layout(page_bytes: int = PAGE_BYTES) -> PageLayout:
    """A layout with pages of that many bytes."""
    return PageLayout(
        kind="toy",
        layers=1,
        kv_heads=1,
        block_tokens=32,
        head_dim=page_bytes // 32,
        dtype="uint8",
        rank=0,
        ranks=1,
        model_digest="ab12",
    )


def content(page: int, seed: int = 0) -> int:
    """The byte that fills a page; no two neighbours have the same, and none is 0."""
    return (page * 7 + seed) % 251 + 1


def fill(memory: PoolMemory, pages: Sequence[int], seed: int = 0) -> None:
    """Write pages as their lender does: raised before the first byte, sealed after the last."""
    memory.generations.raise_pages(pages)
    for page in pages:
        memory.page_bytes(page)[:] = content(page, seed)
    memory.generations.seal_pages(pages)


@dataclass(frozen=True)
class Described:
    """What a lender tells of itself: its process, its pool, its access."""

    process: ProcessIdentity
    geometry: PoolGeometry
    fingerprint: str
    counters: tuple[int, ...]
    ucx: UcxAccess
    memory: MemoryAccess
    socket: SocketPlace


def geometry_of(memory: PoolMemory) -> PoolGeometry:
    return PoolGeometry(
        base=memory.address,
        length_bytes=memory.length_bytes,
        generations_offset=memory.generations_offset,
        pages_offset=memory.pages_offset,
        page_stride=memory.page_stride,
        page_bytes=memory.layout.page_bytes,
        page_count=memory.page_count,
    )


def serve(pipe: Connection, page_bytes: int, pages: int, settings: Mapping[str, str]) -> None:
    """Run in the child: fill a pool, describe it, then do as told until the pipe closes."""
    memory = PoolMemory.create(layout(page_bytes), pages, LENDER_EPOCH)
    fill(memory, range(pages))
    noticed = threading.Event()
    plane = UcxPlane(wake=noticed.set, settings=settings)
    plane.start()
    server = SocketServer(wake=noticed.set)
    server.register(memory)
    described = Described(
        process=identity(),
        geometry=geometry_of(memory),
        fingerprint=memory.fingerprint,
        counters=memory.generations.counters(range(pages)),
        ucx=plane.register(memory),
        memory=MemoryAccess(process=identity(), fd=memory.fd),
        socket=server.start(),
    )
    pipe.send(described)
    while True:
        verb, *arguments = pipe.recv()
        if verb == "raise":
            memory.generations.raise_pages(arguments[0])
            pipe.send(None)
        elif verb == "rewrite":
            fill(memory, arguments[0], seed=100)
            pipe.send(None)
        elif verb == "notices":
            if noticed.wait(arguments[0]):
                noticed.clear()
            pipe.send(plane.notices())
        elif verb == "serve":
            with contextlib.suppress(BackendError):  # a grant that is wrong on purpose
                server.open(Served(arguments[0], 0, *arguments[1:]))
            pipe.send(None)
        elif verb == "close":
            server.close_lease(arguments[0])
            pipe.send(None)
        elif verb == "ended":
            noticed.wait(arguments[0])
            noticed.clear()
            pipe.send((tuple(server.ended()), tuple(server.released())))
        elif verb == "served":
            pipe.send(server.statistics())


class LendingProcess:
    """A handle on the child."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        if not pipe.poll(ANSWER_S):
            raise TimeoutError("the lender did not describe itself")
        self.described: Described = pipe.recv()
        self.answers = True
        self._tickets = itertools.count(1)

    @property
    def pid(self) -> int:
        return self.described.process.pid

    def ask(self, *command: object) -> object:
        self._pipe.send(command)
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"the lender did not answer {command[0]}")
        return self._pipe.recv()

    def kill(self) -> None:
        self.answers = False
        os.kill(self.pid, signal.SIGKILL)

    def freeze(self) -> None:
        self.answers = False
        stand_still(self.pid)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.answers = True

    def grant(self, pages: Sequence[int], /, **changes: object) -> Grant:
        """The grant for these pages, with any field changed; what it says is what its page server lends."""
        told, ticket = self.described, next(self._tickets)
        secret = ticket.to_bytes(SECRET_BYTES, "big")
        fields: dict[str, object] = {
            "lender_instance": "A",
            "lender_member": "m0",
            "lender_epoch": LENDER_EPOCH,
            "reader": reader_key(),
            "ticket": ticket,
            "rank": 0,
            "fingerprint": told.fingerprint,
            "nonce": b"n" * 16,
            "pool": told.geometry,
            "pages": column(pages, 4),
            "counters": column((told.counters[page] for page in pages), 8),
            "ucx": told.ucx,
            "memory": told.memory,
            "socket": SocketAccess(addresses=told.socket.addresses, port=told.socket.port, secret=secret),
        }
        grant = Grant.model_validate({**fields, **changes})
        if self.answers:
            self.ask("serve", grant.ticket, secret, grant.page_indexes(), grant.page_counters())
        return grant


def reader_key(transfer: str = "t1", attempt: int = 1, epoch: int = READER_EPOCH) -> ReaderKey:
    return ReaderKey(instance="B", member="m0", epoch=epoch, transfer=transfer, attempt=attempt, rank=0)


@contextlib.contextmanager
def lending_process(
    *, page_bytes: int = PAGE_BYTES, pages: int = 256, settings: Mapping[str, str] | None = None
) -> Iterator[LendingProcess]:
    """Run a lender; it is killed at the end, whatever state it is in. Spawned: a fork would share UCX's sockets."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, page_bytes, pages, dict(settings or {})), daemon=True)
    process.start()
    theirs.close()
    try:
        yield LendingProcess(ours)
    finally:
        process.kill()
        process.join(ANSWER_S)
        ours.close()
