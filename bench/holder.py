"""What the holder costs: an idle round and a busy one, with few and with many leases held, side by side in one run.

Prints medians in microseconds and the ratios between them; a ratio near 1 means that the cost does not grow with what
is held. One lease's life is everything from taking it to having returned it, a hundred at once. Gross, that holds the
lender and the backend that the bench drives by hand; their share is measured apart, by the same calls without a holder,
and net is what is left: the ledger's. `--json` prints one document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

from kvbus.ledger.binding import Binding
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Direction, LeaseView, Order, SubmitMode
from kvbus.testing.ledger_parts import ListedLender, ManualBackend

FEW, SOME, MANY = 10, 1_000, 100_000
CHANGES = 100
ROUNDS = 200
LIFE_ROUNDS = 60
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
            self.backend.deliver(ticket, (True,), evidence=None)
            self.backend.end(ticket)
        self.round()
        self.round(tickets)


class Parts:
    """A lender and a backend without a holder, asked what a holder asks of them in so many leases' lives."""

    def __init__(self) -> None:
        self.lender, self.backend = ListedLender(), ManualBackend("bench")
        # What a backend is handed is made by the holder, so it is made outside of what is measured here.
        view = LeaseView("lender", 0, 1, (0,), (b"name",), (0,), (1,))
        self.orders = [Order(ticket, 1, view, Direction.WRITE, "order", "peer", None) for ticket in range(CHANGES)]

    def busy_round(self) -> None:
        """Make the calls of `Bench.busy_round` that reach lender and backend."""
        leases = [self.lender.lend(Direction.WRITE) for _ in range(CHANGES)]
        self.idle()
        for lease, order in zip(leases, self.orders, strict=True):
            lease.poll()
            self.backend.submit(order)
        for order in self.orders:
            self.backend.deliver(order.ticket, (True,), evidence=None)
            self.backend.end(order.ticket)
        self.idle()
        for lease in leases:
            lease.bounds((True,))
        self.idle()
        for lease in leases:
            lease.mark_arrived((True,))
            lease.release()

    def idle(self) -> None:
        """Make the calls of every round."""
        self.backend.changes()
        self.lender.progress()


def median_us(call: Callable[[], None], times: int, clock: Callable[[], int] = time.thread_time_ns) -> float:
    """Return the median cost of a call in microseconds: of this thread's time, in which nobody else's work counts."""
    durations = []
    for _ in range(times):
        started = clock()
        call()
        durations.append(clock() - started)
    return statistics.median(durations) / 1e3


def measure() -> dict[str, float]:
    """Measure few and many in turns, so that a noisy neighbour disturbs both."""
    few, some, many = Bench(FEW), Bench(SOME), Bench(MANY)
    idle: dict[str, list[float]] = {"few": [], "many": []}
    busy: dict[str, list[float]] = {"some": [], "many": []}
    for _ in range(5):
        # Too short for a clock that is a system call, and for being interrupted.
        idle["few"].append(median_us(few.round, ROUNDS, time.perf_counter_ns))
        idle["many"].append(median_us(many.round, ROUNDS, time.perf_counter_ns))
        busy["some"].append(median_us(some.busy_round, 10))
        busy["many"].append(median_us(many.busy_round, 10))
    life, parts = Bench(0), Parts()
    lives = [(median_us(life.busy_round, 1), median_us(parts.busy_round, 1)) for _ in range(LIFE_ROUNDS)]
    gross, alone = (statistics.median(times) / CHANGES for times in zip(*lives, strict=True))
    idle_few, idle_many = statistics.median(idle["few"]), statistics.median(idle["many"])
    busy_some, busy_many = statistics.median(busy["some"]), statistics.median(busy["many"])
    return {
        "idle_round_10_held_us": idle_few,
        "idle_round_100000_held_us": idle_many,
        "idle_ratio": idle_many / idle_few,
        "busy_round_1000_held_us": busy_some,
        "busy_round_100000_held_us": busy_many,
        "busy_ratio": busy_many / busy_some,
        "one_life_gross_us": gross,
        "one_life_parts_us": alone,
        "one_life_net_us": gross - alone,
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
