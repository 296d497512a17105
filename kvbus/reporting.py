"""What a member records of its leases, as events: rows and columns of facts, and the batch in which they leave."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvbus.parts import Body, Count, FactDetailRow, Rank, Text

BATCH_EVENTS_MAX = 1_000
"""Events of one batch: as many as lines in one event of facts."""


class FactsSeen(Body):
    """Columns of one round's facts: ticket u64, rank u16, fact bits u32, bounds lo and hi u32, all of `n` lines."""

    KIND = "facts"
    n: Count
    ticket: bytes
    rank: bytes
    bits: bytes
    lo: bytes
    hi: bytes
    details: tuple[FactDetailRow, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _equal_length(self) -> Self:
        for name, width in (("ticket", 8), ("rank", 2), ("bits", 4), ("lo", 4), ("hi", 4)):
            if len(getattr(self, name)) != width * self.n:
                raise ValueError(f"column {name} must be {width * self.n} bytes for n={self.n}")
        return self


class LeaseGranted(Body):
    """The audit row of a lease: which pages (u32 column), in which generation counters (u64 column), for whom."""

    KIND = "lease_granted"
    ticket: Count
    transfer: Annotated[str, Field(max_length=200)]
    rank: Rank
    direction: Literal["read", "write"]
    lender: Annotated[str, Field(max_length=64)]
    peer: Annotated[str, Field(max_length=64)]
    pages: bytes
    counters: bytes


class AttemptMade(Body):
    """The audit row of one try of a backend."""

    KIND = "attempt"
    ticket: Count
    attempt: Count
    binding: Annotated[str, Field(max_length=64)]
    peer: Annotated[str, Field(max_length=64)]


class OutcomeFixed(Body):
    """The audit row of an attempt's end: result, what arrived, and the evidence by which access ended."""

    KIND = "outcome"
    ticket: Count
    attempt: Count
    result: Annotated[str, Field(max_length=16)]
    arrived: Count
    length_bytes: Count
    evidence: Annotated[str, Field(max_length=32)]
    failure: Annotated[str, Field(max_length=64)] = ""
    text: Text = ""


class EventsBatch(Body):
    """Events of one member that left together, each as its own bytes; readers see them one by one (`split`).

    They are facts, or decisions of an instance that has one member. Its header is that of the last of them but for kind
    and time.
    """

    KIND = "batch"
    events: Annotated[tuple[bytes, ...], Field(min_length=1, max_length=BATCH_EVENTS_MAX, strict=False)]
