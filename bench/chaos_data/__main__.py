"""The faults of the data plane between real processes, as a table: every count but `runs` must be 0.

Each row is printed as it ends, and all of them together at the end. Times go from the fault to the evidence that access
has ended. The moments at which processes die, stop or are cancelled are random: the seed is printed, and `--seed`
repeats them. Exit status 0: all clean; 1: something is wrong, and is named; 2: wrong options.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bench.chaos_data.catalog import CASES, Case, chosen
from bench.chaos_data.plants import PLANTS
from bench.chaos_data.table import HEAD, TIMES, Row, cells, line, problems

WIDTH = 140
"""Of the table where no terminal says it."""
COUNTS = ("runs", "wrong", "leaked", "aborted", *TIMES)
HEADINGS = (*HEAD, *TIMES)


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
    rows = _all_rows(cases, options)
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


def _all_rows(cases: Sequence[Case], options: argparse.Namespace) -> list[Row]:
    """Run all rows, and print each as it ends; a bar goes beside them where errors go to a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True, highlight=False)
    bar = Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal)

    def say(*texts: str) -> None:
        for text in () if options.json else texts:
            if console.is_terminal and sys.stdout.isatty():
                console.print(Text(text), soft_wrap=True)  # above the bar, which has the same screen
            else:
                print(text, flush=True)

    rows: list[Row] = []
    with bar:
        say(line(HEADINGS))
        for row in _run(cases, options, bar):
            rows.append(row)
            say(line(cells(row)), *problems([row]))
    return rows


def _run(cases: Sequence[Case], options: argparse.Namespace, progress: Progress) -> Iterator[Row]:
    """Yield each row as it ends."""
    seed = options.seed
    task = progress.add_task(f"seed {seed}", total=len(cases))
    for case in cases:
        progress.update(task, description=f"seed {seed}: {case.name}")
        row = case.row()
        try:  # each row has moments of its own, whichever others are run
            case.run(row, random.Random(f"{seed} {case.name}"), options.rounds or case.rounds, options.plant)
        except Exception as error:  # noqa: BLE001 - what a fault raises is a finding of its row
            row.problems.append(f"{type(error).__name__}: {error}")
        yield row
        progress.advance(task)


def _show(rows: Sequence[Row], seed: int, seconds: float) -> None:
    """Print all rows together, and what is to be said of them."""
    screen = Console(highlight=False)
    screen.print()
    if not screen.is_terminal:
        screen.width = WIDTH
    table = Table(box=None, pad_edge=False)
    for name in HEADINGS:
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
