"""Submitting: what may keep a request from its queue: a broker that is away, and a queue that is full already.

One stream holds the requests for all destinations. What waits for one of them is bounded here, by whoever asks, so that
a destination that is away fills its own share and not the stream (P24).
"""

import asyncio
from collections.abc import Coroutine

from kvbus.bus_access import DeniedError
from kvbus.topics import Topics
from kvbus.transport import Bus

QUEUED_MAX = 1_000
"""Requests that wait for one destination: a tenth of what the stream holds, and what a quick one takes in a second."""
DESTINATIONS_MAX = 4_096
"""Destinations of which the number is known; several times the instances of a large cluster."""
ROOM_S = 1.0
"""So long a number is believed: then others may have asked as well."""
LOOK_S = 0.02
"""A lost connection is noticed within this; a refusal is due within 0.1 s."""

_LEFT: "set[asyncio.Task[None]]" = set()
"""Calls that are not waited for any more; each ends by its own time limits."""


class Rooms:
    """How many requests wait for each destination, as the broker said last and this requester has added since."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._known: dict[str, tuple[float, int]] = {}
        self._blind = False

    async def refusal(self, bus: Bus, destination: str) -> str:
        """Return why no further request should wait for a destination, "" where one may, which is then counted."""
        if self._blind:
            return ""
        now = asyncio.get_running_loop().time()
        looked_at, waiting = self._known.get(destination, (-ROOM_S, 0))
        if now - looked_at >= ROOM_S:
            try:
                waiting, looked_at = await bus.queued(self._topics.transfer_filter(destination)), now
            except DeniedError:  # a credential that was made before there was a right to ask
                self._blind = True
                return ""
        if destination not in self._known and len(self._known) >= DESTINATIONS_MAX:
            self._known.clear()
        full = waiting >= QUEUED_MAX
        self._known[destination] = looked_at, waiting + (not full)
        if not full:
            return ""
        return f"{waiting} requests wait for {destination}, at most {QUEUED_MAX}: is it away? Try again later"


async def unless_away(call: Coroutine[object, object, None], bus: Bus) -> bool:
    """Await a call; False as soon as the connection is lost before it returns. It then ends by itself, unheard."""
    task = asyncio.get_running_loop().create_task(call)
    _LEFT.add(task)
    task.add_done_callback(_let_go)
    while not task.done():
        try:
            await asyncio.wait({task}, timeout=LOOK_S)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done() and not bus.health().connected:
            return False
    task.result()
    return True


def _let_go(task: "asyncio.Task[None]") -> None:
    _LEFT.discard(task)
    if not task.cancelled():
        task.exception()  # marks it as seen: whoever waits takes it from the result
