"""Submitting: what may keep a request from its queue: a broker that is away, and a queue that is full already.

One stream holds the requests for all destinations. What waits for one of them is bounded here, by whoever asks, so that
a destination that is away fills its own share and not the stream (P24).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from kvbus.bus_access import DeniedError
from kvbus.errors import BusError
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

AWAY_S = 10.0
"""So long a request whose connection was lost is submitted again. A broker that starts anew is back within two seconds;
after this, a place that is held for the request is given back, and whoever wants may ask again."""
AGAIN_S = 0.2
"""Between two tries: as soon as the quickest reconnect."""

Call = Callable[[], Coroutine[object, object, None]]
"""Submits a request; it may be called again, since the request bears an id by which the broker knows a repeat."""


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


class Submissions:
    """Submits requests; one that a lost connection cuts is seen through without its caller, who has gone on."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._left: set[asyncio.Task[None]] = set()

    async def unless_away(self, call: Call, bus: Bus, on_end: Callable[[Exception | None], None]) -> bool:
        """Submit; False as soon as the connection is lost before that is confirmed, BusError where it is refused.

        After False nobody knows whether the request came through. It is submitted again when the connection is back,
        and `on_end` hears what kept it from the broker, or None where the broker then has it.
        """
        task = self._begin(call())
        while not task.done() and bus.health().connected:
            try:
                await asyncio.wait({task}, timeout=LOOK_S)
            except asyncio.CancelledError:
                task.cancel()
                raise
        if task.done() and (bus.health().connected or not isinstance(task.exception(), BusError)):
            task.result()
            return True
        left = self._begin(_see_through(task, call, bus, on_end))
        self._left.add(left)
        left.add_done_callback(self._left.discard)
        return False

    def close(self) -> None:
        """Stop what goes on without its caller; its end is not heard."""
        for task in self._left:
            task.cancel()

    def _begin(self, work: Coroutine[object, object, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._let_go)
        return task

    def _let_go(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen: whoever waits takes it from the result


async def _see_through(
    first: "asyncio.Task[None]", call: Call, bus: Bus, on_end: Callable[[Exception | None], None]
) -> None:
    """Await a call that was cut, and make it again where it failed; a broker that is back may not be ready yet."""
    loop = asyncio.get_running_loop()
    error = await _failure(first)
    ends_at = loop.time() + AWAY_S
    while error is not None and not isinstance(error, DeniedError) and loop.time() < ends_at:
        await asyncio.sleep(AGAIN_S)
        if bus.health().connected:
            error = await _failure(call())
    on_end(error)


async def _failure(submitting: Awaitable[object]) -> BusError | None:
    try:
        await submitting
    except BusError as error:
        return error
    return None
