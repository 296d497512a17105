"""Facts: from the recorder of a member, over the broker, to a live subscriber; beside raw stores of the same bytes."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import nats
from controls.asking import DESTINATION
from controls.town import TOPICS, Town
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvbus.bus import NatsBus
from kvbus.columns import column, from_column
from kvbus.events import FactsSeen, Header, StatsAsked, decode, encode
from kvbus.ledger.facts import LeaseFacts
from kvbus.roles.recorder import Recorder
from kvbus.subscriber import Seen, Subscriber
from kvbus.testing.bus import MemoryBroker

LINES = 1_000
EVENTS = 200
"""Events of one round of the throughput."""
SINGLES = 50
"""Events of one round of the latency."""
WAIT_S = 30.0
ROUNDS_CPU = 300


def batch(lines: int) -> LeaseFacts:
    """Return one round's facts about so many leases."""
    return LeaseFacts(lines=[(ticket, 0, 5, 0, 1) for ticket in range(1, lines + 1)])


@dataclass(slots=True)
class FactsBench:
    """A recorder on one connection and a live subscriber on another; raw clients likewise."""

    recorder: Recorder
    other: NatsBus
    subscriber: Subscriber
    writer: Client
    reader: Client
    seen: asyncio.Queue[int]
    raw_seen: asyncio.Queue[int]

    @classmethod
    async def make(cls, town: Town, bus: NatsBus, other: NatsBus) -> "FactsBench":
        """Make both ends; `bus` records, `other` hears."""
        recorder = Recorder(
            bus=bus, topics=TOPICS, instance="facts", member="m0", epoch=1 << 32 | 1, unix_ns=time.time_ns
        )
        writer, reader = await nats.connect(town.url), await nats.connect(town.url)
        bench = cls(recorder, other, Subscriber(other, TOPICS), writer, reader, asyncio.Queue(), asyncio.Queue())

        async def on_raw(message: Msg) -> None:
            bench.raw_seen.put_nowait(len(message.data))

        await reader.subscribe("raw.live.facts.c", cb=on_raw)
        await reader.flush()
        return bench

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow live events for the length of a `with` block; whatever came before is left out."""
        newest = await self.other.last(TOPICS.facts(DESTINATION))
        task = asyncio.ensure_future(self._follow(newest.sequence if newest else 0))
        try:
            self.recorder.event(StatsAsked())
            await _take(self.seen, 1)
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self, since: int) -> None:
        """Count the lines that come, as any reader of the columns does; for ever."""
        async with contextlib.aclosing(self.subscriber.facts(since=since, settle=False)) as events:
            async for item in events:
                if isinstance(item, Seen) and item.event.header.i == "facts":
                    body = item.event.body
                    lines = len(from_column(body.bits, 4)) if isinstance(body, FactsSeen) else 0
                    self.seen.put_nowait(lines)

    async def close(self) -> None:
        """Close the raw client's connections."""
        await self.writer.close()
        await self.reader.close()

    async def product_latency(self) -> list[int]:
        """Record events one by one; return the nanoseconds until each was heard."""
        return [await self._one(lambda: self.recorder.facts(batch(1)), self.seen) for _ in range(SINGLES)]

    async def raw_latency(self) -> list[int]:
        """Store messages one by one; return the nanoseconds until each was heard."""
        streams = self.writer.jetstream()
        taken: list[int] = []
        for _ in range(SINGLES):
            began = time.perf_counter_ns()
            await streams.publish("raw.facts.c", b"x" * 250)
            await _take(self.raw_seen, 1)
            taken.append(time.perf_counter_ns() - began)
        return taken

    async def _one(self, say: Callable[[], None], seen: asyncio.Queue[int]) -> int:
        began = time.perf_counter_ns()
        say()
        await _take(seen, 1)
        return time.perf_counter_ns() - began

    async def product_rate(self) -> float:
        """Return the facts a second that reach the subscriber, columns read."""
        facts = batch(LINES)
        began = time.perf_counter()
        for _ in range(EVENTS):
            self.recorder.facts(facts)
        if await _take(self.seen, EVENTS) != EVENTS * LINES:
            raise SystemExit("facts are missing")
        return EVENTS * LINES / (time.perf_counter() - began)

    async def raw_rate(self) -> float:
        """Return the same for raw stores of as many bytes, one after the other, nothing encoded or read."""
        streams, data = self.writer.jetstream(), b"x" * (22 * LINES + 120)
        began = time.perf_counter()
        for _ in range(EVENTS):
            await streams.publish("raw.facts.c", data)
        await _take(self.raw_seen, EVENTS)
        return EVENTS * LINES / (time.perf_counter() - began)


async def _take(queue: asyncio.Queue[int], count: int) -> int:
    async with asyncio.timeout(WAIT_S):
        return sum([await queue.get() for _ in range(count)])


def cpu_us() -> dict[str, float]:
    """Return the processor microseconds of recording and of decoding one event of 1,000 facts, medians."""
    facts, bus = batch(LINES), MemoryBroker().connect()
    recorder = Recorder(bus=bus, topics=TOPICS, instance="facts", member="m0", epoch=1 << 32 | 1, unix_ns=time.time_ns)
    tickets, ranks, bits, lo, hi = facts.columns
    body = FactsSeen(
        n=LINES, ticket=column(tickets, 8), rank=column(ranks, 2), bits=column(bits, 4), lo=column(lo, 4),
        hi=column(hi, 4),
    )  # fmt: skip
    data = encode(Header(k=body.KIND, i="facts", m="m0", e=1 << 32 | 1, s=1, t=1), body)
    encoding: list[int] = []
    decoding: list[int] = []
    for _ in range(ROUNDS_CPU):  # the recorder keeps what it encoded, a tenth of what it may keep
        began = time.thread_time_ns()
        recorder.facts(facts)
        middle = time.thread_time_ns()
        decode(data)
        decoding.append(time.thread_time_ns() - middle)
        encoding.append(middle - began)
    return {"encode": statistics.median(encoding) / 1e3, "decode": statistics.median(decoding) / 1e3}
