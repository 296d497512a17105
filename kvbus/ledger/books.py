"""What a holder says of itself: counts, what a shutdown left, and a check of its own books."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.binding import Binding, BindingStatistics
from kvbus.ledger.facts import RESULT_BITS, Fact
from kvbus.ledger.foreign import Foreign
from kvbus.ledger.held import Held


@dataclass(frozen=True, slots=True)
class HolderShutdown:
    """What one pass of `shutdown` left: complete only when nothing is held and every binding let its memory go."""

    complete: bool
    held: int
    retained: int
    bindings_open: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HolderStatistics:
    """Counts of one holder, in all and per binding."""

    taken: int
    returned: int
    held: int
    retained: int
    oldest_taken_at: float | None
    """When the oldest lease that is held was taken, on the caller's clock."""
    lenders_stopped: tuple[str, ...]
    bindings: tuple[BindingStatistics, ...]


def count_books(held: Mapping[int, Held], foreign: Foreign, *, taken: int, returned: int) -> HolderStatistics:
    """Return a holder's counts as a frozen record."""
    bindings = tuple(binding.statistics() for binding in foreign.bindings.values())
    return HolderStatistics(
        taken=taken,
        returned=returned,
        held=len(held),
        retained=sum(record.retained for record in bindings),
        oldest_taken_at=next((one.taken_at for one in held.values()), None),
        lenders_stopped=tuple(foreign.stopped_lenders),
        bindings=bindings,
    )


def check_books(
    held: Mapping[int, Held], by_lease: Mapping[tuple[str, int], Held], bindings: Iterable[Binding]
) -> None:
    """Raise LedgerContradictionError at the first place where a holder's books disagree with each other."""
    if len(by_lease) != len(held):
        raise LedgerContradictionError("books differ", leases=len(by_lease), tickets=len(held))
    for ticket, one in held.items():
        if one.bits & Fact.RETURNED:
            raise LedgerContradictionError("a returned lease is still held", ticket=ticket)
        if one.closed != bool(one.bits & RESULT_BITS):
            raise LedgerContradictionError("closed and the bits of its result differ", ticket=ticket)
        if one.bits & Fact.ACCESS_ENDED and one.attempt_open:
            raise LedgerContradictionError("access ended while an attempt is open", ticket=ticket)
        if one.retained != (ticket in one.binding.retained):
            raise LedgerContradictionError("retention is not counted", ticket=ticket)
    for binding in bindings:
        _check_binding(binding, [one for one in held.values() if one.binding is binding])


def _check_binding(binding: Binding, held: Sequence[Held]) -> None:
    counted = sum(1 for one in held if one.attempt_open)
    if counted != binding.open_attempts:
        raise LedgerContradictionError("open attempts differ", binding=binding.name, counted=counted)
    if len(held) > binding.unreturned:
        raise LedgerContradictionError("a held lease counts as returned", binding=binding.name)
    if not binding.retained.keys() <= {one.ticket for one in held}:
        raise LedgerContradictionError("a lease that went back counts as retained", binding=binding.name)
    if sum(kept.pages for kept in binding.retained.values()) != sum(binding.pages_kept.values()):
        raise LedgerContradictionError("retained pages differ", binding=binding.name)
