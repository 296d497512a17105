"""What the benchmarks of single transports share: one pool lent in all ways, readers on another, and taking turns.

Two processes of this host. The source lends scattered pages under a ticket of their own for each order; a reader is
timed from the order to the word that all of it has arrived.
"""

import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

from kvbus.columns import column
from kvbus.dataplane.memory import MemoryReader
from kvbus.dataplane.reading import ReadOrder
from kvbus.dataplane.socket_reader import SocketReader
from kvbus.dataplane.socket_server import Served, SocketServer
from kvbus.dataplane.ucx import UcxPlane, UcxReader
from kvbus.events import ReaderKey
from kvbus.grants import Grant, MemoryAccess, PoolGeometry, SocketAccess
from kvbus.ledger.types import Backend, Delivered, Direction, LeaseView, Order
from kvbus.pool.digests import digest_of
from kvbus.pool.layout import PageLayout
from kvbus.pool.memory import PoolMemory
from kvbus.processes import identity

POOL_SLACK = 2
"""The pool holds so many times what is moved, so that the pages lie scattered."""
EPOCHS = (5 << 32 | 1, 9 << 32 | 1)
SECRET_BYTES = 32
END_S = 30.0
"""Of one order; the slowest takes half a second."""


def layout(page_bytes: int) -> PageLayout:
    return PageLayout("toy", 1, 1, 32, page_bytes // 32, "uint8", 0, 1, "ab12")


def scattered(seed: int, count: int) -> list[int]:
    """So many pages of a pool of POOL_SLACK times as many."""
    return random.Random(seed).sample(range(POOL_SLACK * count), count)


def pool_of(page_bytes: int, pages: int, epoch: int) -> PoolMemory:
    memory = PoolMemory.create(layout(page_bytes), pages, epoch)
    memory.generations.raise_pages(range(pages))
    for page in range(pages):
        memory.page_bytes(page)[:] = page % 251 + 1
    memory.generations.seal_pages(range(pages))
    memory.export()
    return memory


class Lender:
    """The source: a pool, a page server and UCX."""

    def __init__(self, page_bytes: int, pages: int) -> None:
        self.memory = pool_of(page_bytes, pages, EPOCHS[0])
        self.server = SocketServer(wake=lambda: None)
        self.server.register(self.memory)
        self.place = self.server.start()
        plane = UcxPlane(wake=lambda: None)
        plane.start()
        self.ucx = plane.register(self.memory)

    def grant(self, ticket: int, pages: Sequence[int], *, with_digests: bool) -> Grant:
        """Lend these pages."""
        memory, place = self.memory, self.place
        secret, counters = ticket.to_bytes(SECRET_BYTES, "big"), memory.generations.counters(pages)
        self.server.open(Served(ticket, 0, secret, pages, counters))
        self.server.ended()
        digests = column((digest_of(memory.page_bytes(page)) for page in pages), 8) if with_digests else None
        geometry = PoolGeometry(
            base=memory.address, length_bytes=memory.length_bytes, generations_offset=memory.generations_offset,
            pages_offset=memory.pages_offset, page_stride=memory.page_stride, page_bytes=memory.layout.page_bytes,
            page_count=memory.page_count,
        )  # fmt: skip
        return Grant(
            lender_instance="A", lender_member="m0", lender_epoch=EPOCHS[0],
            reader=ReaderKey(instance="B", member="m0", epoch=EPOCHS[1], transfer="t", attempt=1, rank=0),
            ticket=ticket, rank=0, fingerprint=memory.fingerprint, nonce=b"n" * 16, pool=geometry,
            pages=column(pages, 4), counters=column(counters, 8), digests=digests, ucx=self.ucx,
            memory=MemoryAccess(process=identity(), fd=memory.fd),
            socket=SocketAccess(addresses=place.addresses, port=place.port, secret=secret),
        )  # fmt: skip

    def lend(self, pipe: Connection) -> None:
        """Lend whatever is asked for, until this process is killed."""
        while True:
            ticket, pages, with_digests = pipe.recv()
            pipe.send(self.grant(ticket, pages, with_digests=with_digests))


@contextmanager
def source(run: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run a source in a process of its own; yield the pipe that it was given first, once it has said something."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.kill()


@contextmanager
def readers(
    memory: PoolMemory, woken: threading.Event, planes: Mapping[str, Mapping[str, str]]
) -> Iterator[dict[str, Backend]]:
    """Run a reader by memory, one by socket, and one by UCX for each of the settings."""
    by_memory, by_socket = MemoryReader(wake=woken.set), SocketReader(wake=woken.set)
    for reader in (by_memory, by_socket):
        reader.start()
        reader.register(memory)
    ways: dict[str, Backend] = {"memory": by_memory, "socket": by_socket}
    for way, settings in planes.items():
        plane = UcxPlane(wake=woken.set, settings=settings)
        plane.start()
        plane.register(memory)
        ways[way] = UcxReader(plane, wake=woken.set)
    try:
        yield ways
    finally:
        for backend in ways.values():
            backend.shutdown(5.0)
            backend.release_hold()


class Destination:
    """Orders that fill pages of one pool from what a source lends."""

    def __init__(self, pipe: Connection, memory: PoolMemory, woken: threading.Event) -> None:
        self.pipe, self.memory, self.woken = pipe, memory, woken
        self.ticket = 0

    def move(self, backend: Backend, pages: list[int], local: list[int], *, with_digests: bool = False) -> float:
        """Have pages brought, and return how many seconds that took; asking for the grant does not count."""
        self.ticket += 1
        self.pipe.send((self.ticket, pages, with_digests))
        order = self.order(self.pipe.recv(), local)
        self.woken.clear()
        began = time.perf_counter()
        backend.submit(order)
        while not (changes := backend.changes()):
            if not self.woken.wait(END_S):
                raise RuntimeError(f"{backend.name} reports nothing")
            self.woken.clear()
        took_s = time.perf_counter() - began
        if not isinstance(changes[0].result, Delivered) or not all(changes[0].result.arrived):
            raise RuntimeError(f"{backend.name}: {changes[0]}")
        return took_s

    def order(self, grant: Grant, local: list[int]) -> Order:
        """Return the order to fill these pages with those of the grant, row by row."""
        count = len(local)
        names = tuple(n.to_bytes(16, "big") for n in range(count))
        view = LeaseView(self.memory.fingerprint, 0, EPOCHS[1], tuple(range(count)), names, tuple(local), (1,) * count)
        return Order(self.ticket, 1, view, Direction.WRITE, ReadOrder(grant), "A", None)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def in_turns(calls: Mapping[str, Callable[[], float]], rounds: int, *, unmeasured: int = 1) -> dict[str, list[float]]:
    """Return what each call returned, round by round, another one first each time: a noisy neighbour disturbs all.

    The unmeasured rounds before connect, and touch everything.
    """
    names, found = list(calls), {name: list[float]() for name in calls}
    for round_ in range(rounds + unmeasured):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            took = calls[name]()
            if round_ >= unmeasured:
                found[name].append(took)
    return found
