"""`python -m tests.cluster`: bring up the files of compose/ on real containers, break them, and count what came of it.

Prints a row a story: nothing may be lost, leaked or answered wrongly, and each audit has to be clean. Logs of a story
that is not clean stay in test-results/. Exit status 0: all clean; 1: something is wrong, and is named; 2: wrong
options; 3: there is no engine to run containers (in CI that is a failure).
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.cluster.configs import config_troubles
from tests.cluster.page import PAGE, page
from tests.cluster.play import Wishes, play_all
from tests.cluster.stack import FAKETIME, QUICKSTART, build, engine_trouble
from tests.cluster.stories import STORIES
from tests.cluster.table import HEAD, Row, cells, wrongs

EXIT_ABSENT = 3
WIDTH = 140
"""Of the table where no terminal says it."""
JOBS = 3
"""Scenes at a time. Each keeps half a core busy, or less: three of them wait little for each other on two cores."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was chosen; return the exit status."""
    options = _parser().parse_args(arguments)
    chosen = [one for one in STORIES if not options.only or any(name in one.title for name in options.only)]
    chosen = [one for one in chosen if one.quick or not options.quick]
    if options.list:
        sys.stdout.write("".join(f"{one.title}\n" for one in chosen))
        return 0
    if options.page:
        PAGE.write_text(page(options.page), encoding="utf-8")
        return 0
    if not chosen:
        sys.stderr.write(f"nothing is called {', '.join(options.only)}; --list names all\n")
        return 2
    if trouble := engine_trouble():
        sys.stderr.write(f"cluster: SKIPPED, {trouble}; install Docker with its compose plugin\n")
        return 1 if os.environ.get("CI") else EXIT_ABSENT
    if troubles := config_troubles():
        sys.stderr.write("".join(f"cluster: {trouble}\n" for trouble in troubles))
        return 1
    screen = Console(stderr=True, quiet=options.json)
    if not Path(FAKETIME).exists() and not os.environ.get("CI"):
        screen.print(f"cluster: there is no {FAKETIME} (package libfaketime): nobody's clock is set")
        chosen = [one for one in chosen if one.overlay != "clocks"]
    if not options.no_build:
        screen.print(f"[dim]the image: {build(QUICKSTART):.0f} s[/]")
    rows = play_all(chosen, options.jobs, Wishes(options.trails, builds=not options.no_build, quiet=options.json))
    if options.json:
        document = {"clean": all(row.is_clean for row in rows), "rows": [row.document() for row in rows]}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        _show(rows)
    return 0 if all(row.is_clean for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a part of a story's name")
    parser.add_argument("--quick", action="store_true", help="only the stories that CI plays, in a few minutes")
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help="scenes that are played at a time")
    parser.add_argument("--no-build", action="store_true", help="use the images that are there")
    parser.add_argument("--trails", type=Path, metavar="FOLDER", help="keep what is told of each story there")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="run none; write the page of what was kept there")
    parser.add_argument("--list", action="store_true", help="name the stories, and run none")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _show(rows: Sequence[Row]) -> None:
    screen = Console()
    if not screen.is_terminal:
        screen = Console(width=WIDTH)
    table = Table(*HEAD, "seconds")
    for row in rows:
        table.add_row(*cells(row), f"{row.seconds:.0f}", style="" if row.is_clean else "red")
    screen.print(table)
    for row in rows:
        for note in row.notes:
            screen.print(f"{row.story}, {row.fault}: {note}", style="dim", highlight=False, markup=False)
    for text in wrongs(rows):
        screen.print(text, style="red", highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(main())
