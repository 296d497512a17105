"""One lease's life as a replay follows it: at which events what happened, and what of it is not recorded."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvbus.commands.leases import LeaseKey, LeaseLife
from kvbus.events import Event, FactsSeen
from kvbus.ledger.facts import EVIDENCE_BITS, Fact

TRIED = int(Fact.SUBMITTED | Fact.UNCERTAIN)
"""With one of these on, memory may have been accessed: the evidence that it is over comes from elsewhere."""

Run = tuple[str, str, int]
"""Instance, member, epoch: one run of a member, whose events have one order."""


@dataclass(frozen=True, slots=True)
class Out:
    """A lease that was not returned, and why; `pending`: its return should be the next that its member records."""

    life: LeaseLife
    since: Event
    why: str
    pending: bool


@dataclass(slots=True)
class Trail:
    """One lease: where the events stand that matter; `free` is the event since which nothing stands in its way."""

    life: LeaseLife
    first: Event
    bits: int = 0
    granted: Event | None = None
    ended: Event | None = None
    returned: Event | None = None
    returned_place: int = 0
    free: Event | None = None
    free_place: int = 0
    free_batch: int = 0

    @property
    def is_write(self) -> bool:
        """Whether it is known to be a write lease."""
        return self.life.direction == "write"

    def may_go_back(self, bits: int) -> bool:
        """Whether these bits give a reason: access ended by evidence, or a reader that can deliver nothing (P5)."""
        if bits & Fact.FENCED and not self.is_write:
            return True
        return bool(bits & Fact.ACCESS_ENDED and bits & EVIDENCE_BITS)


def holes_of(trail: Trail) -> Iterator[str]:
    """Rows come before the lines that tell of them, and a lease is taken before it is granted."""
    life, key = trail.life, trail.life.key
    if not isinstance(trail.first.body, FactsSeen):
        yield f"the beginning of {key} is not recorded: event {trail.first.header.event_id} is the first to name it"
    if trail.bits & Fact.GRANTED and life.granted is None:
        yield f"the pages of {key} (its `lease_granted`) are not recorded"
    if trail.bits & Fact.SUBMITTED and life.attempt is None:
        yield f"the attempt of {key} is not recorded"
    if trail.bits & TRIED and trail.bits & (Fact.ACCESS_ENDED | Fact.FENCED) and life.ended is None:
        yield f"how the attempt of {key} ended (its `outcome`) is not recorded"


def run_of_event(event: Event) -> Run:
    """Return the run that an event belongs to."""
    return event.header.i, event.header.m, event.header.e


def run_of(key: LeaseKey) -> Run:
    """Return the run that a lease belongs to."""
    return key.instance, key.member, key.epoch
