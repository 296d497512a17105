"""Facts: bits of evidence about a ticket that only ever turn on, in one columnar batch per round (R5)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple


class Fact(IntEnum):
    """One bit about a ticket. Only ACCESS_ENDED permits a return; everything else explains.

    A ticket's bits together are a plain int, and so is what `|` and `&` make of facts: an IntFlag would build an object
    at each of them, nine times as slow.
    """

    TAKEN = 1 << 0
    """The holder owns the lease."""
    GRANTED = 1 << 1
    """The lender gave the view: pages and generations are known."""
    SUBMITTED = 1 << 2
    """A backend accepted the lease: from here on the memory may be accessed."""
    DELIVERED = 1 << 3
    """The result is fixed: the rows that arrived whole are named by the bounds and the arrived mask."""
    FAILED = 1 << 4
    """The result is fixed: nothing of this attempt counts."""
    CANCELLED = 1 << 5
    """The result is fixed: stopped on request before it ended by itself."""
    UNCERTAIN = 1 << 6
    """The submission raised an unknown error: the memory may be accessed, so the lease stays."""
    ACCESS_ENDED = 1 << 7
    """Nobody will touch the memory again, by the evidence in the bits below."""
    ABANDONED = 1 << 8
    """Orchestration gave the lease up; sticky, a later result does not count."""
    SETTLED = 1 << 9
    """Agreed by all members: may be consumed and returned."""
    CONSUMED = 1 << 10
    """Returned with the arrived rows marked as content."""
    RETURNED = 1 << 11
    """Given back to its lender, exactly once."""
    RETURN_FAILED = 1 << 12
    """The lender's return raised: never retried, the memory is retained, the lender is stopped."""
    LENDER_STOPPED = 1 << 13
    """The lease's lender is stopped; what it lent is retained."""
    BINDING_STOPPED = 1 << 14
    """The binding accepts no submissions any more."""
    EVIDENCE_NEVER_SUBMITTED = 1 << 15
    EVIDENCE_COMPLETED = 1 << 16
    EVIDENCE_PEER_ACK = 1 << 17
    EVIDENCE_ENDPOINT_DESTROYED = 1 << 18
    EVIDENCE_PROCESS_DEAD = 1 << 19
    FENCED = 1 << 20
    """Read leases only: the reader may still read, but generations were raised first, so it cannot deliver (P5)."""


class Evidence(IntEnum):
    """Why access is known to have ended; each kind has its own fact bit."""

    NEVER_SUBMITTED = Fact.EVIDENCE_NEVER_SUBMITTED
    COMPLETED = Fact.EVIDENCE_COMPLETED
    PEER_ACK = Fact.EVIDENCE_PEER_ACK
    ENDPOINT_DESTROYED = Fact.EVIDENCE_ENDPOINT_DESTROYED
    PROCESS_DEAD = Fact.EVIDENCE_PROCESS_DEAD


class FailureClass(IntEnum):
    """The one word on which orchestration decides; the text beside it is for people."""

    NONE = 0
    LEASE_REFUSED = 1
    """The lender's state did not allow it (pool full, cap reached, page gone)."""
    BINDING_STOPPED = 2
    PEER_LOST = 3
    """The other side died, was isolated, or cannot be reached."""
    TRANSPORT = 4
    PAGE_CHANGED = 5
    """The source rewrote pages while they were read; none of them is delivered (P2)."""
    GRANT_REFUSED = 6
    """The grant did not fit what was asked for: nothing moved."""
    CANCELLED = 7
    SHUTDOWN = 8
    LENDER_STOPPED = 9
    UNCERTAIN = 10
    CONTRADICTION = 11
    """A backend or a member said two things that exclude each other."""
    ENGINE_LOST = 12
    DEADLINE = 13
    """The transfer's one deadline passed, or its limit on time in the queue."""
    SOURCE_MISSES = 14
    """The source does not have the pages, and was asked not to compute them."""
    BAD_REQUEST = 15
    """The prompt cannot be transferred: empty, too long, or a token id out of range."""
    PAGE_DIFFERS = 16
    """Bytes arrived that are not those of the page's digest, in an unchanged generation: none of them is delivered.

    Unlike PAGE_CHANGED, which ordinary work may bring, it means that memory or a transport is at fault, or that
    somebody wrote who had no right to: trying again at the same source may well bring the same.
    """
    EXHAUSTED = 17
    """The queue has offered the request so often that whoever takes it seems to die of it: it is not run (P23)."""


RESULT_BITS = Fact.DELIVERED | Fact.FAILED | Fact.CANCELLED
"""At most one of these stands on a ticket (P17)."""
EVIDENCE_BITS = (
    Fact.EVIDENCE_NEVER_SUBMITTED
    | Fact.EVIDENCE_COMPLETED
    | Fact.EVIDENCE_PEER_ACK
    | Fact.EVIDENCE_ENDPOINT_DESTROYED
    | Fact.EVIDENCE_PROCESS_DEAD
)


EVIDENCE_NAMES = {evidence: evidence.name.lower() for evidence in Evidence}
"""How rows spell the kinds of evidence."""
_NAMES = tuple((int(fact), fact.name.lower()) for fact in Fact)


@lru_cache(maxsize=1024)  # far more than the sets of bits that leases come to have
def fact_names(bits: int) -> tuple[str, ...]:
    """Return the lower-case names of the bits that are on, in the order in which a lease gathers them."""
    return tuple(name for bit, name in _NAMES if bits & bit)


@lru_cache(maxsize=1024)
def evidence_names(bits: int) -> tuple[str, ...]:
    """Return the kinds of evidence among the bits that are on, as rows spell them."""
    return tuple(name for evidence, name in EVIDENCE_NAMES.items() if bits & evidence)


class FactDetail(NamedTuple):
    """What a failure was: its class, whom it concerns, and a sentence for people."""

    ticket: int
    failure: FailureClass
    text: str
    peer: str = ""


class GrantedRow(NamedTuple):
    """The audit row of a lease whose pages are known: which pages, in which generation, for whom."""

    ticket: int
    transfer: str
    rank: int
    writes: bool
    lender: str
    peer: str
    pages: tuple[int, ...]
    counters: tuple[int, ...]


class AttemptRow(NamedTuple):
    """The audit row of one try of a backend."""

    ticket: int
    attempt: int
    binding: str
    peer: str


class OutcomeRow(NamedTuple):
    """The audit row of an attempt's end: what arrived, and by which evidence access ended."""

    ticket: int
    attempt: int
    result: str
    arrived: int
    length_bytes: int
    evidence: str
    failure: FailureClass
    text: str


Row = GrantedRow | AttemptRow | OutcomeRow


Line = tuple[int, int, int, int, int]
"""What one lease says of itself: ticket, rank, bits, lo, hi.

`lo` and `hi` are the resume bounds of a write lease in blocks of the prompt (restart floor, usable until); both are 0
until the result is fixed, and written once (P17).
"""


@dataclass(slots=True)
class LeaseFacts:
    """What changed since the last round, a line for each lease; details and rows are sparse.

    Whoever takes note of them goes line by line; they are recorded as columns.
    """

    lines: Sequence[Line] = ()
    details: list[FactDetail] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.lines or self.details or self.rows)

    @property
    def columns(self) -> list[tuple[int, ...]]:
        """The lines as columns of equal length: tickets, ranks, bits, lo and hi."""
        return list(zip(*self.lines, strict=True)) or [()] * 5
