"""What decides a run: the seed, the size, and how often things go wrong."""

import random
from dataclasses import dataclass, fields, replace
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Rates:
    """Chances per event, and mean pauses between faults in virtual seconds; 0 as a pause means never."""

    lost: float = 0.01
    doubled: float = 0.01
    late: float = 0.02
    """Chance that a message takes up to two seconds."""
    rejected: float = 0.005
    uncertain: float = 0.0005
    slow_get: float = 0.02
    stalled_get: float = 0.003
    result_first: float = 0.2
    """Chance that a backend tells the result before the evidence."""
    partition_s: float = 6.0
    broker_restart_s: float = 20.0
    crash_s: float = 3.0
    engine_death_s: float = 8.0
    pause_s: float = 6.0
    clock_jump_s: float = 10.0
    lender_failure_s: float = 15.0
    store_lost: float = 0.3
    """Chance that a broker comes back without its store."""
    graceful: float = 0.2
    """Chance that a member that goes is told to, rather than killed."""
    linger: float = 0.0
    """Chance that a killed process is not gone at once: a thread of it still copies, though its successor starts."""
    forged_s: float = 0.0
    """Pause between words that a stranger sends in a reader's name; it knows everything but nonces."""


FRAIL = Rates(
    slow_get=0.3,
    stalled_get=0.1,
    crash_s=0.7,
    graceful=0,
    partition_s=0,
    broker_restart_s=0,
    engine_death_s=0,
    pause_s=0,
    clock_jump_s=0,
    lender_failure_s=0,
)
"""Members die and come back while reads of their last lives are under way; little else goes wrong."""
FRAIL_SHARE = 0.15
LINGERING = replace(FRAIL, linger=0.7)
"""As `FRAIL`, and most of those that die go on reading for a while after their successor is there."""
FORGED = Rates(slow_get=0.3, forged_s=0.05)
"""Somebody says all the time, in the name of readers that read slowly, that their access has ended."""


@lru_cache(maxsize=64)  # a run asks again at each start and each death; a test may have several runs in turn
def mood(seed: int) -> Rates:
    """Return the rates of a seed: each kind of fault is rarer, usual, or much more frequent in one run than in others.

    Some failures need many of one fault and few of another, which a fixed mixture would hardly ever bring.
    """
    draw, usual = random.Random(f"{seed}:mood"), Rates()
    if draw.random() < FRAIL_SHARE:
        return FRAIL
    changed: dict[str, float] = {}
    for one in fields(Rates):
        factor, value = draw.choice((0.2, 1.0, 1.0, 5.0)), float(getattr(usual, one.name))
        changed[one.name] = value / factor if one.name.endswith("_s") else min(0.8, value * factor)
    return Rates(**changed)


CALM = Rates(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""Nothing goes wrong."""


KINDS = tuple(one.name.removesuffix("_s") for one in fields(Rates))
"""What can go wrong, by the names that `only` takes."""


@dataclass(frozen=True, slots=True)
class SimSettings:
    """One run; equal settings give equal runs, event by event."""

    seed: int
    transfers: int
    instances: int = 4
    ranks: int = 1
    """Members of each instance, one rank each."""
    pages: int = 40
    block_tokens: int = 4
    blocks_max: int = 8
    inflight_max: int = 6
    documents: int = 40
    requests_a_second: float = 30.0
    """Per instance, in virtual seconds."""
    rates: Rates | None = None
    """How often things go wrong; by default as the seed has it."""
    only: tuple[str, ...] | None = None
    """The kinds of faults that may happen, at the rates that hold for them anyway; by default all."""
    stop_at_step: int | None = None
    flips: float = 0.0
    """Chance that half a page lands with a bit changed. With any, members compare digests; without, they make none, so
    that digests hide no fault of the rules that must hold without them."""

    @property
    def weather(self) -> Rates:
        """The rates that hold."""
        rates, only = self.rates if self.rates is not None else mood(self.seed), self.only
        if only is None:
            return rates
        return replace(rates, **{one.name: 0.0 for one in fields(Rates) if one.name.removesuffix("_s") not in only})
