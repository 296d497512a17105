"""`python -m tests.fuzz`: a million inputs, to all that reads what others wrote; a value or a documented error each.

Prints a line per reader and the seed; the same seed feeds the same inputs, but for the key in a credential's file. Exit
status 0: nothing was found; 1: something was, and the input that did it is printed.
"""

import argparse
import logging
import random
import resource
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.fuzz.running import Count, run
from tests.fuzz.targets import targets

INPUTS = 1_000_000
MEMORY_MAX_BYTES = 2 << 30
"""Of address space: what announces four billion elements and makes room for them ends in a MemoryError here."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was chosen; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a reader's name, or its beginning")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)  # each unreadable record is a warning
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX_BYTES, MEMORY_MAX_BYTES))
    chosen = [target for target in targets() if not options.only or target.name.startswith(tuple(options.only))]
    if not chosen:
        sys.stderr.write(f"nothing is called {', '.join(options.only)}\n")
        return 2
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"seed {options.seed}", total=options.inputs)
        counts = run(chosen, options.inputs, options.seed, lambda step: progress.advance(task, step))
    return _told(counts, options.seed)


def _told(counts: dict[str, Count], seed: int) -> int:
    sys.stdout.write(f"{'reader':30}{'inputs':>10}{'values':>10}{'refused':>10}{'faults':>8}\n")
    for name, count in counts.items():
        row = f"{name:30}{count.inputs:10,}{count.values:10,}{count.refused:10,}{len(count.faults):8}\n"
        sys.stdout.write(row)
    for name, count in counts.items():
        for fault in count.faults:
            sys.stdout.write(f"FAULT in {name}: {fault}\n")
    faults = sum(len(count.faults) for count in counts.values())
    total = sum(count.inputs for count in counts.values())
    sys.stdout.write(f"{total:,} inputs, {len(counts)} readers, {faults} faults, seed {seed}\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
