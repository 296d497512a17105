"""The demonstration: a source writes other content into pages while they are being read.

NIXL reads them first: it reports success, and the bytes are a mixture of two contents. Then kvbus reads the same pages
over the same kind of transport, during the same rewriting: the pages that changed are named, and not delivered. Prints
both and exits with 0 where it was shown.

Run it with kvbus's own Python, after `make bench-peers`.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmark is no package

from planes.cases import GIB, MIB, Case
from planes.peers import PEERS
from planes.source import content
from planes.stage import Stage, awake, stage_for

PAGE_BYTES = 2 * MIB
PAGES = GIB // PAGE_BYTES
LANDED = 8
"""Rewriting begins once so many pages have landed, and reaches the second half of the pages, last page first."""
LOOK_S = 0.0005
ANSWER_S = 60.0
OLD, NEW = 0, 1


@dataclass(frozen=True)
class Found:
    """What the pages hold afterwards: row numbers by what was found there."""

    old: list[int]
    new: list[int]
    torn: list[int]


def main() -> int:
    kind = PEERS[0]
    if text := kind.missing():
        print(text)
        return 1
    case = Case(PAGE_BYTES, PAGES)
    with stage_for([case], ("kvbus-ucx", "nixl")) as stage:
        by_name = {one.name: one for one in stage.prepare(case, ("kvbus-ucx", "nixl"))}
        for one in by_name.values():
            stage.check(one)
        print(f"{PAGES} pages of 2 MiB are read while their source rewrites the second half of them.")
        peer = stage.peers["nixl"]
        with awake(peer):
            during_rewrite(stage, peer.move)
        by_nixl = found(stage)
        shown = say_nixl(by_nixl)
        restore(stage)
        brought = []
        during_rewrite(stage, lambda: brought.append(stage.destination.bring("kvbus-ucx", PAGES)))
        arrived = [row for row, whole in enumerate(brought[0].arrived) if whole]
        return 0 if say_kvbus(found(stage), arrived, brought[0].text) and shown else 1


def during_rewrite(stage: Stage, move: Callable[[], object]) -> None:
    """Let pages be read, and have the second half of them rewritten as soon as the first ones have landed."""
    memory = stage.destination.pool.memory
    for here, _ in stage.pairs:
        memory.page_bytes(here)[:] = 0
    here, there = stage.pairs[LANDED - 1]
    place, mark = memory.page_bytes(here), content(memory, there, OLD)[-1]
    reading = threading.Thread(target=move)
    reading.start()
    while reading.is_alive() and place[-1] != mark:
        reading.join(LOOK_S)
    stage.pipe.send(("rewrite", rewritten(stage), NEW))
    if not stage.pipe.poll(ANSWER_S):
        raise RuntimeError("the source did not rewrite its pages")
    stage.pipe.recv()
    reading.join()


def rewritten(stage: Stage) -> list[int]:
    """Return the source's pages that are rewritten, the last one first."""
    return [there for _, there in stage.pairs[PAGES // 2 :]][::-1]


def restore(stage: Stage) -> None:
    """Have the source write the first content again."""
    stage.pipe.send(("rewrite", rewritten(stage), OLD))
    stage.pipe.recv()


def found(stage: Stage) -> Found:
    """Look which content each page holds here: the one that was asked for, the other one, or some of both."""
    memory, rows = stage.destination.pool.memory, Found([], [], [])
    for row, (here, there) in enumerate(stage.pairs):
        bytes_ = memory.page_bytes(here)
        if (bytes_ == content(memory, there, OLD)).all():
            rows.old.append(row)
        elif (bytes_ == content(memory, there, NEW)).all():
            rows.new.append(row)
        else:
            rows.torn.append(row)
    return rows


def say_nixl(rows: Found) -> bool:
    """Say what NIXL delivered; True where it is a mixture."""
    print("NIXL: the transfer ended, and is reported as a success.")
    old, new, torn = len(rows.old), len(rows.new), len(rows.torn)
    print(f"  {old} pages hold what was asked for, {new} hold other content, {torn} hold some of both.")
    return bool(rows.old and (rows.new or rows.torn))


def say_kvbus(rows: Found, arrived: list[int], text: str) -> bool:
    """Say what kvbus delivered; True where nothing of it is wrong, and the pages that changed are named."""
    wrong = sorted(set(arrived) - set(rows.old))
    missing = sorted(set(range(PAGES)) - set(arrived))
    print(f"kvbus: {text}")
    print(f"  {len(arrived)} pages are delivered, {len(wrong)} of them with other content than was asked for.")
    print(f"  Not delivered: rows {ranges(missing)}.")
    new, torn = len(rows.new), len(rows.torn)
    print(f"  (In memory, and used by nobody: {new} pages with other content, {torn} with some of both.)")
    return bool(arrived and missing and not wrong)


def ranges(rows: list[int]) -> str:
    """Return row numbers as text, those that follow upon each other as one range."""
    parts: list[str] = []
    first = last = None
    for row in [*rows, None]:
        if last is not None and row == last + 1:
            last = row
            continue
        if first is not None:
            parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = row
    return ", ".join(parts) or "none"


if __name__ == "__main__":
    sys.exit(main())
