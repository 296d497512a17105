"""`kvbus sim`: run whole instances in a simulated world, and hold every step against the promises."""

import logging
import secrets

import click

from kvbus.commands.common import EXIT_FAILED, json_option, print_document
from kvbus.testing.sim.settings import SimSettings
from kvbus.testing.sim.trail import Step
from kvbus.testing.sim.world import SimResult, World

SEED_BITS = 32


def _place(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[int, int] | None:
    if value is None:
        return None
    seed, _, step = value.partition(":")
    if not seed.isdecimal() or not step.isdecimal():
        raise click.BadParameter(f"{value!r} is not SEED:STEP, two whole numbers as a failed run prints them")
    return int(seed), int(step)


@click.command()
@click.option("--transfers", type=click.IntRange(1), default=1_000, show_default=True, help="Transfers to admit.")
@click.option("--seed", type=click.IntRange(0), default=None, help="What decides the run; else a fresh one.")
@click.option(
    "--instances", type=click.IntRange(2, 1_000), default=4, show_default=True, help="Instances, one member each."
)
@click.option(
    "--replay", metavar="SEED:STEP", callback=_place, help="Run that seed up to that step, and show what led there."
)
@json_option
def sim(transfers: int, seed: int | None, instances: int, replay: tuple[int, int] | None, as_json: bool) -> int:
    """Run transfers between simulated instances while everything goes wrong, and check each step.

    The instances' roles, ledger and pool are the real ones; bus, data plane, engines, processes and clocks are
    simulated, and the seed decides every turn. The first broken promise ends the run with status 1: its seed, its step,
    and the events that led there.
    """
    logging.getLogger("kvbus").setLevel(logging.CRITICAL)  # refusals and retries, thousands of them, on purpose
    chosen = replay[0] if replay else secrets.randbits(SEED_BITS) if seed is None else seed
    stop = replay[1] if replay else None
    settings = SimSettings(seed=chosen, transfers=transfers, instances=instances, stop_at_step=stop)
    if not as_json:
        click.echo(f"seed {chosen}, {transfers} transfers, {instances} instances")
    result = World(settings).run()
    if as_json:
        print_document(document(result))
    else:
        click.echo(report(result))
    return EXIT_FAILED if result.violation else 0


def document(result: SimResult) -> dict[str, object]:
    """Return a run as one JSON document."""
    violation = result.violation
    found = {
        "seed": result.settings.seed,
        "instances": result.settings.instances,
        "transfers": result.transfers["fired"],
        "violations": int(violation is not None),
        "leaked": len(result.leaked),
        "steps": result.steps,
        "virtual_s": round(result.virtual_s, 3),
        "wall_s": round(result.wall_s, 3),
        "transfers_a_second": round(result.transfers["fired"] / max(result.wall_s, 1e-9), 1),
        "trail_hash": result.hash,
        "counts": dict(result.transfers),
        "faults": dict(result.faults),
    }
    if violation is not None:
        trail = [str(step) for step in violation.trail]
        found["violation"] = {
            "step": violation.step,
            "text": violation.text,
            "replay": replay_of(result),
            "trail": trail,
        }
    if result.settings.stop_at_step is not None:
        found["trail"] = [str(step) for step in result.last]
    return found


def report(result: SimResult) -> str:
    """Return a run in words."""
    counts, violation = result.transfers, result.violation
    rate = counts["fired"] / max(result.wall_s, 1e-9)
    wrong = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in result.faults.items())
    ends = f"{counts['settled']} settled, {counts['failed']} failed, {counts['lost']} died with their member"
    lines = [
        f"{counts['fired']} transfers admitted: {ends}",
        f"{counts['pages_moved']} pages moved, {counts['leases_returned']} leases returned",
        f"{result.steps} steps, {result.virtual_s:.1f} virtual seconds, {result.wall_s:.1f} s: {rate:.0f} transfers/s",
        f"what went wrong: {wrong}",
        f"trail hash {result.hash}",
    ]
    if violation is not None:
        lines += ["", f"BROKEN at step {violation.step}: {violation.text}", *_shown(violation.trail), replay_of(result)]
    elif result.settings.stop_at_step is not None:
        lines += ["", f"the last events up to step {result.steps}:", *_shown(result.last)]
    else:
        lines.append("no promise was broken, and nothing is left over")
    return "\n".join(lines)


def replay_of(result: SimResult) -> str:
    """Return the command that shows a violation again."""
    settings, step = result.settings, result.violation.step if result.violation else result.steps
    size = f"--transfers {settings.transfers} --instances {settings.instances}"
    return f"kvbus sim --replay {settings.seed}:{step} {size}"


def _shown(trail: tuple[Step, ...]) -> list[str]:
    return [f"  {step}" for step in trail]
