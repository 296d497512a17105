"""What the live page is fed with: the picture of the cluster, told a few times each second to whoever looks.

However much happens, a client hears of it four times a second at most: which rows are other than before. Each update
has a number and names the one before it, so a client that misses one knows, and takes the whole picture again.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable

from kvbus.errors import BusError
from kvbus.gateway.answers import Problem
from kvbus.gateway.feed import Client, Feed, Told
from kvbus.gateway.page_rows import ROWS_MAX, Tables, head_document
from kvbus.picture.following import Surroundings, begin
from kvbus.picture.whole import Picture
from kvbus.subscriber import Seen
from kvbus.topics import Topics
from kvbus.transport import Bus

TICK_S = 0.25
"""Between two updates: as fast as numbers can be read, and a hundredth of a core for a thousand transfers a second."""
ALIVE_S = 2.0
"""An update without news after this long: who hears none for three times as long calls its picture stale."""
QUEUE_MAX = 16
"""Updates that wait for one client: four seconds of them. One that is slower takes the whole picture again."""
CLIENTS_MAX = 64
PAUSE_S = 1.0

log = logging.getLogger(__name__)


class PageFeed:
    """Keeps the picture, and hands its changes on; also a follower of the feed of facts."""

    def __init__(
        self,
        *,
        bus: Bus,
        topics: Topics,
        feed: Feed,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.picture = Picture()
        self._bus = bus
        self._topics = topics
        self._feed = feed
        self._wall_ns = wall_ns
        self._clients: set[Client] = set()
        self._beside = Surroundings(bus, topics, self.picture, wanted=lambda: bool(self._clients))
        self._tables = Tables()
        self._head: dict[str, object] = {}
        self._sequence = 0
        self._events = -1
        self._losses = 0
        self._state = ""
        self._state_since_ns = wall_ns()
        self._told_ns = 0

    @property
    def clients(self) -> int:
        """How many clients look."""
        return len(self._clients)

    def hear(self, seen: Seen) -> Iterable[Told]:
        """Take an event of the facts; clients hear of it with the next update."""
        self.picture.hear(seen.event)
        return ()

    def join(self) -> Client:
        """Add a client until `leave`; it is told the whole picture first. Problem 503 where as many look already."""
        if len(self._clients) >= CLIENTS_MAX:
            raise Problem(503, f"{CLIENTS_MAX} clients look already", retry_after_s=10)
        client = Client(lambda _: True, QUEUE_MAX)
        client.tell(Told("snapshot", 0, json.dumps(self.snapshot()).encode()))
        self._clients.add(client)
        self._beside.look_soon()
        return client

    def leave(self, client: Client) -> None:
        """Take a client away; harmless to repeat."""
        client.close(at_once=True)
        self._clients.discard(client)

    def close(self) -> None:
        """End every client's stream."""
        for client in self._clients:
            client.close()

    def snapshot(self) -> dict[str, object]:
        """Return the whole picture, as of its number."""
        self._advance()
        return {"sequence": self._sequence, **self._head, "tables": self._tables.whole()}

    async def run(self) -> None:
        """Keep the picture and tell of its changes until cancelled."""
        tasks = [asyncio.ensure_future(work) for work in (self._begin(), self._beside.run(), self._tick())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------------- inside

    async def _begin(self) -> None:
        while True:
            try:
                await begin(self._bus, self._topics, self.picture)
            except BusError as error:
                log.info("the picture has no past yet: %s", error)
                await asyncio.sleep(PAUSE_S)
            else:
                return

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._look()
            if self._clients:
                self._advance()

    def _look(self) -> None:
        """See whether facts come, and since when not; also while nobody looks, for who comes later."""
        state = "away" if not self._bus.health().connected else "live" if self._feed.listening else "starting"
        if state != self._state:
            self._state, self._state_since_ns, self._events = state, self._wall_ns(), -1
        while self._losses < self._feed.losses:
            self._losses += 1
            self.picture.note_loss()

    def _advance(self) -> None:
        """Make and tell the next update, where there is anything to tell."""
        now_ns = self._wall_ns()
        if self._events == self.picture.events and now_ns - self._told_ns < ALIVE_S * 1e9:
            return
        if not self._state:
            self._look()
        self._events, self._told_ns = self.picture.events, now_ns
        shown = self.picture.show(ROWS_MAX)
        changed, gone = self._tables.change(shown)
        before, self._sequence = self._sequence, self._sequence + 1
        bus = {"state": self._state, "since_ms": round(self._state_since_ns / 1e6, 1)}
        self._head = {"now_ms": round(now_ns / 1e6, 1), "bus": bus, "head": head_document(shown)}
        if self._clients:
            update = {"sequence": self._sequence, "previous": before, **self._head, "set": changed, "gone": gone}
            told = Told("update", 0, json.dumps(update).encode())
            for client in self._clients:
                client.tell(told)
