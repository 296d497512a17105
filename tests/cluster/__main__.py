"""`python -m tests.cluster`: bring up the files of compose/ on real containers, break them, and count what came of it.

Prints a row a story: nothing may be lost, leaked or answered wrongly, and each audit has to be clean. Logs of a story
that is not clean stay in test-results/. Exit status 0: all clean; 1: something is wrong, and is named; 2: wrong
options; 3: there is no engine to run containers (in CI that is a failure).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.cluster.actors import Actors
from tests.cluster.stack import ROOT, StackError, build, engine_trouble, stack
from tests.cluster.stories import STORIES, Story
from tests.cluster.table import HEAD, Row, cells, wrongs

EXIT_ABSENT = 3
WIDTH = 140
"""Of the table where no terminal says it."""
KEPT = ROOT / "test-results" / "cluster"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was chosen; return the exit status."""
    options = _parser().parse_args(arguments)
    chosen = [one for one in STORIES if not options.only or any(name in _title(one) for name in options.only)]
    if options.list:
        sys.stdout.write("".join(f"{_title(one)}\n" for one in STORIES))
        return 0
    if not chosen:
        sys.stderr.write(f"nothing is called {', '.join(options.only)}; --list names all\n")
        return 2
    if trouble := engine_trouble():
        sys.stderr.write(f"cluster: SKIPPED, {trouble}; install Docker with its compose plugin\n")
        return 1 if os.environ.get("CI") else EXIT_ABSENT
    screen = Console(stderr=True, quiet=options.json)
    screen.print(f"[dim]the image: {build():.0f} s[/]")
    rows = [_play(story, screen) for story in chosen]
    if options.json:
        document = {"clean": all(row.is_clean for row in rows), "rows": [row.document() for row in rows]}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        _show(rows)
    return 0 if all(row.is_clean for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a part of a story's name")
    parser.add_argument("--list", action="store_true", help="name the stories, and run none")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _title(story: Story) -> str:
    return f"{story.stack}, {story.fault}"


def _play(story: Story, screen: Console) -> Row:
    row, began = Row(story.stack, story.fault, must_settle=story.must_settle), time.monotonic()
    screen.print(f"[dim]{_title(story)} …[/]")
    try:
        with stack(story.stack) as one:
            actors = Actors(one, row)
            try:
                story.play(actors)
                actors.until_home(["a", "b"])
                actors.judge()
            except (StackError, AssertionError, OSError) as error:
                row.problems.append(f"{type(error).__name__}: {error}")
            if not row.is_clean:
                row.notes.append(f"logs: {one.keep_logs(KEPT / _title(story).replace(', ', '-').replace(' ', '-'))}")
    except StackError as error:
        row.problems.append(str(error))
    row.seconds = time.monotonic() - began
    return row


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
