"""Feeds inputs to a target and counts what came of them; the first input that breaks the promise is kept."""

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from tests.fuzz.mutating import inputs
from tests.fuzz.targets import Target

CPU_MAX_S = 1.0
"""Processor time of one input: they are at most some hundred KB, and reading those takes milliseconds."""


@dataclass(slots=True)
class Count:
    """What came of a target's inputs: values, documented errors, and in words what else."""

    values: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        """All that was fed."""
        return self.values + self.refused + len(self.faults)


def feed(target: Target, data: bytes, count: Count) -> None:
    """Feed one input; a fault is what is neither a value nor a documented error, or takes too long."""
    began = time.thread_time()
    try:
        target.read(data)
    except target.allowed:
        count.refused += 1
    except Exception as error:  # noqa: BLE001 - what is caught here is what is looked for
        count.faults.append(f"{type(error).__name__}: {str(error)[:200]}, from {data.hex()[:2_000]}")
        return
    else:
        count.values += 1
    took_s = time.thread_time() - began
    if took_s > CPU_MAX_S:
        count.faults.append(f"took {took_s:.1f} s of processor time, {data.hex()[:2_000]}")


def run(
    all_targets: Iterable[Target], total: int, seed: int, on_progress: Callable[[int], None] = lambda _: None
) -> dict[str, Count]:
    """Feed about so many inputs in all, to each target as many; a target with a fault is left at its first."""
    chosen = tuple(all_targets)
    each = -(-total // len(chosen))
    counts: dict[str, Count] = {}
    for target in chosen:
        count = counts[target.name] = Count()
        made = (*target.seeds, *islice(inputs(target.seeds, random.Random(f"{seed} {target.name}")), each))
        for number, data in enumerate(made[:each], 1):
            feed(target, data, count)
            if count.faults:
                break
            if number % STEP == 0:
                on_progress(STEP)
        on_progress(each % STEP)
    return counts


STEP = 200
"""Inputs between two looks of the progress bar."""
