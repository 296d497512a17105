"""Plants every fault, one at a time, and demands that a check notices each: `make mutants`.

    python -m kvbus.testing.sim.mutants [--json] [--jobs N] [--list] [NAME ...]

A fault counts as caught only if the same try is clean without it: what complains of sound code says nothing about a
fault. Nor does a fault count that merely ends in a TypeError or the like: that one was planted badly. The exit status
is 0 only if all were caught.
"""

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache

from kvbus.testing.sim.checks import Try, run, tries_for
from kvbus.testing.sim.plants import PLANTS
from kvbus.testing.sim.plants.plant import Plant
from kvbus.testing.sim.searches.found import Found

BAR_CELLS = 20
NAME_CELLS = 40
"""With both the bar stays within eighty columns."""
TEXT_CELLS = 110
"""How much of what was seen the table shows; the document has all of it."""
CLUMSY = ("AttributeError(", "NameError(", "TypeError(", "KeyError(", "IndexError(")
"""What a fault says that broke the program rather than a rule."""
EXIT_MISSED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one fault: who noticed it and how, or why that does not count."""

    plant: str
    rule: str
    check: str
    tried: int
    elapsed_s: float
    noticed: Try | None = None
    found: Found | None = None
    missed: str = ""

    @property
    def caught(self) -> bool:
        """Whether a sound check noticed the fault."""
        return self.found is not None and not self.missed


def judge(plant: Plant) -> Outcome:
    """Plant one fault, and let its check look for it, try by try, until it is noticed."""
    started = time.perf_counter()
    for tried, one in enumerate(tries_for(plant), 1):
        with plant.planted():
            found = run(one)
        if found is not None:
            elapsed_s = time.perf_counter() - started
            return Outcome(plant.name, plant.rule, plant.check, tried, elapsed_s, one, found, _doubt(one, found))
    elapsed_s = time.perf_counter() - started
    return Outcome(plant.name, plant.rule, plant.check, tried, elapsed_s, missed=f"nobody noticed it in {tried} tries")


def judge_all(plants: Sequence[Plant], jobs: int) -> Iterator[Outcome]:
    """Judge faults in so many processes at once (1: in this one); yield each outcome when it is known."""
    if jobs == 1:
        yield from map(judge, plants)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _be_quiet) as pool:
        waiting = [pool.submit(_judge_named, plant.name) for plant in plants]
        try:
            for future in as_completed(waiting):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def main(arguments: Sequence[str] | None = None, plants: Mapping[str, Plant] = PLANTS) -> int:
    """Run the command; 0 if every chosen fault was caught, 1 if one was not, 2 where a name fits none.

    Faults other than those that are shipped are judged in this process.
    """
    options = _parse(arguments)
    chosen = [plant for plant in plants.values() if _is_meant(plant.name, options.name)]
    if options.list:
        _say("\n".join(f"{plant.name}  ({plant.rule}; {plant.check})" for plant in chosen))
        return 0
    if not chosen:
        sys.stderr.write(f"mutants: no fault has {' or '.join(options.name)} in its name; --list names them\n")
        return EXIT_USAGE
    started = time.perf_counter()
    jobs = options.jobs if plants is PLANTS else 1
    logger = logging.getLogger("kvbus")
    before = logger.level
    _be_quiet()
    try:
        outcomes = list(_with_bar(judge_all(chosen, min(jobs, len(chosen))), len(chosen)))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        logger.setLevel(before)  # whoever calls this goes on, and hears its own warnings
    order = {plant.name: at for at, plant in enumerate(chosen)}
    outcomes.sort(key=lambda outcome: order[outcome.plant])
    elapsed_s = time.perf_counter() - started
    _say(json.dumps(document(outcomes, elapsed_s)) if options.json else "\n".join(table(outcomes, elapsed_s)))
    return 0 if all(outcome.caught for outcome in outcomes) else EXIT_MISSED


def table(outcomes: Sequence[Outcome], elapsed_s: float) -> Iterator[str]:
    """Yield a line for each fault, and the sum."""
    rows = [(one.plant, one.rule, one.check, *_seen(one)) for one in outcomes]
    heads = ("fault", "breaks", "caught by", "at", "what was seen")
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    caught = sum(one.caught for one in outcomes)
    yield ""
    yield from (f"NOT CAUGHT: {one.plant}: {one.missed}" for one in outcomes if not one.caught)
    yield f"{caught} of {len(outcomes)} caught in {elapsed_s:.0f} s"


def document(outcomes: Sequence[Outcome], elapsed_s: float) -> dict[str, object]:
    """Return everything for programs."""
    faults = [
        {
            "name": one.plant,
            "breaks": one.rule,
            "check": one.check,
            "caught": one.caught,
            "tried": one.tried,
            "elapsed_s": round(one.elapsed_s, 2),
            "seed": one.noticed.seed if one.noticed else None,
            "weather": (one.noticed.weather or None) if one.noticed else None,
            "step": one.found.step if one.found else None,
            "seen": one.found.text if one.found else None,
            "missed": one.missed or None,
        }
        for one in outcomes
    ]
    caught = sum(one.caught for one in outcomes)
    ok = caught == len(outcomes)
    return {"ok": ok, "planted": len(outcomes), "caught": caught, "elapsed_s": round(elapsed_s, 1), "faults": faults}


def _doubt(one: Try, found: Found) -> str:
    """Return why a find does not count, or nothing."""
    if any(word in found.text for word in CLUMSY):
        return f"planted badly: {found.text}"
    clean = _clean(one)
    return f"the same try complains of sound code: {clean.text}" if clean else ""


@lru_cache(maxsize=256)  # more than there are tries in which faults are noticed
def _clean(one: Try) -> Found | None:
    return run(one)


def _judge_named(name: str) -> Outcome:
    return judge(PLANTS[name])


def _be_quiet() -> None:
    logging.getLogger("kvbus").setLevel(logging.CRITICAL)  # refusals and retries, thousands of them, on purpose


def _seen(one: Outcome) -> tuple[str, str]:
    if one.noticed is None or one.found is None:
        return "-", one.missed
    where = f"seed {one.noticed.seed} {one.noticed.weather}".strip() + f", step {one.found.step}"
    text = one.found.text if len(one.found.text) <= TEXT_CELLS else f"{one.found.text[: TEXT_CELLS - 1]}…"
    return where, text


def _with_bar(outcomes: Iterator[Outcome], count: int) -> Iterator[Outcome]:
    """Hand outcomes on, and show people how far it is."""
    _draw(f"[{'':<{BAR_CELLS}}] 0/{count}")
    for number, outcome in enumerate(outcomes, 1):
        cells = "#" * (BAR_CELLS * number // count)
        word = "caught" if outcome.caught else "NOT CAUGHT"
        _draw(f"[{cells:<{BAR_CELLS}}] {number}/{count}  {word}: {outcome.plant[:NAME_CELLS]}")
        yield outcome
    _draw("")


def _draw(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()


def _is_meant(name: str, wanted: Sequence[str]) -> bool:
    return not wanted or any(one.casefold() in name.casefold() for one in wanted)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutants", description="Plant faults one at a time; each has to be caught.")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--jobs", type=int, default=cores, metavar="N", help=f"processes at once (here {cores})")
    parser.add_argument("--list", action="store_true", help="name the faults, and end")
    parser.add_argument("name", nargs="*", metavar="NAME", help="only faults with this text in their name")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}, expected at least 1")
    return options


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
