"""A big run as batches: worlds of a bounded size, each with a seed and so a mood of its own, summed in their order.

One world for all would have one mood for all, would be replayed from its beginning, and could use one core only.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field, replace

from kvbus.testing.sim.settings import SimSettings
from kvbus.testing.sim.world import SimResult

BATCH_TRANSFERS_MAX = 2_500
"""Some seconds of one core. At 300 a tenth of the time goes into starting and coming to rest, at 1,000 a thirtieth;
above this, moods vary less, a replay takes longer, and the batches that end last keep one core busy alone."""
BATCH_TRANSFERS_PER_INSTANCE = 25
"""A batch is larger where many instances have to start for it."""
_SEED_BYTES = 4


def batches_of(settings: SimSettings) -> tuple[SimSettings, ...]:
    """Cut a run into batches of nearly equal size; the first has the run's own seed, so a small run is one world."""
    size = max(BATCH_TRANSFERS_MAX, BATCH_TRANSFERS_PER_INSTANCE * settings.instances)
    count = -(-settings.transfers // size)
    least, more = divmod(settings.transfers, count)
    return tuple(
        replace(settings, seed=seed_of(settings.seed, number), transfers=least + (number < more))
        for number in range(count)
    )


def seed_of(seed: int, number: int) -> int:
    """Return the seed of a run's batch."""
    if number == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=_SEED_BYTES).digest(), "big")


@dataclass(slots=True)
class Sum:
    """What the batches of a run came to, up to the first that broke a promise."""

    batches: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    leaked: int = 0
    transfers: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    last: SimResult | None = None
    """The newest batch; where a promise was broken, the one that broke it."""
    _hashes: list[str] = field(default_factory=list)

    def add(self, result: SimResult) -> None:
        """Add the next batch."""
        self.batches += 1
        self.steps += result.steps
        self.virtual_s += result.virtual_s
        self.leaked += len(result.leaked)
        self.transfers.update(result.transfers)
        self.faults.update(result.faults)
        self._hashes.append(result.hash)
        self.last = result

    @property
    def broken(self) -> SimResult | None:
        """The batch that broke a promise, if one did."""
        return self.last if self.last is not None and self.last.violation is not None else None

    @property
    def hash(self) -> str:
        """Sixteen hex characters over the hashes of all batches, in order."""
        return hashlib.blake2b("".join(self._hashes).encode(), digest_size=8).hexdigest()
