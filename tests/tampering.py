"""Changes records of both logs as somebody would who wants them to look whole: sequences and ids are made to fit again.

`Copy` holds a record's events in the order in which they happened; `record` numbers them anew, log by log and run by
run, so that only what the events say can show the change.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvbus.commands.leases import fact_lines
from kvbus.commands.recordings import Record, Stored
from kvbus.commands.trails import in_order
from kvbus.events import Event, FactsSeen, decode, encode
from kvbus.ledger.facts import Fact
from kvbus.topics import Family, Topics

SETTLE_KINDS = {"open", "settle", "visible", "void", "cancel", "term"}


def turned_on(event: Event, fact: Fact, ticket: int = 0) -> bool:
    """Whether an event's lines have a fact on, of any lease or of one."""
    if not isinstance(event.body, FactsSeen):
        return False
    return any(line[2] & fact and ticket in {0, line[0]} for line in fact_lines(event.body))


def returns(record: Record) -> list[Event]:
    """The events that return leases."""
    return [event for event in record.events() if turned_on(event, Fact.RETURNED)]


def evidence_of(events: list[Event], returned: Event) -> int:
    """The place of the first event that says how access to the lease ended which an event returns."""
    assert isinstance(returned.body, FactsSeen)
    ticket = next(line[0] for line in fact_lines(returned.body) if line[2] & Fact.RETURNED)
    run = (returned.header.i, returned.header.m, returned.header.e)
    for place, event in enumerate(events):
        if (event.header.i, event.header.m, event.header.e) == run:
            ended = event.header.k == "outcome" and getattr(event.body, "ticket", 0) == ticket
            if ended or turned_on(event, Fact.ACCESS_ENDED, ticket):
                return place
    raise AssertionError("the record holds no evidence for that return")


@dataclass
class Copy:
    """A record's events, to be changed and written down again."""

    events: list[Event]
    runs: frozenset[tuple[str, str, int]] | None = None

    @classmethod
    def of(cls, record: Record) -> "Copy":
        return cls(in_order(record.events()), record.runs)

    def without(self, event: Event) -> "Copy":
        return Copy([one for one in self.events if one != event], self.runs)

    def with_second(self, event: Event) -> "Copy":
        place = self.events.index(event)
        return Copy([*self.events[: place + 1], event, *self.events[place + 1 :]], self.runs)

    def moved(self, event: Event, place: int) -> "Copy":
        rest = [one for one in self.events if one != event]
        return Copy([*rest[:place], event, *rest[place:]], self.runs)

    def changed(self, change: Callable[[Event], Event]) -> "Copy":
        return Copy([change(event) for event in self.events], self.runs)

    def record(self) -> Record:
        """Write it down so that every number fits: nothing but what the events say can betray a change."""
        numbers: dict[object, int] = {}
        record = Record(runs=self.runs)
        for place, event in enumerate(self.events):
            header = event.header
            log = Family.SETTLE if header.k in SETTLE_KINDS else Family.FACTS
            run = (header.i, header.m, header.e)
            numbers[run], numbers[log] = numbers.get(run, 0) + 1, numbers.get(log, 0) + 1
            first_ns = self.events[0].header.t
            told = header.model_copy(update={"s": numbers[run], "t": first_ns + place * 1_000_000})
            record.stored.append(stored(log, numbers[log], told.i, encode(told, event.body)))  # type: ignore[arg-type]
            record.end_ns = told.t
        return record


def stored(log: Family, sequence: int, instance: str, data: bytes) -> Stored:
    """One message as the broker would hold it."""
    subject = Topics().settle(instance) if log is Family.SETTLE else Topics().facts(instance)
    return Stored(log, sequence, subject, data)


def with_frames(record: Record, frames: Iterable[Stored]) -> Record:
    """The same record with other frames: a change that its numbers betray."""
    return dataclasses.replace(record, stored=list(frames))


def beginning(record: Record, *, facts: int, settle: int = 0) -> Record:
    """The record as it would be had the broker dropped so many messages of each log."""
    dropped = {Family.FACTS: facts, Family.SETTLE: settle}
    kept = [one for one in record.stored if one.sequence > dropped[one.family]]
    return dataclasses.replace(record, stored=kept, begins=dropped)


def frame_of(record: Record, event: Event) -> Stored:
    """The frame in which an event stands."""
    return next(one for one in record.stored if one.data and decode(one.data) == event)


def id_in(record: Record, told: Event) -> str:
    """The id under which a record has what an event tells; where it stands twice, the last."""
    who = (told.body, told.header.i, told.header.m)
    same = [one for one in record.events() if (one.body, one.header.i, one.header.m) == who]
    return same[-1].header.event_id
