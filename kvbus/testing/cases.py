"""What a checker needs to know of a part: the part itself, work for it, and the other side's doings.

`kvbus.testing.contracts` explains how to make one; the promises that are checked stand in `backend_promises.py` and
`lender_promises.py`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from kvbus.ledger.types import Backend, Direction, Lease, Lender, Order

T = TypeVar("T")

DEADLINE_S = 10.0
"""How long an attempt may take to end once its other side has let it: local ones take milliseconds, and only a hang or
a starved machine meets this."""


class ContractViolationError(AssertionError):
    """A part broke a numbered statement of the ownership contract (docs/ownership.md); the text says which and how."""

    def __init__(self, statement: str, text: str) -> None:
        super().__init__(f"contract {statement}: {text}")
        self.statement = statement


def violated(statement: str, text: str) -> NoReturn:
    """Raise ContractViolationError."""
    raise ContractViolationError(statement, text)


def require(holds: object, statement: str, text: str) -> None:
    """Raise ContractViolationError unless it holds."""
    if not holds:
        violated(statement, text)


@dataclass(slots=True)
class Calls:
    """Calls of the checked part: an exception that its protocol does not know becomes a violation with a name.

    `running` names the call that has not returned, so that one that never does can be named too.
    """

    running: str = ""

    def ask(self, what: str, call: Callable[[], T], expected: tuple[type[Exception], ...] = ()) -> T:
        """Return what a call returns; exceptions in `expected` pass, any other is a violation of R21."""
        self.running = what
        try:
            return call()
        except Exception as error:
            if isinstance(error, (ContractViolationError, *expected)):
                raise
            raise ContractViolationError("R21", f"{what} raised {error!r}, which its protocol does not know") from error
        finally:
            self.running = ""


@dataclass(frozen=True, slots=True)
class BackendCase:
    """One backend, ready to take orders, and what its checker may ask for. Only `backend` and `order` are required.

    `order(ticket, attempt, peer)` returns an order that the backend can serve, on pages of its own for each ticket;
    tickets 1 to 4 are used, and the peers "one" and "two".
    `end(order)` lets an attempt end from its other side: a reader's word, an engine's commit. Leave it out where
    attempts end by themselves; with it, an attempt that ends without it is a violation.
    `refused(ticket)` returns an order that has to be rejected before anything escapes.
    `wakes()` counts the wake signals so far. `content(order)` returns the bytes of an order's pages now.
    `isolates` is False for a backend without peers, which has nobody to refuse.
    """

    backend: Backend
    order: Callable[[int, int, str], Order]
    end: Callable[[Order], None] | None = None
    refused: Callable[[int], Order] | None = None
    wakes: Callable[[], int] | None = None
    content: Callable[[Order], bytes] | None = None
    isolates: bool = True
    deadline_s: float = DEADLINE_S
    calls: Calls = field(default_factory=Calls)


@dataclass(frozen=True, slots=True)
class LenderCase:
    """One lender with room for eight pages or more, and what its checker may ask for.

    `lend(direction, rows)` returns a lease on so many rows, at most three, none of which was lent before: for reading,
    of content that is there; for writing, of new names. A lender without room returns a failed lease.
    `grant(lease)` lets a waiting lease be granted. Leave it out where leases are granted at once.
    `refused()` returns a lease that the lender's state does not allow. `faults` are calls with arguments that fit
    nothing: each must raise ValueError or TypeError. `state()` returns anything that differs if pages, leases or
    content do. `content()` returns the names that could be lent for reading now.
    """

    lender: Lender
    lend: Callable[[Direction, int], Lease]
    grant: Callable[[Lease], None] | None = None
    refused: Callable[[], Lease] | None = None
    faults: Sequence[Callable[[], object]] = ()
    state: Callable[[], object] | None = None
    content: Callable[[], Collection[bytes]] | None = None
    calls: Calls = field(default_factory=Calls)
