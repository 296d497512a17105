"""What `kvbus sim --hole` and `--holes` show: the protocol's holes, one by one, each with its rule and without."""

from collections.abc import Sequence

import click

from kvbus.commands.common import EXIT_FAILED, print_document
from kvbus.testing.sim.holes.catalog import ELSEWHERE, HOLES, holes_of, play
from kvbus.testing.sim.holes.hole import Hole, HoleResult, NotStagedError

ALL = "all"


def chosen(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[Hole, ...] | None:
    """Return the holes that an option names: a rule as in P18, or all."""
    if value is None:
        return None
    found = HOLES if value == ALL else holes_of(value)
    if not found:
        where = ELSEWHERE.get(value.upper())
        rules = ", ".join(dict.fromkeys(hole.rule for hole in HOLES))
        raise click.BadParameter(f"{value.upper()} is not here: {where}" if where else f"{value!r} is none of {rules}")
    return tuple(found)


def show_holes(holes: Sequence[Hole], *, without: bool, as_json: bool) -> int:
    """Play holes and print what came of them; a single rule's with every step."""
    rules = {hole.rule for hole in holes}
    played = [_Played(hole, steps=len(rules) == 1, without=without) for hole in holes]
    if as_json:
        document: dict[str, object] = {"holes": [one.document() for one in played]}
        print_document({**document, "elsewhere": ELSEWHERE} if len(rules) > 1 else document)
    else:
        for one in played:
            click.echo(one.text())
        for rule, where in ELSEWHERE.items() if len(rules) > 1 else ():
            click.echo(f"{rule:<4} {where}")
    return 0 if all(one.is_good for one in played) else EXIT_FAILED


def list_holes() -> int:
    """Print every hole by name."""
    for hole in HOLES:
        click.echo(f"{hole.rule:<4} {hole.title}")
    for rule, where in ELSEWHERE.items():
        click.echo(f"{rule:<4} {where}")
    return 0


class _Played:
    """A hole, played with its rule and without it."""

    def __init__(self, hole: Hole, *, steps: bool, without: bool) -> None:
        self._hole = hole
        self._steps = steps
        self._shows_without = without
        self._with = _played(hole, without=False)
        self._without = _played(hole, without=True)

    @property
    def is_good(self) -> bool:
        """Whether the rule held, and the script breaks without it."""
        return not self._with.violation and self._hole.bites in self._without.violation

    def text(self) -> str:
        """Return one line, or with the steps many."""
        held = self._with.violation or self._hole.held
        bites = self._without.violation.partition(";")[0] or "nothing was seen to break"
        if not self._steps:
            sign = "holds" if self.is_good else "BROKEN"
            title = f"{self._hole.rule:<4} {sign}  {self._hole.title}"
            return f"{title} | {held} | {self._with.steps} steps | without the rule: {bites}"
        shown, ends = (self._without, bites) if self._shows_without else (self._with, held)
        rule = f"{self._hole.rule}{', taken out' if self._shows_without else ''}: {self._hole.title}"
        last = [] if self._shows_without else [f"without the rule: {bites}"]
        return "\n".join([rule, *(f"  {step}" for step in shown.trail), ends, *last, ""])

    def document(self) -> dict[str, object]:
        """Return the same as one JSON document."""
        found: dict[str, object] = {
            "rule": self._hole.rule,
            "title": self._hole.title,
            "holds": not self._with.violation,
            "held": self._hole.held,
            "violation": self._with.violation,
            "steps": self._with.steps,
            "virtual_s": round(self._with.virtual_s, 3),
            "without": {
                "bites": self._hole.bites in self._without.violation,
                "violation": self._without.violation,
                "steps": self._without.steps,
            },
        }
        if self._steps:
            shown = self._without if self._shows_without else self._with
            found["trail"] = [str(step) for step in shown.trail]
        return found


def _played(hole: Hole, *, without: bool) -> HoleResult:
    try:
        return play(hole, without=without)
    except NotStagedError as error:
        return HoleResult(hole, f"not staged: {error}", 0, 0.0, ())
