"""Ways to run a batch that spawned processes can import: with a planted fault, with a raise, with a death."""

import os
import signal

from kvbus.testing.sim.jobs import run_world
from kvbus.testing.sim.plants import planted
from kvbus.testing.sim.settings import SimSettings
from kvbus.testing.sim.world import SimResult

FAULT = "rows that did not arrive are committed"
BROKEN_SEED = 2
LONG = 100_000


def with_fault(settings: SimSettings) -> SimResult:
    """Run with a fault of the ledger planted."""
    with planted(FAULT):
        return run_world(settings)


def with_fault_in_one_seed(settings: SimSettings) -> SimResult:
    """Run with a fault planted for one seed only."""
    return with_fault(settings) if settings.seed == BROKEN_SEED else run_world(settings)


def killed(settings: SimSettings) -> SimResult:
    """Die of a signal, as where memory is short; one seed lives."""
    if settings.seed != BROKEN_SEED:
        return run_world(settings)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process went on")


def raised(settings: SimSettings) -> SimResult:
    """Fail as a fault of the simulator itself would."""
    raise KeyError(f"seed {settings.seed}")
