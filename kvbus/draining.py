"""Draining on the wire: an operator asks a member to take no more, and the member says what still holds it.

Each member answers for itself, so an instance is asked member by member.
"""

from typing import Annotated, Literal

from pydantic import Field

from kvbus.parts import Body, Count, Part, Text

HOLDING_MAX = 64
"""Leases that an answer names, the oldest first: some 30 KB; `leases_held` counts all of them."""

MemberState = Annotated[str, Field(max_length=32)]
"""`draining`: takes nothing new, and something holds it. `drained`: nothing does. `leaving`: it is about to end."""


class HoldingRow(Part):
    """A lease that keeps a member from leaving: `read` is what a peer or the engine reads here, `write` what arrives.

    `peer`: who reads, or from whom it comes; the engine for its own. `quiet`: its access has ended, it is not returned.
    """

    ticket: Count
    direction: Literal["read", "write"]
    peer: Annotated[str, Field(max_length=64)]
    transfer: Annotated[str, Field(max_length=200)] = ""
    pages: Count
    quiet: bool = False


class DrainAsked(Body):
    """Take nothing new and finish what runs (`drain`), take part again (`undo`), or only say how it stands (`look`).

    `requests`: what becomes of those in its queue: they are refused, so that they go elsewhere, or kept for its next
    run. `leave`: its worker ends once nothing is held. A drain may be asked for again, with other terms.
    """

    KIND = "drain_asked"
    action: Literal["drain", "undo", "look"] = "look"
    requests: Literal["refuse", "keep"] = "refuse"
    leave: bool = False


class DrainAnswered(Body):
    """How a member stands: its state, empty while it takes part, and all that holds it; a refusal in words."""

    KIND = "drain_answered"
    state: Annotated[str, Field(max_length=32)] = ""
    transfers_running: Count = 0
    requests_in_hand: Count = 0
    releases_unconfirmed: Count = 0
    leases_held: Count = 0
    holding: tuple[HoldingRow, ...] = Field(default=(), strict=False, max_length=HOLDING_MAX)
    refusal: Text = ""
