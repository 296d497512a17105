"""What page digests cost: transfers with and without them in turns, making them, and taking pages that have them.

Two processes of this host move the same scattered pages by each transport; every second time the reader compares the
digests of the grant. `made` is hashing sealed pages whose bytes no cache holds, `taken` what an engine pays to compare
pages before it copies them. Then an event loop ticks beside the thread that makes digests: how late it is at worst.
Medians, in milliseconds a GiB. `--json` prints one document.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np

from kvbus.columns import column
from kvbus.dataplane.memory import MemoryReader
from kvbus.dataplane.reading import ReadOrder
from kvbus.dataplane.socket_reader import SocketReader
from kvbus.dataplane.socket_server import Served, SocketServer
from kvbus.dataplane.ucx import UcxPlane, UcxReader
from kvbus.events import ReaderKey
from kvbus.grants import Grant, MemoryAccess, PoolGeometry, SocketAccess
from kvbus.ledger.types import Backend, Delivered, Direction, LeaseView, Order
from kvbus.pool.digests import DigestMode, digest_of
from kvbus.pool.layout import PageLayout
from kvbus.pool.memory import PoolMemory
from kvbus.processes import identity
from kvbus.roles.digesting import Digester

SIZES = {"16 KiB": 16 << 10, "64 KiB": 64 << 10, "2 MiB": 2 << 20}
MOVED_BYTES = 128 << 20
POOL_SLACK = 2
"""The pool holds so many times what is moved, so that the pages lie scattered."""
SECRET = b"s" * 32
EPOCHS = (5 << 32 | 1, 9 << 32 | 1)
GIB = 1 << 30
TICK_S = 0.001
PAGES_MAX = 9_000
"""What one grant with digests may hold."""
RAISED_AT_ONCE = 256
"""Pages that are made anew between two looks of the loop, so that this is not what it waits for."""


def pool_of(page_bytes: int, epoch: int) -> PoolMemory:
    layout = PageLayout("toy", 1, 1, 32, page_bytes // 32, "uint8", 0, 1, "ab12")
    memory = PoolMemory.create(layout, POOL_SLACK * MOVED_BYTES // page_bytes, epoch)
    pages = range(memory.page_count)
    memory.generations.raise_pages(pages)
    for page in pages:
        memory.page_bytes(page)[:] = page % 251 + 1
    memory.generations.seal_pages(pages)
    memory.digests.turn_on(DigestMode.GRANT)
    return memory


def scattered(seed: int, page_bytes: int) -> list[int]:
    count = MOVED_BYTES // page_bytes
    return random.Random(seed).sample(range(POOL_SLACK * count), count)


def source(pipe: Connection, page_bytes: int) -> None:
    """Lend one pool by all transports until the pipe closes."""
    memory = pool_of(page_bytes, EPOCHS[0])
    memory.export()
    pages = sorted(scattered(1, page_bytes))
    counters = memory.generations.counters(pages)
    server = SocketServer(wake=lambda: None)
    server.register(memory)
    place = server.start()
    server.open(Served(1, 0, SECRET, pages, counters))
    plane = UcxPlane(wake=lambda: None)
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
        digests=column((digest_of(memory.page_bytes(page)) for page in pages), 8),
        ucx=plane.register(memory),
        memory=MemoryAccess(process=identity(), fd=memory.fd),
        socket=SocketAccess(addresses=place.addresses, port=place.port, secret=SECRET),
    )
    pipe.send(grant)
    while pipe.recv() == "again":  # the socket's reader lets go after each attempt; lend the same pages again
        while 1 not in server.ended():
            threading.Event().wait(0.0005)
        server.open(Served(1, 0, SECRET, pages, counters))
        pipe.send(None)


class Reader:
    """One of kvbus's readers."""

    def __init__(self, backend: Backend, woken: threading.Event, hint: ReadOrder, view: LeaseView) -> None:
        self.backend, self.woken, self.hint, self.view = backend, woken, hint, view
        self.ticket = 0

    def move(self) -> None:
        """Have one order carried out."""
        self.ticket += 1
        self.woken.clear()
        self.backend.submit(Order(self.ticket, 1, self.view, Direction.WRITE, self.hint, "A", None))
        changes = list(self.backend.changes())
        while not changes:
            self.woken.wait(0.05)
            changes = list(self.backend.changes())
        result = changes[0].result
        if not isinstance(result, Delivered) or not all(result.arrived):
            raise RuntimeError(f"{self.backend.name}: {changes[0]}")


@contextmanager
def movers(memory: PoolMemory, local: list[int]) -> Iterator[dict[str, Callable[[], None]]]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=source, args=(theirs, memory.layout.page_bytes), daemon=True)
    process.start()
    hint = ReadOrder(pipe.recv())
    rows = len(local)
    names = tuple(row.to_bytes(16, "big") for row in range(rows))
    view = LeaseView(memory.fingerprint, 0, EPOCHS[1], tuple(range(rows)), names, tuple(local), (1,) * rows)
    woken = threading.Event()
    by_socket, by_memory = SocketReader(wake=woken.set), MemoryReader(wake=woken.set)
    plane = UcxPlane(wake=woken.set)
    plane.start()
    plane.register(memory)
    for reader in (by_socket, by_memory):
        reader.start()
        reader.register(memory)
    backends: dict[str, Backend] = {
        "ucx": UcxReader(plane, wake=woken.set),
        "memory": by_memory,
        "socket": by_socket,
    }
    readers = {name: Reader(backend, woken, hint, view) for name, backend in backends.items()}

    def by_the_socket() -> None:
        readers["socket"].move()
        pipe.send("again")
        pipe.recv()

    try:
        yield {"ucx": readers["ucx"].move, "memory": readers["memory"].move, "socket": by_the_socket}
    finally:
        for backend in backends.values():
            backend.shutdown(5.0)
            backend.release_hold()
        process.kill()


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(page_bytes: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of everything; they take turns, so that a noisy neighbour disturbs all of them."""
    memory = pool_of(page_bytes, EPOCHS[1])
    memory.export()
    local, taken = scattered(2, page_bytes), dict[str, list[float]]()
    copy = np.empty(page_bytes, dtype=np.uint8)

    def make() -> None:
        for page in local:
            digest_of(memory.page_bytes(page))

    def take(*, compare: bool) -> None:
        for page in local:
            content = memory.page_bytes(page)
            if compare:
                digest_of(content)
            copy[:] = content

    with movers(memory, local) as ways:
        calls: dict[str, tuple[DigestMode, Callable[[], object]]] = {
            f"{name} {mode}": (mode, move) for name, move in ways.items() for mode in (DigestMode.OFF, DigestMode.GRANT)
        }
        calls["made"] = (DigestMode.OFF, make)
        calls["taken off"] = (DigestMode.OFF, lambda: take(compare=False))
        calls["taken grant"] = (DigestMode.OFF, lambda: take(compare=True))
        for round_ in range(rounds + 1):
            order = list(calls.items())
            for name, (mode, call) in order if round_ % 2 else order[::-1]:
                memory.digests.mode = mode
                elapsed = timed(call)
                if round_:  # the first one connects and touches everything
                    taken.setdefault(name, []).append(elapsed)
    return {name: statistics.median(times) * GIB / MOVED_BYTES for name, times in taken.items()}


async def lateness(page_bytes: int) -> dict[str, float]:
    """Return how late an event loop's ticks are, alone and beside the thread that makes digests: 99 of 100, and all."""
    memory = pool_of(page_bytes, EPOCHS[1])
    digester = Digester(memory)
    pages = range(min(PAGES_MAX, memory.page_count))

    async def ticks(seconds: float) -> list[float]:
        late, ends_at = list[float](), time.perf_counter() + seconds
        while (started := time.perf_counter()) < ends_at:
            await asyncio.sleep(TICK_S)
            late.append(time.perf_counter() - started - TICK_S)
        return sorted(late)

    async def hash_again(until: asyncio.Event) -> None:
        while not until.is_set():
            for first in range(0, len(pages), RAISED_AT_ONCE):  # each has to be hashed anew
                memory.generations.raise_pages(pages[first : first + RAISED_AT_ONCE])
                memory.generations.seal_pages(pages[first : first + RAISED_AT_ONCE])
                await asyncio.sleep(0)
            await digester.make(pages)

    alone = await ticks(2.0)
    ended = asyncio.Event()
    hashing = asyncio.ensure_future(hash_again(ended))
    beside = await ticks(2.0)
    ended.set()
    await hashing
    await digester.close()
    words = ("alone", alone), ("beside", beside)
    return {
        key: value
        for word, late in words
        for key, value in ((f"{word} p99", late[int(0.99 * len(late))]), (f"{word} worst", late[-1]))
    }


def text_of(label: str, medians: dict[str, float], late: dict[str, float]) -> str:
    ms = {name: 1e3 * seconds for name, seconds in medians.items()}
    pairs = ("ucx", "memory", "socket", "taken")
    moved = "   ".join(
        f"{name} {ms[f'{name} off']:4.0f} → {ms[f'{name} grant']:4.0f} "
        f"(× {ms[f'{name} grant'] / ms[f'{name} off']:.2f})"
        for name in pairs
    )
    ticks = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in late.items())
    return f"{label:>7}: ms a GiB without → with   {moved}   made {ms['made']:4.0f}   a loop's ticks late, ms: {ticks}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {}
    for label, page_bytes in SIZES.items():
        medians, late = measure(page_bytes, options.rounds), asyncio.run(lateness(page_bytes))
        results[label] = {"s_per_gib": medians, "late_s": late}
        if not options.json:
            print(text_of(label, medians, late), flush=True)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
