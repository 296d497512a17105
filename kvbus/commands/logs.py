"""The stored logs, read to their present end: facts and settle decisions of all instances, merged by time."""

import heapq
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

from kvbus.errors import PeerError
from kvbus.events import decode
from kvbus.subscriber import Seen, told
from kvbus.topics import Family, Topics
from kvbus.transport import Bus, Delivery

HOLD_BACK_S = 2.0
"""Members store one event at a time, within milliseconds; this covers the retries of a broker that was away briefly."""
HOLD_BACK_MAX = 10_000
"""Two seconds of a busy deployment; beyond it the order is that in which the broker stored."""
_PAGE = 1_000
_SEQUENCE_MAX = 1 << 62


class LogReader:
    """Reads what the broker holds now; `last` are the sequences that it has read to, `skipped` what it could not show.

    Every wait is the bus's own; BusError where the broker does not answer, or has no such log.
    """

    def __init__(self, bus: Bus, topics: Topics) -> None:
        self._bus = bus
        self._topics = topics
        self._filters = {Family.FACTS: topics.facts_filter(), Family.SETTLE: topics.settle_filter()}
        self.last: dict[Family, int] = dict.fromkeys(self._filters, 0)
        self.skipped: Counter[str] = Counter()

    async def since(self, time_ns: int) -> AsyncIterator[Seen]:
        """Yield the events of both logs from about a time on; what precedes it is not read."""

        def is_late(delivery: Delivery) -> bool:
            try:
                return decode(delivery.data).header.t >= time_ns
            except PeerError:
                return True  # read from here on, rather than miss what follows

        for family, subject_filter in self._filters.items():
            self.last[family] = await self._search(subject_filter, is_late)
        async for seen in self._by_time():
            yield seen

    async def newest(self, events_max: int) -> AsyncIterator[Seen]:
        """Yield the last events of both logs, at most so many of each."""
        for family, subject_filter in self._filters.items():
            end = await self._search(subject_filter, lambda _: False)
            self.last[family] = max(0, end - events_max)
        async for seen in self._by_time():
            yield seen

    # ------------------------------------------------------------------------------------------------------- inside

    async def _search(self, subject_filter: str, is_late: Callable[[Delivery], bool]) -> int:
        """Return the sequence after which the first late message stands, or the log's end; about 40 short reads."""

        async def late_after(sequence: int) -> bool:
            page = await self._bus.history(subject_filter, after_sequence=sequence, most=1)
            return not page or is_late(page[0])

        first = await self._bus.history(subject_filter, most=1)
        if not first or is_late(first[0]):
            return 0
        return await _smallest(late_after, first[0].sequence - 1)

    async def _by_time(self) -> AsyncIterator[Seen]:
        """Order by the events' own time what members stored side by side; each event is held back a little for that."""
        held: list[tuple[int, int, Seen]] = []
        newest_ns = number = 0
        async for seen in self._merged():
            number += 1
            newest_ns = max(newest_ns, seen.event.header.t)
            heapq.heappush(held, (seen.event.header.t, number, seen))
            while held[0][0] < newest_ns - HOLD_BACK_S * 1e9 or len(held) > HOLD_BACK_MAX:
                yield heapq.heappop(held)[2]
        while held:
            yield heapq.heappop(held)[2]

    async def _merged(self) -> AsyncIterator[Seen]:
        readers = [self._read(family) for family in self._filters]
        heads = [await anext(reader, None) for reader in readers]
        while waiting := [(head.event.header.t, place) for place, head in enumerate(heads) if head is not None]:
            _, place = min(waiting)
            head, heads[place] = heads[place], await anext(readers[place], None)
            if head is not None:
                yield head

    async def _read(self, family: Family) -> AsyncIterator[Seen]:
        while True:
            page = await self._bus.history(self._filters[family], after_sequence=self.last[family], most=_PAGE)
            for delivery in page:
                self.last[family] = delivery.sequence
                for event in told(delivery, self._topics, self.skipped):
                    yield Seen(family, delivery.sequence, event)
            if len(page) < _PAGE:
                return


async def _smallest(holds: Callable[[int], Awaitable[bool]], below: int) -> int:
    """Return the smallest number above `below` for which something holds that, once true, stays true."""
    step = 1
    while below + step < _SEQUENCE_MAX and not await holds(below + step):
        below, step = below + step, 2 * step
    above = below + step
    while above - below > 1:
        middle = (below + above) // 2
        if await holds(middle):
            above = middle
        else:
            below = middle
    return above
