"""The recorder: facts, decisions and steps of one member, in order, into the streams; nothing waits for it.

One message is under way at a time, and is repeated under the same id until the broker has it, so that order holds and
a repeat is stored once. Facts that have gathered meanwhile leave together, as one batch: a round trip then carries what
a busy second brings. While the broker is away the queue grows to its bound; new transfers are refused long before that,
and no page ever waits for, or is freed by, what happens here.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from kvbus.codec import pack
from kvbus.columns import column
from kvbus.errors import BusError
from kvbus.events import (
    BATCH_EVENTS_MAX,
    EVENT_LENGTH_MAX_BYTES,
    AttemptMade,
    EventsBatch,
    FactsSeen,
    Header,
    LeaseGranted,
    OutcomeFixed,
    SettleDecided,
    SettleVoided,
    TransferOpened,
    fields_of,
)
from kvbus.ledger.agreement import Decision
from kvbus.ledger.facts import AttemptRow, FactDetail, GrantedRow, LeaseFacts, OutcomeRow
from kvbus.parts import Body
from kvbus.roles.collapsing import newest_lines
from kvbus.roles.journal import note_event, note_facts
from kvbus.roles.spans import Spans
from kvbus.topics import Topics
from kvbus.transport import Bus, NotStored

Fields = dict[str, object]
"""A body as it is packed. What a ledger's row says needs no check, and thousands of them are written each second."""

LINES_MAX = 1_000
"""Lines of facts in one event: 22 KB of columns, far below the stream's limit for a message."""
DETAILS_MAX = 50
"""Failures in one event: each holds a text of at most 2,000 characters, so 50 stay under half of the event limit."""
OUTBOX_LENGTH_MAX_BYTES = 64 << 20
"""About a million lines of facts: half an hour of a busy member without a broker."""
OUTBOX_BUSY_BYTES = 16 << 20
"""Beyond a quarter of the bound, new transfers are refused as `bus_unavailable`: running ones still need the rest."""
COLLAPSE_LENGTH_BYTES = 1 << 20
"""So much is looked through at a time when the outbox is full: nothing else runs in the 0.15 s that takes at most."""
HEADERS_BYTES = 1 << 10
"""What the message id adds; the broker counts headers toward its limit."""
BATCH_LENGTH_MAX_BYTES = EVENT_LENGTH_MAX_BYTES // 2
"""What the events of one batch hold together; each is far smaller than the other half."""
RETRY_MIN_S, RETRY_MAX_S = 0.1, 2.0

NOWHERE: tuple[int, bytes] = (0, b"")
"""The place of a member's newest facts in their stream, and what stands there, before anything is stored."""

log = logging.getLogger(__name__)


class _Outgoing(NamedTuple):
    subject: str
    data: bytes
    sequence: int
    kind: str = ""


class Recorder:
    """Numbers, encodes and stores this member's events. `unix_ns` gives the time that readers see."""

    def __init__(
        self, *, bus: Bus, topics: Topics, instance: str, member: str, epoch: int, unix_ns: Callable[[], int]
    ) -> None:
        self._bus = bus
        self._instance = instance
        self._member = member
        self._epoch = epoch
        self._unix_ns = unix_ns
        self._sequence = 0
        self._shared: dict[str, object] = Header(k="any", i=instance, m=member, e=epoch, s=0, t=0).model_dump()
        self._speaker = f"{instance}.{member}.{epoch}"
        self._facts_subject = topics.facts(instance)
        self._settle_subject = topics.settle(instance)
        self._queue: deque[_Outgoing] = deque()
        self._queued_bytes = 0
        self._leaving = 0
        self._looked_through = 0
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._awaited: dict[int, asyncio.Future[None]] = {}
        self.spans = Spans(instance, member)
        self.handled_sequence = 0
        self.newest = NOWHERE
        self.fell_back = 0
        self.stored_sequence = 0
        self.dropped = 0
        self.collapsed = 0
        self.retries = 0

    @property
    def epoch(self) -> int:
        """The epoch under which this member speaks."""
        return self._epoch

    @property
    def is_busy(self) -> bool:
        """True while so much waits for the broker that nothing new should start."""
        return self._queued_bytes > OUTBOX_BUSY_BYTES

    @property
    def queued_bytes(self) -> int:
        """What waits for the broker now."""
        return self._queued_bytes

    @property
    def queued_events(self) -> int:
        """How many events that is."""
        return len(self._queue)

    @property
    def queued_sequence(self) -> int:
        """The newest event that waits for the broker; where none does, the last one that did."""
        return self._queue[-1].sequence if self._queue else self.handled_sequence

    def header(self, kind: str, cause: str = "") -> Header:
        """Return the header of this member's next event."""
        self._sequence += 1
        return Header(
            k=kind,
            i=self._instance,
            m=self._member,
            e=self._epoch,
            s=self._sequence,
            t=self._unix_ns(),
            c=cause,
        )

    # -------------------------------------------------------------------------------------------------------- input

    def event(self, body: Body, cause: str = "") -> None:
        """Record one event on the facts stream."""
        self._put(self._facts_subject, body.KIND, fields_of(body), cause)
        self.spans.hear(body)
        note_event(body, cause)

    def facts(self, facts: LeaseFacts) -> None:
        """Record a round's batch: the rows first, since they say what the lines are about."""
        self.spans.facts(facts)
        note_facts(facts)
        for row in facts.rows:
            self._put(self._facts_subject, *_row_fields(row))
        if len(facts.tickets) <= LINES_MAX and len(facts.details) <= DETAILS_MAX:  # nearly always
            if facts.tickets or facts.details:
                self._put(self._facts_subject, FactsSeen.KIND, _columns(facts))
            return
        events = max(-(-len(facts.tickets) // LINES_MAX), -(-len(facts.details) // DETAILS_MAX))
        for number in range(events):
            lines = slice(number * LINES_MAX, (number + 1) * LINES_MAX)
            part = LeaseFacts(
                tickets=facts.tickets[lines],
                ranks=facts.ranks[lines],
                bits=facts.bits[lines],
                lo=facts.lo[lines],
                hi=facts.hi[lines],
                details=facts.details[number * DETAILS_MAX : (number + 1) * DETAILS_MAX],
            )
            self._put(self._facts_subject, FactsSeen.KIND, _columns(part))

    def decision(self, decision: Decision) -> None:
        """Record one decision on the settle log."""
        body = _decision_body(decision)
        self._put(self._settle_subject, body.KIND, fields_of(body))

    # ------------------------------------------------------------------------------------------------------- output

    async def run(self) -> None:
        """Store what was recorded, message by message, for as long as the worker runs."""
        while True:
            await self._filled.wait()
            while self._queue:
                outgoing, self._leaving = self._next()
                await self._store(outgoing)
                for _ in range(self._leaving):
                    self._queued_bytes -= len(self._queue.popleft().data)
                self._looked_through = max(0, self._looked_through - self._leaving)
                self._leaving = 0
                self.handled_sequence = outgoing.sequence
                if self._awaited:
                    for sequence in [one for one in self._awaited if one <= outgoing.sequence]:
                        self._awaited.pop(sequence).set_result(None)
            self._filled.clear()
            self._emptied.set()

    async def flush(self, wait_s: float) -> bool:
        """Wait until everything is stored; False where that takes longer than the wait."""
        try:
            async with asyncio.timeout(wait_s):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    async def handled(self, sequence: int, wait_s: float) -> bool:
        """Wait until an event, and so all before it, is stored; False where that takes longer than the wait."""
        if self.handled_sequence >= sequence:
            return True
        awaited = self._awaited.get(sequence)  # all who wait for one event share this, so there are few
        if awaited is None:
            awaited = self._awaited[sequence] = asyncio.get_running_loop().create_future()
        await asyncio.wait({awaited}, timeout=wait_s)
        return awaited.done()

    def _next(self) -> tuple[_Outgoing, int]:
        """Return what leaves next, and how many events it holds: those of the facts stream that stand at the front."""
        first = self._queue[0]
        batch: list[bytes] = []
        length_bytes = sequence = 0
        if first.subject == self._facts_subject:
            for event in islice(self._queue, BATCH_EVENTS_MAX):
                length_bytes += len(event.data)
                if event.subject != first.subject or length_bytes > BATCH_LENGTH_MAX_BYTES:
                    break
                batch.append(event.data)
                sequence = event.sequence
        if len(batch) < 2:
            return first, 1
        data = self._encoded(EventsBatch.KIND, {"events": batch}, "", sequence)
        return _Outgoing(first.subject, data, sequence), len(batch)

    async def _store(self, outgoing: _Outgoing) -> None:
        pause_s, message_id = RETRY_MIN_S, f"{self._speaker}.{outgoing.sequence}"
        while True:
            try:
                answer = await self._bus.store(outgoing.subject, outgoing.data, message_id=message_id)
            except BusError as error:
                self.retries += 1
                log.info("facts wait for the broker: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_MAX_S, 2 * pause_s)
                continue
            if isinstance(answer, NotStored):
                self.dropped += 1
                log.warning("the stream would not take an event: %s", answer.reason)
            else:
                self.stored_sequence = outgoing.sequence
                if outgoing.subject == self._facts_subject:
                    # A stream that went back gives a place away for the second time.
                    self.fell_back += not answer.duplicate and answer.sequence <= self.newest[0]
                    self.newest = (answer.sequence, outgoing.data)
            return

    def _put(self, subject: str, kind: str, fields: Fields, cause: str = "") -> None:
        self._sequence += 1
        data = self._encoded(kind, fields, cause, self._sequence)
        length_bytes = len(data)
        if length_bytes > EVENT_LENGTH_MAX_BYTES - HEADERS_BYTES:  # the stream would refuse it each time (never seen)
            self.dropped += 1
            log.error("a %s event of %d bytes is too long for its stream: it is not recorded", kind, length_bytes)
            return
        while self._queued_bytes + length_bytes > OUTBOX_LENGTH_MAX_BYTES and self._collapse():
            pass
        if self._queued_bytes + length_bytes > OUTBOX_LENGTH_MAX_BYTES:
            self.dropped += 1
            if self.dropped == 1:
                log.error("the outbox is full (%d bytes): facts are being lost", self._queued_bytes)
            return
        if not self._queue:
            self._filled.set()
            self._emptied.clear()
        self._queue.append(_Outgoing(subject, data, self._sequence, kind))
        self._queued_bytes += length_bytes

    def _collapse(self) -> bool:
        """Leave out of the oldest queued facts what later ones contain; False where all was looked through already.

        What is leaving stays as it is: the broker may have it.
        """
        begin = max(self._leaving, self._looked_through)
        length_bytes, end = 0, begin
        for outgoing in islice(self._queue, begin, None):
            length_bytes, end = length_bytes + len(outgoing.data), end + 1
            if length_bytes >= COLLAPSE_LENGTH_BYTES:
                break
        queue = list(self._queue)
        places = [place for place in range(begin, end) if queue[place].kind == FactsSeen.KIND]
        left = dict(zip(places, newest_lines([queue[place].data for place in places]), strict=True))
        kept: list[_Outgoing] = []
        for place in range(begin, end):
            data = left.get(place, queue[place].data)
            self._queued_bytes -= len(queue[place].data) - len(data or b"")
            if data is not None:
                kept.append(queue[place]._replace(data=data))
        self.collapsed += end - begin - len(kept)
        self._queue = deque([*queue[:begin], *kept, *queue[end:]])
        self._looked_through = begin + len(kept)
        return end > begin

    def _encoded(self, kind: str, fields: Fields, cause: str, sequence: int) -> bytes:
        """Return an event's bytes; what all headers of this member share was checked once."""
        return pack(
            {**self._shared, "k": kind, "s": sequence, "t": self._unix_ns(), "c": cause, "b": fields}, fields_of
        )


def _columns(facts: LeaseFacts) -> Fields:
    return {
        "n": len(facts.tickets),
        "ticket": column(facts.tickets, 8),
        "rank": column(facts.ranks, 2),
        "bits": column(facts.bits, 4),
        "lo": column(facts.lo, 4),
        "hi": column(facts.hi, 4),
        "details": [_detail_row(one) for one in facts.details],
    }


def _detail_row(detail: FactDetail) -> Fields:
    failure = detail.failure.name.lower()
    return {"ticket": detail.ticket, "failure": failure, "text": detail.text[:2_000], "peer": detail.peer[:64]}


def _row_fields(row: GrantedRow | AttemptRow | OutcomeRow) -> tuple[str, Fields]:
    match row:
        case GrantedRow():
            return LeaseGranted.KIND, {
                "ticket": row.ticket,
                "transfer": row.transfer,
                "rank": row.rank,
                "direction": "write" if row.writes else "read",
                "lender": row.lender,
                "peer": row.peer,
                "pages": column(row.pages, 4),
                "counters": column(row.counters, 8),
            }
        case AttemptRow():
            return AttemptMade.KIND, {
                "ticket": row.ticket,
                "attempt": row.attempt,
                "binding": row.binding,
                "peer": row.peer,
            }
        case OutcomeRow():
            return OutcomeFixed.KIND, {
                "ticket": row.ticket,
                "attempt": row.attempt,
                "result": row.result,
                "arrived": row.arrived,
                "length_bytes": row.length_bytes,
                "evidence": row.evidence,
                "failure": row.failure.name.lower() if row.failure else "",
                "text": row.text[:2_000],
            }


def _decision_body(decision: Decision) -> Body:
    members = tuple((party.member, party.epoch, party.rank, party.ticket) for party in decision.parties)
    transfer, term, n, previous = decision.transfer, decision.term, decision.n, decision.previous
    if decision.kind == "open":
        return TransferOpened(transfer=transfer, term=term, n=n, previous=previous, members=members)
    if decision.kind == "void":
        return SettleVoided(transfer=transfer, term=term, n=n, previous=previous, reason=decision.reason[:2_000])
    lo, hi = decision.lo, decision.hi
    return SettleDecided(transfer=transfer, term=term, n=n, previous=previous, lo=lo, hi=hi, members=members)
