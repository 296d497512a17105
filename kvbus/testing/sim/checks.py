"""The checks that notice a planted fault: the simulated world in several weathers, and the searches over single parts.

Each check takes a `Try` and returns the first broken promise, or None. A check is worth something only as long as it
finds nothing where no fault was planted; `kvbus.testing.sim.mutants` asks that of every try that noticed one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from kvbus.testing.sim.plants.plant import Plant
from kvbus.testing.sim.searches import agreement, council, deaths, fencing, holder, parts, rewriting
from kvbus.testing.sim.searches.found import Found
from kvbus.testing.sim.settings import FORGED, FRAIL, LINGERING, Rates, SimSettings
from kvbus.testing.sim.world import World

SEEDS = range(1, 13)
"""Seeds that are tried, in order, until one notices the fault: several times what any of them needs."""
TRANSFERS = 300
STEPS_MAX = 180_000
"""A world with a fault that keeps it from rest ends here: ten times the steps that so many transfers take."""

_ANY = SimSettings(seed=0, transfers=TRANSFERS, stop_at_step=STEPS_MAX)
_RANKS = replace(_ANY, transfers=TRANSFERS // 2, instances=3, ranks=3)
WORLDS: Mapping[str, SimSettings] = {
    "usual": _ANY,
    "frail": replace(_ANY, rates=FRAIL),
    "lingering": replace(_ANY, rates=LINGERING),
    "forged": replace(_ANY, rates=FORGED),
    "stalled": replace(_ANY, rates=Rates(slow_get=0.1, stalled_get=0.3)),
    "garbled": replace(_ANY, rates=Rates(lost=0.1, doubled=0.2, late=0.2, crash_s=0)),
    "failing": replace(_ANY, rates=Rates(slow_get=0.2, stalled_get=0.05, lender_failure_s=1.0)),
    "ranks": _RANKS,
    "frail ranks": replace(_RANKS, rates=Rates(slow_get=0.2, stalled_get=0.05, crash_s=0.7, partition_s=1.5)),
}
"""Simulated worlds by their weather; the usual one has the rates of its seed."""


@dataclass(frozen=True, slots=True)
class Try:
    """One run of one check: equal tries give equal runs."""

    check: str
    seed: int
    weather: str = ""


def run(one: Try) -> Found | None:
    """Run a check once; return the first broken promise."""
    return CHECKS[one.check](one)


def tries_for(plant: Plant) -> Iterator[Try]:
    """Yield the tries in which a fault is looked for, the likeliest first."""
    weathers = plant.weathers if plant.check == "world" else ("",)
    for seed, weather in product(SEEDS, weathers):
        yield Try(plant.check, seed, weather)


def _world(one: Try) -> Found | None:
    result = World(replace(WORLDS[one.weather], seed=one.seed)).run()
    if result.violation is not None:
        return Found(result.violation.text, result.violation.step)
    return Found(f"left over: {'; '.join(result.leaked)}", result.steps) if result.leaked else None


def _seeded(search: Callable[[int], Found | None]) -> Callable[[Try], Found | None]:
    return lambda one: search(one.seed)


CHECKS: Mapping[str, Callable[[Try], Found | None]] = {
    "world": _world,
    "agreement": _seeded(agreement.search),
    "council": _seeded(council.search),
    "holder": _seeded(holder.search),
    "rewriting": _seeded(rewriting.search),
    "fencing": _seeded(fencing.search),
    "deaths": _seeded(deaths.search),
    "lender": _seeded(parts.check_pool_lender),
    "lending backend": _seeded(parts.check_lending_backend),
}
