"""Fencing: a read lease goes back although its reader may still read, since it cannot deliver what it reads (P5).

That is no evidence that access has ended, and the lease says so: it carries FENCED, and ACCESS_ENDED stays off. It is
for readers that never come back and cannot be proved dead, such as another host without power. Only somebody who asks
for it by name gets it: no deadline leads here, and a write is never fenced.

Both sides may refuse: the backend, which knows whether the reader is isolated and took its grant on the terms that it
looks at generations after reading, and the lender, which knows what may be written into the pages next.
"""

from typing import Protocol, runtime_checkable

from kvbus.ledger.foreign import Foreign
from kvbus.ledger.held import Held
from kvbus.ledger.types import Direction, LeaseFailure


@runtime_checkable
class FencingLease(Protocol):
    """A lease whose lender can raise the generations of its pages before it takes them back."""

    def fence(self) -> LeaseFailure | None:
        """Raise them now, or return why that cannot be and change nothing."""


@runtime_checkable
class FencingBackend(Protocol):
    """A backend that knows of each of its readers whether it may be fenced."""

    def fence_refusal(self, ticket: int, attempt: int) -> str:
        """Return why the reader of this attempt must not be fenced, or ""; changes nothing."""

    def fenced(self, ticket: int, attempt: int) -> None:
        """Note that the attempt was fenced: nothing is said of it any more, and its reader is never lent to again."""


def raise_fence(held: Held, foreign: Foreign) -> str:
    """Fence the reader of one lease, or return why that cannot be; the holder then lets the lease go back."""
    if held.mode.direction is not Direction.READ:
        return "a write is never fenced: bytes may still come in"
    if held.suspect or held.lender in foreign.stopped_lenders:
        return "its lender is stopped, or its backend contradicted itself"
    if not held.attempt_open:
        return "nobody may read under it: there is nothing to fence"
    lease, backend = held.lease, held.binding.backend
    if not isinstance(lease, FencingLease) or not isinstance(backend, FencingBackend):
        return f"lender {held.lender!r} or binding {held.binding.name!r} cannot fence"
    ticket, attempt = held.ticket, held.attempt
    refusal = foreign.call(held.binding, "fence_refusal", lambda: backend.fence_refusal(ticket, attempt))
    if refusal != "":
        return refusal or f"binding {held.binding.name!r} is stopped: {held.binding.stop_text}"
    failure = foreign.call_lender(held.lease.lender, "fence", lease.fence)
    if held.lender in foreign.stopped_lenders:
        return f"lender {held.lender!r} is stopped: {foreign.stopped_lenders[held.lender]}"
    if failure is not None:
        return failure.text
    foreign.call(held.binding, "fenced", lambda: backend.fenced(ticket, attempt))
    return ""
