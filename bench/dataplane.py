"""What it costs to move scattered host pages between two processes of one host: kvbus beside the limit and its peers.

All contestants move the same pages between the same two pools, take turns in one run, and are checked byte by byte once
for each case. `raw` is process_vm_readv and nothing else: the limit. The kvbus rows are whole transfers: from the
question for a lease to pages that are known to be whole, with look-up, pins, generations, a signed grant and its
checks; only the bus is left out. `kvbus` is what a worker does unless it is told otherwise: it is offered all
transports, and takes the one that its planner finds cheapest for these pages; which one that was is said, too. The
others may use one transport only. NIXL makes, posts and awaits a READ over prepared lists, Mooncake reads in batches
over TCP; `make bench-peers` installs both. Medians are printed, and shares of the limit measured side by side.

Processor time is that of both processes of a contestant; the best round is the one that was disturbed least. The load
of the machine is in the document, for other work on it changes every number: compare within one run only.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from planes.cases import (
    CONTIGUOUS_PAGE_BYTES,
    COUNTS,
    MOVED_BYTES_MAX,
    PAGE_SIZES,
    QUICK_COUNTS,
    QUICK_MOVED_BYTES_MAX,
    QUICK_SIZES,
    Case,
    grid,
)
from planes.peers import PEERS, PYTHON, SCRIPTS
from planes.report import Taken, case_document, case_text, targets, targets_text
from planes.stage import CONTESTANTS, Stage, stage_for

BUDGET_S = 4.0
"""For the rounds of one case, all contestants together."""
ROUNDS_MIN, ROUNDS_MAX = 5, 300


def measure(stage: Stage, case: Case, names: tuple[str, ...], budget_s: float) -> dict[str, Taken]:
    """Let everyone move a case's pages in turns, with another one first in each round."""
    contestants = stage.prepare(case, names)
    first = sum(stage.check(one) for one in contestants)  # connects, touches everything, and compares every byte
    second = sum(stage.move(one) for one in contestants)
    rounds = max(ROUNDS_MIN, min(ROUNDS_MAX, int(budget_s / min(first, second))))
    taken = {one.name: Taken() for one in contestants}
    for number in range(rounds):
        turn = number % len(contestants)
        for one in contestants[turn:] + contestants[:turn]:
            before = one.cpu_s()
            taken[one.name].seconds.append(stage.move(one))
            taken[one.name].cpu_s += one.cpu_s() - before
    return taken


def groups_of(options: argparse.Namespace) -> list[list[Case]]:
    """Return the cases to measure, those of one page size together."""
    quick = options.quick
    sizes = options.sizes or (QUICK_SIZES if quick else PAGE_SIZES)
    counts = options.counts or (QUICK_COUNTS if quick else COUNTS)
    groups = grid(sizes, counts, QUICK_MOVED_BYTES_MAX if quick else MOVED_BYTES_MAX)
    if not (quick or options.sizes or options.counts):
        groups.append([Case(CONTIGUOUS_PAGE_BYTES, MOVED_BYTES_MAX // CONTIGUOUS_PAGE_BYTES, contiguous=True)])
    return [group for group in groups if group]


def present(wanted: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
    """Return who of those wanted can take part here, and a sentence for each who cannot."""
    left_out = {kind.name: text for kind in PEERS if kind.name in wanted and (text := kind.missing())}
    return tuple(name for name in CONTESTANTS if name in wanted and name not in left_out), list(left_out.values())


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure everything; print each case as it comes, unless one document is wanted."""

    def say(text: str) -> None:
        if not options.json:
            print(text, flush=True)

    names, left_out = present(options.only or CONTESTANTS)
    lanes: dict[str, list[str]] = {}
    cases = []
    load = os.getloadavg()[0]
    for text in left_out:
        say(text)
    for group in groups_of(options):
        with stage_for(group, names) as stage:
            for case in group:
                taken = measure(stage, case, names, options.budget)
                cases.append(case_document(case, taken, stage.destination.ways.get("kvbus", "")))
                say(case_text(cases[-1]))
            lanes |= stage.destination.lanes()
    document: dict[str, object] = {
        "benchmark": "dataplane",
        "host": {
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "load_before": load,
            "load_after": os.getloadavg()[0],
        },
        "contestants": list(names),
        "left_out": left_out,
        "ucx_lanes": lanes,
        "cases": cases,
        "targets": targets(cases),
    }
    say(targets_text(targets(cases)))
    say(f"load of the machine, one minute: {load:.1f} before, {os.getloadavg()[0]:.1f} after; UCX lanes: {lanes}")
    return document


def draw(document: dict[str, object], path: Path) -> None:
    """Draw the document's numbers into a picture; needs the peers' environment, where matplotlib is."""
    if not PYTHON.exists():
        raise SystemExit("--picture needs matplotlib from the peers' environment: run `make bench-peers` first")
    command = [PYTHON, SCRIPTS / "picture.py", path]
    subprocess.run(command, input=json.dumps(document), text=True, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers, words = (lambda text: tuple(map(int, text.split(",")))), (lambda text: tuple(text.split(",")))
    parser.add_argument("--quick", action="store_true", help="fewer sizes and counts")
    parser.add_argument("--only", type=words, help=f"some of {','.join(CONTESTANTS)}")
    parser.add_argument("--sizes", type=numbers, help="page sizes in bytes, with commas between")
    parser.add_argument("--counts", type=numbers, help="numbers of pages, ascending, with commas between")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for each case's rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw a chart, too")
    parser.add_argument("--from", dest="recorded", type=Path, metavar="FILE.json", help="show an earlier document")
    options = parser.parse_args()
    if unknown := set(options.only or ()) - set(CONTESTANTS):
        parser.error(f"--only: nobody is called {', '.join(sorted(unknown))}; there are {', '.join(CONTESTANTS)}")
    if options.recorded:
        document = json.loads(options.recorded.read_text())
        print("\n".join([*map(case_text, document["cases"]), targets_text(document["targets"])]))
    else:
        document = run(options)
    if options.json:
        sys.stdout.write(json.dumps(document) + "\n")
    if options.picture:
        draw(document, options.picture)


if __name__ == "__main__":
    main()
