"""How late the event loop of a destination's process is while pages arrive: beside silence, and beside other processes.

A timer of one millisecond ticks on the loop that runs the transfers, as a worker's does: leases, the question, the
grant's checks, the order and the rounds are its own steps, and the bytes come in on the readers' threads. `idle` has
nothing else to do; `beside 1` and `beside 2` say how many other processes copy memory without pause meanwhile. `busy`
has no transfer either, but takes as much processor time on the loop as one does, in two steps: what is late there is
the kernel's doing, and the loop's own. Each way is compared with that, beside as many processes as it keeps busy: what
is more, its reader's thread has added, which shares the interpreter with the loop. All take turns in one run. `at the
source` is the same timer on the loop of the process that lends.

Times are milliseconds; `worst` is the median of each turn's latest tick, `held` the most processor time that the loop's
own thread took between two ticks, and `wait` what 99 of 100 ticks did not exceed without that: waiting for a processor,
or for the interpreter. `over` counts ticks that were more than 20 ms late. `--json` prints one document.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
from planes.cases import CONTIGUOUS_PAGE_BYTES, GIB, KIB, Case
from planes.destination import TRANSFER_WAIT_S, WAYS
from planes.heartbeat import Beats, Heartbeat
from planes.source import FRAME
from planes.stage import Stage, stage_for

from kvbus.commands.worker import keep_what_stands
from kvbus.events import LeaseReleased, decode
from kvbus.parts import Body

CASES = (
    Case(CONTIGUOUS_PAGE_BYTES, GIB // CONTIGUOUS_PAGE_BYTES, contiguous=True),
    Case(64 * KIB, 2048),
    Case(16 * KIB, 2048),
)
TURN_S = 0.4
"""Of each kind, each round; a way moves at least one whole transfer in it."""
ROUNDS = 6
LATE_S = 0.020
"""A stall of the loop that the data plane must not cause."""
COPIED_BYTES = 32 << 20
"""Of a process that keeps a core and the memory busy: more than its caches hold."""
BESIDE_NAMES = {"idle, beside 1": 1, "idle, beside 2": 2, "busy, beside 1": 1, "busy, beside 2": 2}
BUSY = "busy"
STEPS = 2
"""Of a transfer, the long ones: leasing its pages, and taking them over."""


def burn(pipe: Connection) -> None:
    """Copy memory for as long as each message says, until the pipe closes."""
    source = np.ones(COPIED_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    while True:
        try:
            ends_at = time.monotonic() + pipe.recv()
        except EOFError:
            return
        while time.monotonic() < ends_at:
            target[:] = source


def spin(cpu_s: float) -> None:
    """Take so much processor time of this thread."""
    ends_at = time.thread_time() + cpu_s
    while time.thread_time() < ends_at:
        pass


@contextmanager
def burners(count: int) -> Iterator[list[Connection]]:
    """Keep so many processes ready that copy memory when they are told to."""
    context, pipes = multiprocessing.get_context("spawn"), list[Connection]()
    for _ in range(count):
        ours, theirs = context.Pipe()
        context.Process(target=burn, args=(theirs,), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()


@dataclass(slots=True)
class Kind:
    """What was measured of one way, or of what it is compared with."""

    beats: Beats = field(default_factory=Beats)
    at_source: Beats = field(default_factory=Beats)
    worst: list[float] = field(default_factory=list)
    transfers: int = 0
    cpu_s: float = 0.0
    seconds: float = 0.0

    def row(self) -> dict[str, float]:
        """Return what it comes to, in milliseconds."""
        late, lent = sorted(self.beats.late), sorted(self.at_source.late)
        waits = sorted(one - held for one, held in zip(self.beats.late, self.beats.held, strict=True))
        return {
            "ticks": len(late),
            "p50_ms": 1e3 * statistics.median(late),
            "p99_ms": 1e3 * share(late, 0.99),
            "max_ms": 1e3 * late[-1],
            "worst_ms": 1e3 * statistics.median(self.worst),
            "over": sum(one > LATE_S for one in late),
            "held_ms": 1e3 * max(self.beats.held),
            "wait_p99_ms": 1e3 * share(waits, 0.99),
            "transfers": self.transfers,
            "cores": self.cpu_s / self.seconds,
            "source_p99_ms": 1e3 * share(lent, 0.99),
            "source_max_ms": 1e3 * lent[-1],
            "source_held_ms": 1e3 * max(self.at_source.held),
        }


def share(ordered: list[float], part: float) -> float:
    """Return the value that this part of all does not exceed."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


class Loop:
    """The destination's loop: transfers run on it as in a worker, and a timer ticks beside them."""

    def __init__(self, stage: Stage, case: Case) -> None:
        self.stage = stage
        self.destination = stage.destination
        self.case = case
        self.heartbeat = Heartbeat()
        self._loop = asyncio.get_running_loop()
        self._moved = asyncio.Event()
        self._step_s = self._gap_s = 0.0
        self.destination.on_wake = lambda: self._loop.call_soon_threadsafe(self._round)

    async def connect(self) -> None:
        """Ask over the same socket as before, without waiting on the loop."""
        self._answers, self._questions = await asyncio.open_unix_connection(sock=self.destination.questions)

    def close(self) -> None:
        """Run nothing more on this loop."""
        self.destination.on_wake = self.destination.woken.set
        self._questions.close()

    async def turn(self, work: Callable[[], Awaitable[None]], kind: Kind) -> None:
        """Measure one turn; the process that lends measures itself meanwhile."""
        pipe = self.stage.pipe
        pipe.send(("beat",))
        pipe.recv()
        cpu_s, began = self.cpu_s(), time.perf_counter()
        self.heartbeat.start()
        await work()
        beats = self.heartbeat.stop()
        kind.seconds += time.perf_counter() - began
        kind.cpu_s += self.cpu_s() - cpu_s
        pipe.send(("beats",))
        kind.at_source.add(pipe.recv())
        kind.beats.add(beats)
        kind.worst.append(max(beats.late))

    def cpu_s(self) -> float:
        """Return the processor time of both processes until now."""
        pids = (os.getpid(), self.stage.told.pid)
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)  # what clock_getcpuclockid names

    async def work(self, name: str, kind: Kind, pipes: list[Connection]) -> None:
        """Do nothing, do nothing while others copy memory, or have the case's pages brought over and over."""
        ends_at = time.monotonic() + TURN_S
        for pipe in pipes[: BESIDE_NAMES.get(name, 0)]:
            pipe.send(TURN_S)
        if name in WAYS:
            while time.monotonic() < ends_at:
                await self.bring(name)
                kind.transfers += 1
        elif not name.startswith(BUSY):
            await asyncio.sleep(TURN_S)
        while name.startswith(BUSY) and time.monotonic() < ends_at:
            spin(self._step_s)
            await asyncio.sleep(self._gap_s)

    async def look(self, way: str) -> None:
        """Note of one transfer how much processor time the loop's thread takes for it, and how long all of it does."""
        began, cpu_s = time.monotonic(), time.thread_time()
        await self.bring(way)
        self._step_s = (time.thread_time() - cpu_s) / STEPS
        self._gap_s = max(0.0, (time.monotonic() - began) / STEPS - self._step_s)

    async def bring(self, way: str) -> None:
        """Run one whole transfer; RuntimeError where pages are missing."""
        destination, which = self.destination, WAYS[way][0]
        begun = destination.begin(way, self.case.count)
        order = destination.order(begun, await self.said(which, begun.question))
        destination.read(begun, order)
        async with asyncio.timeout(TRANSFER_WAIT_S):
            while not destination.has_ended(begun):
                self._moved.clear()
                await self._moved.wait()
        brought = destination.brought(begun)
        if brought.arrived != (True,) * self.case.count:
            raise RuntimeError(f"{way}: {brought.text}")
        await self.said(which, LeaseReleased(key=order.grant.reader, nonce=order.grant.nonce))

    async def said(self, which: str, body: Body) -> object:
        """Return what a lender answers, as the bus would."""
        self._questions.write(self.destination.framed(which, body))
        _, length = FRAME.unpack(await self._answers.readexactly(FRAME.size))
        return decode(await self._answers.readexactly(length)).body

    def _round(self) -> None:
        self.destination.rounds.run()
        self._moved.set()


async def measured(stage: Stage, case: Case, ways: tuple[str, ...], rounds: int) -> dict[str, Kind]:
    """Let everything take turns, another one first in each round; the first transfer of each way connects."""
    loop = Loop(stage, case)
    await loop.connect()
    stage.prepare(case, ())
    kinds = {name: Kind() for name in ("idle", *BESIDE_NAMES, *ways)}
    for way in ways:
        await loop.bring(way)
    await loop.look(ways[0])
    keep_what_stands()  # as a worker does that is ready
    with burners(max(BESIDE_NAMES.values())) as pipes:
        for number in range(rounds):
            names = list(kinds)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                await loop.turn(partial(loop.work, name, kinds[name], pipes), kinds[name])
    loop.close()
    return kinds


def compared(rows: dict[str, dict[str, float]], ways: tuple[str, ...]) -> None:
    """Say of each way how much later its ticks are than beside as many other processes as it keeps busy itself."""
    for way in ways:
        row = rows[way]
        count = min(max(BESIDE_NAMES.values()), max(1, round(row["cores"])))
        other = rows[f"{BUSY}, beside {count}"]
        row["beside"] = count
        for name in ("p50_ms", "p99_ms", "worst_ms", "wait_p99_ms"):
            row[f"{name}_more"] = row[name] - other[name]


OWN = {"p50_ms": "p50", "p99_ms": "p99", "worst_ms": "worst", "max_ms": "max", "held_ms": "held"}
MORE = {"p50_ms_more": "p50", "p99_ms_more": "p99", "worst_ms_more": "worst", "wait_p99_ms_more": "wait"}
SOURCE = {"source_p99_ms": "p99", "source_max_ms": "max", "source_held_ms": "held"}


def text_of(case: Case, rows: dict[str, dict[str, float]]) -> str:
    """Return one case as a table."""

    def line(name: str, texts: dict[str, str], over: str, cores: str) -> str:
        own, more, source = ("".join(f"{texts[key]:>7}" for key in columns) for columns in (OWN, MORE, SOURCE))
        return f"  {name:14}{own}{over:>6}{cores:>7} |{more} |{source}"

    heads = (
        ("late, ms", 7 * len(OWN) + 13),
        ("more than busy beside", 7 * len(MORE)),
        ("at the source", 7 * len(SOURCE)),
    )
    lines = [
        f"{case.label}: ticks of the loop; over: later than {LATE_S * 1e3:g} ms",
        f"  {'':14}{' |'.join(f'{text:^{width}}' for text, width in heads)}",
        line("", OWN | MORE | SOURCE, "over", "cores"),
    ]
    for name, row in rows.items():
        texts = {key: f"{row[key]:.2f}" if key in row else "" for key in (*OWN, *MORE, *SOURCE)}
        lines.append(line(name, texts, f"{row['over']:.0f}", f"{row['cores']:.2f}"))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--sizes", type=lambda text: tuple(map(int, text.split(","))), help="page sizes in bytes")
    parser.add_argument("--pages", type=int, help="pages of a transfer, instead of each case's own number")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    ways = tuple(name for name in WAYS if name != "kvbus")  # what it picks is one of the others
    document: dict[str, object] = {"benchmark": "loop_lag", "load_before": os.getloadavg()[0]}
    told = []
    for case in CASES:
        if options.sizes and case.page_bytes not in options.sizes:
            continue
        chosen = Case(case.page_bytes, options.pages or case.count, contiguous=case.contiguous)
        with stage_for([chosen], ()) as stage:
            kinds = asyncio.run(measured(stage, chosen, ways, options.rounds))
        rows = {name: kind.row() for name, kind in kinds.items()}
        compared(rows, ways)
        told.append({"label": chosen.label, "rows": rows})
        if not options.json:
            print(text_of(chosen, rows), flush=True)
    if options.json:
        sys.stdout.write(json.dumps(document | {"load_after": os.getloadavg()[0], "cases": told}) + "\n")


if __name__ == "__main__":
    main()
