"""The simulated broker: what it stores, whom it knows, and what becomes of each message on its way."""

import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvbus.bus_assets import INSTANCE_TTL_S, WorkLimits
from kvbus.testing.sim.loop import SimLoop
from kvbus.testing.sim.settings import Rates
from kvbus.testing.sim.trail import Trail
from kvbus.testing.streams import matches
from kvbus.topics import Topics, escape
from kvbus.transport import BUCKET_EPOCH, BUCKET_INSTANCES, Delivery, Entry, NotStored, Stored

if TYPE_CHECKING:
    import asyncio

IDS_MAX = 20_000
"""Message ids that the broker remembers: at 1,000 events a second some 20 s, several times what a repeat takes."""
QUEUE_MAX = 10_000
HOP_S = 0.0005
LATE_MAX_S = 2.0
KEPT_MAX = 20_000
"""Messages kept of one subject; beyond it the oldest go, as from the stream that has its size."""
SLASH = escape("/")
"""What parts an instance's name from its member's in a key of the registry."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One request in the work queue."""

    sequence: int
    subject: str
    data: bytes
    message_id: str = ""
    stored_at: float = 0.0
    attempts: int = 0
    offered_again_at: float = 0.0


class Listener(Protocol):
    """Whoever hears a subject."""

    subject: str
    answers: bool

    @property
    def connected(self) -> bool:
        """Whether its connection stands."""

    @property
    def gone(self) -> bool:
        """Whether its process has ended, which the broker sees at once."""

    def hear(self, delivery: Delivery, answer: "Callable[[bytes], None] | None") -> None:
        """Take one message."""


@dataclass(slots=True)
class _Log:
    head: int = 0
    ids: OrderedDict[str, int] = field(default_factory=OrderedDict)
    kept: dict[str, "_Kept"] = field(default_factory=dict)


class _Kept:
    """The stored messages of one subject with their times, and the subject on which they are repeated live."""

    __slots__ = ("live", "messages")

    def __init__(self, live: str) -> None:
        self.live = live
        self.messages: deque[tuple[float, Delivery]] = deque(maxlen=KEPT_MAX)

    def trimmed(self, oldest: float) -> deque[tuple[float, Delivery]]:
        """Return the messages, without those that were stored then or before."""
        messages = self.messages
        while messages and messages[0][0] <= oldest:
            messages.popleft()
        return messages


class SimBroker:
    """One broker. `life` changes with each restart: what was under way then is lost.

    It keeps and repeats the settle logs, for `log_age_max_s` of virtual time. Of facts it keeps ids only: nobody in the
    simulation reads them from the broker, and they are most of what it stores.
    """

    def __init__(self, loop: SimLoop, seed: str, rates: Rates, trail: Trail) -> None:
        self.loop = loop
        self.topics = Topics()
        self.random = random.Random(f"{seed}:bus")
        self.rates = rates
        self.trail = trail
        self.up = True
        self.life = 1
        self.sent = self.lost = self.doubled = 0
        self.work = WorkLimits()
        self.log_age_max_s = math.inf
        self._settle_head = self.topics.settle_filter().removesuffix("*")
        self._live_settle_head = self.topics.live_settle().removesuffix("*")
        self._transfer_head = self.topics.transfer_filter().removesuffix("*.*")
        self._listeners: dict[str, list[Listener]] = {}
        self._log = _Log()
        self._queue: dict[str, OrderedDict[int, Waiting]] = {}
        self._pending: dict[str, int] = {}
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._buckets: dict[str, dict[str, tuple[Entry, float]]] = {BUCKET_INSTANCES: {}, BUCKET_EPOCH: {}}
        self._revision = 0
        self.inboxes: dict[str, deque[bytes]] = {}

    # -------------------------------------------------------------------------------------------------------- faults

    def stop(self, *, keep_store: bool) -> None:
        """Go away; what was under way is lost, and without its store everything is."""
        self.up = False
        self.life += 1
        self.trail.note("world", f"broker stops, store {'kept' if keep_store else 'lost'}")
        if not keep_store:
            self._log = _Log()
            self._queue.clear()
            self._pending.clear()
            for bucket in self._buckets.values():
                bucket.clear()

    def start(self) -> None:
        """Come back."""
        self.up = True
        self.trail.note("world", "broker is back")

    def heal(self) -> None:
        """Lose, double and delay nothing any more."""
        self.rates = Rates(0, 0, 0)

    # ------------------------------------------------------------------------------------------------------ messages

    def listen(self, listener: Listener) -> None:
        """Let a listener hear its subject; ValueError where it never would."""
        if "*" in listener.subject or listener.subject.startswith(self.topics.live_facts().removesuffix("*")):
            raise ValueError(f"the simulated broker knows no filters and repeats no facts, got {listener.subject!r}")
        self._listeners.setdefault(listener.subject, []).append(listener)

    def unlisten(self, listener: Listener) -> None:
        """Let a listener hear nothing any more."""
        listeners = self._listeners.get(listener.subject, [])
        if listener in listeners:
            listeners.remove(listener)

    def send(self, delivery: Delivery, answer: "Callable[[bytes], None] | None" = None) -> int:
        """Send a message to whoever listens; return how many could answer it."""
        answering = 0
        for listener in tuple(self._listeners.get(delivery.subject, ())):
            if listener.gone:
                self.unlisten(listener)  # members come and go: all that ever were would be looked at each time
            else:
                self.carry(self._arrive, listener, delivery, answer)
                answering += listener.answers
        return answering

    def carry(self, arrive: Callable[..., None], *message: object) -> None:
        """Bring a message there: now, later, twice, or never."""
        draw, rates = self.random.random(), self.rates
        self.sent += 1
        if draw < rates.lost:
            self.lost += 1
            return
        self._carry_once(arrive, message)
        if draw > 1 - rates.doubled:
            self.doubled += 1
            self._carry_once(arrive, message)

    def _carry_once(self, arrive: Callable[..., None], message: tuple[object, ...]) -> None:
        draw = self.random.random()
        if draw < self.rates.late:
            delay_s = self.random.random() * LATE_MAX_S
        elif draw < 0.4:
            delay_s = self.random.expovariate(1 / HOP_S)
        else:
            arrive(*message)
            return
        self.loop.arrive(delay_s, self._carry_on, self.life, arrive, message)

    def _carry_on(self, life: int, arrive: Callable[..., None], message: tuple[object, ...]) -> None:
        """Bring a message there at last, unless it was under way when the broker stopped."""
        if self.life == life:
            arrive(*message)

    def _arrive(self, listener: Listener, delivery: Delivery, answer: "Callable[[bytes], None] | None") -> None:
        if listener.connected:
            listener.hear(delivery, answer)

    # --------------------------------------------------------------------------------------------------- the streams

    def store(self, subject: str, data: bytes, message_id: str, after: int | None = None) -> Stored | NotStored:
        """Append to the subject's stream, once per message id, and where a fence allows it."""
        log = self._log
        known = log.ids.get(message_id)
        if known is not None:
            return Stored(known, duplicate=True)
        if after is not None and self._has_moved(subject, after):
            return NotStored("moved")
        destination = self._destination_of(subject)
        if destination is not None:
            if subject in self._pending:
                return NotStored("pending")
            if len(self._pending) >= QUEUE_MAX:
                return NotStored("full")
        log.head += 1
        log.ids[message_id] = log.head
        if len(log.ids) > IDS_MAX:
            log.ids.popitem(last=False)
        if subject.startswith(self._settle_head):
            self._keep(subject, data)
        elif destination is not None:
            self._pending[subject] = log.head
            waiting = Waiting(log.head, subject, data, message_id, self.loop.time())
            self._queue.setdefault(destination, OrderedDict())[log.head] = waiting
            self.wake(destination)
        return Stored(log.head, duplicate=False)

    def _destination_of(self, subject: str) -> str | None:
        """Return the queue of a subject: what its consumers call their filter."""
        return f"{subject.rpartition('.')[0]}.*" if subject.startswith(self._transfer_head) else None

    def _has_moved(self, subject: str, after: int) -> bool:
        if not subject.startswith(self._settle_head):
            raise ValueError(f"the simulated broker fences settle subjects only, got {subject!r}")
        newest = self.last(subject)
        return after != (newest.sequence if newest else 0)

    def _keep(self, subject: str, data: bytes) -> None:
        """Keep a settle message, and repeat it live with its sequence and that of the one before it."""
        log = self._log
        kept = log.kept.get(subject)
        if kept is None:
            kept = log.kept[subject] = _Kept(self._live_settle_head + subject.removeprefix(self._settle_head))
        if kept.live in self._listeners:
            newest = self.last(subject)
            self.send(Delivery(kept.live, data, log.head, newest.sequence if newest else 0))
        kept.messages.append((self.loop.time(), Delivery(subject, data, log.head)))

    @property
    def log_end(self) -> int:
        """The sequence of the newest message that this store was given."""
        return self._log.head

    def last(self, subject: str) -> Delivery | None:
        """Return the newest message of a settle subject."""
        kept = self._log.kept.get(subject)
        messages = kept.trimmed(self.loop.time() - self.log_age_max_s) if kept else None
        return messages[-1][1] if messages else None

    def history(self, subject_filter: str, after_sequence: int, most: int) -> list[Delivery]:
        """Return settle messages from after a sequence, oldest first."""
        oldest = self.loop.time() - self.log_age_max_s
        found = [
            message
            for subject, kept in self._log.kept.items()
            if matches(subject_filter, subject)
            for _, message in kept.trimmed(oldest)
            if message.sequence > after_sequence
        ]
        return sorted(found, key=lambda message: message.sequence)[:most]

    def offer(self, queue: str, most: int) -> list[Waiting]:
        """Give out waiting requests, within the queue's caps."""
        waiting = self._queue.get(queue)
        if not waiting:
            return []
        now = self.loop.time()
        due = [one for one in waiting.values() if one.offered_again_at <= now]
        held = len(waiting) - len(due)
        given = due[: max(0, min(most, self.work.in_flight_max - held))]
        for one in given:
            one.attempts += 1
            one.offered_again_at = now + self.work.ack_wait_s
        return given

    def due_s(self, queue: str) -> float:
        """Return how long until something may be offered again."""
        now = self.loop.time()
        waits = [one.offered_again_at - now for one in self._queue.get(queue, {}).values()]
        return min((wait for wait in waits if wait > 0), default=LATE_MAX_S)

    def find(self, waiting: Waiting) -> tuple[str, bool]:
        """Return the queue of a request, and whether it is still there."""
        queue = self._destination_of(waiting.subject) or ""
        there = self._queue.get(queue)
        return queue, there is not None and there.get(waiting.sequence) is waiting

    def remove(self, waiting: Waiting) -> bool:
        """Take a request off the queue; False where it is not there any more, as after the loss of the store."""
        queue, there = self.find(waiting)
        if there:
            del self._queue[queue][waiting.sequence]
            self._pending.pop(waiting.subject, None)
        return there

    def queued_in(self, queue: str) -> int:
        """Requests that wait or run in one queue."""
        return len(self._queue.get(queue, ()))

    @property
    def queued(self) -> int:
        """Requests that wait, in all queues."""
        return len(self._pending)

    def queued_for(self, destination: str) -> int:
        """Return how many requests the queue holds for an instance: those that wait, and those that run."""
        return len(self._queue.get(f"{self._transfer_head}{escape(destination)}.*", ()))

    def await_work(self, queue: str) -> "asyncio.Future[None]":
        """Return a future that ends when the queue has something new."""
        future = self.loop.create_future()
        self._waiters.setdefault(queue, []).append(future)
        return future

    def wake(self, queue: str) -> None:
        """Let whoever waits for a queue look again."""
        for future in self._waiters.pop(queue, ()):
            if not future.done():
                future.set_result(None)

    # --------------------------------------------------------------------------------------------------- the buckets

    def entries(self, bucket: str) -> dict[str, tuple[Entry, float]]:
        """Return what a bucket holds now."""
        entries = self._buckets[bucket]
        if bucket == BUCKET_INSTANCES:
            now = self.loop.time()
            for key in [key for key, (_, at) in entries.items() if now - at >= INSTANCE_TTL_S]:
                del entries[key]
        return entries

    def known(self, instances: Sequence[str]) -> list[str]:
        """Return those of the instances of which the registry holds a record."""
        known = {key.partition(SLASH)[0] for key in self.entries(BUCKET_INSTANCES)}
        return [instance for instance in instances if escape(instance) in known]

    def put(self, bucket: str, key: str, value: bytes) -> None:
        """Store a value under a new revision."""
        self._revision += 1
        self._buckets[bucket][key] = (Entry(key, value, self._revision), self.loop.time())
