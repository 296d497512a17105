"""The faults of the data plane between real processes, as a table: every count but `runs` must be 0.

Times go from the fault to the evidence that access has ended. The moments at which processes die, stop or are cancelled
are random: the seed is printed, and `--seed` repeats them. Exit status 0: all clean; 1: something is wrong, and is
named; 2: wrong options.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bench.chaos_data.catalog import CASES, Case, chosen
from bench.chaos_data.plants import PLANTS
from bench.chaos_data.table import HEAD, TIMES, Row, cells, problems

WIDTH = 140
"""Of the table where no terminal says it."""
COUNTS = ("runs", "wrong", "leaked", "aborted", *TIMES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was chosen; return the exit status."""
    options = _parser().parse_args(arguments)
    cases = chosen(options.only)
    if options.list:
        sys.stdout.write("".join(f"{case.name}\n" for case in cases))
        return 0
    if not cases:
        sys.stderr.write(f"nothing is called {', '.join(options.only)}; --list names all\n")
        return 2
    began = time.monotonic()
    rows = _run(cases, options.seed, options.rounds, options.plant, is_quiet=options.json)
    document = {
        "seed": options.seed,
        "plant": options.plant,
        "clean": all(row.is_clean for row in rows),
        "seconds": time.monotonic() - began,
        "rows": [row.document() for row in rows],
    }
    if options.json:
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        _show(rows, options.seed, time.monotonic() - began)
    return 0 if document["clean"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos_data", description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a fault, a transport, or fault/transport"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="runs of each row, instead of its own number")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="repeat these moments"
    )
    parser.add_argument(
        "--plant", choices=sorted(PLANTS), default="", help="plant a fault, to see that the table shows it"
    )
    parser.add_argument("--list", action="store_true", help="name the rows, and run none")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _run(cases: Sequence[Case], seed: int, rounds: int | None, plant: str, *, is_quiet: bool) -> list[Row]:
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=is_quiet) as progress:
        task = progress.add_task(f"seed {seed}", total=len(cases))
        for case in cases:
            progress.update(task, description=f"seed {seed}: {case.name}")
            row = case.row()
            try:  # each row has moments of its own, whichever others are run
                case.run(row, random.Random(f"{seed} {case.name}"), rounds or case.rounds, plant)
            except Exception as error:  # noqa: BLE001 - what a fault raises is a finding of its row
                row.problems.append(f"{type(error).__name__}: {error}")
            rows.append(row)
            progress.advance(task)
    return rows


def _show(rows: Sequence[Row], seed: int, seconds: float) -> None:
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = WIDTH
    table = Table(box=None, pad_edge=False)
    for name in (*HEAD, *TIMES):
        table.add_column(name, justify="right" if name in COUNTS else "left", no_wrap=name != "evidence")
    for row in rows:
        table.add_row(*map(Text, cells(row)), style="" if row.is_clean else "bold red")
    screen.print(table)
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            notes.setdefault(f"{row.fault}: {row.note}", []).append(row.transport)
    for note, transports in notes.items():
        screen.print(Text(f"{note} ({', '.join(transports)})", style="dim"), soft_wrap=True)
    for text in problems(rows):
        screen.print(Text(text, style="red"))
    verdict = "all clean" if all(row.is_clean for row in rows) else "NOT CLEAN"
    screen.print(Text(f"{verdict}: {len(rows)} of {len(CASES)} rows in {seconds:.0f} s, seed {seed}"))


if __name__ == "__main__":
    sys.exit(main())
