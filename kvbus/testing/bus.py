"""A bus inside one process: the promises of `kvbus.transport.Bus` with no broker and no socket.

`MemoryBroker` holds streams, queue and buckets; each `MemoryBus` over it is one party's connection, which `cut` takes
away and `restore` brings back. What the broker stores survives that, as it does on disk.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbus.bus_assets import INSTANCE_TTL_S, AssetLimits, Assets, WorkLimits
from kvbus.bus_guards import Tally, check_key, check_message, limit_for, store_headers
from kvbus.errors import BusError
from kvbus.testing.streams import Stream, matches
from kvbus.topics import Topics
from kvbus.transport import (
    BUCKET_EPOCH,
    BUCKET_INSTANCES,
    BusHealth,
    Delivery,
    Entry,
    Handler,
    NoAnswer,
    NotStored,
    Responder,
    Stored,
    Subscription,
    Work,
)

_ANSWERS_MAX = 64
_QUEUED_MAX = 8_192


@dataclass(slots=True)
class _Leased:
    """A message of the work queue in somebody's hands, or waiting for its next offer."""

    attempts: int = 0
    offered_again_at: float = 0.0


@dataclass(slots=True, eq=False)
class _Listener:
    subject_filter: str
    queue: "asyncio.Queue[tuple[Delivery, asyncio.Future[bytes] | None]]"
    owner: "MemoryBus"
    answers: bool = False


class MemoryBroker:
    """What the buses of one test share. `clock` decides when work is offered again and when entries expire.

    `log_age_max_s` is for how long facts and settle decisions are kept; for good, unless a test says otherwise.
    """

    def __init__(
        self,
        *,
        topics: Topics | None = None,
        limits: AssetLimits | None = None,
        work: WorkLimits | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.topics = topics or Topics()
        self.limits = limits or AssetLimits()
        self.work = work or WorkLimits()
        self.log_age_max_s: float | None = None
        self.clock = clock or (lambda: asyncio.get_running_loop().time())
        self.assets = Assets(self.topics, self.limits)
        prefix = self.topics.prefix
        self.transfer = Stream(self.topics.transfer_filter())
        self.logs = [
            Stream(self.topics.facts_filter(), f"{prefix}.facts.", f"{prefix}.live.facts."),
            Stream(self.topics.settle_filter(), f"{prefix}.settle.", f"{prefix}.live.settle."),
            Stream(self.topics.blocks_filter(), f"{prefix}.blocks.", f"{prefix}.live.blocks."),
        ]
        self.leased: dict[int, _Leased] = {}
        self.buckets: dict[str, dict[str, tuple[Entry, float]]] = {BUCKET_INSTANCES: {}, BUCKET_EPOCH: {}}
        self.revisions = itertools.count(1)
        self.listeners: list[_Listener] = []

    def connect(self) -> "MemoryBus":
        """Return one more party's connection."""
        return MemoryBus(self)

    def deliver(self, delivery: Delivery, answer: "asyncio.Future[bytes] | None" = None) -> int:
        """Hand a message to whoever listens; return how many could answer it."""
        answering = 0
        for listener in self.listeners:
            if not listener.owner.connected or not matches(listener.subject_filter, delivery.subject):
                continue
            answering += listener.answers
            try:
                listener.queue.put_nowait((delivery, answer))
            except asyncio.QueueFull:
                listener.owner.tally.count("client_SlowConsumerError")
        return answering

    def store(self, subject: str, data: bytes, message_id: str, after: int | None = None) -> Stored | NotStored:
        """Append to the subject's stream and repeat it live."""
        stream = self.stream_of(subject)
        if (known := stream.ids.get(message_id)) is not None:
            return Stored(known, duplicate=True)
        newest = stream.last(subject)
        last = newest.sequence if newest else 0
        if after is not None and after != last:
            return NotStored("moved")
        if stream is self.transfer:
            if last:
                return NotStored("pending")
            if len(stream.messages) >= self.limits.transfer_messages_max:
                return NotStored("full")
        stream.append(subject, data, message_id, self.clock())
        if stream.live_to:
            live = stream.live_to + subject.removeprefix(stream.live_from)
            self.deliver(Delivery(live, data, stream.head, last))
        return Stored(stream.head, duplicate=False)

    def stream_of(self, subject: str) -> Stream:
        """Return the stream of a subject, without what is too old for it."""
        stream = next((s for s in (self.transfer, *self.logs) if matches(s.subject_filter, subject)), None)
        if stream is None:
            raise BusError("no stream answers for this; was ensure_assets run?", subject=subject)
        if stream is not self.transfer:
            self.trim()
        return stream

    def trim(self) -> None:
        """Drop from the logs what is too old."""
        if self.log_age_max_s is not None:
            for log in self.logs:
                log.trim(self.clock() - self.log_age_max_s)

    def offer(self, subject_filter: str, most: int) -> list[tuple[Delivery, int]]:
        """Give out waiting requests with their attempt number, within the in-flight cap of their filter."""
        now = self.clock()
        waiting = [m for m in self.transfer.messages.values() if matches(subject_filter, m.subject)]
        held = sum(self.leased[m.sequence].offered_again_at > now for m in waiting if m.sequence in self.leased)
        given: list[tuple[Delivery, int]] = []
        for message in waiting:
            if len(given) >= most or held + len(given) >= self.work.in_flight_max:
                break
            lease = self.leased.setdefault(message.sequence, _Leased())
            if lease.offered_again_at <= now:
                lease.attempts += 1
                lease.offered_again_at = now + self.work.ack_wait_s
                given.append((message, lease.attempts))
        return given

    def entries(self, bucket: str) -> dict[str, tuple[Entry, float]]:
        """Return what a bucket holds now."""
        if bucket not in self.buckets:
            raise BusError("no stream answers for this; was ensure_assets run?", bucket=bucket)
        entries = self.buckets[bucket]
        if bucket == BUCKET_INSTANCES:
            now = self.clock()
            for key in [key for key, (_, at) in entries.items() if now - at >= INSTANCE_TTL_S]:
                del entries[key]
        return entries


class MemoryBus:
    """One party's connection to a `MemoryBroker`; with none given, to one of its own."""

    def __init__(self, broker: MemoryBroker | None = None) -> None:
        self.broker = broker or MemoryBroker()
        self.tally = Tally(logging.getLogger(__name__))
        self.connected = True
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(_ANSWERS_MAX)

    def cut(self) -> None:
        """Take the connection away; what is sent now is refused, what is said now is not heard."""
        self.connected = False
        self.tally.count("disconnected")

    def restore(self) -> None:
        """Bring the connection back."""
        self.connected = not self._closed
        self.tally.count("reconnected")

    async def publish(self, subject: str, data: bytes) -> None:
        """See `kvbus.transport.Bus`."""
        self._check(subject, data)
        self.broker.deliver(Delivery(subject, bytes(data)))

    async def store(
        self, subject: str, data: bytes, *, message_id: str, wait_s: float = 5.0, after: int | None = None
    ) -> Stored | NotStored:
        """See `kvbus.transport.Bus`; the ack is immediate."""
        del wait_s
        self._check(subject, data, store_headers(message_id, after))
        return self.broker.store(subject, bytes(data), message_id, after)

    async def request(self, subject: str, data: bytes, *, wait_s: float) -> bytes | NoAnswer:
        """See `kvbus.transport.Bus`."""
        self._check(subject, data)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if not self.broker.deliver(Delivery(subject, bytes(data)), answer):
            return NoAnswer("nobody_listens")
        await asyncio.wait({answer}, timeout=wait_s)
        return answer.result() if answer.done() else NoAnswer("late")

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """See `kvbus.transport.Bus`."""
        self._check(subject, b"")
        listener = _Listener(subject, asyncio.Queue(_QUEUED_MAX), self)

        async def run() -> None:
            while True:
                delivery, _ = await listener.queue.get()
                try:
                    await handler(delivery)
                except Exception as error:  # noqa: BLE001 - a handler is foreign code
                    self.tally.complain("handler_raised", f"{subject}: {error!r}")

        return self._listen(listener, asyncio.create_task(run()))

    async def respond(self, subject: str, responder: Responder) -> Subscription:
        """See `kvbus.transport.Bus`."""
        self._check(subject, b"")
        listener = _Listener(subject, asyncio.Queue(_QUEUED_MAX), self, answers=True)

        async def answer_one(delivery: Delivery, answer: "asyncio.Future[bytes] | None") -> None:
            try:
                said = await responder(delivery)
                self._check("_INBOX", said)
                if answer is not None and not answer.done():
                    answer.set_result(said)
            except Exception as error:  # noqa: BLE001 - a responder is foreign code
                self.tally.complain("responder_raised", f"{subject}: {error!r}")
            finally:
                self._places.release()

        async def run() -> None:
            while True:
                delivery, answer = await listener.queue.get()
                await self._places.acquire()
                self._keep(asyncio.create_task(answer_one(delivery, answer)))

        return self._listen(listener, asyncio.create_task(run()))

    async def take_work(self, subject_filter: str, *, consumer: str, most: int, wait_s: float) -> Sequence[Work]:
        """See `kvbus.transport.Bus`; consumers with one filter share one queue here."""
        del consumer
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + wait_s
        while True:
            given = self.broker.offer(subject_filter, most) if self.connected else []
            if given or loop.time() >= ends_at or self._closed:
                return [_MemoryWork(self, delivery, attempt) for delivery, attempt in given]
            await asyncio.sleep(min(0.002, max(0.0, ends_at - loop.time())))

    async def queued(self, subject_filter: str) -> int:
        """See `kvbus.transport.Bus`."""
        self._check(subject_filter, b"")
        return sum(1 for _ in self.broker.transfer.select(subject_filter, 0))

    async def history(self, subject_filter: str, *, after_sequence: int = 0, most: int = 10_000) -> Sequence[Delivery]:
        """See `kvbus.transport.Bus`."""
        self._check(subject_filter, b"")
        self.broker.assets.history_stream(subject_filter)
        self.broker.trim()
        found = (one for log in self.broker.logs for one in log.select(subject_filter, after_sequence))
        return list(itertools.islice(found, most))

    async def last(self, subject: str) -> Delivery | None:
        """See `kvbus.transport.Bus`."""
        self._check(subject, b"")
        self.broker.assets.stream_of(subject)
        return self.broker.stream_of(subject).last(subject)

    async def log_end(self, subject_filter: str) -> int:
        """See `kvbus.transport.Bus`."""
        self._check(subject_filter, b"")
        self.broker.assets.history_stream(subject_filter)
        return next(log.head for log in self.broker.logs if matches(log.subject_filter, subject_filter))

    async def get(self, bucket: str, key: str) -> Entry | None:
        """See `kvbus.transport.Bus`."""
        check_key(key)
        self._check(key, b"")
        found = self.broker.entries(bucket).get(key)
        return found[0] if found else None

    async def put(self, bucket: str, key: str, value: bytes) -> None:
        """See `kvbus.transport.Bus`."""
        check_key(key)
        self._check(f"{self.broker.topics.prefix}.bucket", value)
        entry = Entry(key, bytes(value), next(self.broker.revisions))
        self.broker.entries(bucket)[key] = (entry, self.broker.clock())

    async def compare_and_set(self, bucket: str, key: str, value: bytes, *, revision: int) -> int:
        """See `kvbus.transport.Bus`."""
        check_key(key)
        found = self.broker.entries(bucket).get(key)
        if (found[0].revision if found else 0) != revision:
            return 0
        await self.put(bucket, key, value)
        return self.broker.entries(bucket)[key][0].revision

    async def keys(self, bucket: str) -> Sequence[str]:
        """See `kvbus.transport.Bus`."""
        self._check("keys", b"")
        return sorted(self.broker.entries(bucket))

    async def ensure_assets(self) -> None:
        """See `kvbus.transport.Bus`; a memory broker is born with its assets."""
        self._check("assets", b"")

    def health(self) -> BusHealth:
        """See `kvbus.transport.Bus`."""
        return BusHealth(self.connected, "memory", self.tally.counters())

    async def close(self) -> None:
        """Stop subscriptions; repeatable."""
        self.connected = False
        self._closed = True
        self.broker.listeners[:] = [one for one in self.broker.listeners if one.owner is not self]
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        if not self.connected:
            raise BusError("the bus is closed" if self._closed else "no connection to the broker", broker="memory")
        check_message(subject, data, headers, limit_bytes=limit_for(subject, self.broker.topics.prefix))

    def _listen(self, listener: _Listener, task: "asyncio.Task[None]") -> "_MemorySubscription":
        self.broker.listeners.append(listener)
        self._keep(task)
        return _MemorySubscription(self.broker, listener, task)

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _MemorySubscription:
    def __init__(self, broker: MemoryBroker, listener: _Listener, task: "asyncio.Task[None]") -> None:
        self._broker = broker
        self._listener = listener
        self._task = task

    async def close(self) -> None:
        with contextlib.suppress(ValueError):
            self._broker.listeners.remove(self._listener)
        self._task.cancel()


class _MemoryWork:
    def __init__(self, bus: MemoryBus, delivery: Delivery, attempt: int) -> None:
        self._bus = bus
        self._ended = False
        self.delivery = delivery
        self.attempt = attempt
        self.waited_s = bus.broker.transfer.age_s(delivery.sequence, bus.broker.clock())

    async def keep(self) -> None:
        lease = self._lease()
        if lease is not None:
            lease.offered_again_at = self._bus.broker.clock() + self._bus.broker.work.ack_wait_s

    async def finish(self) -> None:
        self._end()
        self._bus.broker.transfer.messages.pop(self.delivery.sequence, None)
        self._bus.broker.leased.pop(self.delivery.sequence, None)

    async def give_back(self, delay_s: float) -> None:
        self._end()
        lease = self._lease()
        if lease is not None:
            lease.offered_again_at = self._bus.broker.clock() + delay_s

    def _lease(self) -> _Leased | None:
        if not self._bus.connected:
            raise BusError("no connection to the broker", broker="memory")
        return self._bus.broker.leased.get(self.delivery.sequence)

    def _end(self) -> None:
        self._lease()
        if self._ended:
            raise BusError("this work has ended; a second ack could end another's", subject=self.delivery.subject)
        self._ended = True
