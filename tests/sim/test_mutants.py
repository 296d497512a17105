"""Planted faults: each is noticed by a check that is clean without it, and one that nobody notices fails the run."""

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol

import pytest

from kvbus.pool.lease import PoolLease
from kvbus.testing.sim import checks, mutants
from kvbus.testing.sim.plants import PLANTS, planted
from kvbus.testing.sim.plants.plant import Change, Plant, plant
from kvbus.testing.sim.searches import agreement, council, fencing, holder, rewriting
from kvbus.testing.sim.searches.found import Found

RULES = {*(f"P{number}" for number in (*range(1, 14), *range(15, 19), 20, 21, 22, 26))}
"""What ledger, pool and roles carry of the protocol; P14, P19 and P23 to P25 are about what brokers do."""
QUICK = ("a settle is decided on a subset of ranks", "the after-read is compared with the first read")


class Searching(Protocol):
    """A module that has a search."""

    def search(self, seed: int, /) -> Found | None: ...


def changing(*changes: Change, check: str = "agreement") -> Plant:
    def make() -> Sequence[Change]:
        return changes

    return plant("a fault of this test", "P0", check=check)(make)


def test_quick_faults_are_caught_and_the_status_is_zero(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = {name: PLANTS[name] for name in QUICK}
    assert mutants.main([], chosen) == 0
    said = capsys.readouterr().out
    assert "2 of 2 caught" in said
    for name in QUICK:
        assert re.search(rf"^{name} .*seed \d+, step \d+ ", said, re.MULTILINE), said


def test_a_fault_that_nobody_notices_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    harmless = changing()
    assert mutants.main(["--json"], {harmless.name: harmless, QUICK[0]: PLANTS[QUICK[0]]}) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["planted"], found["caught"]) == (False, 2, 1)
    assert found["faults"][0]["missed"] == f"nobody noticed it in {len(checks.SEEDS)} tries"


def test_a_check_that_complains_of_sound_code_catches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks.CHECKS, "unsound", lambda _one: Found("always", 1))
    outcome = mutants.judge(changing(check="unsound"))
    assert not outcome.caught
    assert "complains of sound code" in outcome.missed


def test_a_fault_that_merely_crashes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = Found("i0/1: task run ended with AttributeError('no such thing')", 1)
    monkeypatch.setitem(checks.CHECKS, "crashing", lambda _one: crash)
    outcome = mutants.judge(changing(check="crashing"))
    assert not outcome.caught
    assert "planted badly" in outcome.missed


def test_a_fault_is_taken_out_again_also_after_an_error() -> None:
    before = dict(vars(PoolLease))
    with contextlib.suppress(ZeroDivisionError), planted("rows that did not arrive are committed"):
        assert vars(PoolLease)["mark_arrived"] is not before["mark_arrived"]
        raise ZeroDivisionError
    assert dict(vars(PoolLease)) == before


def test_one_fault_is_chosen_by_a_part_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["SUBSET of ranks", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{QUICK[0]}  (contract 3, R6, R7; agreement)"]


def test_a_name_that_fits_no_fault_is_refused_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["no such fault"]) == 2
    assert "--list names them" in capsys.readouterr().err


def test_every_rule_of_ledger_pool_and_roles_has_a_fault() -> None:
    named = {rule for one in PLANTS.values() for rule in re.findall(r"P\d+", one.rule)}
    assert named == RULES
    assert {one.check for one in PLANTS.values()} == set(checks.CHECKS)


@pytest.mark.parametrize("part", [agreement, council, fencing, holder, rewriting], ids=lambda part: part.__name__)
def test_a_search_finds_nothing_in_sound_code(part: Searching) -> None:
    # contract 1, 3, 5, 6, 26; P2, P5, P11, P12, P13, P15, P16, P17: each by faults that one of these notices
    for seed in range(1, 21):
        assert part.search(seed) is None, seed


@pytest.mark.slow
@pytest.mark.timeout(900)  # four minutes of one idle core; it takes every other core that there is
def test_every_planted_fault_is_caught() -> None:
    command = [sys.executable, "-m", "kvbus.testing.sim.mutants", "--json"]
    ran = subprocess.run(command, capture_output=True, check=False)
    found = json.loads(ran.stdout)
    missed = [(fault["name"], fault["missed"]) for fault in found["faults"] if not fault["caught"]]
    assert missed == []
    assert ran.returncode == 0
    assert found["planted"] == len(PLANTS) >= 36
