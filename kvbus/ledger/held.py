"""What the holder remembers of one lease, and the rules for its bits; the state diagram of a lease stands here.

    taken ──▶ granted ──▶ submitted ──▶ result fixed ─┐
      │          │            │                       ├─▶ access ended ─▶ (settled, writes only) ─▶ returned
      └──────────┴────────────┴── abandoned ──────────┘

A result (delivered, failed, cancelled) says what counts as content. Access end says who may still touch memory. They
arrive in any order, and neither implies the other.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import EVIDENCE_BITS, RESULT_BITS, Evidence, Fact, FailureClass
from kvbus.ledger.types import Cancelled, Delivered, Direction, Failed, Lease, LeaseView, Result, SubmitMode


class Stage(StrEnum):
    """Where a lease stands, as its bits tell."""

    TAKEN = "taken"
    """The holder owns it; its pages are not known."""
    GRANTED = "granted"
    """Its pages are known, and nobody was given them."""
    SUBMITTED = "submitted"
    """A backend has it: its pages may be accessed."""
    QUIET = "quiet"
    """Nobody touches its pages any more; what arrived is not known."""
    RETAINED = "retained"
    """What arrived is fixed; its pages may still be accessed."""
    ACCESS_ENDED = "access ended"
    """Both are known: a read goes back, a write once it is settled."""
    RETURNED = "returned"
    """Its lender has it back."""
    RETURN_FAILED = "return failed"
    """Its lender raised: never tried again, its pages stay out of use."""


LIFE: frozenset[tuple[Stage, Stage]] = frozenset(
    {
        (Stage.TAKEN, Stage.GRANTED),
        (Stage.TAKEN, Stage.ACCESS_ENDED),
        (Stage.GRANTED, Stage.SUBMITTED),
        (Stage.GRANTED, Stage.RETAINED),
        (Stage.GRANTED, Stage.ACCESS_ENDED),
        (Stage.SUBMITTED, Stage.QUIET),
        (Stage.SUBMITTED, Stage.RETAINED),
        (Stage.SUBMITTED, Stage.ACCESS_ENDED),
        (Stage.QUIET, Stage.ACCESS_ENDED),
        (Stage.RETAINED, Stage.ACCESS_ENDED),
        (Stage.ACCESS_ENDED, Stage.RETURNED),
        (Stage.ACCESS_ENDED, Stage.RETURN_FAILED),
    }
)
"""All moves that a lease can make. A test holds the holder to it, and docs/ownership.md draws it."""


def stage_of(bits: int) -> Stage:
    """Return where a lease with these fact bits stands."""
    if bits & Fact.RETURN_FAILED:
        return Stage.RETURN_FAILED
    if bits & Fact.RETURNED:
        return Stage.RETURNED
    if bits & _ACCESS_ENDED:
        return Stage.ACCESS_ENDED
    if bits & RESULT_BITS:
        return Stage.RETAINED
    if bits & EVIDENCE_BITS:
        return Stage.QUIET
    if bits & Fact.SUBMITTED:
        return Stage.SUBMITTED
    return Stage.GRANTED if bits & Fact.GRANTED else Stage.TAKEN


class NotYet:
    """The hint of a lease whose order will be given later, by `assign`."""


NOT_YET = NotYet()

_DELIVERED = int(Fact.DELIVERED)
_FAILED = int(Fact.FAILED)
_CANCELLED = int(Fact.CANCELLED)
_ACCESS_ENDED = int(Fact.ACCESS_ENDED)
_SETTLED = int(Fact.SETTLED)
_NEVER_SUBMITTED = int(Fact.EVIDENCE_NEVER_SUBMITTED)


@dataclass(slots=True)
class Held:
    """One taken lease. `attempt` is 0 until a backend was asked; `attempt_open` until that attempt has evidence.

    `suspect`: its lender is stopped or its backend contradicted itself, so it is never returned. `contradicted`: only
    the second, so that no evidence of that backend counts any more.
    """

    ticket: int
    lease: Lease
    mode: SubmitMode
    binding: Binding
    peer: str
    transfer: str
    hint: object
    timeout_s: float | None
    taken_at: float
    bits: int = int(Fact.TAKEN)
    view: LeaseView | None = None
    attempt: int = 0
    attempt_open: bool = False
    cancel_sent: bool = False
    suspect: bool = False
    contradicted: bool = False
    said: Result | None = None
    failure: FailureClass = FailureClass.NONE
    text: str = ""
    arrived: tuple[bool, ...] = ()
    length_bytes: int = 0
    lo: int = 0
    hi: int = 0

    @property
    def lender(self) -> str:
        """The name of whoever lent it."""
        return self.lease.lender.name

    @property
    def closed(self) -> bool:
        """True once the result is fixed: no further attempt may start (P3, P4)."""
        return bool(self.bits & RESULT_BITS)

    def fix(self, result: Result) -> None:
        """Fix the result of a lease that has none; it is never changed (P17, contract 46)."""
        match result:
            case Delivered():
                self.bits |= _DELIVERED
            case Failed():
                self.bits |= _FAILED
            case Cancelled():
                self.bits |= _CANCELLED
        if self.view is not None:
            rows = len(self.view.pages)
            self.arrived = (False,) * rows if isinstance(result, Failed) else result.arrived
            self.length_bytes = 0 if isinstance(result, Failed) else result.length_bytes
        self.end_access_if_proved()

    def end_attempt(self, evidence: Evidence) -> None:
        """Note that the open attempt can touch nothing any more."""
        self.attempt_open = False
        self.bits |= int(evidence)
        self.end_access_if_proved()

    def end_access_if_proved(self) -> None:
        """Turn ACCESS_ENDED on if nothing is open and nothing can start; the one place where that happens."""
        if self.attempt_open or not self.closed:
            return
        if self.attempt == 0:
            self.bits |= _NEVER_SUBMITTED
        self.bits |= _ACCESS_ENDED

    @property
    def returnable(self) -> bool:
        """Statements 2 and 3, R6: reads need access end; writes need a fixed result, access end and a settle."""
        if self.suspect or not self.bits & _ACCESS_ENDED:
            return False
        return self.mode.direction is Direction.READ or bool(self.bits & _SETTLED)

    @property
    def retained(self) -> bool:
        """True while the result is fixed but access has not ended: nobody waits any more, the memory does."""
        return self.closed and not self.bits & _ACCESS_ENDED

    def checked(self, result: Result) -> Result:
        """Return a backend's result, or a failure where its mask does not fit the rows of a write lease."""
        rows = len(self.view.pages) if self.view is not None else 0
        if self.mode.direction is Direction.READ or isinstance(result, Failed) or len(result.arrived) == rows:
            return result
        return Failed(FailureClass.CONTRADICTION, f"the mask has {len(result.arrived)} rows, the lease {rows}")
