"""What one member holds of its instance's transfers, and where it stands in the one log of their decisions.

Several members share a transfer: each rank reads its own pages under a ticket of its own, and nobody returns or shows
anything before all have agreed. Decisions reach every member by the log, in its order (P12), and go through one share
like this:

    open ──▶ settled ──▶ visible
     │          │
     └──────────┴──────▶ void

A share that is `settled` is a promise: this member gives it up no more, whatever its own deadline says, and waits for
the word of the log (P11). What a member reports is its state, never a change, so a lost or repeated report is harmless.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from kvbus.ledger.agreement import Decision, Party
from kvbus.ledger.facts import RESULT_BITS, Evidence, Fact

_WHOLE = int(Fact.DELIVERED | Fact.ACCESS_ENDED) | int(Evidence.NEVER_SUBMITTED)
_REFUSED = int(Fact.FAILED | Fact.ABANDONED | Fact.ACCESS_ENDED) | int(Evidence.NEVER_SUBMITTED)
_ACCESS_ENDED = int(Fact.ACCESS_ENDED)
_ABANDONED = int(Fact.ABANDONED)

TERM_MAX = 2**62
"""No term that members take one by one gets there; whoever names a higher one is wrong, and would leave no room for
the next."""
SHARES_MAX = 128
"""Transfers open at once over an instance: twice what its queue hands out (64), since ended ones count until every
member has applied their end."""


REASON_LENGTH_MAX = 200
"""Characters of a reason in a report: a sentence; 128 of them stay below a tenth of what a report may hold."""


class ShareStage(StrEnum):
    """How far the decisions about one transfer got at this member."""

    OPEN = "open"
    SETTLED = "settled"
    """The settle is applied here: the lease is kept for it until the log says how it ends."""
    VISIBLE = "visible"
    """Returned; its names show."""
    VOID = "void"
    """Given up everywhere; returned as free pages as soon as access has ended."""


ENDED = frozenset({ShareStage.VISIBLE, ShareStage.VOID})


@dataclass(slots=True)
class Share:
    """What one member has in one transfer. `ticket` is 0 before it is leased, and where nothing was missing."""

    transfer: str
    parties: tuple[Party, ...]
    rank: int
    ticket: int = 0
    bits: int = 0
    lo: int = 0
    hi: int = 0
    stage: ShareStage = ShareStage.OPEN
    reason: str = ""
    """Why this member cannot bring it, for people."""

    @property
    def complete(self) -> bool:
        """True once this member has nothing more to say: result fixed, access ended."""
        return bool(self.bits & _ACCESS_ENDED and self.bits & RESULT_BITS)


class Heard(IntEnum):
    """What became of a decision that the log offered."""

    APPLIED = 1
    REPEATED = 2
    """Applied before."""
    REFUSED = 3
    """Of a lower term: whoever wrote it decides no more (P13)."""
    GAP = 4
    """Decisions are missing before it: read the log again."""


@dataclass(slots=True)
class Acts:
    """What a decision asks of this member, and whether it was one at all."""

    heard: Heard
    begin: Share | None = None
    show: tuple[int, ...] = ()
    """Tickets to settle: they may be returned as content."""
    give_up: tuple[int, ...] = ()
    """Tickets to abandon and settle: they may be returned as free pages once access has ended."""
    stop: Share | None = None
    over: Share | None = None
    reason: str = ""


@dataclass(slots=True)
class ShareBook:
    """One member's shares and its place in the log."""

    member: str
    epoch: int
    term: int = 0
    n: int = 0
    head_id: str = ""
    coordinator: tuple[str, int] | None = None
    changed: bool = False
    """Whether something changed since the last report."""
    _shares: dict[str, Share] = field(default_factory=dict)
    _by_ticket: dict[int, Share] = field(default_factory=dict)
    _ended: OrderedDict[str, Share] = field(default_factory=OrderedDict)
    _in_term: bool = False

    @property
    def live(self) -> int:
        """Shares that no decision has ended."""
        return len(self._shares)

    @property
    def place(self) -> tuple[int, int]:
        """Term and number of the last decision that was applied here."""
        return self.term, self.n

    @property
    def gathering(self) -> bool:
        """True while this term has decided nothing yet: its coordinator waits for what the members report."""
        return self.term > 0 and not self._in_term

    def rows(self) -> list[Share]:
        """Return the shares to report: those that live, and, while a new coordinator gathers, what ended before."""
        ended = () if self._in_term else self._ended.values()
        return [*ended, *self._shares.values()]

    def of(self, transfer: str) -> Share | None:
        """Return the share in a transfer, ended or not, if there is one."""
        return self._shares.get(transfer) or self._ended.get(transfer)

    # ---------------------------------------------------------------------------------------------- what happens here

    def join(self, decision: Decision, coordinator: tuple[str, int]) -> None:
        """Begin behind a decision, the log's newest, whose writer leads; earlier ones are about earlier runs.

        What was opened for this run before it looked is not brought: its report tells, and that is voided.
        """
        self.term, self.n, self.head_id = decision.term, decision.n, decision.decision_id
        self.coordinator, self._in_term, self.changed = coordinator, decision.kind != "term", True

    def leased(self, transfer: str, ticket: int) -> None:
        """The pages that are missing here are leased under this ticket; too late for a transfer that is over."""
        share = self._shares.get(transfer)
        if share is not None:
            share.ticket = ticket
            self._by_ticket[ticket] = share
            self.changed = True

    def nothing_missing(self, transfer: str, blocks: int) -> None:
        """All blocks of the prompt are here already, and stay pinned until the transfer is over."""
        share = self._shares.get(transfer)
        if share is not None:
            share.bits, share.lo, share.hi = _WHOLE, 0, blocks
            self.changed = True

    def explain(self, transfer: str, reason: str) -> None:
        """Say why this member gives its share up; the first reason counts."""
        share = self._shares.get(transfer)
        if share is not None and not share.reason:
            share.reason, self.changed = reason[:REASON_LENGTH_MAX], True

    def refuse(self, transfer: str) -> None:
        """Note that this member cannot take part; the transfer will be voided."""
        share = self._shares.get(transfer)
        if share is not None and not share.ticket and not share.complete:
            share.bits |= _REFUSED
            self.changed = True

    def note(self, ticket: int, bits: int, lo: int, hi: int) -> bool:
        """Take note of one line of facts; False where the ticket is in no share, and so waits for nobody."""
        share = self._by_ticket.get(ticket)
        if share is None:
            return False
        if bits & RESULT_BITS and not share.bits & RESULT_BITS:  # written once, with the result (P17)
            share.lo, share.hi = lo, hi
        share.bits |= bits
        self.changed = True
        return True

    def may_give_up(self, transfer: str) -> bool:
        """Whether this member may still abandon its share by itself: not once it has applied a settle (P11)."""
        share = self._shares.get(transfer)
        return share is None or share.stage is ShareStage.OPEN

    # -------------------------------------------------------------------------------------------------- what is decided

    def hear(self, decision: Decision) -> Acts:
        """Apply the log's next decision: in order, once, and never one of a lower term."""
        heard = self._placed(decision)
        if heard is not Heard.APPLIED:
            return Acts(heard)
        self.n, self.head_id = decision.n, decision.decision_id
        self.changed = True
        if decision.kind == "term":
            if decision.term > self.term:
                self.term, self._in_term = decision.term, False
            party = decision.parties[0]
            self.coordinator = party.member, party.epoch
            return Acts(heard)
        self._in_term = True
        match decision.kind:
            case "open":
                return Acts(heard, begin=self._open(decision))
            case "settle":
                self._settle(decision)
                return Acts(heard)
            case "cancel":
                return Acts(heard, stop=self._shares.get(decision.transfer), reason=decision.reason)
            case _:
                return self._end(decision)

    def _placed(self, decision: Decision) -> Heard:
        if decision.term < self.term or decision.term >= TERM_MAX:
            return Heard.REFUSED
        if decision.term > self.term:
            return Heard.APPLIED if decision.kind == "term" else Heard.GAP
        if decision.n <= self.n:
            return Heard.REPEATED
        return Heard.APPLIED if decision.n == self.n + 1 and decision.previous == self.head_id else Heard.GAP

    def _open(self, decision: Decision) -> Share | None:
        mine = next((one for one in decision.parties if (one.member, one.epoch) == (self.member, self.epoch)), None)
        if mine is None or self.of(decision.transfer) is not None:
            return None
        share = Share(decision.transfer, decision.parties, mine.rank)
        self._shares[decision.transfer] = share
        return share

    def _settle(self, decision: Decision) -> None:
        """Promise to keep a share, if it is complete and not given up; else the report says why not."""
        share = self._shares.get(decision.transfer)
        if share is not None and share.complete and not share.bits & _ABANDONED:
            share.stage = ShareStage.SETTLED

    def _end(self, decision: Decision) -> Acts:
        """End a share as decided; a share that could not promise is given up, whatever the others may show."""
        share = self._shares.pop(decision.transfer, None)
        if share is None:
            return Acts(Heard.APPLIED)
        self._by_ticket.pop(share.ticket, None)
        shows = decision.kind == "visible" and share.stage is ShareStage.SETTLED
        share.stage = ShareStage.VISIBLE if decision.kind == "visible" else ShareStage.VOID
        if shows:
            share.lo, share.hi = decision.lo, decision.hi
        self._ended[decision.transfer] = share
        if len(self._ended) > SHARES_MAX:
            self._ended.popitem(last=False)
        tickets = (share.ticket,) if share.ticket else ()
        over = Acts(Heard.APPLIED, over=share, reason=decision.reason)
        if shows:
            over.show = tickets
        else:
            over.give_up = tickets
        return over
