"""What each way to a page costs, as the planner's table has it: for each order, for each page, for each MiB on top.

Two processes of this host; mapped memory, UCX over cma, UCX over tcp and the socket read the same scattered pages in
turns, so that a noisy neighbour disturbs all of them. Prints the lower quartile of each, and the three numbers that fit
them best, beside those of the table (kvbus/dataplane/planner.py). `--json` prints the three alone, as a worker takes
them: `kvbus worker --transport-costs "$(python bench/ways.py --json)"`.
"""

import argparse
import json
import random
import statistics
import threading
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
from pairs import EPOCHS, POOL_SLACK, Destination, Lender, in_turns, pool_of, readers, source

from kvbus.dataplane.planner import MEASURED

CASES = {
    4 << 10: (1, 16, 256),
    16 << 10: (1, 16, 256),
    64 << 10: (1, 16, 256),
    256 << 10: (1, 16, 128),
    2 << 20: (1, 8),
}
"""Pages of an order, by the size of a page."""
PLANES = {"ucx over cma": {}, "ucx over tcp": {"TLS": "tcp"}}


def lend(pipe: Connection, page_bytes: int, pages: int) -> None:
    """Lend pages of one pool in all ways."""
    Lender(page_bytes, pages).lend(pipe)


def measure(page_bytes: int, counts: tuple[int, ...], rounds: int) -> dict[int, dict[str, float]]:
    """Return the lower quartile in microseconds, by pages and way."""
    pages, woken = POOL_SLACK * max(counts), threading.Event()
    memory = pool_of(page_bytes, pages, EPOCHS[1])
    found: dict[int, dict[str, float]] = {}
    with source(lend, page_bytes, pages) as pipe, readers(memory, woken, PLANES) as ways:
        destination = Destination(pipe, memory, woken)
        for count in counts:
            there, here = (random.Random(seed).sample(range(pages), count) for seed in (1, 2))
            calls = {way: partial(destination.move, reader, there, here) for way, reader in ways.items()}
            taken = in_turns(calls, rounds, unmeasured=2)
            found[count] = {way: 1e6 * statistics.quantiles(times, n=4)[0] for way, times in taken.items()}
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
