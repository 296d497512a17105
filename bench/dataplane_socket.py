"""The socket transport beside a plain socket, UCX over TCP and memory: the same scattered pages, in turns, in one run.

Two processes of this host; a loop of its own sends and receives the plain socket's pages, with nothing else in it: no
lease, no generation, no check. Prints the median GB/s of each, and each as a share of the plain socket. `--json` prints
one document.
"""

import argparse
import json
import multiprocessing
import random
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from kvbus.dataplane.memory import MemoryReader
from kvbus.dataplane.reading import ReadOrder
from kvbus.dataplane.socket_reader import SocketReader
from kvbus.dataplane.socket_server import Served, SocketServer
from kvbus.dataplane.ucx import UcxPlane, UcxReader
from kvbus.events import ReaderKey, column
from kvbus.grants import Grant, MemoryAccess, PoolGeometry, SocketAccess
from kvbus.ledger.types import Backend, Delivered, Direction, LeaseView, Order
from kvbus.pool.layout import PageLayout
from kvbus.pool.memory import PoolMemory
from kvbus.processes import identity

SIZES = {"16 KiB": 16 << 10, "64 KiB": 64 << 10, "2 MiB": 2 << 20}
MOVED_BYTES = 128 << 20
POOL_SLACK = 2
"""The pool holds so many times what is moved, so that the pages lie scattered."""
VIEWS = 256
SECRET = b"s" * 32
EPOCHS = (5 << 32 | 1, 9 << 32 | 1)
TCP_ONLY = {"TLS": "tcp"}


def layout(page_bytes: int) -> PageLayout:
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


def scattered(seed: int, page_bytes: int) -> list[int]:
    count = MOVED_BYTES // page_bytes
    return random.Random(seed).sample(range(POOL_SLACK * count), count)


def pool_of(page_bytes: int, epoch: int) -> PoolMemory:
    memory = PoolMemory.create(layout(page_bytes), POOL_SLACK * MOVED_BYTES // page_bytes, epoch)
    pages = range(memory.page_count)
    memory.generations.raise_pages(pages)
    for page in pages:
        memory.page_bytes(page)[:] = page % 251 + 1
    memory.generations.seal_pages(pages)
    return memory


# ------------------------------------------------------------------------------------------------------- the source


def source(pipe: Connection, page_bytes: int) -> None:
    """Serve one pool in all four ways until the pipe closes."""
    memory = pool_of(page_bytes, EPOCHS[0])
    memory.export()
    pages = sorted(scattered(1, page_bytes))
    counters = memory.generations.counters(pages)
    server = SocketServer(wake=lambda: None)
    server.register(memory)
    place = server.start()
    server.open(Served(1, 0, SECRET, pages, counters))
    plane = UcxPlane(wake=lambda: None, settings=TCP_ONLY)
    plane.start()
    geometry = PoolGeometry(
        base=memory.address,
        length_bytes=memory.length_bytes,
        generations_offset=memory.generations_offset,
        pages_offset=memory.pages_offset,
        page_stride=memory.page_stride,
        page_bytes=page_bytes,
        page_count=memory.page_count,
    )
    grant = Grant(
        lender_instance="A",
        lender_member="m0",
        lender_epoch=EPOCHS[0],
        reader=ReaderKey(instance="B", member="m0", epoch=EPOCHS[1], transfer="t", attempt=1, rank=0),
        ticket=1,
        rank=0,
        fingerprint=memory.fingerprint,
        nonce=b"n" * 16,
        pool=geometry,
        pages=column(pages, 4),
        counters=column(counters, 8),
        ucx=plane.register(memory),
        memory=MemoryAccess(process=identity(), fd=memory.fd),
        socket=SocketAccess(addresses=place.addresses, port=place.port, secret=SECRET),
    )
    listener = socket.create_server(("127.0.0.1", 0))
    views = views_of(memory, pages)
    threading.Thread(target=serve_plain, args=(listener, views), daemon=True).start()
    pipe.send((grant, listener.getsockname()[1]))
    while True:
        verb = pipe.recv()
        if verb == "again":  # the reader lets go after each attempt; lend the same pages again
            while 1 not in server.ended():
                threading.Event().wait(0.0005)
            server.open(Served(1, 0, SECRET, pages, counters))
        pipe.send(None)


def views_of(memory: PoolMemory, pages: list[int]) -> list[memoryview]:
    return [memoryview(memory.page_bytes(page)) for page in pages]


def serve_plain(listener: socket.socket, views: list[memoryview]) -> None:
    while True:
        peer, _ = listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while peer.recv(8):
            send_all(peer, views)


def send_all(peer: socket.socket, views: list[memoryview]) -> None:
    at, pending = 0, list[memoryview]()
    while at < len(views) or pending:
        if not pending:
            pending, at = views[at : at + VIEWS], at + VIEWS
        pending = after(pending, peer.sendmsg(pending))


def after(views: list[memoryview], moved: int) -> list[memoryview]:
    for at, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[at + 1 :]]
        moved -= len(view)
    return []


# --------------------------------------------------------------------------------------------------- the destination


class Plain:
    """The plain socket's receiving end."""

    def __init__(self, port: int, views: list[memoryview]) -> None:
        self.views = views
        self.peer = socket.create_connection(("127.0.0.1", port))

    def move(self) -> None:
        """Ask for everything, and receive it."""
        self.peer.sendall(struct.pack("<Q", 1))
        at, pending = 0, list[memoryview]()
        while at < len(self.views) or pending:
            if len(pending) < VIEWS // 2 and at < len(self.views):
                pending, at = pending + self.views[at : at + VIEWS], at + VIEWS
            pending = after(pending, self.peer.recvmsg_into(pending)[0])


class Reader:
    """One of kvbus's readers."""

    def __init__(self, backend: Backend, woken: threading.Event, hint: ReadOrder, view: LeaseView) -> None:
        self.backend, self.woken, self.hint, self.view = backend, woken, hint, view
        self.ticket = 0

    def move(self) -> None:
        """Have one order carried out."""
        self.ticket += 1
        order = Order(self.ticket, 1, self.view, Direction.WRITE, self.hint, "A", None)
        self.woken.clear()
        self.backend.submit(order)
        changes = list(self.backend.changes())
        while not changes:
            self.woken.wait(0.05)
            changes = list(self.backend.changes())
        result = changes[0].result
        if not isinstance(result, Delivered) or not all(result.arrived):
            raise RuntimeError(f"{self.backend.name}: {changes[0]}")


def view_of(memory: PoolMemory, pages: list[int]) -> LeaseView:
    count = len(pages)
    names = tuple(n.to_bytes(16, "big") for n in range(count))
    return LeaseView(memory.fingerprint, 0, EPOCHS[1], tuple(range(count)), names, tuple(pages), (1,) * count)


@contextmanager
def movers(page_bytes: int) -> Iterator[tuple[dict[str, Callable[[], None]], Connection]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=source, args=(theirs, page_bytes), daemon=True)
    process.start()
    grant, port = ours.recv()
    memory = pool_of(page_bytes, EPOCHS[1])
    memory.export()
    local = scattered(2, page_bytes)
    woken = threading.Event()
    by_socket, by_memory = SocketReader(wake=woken.set), MemoryReader(wake=woken.set)
    plane = UcxPlane(wake=woken.set, settings=TCP_ONLY)
    plane.start()
    plane.register(memory)
    for reader in (by_socket, by_memory):
        reader.start()
        reader.register(memory)
    by_ucx = UcxReader(plane, wake=woken.set)
    plain = Plain(port, views_of(memory, local))
    backends: dict[str, Backend] = {"socket": by_socket, "ucx-tcp": by_ucx, "memory": by_memory}
    view, hint = view_of(memory, local), ReadOrder(grant)
    readers = {name: Reader(backend, woken, hint, view) for name, backend in backends.items()}
    try:
        yield {"plain": plain.move, **{name: reader.move for name, reader in readers.items()}}, ours
    finally:
        for backend in backends.values():
            backend.shutdown(5.0)
            backend.release_hold()
        process.kill()


def measure(page_bytes: int, rounds: int) -> dict[str, float]:
    """Return the median GB/s of each way; they take turns, so that a noisy neighbour disturbs all of them."""
    taken: dict[str, list[float]] = {}
    with movers(page_bytes) as (ways, pipe):
        for round_ in range(rounds + 1):
            for name, move in ways.items():
                started = time.perf_counter()
                move()
                elapsed = time.perf_counter() - started
                if round_:  # the first one connects and touches everything
                    taken.setdefault(name, []).append(elapsed)
                if name == "socket":
                    pipe.send("again")
                    pipe.recv()
    return {name: MOVED_BYTES / statistics.median(times) / 1e9 for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {label: measure(page_bytes, options.rounds) for label, page_bytes in SIZES.items()}
    if options.json:
        print(json.dumps(results))
        return
    for label, speeds in results.items():
        shares = "   ".join(f"{name} {speed:5.2f} ({speed / speeds['plain']:4.2f})" for name, speed in speeds.items())
        beside = speeds["socket"] / speeds["ucx-tcp"]
        print(f"{label:>7}: GB/s (share of plain)   {shares}   socket / ucx-tcp {beside:.2f}")


if __name__ == "__main__":
    main()
