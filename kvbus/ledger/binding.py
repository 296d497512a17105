"""One backend with its registered memory, in one direction: whether it accepts work, and what it still retains."""

from dataclasses import dataclass, field

from kvbus.ledger.facts import FailureClass
from kvbus.ledger.types import Backend, Containment, Direction

RETAINED_MAX_DEFAULT = 1_024
"""Leases without access-end evidence that one binding may gather before it stops submitting (R18): beyond this a pool
of common size has no pages left to lend anyway, so more submissions would only fail later."""


@dataclass(frozen=True, slots=True)
class BindingStatistics:
    """Counters of one binding; all only grow but `open_attempts` and `retained` (R24)."""

    name: str
    accepting: bool
    submissions: int
    deliveries: int
    rejections: int
    uncertain: int
    isolations: int
    contradictions: int
    open_attempts: int
    retained: int


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
    retained: set[int] = field(default_factory=set)
    submissions: int = 0
    deliveries: int = 0
    rejections: int = 0
    uncertain: int = 0
    isolations: int = 0
    contradictions: int = 0

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
            accepting=self.stopped is None,
            submissions=self.submissions,
            deliveries=self.deliveries,
            rejections=self.rejections,
            uncertain=self.uncertain,
            isolations=self.isolations,
            contradictions=self.contradictions,
            open_attempts=self.open_attempts,
            retained=len(self.retained),
        )
