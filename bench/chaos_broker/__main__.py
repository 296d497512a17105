"""The faults of the broker under a load of real workers, as a table: lost, twice and leaked must be 0 in each row.

The pause is the longest time between two settled transfers, a fault's own length included. Exit status 0: all clean;
1: something is wrong, and is named; 2: wrong options.
"""

import argparse
import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bench.chaos_broker.catalog import CASES, Case, chosen
from bench.chaos_broker.plants import IN_FOLLOWER, PLANTS, sow
from bench.chaos_broker.table import HEAD, Row, cells, problems

WIDTH = 160
"""Of the table where no terminal says it."""
ROW_S = 600.0
"""The longest row takes a quarter of it on an idle machine; one that meets it hangs."""
COLUMNS = (*HEAD, "lost", "twice", "applied twice", "leaked", "audit", "pause")


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
    logging.getLogger("kvbus").setLevel(logging.ERROR)  # lost connections are what is looked for here
    if options.plant in IN_FOLLOWER:
        sow(options.plant)
    began = time.monotonic()
    rows = _run(cases, options.plant, options.jobs, is_quiet=options.json)
    clean, seconds = all(row.is_clean for row in rows), time.monotonic() - began
    if options.json:
        document = {"plant": options.plant, "clean": clean, "seconds": seconds}
        sys.stdout.write(json.dumps({**document, "rows": [row.document() for row in rows]}) + "\n")
    else:
        _show(rows, seconds)
    return 0 if clean else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos_broker", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="WORDS", help="faults whose name holds this")
    parser.add_argument(
        "--plant", choices=sorted(PLANTS), default="", help="plant a fault, to see that the table shows it"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="rows at a time, each in a process of its own; 0: in this one"
    )
    parser.add_argument("--list", action="store_true", help="name the rows, and run none")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _run(cases: Sequence[Case], plant: str, jobs: int, *, is_quiet: bool) -> list[Row]:
    """Run the rows, the longest first: most of a row's time is waiting, so two of them share two cores."""
    rows: dict[str, Row] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=is_quiet) as progress:
        task = progress.add_task("rows", total=len(cases))
        if not jobs or len(cases) == 1:
            for case in cases:
                progress.update(task, description=case.name)
                rows[case.name] = case.run(plant)
                progress.advance(task)
        else:
            with ThreadPoolExecutor(jobs) as pool:
                running = [pool.submit(_apart, case, plant) for case in sorted(cases, key=lambda one: -one.takes_s)]
                for future in as_completed(running):
                    row = future.result()
                    rows[row.fault] = row
                    progress.update(task, advance=1, description=f"after {row.fault}")
    return [rows[case.name] for case in cases]


def _apart(case: Case, plant: str) -> Row:
    """Run one row in a process of its own."""
    command = [sys.executable, "-m", "bench.chaos_broker", "--json", "--jobs", "0", "--only", case.name]
    command += ["--plant", plant] if plant else []
    ran = subprocess.run(command, capture_output=True, text=True, timeout=ROW_S, check=False, stdin=subprocess.DEVNULL)
    try:
        return Row.of(json.loads(ran.stdout)["rows"][0])
    except (ValueError, LookupError):
        row = Row(case.name, case.back_s)
        row.problems.append(f"the row's process ended with status {ran.returncode}: {ran.stderr[-500:]}")
        return row


def _show(rows: Sequence[Row], seconds: float) -> None:
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = WIDTH
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(
            name, justify="left" if name in {"fault", "audit"} else "right", no_wrap=name != "applied twice"
        )
    for row in rows:
        table.add_row(*map(Text, cells(row)), style="" if row.is_clean else "bold red")
    screen.print(table)
    for row in rows:
        for note in row.notes:
            screen.print(Text(f"{row.fault}: {note}", style="dim"), soft_wrap=True)
    for text in problems(rows):
        screen.print(Text(text, style="red"), soft_wrap=True)
    verdict = "all clean" if all(row.is_clean for row in rows) else "NOT CLEAN"
    screen.print(Text(f"{verdict}: {len(rows)} of {len(CASES)} rows in {seconds:.0f} s"))


if __name__ == "__main__":
    sys.exit(main())
