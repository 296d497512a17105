"""One transfer's life on its destination, and its one deadline (R12).

Events go in with `now`; actions come out, for the worker to carry out. A transfer never frees a page: it asks leases to
stop, gives them up, and waits for the ledger to say that access has ended.

    resolving ─▶ leasing ─▶ asking ─▶ moving ─▶ settling ─▶ ended
        │           │          │        │          ▲          ▲
        ▼           ▼          │        ▼          │          │
      ended       ended        └─────▶ stopping ───┴──────────┘
                                        access ended │ given back without it
"""

from dataclasses import dataclass, field
from enum import StrEnum

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.facts import RESULT_BITS, Fact, FailureClass, evidence_names

STOP_WAIT_S = 2.0
"""How long a stopped attempt may take to end by itself before its peer is isolated: local gets end in milliseconds,
so two seconds of silence mean a peer that does not move. The same time again is left for what isolation brings."""


class Phase(StrEnum):
    """Where a transfer stands."""

    RESOLVING = "resolving"
    """The engine turns the prompt into token ids."""
    LEASING = "leasing"
    """Free pages are leased for writing."""
    ASKING = "asking"
    """The source is asked to lend, and may be computing."""
    MOVING = "moving"
    """The backend reads."""
    STOPPING = "stopping"
    """It will not succeed any more; access has not ended yet."""
    SETTLING = "settling"
    """Access has ended; the decision is being made and applied."""
    ENDED = "ended"


# Looking a name up in an enum costs more than what is decided by it here, for every line of facts.
_RESOLVING, _LEASING, _ASKING, _MOVING, _STOPPING, _SETTLING, _ENDED = Phase
_ACCESS_ENDED, _ABANDONED, _RETURN_FAILED = int(Fact.ACCESS_ENDED), int(Fact.ABANDONED), int(Fact.RETURN_FAILED)
_GIVEN_BACK = Fact.RETURNED | Fact.RETURN_FAILED

TRANSITIONS: frozenset[tuple[Phase, Phase]] = frozenset(
    {
        (Phase.RESOLVING, Phase.LEASING),
        (Phase.LEASING, Phase.ASKING),
        (Phase.ASKING, Phase.MOVING),
        (Phase.MOVING, Phase.SETTLING),
        (Phase.MOVING, Phase.STOPPING),
        (Phase.ASKING, Phase.STOPPING),
        (Phase.STOPPING, Phase.SETTLING),
        (Phase.RESOLVING, Phase.ENDED),
        (Phase.LEASING, Phase.ENDED),
        (Phase.SETTLING, Phase.ENDED),
        (Phase.STOPPING, Phase.ENDED),
    }
)
"""All allowed moves; no other code changes the phase."""


@dataclass(frozen=True, slots=True)
class LeasePages:
    """Lease free pages for the blocks that are missing here."""


@dataclass(frozen=True, slots=True)
class AskSource:
    """Ask the source to lend, and keep asking while it computes."""


@dataclass(frozen=True, slots=True)
class Read:
    """Give the leases their order: the grant is here."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask the leases' attempts to stop; what arrived whole counts."""

    text: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Abandon the leases: nothing of them counts."""

    failure: FailureClass
    text: str


@dataclass(frozen=True, slots=True)
class IsolateSource:
    """End what runs with the source on this binding: it does not move."""

    text: str


@dataclass(frozen=True, slots=True)
class CloseKey:
    """Tell the source, until it confirms, that access under this transfer's key has ended for good."""


@dataclass(frozen=True, slots=True)
class Report:
    """The transfer has ended: tell everybody who asked."""


Action = LeasePages | AskSource | Read | Stop | GiveUp | IsolateSource | CloseKey | Report


@dataclass(slots=True)
class Share:
    """One rank's lease in a transfer, as its facts tell."""

    rank: int
    bits: int = 0
    lo: int = 0
    hi: int = 0
    arrived: int = 0
    length_bytes: int = 0


@dataclass(slots=True)
class Timings:
    """Durations of the parts of a transfer, in seconds; 0 where a part was not reached."""

    queue_s: float = 0.0
    grant_s: float = 0.0
    move_s: float = 0.0
    total_s: float = 0.0


@dataclass(slots=True)
class Transfer:
    """One transfer. `budget_s` counts on the caller's monotonic clock from admission and is never extended."""

    transfer: str
    request_hash: str
    source: str
    admitted_at: float
    budget_s: float
    queue_s: float = 0.0
    deadline: float = field(init=False)
    """When the budget is spent."""
    phase: Phase = Phase.RESOLVING
    outcome: str = ""
    failure: FailureClass = FailureClass.NONE
    reason: str = ""
    prompt_tokens: int = 0
    blocks_wanted: int = 0
    blocks_held: int = 0
    prefix_held: int = 0
    blocks_granted: int = 0
    shares: dict[int, Share] = field(default_factory=dict)
    asked: bool = False
    _asked_at: float = 0.0
    _granted_at: float = 0.0
    _access_ended_at: float = 0.0
    _stopping_since: float = 0.0
    _isolated: bool = False
    _key_closed: bool = False
    _ended_at: float = 0.0

    def __post_init__(self) -> None:
        self.deadline = self.admitted_at + self.budget_s

    def __repr__(self) -> str:
        return f"<Transfer {self.transfer} {self.phase.value} from {self.source} {self.reason}>"

    def remaining_s(self, now: float) -> float:
        """Return what is left of the budget; never negative."""
        return max(0.0, self.deadline - now)

    # ------------------------------------------------------------------------------------------------------- events

    def resolved(
        self, now: float, *, prompt_tokens: int, blocks_wanted: int, blocks_held: int, prefix_held: int
    ) -> list[Action]:
        """The prompt has token ids: so many whole blocks, so many here already, so many before the first gap."""
        if self.phase is not _RESOLVING:
            return []
        self.prompt_tokens, self.blocks_wanted, self.blocks_held = prompt_tokens, blocks_wanted, blocks_held
        self.prefix_held = prefix_held
        if blocks_wanted == blocks_held:
            few = f"the prompt has {prompt_tokens} tokens, less than one block: there is nothing to move"
            self.outcome = "settled"
            self.reason = "every whole block of the prompt is here already" if blocks_wanted else few
            return self._end(now)
        self._go(_LEASING)
        return [LeasePages()]

    def leased(self, now: float, tickets: dict[int, int]) -> list[Action]:
        """Pages are leased: ticket → rank."""
        if self.phase is not _LEASING:
            raise LedgerContradictionError("pages leased twice", transfer=self.transfer, phase=self.phase.value)
        if not tickets:
            raise LedgerContradictionError("no pages leased", transfer=self.transfer)
        self.shares = {ticket: Share(rank) for ticket, rank in tickets.items()}
        self._go(_ASKING)
        self._asked_at, self.asked = now, True
        return [AskSource()]

    def granted(self, now: float, blocks: int) -> list[Action]:
        """The source lends: so many of the missing blocks, in their order."""
        if self.phase is not _ASKING:  # too late: the key is closed, the grant is not used
            return []
        self.blocks_granted = blocks
        self._granted_at = now
        self._go(_MOVING)
        return [Read()]

    def failed(self, now: float, failure: FailureClass, text: str) -> list[Action]:
        """Something ended the transfer before bytes moved: a refusal, a lost source, a bad prompt."""
        if self.phase in {_MOVING, _SETTLING, _STOPPING, _ENDED}:
            return []
        self._blame("failed", failure, text)
        if not self.shares:
            return self._end(now)
        return self._give_up(now)

    def cancelled(self, now: float, failure: FailureClass, text: str) -> list[Action]:
        """Somebody asked that this stop (CANCELLED, SHUTDOWN); blocks that arrived whole before that are kept."""
        return self._stop(now, "cancelled", failure, text)

    def facts(self, now: float, ticket: int, bits: int, lo: int, hi: int) -> list[Action]:
        """A line of the ledger's facts about one of this transfer's leases."""
        share = self.shares.get(ticket)
        if share is None:
            return []
        share.bits |= bits
        if lo or hi:
            share.lo, share.hi = lo, hi
        actions: list[Action] = []
        if share.bits & RESULT_BITS and self.phase is _ASKING:
            # The pool, or the binding, would not take it: there is nothing to read into.
            actions += self._give_up(now)
        shares = self.shares.values()
        if share.bits & _ACCESS_ENDED and all(other.bits & _ACCESS_ENDED for other in shares):
            actions += self._access_ended(now)
        if share.bits & _GIVEN_BACK and all(other.bits & _GIVEN_BACK for other in shares):
            actions += self._end(now)
        return actions

    def detail(self, ticket: int, failure: FailureClass, text: str) -> None:
        """Why a lease of this transfer failed; the first reason stands."""
        if ticket in self.shares and failure and not self.failure:
            self._blame("failed", failure, text)

    def arrived(self, ticket: int, blocks: int, length_bytes: int) -> None:
        """How much of one lease arrived whole."""
        if share := self.shares.get(ticket):
            share.arrived, share.length_bytes = blocks, length_bytes

    def tick(self, now: float) -> list[Action]:
        """Time has passed: stop at the deadline; isolate a peer that does not move; never free anything."""
        if self.phase is _STOPPING:
            return self._tick_stopping(now)
        if now < self.deadline:
            return []
        if self.phase is _SETTLING:
            return self._tick_settling(now)
        return self._stop(now, "failed", FailureClass.DEADLINE, f"the budget of {self.budget_s:g} s is spent")

    @property
    def isolated(self) -> bool:
        """True once its source had to be isolated."""
        return self._isolated

    @property
    def finished(self) -> bool:
        """True once it has ended and the source need hear no more of it: access has ended, or was never asked for."""
        return self.phase is _ENDED and (self._key_closed or not self.asked)

    # ------------------------------------------------------------------------------------------------------ looking

    @property
    def blocks_moved(self) -> int:
        """Blocks that arrived whole on every rank."""
        return min([share.arrived for share in self.shares.values()], default=0)

    @property
    def length_bytes(self) -> int:
        """Bytes that arrived whole, over all ranks."""
        return sum([share.length_bytes for share in self.shares.values()])

    @property
    def bounds(self) -> tuple[int, int]:
        """Where the prompt may resume, in blocks: the largest floor and the smallest end over the ranks."""
        held = (self.prefix_held, self.prefix_held)  # all that can be used of a rank that got nothing
        ranges = [(one.lo, one.hi) if one.lo or one.hi else held for one in self.shares.values()] or [held]
        lows, highs = zip(*ranges, strict=True)
        lo, hi = max(lows), min(highs)
        return (lo, hi) if lo <= hi else (0, 0)

    @property
    def evidence(self) -> tuple[str, ...]:
        """The kinds of evidence by which access to this transfer's leases ended."""
        bits = 0
        for share in self.shares.values():
            bits |= share.bits
        return evidence_names(bits)

    @property
    def timings(self) -> Timings:
        """Durations so far."""
        return Timings(
            queue_s=self.queue_s,
            grant_s=max(0.0, self._granted_at - self._asked_at) if self._granted_at else 0.0,
            move_s=max(0.0, self._access_ended_at - self._granted_at) if self._granted_at else 0.0,
            total_s=max(0.0, self._ended_at - self.admitted_at) if self._ended_at else 0.0,
        )

    # ------------------------------------------------------------------------------------------------------- inside

    def _go(self, phase: Phase) -> None:
        if (self.phase, phase) not in TRANSITIONS:
            raise LedgerContradictionError(
                "no such move", transfer=self.transfer, held=self.phase.value, claim=phase.value
            )
        self.phase = phase

    def _blame(self, outcome: str, failure: FailureClass, text: str) -> None:
        if not self.outcome:
            self.outcome, self.failure, self.reason = outcome, failure, text

    def _stop(self, now: float, outcome: str, failure: FailureClass, text: str) -> list[Action]:
        if self.phase in {_STOPPING, _SETTLING, _ENDED}:
            return []
        self._blame(outcome, failure, text)
        if not self.shares:
            return self._end(now)
        if self.phase is not _MOVING:
            return self._give_up(now)
        self._go(_STOPPING)
        self._stopping_since = now
        return [Stop(text)]

    def _give_up(self, now: float) -> list[Action]:
        """Nothing was submitted: abandoning gives the pages back as soon as that is agreed."""
        self._blame("failed", FailureClass.LEASE_REFUSED, "the lease was refused")
        self._go(_STOPPING)
        self._stopping_since = now
        return [GiveUp(self.failure, self.reason)]

    def _access_ended(self, now: float) -> list[Action]:
        """Access has ended here, for good: the source may hear it, also where the transfer has long been given up."""
        if self.phase in {_MOVING, _STOPPING}:
            self._go(_SETTLING)
            self._access_ended_at = now
        if self._key_closed or not self.asked:
            return []
        self._key_closed = True
        return [CloseKey()]

    def _tick_stopping(self, now: float) -> list[Action]:
        waited_s = now - self._stopping_since
        if waited_s >= STOP_WAIT_S and not self._isolated:
            self._isolated = True
            return [IsolateSource(f"no access end {STOP_WAIT_S:g} s after the stop: {self.reason}")]
        if waited_s >= 2 * STOP_WAIT_S:  # the request is given back; the pages stay out until there is evidence
            self._go(_ENDED)
            self._ended_at = now
            return [GiveUp(self.failure, self.reason), Report()]
        return []

    def _tick_settling(self, now: float) -> list[Action]:
        if now < self.deadline + 2 * STOP_WAIT_S:
            return []
        self._blame("failed", FailureClass.DEADLINE, "the members did not agree in time")
        self._go(_ENDED)
        self._ended_at = now
        return [GiveUp(self.failure, self.reason), Report()]

    def _end(self, now: float) -> list[Action]:
        if self.phase not in {_RESOLVING, _LEASING, _SETTLING}:
            return []
        if not self.outcome:
            self._conclude()
        self._go(_ENDED)
        self._ended_at = now
        return [Report()]

    def _conclude(self) -> None:
        missing = self.blocks_wanted - self.blocks_held
        if any(share.bits & _RETURN_FAILED for share in self.shares.values()):
            self._blame("failed", FailureClass.LENDER_STOPPED, "what arrived was not taken in: its lender stopped")
        elif any(share.bits & _ABANDONED for share in self.shares.values()):
            self._blame("failed", FailureClass.CONTRADICTION, "what arrived was given up: the decision was voided")
        elif self.blocks_moved == missing:
            self.outcome = "settled"
        elif self.blocks_moved and self.blocks_moved == self.blocks_granted:
            self.outcome, self.reason = "partial", f"the source lent {self.blocks_granted} of {missing} blocks"
        else:
            reason = f"{self.blocks_moved} of {self.blocks_granted} lent blocks arrived whole"
            self._blame("failed", FailureClass.TRANSPORT, reason)
