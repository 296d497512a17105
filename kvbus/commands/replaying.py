"""Recorded events replayed against the rules of ownership, one event after the other; for `audit` and for `story`.

Each run of a member is followed in its own order. What breaks a rule is an offence, which names the event. An offence
is `proved` where no event that may be missing could explain it; the others count only in a record without holes.
"""

from collections.abc import Callable, Iterator, Mapping

from kvbus.commands.decided import Chains, Decided
from kvbus.commands.leases import (
    MEMBER_TICKET,
    Decision,
    LeaseBook,
    LeaseKey,
    SettleLogBody,
    fact_lines,
    party_keys,
    why_out,
)
from kvbus.commands.lifelines import TRIED, Out, Run, Trail, holes_of, run_of, run_of_event
from kvbus.commands.pages import PageBook
from kvbus.commands.rules import Offence, Rule
from kvbus.commands.trails import Index
from kvbus.events import (
    AttemptMade,
    Event,
    FactsSeen,
    LeaseGranted,
    MadeVisible,
    OutcomeFixed,
    SettleDecided,
    SettleVoided,
    TransferOpened,
)
from kvbus.ledger.facts import RESULT_BITS, Fact, fact_names

LINES_MAX = 1_000
"""Lines in one event of a round's batch; an event with fewer is the last of its batch."""

_DECIDES = {"settle": "settles", "visible": "shows", "void": "voids"}
_RETAINED = int(Fact.RETURN_FAILED | Fact.LENDER_STOPPED)


class Replay:
    """Takes events in order, then tells offences, what is out, and which parts of leases' lives are not recorded.

    It keeps every lease: as large as the record, which whoever read it has bounded.
    """

    def __init__(self, *, leases_max: int, settle_begins_late: bool = False) -> None:
        self._book = LeaseBook(keep_returned=True, leases_max=leases_max)
        self._index = Index()
        self._pages = PageBook()
        self._trails: dict[LeaseKey, Trail] = {}
        self._batches: dict[Run, int] = {}
        self._transfers: dict[tuple[str, str], Decided] = {}
        self._owners: dict[LeaseKey, str] = {}
        self._chains = Chains(settle_begins_late)
        self._last_fact: dict[Run, int] = {}
        self._hasty: list[Offence] = []
        self._undecided: list[tuple[Trail, Offence]] = []
        self._unread: list[str] = []
        self._found: list[Offence] = []
        self._place = 0

    @property
    def trails(self) -> Mapping[LeaseKey, Trail]:
        """Every lease that the events name."""
        return self._trails

    def is_opened(self, instance: str, transfer: str) -> bool:
        """Whether a transfer's opening is recorded."""
        return (instance, transfer) in self._transfers

    def take(self, event: Event) -> None:
        """Replay one event; each only once, and those of one run of a member in its order."""
        self._place += 1
        self._index.add(event)
        if not isinstance(event.body, SettleLogBody):
            self._last_fact[run_of_event(event)] = event.header.s
        elif missing := self._chains.missing(event, event.body):
            self._unread.append(missing)
        match event.body:
            case FactsSeen():
                self._facts(event, event.body)
            case LeaseGranted():
                self._grant(event, event.body)
            case AttemptMade() | OutcomeFixed():
                self._row(event, event.body)
            case TransferOpened():
                self._open(event, event.body)
            case SettleDecided() | MadeVisible() | SettleVoided():
                self._decision(event, event.body)
            case _:
                pass

    def repeat(self, event: Event) -> bool:
        """Take note that an event stands twice in a record; True where that breaks a rule by itself."""
        self._place += 1
        body, before = event.body, len(self._found)
        if isinstance(body, LeaseGranted):
            key = LeaseKey.of(event.header, body.ticket)
            text = f"{key} is granted by event {event.header.event_id}, which stands twice in the record"
            self._offend(Rule.GRANTED_ONCE, event, text, key, other_event=event)
        elif isinstance(body, FactsSeen):
            for ticket, _, bits, *_ in fact_lines(body):
                if bits & Fact.RETURNED:
                    key = LeaseKey.of(event.header, ticket)
                    text = f"{key} is returned by event {event.header.event_id}, which stands twice in the record"
                    self._offend(Rule.RETURNED_ONCE, event, text, key, other_event=event)
        return len(self._found) > before

    # ------------------------------------------------------------------------------------------------------ results

    def offences(self) -> list[Offence]:
        """Return what broke rules, in the order of the events; call it once, after the last event."""
        for trail, offence in self._undecided:
            opened = self._transfers.get((trail.life.key.instance, trail.life.transfer))
            ours = run_of(trail.life.key)
            if opened is None or all(run_of_event(event) == ours for event in opened.ends):
                self._found.append(offence)
        for hasty in self._hasty:  # a log may have been read a little further than the other one
            if hasty.event.header.s < self._last_fact.get(run_of_event(hasty.event), 0):
                self._found.append(hasty)
        for trail in self._trails.values():
            if trail.free is not None and self._is_missing(trail):
                text = f"the return of {trail.life.key} is missing: nothing has stood in its way since event "
                text += f"{trail.free.header.event_id}, and its member went on without it"
                self._found.append(
                    Offence(trail.free_place, Rule.RETURNED, trail.free, text, trail.life.key, proved=False)
                )
        return sorted(self._found, key=lambda offence: offence.place)

    def out(self) -> list[Out]:
        """Return the leases that have not come back, in the order in which they became known."""
        return [self._out(trail) for trail in self._trails.values() if trail.returned is None]

    def holes(self, first_ticket: Callable[[Run], int]) -> Iterator[str]:
        """Yield what is not recorded although it must have been there, in words; of a run, from its first ticket on."""
        yield from self._unread
        last: dict[Run, int] = {}
        recorded = [key for key in sorted(self._trails) if not 0 < key.ticket < first_ticket(run_of(key))]
        for key in recorded:
            expected = last.get(run_of(key), first_ticket(run_of(key)) - 1) + 1
            if key.ticket != expected and key.ticket > 0:
                missing = f"T{expected}" if key.ticket == expected + 1 else f"T{expected} to T{key.ticket - 1}"
                yield f"nothing of {missing} of {key.instance}/{key.member} in epoch {key.epoch} is recorded"
            last[run_of(key)] = key.ticket
        for key in recorded:
            yield from holes_of(self._trails[key])

    # ------------------------------------------------------------------------------------------------------- events

    def _facts(self, event: Event, body: FactsSeen) -> None:
        self._book.changes(event.header, body)  # failures may name tickets that were never taken: they are no leases
        for ticket, _, bits, *_ in fact_lines(body):
            self._line(self._trail(LeaseKey.of(event.header, ticket), event), event, bits)
        if 0 < body.n < LINES_MAX:
            self._batches[run_of_event(event)] = self._batches.get(run_of_event(event), 0) + 1

    def _line(self, trail: Trail, event: Event, bits: int) -> None:
        if trail.returned is not None:
            self._after_return(trail, event, returns=bool(bits & Fact.RETURNED))
            return
        key, eid = trail.life.key, event.header.event_id
        if off := trail.bits & ~bits:
            self._offend(Rule.FACTS_STAY, event, f"{key}: {', '.join(fact_names(off))} turned off in event {eid}", key)
        if ((trail.bits | bits) & RESULT_BITS).bit_count() > 1:
            self._offend(Rule.FACTS_STAY, event, f"{key} has two results since event {eid}", key)
        if bits & ~trail.bits & Fact.FENCED and trail.is_write:
            self._offend(Rule.FENCED, event, f"{key} is lent for writing, and fenced in event {eid}", key)
        if bits & Fact.RETURNED:
            self._return(trail, event, bits)
        if bits & Fact.ACCESS_ENDED and trail.ended is None:
            trail.ended = event
        trail.bits |= bits
        settled = bits & Fact.SETTLED or not self._awaits_decision(trail)
        if trail.may_go_back(bits) and bits & RESULT_BITS and settled:
            self._set_free(trail, event, self._batches.get(run_of_event(event), 0))

    def _return(self, trail: Trail, event: Event, bits: int) -> None:
        key, eid = trail.life.key, event.header.event_id
        if not trail.may_go_back(bits):
            text = f"{key} is returned by event {eid}, although access to it is not known to have ended"
            self._offend(Rule.EVIDENCE, event, text, key)
        elif trail.ended is None and (bits & TRIED or trail.life.attempt):
            text = f"{key} is returned by event {eid}, and no event before it gives the evidence that access has ended"
            self._offend(Rule.EVIDENCE, event, text, key, proved=False)
        if trail.is_write:
            self._check_settled(trail, event, bits)
        if bits & Fact.CONSUMED and (problem := self._not_consumable(trail, bits)):
            self._offend(Rule.CONSUMED, event, f"{key} is consumed by event {eid}, although {problem}", key)
        trail.returned, trail.returned_place = event, self._place
        self._pages.give_back(key)

    def _check_settled(self, trail: Trail, event: Event, bits: int) -> None:
        life, eid = trail.life, event.header.event_id
        if not bits & Fact.SETTLED:
            self._offend(Rule.SETTLED, event, f"{life.key} is returned by event {eid} unsettled", life.key)
        elif life.transfer and not (bits & Fact.ABANDONED and not bits & Fact.CONSUMED):  # contract 4: no decision
            opened = self._transfers.get((life.key.instance, life.transfer))
            if opened is None or not opened.ends:
                what = "`visible` or `void`" if opened is not None and opened.several else "decision"
                text = f"{life.key} is returned by event {eid}, and no {what} about {life.transfer} precedes it"
                offence = Offence(self._place, Rule.SETTLED, event, text, life.key, proved=False)
                self._undecided.append((trail, offence))

    def _not_consumable(self, trail: Trail, bits: int) -> str:
        opened = self._transfers.get((trail.life.key.instance, trail.life.transfer))
        if not trail.is_write and trail.granted is not None:
            return "it was lent for reading"
        if bits & (Fact.FAILED | Fact.ABANDONED):
            return f"it is {' and '.join(fact_names(bits & (Fact.FAILED | Fact.ABANDONED)))}"
        if not bits & (Fact.DELIVERED | Fact.CANCELLED):  # a cancelled attempt delivers what arrived whole before
            return "nothing of it was delivered"
        return "its transfer was voided" if opened is not None and opened.voided is not None else ""

    def _grant(self, event: Event, body: LeaseGranted) -> None:
        key = LeaseKey.of(event.header, body.ticket)
        trail = self._trail(key, event)
        self._book.note(event)
        if trail.granted is not None:
            text = f"{key} is granted a second time by event {event.header.event_id}"
            self._offend(Rule.GRANTED_ONCE, event, text, key, other=key, other_event=trail.granted)
            return
        trail.granted = event
        if trail.returned is not None:
            self._after_return(trail, event, returns=False)
            return
        for clash in self._pages.lend(event, trail.life):
            rule = Rule.WRITE_ALONE if clash.lent else Rule.COUNTER
            told = clash.text
            if clash.lent and clash.other and (other := self._trails[clash.other]).ended is not None:
                told += f"; access by {clash.other} had ended by event {other.ended.header.event_id}, "
                told += "but no return of it is recorded before"
            text = f"event {event.header.event_id}: {told}"
            other_event = clash.other_event
            self._offend(rule, event, text, key, proved=not clash.lent, other=clash.other, other_event=other_event)
        if len(trail.life.pages) * 8 != len(body.counters) or len(trail.life.pages) * 4 != len(body.pages):
            self._unread.append(f"the pages of {key} cannot be read in event {event.header.event_id}")

    def _row(self, event: Event, body: AttemptMade | OutcomeFixed) -> None:
        trail = self._trail(LeaseKey.of(event.header, body.ticket), event)
        self._book.note(event)
        if trail.returned is not None:
            self._after_return(trail, event, returns=False)
        elif isinstance(body, OutcomeFixed) and body.evidence and trail.ended is None:
            trail.ended = event

    def _after_return(self, trail: Trail, event: Event, *, returns: bool) -> None:
        """The later event shows it; where it is no second return, the return itself stands too early."""
        key, first = trail.life.key, trail.returned
        if first is None:
            return
        if returns:
            text = f"{key} is returned a second time by event {event.header.event_id}"
            self._offend(Rule.RETURNED_ONCE, event, text, key, other=key, other_event=first)
            return
        text = f"{key} is returned by event {first.header.event_id}, and event {event.header.event_id} "
        text += f"({event.header.k}) still has news of it"
        self._found.append(
            Offence(trail.returned_place, Rule.RETURNED_LAST, first, text, key, proved=True, other_event=event)
        )

    # ---------------------------------------------------------------------------------------------------- decisions

    def _open(self, event: Event, body: TransferOpened) -> None:
        self._book.note(event)
        self._own(event, body.transfer)
        self._transfers.setdefault((event.header.i, body.transfer), Decided.of(event, body))

    def _own(self, event: Event, transfer: str) -> None:
        """A lease that is named with a transfer belongs to it, and to no other one."""
        for key in party_keys(event):
            owner = self._owners.setdefault(key, transfer)
            if owner != transfer:
                text = f"{key} belongs to {owner} and, by event {event.header.event_id}, to {transfer}"
                self._offend(Rule.DECIDED, event, text, key)

    def _decision(self, event: Event, body: Decision) -> None:
        keys, eid = list(party_keys(event)), event.header.event_id
        about = keys[0] if keys else LeaseKey.of(event.header, MEMBER_TICKET)
        opened = self._transfers.get((event.header.i, body.transfer))
        self._check_parties(event, body, opened)
        if opened is None:
            if keys and not isinstance(body, SettleVoided):
                text = f"event {eid} {_DECIDES[body.KIND]} {body.transfer}, which was never opened"
                self._offend(Rule.DECIDED, event, text, about, proved=False)
            return
        if isinstance(body, MadeVisible) and opened.settled is None:
            text = f"event {eid} makes {body.transfer} visible, and no `settle` about it precedes it"
            self._offend(Rule.ONE_END, event, text, about, proved=False)
        if opened.several:
            self._book.note(event)
            self._own(event, body.transfer)
        if wrong := opened.note(event, body):
            self._offend(Rule.ONE_END, event, wrong, about, other_event=opened.other_than(event))
        if not opened.several:
            self._apply(opened, event)

    def _check_parties(self, event: Event, body: Decision, opened: Decided | None) -> None:
        eid = event.header.event_id
        for key in party_keys(event):
            trail = self._trails.get(key)
            ended = trail is not None and trail.bits & Fact.ACCESS_ENDED
            if opened is not None and not opened.has_room_for(key):
                text = f"event {eid} {_DECIDES[body.KIND]} {key}, which {body.transfer} never opened"
                self._offend(Rule.DECIDED, event, text, key)
            elif isinstance(body, SettleDecided) and run_of(key) == run_of_event(event) and not ended:
                what = "access to which is not known to have ended" if trail else "of which nothing is recorded"
                text = f"event {eid} settles {key}, {what}"
                self._hasty.append(Offence(self._place, Rule.DECIDED, event, text, key, proved=False))

    def _apply(self, opened: Decided, event: Event) -> None:
        """A member that agrees with itself applies its own decision at once, before its next batch."""
        for key in opened.keys:
            trail = self._trails.get(key)
            if trail is not None and run_of(key) == run_of_event(event) and trail.bits & Fact.ACCESS_ENDED:
                self._set_free(trail, event, self._batches.get(run_of_event(event), 0) - 1)

    # ------------------------------------------------------------------------------------------------------- inside

    def _trail(self, key: LeaseKey, event: Event) -> Trail:
        trail = self._trails.get(key)
        if trail is None:
            trail = self._trails[key] = Trail(self._book.get(key), event)
        return trail

    def _awaits_decision(self, trail: Trail) -> bool:
        """Whether its transfer is open still; what several members decided counts when this one says `settled`."""
        life = trail.life
        opened = self._transfers.get((life.key.instance, life.transfer))
        if opened is None or opened.several:
            return trail.is_write and not life.is_local
        return life.key in opened.keys and all(run_of_event(event) != run_of(life.key) for event in opened.ends)

    def _set_free(self, trail: Trail, event: Event, batch: int) -> None:
        if trail.free is None and trail.returned is None:
            trail.free, trail.free_place, trail.free_batch = event, self._place, batch

    def _is_missing(self, trail: Trail) -> bool:
        """Whether its member recorded a later batch, in which the return would stand."""
        if trail.returned is not None or self._is_retained(trail) or self._index.later_run(trail.life.key):
            return False
        return self._batches.get(run_of(trail.life.key), 0) >= trail.free_batch + 2

    @staticmethod
    def _is_retained(trail: Trail) -> bool:
        said_two_things = any(row.failure == "contradiction" for row in trail.life.failures)
        return bool(trail.bits & _RETAINED) or said_two_things

    def _out(self, trail: Trail) -> Out:
        life = trail.life
        gone = self._index.later_run(life.key)
        opened = self._transfers.get((life.key.instance, life.transfer))
        decided = opened is not None and life.key in opened.keys and bool(opened.ends)
        why = why_out(life, later_run=gone, decided=decided)
        free = trail.free is not None or (decided and bool(trail.bits & Fact.ACCESS_ENDED))
        pending = free and not gone and not self._is_retained(trail)
        return Out(life, trail.granted or trail.first, why, pending)

    def _offend(
        self,
        rule: Rule,
        event: Event,
        text: str,
        lease: LeaseKey,
        *,
        proved: bool = True,
        other: LeaseKey | None = None,
        other_event: Event | None = None,
    ) -> None:
        self._found.append(Offence(self._place, rule, event, text, lease, proved, other, other_event))
