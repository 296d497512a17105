"""The past: how requests ended that former runs of this instance's members took, as the facts stream tells.

A member that dies between a transfer's end and the word that takes its request off the queue leaves a request that is
offered again. Its outcome stands in the facts under the request's own id, and so it is told again, not run (P22).

A broker may come back without its store, or with an older one. So the message that was read last is looked at again
each time: where it is not there any more, the log is read anew.
"""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvbus.errors import PeerError
from kvbus.events import TransferOutcome, TransferStep, decode, decode_all
from kvbus.roles.admitting import HANDED_BACK, LEFT
from kvbus.topics import Topics
from kvbus.transport import Bus, Delivery

QUEUED_MAX_S = 600.0
"""So long a request stays in the queue at most, whoever takes it; what ended before that is offered by nobody."""
SKEW_S = 60.0
"""Between the clocks of an instance's hosts, and for a clock that was set."""
OUTCOMES_MAX = 4_096
"""Kept here, the newest; as many as a member keeps of its own."""
PAGE = 1_000

log = logging.getLogger(__name__)


class Past:
    """Reads the instance's facts when a request is offered again that this run does not know; `wall_s` is unix time."""

    def __init__(self, bus: Bus, topics: Topics, instance: str, wall_s: Callable[[], float]) -> None:
        self._bus = bus
        self._subject = topics.facts(instance)
        self._wall_s = wall_s
        self._place: _Place | None = None
        self._outcomes: OrderedDict[str, TransferOutcome] = OrderedDict()
        self._handed_back: OrderedDict[str, int] = OrderedDict()
        self._left: dict[str, OrderedDict[str, int]] = {step: OrderedDict() for step in (HANDED_BACK, LEFT)}
        self._reading = asyncio.Lock()

    async def outcome(self, request_id: str) -> TransferOutcome | None:
        """Return how a request ended, None where no run has recorded its end; BusError where nobody can tell now."""
        await self._catch_up()
        return self._outcomes.get(request_id)

    def handed_back(self, request_id: str) -> int:
        """Return how often a run has handed a request back before it stopped, as far as `outcome` has read."""
        return self._handed_back.get(request_id, 0)

    def spared(self, request_id: str, request_hash: str) -> tuple[int, int]:
        """Return how often a request was handed back, and one of its hash left unread by a run that rests.

        As far as `outcome` has read.
        """
        return self.handed_back(request_id), self._left[LEFT].get(request_hash, 0)

    async def left_before(self, request_hash: str) -> int:
        """Return how many offers of requests of this hash were handed back or left; BusError: nobody can tell now."""
        await self._catch_up()
        return sum(counts.get(request_hash, 0) for counts in self._left.values())

    async def _catch_up(self) -> None:
        async with self._reading:
            place = self._place
            if place is not None and not await self._is_there(place):
                log.warning("%s has lost what was read last, or is another log: it is read anew", self._subject)
                place = None
            if place is None:
                self._uncount()
                place = self._place = await self._begin(self._wall_s() - QUEUED_MAX_S - SKEW_S)
            await self._read_on(place)

    async def _is_there(self, place: "_Place") -> bool:
        """Whether the message that was read last is where it was; True also where none has been read."""
        if not place.sequence:
            return True
        found = await self._one_after(place.sequence - 1)
        return found is not None and _Place.of(found) == place

    def _uncount(self) -> None:
        """Count from nothing; how a request ended stays true, whatever the log holds now."""
        self._handed_back.clear()
        for counts in self._left.values():
            counts.clear()

    async def _read_on(self, place: "_Place") -> None:
        while True:
            deliveries = await self._bus.history(self._subject, after_sequence=place.sequence, most=PAGE)
            for delivery in deliveries:
                self._note(delivery)
                self._place = place = _Place.of(delivery)
            if len(deliveries) < PAGE:
                return

    def _note(self, delivery: Delivery) -> None:
        for event in decode_all(delivery.data):
            if isinstance(event, PeerError):
                log.warning("message %d of the facts is unreadable: %s", delivery.sequence, event)
            elif isinstance(event.body, TransferOutcome) and event.header.c:
                self._outcomes[event.header.c] = event.body
                if len(self._outcomes) > OUTCOMES_MAX:
                    self._outcomes.popitem(last=False)
            elif isinstance(event.body, TransferStep) and event.body.step in self._left:
                _count(self._left[event.body.step], event.body.request_hash)
                if event.body.step == HANDED_BACK:
                    _count(self._handed_back, event.header.c)

    async def _begin(self, since_s: float) -> "_Place":
        """Return a place behind which everything of that time on stands: sought by halves, for facts are many."""
        first = await self._one_after(0)
        if first is None or _told_at(first) >= since_s:
            return _Place(0, b"")
        low, step = first, 1
        while (found := await self._one_after(low.sequence + step)) is not None and _told_at(found) < since_s:
            low, step = found, 2 * step
        high = low.sequence + step
        while high - low.sequence > PAGE:
            middle = (low.sequence + high) // 2
            found = await self._one_after(middle)
            if found is not None and _told_at(found) < since_s:
                low = found
            else:
                high = middle
        return _Place.of(low)

    async def _one_after(self, sequence: int) -> Delivery | None:
        found = await self._bus.history(self._subject, after_sequence=sequence, most=1)
        return found[0] if found else None


@dataclass(frozen=True, slots=True)
class _Place:
    """How far a log was read: behind which message, and which one that was, whether it can be read or not."""

    sequence: int
    content: bytes

    @classmethod
    def of(cls, delivery: Delivery) -> "_Place":
        return cls(delivery.sequence, hashlib.blake2b(delivery.data, digest_size=16).digest())


def _count(counts: OrderedDict[str, int], key: str) -> None:
    counts[key] = counts.pop(key, 0) + 1
    if len(counts) > OUTCOMES_MAX:
        counts.popitem(last=False)


def _told_at(delivery: Delivery) -> float:
    try:
        return decode(delivery.data).header.t / 1e9
    except PeerError:
        return 0.0
