"""The audit: does a record of both logs prove that ownership was kept, refute it, or is it no whole record?

The rules are those of `rules.py`, replayed by `replaying.py`; here stands what makes a record whole: nothing missing in
either log's sequence, nothing displaced or repeated, every run of a member from its first lease on. A record that is
not whole proves nothing, and refutes only what no missing event could explain. A log that is known to begin late is
whole from there on (`beginnings.py`).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvbus.commands.beginnings import Beginnings
from kvbus.commands.decided import outranked
from kvbus.commands.leases import MEMBER_TICKET, LeaseKey
from kvbus.commands.lifelines import Out, run_of_event
from kvbus.commands.recordings import LOGS, Record, Stored
from kvbus.commands.replaying import Replay
from kvbus.commands.rules import Offence, Rule
from kvbus.commands.trails import in_order
from kvbus.errors import PeerError
from kvbus.events import Event, FactsSeen, OutcomeFixed
from kvbus.ledger.facts import FailureClass
from kvbus.topics import Family

REASONS_MAX = 100
"""Reasons of one kind that are named; a record with more is no less incomplete."""
NOTHING = "no event is recorded: no lease was ever taken here, or your workers write to another broker or --prefix"
"""What an empty record shows proves nothing."""


class Verdict(StrEnum):
    """What an audit says."""

    CLEAN = "clean"
    CLEAN_SINCE = "clean since"
    """Of all that began behind the beginning of the logs; the broker has dropped what was before."""
    REFUTED = "refuted"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class Audit:
    """The verdict, and all that it stands on.

    `offences` refute; `unproven` would, were the record whole; `reasons` say why it is not. `places`: where in the logs
    each event stands, by its id. `pending`: it is incomplete only because returns were about to be recorded; read on.
    `differing`: reads whose bytes were not those of their digests. They break no rule: what differed was not delivered.
    """

    verdict: Verdict
    offences: tuple[Offence, ...]
    unproven: tuple[Offence, ...]
    reasons: tuple[str, ...]
    pending: bool
    out: tuple[Out, ...]
    places: dict[str, Stored]
    events: int
    runs: int
    leases: int
    returned: int
    end_ns: int
    differing: tuple["Differing", ...] = ()
    since_ns: int = 0
    """Where the logs begin, by the time of their members; 0: with the first event of all."""
    before: tuple[LeaseKey, ...] = ()
    """Leases that began before the logs, or of transfers that did: named, not proved, and not in the counts."""

    @property
    def first(self) -> Offence | None:
        """The first event that breaks a rule."""
        return self.offences[0] if self.offences else None

    def age_s(self, out: Out) -> float:
        """How long a lease had been out when the record ended."""
        return max(0.0, (self.end_ns - out.since.header.t) / 1e9)


def audit(record: Record, *, since_ns: int = 0) -> Audit:
    """Return what a record shows. `since_ns`: judge only what happened from this unix time on; all of it is replayed.

    Never raises for what the record holds. What stands out at the end and is explained does not spoil a clean verdict.
    """
    return _Auditor(record).audit(since_ns)


@dataclass(frozen=True, slots=True)
class Differing:
    """A read that brought other bytes than their digests say, and what it says of them."""

    event: Event
    text: str


@dataclass(frozen=True, slots=True)
class _Placed:
    stored: Stored
    event: Event

    @property
    def told(self) -> str:
        return f"event {self.event.header.event_id} ({self.stored.where})"


class _Auditor:
    """Goes through one record; used once."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._holes: list[str] = [*record.faults]
        self._disorder: list[str] = []
        self._placed: list[_Placed] = []
        self._repeats: list[Event] = []

    def audit(self, since_ns: int) -> Audit:
        for stored in self._record.stored:
            self._read(stored)
        for family in LOGS:
            self._check_log([stored for stored in self._record.stored if stored.family is family], family)
        self._check_runs()
        events = in_order(placed.event for placed in self._placed)
        facts_late, settle_late = (self._record.begins_late(family) for family in LOGS)
        named = sum(_leases_named(event) for event in events)
        replay = Replay(leases_max=1 + named, settle_begins_late=settle_late)
        repeats = {event.header.event_id: event for event in self._repeats}
        for event in events:
            replay.take(event)
            if event.header.event_id in repeats and not replay.repeat(event):
                self._disorder.append(f"event {event.header.event_id} stands twice in the record")
        beginnings = Beginnings(facts_late, settle_late, [placed.event for placed in self._placed], replay)
        self._holes += replay.holes(beginnings.first_ticket)
        return self._judge(replay, events, beginnings, since_ns)

    def _judge(self, replay: Replay, events: Sequence[Event], beginnings: Beginnings, since_ns: int) -> Audit:
        shown = sorted([*replay.offences(), *self._outranked(events)], key=lambda offence: offence.place)
        found = [one for one in shown if not beginnings.explains(one)]
        before = {key for key in replay.trails if beginnings.is_before(key)}
        before |= {one.lease for one in shown if beginnings.explains(one)}
        proved = [trail for key, trail in replay.trails.items() if key not in before]
        out = tuple(replay.out())
        judged = [one for one in found if one.event.header.t >= since_ns]
        offences = [one for one in judged if one.proved or not self._holes]
        unproven = [one for one in judged if not one.proved and self._holes]
        missing = {one.lease for one in found}
        pending = [
            f"the record ends before the return of {one.life.key}, in whose way nothing stands any more"
            for one in out
            if one.pending and one.life.key not in missing | before
        ]
        reasons = [*_most(self._holes), *_most(self._disorder), *_most(pending)]
        is_late = beginnings.facts or beginnings.settle
        if not (events or is_late):
            reasons.append(NOTHING)
        clean = Verdict.CLEAN_SINCE if is_late else Verdict.CLEAN
        verdict = Verdict.REFUTED if offences else Verdict.INCOMPLETE if reasons else clean
        end_ns = self._record.end_ns or max((event.header.t for event in events), default=0)
        return Audit(
            verdict=verdict,
            offences=tuple(offences),
            unproven=tuple(unproven),
            reasons=tuple(reasons),
            pending=not offences and bool(pending) and not self._holes and not self._disorder,
            out=out,
            places={placed.event.header.event_id: placed.stored for placed in self._placed},
            events=len(events),
            runs=len({run_of_event(event) for event in events}),
            leases=len(proved),
            returned=sum(1 for trail in proved if trail.returned is not None),
            end_ns=end_ns,
            differing=tuple(found for found in map(_differing, events) if found and found.event.header.t >= since_ns),
            since_ns=self._begin_ns(end_ns) if is_late else 0,
            before=tuple(sorted(before)),
        )

    def _begin_ns(self, end_ns: int) -> int:
        """Return the time from which on both logs are there: that of the first event of the one that begins later."""
        late = [family for family in LOGS if self._record.begins_late(family)]
        firsts: dict[Family, _Placed] = {}
        for placed in self._placed:
            first = firsts.setdefault(placed.stored.family, placed)
            if placed.stored.place < first.stored.place:
                firsts[placed.stored.family] = placed
        return max(firsts[family].event.header.t if family in firsts else end_ns for family in late)

    def _outranked(self, events: Sequence[Event]) -> Iterator[Offence]:
        """The settle log's own order tells, not the clocks of those who wrote: whoever was followed decides no more."""
        log = sorted(
            (placed for placed in self._placed if placed.stored.family is Family.SETTLE),
            key=lambda placed: placed.stored.sequence,
        )
        places = {event.header.event_id: place for place, event in enumerate(events, start=1)}
        for event, higher in outranked(placed.event for placed in log):
            eid, term = event.header.event_id, higher.header.event_id
            text = f"event {eid} ({event.header.k}) is of a lower term than event {term} (term), behind which it stands"
            about = LeaseKey.of(event.header, MEMBER_TICKET)
            yield Offence(places[eid], Rule.TERM, event, text, about, proved=True, other_event=higher)

    # -------------------------------------------------------------------------------------------------- is it whole

    def _read(self, stored: Stored) -> None:
        if not stored.data:
            return  # a repeat that its reader recognized
        try:
            placed = _Placed(stored, stored.event())
        except PeerError as error:
            self._holes.append(f"{stored.where} cannot be read: {error}")
            return
        if self._record.runs is None or run_of_event(placed.event) in self._record.runs:
            self._placed.append(placed)

    def _check_log(self, log: Sequence[Stored], family: Family) -> None:
        """Sequences of one log must count up by one, from where the record begins."""
        after, begins = self._record.after[family], self._record.begins[family]
        if after > begins and self._record.runs is None:
            self._holes.append(f"the record begins after {family.value} {after}: nothing is known of what was before")
        for index in displaced([stored.place for stored in log]):
            behind = f"after {log[index - 1].where}" if index else "at the beginning"
            self._disorder.append(f"{self._told(log[index])} is out of order: it stands {behind}")
        here = {stored.place for stored in log}
        for stored in {stored.sequence: stored for stored in log if stored.parts > 1}.values():
            if missing := [part + 1 for part in range(stored.parts) if stored.place - stored.part + part not in here]:
                text = f"part {missing[0]} and {len(missing) - 1} more" if len(missing) > 1 else f"part {missing[0]}"
                self._holes.append(f"{text} of {family.value} {stored.sequence} missing, next to {self._told(stored)}")
        by_number = {stored.sequence: stored for stored in log}
        for first, last in _gaps(sorted(by_number), max(after, begins)):
            what = f"{family.value} {first}" if first == last else f"{family.value} {first} to {last}"
            near = [by_number[number] for number in (first - 1, last + 1) if number in by_number]
            self._holes.append(f"{what} is missing, next to {' and '.join(map(self._told, near))}")

    def _check_runs(self) -> None:
        """Each run's own numbers must ascend in each log; an event's id must not come twice."""
        runs: dict[tuple[str, str, int, Family], list[_Placed]] = {}
        seen: dict[str, _Placed] = {}
        for placed in self._placed:
            runs.setdefault((*run_of_event(placed.event), placed.stored.family), []).append(placed)
            before = seen.setdefault(placed.event.header.event_id, placed)
            if before is placed:
                continue
            if before.stored.data == placed.stored.data:
                self._repeats.append(placed.event)
            else:
                self._holes.append(f"{placed.told} has the id of another one: {before.stored.where}")
        repeated = {event.header.event_id for event in self._repeats}
        for run in runs.values():
            for index in displaced([placed.event.header.s for placed in run]):
                if run[index].event.header.event_id not in repeated:
                    self._disorder.append(f"{run[index].told} is out of order among its member's own")

    def _told(self, stored: Stored) -> str:
        try:
            return _Placed(stored, stored.event()).told
        except PeerError:
            return stored.where


def displaced(numbers: Sequence[int]) -> list[int]:
    """Return the fewest places whose removal leaves the numbers strictly ascending; O(n log n)."""
    tails: list[int] = []
    tail_places: list[int] = []
    before: list[int] = []
    for place, number in enumerate(numbers):
        at = bisect_left(tails, number)
        before.append(tail_places[at - 1] if at else -1)
        tails[at : at + 1] = [number]
        tail_places[at : at + 1] = [place]
    kept: set[int] = set()
    place = tail_places[-1] if tail_places else -1
    while place >= 0:
        kept.add(place)
        place = before[place]
    return [place for place in range(len(numbers)) if place not in kept]


def _gaps(numbers: Sequence[int], after: int) -> Iterator[tuple[int, int]]:
    last = after
    for number in numbers:
        if number > last + 1:
            yield last + 1, number - 1
        last = number


def _leases_named(event: Event) -> int:
    """At least as many leases as an event can make known."""
    body = event.body
    return body.n + len(body.details) if isinstance(body, FactsSeen) else 1 + len(getattr(body, "members", ()))


def _differing(event: Event) -> Differing | None:
    body = event.body
    if isinstance(body, OutcomeFixed) and body.failure == FailureClass.PAGE_DIFFERS.name.lower():
        return Differing(event, body.text)
    return None


def _most(reasons: list[str]) -> list[str]:
    if len(reasons) <= REASONS_MAX:
        return reasons
    return [*reasons[:REASONS_MAX], f"and {len(reasons) - REASONS_MAX} more such reasons"]
