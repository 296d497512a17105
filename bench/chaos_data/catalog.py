"""Every row that there is: a fault, a transport, and how often it is run."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.chaos_data import abuses, deaths, loads, whole
from bench.chaos_data.table import Row

Fault = Callable[[Row, random.Random, int, str], None]
"""Runs a fault so many rounds, with a plant or without, into a row."""

BARE = ("cma", "tcp", "posix", "memory", "socket")
"""Between two bare members; the first three are UCX over these transports of its own."""
WORKERS = {"ucx": 10, "memory": 4, "socket": 4}
"""Between whole workers, and how often: a round takes seconds. `ucx` chooses as in service: tcp for control, cma for
bytes."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be filled."""

    fault: str
    transport: str
    processes: str
    run: Fault
    rounds: int

    @property
    def name(self) -> str:
        """What `--only` calls it, with its transport."""
        return f"{self.fault}/{self.transport}"

    def row(self) -> Row:
        """Return the empty row."""
        return Row(self.fault, self.transport, self.processes)


def _bare(fault: str, run: Fault, rounds: int) -> list[Case]:
    return [Case(fault, transport, "bare", run, rounds) for transport in BARE]


def _workers(fault: str, run: Fault) -> list[Case]:
    return [Case(fault, transport, "workers", run, rounds) for transport, rounds in WORKERS.items()]


CASES: Sequence[Case] = (
    *_bare("source killed", deaths.source_killed, 10),
    *_bare("destination killed", deaths.destination_killed, 10),
    *_bare("destination killed, source stopped", deaths.killed_unread, 6),
    *_bare("source stopped", deaths.source_stopped, 4),
    *_bare("source restarted", deaths.restarted, 3),
    *_bare("forked", deaths.forked, 3),
    *_bare("grant forged", abuses.forged, 10),
    *_bare("pages rewritten", abuses.rewritten, 3),
    *_bare("transfer cancelled", loads.cancelled, 10),
    *_bare("slow source", loads.slow, 1),
    *_bare("wire-up storm", loads.storm, 2),
    *_bare("memory pressure", loads.pressed, 3),
    *_workers("source killed, whole", whole.source_killed),
    *_workers("destination killed, whole", whole.destination_killed),
)


def chosen(only: Sequence[str]) -> list[Case]:
    """Return the cases that these words name: a fault, a transport, or fault/transport; all without a word."""
    return [case for case in CASES if not only or {case.fault, case.transport, case.name} & set(only)]
