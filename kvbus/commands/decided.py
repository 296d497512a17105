"""Transfers as the settle log tells of them: who took part, what was decided, and whether decisions follow each other.

An instance with one member returns a transfer's leases with `settle` or `void`. Where several members take part,
`settle` is a promise that each of them has to apply first, and only `visible` or `void` returns the leases (P10).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvbus.commands.leases import Decision, LeaseKey, SettleLogBody, party_keys
from kvbus.events import (
    Event,
    MadeVisible,
    SettleDecided,
    SettleVoided,
    TermTaken,
    TransferOpened,
)

Parties = frozenset[tuple[str, int]]
"""Members, each with its epoch."""


@dataclass(slots=True)
class Decided:
    """One transfer on the settle log. `keys`: the leases that its decisions name so far, at every party."""

    parties: Parties
    keys: set[LeaseKey]
    settled: Event | None = None
    visible: Event | None = None
    voided: Event | None = None
    ends: list[Event] = field(default_factory=list)
    """The decisions by which its leases may go back."""

    @classmethod
    def of(cls, opened: Event, body: TransferOpened) -> "Decided":
        """Return a transfer as it was opened."""
        return cls(frozenset((member, epoch) for member, epoch, *_ in body.members), set(party_keys(opened)))

    @property
    def several(self) -> bool:
        """Whether members take part that have to agree; then tickets are named only when they are decided about."""
        return len(self.parties) > 1

    def has_room_for(self, key: LeaseKey) -> bool:
        """Whether a lease may be one of this transfer's, as far as its opening says."""
        return (key.member, key.epoch) in self.parties if self.several else key in self.keys

    def note(self, event: Event, body: Decision) -> str:
        """Take a decision in; return what is wrong with it beside the others about this transfer, or an empty string.

        What is decided again by another coordinator is decided in the same words (P15).
        """
        wrong = self._contradiction(event, body)
        self.keys |= set(party_keys(event))
        match body:
            case SettleDecided():
                self.settled = self.settled or event
            case MadeVisible():
                self.visible = self.visible or event
            case _:
                self.voided = self.voided or event
        if not self.several or not isinstance(body, SettleDecided):
            self.ends.append(event)
        return wrong

    def other_than(self, event: Event) -> Event | None:
        """Return the decision that one contradicts: the other end of the transfer, or what was settled."""
        if isinstance(event.body, MadeVisible):
            return self.voided or self.settled
        return self.visible or self.settled

    def _contradiction(self, event: Event, body: Decision) -> str:
        eid = event.header.event_id
        if isinstance(body, MadeVisible) and self.voided is not None:
            return f"{body.transfer} is visible by event {eid}, and was voided by event {self.voided.header.event_id}"
        if isinstance(body, SettleVoided) and self.visible is not None:
            return f"{body.transfer} is voided by event {eid}, and visible since event {self.visible.header.event_id}"
        before = self.settled.body if self.settled is not None else None
        if not (isinstance(body, MadeVisible | SettleDecided) and isinstance(before, SettleDecided) and self.several):
            return ""
        if (before.lo, before.hi) == (body.lo, body.hi):
            return ""
        bounds = f"blocks {before.lo} to {before.hi}, by event {eid} blocks {body.lo} to {body.hi}"
        return f"{body.transfer} was settled with {bounds}"


@dataclass(slots=True)
class Chains:
    """Decisions of one term count up by one; a successor's first goes on from the last of the term before (P15).

    `begins_late`: the log begins behind decisions that are gone, each instance's first ones.
    """

    begins_late: bool = False
    _last: dict[tuple[str, int], int] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)

    def missing(self, event: Event, body: SettleLogBody) -> str:
        """Take a decision in; return which decisions must have stood before it and are not recorded, in words."""
        instance, chain = event.header.i, (event.header.i, body.term)
        last, before = self._last.get(chain, 0), body.previous.partition(".")[0]
        self._last[chain] = max(body.n, last)
        takes_over = not last and before not in {"", f"{body.term}"}
        is_first = instance not in self._known
        self._known.add(instance)
        if takes_over or body.n <= last + 1 or (is_first and self.begins_late):
            return ""
        numbers = f"{last + 1}" if body.n == last + 2 else f"{last + 1} to {body.n - 1}"
        return f"decision {numbers} of {instance}, term {body.term}, is not recorded"


def outranked(log: Iterable[Event]) -> Iterator[tuple[Event, Event]]:
    """Yield each decision behind the record of a higher term, and that record; `log` in the order of its sequences.

    An instance with one member takes no terms: there the term is the run that speaks, and nothing keeps runs apart.
    """
    highest: dict[str, tuple[int, Event]] = {}
    for event in log:
        body = event.body
        if not isinstance(body, SettleLogBody):
            continue
        held = highest.get(event.header.i)
        if held is not None and body.term < held[0]:
            yield event, held[1]
        elif isinstance(body, TermTaken):
            highest[event.header.i] = body.term, event
