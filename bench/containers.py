"""Bytes a second between two containers: our transports, and a plain TCP socket between the same two, in turns.

    python bench/containers.py [--rounds 5] [--json]

Each transport gets two containers of its own (compose/partition.yaml with large pages and no limit). A round is a
transfer of 126 MB, counted from its first order to its last byte, and the same number of bytes through a plain
socket, the two in turns, so that a noisy neighbour disturbs both. Printed are medians, and the median of the ratios
within each round. Without an engine to run containers it says so and ends with status 0. `tests.cluster` builds the
image.
"""

import argparse
import json
import random
import statistics
import string
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.cluster.stack import Stack, StackError, engine_trouble, run, stack
from tests.waiting import wait_until

PLAIN = Path(__file__).with_name("plain_socket.py")
BLOCKS = 60
BLOCK_TOKENS = 32
PAGE_BYTES = 2 << 20
PORT = 7_070
READY_S = 120.0
TRANSFER_S = 120.0
ASKED = 0.9
"""Of a plain socket: what a transport should reach between containers."""


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
    length, program = BLOCKS * PAGE_BYTES, PLAIN.read_text(encoding="utf-8")
    inside = ["docker", "exec", "--interactive"]
    line = [*inside, one.container("a"), "python", "-", "serve", str(PORT), str(length)]
    with PLAIN.open() as program_file, subprocess.Popen(line, stdin=program_file) as server:
        reader = [*inside, one.container("b"), "python", "-", "read", one.address("a"), str(PORT), str(length)]
        took_s = float(run(reader, TRANSFER_S, given=program))
        server.wait(TRANSFER_S)
    return length / took_s


def measure(overlay: str, rounds: int) -> dict[str, float]:
    """Measure one transport and the plain socket beside it."""
    with stack("partition", overlay) as one:
        for service in ("a", "b"):
            wait_until(lambda name=service: one.health(name) == "healthy", READY_S, f"{service} is healthy")  # type: ignore[misc]
        transfer(one)  # connects
        pairs = [(transfer(one), plain(one)) for _ in range(rounds)]
    ours, theirs = zip(*pairs, strict=True)
    ratios = [our / their for our, their in pairs]
    return {
        "ours_bytes_s": statistics.median(ours),
        "plain_bytes_s": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
    }


def main() -> int:
    """Measure all, and say which of them reaches what is asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if trouble := engine_trouble():
        print(f"containers: SKIPPED, {trouble}", file=sys.stderr)
        return 0
    try:
        found = {name: measure(f"bytes-{name}", options.rounds) for name in ("ucx", "socket")}
    except StackError as error:
        print(f"containers: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(found))
        return 0
    for name, row in found.items():
        print(
            f"{name:<7} {row['ours_bytes_s'] / 1e6:7.0f} MB/s, a plain socket {row['plain_bytes_s'] / 1e6:7.0f} MB/s: "
            f"{row['ratio']:.2f} ({row['ratio_least']:.2f} … {row['ratio_most']:.2f}), "
            f"{'at least' if row['ratio'] >= ASKED else 'BELOW'} {ASKED}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
