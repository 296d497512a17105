"""The recorder: facts, decisions and steps of one member, in order, into the streams; nothing waits for it.

There is a lane for each of the two streams. In each one message is under way at a time, and is repeated under the same
id until the broker has it, so that order holds and a repeat is stored once. What has gathered meanwhile leaves
together, as one batch: a round trip then carries what a busy second brings.

Facts wait for the decisions that were recorded before them: whoever reads that a lease went back finds in the log why
it might. A decision waits for no fact: it stands on what its member knows, not on what the broker has, as that of a
coordinator does. Had it to wait, each transfer would wait for four acks, one after the other.

While the broker is away the lanes grow to their bound; new transfers are refused long before that, and no page ever
waits for, or is freed by, what happens here.
"""

import asyncio
import logging
from collections.abc import Callable

from kvbus.errors import BusError
from kvbus.events import EVENT_LENGTH_MAX_BYTES, EventsBatch, FactsSeen, Header, TransferStep, fields_of
from kvbus.ledger.agreement import Decision
from kvbus.ledger.facts import LeaseFacts
from kvbus.parts import Body
from kvbus.roles.journal import note_event, note_facts, note_step
from kvbus.roles.lane import Lane
from kvbus.roles.moments import Moment
from kvbus.roles.rows import fields_of_decision, fields_of_lines, fields_of_row
from kvbus.roles.spans import Spans
from kvbus.speaking import Fields, Speaker
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
REST_S = 0.002
"""After steps of transfers: as a rule their next ones follow within a millisecond or two, and leave together then."""

NOWHERE: tuple[int, bytes] = (0, b"")
"""The place of a member's newest facts in their stream, and what stands there, before anything is stored."""

log = logging.getLogger(__name__)


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
        self._speaker = Speaker(instance, member, epoch)
        self._name = f"{instance}.{member}.{epoch}"
        self._facts = Lane(topics.facts(instance), self._batch)
        self._decisions = Lane(topics.settle(instance), self._batch)
        self._queued_bytes = 0
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._awaited: dict[int, Moment] = {}
        self.spans = Spans(instance, member)
        self.newest = NOWHERE
        self.fell_back = 0
        self.stored_sequence = 0
        """The newest of the facts that are stored: with all before it, and with the decisions before it."""
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

    @property
    def queued_events(self) -> int:
        """How many events that is."""
        return len(self._facts.queue) + len(self._decisions.queue)

    @property
    def queued_sequence(self) -> int:
        """The newest of the facts that wait for the broker; where none do, the last one that did."""
        return self._facts.newest_sequence

    @property
    def collapsed(self) -> int:
        """Events that made room for a newer one of the same leases."""
        return self._facts.collapsed

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

    def encoded(self, body: Body, cause: str = "", **changed: object) -> bytes:
        """Return the bytes of this member's next event, which is told and not recorded.

        `changed` stands in for what the body says; it is as little checked as in a copy of a model.
        """
        self._sequence += 1
        fields = fields_of(body) | changed if changed else fields_of(body)
        return self._speaker.event(body.KIND, fields, cause, self._sequence, self._unix_ns())

    # -------------------------------------------------------------------------------------------------------- input

    def event(self, body: Body, cause: str = "") -> None:
        """Record one event on the facts stream."""
        self._put(self._facts, body.KIND, fields_of(body), cause)
        self.spans.hear(body)
        note_event(body, cause)

    def step(self, transfer: str, request_hash: str, step: str, text: str, cause: str = "") -> None:
        """Record a step of a transfer of this member; there are so many that none is made a model first."""
        text = text[:2_000]
        fields: Fields = {"transfer": transfer, "request_hash": request_hash, "step": step, "text": text}
        self._put(self._facts, TransferStep.KIND, fields, cause)
        self.spans.step(transfer, step, text)
        note_step(transfer, request_hash, step, text, cause)

    def facts(self, facts: LeaseFacts) -> None:
        """Record a round's batch: the rows first, since they say what the lines are about."""
        self.spans.facts(facts)
        note_facts(facts)
        for row in facts.rows:
            self._put(self._facts, *fields_of_row(row))
        if len(facts.lines) <= LINES_MAX and len(facts.details) <= DETAILS_MAX:  # nearly always
            if facts.lines or facts.details:
                self._put(self._facts, FactsSeen.KIND, fields_of_lines(facts))
            return
        events = max(-(-len(facts.lines) // LINES_MAX), -(-len(facts.details) // DETAILS_MAX))
        for number in range(events):
            part = LeaseFacts(
                lines=facts.lines[number * LINES_MAX : (number + 1) * LINES_MAX],
                details=facts.details[number * DETAILS_MAX : (number + 1) * DETAILS_MAX],
            )
            self._put(self._facts, FactsSeen.KIND, fields_of_lines(part))

    def decision(self, decision: Decision) -> None:
        """Record one decision on the settle log."""
        self._put(self._decisions, *fields_of_decision(decision))

    # ------------------------------------------------------------------------------------------------------- output

    async def run(self) -> None:
        """Store what was recorded, message by message in each lane, for as long as the worker runs."""
        lanes = [asyncio.create_task(self._drain(lane), name="recorder") for lane in (self._facts, self._decisions)]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:  # where one of them has raised; a cancel has reached both
                lane.cancel()

    async def flush(self, wait_s: float) -> bool:
        """Wait until everything is stored; False where that takes longer than the wait."""
        try:
            async with asyncio.timeout(wait_s):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    async def handled(self, sequence: int, wait_s: float) -> bool:
        """Wait until one of the facts, and so all before it, is stored; False where it takes longer than the wait."""
        if self._facts.left_sequence >= sequence:
            return True
        awaited = self._awaited.get(sequence)  # all who wait for one event share this, so there are few
        if awaited is None:
            awaited = self._awaited[sequence] = Moment()
        return await awaited.within(wait_s)

    async def _drain(self, lane: Lane) -> None:
        while True:
            while (outgoing := lane.begin(self._first_undecided() if lane is self._facts else None)) is not None:
                rest_s = REST_S if lane.leaves_steps else 0.0
                await self._store(lane, *outgoing)
                self._queued_bytes -= lane.end()
                self._tell_of_end(lane)
                if rest_s:
                    await asyncio.sleep(rest_s)
            await lane.sleep()

    def _first_undecided(self) -> int | None:
        """Return the number of the oldest decision that is not stored; None where all are."""
        if not self._decisions.queue:
            return None
        _, sequence, _ = self._decisions.queue[0]
        return sequence

    def _tell_of_end(self, lane: Lane) -> None:
        if lane is self._decisions:
            self._facts.wake()
        elif self._awaited:
            for sequence in [one for one in self._awaited if one <= lane.left_sequence]:
                self._awaited.pop(sequence).come()
        if not self._facts.queue and not self._decisions.queue:
            self._emptied.set()

    async def _store(self, lane: Lane, data: bytes, sequence: int) -> None:
        pause_s, message_id = RETRY_MIN_S, f"{self._name}.{sequence}"
        while True:
            try:
                answer = await self._bus.store(lane.subject, data, message_id=message_id)
            except BusError as error:
                self.retries += 1
                log.info("facts wait for the broker: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_MAX_S, 2 * pause_s)
                continue
            if isinstance(answer, NotStored):
                self.dropped += 1
                log.warning("the stream would not take an event: %s", answer.reason)
            elif lane is self._facts:
                self.stored_sequence = sequence
                # A stream that went back gives a place away for the second time.
                self.fell_back += not answer.duplicate and answer.sequence <= self.newest[0]
                self.newest = (answer.sequence, data)
            return

    def _put(self, lane: Lane, kind: str, fields: Fields, cause: str = "") -> None:
        self._sequence = sequence = self._sequence + 1
        data = self._speaker.event(kind, fields, cause, sequence, self._unix_ns())
        length_bytes = len(data)
        if length_bytes > EVENT_LENGTH_MAX_BYTES - HEADERS_BYTES:  # the stream would refuse it each time (never seen)
            self.dropped += 1
            log.error("a %s event of %d bytes is too long for its stream: it is not recorded", kind, length_bytes)
            return
        while self._queued_bytes + length_bytes > OUTBOX_LENGTH_MAX_BYTES:
            if (freed_bytes := self._facts.collapse()) is None:
                self.dropped += 1
                if self.dropped == 1:
                    log.error("the outbox is full (%d bytes): facts are being lost", self._queued_bytes)
                return
            self._queued_bytes -= freed_bytes
        if not lane.queue:  # else it is awake, or sleeps until a decision is stored
            self._emptied.clear()
            lane.wake()
        lane.queue.append((data, sequence, kind))
        self._queued_bytes += length_bytes

    def _batch(self, events: list[bytes], sequence: int) -> bytes:
        return self._speaker.event(EventsBatch.KIND, {"events": events}, "", sequence, self._unix_ns())
