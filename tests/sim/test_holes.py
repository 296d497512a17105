"""Each hole of the protocol by name: with its rule a script holds, and without it the same script breaks."""

import contextlib
import json
import logging
import subprocess
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner, Result

from kvbus.commands import holes as commands
from kvbus.commands.sim import sim
from kvbus.testing.sim.holes import catalog
from kvbus.testing.sim.holes.catalog import ELSEWHERE, HOLES, holes_of, play
from kvbus.testing.sim.holes.hole import Hole, patched
from kvbus.testing.sim.holes.script import Script

RULES_MAX = 26
NAMED = [pytest.param(hole, id=hole.name) for hole in HOLES]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Refusals and retries, on purpose, are not worth a record each."""
    caplog.set_level(logging.CRITICAL, logger="kvbus")


@pytest.mark.parametrize("hole", NAMED)
def test_a_rule_holds_in_its_hole(hole: Hole) -> None:
    # P1, P2, P3, P4, P5, P6, P7, P8, P9, P10, P11, P12, P13, P14, P15, P16, P17, P18, P20, P21, P22, P25, P26
    result = play(hole)
    assert result.violation == "", "\n".join(map(str, result.trail))


@pytest.mark.parametrize("hole", NAMED)
def test_the_same_script_breaks_where_the_rule_is_taken_out(hole: Hole) -> None:
    result = play(hole, without=True)
    assert hole.bites in result.violation, "\n".join(map(str, result.trail))


@pytest.mark.parametrize("hole", HOLES[:3], ids=lambda hole: hole.name)
def test_a_script_takes_the_same_steps_each_time(hole: Hole) -> None:
    assert play(hole).trail == play(hole).trail


def test_what_is_patched_is_as_before_afterwards_also_where_the_block_raises() -> None:
    class Above:
        word = "above"

    class Below(Above):
        own = "own"

    def fail_while_patched() -> None:
        with patched([(Below, "word", "x"), (Below, "own", "y")]):
            assert (Below.word, Below.own) == ("x", "y")
            raise ValueError("in between")

    with pytest.raises(ValueError, match="in between"):
        fail_while_patched()
    assert (Below.word, Below.own) == ("above", "own")
    assert "word" not in vars(Below)


def test_every_rule_has_its_holes_here_or_says_where_they_are() -> None:
    here = {hole.rule for hole in HOLES}
    assert {f"P{number}" for number in range(1, RULES_MAX + 1)} == here | ELSEWHERE.keys()
    assert not here & ELSEWHERE.keys()


def test_the_command_prints_one_line_for_each_hole_and_ends_with_status_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    some = HOLES[::6]  # the tests above play all of them
    monkeypatch.setattr(commands, "HOLES", some)
    ran = _sim("--hole", "all")
    assert ran.return_value == 0, ran.stdout
    lines = ran.stdout.splitlines()
    assert len(lines) == len(some) + len(ELSEWHERE)
    for hole, line in zip(some, lines, strict=False):
        assert line.startswith(hole.rule)
        assert hole.title in line
        assert hole.held in line


def test_the_command_shows_one_rules_holes_step_by_step() -> None:
    ran = _sim("--hole", "p18")
    assert ran.return_value == 0
    for hole in holes_of("P18"):
        assert f"P18: {hole.title}" in ran.stdout
        assert hole.held in ran.stdout
    assert "lend_answered to its asker : lost" in ran.stdout


def test_the_command_shows_what_happens_without_a_rule() -> None:
    ran = _sim("--hole", "P5", "--without")
    assert ran.return_value == 0
    assert "VIOLATION access to T3 is said to have ended, and it is being read" in ran.stdout


def test_a_hole_that_does_not_bite_ends_with_status_one(monkeypatch: pytest.MonkeyPatch) -> None:
    toothless = [replace(hole, without=contextlib.nullcontext) for hole in holes_of("P5")]
    monkeypatch.setattr(catalog, "HOLES", toothless)
    ran = _sim("--hole", "P5")
    assert ran.return_value == 1
    assert "nothing was seen to break" in ran.stdout


def test_a_hole_that_was_not_reached_ends_with_status_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing_comes(script: Script) -> None:
        await script.until("the moon falls", lambda: False, 1.0)

    missed = [replace(hole, script=nothing_comes) for hole in holes_of("P5")]
    monkeypatch.setattr(catalog, "HOLES", missed)
    ran = _sim("--hole", "P5")
    assert ran.return_value == 1
    assert "not staged: " in ran.stdout
    assert "waited in vain until the moon falls" in ran.stdout


def test_the_holes_come_as_one_document() -> None:
    command = [sys.executable, "-m", "kvbus", "sim", "--hole", "P9", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert [(one["holds"], one["without"]["bites"]) for one in found["holes"]] == [(True, True)] * 2
    assert all(one["trail"] for one in found["holes"])


def test_the_holes_are_listed_by_name() -> None:
    lines = _sim("--holes").stdout.splitlines()
    assert len(lines) == len(HOLES) + len(ELSEWHERE)
    assert all(hole.title in line for hole, line in zip(HOLES, lines, strict=False))


def test_a_rule_whose_hole_is_elsewhere_is_refused_with_where_it_is() -> None:
    ran = CliRunner().invoke(sim, ["--hole", "P19"])
    assert ran.exit_code == 2
    assert "a real broker's own" in ran.output


def _sim(*arguments: str) -> Result:
    return CliRunner().invoke(sim, list(arguments), standalone_mode=False, catch_exceptions=False)
