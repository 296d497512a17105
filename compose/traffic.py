# noqa: INP001 - a program of the stories
"""Steady traffic: asks for transfers between instances, so many a second, and counts how each of them ends.

    python traffic.py --pairs a:b,b:a --rate 2 --blocks 24 --ready /run/kvbus/asks

A line on stdout for each end; on SIGTERM it asks for nothing more, awaits what runs, and prints one document with the
counts, the failures, and some of the prompts that settled. Exit status 1 where a request failed or was lost. Once it
asks, the file `--ready` is there, for a health check.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from kvbus.errors import KvbusError
from kvbus.publisher import Publisher

BLOCK_TOKENS = 32
"""Of the toy engine: a token is a letter."""
PATIENCE_S = 60.0
"""For one request, with all its repeats: an instance that is restarted is back within seconds."""
FAILURES_KEPT = 100
KEPT = 6
"""Prompts that settled last, for whoever compares answers."""
RUNNING_MAX = 256
"""Requests at a time; more are not asked for, since answers come too slowly then."""


@dataclass(slots=True)
class Counts:
    """What became of the requests; `repeats` are tries beyond the first."""

    asked: int = 0
    took_s: float = 0.0
    settled: int = 0
    repeats: int = 0
    failed: int = 0
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=FAILURES_KEPT))
    skipped: int = 0
    sample: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=KEPT))

    def fail(self, how: str) -> None:
        """Count one that did not settle."""
        self.failed += 1
        self.failures.append(how)

    def document(self) -> dict[str, object]:
        """Return all of it for programs."""
        return {
            "asked": self.asked,
            "took_s": round(self.took_s, 1),
            "settled": self.settled,
            "repeats": self.repeats,
            "failed": self.failed,
            "failures": list(self.failures),
            "skipped": self.skipped,
            "sample": list(self.sample),
        }


def prompt(pick: random.Random, blocks: int) -> str:
    """Return a text that nobody asked about before."""
    return "".join(pick.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(blocks * BLOCK_TOKENS + 3))


async def one(publisher: Publisher, pair: tuple[str, str], text: str, patience_s: float, counts: Counts) -> None:
    """Ask for one transfer, and again where a restart, a drain or load has refused it; count how it ended."""
    source, destination = pair
    try:
        staged = await publisher.stage(source=source, destination=destination, prompt=text, patience_s=patience_s)
    except KvbusError as error:
        counts.fail(f"{source} to {destination}: {error}")
        return
    counts.repeats += staged.tries - 1
    outcome = staged.outcome
    why = f"{staged.verdict.verdict} {staged.verdict.reason}"
    told = f"{outcome.outcome} {outcome.failure or ''} {outcome.reason}" if outcome else why
    if staged.settled:
        counts.settled += 1
        counts.sample.append((destination, text))
    else:
        counts.fail(f"{source} to {destination}: {told}")
    sys.stdout.write(f"{source} to {destination}: {told}, asked {staged.tries} times\n")
    sys.stdout.flush()


async def traffic(options: argparse.Namespace) -> Counts:
    """Ask until told to stop, then await what runs."""
    stop, counts, running = asyncio.Event(), Counts(), set[asyncio.Task[None]]()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    pick = random.SystemRandom()
    pairs = itertools.cycle(pair.split(":") for pair in options.pairs.split(","))
    async with Publisher(os.environ.get("KVBUS_NATS_URL"), requester=options.name or None) as publisher:
        began = time.monotonic()
        if options.ready:
            options.ready.touch()
        while not stop.is_set():
            source, destination = next(pairs)
            if len(running) < RUNNING_MAX:
                counts.asked += 1
                text = prompt(pick, options.blocks)
                task = asyncio.create_task(one(publisher, (source, destination), text, options.patience, counts))
                running.add(task)
                task.add_done_callback(running.discard)
            else:
                counts.skipped += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1 / options.rate):
                    await stop.wait()
        counts.took_s = time.monotonic() - began
        await asyncio.gather(*running, return_exceptions=True)  # what is not counted settled was lost
    return counts


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", required=True, metavar="A:B,B:A", help="source and destination, in turn")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--blocks", type=int, default=24, help="whole blocks of each prompt")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds for a request and its repeats")
    parser.add_argument("--name", default="", help="the requester's name")
    parser.add_argument("--ready", type=Path, metavar="FILE", help="made once it asks")
    counts = asyncio.run(traffic(parser.parse_args()))
    sys.stdout.write(json.dumps(counts.document()) + "\n")
    return 0 if counts.settled == counts.asked else 1


if __name__ == "__main__":
    sys.exit(main())
