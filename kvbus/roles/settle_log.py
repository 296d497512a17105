"""The settle log of one instance, as one member reads it and, while it leads, appends to it.

What is appended names the message that it must follow (P13): the broker refuses it if anybody wrote in between. What is
read comes in the log's order; a live repeat that does not follow what was read last makes the member read the log.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

from kvbus.errors import BusError, PeerError
from kvbus.events import Header, decode, decode_all, encode
from kvbus.ledger.agreement import Decision
from kvbus.ledger.shares import TERM_MAX, Heard
from kvbus.roles.decisions import body_of, decision_of
from kvbus.topics import Topics
from kvbus.transport import Bus, Delivery, NotStored

RETRY_MIN_S, RETRY_MAX_S = 0.1, 2.0
READ_MOST = 1_000
"""Decisions read in one call; more are read by the next."""
LIVE_MAX = 1_024
"""Live repeats that wait for a turn; more are read from the log."""
REWIND_S = 1.0
"""The log is read from its beginning at most this often: the rhythm in which members are told of its head."""

log = logging.getLogger(__name__)


class SettleLog:
    """One member's place in its instance's log.

    `header` makes the header of this member's next event; `hear` applies one decision; `place` says up to which term
    and number that was; `join` begins behind the newest one.
    """

    def __init__(
        self,
        *,
        bus: Bus,
        topics: Topics,
        instance: str,
        header: Callable[[str], Header],
        hear: Callable[[Decision], Heard],
        place: Callable[[], tuple[int, int]],
        join: Callable[[Decision, tuple[str, int]], None],
    ) -> None:
        self._bus = bus
        self._subject = topics.settle(instance)
        self._header = header
        self._hear = hear
        self._place = place
        self._join = join
        self._began = False
        self._live: deque[Delivery] = deque(maxlen=LIVE_MAX)
        self._told = (0, 0)
        self._rewind_at = 0.0
        self._newest_id = ""
        self._connections = -1
        self.sequence = 0
        self.told_term = 0
        """The highest term of which anybody has spoken to this member."""
        self.behind = True
        self.malformed = 0

    # ------------------------------------------------------------------------------------------------------ following

    def repeated(self, delivery: Delivery) -> None:
        """Take a live repeat, for the next time that this member catches up."""
        self.behind |= len(self._live) == LIVE_MAX
        self._live.append(delivery)

    def told_of(self, term: int, n: int) -> bool:
        """Note that somebody spoke of this decision (P25); True where it was not applied here yet."""
        if term >= TERM_MAX:
            return self.behind
        self._told = max(self._told, (term, n))
        self.told_term = max(self.told_term, term)
        self.behind |= (term, n) > self._place()
        return self.behind

    async def catch_up(self, now: float) -> None:
        """Apply what the log says behind what was applied last: by live repeats where they follow, else by reading."""
        while self._live:
            delivery = self._live.popleft()
            decisions = self._decisions_in(delivery)
            if delivery.sequence > self.sequence and delivery.last_on_subject == self.sequence:
                self._stands_at(delivery)
                self._hear_all(decisions)
            elif delivery.sequence > self.sequence:
                self.behind = True
            else:
                for decision in decisions:
                    self.told_of(decision.term, decision.n)
        if not self.behind:
            return
        if not self._began:
            await self._begin()
            self._began = True
        self.behind = False
        gap = await self._read_on()
        if (gap or self._place() < self._told) and now >= self._rewind_at:
            # The log is another than it was, or goes on elsewhere: what it holds now counts, from its beginning.
            self._rewind_at = now + REWIND_S
            self.sequence, self._newest_id = 0, ""
            await self._read_on()
            self._told = self._place()  # what it does not hold, nobody can read

    async def _begin(self) -> None:
        """Stand behind the newest message: a log of days is not read for what was over before this run began."""
        newest = await self._bus.last(self._subject)
        decisions = self._decisions_in(newest) if newest is not None else []
        if newest is not None and decisions:
            writer = decode(newest.data).header
            self._join(decisions[-1], (writer.m, writer.e))
            self._stands_at(newest)

    async def _read_on(self) -> bool:
        """Read to the end and apply; True where some are missing before one of them."""
        gap = False
        while True:
            deliveries = await self._bus.history(self._subject, after_sequence=self.sequence, most=READ_MOST)
            for delivery in deliveries:
                self._stands_at(delivery)
                gap |= self._hear_all(self._decisions_in(delivery))
            if len(deliveries) < READ_MOST:
                return gap

    def _hear_all(self, decisions: Iterable[Decision]) -> bool:
        """Apply decisions in order; True where some are missing before one of them."""
        gap = False
        for decision in decisions:
            gap |= self._hear(decision) is Heard.GAP
        return gap

    # ------------------------------------------------------------------------------------------------------ appending

    async def append(self, decision: Decision) -> bool:
        """Append a decision behind what was read last; False where somebody else has written since.

        An attempt whose answer is lost is repeated under its own id until it is known whether it stands there. False
        says only that this member leads no more: what it tried may stand in the log, and is then read there.

        The fence is a number. A broker that came back without its store may have reached that number again with another
        message, so the message is looked at once after each reconnect.
        """
        body = body_of(decision)
        header = self._header(body.KIND)
        data, message_id = encode(header, body), header.event_id
        pause_s = RETRY_MIN_S
        while True:
            try:
                if not await self._is_the_same():
                    return self._lost()
                answer = await self._bus.store(self._subject, data, message_id=message_id, after=self.sequence)
                if not isinstance(answer, NotStored):
                    self.sequence, self._newest_id = answer.sequence, message_id
                    return True
                newest = await self._bus.last(self._subject)
            except BusError as error:
                log.info("a decision waits for the broker: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_MAX_S, 2 * pause_s)
                continue
            if newest is not None and self._id_of(newest) == message_id:  # our own, whose answer was lost
                self._stands_at(newest)
                return True
            if newest is None or newest.sequence <= self.sequence:  # the broker came back without what it had stored
                return self._lost()
            self.behind = True
            return False

    # --------------------------------------------------------------------------------------------------------- inside

    async def _is_the_same(self) -> bool:
        """Whether the log still ends where this member read last, or goes on from there; asked after a reconnect."""
        counters = self._bus.health().counters
        connections = counters.get("reconnected", 0) + counters.get("rebuilt", 0)
        if connections != self._connections:
            newest = await self._bus.last(self._subject)
            if newest is None:
                return not self.sequence
            if newest.sequence < self.sequence:
                return False
            if newest.sequence == self.sequence and self._id_of(newest) != self._newest_id:
                return False
            self._connections = connections
        return True

    def _lost(self) -> bool:
        """Read the log from its beginning next time: it is another than it was. Always False."""
        self.sequence, self._newest_id, self.behind = 0, "", True
        return False

    def _stands_at(self, delivery: Delivery) -> None:
        self.sequence, self._newest_id = delivery.sequence, self._id_of(delivery)

    def _decisions_in(self, delivery: Delivery) -> list[Decision]:
        """Return the decisions in a message; what is none, or cannot be read, is counted.

        A batch of several is from a time when the instance had one member.
        """
        found: list[Decision] = []
        for event in decode_all(delivery.data):
            decision = None if isinstance(event, PeerError) else decision_of(event)
            if decision is not None:
                found.append(decision)
                continue
            self.malformed += 1
            what = event if isinstance(event, PeerError) else event.header.k
            log.warning("message %d of the settle log holds what is no decision: %s", delivery.sequence, what)
        return found

    def _id_of(self, delivery: Delivery) -> str:
        try:
            return decode(delivery.data).header.event_id
        except PeerError:
            return ""
