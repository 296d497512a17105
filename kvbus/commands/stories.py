"""A transfer's story, told from recorded events alone: a pure function, for `kvbus story` and for whoever audits.

What was not recorded is not told: it is named as missing. Nothing is concluded from silence, with one exception that is
itself recorded: a member that has run under a later epoch has lost the memory of its earlier one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvbus.commands.leases import LEASES_MAX, LeaseBook, LeaseKey, LeaseLife, why_out
from kvbus.commands.replaying import Replay
from kvbus.commands.trails import Found, Index, LeaseRow, NotFound, hash_of, in_order, keys_of, transfer_of
from kvbus.commands.wording import Line, Tone, counted, duration, lines_of, outcome_text, size
from kvbus.events import (
    AttemptMade,
    Event,
    FactsSeen,
    MadeVisible,
    OutcomeFixed,
    SettleDecided,
    SettleVoided,
    TransferOpened,
    TransferOutcome,
    TransferRequested,
    TransferStep,
    TransferVerdict,
)
from kvbus.ledger.facts import Fact


class Lane(StrEnum):
    """Who acts in a line of a story."""

    REQUESTER = "requester"
    DESTINATION = "destination"
    SOURCE = "source"
    DATA_PLANE = "data plane"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a story; `after_ns` counts from its first event."""

    after_ns: int
    lane: Lane
    event: Event
    line: Line


@dataclass(frozen=True, slots=True)
class LeaseTold:
    """What became of one lease: `returned`, or `out` and why not, in words; `gone` with the process that held it."""

    life: LeaseLife
    returned: bool
    out: str = ""
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Story:
    """One transfer's life, or, with an empty `transfer`, that of one lease which belongs to none."""

    transfer: str
    request_hash: str
    request_id: str
    source: str
    destination: str
    began_ns: int
    entries: tuple[Entry, ...]
    leases: tuple[LeaseTold, ...]
    outcome: TransferOutcome | None
    missing: tuple[str, ...]
    contradictions: tuple[str, ...]
    note: str = ""

    @property
    def complete(self) -> bool:
        """Whether everything that a whole life leaves behind is there, up to the return of every lease."""
        return not self.missing

    @property
    def summary(self) -> str:
        """The story in one paragraph."""
        sentences = [self._head(), *(self._side(told) for told in self.leases)]
        if self.leases and all(told.returned or told.gone for told in self.leases):
            sentences.append("Nothing is out.")
        sentences += [f"Contradiction: {text}." for text in self.contradictions]
        if self.missing:
            sentences.append(f"The trail is incomplete; it lacks {'; '.join(self.missing)}.")
        return " ".join(sentences)

    def _head(self) -> str:
        if not self.transfer:
            return "This lease belongs to no transfer that is recorded."
        outcome = self.outcome
        if outcome is None:
            return f"How transfer {self.transfer} ended is not recorded."
        if outcome.outcome not in {"settled", "partial"} or not outcome.pages_moved:
            return f"Transfer {self.transfer} from {self.source} to {self.destination} {outcome_text(outcome)}."
        text = f"Transfer {self.transfer} {outcome.outcome}: {outcome.pages_moved} of "
        text += f"{counted(outcome.pages_wanted, 'block')} ({size(outcome.length_bytes)}) came from {self.source} to "
        return f"{text}{self.destination} in {duration(outcome.total_s)}."

    @staticmethod
    def _side(told: LeaseTold) -> str:
        life = told.life
        pages = counted(len(life.pages), "page") if life.granted else "an unknown number of pages"
        purpose = {"read": "for reading", "write": "for writing"}.get(life.direction, "for an unrecorded purpose")
        verb = "was" if pages == "1 page" else "were"
        text = f"On {life.key.instance}, {pages} {verb} lent {purpose} (T{life.key.ticket}): "
        if life.bits & Fact.ACCESS_ENDED:
            text += f"access ended by {', '.join(life.evidence) or 'no evidence that is named'}, "
        elif life.bits & Fact.FENCED:
            text += "fenced, so that its reader, which may read still, delivers nothing of them; "
        if told.gone:
            return f"{text}ended with its process and never returned, since {told.out}."
        if not told.returned:
            return f"{text}still out, since {told.out}."
        return f"{text}returned {'exactly once' if life.returns == 1 else f'{life.returns} times'}{_kept(life)}."


def tell(events: Iterable[Event], wanted: str) -> Story | NotFound:
    """Return the story of a transfer, request or ticket, or what may have been meant; it never raises for bad input.

    Order and repetition of the events do not matter. `wanted`: a transfer id, a request hash, a unique beginning of at
    least four characters, `T7@b`, or `T7` where one instance has it.
    """
    ordered = in_order(events)
    index = Index.of(ordered)
    found = index.find(wanted)
    return found if isinstance(found, NotFound) else _Teller(index, found).tell(ordered)


class _Teller:
    """Collects one story; used once."""

    def __init__(self, index: Index, found: Found) -> None:
        self._index = index
        self._found = found
        owner, transfer = index.owners, found.transfer
        self._keys = {key for key in owner if owner[key] == transfer} if transfer else {_lease_of(found)}
        known = index.transfers.get(transfer)
        self._hash = known.request_hash if known else ""
        self._book = LeaseBook(keep_returned=True)
        self._steps: dict[str, TransferStep] = {}
        self._decided: set[str] = set()
        self._ends = frozenset({"settle", "void"})
        self._outcome: TransferOutcome | None = None
        self._request_id = ""
        self._asked = False

    def tell(self, ordered: Sequence[Event]) -> Story:
        """Go through the events once, keep what belongs here, and see what is not there."""
        ours = [event for event in ordered if self._belongs(event)]
        began_ns = ours[0].header.t if ours else 0
        for event in ours:
            self._note(event)
        told = [
            (event, line)
            for event in ours
            for line in (*self._requested(event), *lines_of(event, self._book, only=self._keys))
        ]
        lives = sorted((life for life in self._book.lives() if life.key in self._keys), key=_writes_first)
        source, destination = self._parties(lives)
        entries = tuple(
            Entry(event.header.t - began_ns, self._lane(event, line, source), event, line) for event, line in told
        )
        leases = tuple(self._lease(life) for life in lives)
        return Story(
            transfer=self._found.transfer,
            request_hash=self._hash,
            request_id=self._request_id,
            source=source,
            destination=destination,
            began_ns=began_ns,
            entries=entries,
            leases=leases,
            outcome=self._outcome,
            missing=tuple(self._missing(leases, source, destination)),
            contradictions=tuple(self._contradictions(ours)),
            note=self._found.note,
        )

    # ------------------------------------------------------------------------------------------------------- trail

    def _belongs(self, event: Event) -> bool:
        if isinstance(event.body, LeaseRow | FactsSeen):
            return not self._keys.isdisjoint(keys_of(event))
        if isinstance(event.body, TransferRequested):
            return bool(self._hash) and hash_of(event) == self._hash
        return bool(self._found.transfer) and transfer_of(event) == self._found.transfer

    def _note(self, event: Event) -> None:
        body = event.body
        match body:
            case TransferStep():
                self._steps.setdefault(body.step, body)
                self._request_id = self._request_id or event.header.c
            case TransferOutcome():
                self._outcome = body
                self._request_id = self._request_id or event.header.c
            case TransferOpened():
                self._decided.add(body.KIND)
                if len({member for member, *_ in body.members}) > 1:
                    self._ends = frozenset({"visible", "void"})
            case SettleDecided() | MadeVisible() | SettleVoided():
                self._decided.add(body.KIND)
            case TransferRequested():
                self._asked, self._request_id = True, body.request_id
            case _:
                pass

    def _parties(self, lives: Sequence[LeaseLife]) -> tuple[str, str]:
        if not self._found.transfer:
            return "", ""
        if self._outcome is not None:
            return self._outcome.source, self._outcome.destination
        writes = [life for life in lives if life.direction == "write"]
        reads = [life for life in lives if life.direction == "read"]
        source = reads[0].key.instance if reads else writes[0].peer if writes else ""
        destination = writes[0].key.instance if writes else reads[0].peer if reads else ""
        return source, destination

    def _requested(self, event: Event) -> Iterator[Line]:
        """The request itself has left its queue by now: its id, and the time that it waited, stand with the others."""
        body = event.body
        if isinstance(body, TransferStep) and body.step == "accepted" and self._request_id and not self._asked:
            waited = f"waited {duration(self._outcome.queue_s)} in the queue" if self._outcome else self._request_id
            yield Line("request", waited, Tone.STEP, body.transfer)

    def _lane(self, event: Event, line: Line, source: str) -> Lane:
        body = event.body
        if isinstance(body, TransferRequested | TransferVerdict) or line.subject == "request":
            return Lane.REQUESTER
        if not self._found.transfer:
            return Lane.DESTINATION
        if line.lease is not None and line.lease.instance == source:
            return Lane.SOURCE
        return Lane.DATA_PLANE if isinstance(body, AttemptMade | OutcomeFixed) else Lane.DESTINATION

    # -------------------------------------------------------------------------------------------------- what is not

    def _lease(self, life: LeaseLife) -> LeaseTold:
        if life.bits & Fact.RETURNED:
            return LeaseTold(life, returned=True)
        later_run = self._index.later_run(life.key)
        out = why_out(life, later_run=later_run, decided=not self._decided.isdisjoint(self._ends))
        return LeaseTold(life, returned=False, out=out, gone=later_run and not life.bits & Fact.RETURN_FAILED)

    def _contradictions(self, ours: Sequence[Event]) -> Iterator[str]:
        """What the replay of `kvbus audit` finds in this trail, as far as nothing that is missing could explain it."""
        replay = Replay(leases_max=LEASES_MAX)
        for event in ours:
            replay.take(event)
        for offence in replay.offences():
            if offence.proved and (offence.lease in self._keys or transfer_of(offence.event) == self._found.transfer):
                yield offence.text

    def _missing(self, leases: Sequence[LeaseTold], source: str, destination: str) -> list[str]:
        missing: list[str] = []
        if self._found.transfer and "refused" not in self._steps:
            if "accepted" not in self._steps:
                missing.append("the beginning (the step `accepted`)")
            missing += self._missing_leases(leases, source or "the source", destination or "the destination")
        for told in leases:
            missing += self._missing_of(told)
        if self._found.transfer and self._outcome is None and "refused" not in self._steps:
            missing.append("the outcome")
        return missing

    def _missing_leases(self, leases: Sequence[LeaseTold], source: str, destination: str) -> list[str]:
        reads = [told for told in leases if told.life.direction == "read"]
        others = [told for told in leases if told.life.direction != "read"]
        moved = bool(self._outcome and self._outcome.pages_moved)
        leased = moved or bool(reads) or "open" in self._decided or not self._steps.keys().isdisjoint(_AFTER_LEASING)
        granted = moved or not self._steps.keys().isdisjoint({"granted", "moving"})
        granted = granted or any(told.life.bits & Fact.SUBMITTED for told in others)
        missing = []
        if leased and "open" not in self._decided:
            missing.append("the decision `open`")
        if leased and not others:
            missing.append(f"the write lease on {destination}")
        if granted and not reads:
            missing.append(f"the read lease on {source}")
        return missing

    def _missing_of(self, told: LeaseTold) -> list[str]:
        life, key = told.life, told.life.key
        tried = bool(life.bits & (Fact.SUBMITTED | Fact.UNCERTAIN))
        missing = []
        if life.granted is None and (not life.bits or life.bits & Fact.GRANTED):
            missing.append(f"the pages of {key} (its `lease_granted`)")
        if life.bits & Fact.SUBMITTED and life.attempt is None:
            missing.append(f"the attempt of {key}")
        if tried and life.bits & (Fact.ACCESS_ENDED | Fact.FENCED) and life.ended is None:
            missing.append(f"how the attempt of {key} ended (its `outcome`)")
        if life.bits & Fact.SETTLED and self._needs_decision(life):
            missing.append(f"the settle decision that names {key}")
        if not told.returned and not told.gone:
            missing.append(f"the return of {key}: {told.out}")
        return missing

    def _needs_decision(self, life: LeaseLife) -> bool:
        """A member that shuts down, and one that holds a lease of its own, agree with themselves."""
        alone = life.is_local or any(row.failure == "shutdown" for row in life.failures)
        return life.direction == "write" and not alone and not self._decided & self._ends


_AFTER_LEASING = frozenset({"leased", "asking", "computing", "granted", "moving"})


def _kept(life: LeaseLife) -> str:
    if life.direction != "write":
        return ""
    if not life.bits & Fact.CONSUMED:
        return " as free pages"
    arrived = life.ended.arrived if life.ended else 0
    return " as content" if arrived in {0, len(life.pages)} else f", {arrived} of them as content"


def _lease_of(found: Found) -> LeaseKey:
    if found.lease is None:
        raise ValueError("a story is about a transfer or about a lease")
    return found.lease


def _writes_first(life: LeaseLife) -> tuple[bool, LeaseKey]:
    return life.direction == "read", life.key
