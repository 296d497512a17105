"""The words by which the members of one instance agree: the kinds of its settle log, and what they tell each other.

The log is one sequence per instance. Its decisions chain: `term` says which coordinator speaks, `n` counts, `previous`
names the decision before as `term.n` (P12, P13, P15). What members say beside the log decides nothing.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvbus.parts import Body, Count, Epoch, Name, OnMiss, Rank, Seconds, Text, TracedBody

Transfer = Annotated[str, Field(min_length=1, max_length=200)]
Previous = Annotated[str, Field(max_length=200)]
Bits = Annotated[int, Field(ge=0, lt=2**32)]
Reason = Annotated[str, Field(max_length=200)]
Stage = Literal["open", "settled", "visible", "void"]

PartyRow = Annotated[tuple[Name, Epoch, Rank, Count], Field(strict=False)]
"""Member, epoch, rank and ticket of one party; each checked, since msgpack gives lists where tuples were packed."""

ShareRow = Annotated[tuple[Transfer, Rank, Count, Bits, Count, Count, Stage, Reason], Field(strict=False)]
"""Transfer, rank, ticket, fact bits, bounds lo and hi, and stage of what one member holds for one rank; why it cannot
bring it, for people, or empty."""


# ------------------------------------------------------------------------------------------------- the settle log


class TermTaken(Body):
    """A member has become coordinator: from here on, decisions of lower terms are refused (P13)."""

    KIND = "term"
    term: Count
    n: Count
    previous: Previous
    member: Name
    epoch: Epoch


class TransferOpened(Body):
    """Fixes a transfer's parties before any of them acts: (member, epoch, rank) and the ticket of each (P12)."""

    KIND = "open"
    transfer: Transfer
    term: Count
    n: Count
    previous: Previous
    members: tuple[PartyRow, ...] = Field(strict=False)


class SettleDecided(Body):
    """One decision for one transfer: the tickets to return, and the bounds that all ranks have; applied in sequence."""

    KIND = "settle"
    transfer: Transfer
    term: Count
    n: Count
    previous: Previous
    lo: Count
    hi: Count
    members: tuple[PartyRow, ...] = Field(strict=False)


class MadeVisible(Body):
    """Settled pages may be returned and their names shown, since every member applied the settle (P10)."""

    KIND = "visible"
    transfer: Transfer
    term: Count
    n: Count
    previous: Previous
    lo: Count
    hi: Count
    members: tuple[PartyRow, ...] = Field(strict=False)


class SettleVoided(Body):
    """A decision that must not be applied any more, and why (P10, P11)."""

    KIND = "void"
    transfer: Transfer
    term: Count
    n: Count
    previous: Previous
    reason: Text
    members: tuple[PartyRow, ...] = Field(default=(), strict=False)


class CancelDecided(Body):
    """Somebody asked that a transfer stop: every member stops its share, and what arrived whole is settled (P12)."""

    KIND = "cancel"
    transfer: Transfer
    term: Count
    n: Count
    previous: Previous
    reason: Text


# --------------------------------------------------------------------------------------------------- beside the log


class SharesReported(Body):
    """Everything that a member holds of its instance's transfers, and the last decision that it applied.

    A state, not a change: a repeat or a loss is harmless, and of two reports of one run of a member the one with the
    higher sequence in its header counts. `term` and `head` are the term and number of the last decision applied.
    """

    KIND = "shares"
    term: Count
    head: Count
    shares: tuple[ShareRow, ...] = Field(strict=False)


class PlanAsked(Body):
    """A member of the destination asks the coordinator's member what it shall bring for a transfer."""

    KIND = "plan_asked"
    transfer: Transfer


class PlanAnswered(TracedBody):
    """What a member shall bring: `tokens` are the whole prompt's ids as u32 little-endian bytes.

    Where the transfer is not known, only `transfer` says anything. `remaining_s` is what is left of its one deadline.
    """

    KIND = "plan"
    transfer: Transfer
    known: bool
    request_id: Annotated[str, Field(max_length=200)] = ""
    request_hash: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")] = ""
    source: Name | Literal[""] = ""
    salt: Annotated[str, Field(max_length=200)] = ""
    on_miss: OnMiss = "prefill"
    tokens: bytes = b""
    remaining_s: Seconds = 0.0

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len(self.tokens) % 4:
            raise ValueError("tokens must be u32 bytes, a multiple of 4 long")
        missing = [name for name in ("request_id", "request_hash", "source", "tokens") if not getattr(self, name)]
        if self.known and missing:
            raise ValueError(f"a known transfer must have {', '.join(missing)}")
        return self
