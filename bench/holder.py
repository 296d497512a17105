"""What the holder costs: an idle round and a busy one, with few and with many leases held, side by side in one run.

Prints medians in microseconds and the ratios between them; a ratio near 1 means that the cost does not grow with what
is held. `--json` prints one document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

from kvbus.ledger.binding import Binding
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Direction, SubmitMode
from kvbus.testing.ledger_parts import ListedLender, ManualBackend

FEW, SOME, MANY = 10, 1_000, 100_000
CHANGES = 100
ROUNDS = 200
LIVES = 2_000
MODE = SubmitMode("bench", Direction.WRITE)


class Bench:
    """A holder with so many leases held, all submitted, none with evidence."""

    def __init__(self, held: int) -> None:
        self.lender, self.backend = ListedLender(), ManualBackend("bench")
        binding = Binding("bench", self.backend, Direction.WRITE, retained_max=10 * MANY)
        self.holder = LeaseHolder(bindings=[binding], lenders=[self.lender])
        for _ in range(held):
            self.take()
        self.round()
        self.round()

    def take(self) -> int:
        """Take one more lease."""
        return self.holder.take(self.lender.lend(Direction.WRITE), MODE, "order", now=0.0, peer="peer", transfer="t")

    def round(self, settled: tuple[int, ...] = ()) -> None:
        """Run one round."""
        self.holder.collect()
        self.holder.settle(settled)
        self.holder.advance()
        self.holder.finish()

    def busy_round(self) -> None:
        """Run the rounds in which so many leases are taken, delivered, settled and returned."""
        tickets = tuple(self.take() for _ in range(CHANGES))
        self.round()
        for ticket in tickets:
            self.backend.deliver(ticket, (True,))
            self.backend.end(ticket)
        self.round()
        self.round(tickets)


def median_us(call: Callable[[], None], times: int) -> float:
    """Return the median duration of a call in microseconds."""
    durations = []
    for _ in range(times):
        started = time.perf_counter_ns()
        call()
        durations.append(time.perf_counter_ns() - started)
    return statistics.median(durations) / 1e3


def measure() -> dict[str, float]:
    """Measure few and many in turns, so that a noisy neighbour disturbs both."""
    few, some, many = Bench(FEW), Bench(SOME), Bench(MANY)
    idle = {name: [] for name in ("few", "many")}
    busy = {name: [] for name in ("some", "many")}
    for _ in range(5):
        idle["few"].append(median_us(few.round, ROUNDS))
        idle["many"].append(median_us(many.round, ROUNDS))
        busy["some"].append(median_us(some.busy_round, 10))
        busy["many"].append(median_us(many.busy_round, 10))
    life = Bench(0)
    started = time.perf_counter_ns()
    for _ in range(LIVES // CHANGES):
        life.busy_round()
    life_us = (time.perf_counter_ns() - started) / 1e3 / LIVES
    idle_few, idle_many = statistics.median(idle["few"]), statistics.median(idle["many"])
    busy_some, busy_many = statistics.median(busy["some"]), statistics.median(busy["many"])
    return {
        "idle_round_10_held_us": idle_few,
        "idle_round_100000_held_us": idle_many,
        "idle_ratio": idle_many / idle_few,
        "busy_round_1000_held_us": busy_some,
        "busy_round_100000_held_us": busy_many,
        "busy_ratio": busy_many / busy_some,
        "one_life_us": life_us,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    result = measure()
    if parser.parse_args().json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:32} {value:10.2f}")


if __name__ == "__main__":
    main()
