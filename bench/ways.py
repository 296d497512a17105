"""What each way to a page costs, as the planner's table has it: for each order, for each page, for each MiB on top.

Two processes of this host; mapped memory, UCX over cma, UCX over tcp and the socket read the same scattered pages in
turns, so that a noisy neighbour disturbs all of them. Prints the lower quartile of each, and the three numbers that fit
them best, beside those of the table (kvbus/dataplane/planner.py). `--json` prints the three alone, as a worker takes
them: `kvbus worker --transport-costs "$(python bench/ways.py --json)"`.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np

from kvbus.dataplane.memory import MemoryReader
from kvbus.dataplane.planner import MEASURED
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

CASES = {
    4 << 10: (1, 16, 256),
    16 << 10: (1, 16, 256),
    64 << 10: (1, 16, 256),
    256 << 10: (1, 16, 128),
    2 << 20: (1, 8),
}
"""Pages of an order, by the size of a page."""
POOL_SLACK = 2
EPOCHS = (5 << 32 | 1, 9 << 32 | 1)
SECRET_BYTES = 32
END_S = 30.0


def layout(page_bytes: int) -> PageLayout:
    return PageLayout(
        kind="toy", layers=1, kv_heads=1, block_tokens=32, head_dim=page_bytes // 32, dtype="uint8", rank=0, ranks=1,
        model_digest="ab12",
    )  # fmt: skip


def source(pipe: Connection, page_bytes: int, pages: int) -> None:
    """Lend pages of one pool in all ways, a grant for each order, until the pipe closes."""
    memory = PoolMemory.create(layout(page_bytes), pages, EPOCHS[0])
    memory.generations.raise_pages(range(pages))
    for page in range(pages):
        memory.page_bytes(page)[:] = page % 251 + 1
    memory.generations.seal_pages(range(pages))
    memory.export()
    server = SocketServer(wake=lambda: None)
    server.register(memory)
    place = server.start()
    plane = UcxPlane(wake=lambda: None)
    plane.start()
    ucx = plane.register(memory)
    geometry = PoolGeometry(
        base=memory.address, length_bytes=memory.length_bytes, generations_offset=memory.generations_offset,
        pages_offset=memory.pages_offset, page_stride=memory.page_stride, page_bytes=page_bytes,
        page_count=memory.page_count,
    )  # fmt: skip
    pipe.send(None)
    while True:
        ticket, wanted = pipe.recv()
        secret, counters = ticket.to_bytes(SECRET_BYTES, "big"), memory.generations.counters(wanted)
        server.open(Served(ticket, 0, secret, wanted, counters))
        server.ended()
        pipe.send(
            Grant(
                lender_instance="A", lender_member="m0", lender_epoch=EPOCHS[0],
                reader=ReaderKey(instance="B", member="m0", epoch=EPOCHS[1], transfer="t", attempt=1, rank=0),
                ticket=ticket, rank=0, fingerprint=memory.fingerprint, nonce=b"n" * 16, pool=geometry,
                pages=column(wanted, 4), counters=column(counters, 8), ucx=ucx,
                memory=MemoryAccess(process=identity(), fd=memory.fd),
                socket=SocketAccess(addresses=place.addresses, port=place.port, secret=secret),
            )
        )  # fmt: skip


@contextmanager
def readers(page_bytes: int, pages: int) -> Iterator[tuple[dict[str, Backend], PoolMemory, threading.Event]]:
    memory = PoolMemory.create(layout(page_bytes), pages, EPOCHS[1])
    memory.export()
    woken = threading.Event()
    planes = {
        "ucx over cma": UcxPlane(wake=woken.set),
        "ucx over tcp": UcxPlane(wake=woken.set, settings={"TLS": "tcp"}),
    }
    by_memory, by_socket = MemoryReader(wake=woken.set), SocketReader(wake=woken.set)
    for reader in (by_memory, by_socket):
        reader.start()
        reader.register(memory)
    for plane in planes.values():
        plane.start()
        plane.register(memory)
    ways: dict[str, Backend] = {"memory": by_memory, "socket": by_socket}
    ways |= {way: UcxReader(plane, wake=woken.set) for way, plane in planes.items()}
    try:
        yield ways, memory, woken
    finally:
        for backend in ways.values():
            backend.shutdown(5.0)
            backend.release_hold()


def order_of(ticket: int, memory: PoolMemory, local: list[int], grant: Grant) -> Order:
    count = len(local)
    names = tuple(n.to_bytes(16, "big") for n in range(count))
    view = LeaseView(memory.fingerprint, 0, EPOCHS[1], tuple(range(count)), names, tuple(local), (1,) * count)
    return Order(ticket, 1, view, Direction.WRITE, ReadOrder(grant), "A", None)


def move(backend: Backend, order: Order, woken: threading.Event) -> float:
    """Have one order carried out, and return how long that took, in microseconds."""
    woken.clear()
    began = time.perf_counter()
    backend.submit(order)
    while not (changes := backend.changes()):
        if not woken.wait(END_S):
            raise RuntimeError(f"{backend.name} reports nothing")
        woken.clear()
    took_us = (time.perf_counter() - began) * 1e6
    if not isinstance(changes[0].result, Delivered) or not all(changes[0].result.arrived):
        raise RuntimeError(f"{backend.name}: {changes[0]}")
    return took_us


def measure(page_bytes: int, counts: tuple[int, ...], rounds: int) -> dict[int, dict[str, float]]:
    """Return the lower quartile in microseconds, by pages and way."""
    pages = POOL_SLACK * max(counts)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=source, args=(theirs, page_bytes, pages), daemon=True)
    process.start()
    found: dict[int, dict[str, float]] = {}
    try:
        ours.recv()
        with readers(page_bytes, pages) as (ways, memory, woken):
            ticket = 0
            for count in counts:
                there, here = (random.Random(seed).sample(range(pages), count) for seed in (1, 2))
                taken: dict[str, list[float]] = {way: [] for way in ways}
                for round_ in range(rounds + 2):
                    for way, backend in ways.items():
                        ticket += 1
                        ours.send((ticket, there))
                        took_us = move(backend, order_of(ticket, memory, here, ours.recv()), woken)
                        if round_ > 1:  # the first ones connect, and touch everything
                            taken[way].append(took_us)
                found[count] = {way: statistics.quantiles(times, n=4)[0] for way, times in taken.items()}
    finally:
        process.kill()
    return found


def fitted(points: list[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Return the cost of an order, of a page and of a MiB that fit (pages, page bytes, microseconds) best by ratio."""
    rows = np.array([[1 / us, count / us, count * size / (1 << 20) / us] for count, size, us in points])
    solved, *_ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    order_us, page_us, mib_us = (max(0.0, float(number)) for number in solved)
    return order_us, page_us, mib_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    points: dict[str, list[tuple[int, int, float]]] = {way: [] for way in MEASURED}
    for page_bytes, counts in CASES.items():
        for count, taken in measure(page_bytes, counts, options.rounds).items():
            for way, took_us in taken.items():
                points[way].append((count, page_bytes, took_us))
            if not options.json:
                shown = "   ".join(f"{way} {took_us:8.0f}" for way, took_us in taken.items())
                print(f"{count:4} pages of {page_bytes >> 10:5} KiB, us:   {shown}")
    table = {way: fitted(told) for way, told in points.items()}
    if options.json:
        print(json.dumps(table))
        return
    for way, (order_us, page_us, mib_us) in table.items():
        known = MEASURED[way]
        beside = f"{known.order_us:g}, {known.page_us:g}, {known.mib_us:g}"
        print(f"{way:>12}: {order_us:6.0f} us an order, {page_us:5.1f} a page, {mib_us:5.0f} a MiB   (table: {beside})")


if __name__ == "__main__":
    main()
