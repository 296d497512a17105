"""How values are spread: counts by upper bound, so that whoever reads them learns of the slow ones as well.

The bounds are fixed, so spreads of several members can be added up, and one costs the same however much it counts.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""From a page out of mapped memory to a long prompt that is computed first; the default budget is within."""
BYTES: Final = tuple(4**power for power in range(8, 18))
"""64 KiB to 16 GiB, each four times the one before: a page of the toy, and a long prompt of a large model."""


class Spread:
    """Counts values of one kind by the first bound that they do not exceed; their sum beside."""

    def __init__(self, name: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def counters(self) -> dict[str, int | float | str]:
        """Return the counts by name, each without those of the bounds below, and the sum."""
        counts: dict[str, int | float | str] = {
            bucket_name(self.name, bound): count
            for bound, count in zip((*self.bounds, math.inf), self._counts, strict=True)
        }
        return counts | {sum_name(self.name): self.sum}


def bucket_name(name: str, bound: float) -> str:
    """Return the name of the counter of one bucket."""
    return f"{name}_le_{bound_text(bound)}"


def sum_name(name: str) -> str:
    """Return the name of the counter that holds the sum of all values."""
    return f"{name}_sum"


def bound_text(bound: float) -> str:
    """Return a bound as it stands in a name, and in a label of Prometheus."""
    return "+Inf" if math.isinf(bound) else f"{bound:.12g}"
