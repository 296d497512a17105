"""Instances with several members in the simulated world: they agree, whatever dies, and each check of that bites."""

import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvbus.ledger.agreement import Decision
from kvbus.ledger.shares import Acts, ShareBook
from kvbus.testing.sim.checks import WORLDS
from kvbus.testing.sim.plants import PLANTS
from kvbus.testing.sim.plants.plant import Change, Plant, plant
from kvbus.testing.sim.settings import Rates, SimSettings
from kvbus.testing.sim.world import SimResult, World

FRESH_SEED = secrets.randbits(32)
STORMY = Rates(
    slow_get=0.2, stalled_get=0.05, crash_s=2.0, partition_s=2.0, broker_restart_s=5.0, pause_s=4.0, store_lost=0.5
)
PLANT_SEEDS = range(1, 5)
"""Seeds of which more than one shows the faults that are planted here."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Refusals and retries, thousands of them, are not worth a record each."""
    caplog.set_level(logging.CRITICAL, logger="kvbus")


def told(result: SimResult) -> str:
    """The first broken promise with its trail, for the test's report."""
    violation = result.violation
    if violation is None:
        return f"seed {result.settings.seed}: left over: {result.leaked}"
    trail = "\n".join(str(step) for step in violation.trail)
    return f"seed {result.settings.seed} step {violation.step}: {violation.text}\n{trail}"


def run(settings: SimSettings) -> tuple[SimResult, Counter[str]]:
    """Run a world to its rest; return how it ended, and what its members saw of their agreement."""
    world = World(settings)
    result = world.run()
    seen: Counter[str] = Counter()
    for council in world.town.councils.runs.values():
        seen["terms_led"] += council.statistics.terms_led
        seen["decisions"] += council.statistics.decisions
        seen["reports"] += council.statistics.reports
    seen["shown"] = len(world.town.councils.shown)
    return result, seen


def require_clean(result: SimResult, transfers: int) -> None:
    assert result.violation is None, told(result)
    assert result.leaked == (), told(result)
    assert result.transfers["fired"] >= transfers


@pytest.mark.parametrize("seed", [1, FRESH_SEED], ids=["1", "fresh"])
def test_two_members_show_and_return_together_while_everything_goes_wrong(seed: int) -> None:
    # P10: the fault below that breaks it is noticed in such a world
    print(f"seed {seed}")  # noqa: T201 - a failure shows it
    result, seen = run(SimSettings(seed=seed, transfers=150, instances=3, ranks=2))
    require_clean(result, 150)
    assert seen["terms_led"] >= 3  # by each instance at least once
    assert seen["decisions"] > 150


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 8])
def test_more_members_agree_too_in_a_storm(ranks: int) -> None:
    result, seen = run(SimSettings(seed=FRESH_SEED, transfers=150, instances=2, ranks=ranks, rates=STORMY))
    print(f"seed {FRESH_SEED}")  # noqa: T201 - a failure shows it
    require_clean(result, 150)
    assert result.faults["crashes"] > 1
    assert seen["terms_led"] >= 2  # by each instance at least once


@pytest.mark.slow
def test_every_kind_of_fault_happens_to_members_that_agree() -> None:
    """Terms are led again, stores are lost with the broker, members die and are cut off."""
    faults: Counter[str] = Counter()
    all_seen: Counter[str] = Counter()
    for seed in range(1, 7):
        result, seen = run(SimSettings(seed=seed, transfers=150, instances=3, ranks=2, rates=STORMY))
        require_clean(result, 150)
        faults.update(result.faults)
        all_seen.update(seen)
    for kind in ("crashes", "stops", "partitions", "broker_restarts", "broker_restarts_without_store", "pauses"):
        assert faults[kind] > 0, kind
    assert all_seen["terms_led"] > 6 * 3 * 2  # each instance more than twice
    assert all_seen["shown"] > 10
    assert all_seen["decisions"] > 6 * 150


def _keeps_what_is_void() -> Sequence[Change]:
    end = ShareBook._end

    def kept(self: ShareBook, decision: Decision) -> Acts:
        acts = end(self, decision)
        acts.give_up = ()
        return acts

    return [(ShareBook, "_end", kept)]


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (PLANTS["pages are shown before every member has promised"], "is shown, and at"),
        (plant("a void is applied without giving up", "P10")(_keeps_what_is_void), "leases are held"),
    ],
    ids=["shown early", "void kept"],
)
def test_a_planted_fault_is_noticed(fault: Plant, seen: str) -> None:
    # P10
    with fault.planted():
        runs = (World(replace(WORLDS["ranks"], seed=seed)).run() for seed in PLANT_SEEDS)
        found = next((result.violation for result in runs if result.violation is not None), None)
    assert found is not None, f"nobody noticed that {fault.name}"
    assert seen in found.text
