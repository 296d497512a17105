"""Stories for HTTP: one transfer's trail read from the logs, and told by the code of `kvbus story`.

The logs of a busy hour hold millions of events. The picture knows when the transfer ran, so what lies around that time
is read, and no more than a bound; decoding and telling happen off the loop, which serves others meanwhile.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvbus.bus_access import DeniedError
from kvbus.commands.stories import Story, tell
from kvbus.commands.trails import NotFound
from kvbus.errors import BusError, PeerError
from kvbus.events import Event, decode
from kvbus.gateway.answers import Problem
from kvbus.subscriber import told
from kvbus.topics import Topics
from kvbus.transport import Bus, Delivery

EVENTS_MAX = 60_000
"""Read for one story: four seconds of a thousand transfers each; about a second to decode."""
NEWEST_MAX = 4_000
"""Messages read where nobody knows when the transfer ran: the last ones of each log."""
BEFORE_S = 2.0
"""Clocks of two members may differ by this much; and a request's own event stands before its transfer's."""
AFTER_S = 3.0
"""Leases are returned within milliseconds of an outcome; where a story lacks something, more is read."""
NO_DECISIONS = "this gateway may not read the settle log, so decisions are missing here: see kvbus story"
AT_ONCE = 2
"""Stories told at a time: each holds its events, and takes a core while it decodes."""
WAITING_MAX = 16
"""Askers that wait for one of these places: some ten seconds; more are sent away."""
PAGE_EVENTS = 500
_SEQUENCE_MAX = 1 << 62
_NEVER_NS = 1 << 63
"""Later than any time that an event can carry."""


@dataclass(slots=True)
class _Trail:
    """The events of one log around a time, read page by page."""

    bus: Bus
    topics: Topics
    subject_filter: str
    place: int = 0
    ended: bool = False
    newest_ns: int = 0
    events: list[Event] = field(default_factory=list)

    async def seek(self, time_ns: int, *, back: int = 0) -> None:
        """Stand before the first message that is not older than a time, or so many before it; forty short reads."""

        async def late_after(sequence: int) -> bool:
            page = await self.bus.history(self.subject_filter, after_sequence=sequence, most=1)
            return not page or _time_of(page[0]) >= time_ns

        first = await self.bus.history(self.subject_filter, most=1)
        below = first[0].sequence - 1 if first else 0
        if await late_after(below):
            self.place = max(0, below - back)
            return
        step = 1
        while below + step < _SEQUENCE_MAX and not await late_after(below + step):
            below, step = below + step, 2 * step
        above = below + step
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (below, middle) if await late_after(middle) else (middle, above)
        self.place = max(0, above - back)

    async def read_until(self, time_ns: int, events_max: int) -> None:
        """Read on to a time, to the log's present end, or to a bound, whichever comes first."""
        while not self.ended and self.newest_ns < time_ns and len(self.events) < events_max:
            page = await self.bus.history(self.subject_filter, after_sequence=self.place, most=PAGE_EVENTS)
            self.events += await asyncio.to_thread(_events, page, self.topics)
            if self.events:
                self.newest_ns = self.events[-1].header.t
            if page:
                self.place = page[-1].sequence
            self.ended = len(page) < PAGE_EVENTS


class Stories:
    """Tells stories, a few at a time; `span` says when a transfer began and ended, where that is known."""

    def __init__(self, *, bus: Bus, topics: Topics, span: Callable[[str], tuple[int, int] | None]) -> None:
        self._bus = bus
        self._topics = topics
        self._span = span
        self._places = asyncio.Semaphore(AT_ONCE)
        self._asked = 0

    async def tell(self, wanted: str) -> tuple[Story | NotFound, bool]:
        """Return a story, and whether it may go on where the reading stopped; Problem 503 where no log can be read."""
        if self._asked >= AT_ONCE + WAITING_MAX:
            raise Problem(503, f"{WAITING_MAX} stories wait to be told already", retry_after_s=1)
        self._asked += 1
        try:
            async with self._places:
                return await self._tell(wanted)
        except BusError as error:
            raise Problem(503, f"the logs cannot be read: {error}", retry_after_s=1) from error
        finally:
            self._asked -= 1

    async def _tell(self, wanted: str) -> tuple[Story | NotFound, bool]:
        facts = _Trail(self._bus, self._topics, self._topics.facts_filter())
        settle = _Trail(self._bus, self._topics, self._topics.settle_filter())
        span = self._span(wanted)
        began_ns, ended_ns = span or (_NEVER_NS, 0)
        await facts.seek(began_ns - round(BEFORE_S * 1e9), back=0 if span else NEWEST_MAX)
        has_decisions = await self._seeks(settle, began_ns, back=0 if span else NEWEST_MAX)
        until_ns = ended_ns + round(AFTER_S * 1e9) if ended_ns else _NEVER_NS
        while True:
            await facts.read_until(until_ns, EVENTS_MAX)
            if has_decisions:
                await settle.read_until(until_ns, EVENTS_MAX)
            story = await asyncio.to_thread(tell, [*facts.events, *settle.events], wanted)
            if not has_decisions and isinstance(story, Story):
                story = replace(story, note="; ".join(filter(None, (story.note, NO_DECISIONS))))
            cut = len(facts.events) >= EVENTS_MAX
            complete = isinstance(story, Story) and story.complete
            if cut or facts.ended or complete or until_ns == _NEVER_NS:
                return story, cut
            until_ns = _NEVER_NS

    async def _seeks(self, settle: _Trail, began_ns: int, *, back: int) -> bool:
        """Whether decisions can be read: a requester's credential does not reach them, and the facts tell most."""
        try:
            await settle.seek(began_ns - round(BEFORE_S * 1e9), back=back)
        except DeniedError:
            return False
        return True


def _events(page: Sequence[Delivery], topics: Topics) -> list[Event]:
    counts: Counter[str] = Counter()
    return [event for delivery in page for event in told(delivery, topics, counts)]


def _time_of(delivery: Delivery) -> int:
    try:
        return decode(delivery.data).header.t
    except PeerError:
        return _SEQUENCE_MAX  # read from here on, rather than miss what follows
