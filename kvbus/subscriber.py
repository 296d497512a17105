"""Hear what instances report: history first, then live, with every loss on the way noticed and repaired.

Live events come over a core subscription, which may drop; the broker repeats stored messages there with their sequence.
A jump in the sequence, a full queue, a reconnect or a quiet spell makes the subscriber read the log again from what it
has seen. What the log no longer holds is reported as `Lagged`, never passed over; then the members are asked for their
state, which says what it came to.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvbus.errors import BusError, PeerError
from kvbus.events import EVENT_LENGTH_MAX_BYTES, Event, UnknownKind, decode_all
from kvbus.restoring import snapshots
from kvbus.topics import Family, Topics
from kvbus.transport import Bus, Delivery, Subscription

QUEUE_MAX = 4_096
"""About four seconds of a thousand events each; a reader that is slower than that reads the log instead."""
SWEEP_S = 5.0
"""A lost last event leaves no jump to see; after this long without news the log is looked at."""

_LOOK_S = 0.5  # how soon after a reconnect the log is read, where nothing live says so sooner
_QUIET_LOOKS = round(SWEEP_S / _LOOK_S)
_WENT_BACK = "the log went back in time: the broker lost some of what it held"
_PAGE = 1_000
_RECENT_MAX = 2 * QUEUE_MAX  # ids by sequence: more than the queue holds, so that every overlap is recognized
_HEADERS_ALLOWANCE_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class Seen:
    """One event as stored: `family` is facts, settle or blocks, `sequence` its message's place in that log.

    Events that left together share it: whoever means to read on from there has to have taken all of them. A snapshot
    that a member was asked for has none, so 0: of this run, it contains what has a lower sequence of the member's own.
    """

    family: Family
    sequence: int
    event: Event


@dataclass(frozen=True, slots=True)
class Lagged:
    """Something is missing or was read late: `lost` tells whether the log no longer holds it."""

    family: Family
    reason: str
    lost: bool


class Subscriber:
    """Follows the facts and settle logs of all instances over a bus."""

    def __init__(self, bus: Bus, topics: Topics | None = None) -> None:
        self._bus = bus
        self._topics = topics or Topics()
        self._counts: Counter[str] = Counter()

    def counters(self) -> dict[str, int]:
        """Return how many events were malformed, of an unknown kind, duplicate, or repaired from history."""
        return dict(self._counts)

    def facts(self, *, since: int = 0, settle: bool = True) -> AsyncGenerator[Seen | Lagged, None]:
        """Yield stored events after sequence `since` of the facts log, then live ones, each once; never ends.

        With `settle` the settle log comes too, merged by time in history and by arrival when live. Malformed events
        are counted and skipped. Leave it with `contextlib.aclosing`, which ends the subscriptions.
        """
        logs = [_Log(Family.FACTS, self._topics.facts_filter(), since)]
        live = [self._topics.live_facts()]
        if settle:
            logs.append(_Log(Family.SETTLE, self._topics.settle_filter(), 0))
            live.append(self._topics.live_settle())
        return self._followed(logs, live)

    def blocks(self, *, since: int = 0) -> AsyncGenerator[Seen | Lagged, None]:
        """Yield what bridges have said of engines' blocks, as `facts` does; each stream has a sequence in its header.

        What is lost here shows in that sequence too: what was known of that instance's blocks then counts no more.
        """
        return self._followed([_Log(Family.BLOCKS, self._topics.blocks_filter(), since)], [self._topics.live_blocks()])

    async def _followed(self, logs: Sequence["_Log"], live: Sequence[str]) -> AsyncGenerator[Seen | Lagged, None]:
        inbox = _Inbox()
        subscriptions: list[Subscription] = []
        try:
            for log, subject in zip(logs, live, strict=True):
                subscriptions.append(await self._bus.subscribe(subject, inbox.taker(log)))
            async for item in self._repaired(self._past(logs)):
                yield item
            async for item in self._follow(logs, inbox):
                yield item
        finally:
            for subscription in subscriptions:
                with suppress(BusError):
                    await subscription.close()

    async def _past(self, logs: Sequence["_Log"]) -> AsyncIterator[Seen | Lagged]:
        """Merge what the logs hold by the events' own time; within a log its own order stands, whatever clocks say."""
        readers = [aiter(self._read(log)) for log in logs]
        heads = [await anext(reader, None) for reader in readers]
        while True:
            waiting = [(_time_of(head), place) for place, head in enumerate(heads) if head is not None]
            if not waiting:
                return
            _, place = min(waiting)
            head = heads[place]
            heads[place] = await anext(readers[place], None)
            if head is not None:
                yield head

    async def _follow(self, logs: Sequence["_Log"], inbox: "_Inbox") -> AsyncIterator[Seen | Lagged]:
        outages, quiet = self._outages(), 0
        while True:
            arrival = await inbox.next(_LOOK_S)
            quiet = quiet + 1 if arrival is None else 0
            if inbox.take_overflow():
                for log in logs:
                    yield Lagged(log.family, "live events came faster than they were read", lost=False)
                arrival, quiet = None, _QUIET_LOOKS
            if quiet >= _QUIET_LOOKS or outages != self._outages():
                outages, quiet = self._outages(), 0
                for log in logs:
                    async for item in self._repaired(self._read(log)):
                        yield item
            if arrival is not None:
                log, delivery = arrival
                async for item in self._repaired(self._hear(log, delivery)):
                    yield item

    async def _repaired(self, items: AsyncIterator[Seen | Lagged]) -> AsyncIterator[Seen | Lagged]:
        """Pass on what was read; behind facts that are lost for good, what each member that lives holds now."""
        lost = False
        async for item in items:
            yield item
            lost |= isinstance(item, Lagged) and item.lost and item.family is Family.FACTS
        if lost:
            async for event in snapshots(self._bus, self._topics, self._counts):
                yield Seen(Family.FACTS, 0, event)

    async def _hear(self, log: "_Log", delivery: Delivery) -> AsyncIterator[Seen | Lagged]:
        """Take one live message; where it does not follow on what was seen, read the log instead."""
        if delivery.sequence == log.last + 1:
            for seen in self._take(log, delivery):
                yield seen
        elif log.recent.get(delivery.sequence) == hash(delivery.data):
            self._counts["duplicate"] += 1
        else:
            self._counts["repaired"] += 1
            if delivery.sequence <= log.last:
                log.last = 0
                yield Lagged(log.family, _WENT_BACK, lost=True)
            async for item in self._read(log):
                yield item

    async def _read(self, log: "_Log") -> AsyncIterator[Seen | Lagged]:
        """Read the log from what was seen to its end; the last one seen is read again, to know that it still stands."""
        while True:
            try:
                page = await self._bus.history(log.subject_filter, after_sequence=max(0, log.last - 1), most=_PAGE)
            except BusError:
                self._counts["history_failed"] += 1  # the next sweep or reconnect reads again
                return
            for delivery in page:
                if delivery.sequence == log.last:
                    known = log.recent.get(log.last)
                    if known is not None and known != hash(delivery.data):
                        log.last = 0
                        yield Lagged(log.family, _WENT_BACK, lost=True)
                        break
                    continue
                if delivery.sequence > log.last + 1 and log.last:
                    yield Lagged(log.family, f"the log no longer holds what followed {log.last}", lost=True)
                for seen in self._take(log, delivery):
                    yield seen
            else:
                if len(page) < _PAGE:
                    return

    def _take(self, log: "_Log", delivery: Delivery) -> Iterator[Seen]:
        known = hash(delivery.data) in log.ids
        log.note(delivery)
        if known:
            self._counts["duplicate"] += 1
            return
        for event in told(delivery, self._topics, self._counts):
            yield Seen(log.family, delivery.sequence, event)

    def _outages(self) -> tuple[int, ...]:
        counters = self._bus.health().counters
        return tuple(counters.get(name, 0) for name in ("reconnected", "rebuilt", "client_SlowConsumerError"))


def told(delivery: Delivery, topics: Topics, counts: Counter[str]) -> Iterator[Event]:
    """Yield the events of a stored message, in order; what cannot be read is counted by what is wrong with it."""
    try:
        instance = topics.parse(delivery.subject).name
    except PeerError:
        counts["malformed"] += 1
        return
    for event in decode_all(delivery.data, length_max_bytes=EVENT_LENGTH_MAX_BYTES + _HEADERS_ALLOWANCE_BYTES):
        if isinstance(event, PeerError):
            counts["malformed"] += 1
        elif event.header.i != instance:
            counts["wrong_subject"] += 1  # one instance speaks on the subject of another
        elif isinstance(event.body, UnknownKind):
            counts["unknown_kind"] += 1
        else:
            yield event


class _Log:
    """What was seen of one log: the last sequence, and which bytes stood at the recent ones."""

    def __init__(self, family: Family, subject_filter: str, last: int) -> None:
        self.family = family
        self.subject_filter = subject_filter
        self.last = last
        self.recent: OrderedDict[int, int] = OrderedDict()
        self.ids: Counter[int] = Counter()

    def note(self, delivery: Delivery) -> None:
        """Take note of a message: everything up to it was seen or reported lost."""
        self.last = delivery.sequence
        self._forget(delivery.sequence)
        self.recent[delivery.sequence] = hash(delivery.data)
        self.ids[hash(delivery.data)] += 1
        if len(self.recent) > _RECENT_MAX:
            self._forget(next(iter(self.recent)))

    def _forget(self, sequence: int) -> None:
        old = self.recent.pop(sequence, None)
        if old is not None:
            self.ids[old] -= 1
            if not self.ids[old]:
                del self.ids[old]


class _Inbox:
    """A bounded queue between the subscription's handler and the reader; what does not fit is read from history."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[_Log, Delivery]] = asyncio.Queue(QUEUE_MAX)
        self._overflowed = False

    def taker(self, log: _Log) -> "_Taker":
        """Return the handler for one log's live subject."""
        return _Taker(self, log)

    def put(self, log: _Log, delivery: Delivery) -> None:
        """Queue a message, or remember that one did not fit."""
        try:
            self._queue.put_nowait((log, delivery))
        except asyncio.QueueFull:
            self._overflowed = True

    def take_overflow(self) -> bool:
        """Whether messages were dropped since the last call; if so the rest is dropped too, as history has it all."""
        overflowed, self._overflowed = self._overflowed, False
        while overflowed and not self._queue.empty():
            self._queue.get_nowait()
        return overflowed

    async def next(self, wait_s: float) -> tuple[_Log, Delivery] | None:
        """Return the next message, or None after a quiet spell."""
        if not self._queue.empty():
            return self._queue.get_nowait()
        try:
            async with asyncio.timeout(wait_s):
                return await self._queue.get()
        except TimeoutError:
            return None


@dataclass(frozen=True, slots=True)
class _Taker:
    inbox: _Inbox
    log: _Log

    async def __call__(self, delivery: Delivery) -> None:
        self.inbox.put(self.log, delivery)


def _time_of(item: Seen | Lagged) -> int:
    return item.event.header.t if isinstance(item, Seen) else 0
