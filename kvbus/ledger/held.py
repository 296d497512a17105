"""What the holder remembers of one lease, and the rules for its bits; the state diagram of a lease stands here.

    taken ──▶ granted ──▶ submitted ──▶ result fixed ─┐
      │          │            │                       ├─▶ access ended ─▶ (settled, writes only) ─▶ returned
      └──────────┴────────────┴── abandoned ──────────┘

A result (delivered, failed, cancelled) says what counts as content. Access end says who may still touch memory. They
arrive in any order, and neither implies the other. A read may go back fenced, without access end (`fencing.py`).
"""

from dataclasses import dataclass, field
from enum import StrEnum

from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import (
    EVIDENCE_BITS,
    RESULT_BITS,
    Evidence,
    Fact,
    FailureClass,
    GrantedRow,
    OutcomeRow,
)
from kvbus.ledger.types import Delivered, Direction, Failed, Lease, LeaseView, Result, SubmitMode


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
    FENCED = "fenced"
    """A reader may still read, and cannot deliver what it reads: the read goes back (P5)."""
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
        (Stage.SUBMITTED, Stage.FENCED),
        (Stage.RETAINED, Stage.FENCED),
        (Stage.FENCED, Stage.RETURNED),
        (Stage.FENCED, Stage.RETURN_FAILED),
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
    if bits & _FENCED:
        return Stage.FENCED
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

# Looking a name up in an enum costs more than what is computed with it here, for every lease.
_WRITE = Direction.WRITE
_TAKEN = int(Fact.TAKEN)
_GRANTED = int(Fact.GRANTED)
_DELIVERED = int(Fact.DELIVERED)
_FAILED = int(Fact.FAILED)
_CANCELLED = int(Fact.CANCELLED)
_ACCESS_ENDED = int(Fact.ACCESS_ENDED)
_SETTLED = int(Fact.SETTLED)
_FENCED = int(Fact.FENCED)
_MAY_RETURN = Fact.ACCESS_ENDED | Fact.FENCED
_NOT_CONTENT = Fact.ABANDONED | Fact.FAILED
_NEVER_ACCESSED = Fact.ACCESS_ENDED | Fact.EVIDENCE_NEVER_SUBMITTED


@dataclass(slots=True)
class Held:
    """One taken lease. `attempt` is 0 until a backend was asked; `attempt_open` until that attempt has evidence.

    `suspect`: its lender is stopped or its backend contradicted itself, so it is never returned. `contradicted`: only
    the second, so that no evidence of that backend counts any more. What the lease says of itself is asked once.
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
    lender: str = field(init=False)
    lease_id: int = field(init=False)
    rank: int = field(init=False)
    writes: bool = field(init=False)
    bits: int = _TAKEN
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
    closed: bool = False
    """True once the result is fixed: no further attempt may start (P3, P4)."""

    def __post_init__(self) -> None:
        lease = self.lease
        self.lender, self.lease_id, self.rank = lease.lender.name, lease.lease_id, lease.rank
        self.writes = self.mode.direction is _WRITE

    @property
    def rows(self) -> int:
        """How many pages it has; none before its view is known."""
        return 0 if self.view is None else len(self.view.pages)

    def grant(self, view: LeaseView) -> GrantedRow:
        """Note which pages it has, and return the row that says so."""
        self.view = view
        self.bits |= _GRANTED
        whose = self.ticket, self.transfer, view.rank, self.writes, self.lender, self.peer
        return GrantedRow(*whose, view.pages, view.counters)

    def fix(self, result: Result) -> None:
        """Fix the result of a lease that has none; it is never changed (P17, contract 46)."""
        self.closed = True
        if isinstance(result, Failed):
            self.bits |= _FAILED
            self.arrived = (False,) * self.rows
        else:
            self.bits |= _DELIVERED if isinstance(result, Delivered) else _CANCELLED
            if self.view is not None:
                self.arrived, self.length_bytes = result.arrived, result.length_bytes
        self.binding.length_bytes += self.length_bytes
        self.end_access_if_proved()
        self.binding.track(self)

    def begin_attempt(self) -> None:
        """Note that a backend is about to get the lease: its memory may be accessed from here on."""
        self.attempt, self.attempt_open = 1, True
        self.binding.open_attempts += 1

    def withdraw_attempt(self) -> None:
        """Note that the backend would not have it, and that nothing has escaped."""
        self.attempt, self.attempt_open = 0, False
        self.binding.open_attempts -= 1
        self.binding.rejections += 1

    def fence(self) -> None:
        """Note that the open attempt may touch memory still, and can deliver nothing of it; no evidence of its end."""
        self.attempt_open = False
        self.bits |= _FENCED
        self.binding.track(self)

    def end_attempt(self, evidence: Evidence) -> None:
        """Note that the open attempt can touch nothing any more."""
        self.attempt_open = False
        self.bits |= evidence
        if self.closed:
            self.end_access_if_proved()
            self.binding.track(self)

    def end_access_if_proved(self) -> None:
        """Turn ACCESS_ENDED on if nothing is open and nothing can start; the one place where that happens."""
        if self.closed and not (self.attempt_open or self.bits & _FENCED):
            self.bits |= _ACCESS_ENDED if self.attempt else _NEVER_ACCESSED

    @property
    def returnable(self) -> bool:
        """Statements 2 and 3, R6: reads need access end; writes need a fixed result, access end and a settle.

        A read that was fenced goes back too (P5); a write never does for that.
        """
        if self.suspect:
            return False
        if self.writes:
            return bool(self.bits & _ACCESS_ENDED and self.bits & _SETTLED)
        return bool(self.bits & _MAY_RETURN)

    @property
    def counts(self) -> bool:
        """True where the rows that arrived become content: of a write that nobody gave up, and that did not fail."""
        return self.writes and not self.bits & _NOT_CONTENT

    @property
    def retained(self) -> bool:
        """True while the result is fixed but access has not ended: nobody waits any more, the memory does."""
        return self.closed and not self.bits & _MAY_RETURN

    def outcome(self, evidence: str, text: str) -> OutcomeRow:
        """Return the audit row of the attempt that just ended."""
        result, arrived = type(self.said).__name__.lower() if self.said else "unknown", sum(self.arrived)
        told = self.text or text
        return OutcomeRow(self.ticket, 1, result, arrived, self.length_bytes, evidence, self.failure, told)

    def checked(self, result: Result) -> Result:
        """Return a backend's result, or a failure where its mask does not fit the rows of a write lease."""
        if not self.writes or isinstance(result, Failed) or len(result.arrived) == self.rows:
            return result
        return Failed(FailureClass.CONTRADICTION, f"the mask has {len(result.arrived)} rows, the lease {self.rows}")
