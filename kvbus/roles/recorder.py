"""The recorder: facts, decisions and steps of one member, in order, into the streams; nothing waits for it.

One event is under way at a time, and is repeated under the same message id until the broker has it, so that order
holds and a repeat is stored once. While the broker is away the queue grows to its bound; new transfers are refused long
before that, and no page ever waits for, or is freed by, what happens here.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvbus.errors import BusError
from kvbus.events import (
    EVENT_LENGTH_MAX_BYTES,
    AttemptMade,
    FactsSeen,
    Header,
    LeaseGranted,
    OutcomeFixed,
    SettleDecided,
    SettleVoided,
    TransferOpened,
    column,
    encode_fields,
)
from kvbus.ledger.agreement import Decision
from kvbus.ledger.facts import AttemptRow, FactDetail, GrantedRow, LeaseFacts, OutcomeRow
from kvbus.parts import Body, FactDetailRow
from kvbus.topics import Topics
from kvbus.transport import Bus, NotStored

LINES_MAX = 1_000
"""Lines of facts in one event: 22 KB of columns, far below the stream's limit for a message."""
DETAILS_MAX = 50
"""Failures in one event: each holds a text of at most 2,000 characters, so 50 stay under half of the event limit."""
OUTBOX_LENGTH_MAX_BYTES = 64 << 20
"""About a million lines of facts: half an hour of a busy member without a broker."""
OUTBOX_BUSY_BYTES = 16 << 20
"""Beyond a quarter of the bound, new transfers are refused as `bus_unavailable`: running ones still need the rest."""
HEADERS_BYTES = 1 << 10
"""What the message id adds; the broker counts headers toward its limit."""
RETRY_MIN_S, RETRY_MAX_S = 0.1, 2.0

log = logging.getLogger(__name__)


class _Outgoing(NamedTuple):
    subject: str
    data: bytes
    message_id: str
    sequence: int


class Recorder:
    """Numbers, encodes and stores this member's events. `unix_ns` gives the time that readers see."""

    def __init__(
        self, *, bus: Bus, topics: Topics, instance: str, member: str, epoch: int, unix_ns: Callable[[], int]
    ) -> None:
        self._bus = bus
        self._topics = topics
        self._instance = instance
        self._member = member
        self._epoch = epoch
        self._unix_ns = unix_ns
        self._sequence = 0
        self._shared: dict[str, object] = Header(k="any", i=instance, m=member, e=epoch, s=0, t=0).model_dump()
        self._speaker = f"{instance}.{member}.{epoch}"
        self._queue: deque[_Outgoing] = deque()
        self._queued_bytes = 0
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self.stored_sequence = 0
        self.dropped = 0
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
        self._put(self._topics.facts(self._instance), body, cause)

    def facts(self, facts: LeaseFacts) -> None:
        """Record a round's batch: the rows first, since they say what the lines are about."""
        for row in facts.rows:
            self.event(_row_body(row))
        details = [_detail_row(detail) for detail in facts.details]
        events = max(-(-len(facts.tickets) // LINES_MAX), -(-len(details) // DETAILS_MAX))
        for number in range(events):
            lines = slice(number * LINES_MAX, (number + 1) * LINES_MAX)
            tickets = facts.tickets[lines]
            body = FactsSeen(
                n=len(tickets),
                ticket=column(tickets, 8),
                rank=column(facts.ranks[lines], 2),
                bits=column(facts.bits[lines], 4),
                lo=column(facts.lo[lines], 4),
                hi=column(facts.hi[lines], 4),
                details=tuple(details[number * DETAILS_MAX : (number + 1) * DETAILS_MAX]),
            )
            self.event(body)

    def decision(self, decision: Decision) -> None:
        """Record one decision on the settle log."""
        self._put(self._topics.settle(self._instance), _decision_body(decision), "")

    # ------------------------------------------------------------------------------------------------------- output

    async def run(self) -> None:
        """Store what was recorded, one by one, for as long as the worker runs."""
        while True:
            await self._filled.wait()
            while self._queue:
                await self._store(self._queue[0])
                sent = self._queue.popleft()
                self._queued_bytes -= len(sent.data)
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

    async def _store(self, outgoing: _Outgoing) -> None:
        pause_s = RETRY_MIN_S
        while True:
            try:
                answer = await self._bus.store(outgoing.subject, outgoing.data, message_id=outgoing.message_id)
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
            return

    def _put(self, subject: str, body: Body, cause: str) -> None:
        sequence, data = self._encoded(body, cause)
        if len(data) > EVENT_LENGTH_MAX_BYTES - HEADERS_BYTES:  # the stream would refuse it each time (never seen)
            self.dropped += 1
            log.error("a %s event of %d bytes is too long for its stream: it is not recorded", body.KIND, len(data))
            return
        if self._queued_bytes + len(data) > OUTBOX_LENGTH_MAX_BYTES:
            self.dropped += 1
            if self.dropped == 1:
                log.error("the outbox is full (%d bytes): facts are being lost", self._queued_bytes)
            return
        self._queue.append(_Outgoing(subject, data, f"{self._speaker}.{sequence}", sequence))
        self._queued_bytes += len(data)
        self._filled.set()
        self._emptied.clear()

    def _encoded(self, body: Body, cause: str) -> tuple[int, bytes]:
        """Return the next sequence and its event; what all headers of this member share was checked once."""
        self._sequence += 1
        changed = {"k": body.KIND, "s": self._sequence, "t": self._unix_ns(), "c": cause}
        return self._sequence, encode_fields({**self._shared, **changed}, body)


def _detail_row(detail: FactDetail) -> FactDetailRow:
    failure = detail.failure.name.lower()
    return FactDetailRow(ticket=detail.ticket, failure=failure, text=detail.text[:2_000], peer=detail.peer[:64])


def _row_body(row: GrantedRow | AttemptRow | OutcomeRow) -> Body:
    match row:
        case GrantedRow():
            return LeaseGranted(
                ticket=row.ticket,
                transfer=row.transfer,
                rank=row.rank,
                direction="write" if row.writes else "read",
                lender=row.lender,
                peer=row.peer,
                pages=column(row.pages, 4),
                counters=column(row.counters, 8),
            )
        case AttemptRow():
            return AttemptMade(ticket=row.ticket, attempt=row.attempt, binding=row.binding, peer=row.peer)
        case OutcomeRow():
            return OutcomeFixed(
                ticket=row.ticket,
                attempt=row.attempt,
                result=row.result,
                arrived=row.arrived,
                length_bytes=row.length_bytes,
                evidence=row.evidence,
                failure=row.failure.name.lower() if row.failure else "",
                text=row.text[:2_000],
            )


def _decision_body(decision: Decision) -> Body:
    members = tuple((party.member, party.epoch, party.rank, party.ticket) for party in decision.parties)
    transfer, term, n, previous = decision.transfer, decision.term, decision.n, decision.previous
    if decision.kind == "open":
        return TransferOpened(transfer=transfer, term=term, n=n, previous=previous, members=members)
    if decision.kind == "void":
        return SettleVoided(transfer=transfer, term=term, n=n, previous=previous, reason=decision.reason[:2_000])
    lo, hi = decision.lo, decision.hi
    return SettleDecided(transfer=transfer, term=term, n=n, previous=previous, lo=lo, hi=hi, members=members)
