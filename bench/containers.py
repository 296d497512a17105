"""Bytes a second between two containers: the way that the planner takes, UCX over TCP, and a plain socket, in turns.

    python bench/containers.py [--rounds 7] [--json]

Each way gets two containers of its own (compose/partition.yaml with large pages and no limit), and all of them run at
once. A round is, for each way, a transfer of 60 pages of 2 MiB, counted from its first order to its last byte, and as
many pages through a plain socket between the same two containers right after it, from and to memory of the same kind;
the next round begins with the other way. So a noisy neighbour disturbs all. Printed are medians, and the median of
the ratios within each round. Without an engine to run containers it says so and ends with status 0. `tests.cluster`
builds the image.
"""

import argparse
import json
import random
import statistics
import string
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.stack import Stack, StackError, engine_trouble, run, stack
from tests.waiting import wait_until

PLAIN = Path(__file__).with_name("plain_socket.py")
WAYS = ("auto", "ucx")
"""Overlays of tests/cluster, without their first part."""
BLOCKS = 60
BLOCK_TOKENS = 32
PAGE_BYTES = 2 << 20
PORT = 7_070
READY_S = 120.0
TRANSFER_S = 120.0
ASKED = 0.9
"""Of a plain socket: what a transport should reach between containers."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one way came to: medians, and the ratios to the plain socket of the same round."""

    took: str
    ours_bytes_s: float
    plain_bytes_s: float
    ratio: float
    ratio_least: float
    ratio_most: float


def transfer(one: Stack) -> float:
    """Move a prompt that nobody has seen; return the bytes a second."""
    pick = random.SystemRandom()
    text = "".join(pick.choice(string.ascii_lowercase) for _ in range(BLOCKS * BLOCK_TOKENS + 3))
    told = one.kvbus("stage", "--from", "a", "--to", "b", "--budget", "60", text)
    outcome = told["outcome"]
    if outcome is None or outcome["outcome"] != "settled" or outcome["length_bytes"] != BLOCKS * PAGE_BYTES:
        raise SystemExit(f"a transfer ended as {told}: what was measured is of no use")
    return float(outcome["length_bytes"] / outcome["move_s"])


def plain(one: Stack) -> float:
    """Send as many bytes through a plain socket, from a to b; return the bytes a second."""
    pages, program = (str(BLOCKS), str(PAGE_BYTES)), PLAIN.read_text(encoding="utf-8")
    inside = ["docker", "exec", "--interactive"]
    line = [*inside, one.container("a"), "python", "-", "serve", str(PORT), *pages]
    with PLAIN.open() as program_file, subprocess.Popen(line, stdin=program_file) as server:
        reader = [*inside, one.container("b"), "python", "-", "read", one.address("a"), str(PORT), *pages]
        took_s = float(run(reader, TRANSFER_S, given=program))
        server.wait(TRANSFER_S)
    return BLOCKS * PAGE_BYTES / took_s


def measure(rounds: int) -> dict[str, Found]:
    """Measure all ways, each beside a plain socket, in turns."""
    pairs: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with ExitStack() as all_of_them:
        stacks = {way: all_of_them.enter_context(stack("partition", f"bytes-{way}")) for way in WAYS}
        for one in stacks.values():
            for service in ("a", "b"):
                healthy = partial(_is_healthy, one, service)
                wait_until(healthy, READY_S, f"{service} is healthy")
            transfer(one)  # connects
        for number in range(rounds):
            for way in WAYS if number % 2 else WAYS[::-1]:
                pairs[way].append((transfer(stacks[way]), plain(stacks[way])))
        return {way: _summed(_taken(stacks[way]) or way, pairs[way]) for way in WAYS}


def _is_healthy(one: Stack, service: str) -> bool:
    return one.health(service) == "healthy"


def _taken(one: Stack) -> str:
    """Return which transports carried the orders of the reader."""
    counters, sign = one.ask("b", "counters"), "ways_by_"
    return ", ".join(sorted(name.removeprefix(sign) for name, n in counters.items() if name.startswith(sign) and n))


def _summed(took: str, pairs: list[tuple[float, float]]) -> Found:
    ours, theirs = zip(*pairs, strict=True)
    ratios = [our / their for our, their in pairs]
    return Found(
        took, statistics.median(ours), statistics.median(theirs), statistics.median(ratios), min(ratios), max(ratios)
    )


def main() -> int:
    """Measure all, and say which of them reaches what is asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if trouble := engine_trouble():
        print(f"containers: SKIPPED, {trouble}", file=sys.stderr)
        return 0
    try:
        found = measure(options.rounds)
    except StackError as error:
        print(f"containers: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({way: asdict(row) for way, row in found.items()}))
        return 0
    for way, row in found.items():
        print(
            f"--transport {way} took {row.took}: {row.ours_bytes_s / 1e6:.0f} MB/s, a plain socket "
            f"{row.plain_bytes_s / 1e6:.0f} MB/s: {row.ratio:.2f} ({row.ratio_least:.2f} … {row.ratio_most:.2f}), "
            f"{'at least' if row.ratio >= ASKED else 'BELOW'} {ASKED}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
