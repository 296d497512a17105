"""Snapshots on the wire: a member's whole state at one moment, for followers that its log has no past for any more.

A state says all that the facts before it came to: what has a lower sequence of the same run is contained in it.
"""

from typing import Annotated, Literal

from pydantic import Field

from kvbus.parts import Body, Count, Name, Part, Rank, RequestHash, Text

TRANSFERS_MAX = 500
"""Open transfers that one snapshot names: some 75 KB; `transfers_running` counts all of them."""


class OpenTransferRow(Part):
    """A transfer that has not ended, and the phase that it is in."""

    transfer: Annotated[str, Field(min_length=1, max_length=200)]
    request_hash: RequestHash
    source: Name
    phase: Annotated[str, Field(min_length=1, max_length=32)]


class HeldLeaseRow(Part):
    """A lease that is held: what `lease_granted` said of it (no pages before that), and what its facts came to."""

    ticket: Count
    transfer: Annotated[str, Field(max_length=200)]
    rank: Rank
    direction: Literal["read", "write"]
    lender: Annotated[str, Field(max_length=64)]
    peer: Annotated[str, Field(max_length=64)]
    bits: Count
    lo: Count = 0
    hi: Count = 0
    pages: bytes = b""
    counters: bytes = b""


class SnapshotAsked(Body):
    """A question for a member's state; `after`: leases with higher tickets only, since an answer holds some of them."""

    KIND = "snapshot_asked"
    after: Count = 0


class SnapshotTaken(Body):
    """What a member holds: its leases by ticket, from behind `after` on, its open transfers, and where its logs stand.

    `more`: further leases come in the next one. On the facts stream all parts of one snapshot stand side by side.
    """

    KIND = "snapshot"
    reason: Text
    after: Count = 0
    more: bool = False
    leases_held: Count
    leases: tuple[HeldLeaseRow, ...] = Field(default=(), strict=False)
    transfers_running: Count
    transfers: tuple[OpenTransferRow, ...] = Field(default=(), strict=False, max_length=TRANSFERS_MAX)
    facts_sequence: Count
    settle_n: Count
    settle_term: Count = 0
