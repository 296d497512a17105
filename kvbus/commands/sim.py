"""`kvbus sim`: run whole instances in a simulated world, and hold every step against the promises."""

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvbus.commands.common import EXIT_FAILED, console, json_option, print_document
from kvbus.commands.holes import chosen as chosen_holes
from kvbus.commands.holes import list_holes, show_holes
from kvbus.testing.sim.batches import Sum, batches_of
from kvbus.testing.sim.holes.hole import Hole
from kvbus.testing.sim.jobs import cores, results
from kvbus.testing.sim.settings import KINDS, SimSettings
from kvbus.testing.sim.shrinking import BUDGET_S, Shrinker
from kvbus.testing.sim.trail import Step
from kvbus.testing.sim.world import SimResult

SEED_BITS = 32
BAR_AFTER_S = 2.0
"""A shorter run needs no bar."""
NOTHING = "nothing"


def _place(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    seed, _, step = value.partition(":")
    if not seed.isdecimal() or not step.isdecimal():
        raise click.BadParameter(f"{value!r} is not SEED:STEP, two whole numbers as a failed run prints them")
    return int(seed), int(step)


def _kinds(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    kinds = () if value == NOTHING else tuple(value.split(","))
    for kind in kinds:
        if kind not in KINDS:
            raise click.BadParameter(f"{kind!r} is no kind of fault; those are {', '.join(KINDS)}, or {NOTHING}")
    return kinds


@click.command()
@click.option("--transfers", type=click.IntRange(1), default=1_000, show_default=True, help="Transfers to admit.")
@click.option("--seed", type=click.IntRange(0), default=None, help="What decides the run; else a fresh one.")
@click.option("--instances", type=click.IntRange(2, 1_000), default=4, show_default=True, help="Instances to run.")
@click.option(
    "--ranks", type=click.IntRange(1, 64), default=1, show_default=True, help="Members of each instance, a rank each."
)
@click.option("--jobs", type=click.IntRange(1, 256), default=None, help="Processes; else the cores that it may use.")
@click.option(
    "--only", metavar="KINDS", callback=_kinds, help=f"Let only these faults happen: lost,crash or {NOTHING}."
)
@click.option(
    "--replay", metavar="SEED:STEP", callback=_place, help="Run that seed up to that step, and show what led there."
)
@click.option("--hole", metavar="RULE", callback=chosen_holes, help="Play the holes of a rule, as in P18; or of all.")
@click.option("--without", is_flag=True, help="With --hole: show what happens where that rule is taken out.")
@click.option("--holes", is_flag=True, help="List the holes.")
@json_option
def sim(
    transfers: int,
    seed: int | None,
    instances: int,
    ranks: int,
    jobs: int | None,
    only: tuple[str, ...] | None,
    replay: tuple[int, int] | None,
    hole: tuple[Hole, ...] | None,
    without: bool,
    holes: bool,
    as_json: bool,
) -> int:
    """Run transfers between simulated instances while everything goes wrong, and check each step.

    The instances' roles, ledger and pool are the real ones; bus, data plane, engines, processes and clocks are
    simulated, and the seed decides every turn. A big run is cut into batches with seeds of their own. The first broken
    promise ends the run with status 1: the seed and step of its batch, the events that led there, and the smallest run
    found that breaks it too.

    With --hole, play a scripted interleaving instead: the one against which a rule of the protocol stands.
    """
    logger = logging.getLogger("kvbus")
    click.get_current_context().call_on_close(partial(logger.setLevel, logger.level))
    logger.setLevel(logging.CRITICAL)  # refusals and retries, thousands of them, on purpose
    if holes:
        return list_holes()
    if hole:
        return show_holes(hole, without=without, as_json=as_json)
    chosen = replay[0] if replay else secrets.randbits(SEED_BITS) if seed is None else seed
    settings = SimSettings(seed=chosen, transfers=transfers, instances=instances, ranks=ranks, only=only)
    batches = (replace(settings, stop_at_step=replay[1]),) if replay else batches_of(settings)
    screen = console(as_json=as_json)
    if not as_json:
        click.echo(f"seed {chosen}, {transfers} transfers, {instances} instances, {ranks} ranks each")
    run = run_of(settings, batches, jobs or cores(), screen, shrinks=replay is None, quiet=as_json)
    if as_json:
        print_document(document(run))
    else:
        click.echo(report(run))
    return EXIT_FAILED if run.total.broken else 0


@dataclass(frozen=True, slots=True)
class Run:
    """What one call came to; `smallest` is the smallest run found that breaks the same promise."""

    settings: SimSettings
    batches: tuple[SimSettings, ...]
    jobs: int
    total: Sum
    wall_s: float
    smallest: SimResult | None

    @property
    def a_second(self) -> float:
        """Transfers admitted in a second."""
        return self.total.transfers["fired"] / max(self.wall_s, 1e-9)

    @property
    def stopped(self) -> SimResult | None:
        """The one world of a replay."""
        last = self.total.last
        return last if last is not None and last.settings.stop_at_step is not None else None


def run_of(
    settings: SimSettings,
    batches: tuple[SimSettings, ...],
    jobs: int,
    screen: Console,
    *,
    shrinks: bool,
    quiet: bool,
) -> Run:
    """Run batches, and shrink the one that broke a promise."""
    total, jobs, began = Sum(), min(jobs, len(batches)), time.perf_counter()
    with (
        _bar(screen, "transfers", settings.transfers, quiet=quiet) as (progress, bar),
        contextlib.closing(results(batches, jobs)) as found,
    ):
        for result in found:
            total.add(result)
            progress.update(bar, completed=total.transfers["fired"])
    wall_s = time.perf_counter() - began
    smallest = _smallest(total.broken, screen, quiet=quiet) if total.broken and shrinks else None
    return Run(settings, batches, jobs, total, wall_s, smallest)


def _smallest(broken: SimResult, screen: Console, *, quiet: bool) -> SimResult:
    with _bar(screen, "looking for a smaller run that breaks it", None, quiet=quiet) as (progress, bar):
        told = "a smaller run that breaks it, at most {:g} s: try {}, {} transfers so far"

        def tell(tries: int, best: SimSettings) -> None:
            progress.update(bar, description=told.format(BUDGET_S, tries, best.transfers))

        return Shrinker(budget_s=BUDGET_S, on_try=tell).smallest(broken)


@contextlib.contextmanager
def _bar(screen: Console, text: str, total: int | None, *, quiet: bool) -> Iterator[tuple[Progress, TaskID]]:
    """Show a bar for as long as the block runs, from its third second on; rich shows none without a terminal."""
    columns = (TextColumn("[dim]{task.description}[/]"), BarColumn(bar_width=24), TimeElapsedColumn())
    left = () if total is None else (TextColumn("{task.completed} of {task.total}"), TimeRemainingColumn())
    progress = Progress(*columns, *left, console=screen, transient=True, disable=quiet)
    later = threading.Timer(BAR_AFTER_S, progress.start)
    later.start()
    try:
        yield progress, progress.add_task(text, total=total)
    finally:
        later.cancel()
        later.join()
        progress.stop()


def document(run: Run) -> dict[str, object]:
    """Return a run as one JSON document; counts and faults are sums over its batches."""
    total, broken = run.total, run.total.broken
    found: dict[str, object] = {
        "seed": run.settings.seed,
        "instances": run.settings.instances,
        "ranks": run.settings.ranks,
        "jobs": run.jobs,
        "batches": len(run.batches),
        "transfers": total.transfers["fired"],
        "violations": int(broken is not None),
        "leaked": total.leaked,
        "steps": total.steps,
        "virtual_s": round(total.virtual_s, 3),
        "wall_s": round(run.wall_s, 3),
        "transfers_a_second": round(run.a_second, 1),
        "trail_hash": total.hash,
        "counts": dict(total.transfers),
        "faults": dict(total.faults),
    }
    if broken is not None:
        found["violation"] = {"batch": total.batches, **_violation(broken)}
        if run.smallest is not None:
            found["violation"] = {"batch": total.batches, **_violation(broken), "smallest": _violation(run.smallest)}
    if run.stopped is not None:
        found["trail"] = [str(step) for step in run.stopped.last]
    return found


def _violation(result: SimResult) -> dict[str, object]:
    violation = result.violation
    if violation is None:
        raise ValueError("no promise was broken in this run")
    return {
        "seed": result.settings.seed,
        "step": violation.step,
        "text": violation.text,
        "replay": replay_of(result),
        "trail": [str(step) for step in violation.trail],
    }


def report(run: Run) -> str:
    """Return a run in words."""
    total = run.total
    counts, broken = total.transfers, total.broken
    wrong = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in total.faults.items())
    ends = f"{counts['settled']} settled, {counts['failed']} failed, {counts['lost']} died with their member"
    parts = f"{len(run.batches)} batches, {run.jobs} at a time" if len(run.batches) > 1 else "one batch"
    lines = [
        f"{counts['fired']} transfers admitted: {ends}",
        f"{counts['pages_moved']} pages moved, {counts['leases_returned']} leases returned",
        f"{parts}: {total.steps} steps, {total.virtual_s:.1f} virtual seconds",
        f"{run.wall_s:.1f} s: {run.a_second:.0f} transfers/s",
        f"what went wrong: {wrong}",
        f"trail hash {total.hash}",
    ]
    if broken is not None:
        lines += _broken(broken, run.smallest)
    elif run.stopped is not None:
        lines += ["", f"the last events up to step {run.stopped.steps}:", *_shown(run.stopped.last)]
    else:
        lines.append("no promise was broken, and nothing is left over")
    return "\n".join(lines)


def _broken(result: SimResult, smallest: SimResult | None) -> list[str]:
    if smallest is None or smallest is result:
        return ["", _headline(result), *_trail(result), replay_of(result)]
    found = ["", f"the smallest run found: {_headline(smallest)}", *_trail(smallest), replay_of(smallest)]
    return ["", _headline(result), replay_of(result), *found]


def _headline(result: SimResult) -> str:
    settings, violation = result.settings, result.violation
    step, text = (violation.step, violation.text) if violation else (result.steps, "nothing")
    return f"BROKEN by seed {settings.seed}, {settings.transfers} transfers, at step {step}: {text}"


def _trail(result: SimResult) -> list[str]:
    return _shown(result.violation.trail) if result.violation else []


def replay_of(result: SimResult) -> str:
    """Return the command that shows a violation again."""
    settings, step = result.settings, result.violation.step if result.violation else result.steps
    size = f"--transfers {settings.transfers} --instances {settings.instances} --ranks {settings.ranks}"
    only = "" if settings.only is None else f" --only {','.join(settings.only) or NOTHING}"
    return f"kvbus sim --replay {settings.seed}:{step} {size}{only}"


def _shown(trail: tuple[Step, ...]) -> list[str]:
    return [f"  {step}" for step in trail]
