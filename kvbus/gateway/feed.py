"""The facts of all instances, heard once and handed on: to the gateway's own records, and to clients that follow.

Each client has a queue of its own. One that reads too slowly loses what does not fit, is told so, and costs the others
nothing: handing on never waits.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from kvbus.errors import BusError
from kvbus.subscriber import Lagged, Seen, Subscriber
from kvbus.topics import Topics
from kvbus.transport import Bus

CLIENT_QUEUE_MAX = 1_024
"""Messages that wait for one client: a second of a thousand transfers; some 300 bytes each, shared by all clients."""
RECENT_MAX = 4_096
"""Messages kept for clients that come back and name the last one that they saw."""
CLIENTS_MAX = 256
"""Each holds a connection and a queue."""
PLACES = 4_096
"""Places of one stored message: it may be a batch, which holds at most a thousand events."""
TURN_EVENTS = 50
"""Heard in one turn, however many wait: some three milliseconds, in which no request is answered."""
PAUSE_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Told:
    """One message for clients: its name, its place (0: none), and its data as it is sent."""

    name: str
    place: int
    data: bytes
    destination: str = ""
    request_hash: str = ""


class Follower(Protocol):
    """Hears every event of the facts log, on the loop; returns what clients are told of it."""

    def hear(self, seen: Seen) -> Iterable[Told]:
        """Take one event."""


class Client:
    """One client's queue. `lost` counts what did not fit since it last looked."""

    def __init__(self, wanted: Callable[[Told], bool], queue_max: int) -> None:
        self._wanted = wanted
        self._queue: deque[Told] = deque()
        self._queue_max = queue_max
        self._arrived = asyncio.Event()
        self._lost = 0
        self.closed = False
        self.dropped = False
        """Whether it was sent away because it stopped reading."""

    def tell(self, told: Told) -> None:
        """Queue a message, if it is wanted and fits."""
        if self.closed or not self._wanted(told):
            return
        if len(self._queue) >= self._queue_max:
            self._lost += 1
        else:
            self._queue.append(told)
        self._arrived.set()

    def close(self, *, at_once: bool = False) -> None:
        """End the client's stream: once it has read what waits, or at once."""
        self.closed = True
        if at_once:
            self._queue.clear()
        self._arrived.set()

    async def next(self, wait_s: float) -> Told | int | None:
        """Return the next message; how many were lost, once what waited is read; None after a quiet spell."""
        if not self._queue and not self._lost and not self.closed:
            self._arrived.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._arrived.wait()
            except TimeoutError:
                return None
        if self._queue:
            return self._queue.popleft()
        lost, self._lost = self._lost, 0
        return lost or None


class Feed:
    """Follows the facts log from its end on, and hands each message to all clients."""

    def __init__(self, bus: Bus, topics: Topics) -> None:
        self._bus = bus
        self._topics = topics
        self._subscriber = Subscriber(bus, topics)
        self._followers: list[Follower] = []
        self._clients: set[Client] = set()
        self._recent: deque[Told] = deque(maxlen=RECENT_MAX)
        self._gone_place = 0
        """Up to here nothing is kept: it came before this gateway, or too much came since."""
        self._newest_place = 0
        self._place_shift = 0
        """What the log's own places are raised by, so that places only grow, also where the log went back."""
        self._sequence = 0
        self._within = 0
        self._heard = 0
        self.listening = False
        self.losses = 0
        """How often the log no longer held what followed."""

    def follow(self, follower: Follower) -> None:
        """Let a part of the gateway hear every event."""
        self._followers.append(follower)

    def counters(self) -> dict[str, int]:
        """Return how many facts were malformed, came twice, or were repaired from the log."""
        return self._subscriber.counters()

    @property
    def clients(self) -> int:
        """How many clients follow."""
        return len(self._clients)

    def join(
        self, wanted: Callable[[Told], bool], *, after: int | None = None, queue_max: int = CLIENT_QUEUE_MAX
    ) -> Client:
        """Add a client until `leave`; with `after`, what came since that place is told first."""
        client = Client(wanted, queue_max)
        if after is not None:
            self._repeat(client, after)
        self._clients.add(client)
        return client

    def leave(self, client: Client) -> None:
        """Take a client away; harmless to repeat."""
        client.close(at_once=True)
        self._clients.discard(client)

    def tell(self, told: Told) -> None:
        """Hand a message to all clients that want it."""
        if told.place:
            if len(self._recent) == RECENT_MAX:
                self._gone_place = self._recent[0].place
            self._recent.append(told)
            self._newest_place = max(self._newest_place, told.place)
        for client in self._clients:
            client.tell(told)

    def close(self) -> None:
        """End every client's stream."""
        for client in self._clients:
            client.close()

    async def run(self) -> None:
        """Hear the log until cancelled; a broker that is away is waited for."""
        while True:
            try:
                if not self._newest_place:  # what came before is history; once begun, nothing is passed over
                    self._begin_behind(await self._bus.log_end(self._topics.facts_filter()))
                async with aclosing(self._subscriber.facts(since=self._sequence, settle=False)) as events:
                    self.listening = True
                    async for item in events:
                        self._hear(item)
                        if not self._heard % TURN_EVENTS:
                            await asyncio.sleep(0)
            except BusError as error:
                log.info("facts are not heard: %s", error)
            finally:
                self.listening = False
            await asyncio.sleep(PAUSE_S)

    def _begin_behind(self, sequence: int) -> None:
        """Begin behind a message of the log."""
        self._sequence = sequence
        self._gone_place, self._newest_place = sequence * PLACES, sequence * PLACES + PLACES - 1

    def _hear(self, item: Seen | Lagged) -> None:
        if isinstance(item, Lagged):
            if item.lost:
                self.losses += 1
                self._lose(item.reason)
            return
        self._heard += 1
        place = self._next_place(item.sequence) if item.sequence else 0
        for follower in self._followers:
            for told in follower.hear(item):
                self.tell(replace(told, place=place) if told.place else told)

    def _lose(self, reason: str) -> None:
        """Tell of a loss in its place among the events, so that who is away now hears of it when it comes back."""
        self._newest_place += 1
        self.tell(replace(lagged(reason), place=self._newest_place))

    def _next_place(self, sequence: int) -> int:
        """Return the place of the next event of a stored message."""
        self._within = self._within + 1 if sequence == self._sequence else 0
        self._sequence = sequence
        place = sequence * PLACES + self._within
        self._place_shift = max(self._place_shift, self._newest_place + 1 - place)
        self._newest_place = place + self._place_shift
        return self._newest_place

    def _repeat(self, client: Client, after: int) -> None:
        if after > self._newest_place:
            client.tell(lagged(f"nothing stands at {after} here, as where the log was lost: ask the log"))
        elif after < self._gone_place:
            client.tell(lagged(f"what followed {after} is no longer kept here: ask the log"))
        for told in self._recent:
            if told.place > after:
                client.tell(told)


def lagged(reason: str) -> Told:
    """Return the message that something is missing."""
    return Told("lagged", 0, json.dumps({"reason": reason}).encode())


async def frames(client: Client, *, quiet_s: float) -> AsyncIterator[bytes]:
    """Yield server-sent events for a client until it is closed; a comment in each quiet spell shows that it lives."""
    yield b": kvbus\n\n"
    while True:
        item = await client.next(quiet_s)
        if item is None:
            if client.closed:
                return
            yield b": quiet\n\n"
        elif isinstance(item, int):
            yield frame(lagged(f"{item} messages were dropped: this client reads too slowly"))
        else:
            yield frame(item)


def frame(told: Told) -> bytes:
    """Return one server-sent event; its data has no line break."""
    place = f"id: {told.place}\n" if told.place else ""
    return f"{place}event: {told.name}\ndata: ".encode() + told.data + b"\n\n"
