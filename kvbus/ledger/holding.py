"""What holding leases costs, for whoever admits and schedules requests: looked up when asked, kept up by nobody (R20).

Two questions, and neither costs anything while nobody asks. Which leases keep a request from running (R19): a scheduler
holds those requests back. And how many pages are out of use because of leases that nobody waits for any more: beyond a
bound, admission refuses new work instead of finding no room after it was accepted.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvbus.ledger.books import HolderStatistics
from kvbus.ledger.held import Held, Stage, stage_of
from kvbus.ledger.types import Direction


@dataclass(frozen=True, slots=True)
class BlockingLease:
    """A write lease that has not come back: whoever needs the content that it brings cannot run on it yet."""

    ticket: int
    transfer: str
    peer: str
    lender: str
    rank: int
    pages: int
    stage: Stage
    taken_at: float

    def held_s(self, now: float) -> float:
        """Return how long the lease has been out, on the caller's clock."""
        return now - self.taken_at


@dataclass(frozen=True, slots=True)
class HoldingCost:
    """What is held without being of use to anybody: pages per lender, leases per binding, and since when.

    `pages_kept` are those of leases whose request has ended although access to them has not; `pages_quarantined` are
    out of use for good reason. `pages_bound` serve one salt only, since a fenced reader may read them: they are told,
    and are not out of use.
    """

    pages_kept: Mapping[str, int]
    leases_retained: Mapping[str, int]
    pages_quarantined: int
    pages_bound: int
    oldest_retained_at: float | None

    @property
    def pages(self) -> int:
        """All pages that are out of use."""
        return sum(self.pages_kept.values()) + self.pages_quarantined

    def oldest_s(self, now: float) -> float:
        """Return the age of the oldest lease that nobody waits for any more; 0 where there is none."""
        return 0.0 if self.oldest_retained_at is None else now - self.oldest_retained_at

    def refusal(self, pages_max: int) -> str:
        """Return why new work should wait, or ""; `pages_max` is how many pages may be out of use."""
        if self.pages < pages_max:
            return ""
        kept = sum(self.pages_kept.values())
        return (
            f"{self.pages} pages are out of use, fewer than {pages_max} may be ({kept} of leases whose access has not "
            f"ended, {self.pages_quarantined} quarantined): try again later"
        )


def holding_cost(statistics: HolderStatistics, *, quarantined: int = 0, bound: int = 0) -> HoldingCost:
    """Return what a holder's leases cost, with what their pools keep out of use; costs time in bindings only."""
    kept: Counter[str] = Counter()
    for binding in statistics.bindings:
        kept.update(binding.pages_kept)
    ages = [binding.oldest_retained_at for binding in statistics.bindings if binding.oldest_retained_at is not None]
    return HoldingCost(
        pages_kept=MappingProxyType(dict(kept)),
        leases_retained=MappingProxyType({binding.name: binding.retained for binding in statistics.bindings}),
        pages_quarantined=quarantined,
        pages_bound=bound,
        oldest_retained_at=min(ages, default=None),
    )


def blocking_leases(held: Mapping[int, Held]) -> tuple[BlockingLease, ...]:
    """Return the write leases of transfers that have not come back, oldest first; costs time in what is held."""
    return tuple(
        BlockingLease(
            one.ticket, one.transfer, one.peer, one.lender, one.rank, one.rows, stage_of(one.bits), one.taken_at
        )
        for one in held.values()
        if one.mode.direction is Direction.WRITE and one.transfer
    )
