"""Every hole, and how one is played: with its rule, which then holds, or without, which is then seen to break."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

from kvbus.testing.sim.holes import agreement, deaths, delivery, evidence, lending, logs, pages, several
from kvbus.testing.sim.holes.hole import Hole, HoleResult
from kvbus.testing.sim.holes.script import Script
from kvbus.testing.sim.holes.stage import Stage

_GROUPS = (pages, evidence, deaths, lending, agreement, several, logs, delivery)
HOLES: Final[Sequence[Hole]] = tuple(
    sorted((hole for group in _GROUPS for hole in group.HOLES), key=lambda hole: int(hole.rule[1:]))
)

ELSEWHERE: Final[Mapping[str, str]] = {
    "P19": "a real broker's own: what backoff would do to a consumer",
    "P23": "a real broker's own: exhausted deliveries are found by polling",
    "P24": "a real broker's own: caps per destination",
}
"""Rules whose holes no script here contains, and where they are."""


def play(hole: Hole, *, without: bool = False) -> HoleResult:
    """Play a hole's script to its end, or to the first broken promise; `without` takes its rule out."""
    with hole.without() if without else contextlib.nullcontext():
        stage = Stage(hole)
        stage.run(hole.script(Script(stage)))
    violation = stage.trail.violation
    found, loop = violation.text if violation else "", stage.loop
    return HoleResult(hole, found, loop.step, loop.time(), stage.trail.last(loop.step + 1))


def holes_of(rule: str) -> tuple[Hole, ...]:
    """Return the holes of a rule."""
    return tuple(hole for hole in HOLES if hole.rule == rule.upper())
