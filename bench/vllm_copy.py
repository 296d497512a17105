"""What copying between vLLM's blocks and pages costs: against one memcpy of the same bytes, side by side in one run.

The blocks are those of SmolLM2-135M in float32 with the packing of vLLM's CPU kernels: 31 scattered blocks in 30
layers, 930 runs of 48 KiB, into and out of 31 scattered pages of a pool, on one thread. The memcpy moves as many bytes
in one run between the same two kinds of memory, so that neither has an advantage by what the kernel mapped behind it.
Converting means transposing each head's keys. Prints medians and the median of the ratios within each turn; `--json`
prints one document.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from kvbus.engines.vllm_pages import CanonicalCopier, OpaqueCopier
from kvbus.pool.layout import PageLayout
from kvbus.pool.memory import PoolMemory

LAYERS, HEADS, TOKENS, HEAD_DIM = 30, 3, 32, 64
BLOCKS, MOVED = 182, 31
TURNS = 40
EPOCH = 1 << 32 | 1


def measure(turns: int) -> dict[str, list[float]]:
    """Return the seconds of each way, turn by turn."""
    canonical = PageLayout("kv", LAYERS, HEADS, TOKENS, HEAD_DIM, "float32", 0, 1, "ab")
    opaque = PageLayout("opaque", LAYERS, HEADS, TOKENS, 2 * HEAD_DIM, "float32", 0, 1, "ab")
    pool, other = PoolMemory.create(canonical, 2 * MOVED, EPOCH), PoolMemory.create(opaque, 2 * MOVED, EPOCH)
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, 2 * HEAD_DIM)
    storage = np.random.default_rng(31).random(shape, np.float32).view(np.uint8)
    caches = list(storage)
    converting, plain = CanonicalCopier(caches, canonical), OpaqueCopier(caches, opaque)
    pick = random.Random(31)
    blocks, pages = pick.sample(range(BLOCKS), MOVED), pick.sample(range(2 * MOVED), MOVED)
    length = MOVED * canonical.page_bytes
    outside = storage.reshape(-1)[:length]
    inside = pool.whole[pool.pages_offset : pool.pages_offset + length]
    ways: dict[str, Callable[[], None]] = {
        "memcpy out": lambda: np.copyto(inside, outside),
        "store": lambda: converting.store(pool, pages, blocks),
        "store opaque": lambda: plain.store(other, pages, blocks),
        "memcpy in": lambda: np.copyto(outside, inside),
        "load": lambda: converting.load(pool, pages, blocks),
        "load opaque": lambda: plain.load(other, pages, blocks),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if turn:  # the first touches memory that was never touched
                found[name].append(time.perf_counter() - started)
    return found


def summary(found: dict[str, list[float]]) -> dict[str, object]:
    """Return medians in milliseconds and the ratios to the memcpy of the same direction."""
    length = MOVED * LAYERS * 2 * HEADS * TOKENS * HEAD_DIM * 4
    document: dict[str, object] = {"bytes": length, "turns": len(found["store"])}
    document |= {f"{name} ms": round(statistics.median(each) * 1e3, 2) for name, each in found.items()}
    for name in ("store", "store opaque", "load", "load opaque"):
        base = found["memcpy out" if name.startswith("store") else "memcpy in"]
        ratios = sorted(took / copied for took, copied in zip(found[name], base, strict=True))
        quarter = len(ratios) // 4
        document[f"{name} ratio"] = round(statistics.median(ratios), 2)
        document[f"{name} ratio middle half"] = [round(ratios[quarter], 2), round(ratios[-1 - quarter], 2)]
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description="Copy cost between vLLM's blocks and pages.")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    document = summary(measure(given.turns))
    if given.json:
        print(json.dumps(document))
    else:
        for name, value in document.items():
            print(f"{name:>28}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
