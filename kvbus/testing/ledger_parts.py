"""A lender and a backend that a test drives by hand: real parts of the ledger's protocols, without pages or bytes.

They keep the contract of `kvbus.ledger.types` (statements 12 to 16, 29 to 32) and no more: whoever holds one decides
when a lease is granted, when an attempt ends and by which evidence. Each can be told to raise from any of its methods,
since a holder has to survive foreign code. Everything that was asked of them stays readable: nothing is bounded here,
since a test ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import (
    Cancelled,
    Change,
    Delivered,
    Direction,
    Failed,
    LeaseFailure,
    LeaseView,
    Order,
    Result,
    SubmissionRejectedError,
)


@dataclass(slots=True)
class Faults:
    """Which methods of a part raise what; a fault stays until it is taken out again."""

    by_method: dict[str, Exception] = field(default_factory=dict)
    raised: list[str] = field(default_factory=list)

    def plant(self, method: str, error: Exception) -> None:
        """Let a method raise from its next call on."""
        self.by_method[method] = error

    def remove(self, method: str) -> None:
        """Let a method work again."""
        self.by_method.pop(method, None)

    def strike(self, method: str) -> None:
        """Raise what was planted for this method, if anything was; called first in each method."""
        error = self.by_method.get(method)
        if error is not None:
            self.raised.append(method)
            raise error


class ListedLease:
    """One lease of a `ListedLender`: rows 0…n-1 of a prompt on pages of its own, waiting until it is granted.

    `polls`, `marks` and `releases` count the calls that came in, so that a test can demand exactly one.
    """

    def __init__(self, lender: "ListedLender", lease_id: int, direction: Direction, view: LeaseView) -> None:
        self.faults = Faults()
        self.polls = 0
        self.fences = 0
        self.bounds_asked = 0
        self.marks: list[tuple[bool, ...]] = []
        self.releases = 0
        self.granted = False
        self._lender = lender
        self._lease_id = lease_id
        self._direction = direction
        self._view = view
        self._failure: LeaseFailure | None = None
        self._viewed = False

    def __repr__(self) -> str:
        state = "released" if self.releases else "failed" if self._failure else "granted" if self.granted else "waiting"
        return f"<ListedLease {self._lender.name}/{self._lease_id} {self._direction.name} {state}>"

    @property
    def lease_id(self) -> int:
        """A number unique within its lender."""
        return self._lease_id

    @property
    def direction(self) -> Direction:
        """What the lease allows."""
        return self._direction

    @property
    def rank(self) -> int:
        """Which rank's pages it lends."""
        return self._view.rank

    @property
    def lender(self) -> "ListedLender":
        """Who lent it."""
        return self._lender

    @property
    def failure(self) -> LeaseFailure | None:
        """Why it cannot be granted; final (contract 13)."""
        self.faults.strike("failure")
        return self._failure

    @property
    def rows(self) -> int:
        """How many pages it lends."""
        return len(self._view.pages)

    def grant(self) -> None:
        """Let the next poll give the view, and list the lease as changed; a failed lease stays failed."""
        if self._failure is None and not self.granted:
            self.granted = True
            self._lender.list_changed(self._lease_id)

    def refuse(self, text: str = "the pool is full") -> None:
        """Fail the lease for good, and list it as changed; a lease whose view was given out cannot fail any more."""
        if self._viewed:
            raise LedgerContradictionError("a lease fails after its view was given", lease=self._lease_id)
        self._failure, self.granted = LeaseFailure(FailureClass.LEASE_REFUSED, text), False
        self._lender.list_changed(self._lease_id)

    def poll(self) -> LeaseView | None:
        """Return the same view each time once granted, None while waiting and after failure; raises after release."""
        self.polls += 1
        self.faults.strike("poll")
        if self.releases:
            raise LedgerContradictionError("a released lease is polled", lease=self._lease_id)
        if not self.granted:
            return None
        self._viewed = True
        return self._view

    def fence(self) -> LeaseFailure | None:
        """Note that the reader was fenced (P5); refused where a test said so."""
        self.faults.strike("fence")
        if self._lender.fence_refused is None:
            self.fences += 1
        return self._lender.fence_refused

    def mark_arrived(self, arrived: Sequence[bool]) -> None:
        """Note which rows hold content: writes only, once, after the view, one bool a row (contract 14)."""
        self.faults.strike("mark_arrived")
        if self._direction is not Direction.WRITE or not self._viewed or self.marks:
            raise LedgerContradictionError("a mark out of turn", lease=self._lease_id, marks=len(self.marks))
        if len(arrived) != self.rows:
            raise ValueError(f"the mask has {len(arrived)} rows, the lease {self.rows}: send one bool for each")
        if not set(map(type, arrived)) <= {bool}:
            raise TypeError("the mask holds something else than bool: send one bool for each row")
        self.marks.append(tuple(arrived))

    def bounds(self, arrived: Sequence[bool]) -> tuple[int, int]:
        """Return (first block, first block that did not arrive)."""
        self.bounds_asked += 1
        self.faults.strike("bounds")
        if len(arrived) != self.rows:
            raise ValueError(f"the mask has {len(arrived)} rows, the lease {self.rows}: send one bool for each")
        first = self._view.ordinals[0] if self._view.ordinals else 0
        return first, first + (tuple(arrived).index(False) if False in arrived else self.rows)

    def release(self) -> None:
        """Take the pages back; legal in every state, and only the first call changes anything (contract 15)."""
        self.releases += 1
        self.faults.strike("release")
        if self.releases == 1:
            self._lender.take_back(self)


class ListedLender:
    """Lends rows without pages behind them: `lend` makes a lease, `grant` or `refuse` on it decide it.

    `content` holds the names of all rows that came back as arrived, `out` the leases that have not come back.
    """

    def __init__(self, name: str = "lender", *, rank: int = 0, epoch: int = 1 << 32 | 1) -> None:
        self.faults = Faults()
        self.out: dict[int, ListedLease] = {}
        self.content: set[bytes] = set()
        self.progress_calls = 0
        self.fence_refused: LeaseFailure | None = None
        self._name = name
        self._rank = rank
        self._epoch = epoch
        self._changed: dict[int, None] = {}
        self._last_id = 0
        self._next_page = 0

    def __repr__(self) -> str:
        return f"<ListedLender {self._name} out={len(self.out)} content={len(self.content)}>"

    @property
    def name(self) -> str:
        """A name for facts and texts."""
        return self._name

    def lend(self, direction: Direction, rows: int = 1, *, first_ordinal: int = 0, granted: bool = True) -> ListedLease:
        """Return a new lease on so many rows; with `granted` its first poll gives the view."""
        self._last_id += 1
        pages = tuple(range(self._next_page, self._next_page + rows))
        self._next_page += rows
        view = LeaseView(
            pool=self._name,
            rank=self._rank,
            epoch=self._epoch,
            ordinals=tuple(range(first_ordinal, first_ordinal + rows)),
            names=tuple(page.to_bytes(16, "little") for page in pages),
            pages=pages,
            counters=(2 if direction is Direction.READ else 1,) * rows,
        )
        lease = self.out[self._last_id] = ListedLease(self, self._last_id, direction, view)
        if granted:
            lease.grant()
        return lease

    def list_changed(self, lease_id: int) -> None:
        """Name a lease in the next answer of `progress`."""
        self._changed[lease_id] = None

    def take_back(self, lease: ListedLease) -> None:
        """Take a released lease's rows: those marked as arrived become content."""
        del self.out[lease.lease_id]
        view = lease._view  # noqa: SLF001 - its own lender
        for mask in lease.marks:
            self.content.update(name for name, arrived in zip(view.names, mask, strict=True) if arrived)

    def progress(self) -> Sequence[int]:
        """Return and forget the ids of leases that changed since the last call."""
        self.progress_calls += 1
        self.faults.strike("progress")
        changed = tuple(self._changed)
        self._changed.clear()
        return changed


class ManualBackend:
    """Moves nothing: keeps each order until a test says by `tell`, `deliver`, `fail` or `end` what became of it.

    `open` holds the (ticket, attempt) pairs without access-end evidence; what was asked of it stays in `orders`,
    `cancels`, `isolations`, `shutdowns` and `holds_released`.
    """

    def __init__(self, name: str = "manual") -> None:
        self.faults = Faults()
        self.orders: dict[int, Order] = {}
        self.open: dict[tuple[int, int], None] = {}
        self.cancels: list[tuple[int, int]] = []
        self.isolations: list[str] = []
        self.shutdowns: list[float] = []
        self.holds_released = 0
        self.changes_calls = 0
        self._name = name
        self._is_shut = False
        self._changes: list[Change] = []

    def __repr__(self) -> str:
        return f"<ManualBackend {self._name} orders={len(self.orders)} open={len(self.open)}>"

    @property
    def name(self) -> str:
        """A name for facts and texts."""
        return self._name

    # ------------------------------------------------------------------------------------------ what a test decides

    def tell(self, change: Change) -> None:
        """Report a change as it is, true or not; evidence closes its attempt."""
        if change.evidence is not None:
            self.open.pop((change.ticket, change.attempt), None)
        self._changes.append(change)

    def deliver(
        self, ticket: int, arrived: Sequence[bool] | None = None, *, evidence: Evidence | None = Evidence.COMPLETED
    ) -> None:
        """End an order with the rows that arrived (all by default), 1,000 bytes each, and by evidence if given."""
        mask = (True,) * len(self.orders[ticket].view.pages) if arrived is None else tuple(arrived)
        self.answer(ticket, Delivered(mask, 1_000 * sum(mask)), evidence)

    def fail(
        self, ticket: int, failure: FailureClass = FailureClass.TRANSPORT, *, evidence: Evidence | None = None
    ) -> None:
        """End an order with a failure, and by evidence if given."""
        self.answer(ticket, Failed(failure, "the transport failed"), evidence)

    def stop(self, ticket: int, arrived: Sequence[bool], *, evidence: Evidence | None = None) -> None:
        """End an order as cancelled, with what arrived whole before, and by evidence if given."""
        self.answer(ticket, Cancelled(tuple(arrived), 1_000 * sum(arrived)), evidence)

    def answer(self, ticket: int, result: Result | None, evidence: Evidence | None) -> None:
        """Report of an order's attempt."""
        self.tell(Change(ticket, self.orders[ticket].attempt, result, evidence))

    def end(self, ticket: int, evidence: Evidence = Evidence.COMPLETED) -> None:
        """Report only that access has ended."""
        self.answer(ticket, None, evidence)

    # --------------------------------------------------------------------------------------- what the holder asks

    def submit(self, order: Order) -> None:
        """Take an order. A planted rejection leaves nothing, any other error leaves bytes moving (contract 33)."""
        if self._is_shut:
            raise SubmissionRejectedError(FailureClass.SHUTDOWN, f"{self._name} is shut down")
        if not isinstance(self.faults.by_method.get("submit"), SubmissionRejectedError):
            self.orders[order.ticket] = order
            self.open[order.ticket, order.attempt] = None
        self.faults.strike("submit")

    def changes(self) -> Sequence[Change]:
        """Return and forget what was told since the last call."""
        self.changes_calls += 1
        self.faults.strike("changes")
        told, self._changes = self._changes, []
        return told

    def cancel(self, ticket: int, attempt: int) -> None:
        """Note the wish."""
        self.cancels.append((ticket, attempt))
        self.faults.strike("cancel")

    def isolate(self, peer: str) -> None:
        """Note the peer."""
        self.isolations.append(peer)
        self.faults.strike("isolate")

    def fence_refusal(self, ticket: int, attempt: int) -> str:
        """Say that a reader may be fenced if it was isolated, and its attempt is open."""
        self.faults.strike("fence_refusal")
        peer = self.orders[ticket].peer
        return "" if (ticket, attempt) in self.open and peer in self.isolations else f"{peer} is not isolated"

    def fenced(self, ticket: int, attempt: int) -> None:
        """Close an attempt that was fenced."""
        self.faults.strike("fenced")
        del self.open[ticket, attempt]

    def shutdown(self, budget_s: float) -> Sequence[tuple[int, int]]:
        """Take nothing more, and return what is open; nothing ends by itself."""
        self._is_shut = True
        self.shutdowns.append(budget_s)
        self.faults.strike("shutdown")
        return tuple(self.open)

    def release_hold(self) -> None:
        """Count; a second call, or one with an attempt open, is a contradiction."""
        self.faults.strike("release_hold")
        if self.holds_released or self.open:
            raise LedgerContradictionError("hold released out of turn", open=len(self.open))
        self.holds_released += 1
