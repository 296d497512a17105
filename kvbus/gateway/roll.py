"""The roll call behind `/metrics`: every member that is registered is asked for its counters, each time that somebody
scrapes. Between scrapes nobody is asked; from the first one on heartbeats are heard.

A member that was here and does not answer stays on the roll for an hour, so that an alert on its silence has a time to
grow; after that only whoever runs the place knows whether it was meant to come back. One that said that it drains or
leaves was meant to go: it goes with its record.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvbus.bus_access import DeniedError
from kvbus.errors import BusError, PeerError
from kvbus.events import Header, HeartbeatSeen, InstanceRecord, StatsAnswered, StatsAsked, decode, encode
from kvbus.gateway.directory import Directory
from kvbus.names import epoch_counter
from kvbus.topics import Query, Topics
from kvbus.transport import Bus, Delivery, NoAnswer, Subscription

ANSWER_S = 2.0
"""A member answers between two rounds; a scrape is given ten seconds by Prometheus."""
FRESH_S = 1.0
"""Scrapes within this time share one roll call, however many servers of Prometheus come."""
ASKED_MAX = 64
"""Members that are asked at the same time."""
MEMBERS_MAX = 512
"""Members on the roll; each is some 200 lines of an answer. A new one takes the place of whoever is gone longest."""
KEEP_S = 3_600.0
"""For how long a member stays that is gone without a word: it may have been stopped on purpose, which nobody sees."""

log = logging.getLogger(__name__)
Who = tuple[str, str]


@dataclass(slots=True)
class Member:
    """One member as the roll has it. `counted` is what it answered to the last call; None where it did not."""

    instance: str
    name: str
    came_at: float
    seen_at: float
    """When it was last registered, or heard."""
    record: InstanceRecord | None = None
    epoch: int = 0
    beat_at: float | None = None
    state: str = ""
    """What it said last of its way out; empty while it takes part."""
    counted: Mapping[str, int | float | str] | None = None

    @property
    def starts(self) -> int:
        """How often it was started, as its epoch says."""
        return epoch_counter(self.epoch)

    def silent_s(self, now: float) -> float:
        """Return for how long no heartbeat came; where none ever did, for how long it has been on the roll."""
        return now - (self.came_at if self.beat_at is None else self.beat_at)


@dataclass(slots=True)
class Roll:
    """Who there is, and what each has counted. `call` asks them all, or gives what was just said."""

    bus: Bus
    topics: Topics
    directory: Directory
    asker: str
    only: frozenset[str] = frozenset()
    """The instances whose members are called; none: all that are registered."""
    clock: Callable[[], float] = time.monotonic
    members: dict[Who, Member] = field(default_factory=dict)
    _called_at: float = float("-inf")
    _calling: asyncio.Lock = field(default_factory=asyncio.Lock)
    _asking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ASKED_MAX))
    _beats: Subscription | None = None
    _denied: bool = False
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    async def call(self) -> list[Member]:
        """Return all members, each with what it has counted."""
        async with self._calling:
            if self.clock() - self._called_at >= FRESH_S:
                await self._hear_beats()
                self._enrol()
                await asyncio.gather(*map(self._ask, self.members.values()))
                self._called_at = self.clock()
        return list(self.members.values())

    @property
    def hears(self) -> bool:
        """Whether heartbeats are heard."""
        return self._beats is not None

    def _enrol(self) -> None:
        """Take in who is registered, and let go who has not been here for long."""
        now, known = self.clock(), self.members
        here = {
            (instance, name): one
            for instance, members in self.directory.instances.items()
            if not self.only or instance in self.only
            for name, one in members.items()
        }
        for who in here.keys() & known.keys():
            known[who].seen_at = now
        for who in [who for who, one in known.items() if now - one.seen_at > KEEP_S]:
            del known[who]
        if self.directory.fresh:  # an old look at the registry does not say that a record is gone
            for who in [who for who, one in known.items() if one.state and who not in here]:
                del known[who]
        for who, one in here.items():
            if who in known or self._make_room(now):
                member = known.setdefault(who, Member(*who, now, now))
                if one.record.state or one.epoch != member.epoch:  # a heartbeat says sooner that it stays after all
                    member.state = one.record.state or ""
                member.record, member.epoch = one.record, one.epoch

    def _make_room(self, now: float) -> bool:
        """Let go whoever is gone longest, where the roll is full; False where all of them are here."""
        if len(self.members) < MEMBERS_MAX:
            return True
        who, oldest = min(self.members.items(), key=lambda item: item[1].seen_at)
        if oldest.seen_at == now:
            log.warning("more than %d members are registered: the others are left out of the metrics", MEMBERS_MAX)
            return False
        del self.members[who]
        return True

    async def _ask(self, member: Member) -> None:
        asked = StatsAsked()
        data = encode(Header(k=asked.KIND, i=self.asker, s=next(self._numbers), t=time.time_ns()), asked)
        subject = self.topics.query(member.instance, Query.STATS, member.name)
        member.counted = None
        try:
            async with self._asking:
                answer = await self.bus.request(subject, data, wait_s=ANSWER_S)
            event = None if isinstance(answer, NoAnswer) else decode(answer)
        except (BusError, PeerError) as error:
            log.info("%s/%s was not asked for its counters: %s", member.instance, member.name, error)
            return
        if (
            event is not None
            and (event.header.i, event.header.m) == (member.instance, member.name)
            and isinstance(event.body, StatsAnswered)
        ):
            member.counted, member.seen_at = event.body.counters, self.clock()

    async def _hear_beats(self) -> None:
        if self._beats is not None or self._denied:
            return
        try:
            self._beats = await self.bus.subscribe(self.topics.heartbeat(), self._on_beat)
        except DeniedError as error:
            self._denied = True
            log.warning("heartbeats are not heard here, so their age is not told: %s", error)
        except BusError as error:
            log.info("heartbeats are not heard yet: %s", error)

    async def _on_beat(self, delivery: Delivery) -> None:
        try:
            event, name = decode(delivery.data), self.topics.parse(delivery.subject).name
        except PeerError:
            return
        member = self.members.get((event.header.i, event.header.m))
        if member is not None and event.header.i == name and isinstance(event.body, HeartbeatSeen):
            member.beat_at = member.seen_at = self.clock()
            if event.header.e == member.epoch:
                member.state = event.body.state or ""
