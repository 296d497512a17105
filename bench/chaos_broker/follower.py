"""Who watches a row over the bus: every event that a follower was given, and what of it must not be there twice."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

from kvbus.bus import NatsBus
from kvbus.events import Event, LeaseGranted, OutcomeFixed, SettleDecided, TransferOutcome, TransferStep
from kvbus.subscriber import Lagged, Subscriber
from kvbus.topics import Topics
from kvbus.transport import Bus, Delivery, Handler, Subscription


@dataclass(slots=True)
class Follower:
    """Follows both logs from their beginning; `take_s` is the time that it takes for each live message, to be slow."""

    bus: NatsBus
    take_s: float = 0.0
    seen: dict[str, Event] = field(default_factory=dict)
    twice: Counter[str] = field(default_factory=Counter)
    outcomes: list[tuple[str, TransferOutcome]] = field(default_factory=list)
    """How transfers ended, with the events' ids."""
    ended: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
    """The hashes of requests that have ended, and of those that a destination has begun to serve."""
    settled: int = 0
    lagged: list[Lagged] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    _task: "asyncio.Task[None] | None" = None

    def start(self) -> None:
        """Begin to follow."""
        self._task = asyncio.create_task(self._follow(), name="follower")

    async def close(self) -> None:
        """Stop; what ended it before is raised."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()
        await self.bus.close()

    @property
    def alive(self) -> bool:
        """Whether it follows."""
        return self._task is not None and not self._task.done()

    async def _follow(self) -> None:
        subscriber = Subscriber(cast("Bus", _Slow(self)) if self.take_s else self.bus, Topics())
        async with aclosing(subscriber.facts()) as items:
            async for item in items:
                if isinstance(item, Lagged):
                    self.lagged.append(item)
                    continue
                if item.sequence:  # a snapshot that was asked for stands in no log
                    self._take(item.event)
                self.counters = subscriber.counters()

    def _take(self, event: Event) -> None:
        event_id, body = event.header.event_id, event.body
        if event_id in self.seen:
            self.twice[event_id] += 1
        elif isinstance(body, TransferStep):
            self.begun.add(body.request_hash)
        elif isinstance(body, TransferOutcome):
            self.outcomes.append((event_id, body))
            self.ended.add(body.request_hash)
            self.settled += body.outcome == "settled"
        self.seen[event_id] = event


class _Slow:
    """The follower's bus, whose handlers take their time for each message."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def __getattr__(self, name: str) -> object:
        return getattr(self._follower.bus, name)

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        async def slowly(delivery: Delivery) -> None:
            await asyncio.sleep(self._follower.take_s)
            await handler(delivery)

        return await self._follower.bus.subscribe(subject, slowly)


def applied_twice(events: Iterable[Event]) -> list[str]:
    """Return what took effect more than once: a request, a lease, an attempt's end, a decision; each in words.

    A coordinator decides again, in its own term, what a member has applied: the same, or it would be another decision.
    """
    settled: dict[str, set[str]] = {}
    leases: Counter[tuple[object, ...]] = Counter()
    decided: dict[tuple[str, str], list[SettleDecided]] = {}
    for event in events:
        header, body = event.header, event.body
        who = (header.i, header.m, header.e)
        if isinstance(body, TransferOutcome) and body.outcome == "settled":
            settled.setdefault(body.request_hash, set()).add(body.transfer)
        elif isinstance(body, LeaseGranted):
            leases["lease", *who, body.ticket] += 1
        elif isinstance(body, OutcomeFixed):
            leases["attempt", *who, body.ticket, body.attempt] += 1
        elif isinstance(body, SettleDecided):
            decided.setdefault((header.i, body.transfer), []).append(body)
    found = [f"request {name} settled as {sorted(ids)}" for name, ids in settled.items() if len(ids) > 1]
    found += [f"{' '.join(map(str, what))} stands {count} times" for what, count in leases.items() if count > 1]
    for name, all_ in decided.items():
        if len({one.term for one in all_}) < len(all_) or len({(one.lo, one.hi) for one in all_}) > 1:
            found.append(f"{name} was decided as {[(one.term, one.n, one.lo, one.hi) for one in all_]}")
    return found
