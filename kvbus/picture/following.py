"""Keeps a picture current over a bus: facts with what the log still holds of them, heartbeats, the registry, pools.

Needs no more than an observer's or a requester's rights. A broker that is away is waited for; what was missed is
repaired by the subscriber, and where that cannot be, the members are asked for their state.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress

from kvbus.bus_access import DeniedError
from kvbus.errors import BusError, PeerError
from kvbus.events import Header, HeartbeatSeen, InstanceRecord, StatsAnswered, StatsAsked, decode, encode
from kvbus.picture.members import PoolSaid
from kvbus.picture.whole import Picture
from kvbus.restoring import ASKED_MAX, ASKER, snapshots
from kvbus.subscriber import Lagged, Subscriber, told
from kvbus.topics import Query, Topics, unescape
from kvbus.transport import BUCKET_INSTANCES, Bus, Delivery, Subscription

PAST_MAX = 2_000
"""Stored messages that a picture begins with, the last ones: recent outcomes, and what runs. Read within a second."""
REFRESH_S = 2.0
"""Between two looks at registry and pools: members refresh their records every three seconds."""
ANSWER_S = 2.0
"""A member answers for its counters within milliseconds; one that takes longer is asked again at the next look."""
TURN_EVENTS = 50
"""Heard in one turn, however many wait: others on the loop draw and answer in between."""
PAUSE_S = 1.0

Wall = Callable[[], int]
"""Unix time in nanoseconds."""

log = logging.getLogger(__name__)


class Surroundings:
    """What stands beside the facts: who is registered, who beats, what pools say. `run` until cancelled.

    `wanted` may say that nobody looks now; then nothing is asked.
    """

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        picture: Picture,
        *,
        wanted: Callable[[], bool] = lambda: True,
        wall_ns: Wall = time.time_ns,
    ) -> None:
        self._bus = bus
        self._topics = topics
        self._picture = picture
        self._wanted = wanted
        self._beats: Subscription | None = None
        self._denied = False
        self._blind = False
        self._places = asyncio.Semaphore(ASKED_MAX)
        self._soon = asyncio.Event()
        self._wall_ns = wall_ns
        self._numbers = itertools.count(1)
        self.heard: Counter[str] = Counter()

    async def run(self) -> None:
        """Keep the picture's members current."""
        try:
            while True:
                with suppress(BusError):
                    await self._hear_beats()
                    if self._wanted():
                        await self.look()
                with suppress(TimeoutError):
                    async with asyncio.timeout(REFRESH_S):
                        await self._soon.wait()
                self._soon.clear()
        finally:
            if self._beats is not None:
                with suppress(BusError):
                    await self._beats.close()

    def look_soon(self) -> None:
        """Look at once rather than at the next turn: somebody has begun to look."""
        self._soon.set()

    async def look(self) -> None:
        """Read the registry once, and ask each registered member for its counters; BusError where that fails."""
        records = [record async for record in records_of(self._bus)]
        self._picture.registered(records, self._wall_ns())
        names = sorted({(header.i, header.m) for header, _ in records if header.m})
        await asyncio.gather(*(self._ask(instance, member) for instance, member in names))

    async def _hear_beats(self) -> None:
        if self._beats is not None or self._denied:
            return
        try:
            self._beats = await self._bus.subscribe(self._topics.heartbeat(), self._on_beat)
        except DeniedError:  # a requester's right does not reach so far: rows lack what only heartbeats say
            self._denied = True

    async def _on_beat(self, delivery: Delivery) -> None:
        try:
            event, name = decode(delivery.data), self._topics.parse(delivery.subject).name
        except PeerError:
            self.heard["malformed"] += 1
            return
        if isinstance(event.body, HeartbeatSeen) and event.header.i == name:
            self._picture.beat(event.header, event.body)

    async def _ask(self, instance: str, member: str) -> None:
        asked = StatsAsked()
        data = encode(Header(k=asked.KIND, i=ASKER, s=next(self._numbers), t=0), asked)
        try:
            subject = self._topics.query(instance, Query.STATS, member)
            async with self._places:
                answer = None if self._blind else await self._bus.request(subject, data, wait_s=ANSWER_S)
            event = decode(answer) if isinstance(answer, bytes) else None
        except DeniedError:  # a credential that was made before there was this right: rows lack what only counters say
            self._blind = True
            return
        except (BusError, PeerError, ValueError):  # ValueError: a record under a name that no subject can hold
            return
        if event is None or not isinstance(event.body, StatsAnswered):
            return
        if (event.header.i, event.header.m) == (instance, member):
            self._picture.pool(pool_of(event.header, event.body), self._wall_ns())


class Following:
    """Keeps a picture current by itself, for a door that has no feed of facts: `run` until cancelled."""

    def __init__(self, bus: Bus, topics: Topics, picture: Picture, *, past_max: int = PAST_MAX) -> None:
        self._bus = bus
        self._topics = topics
        self._picture = picture
        self._past_max = past_max
        self._surroundings = Surroundings(bus, topics, picture)
        self.listening = False
        """Whether facts are heard live, after the past was read."""

    async def run(self) -> None:
        """Follow facts and surroundings."""
        beside = asyncio.ensure_future(self._surroundings.run())
        try:
            await self._facts()
        finally:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)

    async def _facts(self) -> None:
        since: int | None = None
        while True:
            try:
                since = await begin(self._bus, self._topics, self._picture, self._past_max) if since is None else since
                async with aclosing(Subscriber(self._bus, self._topics).facts(since=since, settle=False)) as items:
                    self.listening = True
                    async for item in items:
                        if not isinstance(item, Lagged):
                            since = max(since, item.sequence)
                            self._picture.hear(item.event)
                            if not self._picture.events % TURN_EVENTS:
                                await asyncio.sleep(0)
                        elif item.lost:
                            since = 0
                            self._picture.note_loss()
            except BusError as error:
                log.info("facts are not heard: %s", error)
            self.listening = False
            await asyncio.sleep(PAUSE_S)


async def begin(bus: Bus, topics: Topics, picture: Picture, past_max: int = PAST_MAX) -> int:
    """Give a picture what the log's last messages say, and what members hold; return where the log was read to."""
    picture.registered([record async for record in records_of(bus)])
    end = await bus.log_end(topics.facts_filter())
    after = max(0, end - past_max)
    counts: Counter[str] = Counter()
    for delivery in await bus.history(topics.facts_filter(), after_sequence=after, most=past_max):
        end = max(end, delivery.sequence)
        for event in told(delivery, topics, counts):
            picture.hear(event)
    async for event in snapshots(bus, topics, counts):
        picture.hear(event)
    return end


async def records_of(bus: Bus) -> AsyncIterator[tuple[Header, InstanceRecord]]:
    """Yield the header and record of each registered member; what cannot be read is left out."""
    for key in await bus.keys(BUCKET_INSTANCES):
        try:
            named = unescape(key)  # before it is asked for: whoever may write the bucket may write other keys
            entry = await bus.get(BUCKET_INSTANCES, key)
            event = decode(entry.value) if entry else None
        except PeerError:
            continue
        if event and isinstance(event.body, InstanceRecord) and named == f"{event.header.i}/{event.header.m}":
            yield event.header, event.body


def pool_of(header: Header, body: StatsAnswered) -> PoolSaid:
    """Return what a member's counters say of its pool."""
    names = ("pages", "pages_free", "pages_cached", "pages_lent", "pages_quarantined", "pages_spoiled")
    counts = {name: value for name in names if isinstance(value := body.counters.get(name), int)}
    return PoolSaid(header.i, header.m, **counts)
