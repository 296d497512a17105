"""What control costs: whole transfers that move nothing, facts on their way to whoever follows, an idle instance.

One broker, a requester (this process), a source and a destination, each a process with a toy engine; beside them the
raw client (nats-py) with the same hops on the same broker, in turns, so that a noisy neighbour disturbs both. `held`
transfers find all blocks at the destination; `leased` ones lease, ask, read one page of 1 KiB, settle and return. The
raw client asks its source each time, and awaits that its fact is stored before it tells the result: a held transfer
does neither, so only the leased one goes the same way.
Prints medians, the 99th percentile, the spread over the rounds (highest less lowest median), and ratios within each
round. `--json` prints one document.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
from controls import asking as product
from controls.facts import FactsBench, cpu_us
from controls.idle import idle
from controls.raw import RawRequester, make_streams
from controls.report import document, text
from controls.town import Town, prompt, town

from kvbus.bus import NatsBus
from kvbus.publisher import Publisher

PROMPTS = 192
IN_FLIGHT = (1, 16, 64)
SINGLES = 40
"""Transfers of one round, one after the other."""
HOLD_AT_ONCE = 32
POOL = 4 * PROMPTS
"""Pages: the pool keeps room for the longest prompt, and a part of it for its own engine."""
Call = Callable[[], Awaitable[int]]


async def serial(call: Call, count: int) -> list[int]:
    """Make calls one after the other; return what each took, in nanoseconds."""
    return [await call() for _ in range(count)]


async def at_once(call: Call, count: int, in_flight: int) -> float:
    """Make so many calls, so many at a time; return how many came to their end in a second."""
    left = iter(range(count))

    async def one_after_the_other() -> None:
        for _ in left:
            await call()

    began = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))
    return count / (time.perf_counter() - began)


class Bench:
    """All contestants over one broker, and what was taken of them, round by round."""

    def __init__(self, running: Town, asking: product.Asking, requester: RawRequester, facts: FactsBench) -> None:
        self.town, self.asking, self.raw, self.facts = running, asking, requester, facts
        self.taken: dict[str, list[Any]] = {}
        self._next = 0

    def add(self, name: str, value: object) -> None:
        """Keep what one round gave."""
        self.taken.setdefault(name, []).append(value)

    def _prompt(self) -> list[int]:
        self._next += 1
        return prompt(self._next % PROMPTS)

    def calls(self, moved: int) -> tuple[Call, Call]:
        """Return one transfer by the queue and one by request-reply."""
        return lambda: self.asking.durable(self._prompt(), moved), lambda: self.asking.urgent(self._prompt(), moved)

    async def latencies(self) -> None:
        """One round of transfers one after the other, of all contestants."""
        await self._hold()
        held, held_urgent = self.calls(0)
        self.asking.accepted_ns.clear()
        self.raw.accepted_ns.clear()
        calls = {
            "held durable": held,
            "raw durable": self.raw.durable,
            "held urgent": held_urgent,
            "raw urgent": self.raw.urgent,
        }
        for name, call in calls.items():
            self.add(name, await serial(call, SINGLES))
        self.add("accept", list(self.asking.accepted_ns))
        self.add("raw accept", list(self.raw.accepted_ns))
        for name, call in zip(("leased durable", "leased urgent"), self.calls(1), strict=True):
            product.evict(self.town, PROMPTS)
            self.add(name, await serial(call, SINGLES))

    async def rates(self, count: int) -> None:
        """One round of many at once, of all contestants."""
        for in_flight in IN_FLIGHT:
            some = count if in_flight > 1 else count // 4
            await self._hold()
            await self._rate("held", self.calls(0)[0], some, in_flight)
            await self._rate("raw", self.raw.durable, some, in_flight)
            product.evict(self.town, PROMPTS)
            await self._rate("leased", self.calls(1)[0], min(some, PROMPTS), in_flight)

    async def events(self) -> None:
        """One round of facts, of both contestants."""
        async with self.facts.following():
            self.add("fact", await self.facts.product_latency())
            self.add("raw fact", await self.facts.raw_latency())
            self.add("facts per s", await self.facts.product_rate())
            self.add("raw facts per s", await self.facts.raw_rate())

    async def _hold(self) -> None:
        """Bring what the destination does not hold."""
        with self.town.client(product.DESTINATION) as client:
            missing = [number for number in range(PROMPTS) if not client.held(prompt(number))]
        for first in range(0, len(missing), HOLD_AT_ONCE):
            some = missing[first : first + HOLD_AT_ONCE]
            await asyncio.gather(*(self.asking.durable(prompt(number), 1) for number in some))

    async def _rate(self, name: str, call: Call, count: int, in_flight: int) -> None:
        before = self.town.cpu()
        self.add(f"{name} {in_flight}", await at_once(call, count, in_flight))
        after = self.town.cpu()
        self.add(f"cpu {name} {in_flight}", {who: 1e3 * (after[who] - before[who]) / count for who in after})


async def measure(rounds: int, count: int, idle_s: float) -> dict[str, Any]:
    """Run all rounds; return the document."""
    with tempfile.TemporaryDirectory(prefix="kvctl-") as folder:
        async with town(Path(folder)) as (running, bus):
            await running.start(bus, product.DESTINATION, allow=[product.SOURCE], pages=POOL, in_flight=256)
            resting = await idle(running, product.DESTINATION, idle_s)
            await running.start(bus, product.SOURCE, allow=[], pages=POOL, in_flight=4)
            product.store(running, PROMPTS)
            taken = await _rounds(running, bus, rounds, count)
    return document(taken, resting, cpu_us(), IN_FLIGHT)


async def _rounds(running: Town, bus: NatsBus, rounds: int, count: int) -> dict[str, list[Any]]:
    client, other = await nats.connect(running.url), await _connect(running, "bench-follower")
    recording = await _connect(running, "bench-recorder")
    async with Publisher(bus=bus, requester="requester-bench") as publisher:
        await make_streams(client)
        running.start_peers()
        asking, requester = product.Asking(bus, publisher), RawRequester(client)
        await asking.start()
        await requester.start()
        facts = await FactsBench.make(running, recording, other)
        recording_task = asyncio.ensure_future(facts.recorder.run())
        bench = Bench(running, asking, requester, facts)
        for number in range(rounds + 1):
            if number == 1:
                bench.taken.clear()  # the first round warms
            await bench.latencies()
            await bench.events()
            await bench.rates(count)
        recording_task.cancel()
        await asyncio.gather(recording_task, return_exceptions=True)
    for one in (facts, other, recording, client):
        await one.close()
    return bench.taken


async def _connect(running: Town, name: str) -> NatsBus:
    return await NatsBus.connect(running.broker.url, name=name, token=running.broker.token)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=400, help="transfers of one round, with many in flight")
    parser.add_argument(
        "--idle", type=float, default=24.0, metavar="SECONDS", help="how long to watch an idle instance"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that broker and workers end with it
    load = os.getloadavg()[0]
    result = asyncio.run(measure(options.rounds, options.count, options.idle)) | {"load_before": load}
    sys.stdout.write((json.dumps(result) if options.json else text(result)) + "\n")


if __name__ == "__main__":
    main()
