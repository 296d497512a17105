"""What page digests cost: transfers with and without them in turns, making them, and taking pages that have them.

Two processes of this host move the same scattered pages by each transport; every second time the reader compares the
digests of the grant. `made` is hashing sealed pages whose bytes no cache holds, `taken` what an engine pays to compare
pages before it copies them. Then an event loop ticks beside the thread that makes digests: how late it is at worst.
Medians, in milliseconds a GiB. `--json` prints one document.
"""

import argparse
import asyncio
import json
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
from pairs import EPOCHS, POOL_SLACK, Destination, Lender, in_turns, pool_of, readers, scattered, source, timed

from kvbus.ledger.types import Backend
from kvbus.pool.digests import DigestMode, digest_of
from kvbus.roles.digesting import Digester

SIZES = {"16 KiB": 16 << 10, "64 KiB": 64 << 10, "2 MiB": 2 << 20}
MOVED_BYTES = 128 << 20
GIB = 1 << 30
TICK_S = 0.001
PAGES_MAX = 9_000
"""What one grant with digests may hold."""
RAISED_AT_ONCE = 256
"""Pages that are made anew between two looks of the loop, so that this is not what it waits for."""


def lend(pipe: Connection, page_bytes: int, pages: int) -> None:
    """Lend one pool by all transports."""
    Lender(page_bytes, pages).lend(pipe)


def measure(page_bytes: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of everything for a GiB."""
    count, woken = MOVED_BYTES // page_bytes, threading.Event()
    memory = pool_of(page_bytes, POOL_SLACK * count, EPOCHS[1])
    memory.digests.turn_on(DigestMode.GRANT)
    pages, local = sorted(scattered(1, count)), scattered(2, count)
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

    def move(reader: Backend, mode: DigestMode) -> float:
        memory.digests.mode = mode
        return destination.move(reader, pages, local, with_digests=mode is DigestMode.GRANT)

    with source(lend, page_bytes, POOL_SLACK * count) as pipe, readers(memory, woken, {"ucx": {}}) as ways:
        destination = Destination(pipe, memory, woken)
        calls: dict[str, Callable[[], float]] = {
            f"{name} {mode}": partial(move, reader, mode)
            for name, reader in ways.items()
            for mode in (DigestMode.OFF, DigestMode.GRANT)
        }
        calls["made"] = partial(timed, make)
        calls["taken off"] = partial(timed, partial(take, compare=False))
        calls["taken grant"] = partial(timed, partial(take, compare=True))
        taken = in_turns(calls, rounds)
    return {name: statistics.median(times) * GIB / MOVED_BYTES for name, times in taken.items()}


async def lateness(page_bytes: int) -> dict[str, float]:
    """Return how late an event loop's ticks are, alone and beside the thread that makes digests: 99 of 100, and all."""
    memory = pool_of(page_bytes, POOL_SLACK * MOVED_BYTES // page_bytes, EPOCHS[1])
    memory.digests.turn_on(DigestMode.GRANT)
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
