"""One backend with its registered memory, in one direction: whether it accepts work, and what it still retains."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Protocol

from kvbus.ledger.facts import FailureClass, OutcomeRow
from kvbus.ledger.types import Backend, Containment, Direction, LeaseView

RETAINED_MAX_DEFAULT = 1_024
"""Leases without access-end evidence that one binding may gather before it stops submitting (R18): beyond this a pool
of common size has no pages left to lend anyway, so more submissions would only fail later."""


class Tracked(Protocol):
    """What a binding looks at of a lease that it has."""

    ticket: int
    writes: bool
    lender: str
    taken_at: float
    view: LeaseView | None
    arrived: tuple[bool, ...]

    @property
    def retained(self) -> bool:
        """True while nobody waits for the lease any more, and its memory does."""


class Kept(NamedTuple):
    """What one retained lease keeps: pages of whom, and since when the lease is out."""

    lender: str
    pages: int
    taken_at: float


@dataclass(frozen=True, slots=True)
class BindingStatistics:
    """Counters of one binding (R24); all only grow but `isolated`, `open_attempts`, `unreturned` and retention's three.

    `recomputed` counts writes that brought less than was lent, so that the engine computes the rest; `late_releases`
    attempts that ended after their lease had a result; `ends` attempts by the kind of evidence that ended them,
    `fenced` among them; `pages_kept` the pages of retained leases by lender. `oldest_retained_at` is when the oldest
    retained lease was taken, on the caller's clock.
    """

    name: str
    direction: Direction
    accepting: bool
    submissions: int
    deliveries: int
    rejections: int
    uncertain: int
    isolations: int
    isolated: int
    contradictions: int
    open_attempts: int
    retained: int
    pages_kept: Mapping[str, int]
    oldest_retained_at: float | None
    unreturned: int
    late_releases: int
    recomputed: int
    length_bytes: int
    ends: Mapping[str, int]

    def retained_s(self, now: float) -> float:
        """Return the age of the oldest retained lease in seconds; 0 where none is."""
        return 0.0 if self.oldest_retained_at is None else now - self.oldest_retained_at


@dataclass(slots=True)
class Binding:
    """A backend as the holder knows it. Only the holder changes it.

    `unreturned` counts leases that were taken and have not come back to their lender; one whose return failed counts
    for ever, so that the memory under it is never let go (contract 55).
    """

    name: str
    backend: Backend
    direction: Direction
    containment: Containment = Containment.ISOLATE_PEER
    retained_max: int = RETAINED_MAX_DEFAULT
    stopped: FailureClass | None = None
    stop_text: str = ""
    hold_released: bool = False
    open_attempts: int = 0
    unreturned: int = 0
    isolated: set[str] = field(default_factory=set)
    retained: dict[int, Kept] = field(default_factory=dict)
    pages_kept: dict[str, int] = field(default_factory=dict)
    submissions: int = 0
    deliveries: int = 0
    rejections: int = 0
    uncertain: int = 0
    isolations: int = 0
    contradictions: int = 0
    late_releases: int = 0
    recomputed: int = 0
    length_bytes: int = 0
    ends: dict[str, int] = field(default_factory=dict)

    def track(self, lease: Tracked) -> None:
        """Keep count of what is retained, after a lease changed."""
        if lease.retained:
            if lease.ticket not in self.retained:
                pages = len(lease.view.pages) if lease.view else 0
                self.retained[lease.ticket] = Kept(lease.lender, pages, lease.taken_at)
                self.pages_kept[lease.lender] = self.pages_kept.get(lease.lender, 0) + pages
        elif kept := self.retained.pop(lease.ticket, None):
            self.pages_kept[kept.lender] -= kept.pages

    def ended(self, row: OutcomeRow, *, late: bool = False) -> OutcomeRow:
        """Count the end of an attempt, and return its row; `late`: nobody waited for it any more."""
        self.open_attempts -= 1
        self.late_releases += late
        self.ends[row.evidence] = self.ends.get(row.evidence, 0) + 1
        return row

    def came_back(self, lease: Tracked, *, consumed: bool) -> None:
        """Count a lease that went back to its lender."""
        self.unreturned -= 1
        self.recomputed += lease.writes and not (consumed and all(lease.arrived))

    def refusal(self, peer: str) -> tuple[FailureClass, str] | None:
        """Return why this binding takes no work for a peer now, or None."""
        if self.stopped is not None:
            return FailureClass.BINDING_STOPPED, f"binding {self.name!r} is stopped: {self.stop_text}"
        if peer in self.isolated:
            return FailureClass.PEER_LOST, f"peer {peer!r} is isolated on binding {self.name!r}"
        if len(self.retained) >= self.retained_max:
            return (
                FailureClass.BINDING_STOPPED,
                f"binding {self.name!r} retains {len(self.retained)} leases, at most {self.retained_max}",
            )
        return None

    def statistics(self) -> BindingStatistics:
        """Return the counters as a frozen record."""
        return BindingStatistics(
            name=self.name,
            direction=self.direction,
            accepting=self.stopped is None,
            submissions=self.submissions,
            deliveries=self.deliveries,
            rejections=self.rejections,
            uncertain=self.uncertain,
            isolations=self.isolations,
            isolated=len(self.isolated),
            contradictions=self.contradictions,
            open_attempts=self.open_attempts,
            retained=len(self.retained),
            pages_kept=MappingProxyType(dict(self.pages_kept)),
            oldest_retained_at=min((kept.taken_at for kept in self.retained.values()), default=None),
            unreturned=self.unreturned,
            late_releases=self.late_releases,
            recomputed=self.recomputed,
            length_bytes=self.length_bytes,
            ends=MappingProxyType(dict(self.ends)),
        )
