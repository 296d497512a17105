"""The holder between a lender and two backends that a seed drives: every word in any order, and then the end.

What the world's real pool hides is seen here: how often a lease is polled, what is marked at whose settle, whether an
attempt begins beside another one.
"""

import random
from dataclasses import dataclass

from kvbus.errors import KvbusError
from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.held import NOT_YET
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Change, Delivered, Direction, Failed, Order, Result, SubmitMode
from kvbus.testing.ledger_parts import ListedLease, ListedLender, ManualBackend
from kvbus.testing.sim.searches.found import BrokenPromiseError, Found, require

STEPS = 400
HELD_MAX = 8
PULL, SERVE = SubmitMode("pull", Direction.WRITE), SubmitMode("serve", Direction.READ)


class _Backend(ManualBackend):
    """Notes what a holder must not ask for."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.wrong = ""

    def submit(self, order: Order) -> None:
        if any(ticket == order.ticket for ticket, _ in self.open):
            self.wrong = f"attempt {order.attempt} of T{order.ticket} begins beside another one"
        super().submit(order)

    def release_hold(self) -> None:
        if self.open:
            self.wrong = f"the hold of {self.name} is let go with {len(self.open)} attempts open"
        super().release_hold()


@dataclass(slots=True)
class _Known:
    """What the search knows of one ticket. `polled` counts the polls up to its view."""

    lease: ListedLease
    backend: _Backend
    waits: bool
    given_up: bool = False
    polled: int = 0
    result: Result | None = None


class _Search:
    def __init__(self, seed: int) -> None:
        self.step = 0
        self._random = random.Random(f"{seed}:holder")
        self._lender = ListedLender()
        self._backends = {mode.binding: _Backend(mode.binding) for mode in (PULL, SERVE)}
        self._holder = LeaseHolder(
            bindings=[Binding(mode.binding, self._backends[mode.binding], mode.direction) for mode in (PULL, SERVE)],
            lenders=[self._lender],
        )
        self._known: dict[int, _Known] = {}

    def run(self) -> None:
        moves = (self._take, self._round, self._round, self._answer, self._answer, self._assign, self._stop)
        for self.step in range(1, STEPS + 1):
            self._random.choice(moves)()
            self._check()
        self._end()

    # -------------------------------------------------------------------------------------------------------- moves

    def _take(self) -> None:
        if len(self._holder.tickets()) < HELD_MAX:
            mode = self._random.choice((PULL, PULL, SERVE))
            lease = self._lender.lend(mode.direction, self._random.randint(1, 3), granted=self._random.random() < 0.7)
            waits = self._random.random() < 0.3
            hint: object = NOT_YET if waits else "order"
            ticket = self._holder.take(lease, mode, hint, now=0.0, peer="peer", transfer="t")
            self._known[ticket] = _Known(lease, self._backends[mode.binding], waits)

    def _round(self) -> None:
        """Run a round, or one or two of its calls; a settle names some of the tickets, in any state."""
        holder, draw = self._holder, self._random
        if draw.random() < 0.7:
            holder.collect()
        if draw.random() < 0.4:
            holder.settle([ticket for ticket in self._known if draw.random() < 0.5])
        for known in self._known.values():
            if not known.lease.granted and draw.random() < 0.2:
                known.lease.grant()
        holder.advance()
        if draw.random() < 0.7:
            holder.finish()

    def _answer(self) -> None:
        """Let a backend say something of an open attempt: a result, evidence, or both."""
        open_now = [ticket for ticket, one in self._known.items() if (ticket, 1) in one.backend.open]
        if open_now:
            ticket = self._random.choice(open_now)
            known, kind, rows = self._known[ticket], self._random.random(), self._known[ticket].lease.rows
            failed = Failed(FailureClass.TRANSPORT, "the transport failed")
            known.result = known.result or (failed if kind < 0.2 else Delivered((True,) * rows, rows))
            evidence = self._random.choice((None, Evidence.COMPLETED, Evidence.COMPLETED))
            known.backend.tell(Change(ticket, 1, None if kind > 0.8 and evidence else known.result, evidence))

    def _assign(self) -> None:
        for ticket in self._holder.tickets():
            if self._known[ticket].waits:
                self._known[ticket].waits = False
                self._holder.assign(ticket, "order")
                return

    def _stop(self) -> None:
        held = sorted(self._holder.tickets())
        if held:
            ticket = self._random.choice(held)
            known = self._known[ticket]
            if self._random.random() < 0.5:
                known.given_up |= ticket not in known.backend.orders
                self._holder.cancel(ticket, "stop")
            else:
                known.given_up = True
                self._holder.abandon(ticket, FailureClass.DEADLINE, "the budget is spent")

    def _end(self) -> None:
        """Shut down, first with attempts open, then with all evidence given: everything has come back."""
        self._holder.shutdown(0.0)
        self._check()
        for ticket, known in self._known.items():
            if (ticket, 1) in known.backend.open:
                known.backend.end(ticket)
        for _ in range(3):
            self._holder.shutdown(0.0)
            self._holder.collect()
        self._check()
        left = self._holder.tickets()
        require(not left and not self._lender.out, f"left after the end: tickets {left}, leases {self._lender.out}")

    # ------------------------------------------------------------------------------------------------------- checks

    def _check(self) -> None:
        self._holder.check()
        for backend in self._backends.values():
            require(not backend.wrong, backend.wrong)
        for ticket, known in self._known.items():
            lease = known.lease
            require(lease.releases <= 1, f"T{ticket} was released {lease.releases} times")
            require(len(lease.marks) <= 1, f"T{ticket} was marked {len(lease.marks)} times")
            at_work = (ticket, 1) in known.backend.open
            require(not (lease.releases and at_work), f"T{ticket} was released under an open attempt")
            wanted = not (known.given_up and any(map(any, lease.marks)))
            require(wanted, f"T{ticket} was given up, and became content")
            if self._holder.view(ticket) is not None:
                known.polled = known.polled or lease.polls
                require(lease.polls == known.polled, f"T{ticket} was polled again after its view was seen")


def search(seed: int) -> Found | None:
    """Take some hundred steps from a seed; return the first that was wrong."""
    one = _Search(seed)
    try:
        one.run()
    except (BrokenPromiseError, KvbusError) as error:
        return Found(str(error), one.step)
    return None
