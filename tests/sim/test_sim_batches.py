"""Big runs: batches in processes of their own, and the search for the smallest run that breaks a promise."""

import io
import json
import logging
from contextlib import closing
from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvbus.commands import sim as command
from kvbus.testing.sim import batches as planned
from kvbus.testing.sim import shrinking
from kvbus.testing.sim.batches import BATCH_TRANSFERS_MAX, Sum, batches_of, seed_of
from kvbus.testing.sim.jobs import BatchLostError, Run, results, run_world
from kvbus.testing.sim.plants import planted
from kvbus.testing.sim.settings import KINDS, SimSettings
from kvbus.testing.sim.shrinking import Shrinker, kinds_of
from kvbus.testing.sim.trail import Violation
from kvbus.testing.sim.world import SimResult, World
from tests.sim.batch_runs import BROKEN_SEED, FAULT, LONG, killed, raised, with_fault, with_fault_in_one_seed

TRANSFERS = 25
TRIES_MAX = 25


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Refusals and retries, thousands of them, are not worth a record each."""
    caplog.set_level(logging.CRITICAL, logger="kvbus")


def small(*seeds: int) -> tuple[SimSettings, ...]:
    return tuple(SimSettings(seed=seed, transfers=TRANSFERS) for seed in seeds)


def summed(batches: tuple[SimSettings, ...], jobs: int, run: Run = run_world) -> Sum:
    total = Sum()
    with closing(results(batches, jobs, run)) as found:
        for result in found:
            total.add(result)
    return total


def broken() -> SimResult:
    """A run of the planted fault, as it was found."""
    for seed in range(1, 9):
        result = with_fault(SimSettings(seed=seed, transfers=300))
        if result.violation is not None:
            return result
    pytest.fail("no seed shows the planted fault")


def test_batches_are_bounded_and_each_has_its_own_seed_and_mood() -> None:
    batches = batches_of(SimSettings(seed=1, transfers=1_000_000))
    assert sum(batch.transfers for batch in batches) == 1_000_000
    assert max(batch.transfers for batch in batches) <= BATCH_TRANSFERS_MAX
    assert len({batch.seed for batch in batches}) == len(batches)
    assert len({batch.weather for batch in batches}) > len(batches) // 2
    assert [batch.seed for batch in batches[:2]] == [1, seed_of(1, 1)]


def test_a_small_run_is_one_world_with_the_runs_own_seed() -> None:
    settings = SimSettings(seed=9, transfers=BATCH_TRANSFERS_MAX)
    assert batches_of(settings) == (settings,)


def test_results_are_the_same_for_any_number_of_jobs() -> None:
    batches = small(11, 12, 13)
    alone, together = summed(batches, 1), summed(batches, 2)
    assert together == replace(alone, last=together.last)
    assert together.last is not None
    assert alone.last is not None
    assert together.last.hash == alone.last.hash
    assert together.batches == len(batches)


def test_a_batch_that_breaks_a_promise_is_reported_with_its_own_seed_and_its_replay_breaks_it_again() -> None:
    batches = tuple(replace(batch, transfers=300) for batch in small(11, BROKEN_SEED, 12, 13))
    totals = [summed(batches, jobs, with_fault_in_one_seed) for jobs in (1, 2)]
    assert [total.hash for total in totals] == [totals[0].hash] * 2
    assert [total.batches for total in totals] == [2, 2]
    found = totals[1].broken
    assert found is not None
    assert found.violation is not None
    assert found.settings == batches[1]
    again = with_fault(replace(found.settings, stop_at_step=found.violation.step))
    assert again.violation == found.violation
    assert again.hash == found.hash


def test_a_batch_that_breaks_a_promise_ends_those_after_it() -> None:
    # Alone each of the long ones would take minutes, so this test ends in time only if they are ended.
    batches = (replace(small(BROKEN_SEED)[0], transfers=300), SimSettings(seed=11, transfers=LONG))
    total = summed(batches, 2, with_fault_in_one_seed)
    assert total.broken is not None
    assert total.batches == 1


def test_a_batch_whose_process_dies_is_an_error_that_says_which_and_how_to_run_it_alone() -> None:
    with pytest.raises(BatchLostError) as caught:
        summed(small(11, BROKEN_SEED, 12), 2, killed)
    assert "batch 2 of 3" in str(caught.value)
    assert "signal 9" in str(caught.value)
    assert f"kvbus sim --seed {BROKEN_SEED} --transfers {TRANSFERS}" in str(caught.value)


def test_a_batch_that_raises_is_an_error_with_the_place_where_it_did() -> None:
    with pytest.raises(BatchLostError, match=r"raised KeyError\('seed 11'\)") as caught:
        summed(small(11, 11), 2, raised)
    assert "batch_runs.py" in str(caught.value)


def test_only_the_kinds_of_faults_that_are_named_happen() -> None:
    result = World(SimSettings(seed=2, transfers=100, only=("crash", "lost"))).run()
    assert kinds_of(result.settings) == ("lost", "crash")
    assert result.violation is None
    assert result.faults["lost"]
    happened = {name for name, count in result.faults.items() if count}
    assert happened <= {"crashes", "lost", "messages", "starts", "cancels", "not_sent"}
    assert set(kinds_of(result.settings)) < set(KINDS)


def test_a_planted_fault_is_shrunk_to_a_smaller_run_that_breaks_the_same_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shrinking, "TRIES_MAX", TRIES_MAX)
    first, tries = broken(), list[int]()
    assert first.violation is not None
    shrinker = Shrinker(run=with_fault, on_try=lambda number, _best: tries.append(number))
    smallest = shrinker.smallest(first)
    assert smallest.violation is not None
    assert smallest.violation.promise == first.violation.promise
    assert smallest.settings.transfers < first.settings.transfers / 2
    assert tries == list(range(1, shrinker.tries + 1))


def test_a_run_that_breaks_another_promise_is_no_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrinking, "TRIES_MAX", TRIES_MAX)
    first = broken()
    assert first.violation is not None
    other = replace(first, violation=replace(first.violation, text="i0/1: T5 has two results"))
    shrinker = Shrinker(run=lambda settings: replace(other, settings=settings))
    assert shrinker.smallest(first) is first
    assert shrinker.tries == TRIES_MAX


def test_a_promise_is_known_again_under_other_names_and_numbers() -> None:
    texts = ("i0/1: p7 of T5 is FREE, not WRITING", "i3/12: p31 of T104 is FREE, not WRITING")
    promises = {Violation(step, 0.5, text, ()).promise for step, text in enumerate(texts)}
    assert promises == {"# of # is FREE, not WRITING"}


def test_a_search_without_time_ends_with_the_run_that_it_was_given() -> None:
    first = broken()
    assert Shrinker(run=with_fault, budget_s=0.0).smallest(first) is first


def test_the_command_prints_the_smallest_run_and_its_replay_reproduces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrinking, "TRIES_MAX", TRIES_MAX)
    seed = broken().settings.seed
    with planted(FAULT):
        ran = CliRunner().invoke(
            command.sim, ["--seed", str(seed), "--transfers", "300", "--json"], standalone_mode=False
        )
        assert ran.return_value == 1
        violation = json.loads(ran.stdout)["violation"]
        for told in (violation, violation["smallest"]):
            words = told["replay"].split()[2:]
            again = CliRunner().invoke(command.sim, [*words, "--json"], standalone_mode=False)
            found = json.loads(again.stdout)["violation"]
            assert (found["text"], found["step"], found["trail"]) == (told["text"], told["step"], told["trail"])
            assert "smallest" not in found


def test_a_broken_promise_is_told_to_a_person_with_two_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrinking, "TRIES_MAX", TRIES_MAX)
    seed = broken().settings.seed
    with planted(FAULT):
        ran = CliRunner().invoke(command.sim, ["--seed", str(seed), "--transfers", "300"], standalone_mode=False)
    assert ran.return_value == 1
    assert ran.stdout.count("kvbus sim --replay ") == 2
    assert f"BROKEN by seed {seed}, 300 transfers" in ran.stdout
    assert "the smallest run found: BROKEN by seed" in ran.stdout


def test_the_commands_document_sums_its_batches_whatever_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "BATCH_TRANSFERS_MAX", TRANSFERS)
    monkeypatch.setattr(planned, "BATCH_TRANSFERS_PER_INSTANCE", 1)
    monkeypatch.setattr(command, "BAR_AFTER_S", 0.0)
    documents = []
    for jobs in ("1", "2"):
        words = ["--transfers", str(2 * TRANSFERS), "--seed", "5", "--jobs", jobs, "--json"]
        ran = CliRunner().invoke(command.sim, words, standalone_mode=False)
        assert ran.return_value == 0
        assert ran.stderr == ""  # no bar where nobody looks
        found = json.loads(ran.stdout)
        assert found.pop("wall_s") > 0
        assert found.pop("transfers_a_second") > 0
        assert found.pop("jobs") == int(jobs)
        documents.append(found)
    assert documents[0] == documents[1]
    assert documents[0]["batches"] == 2
    assert documents[0]["transfers"] >= 2 * TRANSFERS
    assert (documents[0]["violations"], documents[0]["leaked"]) == (0, 0)


def test_a_person_who_waits_sees_how_far_a_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "BAR_AFTER_S", 0.0)
    settings = SimSettings(seed=5, transfers=2 * TRANSFERS)
    for is_terminal in (True, False):
        shown = io.StringIO()
        screen = Console(file=shown, force_terminal=is_terminal)
        run = command.run_of(settings, small(5, 6), 1, screen, shrinks=True, quiet=False)
        assert run.total.broken is None
        assert (f"of {2 * TRANSFERS}" in shown.getvalue()) == is_terminal


def test_a_kind_of_fault_that_does_not_exist_is_refused_with_those_that_do() -> None:
    ran = CliRunner().invoke(command.sim, ["--only", "lost,rain"])
    assert ran.exit_code == 2
    assert "'rain' is no kind of fault" in ran.stderr
    assert "clock_jump" in ran.stderr
