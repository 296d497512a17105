"""Finds a smaller run that breaks the same promise: fewer transfers, fewer instances, fewer kinds of faults.

Each try is a run of its own, so what is found is replayed like any other. Smaller is not monotone (what ten transfers
show, five and twenty may not), so this is a search with a bound, not a proof that nothing smaller exists.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvbus.testing.sim.jobs import Run, run_world
from kvbus.testing.sim.settings import KINDS, SimSettings
from kvbus.testing.sim.world import SimResult

BUDGET_S = 60.0
"""What a person waits for while a run of minutes is being explained."""
TRIES_MAX = 2_000
"""More than the budget has time for; it bounds a search whose tries take nothing."""
SEEDS = range(20)
"""Other seeds that are tried with less of one thing, once nothing else makes the run smaller."""


@dataclass(slots=True)
class Shrinker:
    """One search. `on_try` hears of each try, for a person who waits."""

    run: Run = run_world
    budget_s: float = BUDGET_S
    on_try: Callable[[int, SimSettings], object] = lambda _tries, _smallest: None
    tries: int = 0

    def smallest(self, first: SimResult) -> SimResult:
        """Return the smallest run found that breaks the promise that `first` broke; at worst `first` itself."""
        if first.violation is None:
            raise ValueError("a run that broke no promise cannot be shrunk")
        promise, ends_at, tried = first.violation.promise, time.perf_counter() + self.budget_s, {first.settings}
        best, candidates = first, smaller(first.settings)
        while (candidate := next(candidates, None)) is not None:
            if candidate in tried:
                continue
            if self.tries >= TRIES_MAX or time.perf_counter() > ends_at:
                break
            tried.add(candidate)
            self.tries += 1
            self.on_try(self.tries, best.settings)
            result = self.run(candidate)
            if result.violation is not None and result.violation.promise == promise:
                best, candidates = result, smaller(candidate)
        return best


def smaller(settings: SimSettings) -> Iterator[SimSettings]:
    """Yield smaller runs, those first that are the cheapest to try or take the most away."""
    kinds = kinds_of(settings)
    if kinds:
        yield replace(settings, only=())
    for transfers in _fewer(settings.transfers):
        yield replace(settings, transfers=transfers)
    for ranks in range(1, settings.ranks):
        yield replace(settings, ranks=ranks)
    for instances in range(2, settings.instances):
        yield replace(settings, instances=instances)
    for only in _fewer_kinds(kinds):
        yield replace(settings, only=only)
    for seed in SEEDS:
        if settings.transfers > 1:
            yield replace(settings, seed=seed, transfers=settings.transfers // 2)
        if settings.instances > 2:
            yield replace(settings, seed=seed, instances=2)
        if kinds:
            yield replace(settings, seed=seed, only=())


def kinds_of(settings: SimSettings) -> tuple[str, ...]:
    """Return the kinds of faults that a run may have."""
    rates = settings.weather
    return tuple(kind for kind in KINDS if getattr(rates, kind, 0) or getattr(rates, f"{kind}_s", 0))


def _fewer(transfers: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on, then what is a little less."""
    fewer = 1
    while fewer < transfers:
        yield fewer
        fewer *= 2
    yield from sorted({at for part in (8, 4, 2) if 0 < (at := transfers - transfers // part) < transfers})


def _fewer_kinds(kinds: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    middle = len(kinds) // 2
    if middle:
        yield kinds[:middle]
        yield kinds[middle:]
    for kind in kinds:
        yield tuple(other for other in kinds if other != kind)
