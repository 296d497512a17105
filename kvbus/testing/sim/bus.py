"""One party's connection to the simulated broker; keeps, and breaks, what `kvbus.transport.Bus` allows.

What may fail does: a store or a put may have happened although it was not confirmed, a request may be heard twice and
its answer lost, and a connection may be gone, or gone without either end knowing.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvbus.errors import BusError
from kvbus.testing.sim.broker import SimBroker, Waiting
from kvbus.testing.sim.loop import Actor
from kvbus.transport import (
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

T = TypeVar("T")
ANSWERS_MAX = 64
"""As on the real bus: answers in progress at once; more wait their turn."""
QUEUED_MAX = 8_192
SLOW = 0.05
"""Chance that a call's way to the broker, or back, takes a while: HOP_S on average."""
HOP_S = 0.001
CALL_S = 5.0

_Message = tuple[Delivery, Callable[[bytes], None] | None]
"""What is heard, and how it is answered."""


class SimBus:
    """A connection. `cut`: both ends know that it is gone; `hole`: neither does, and everything vanishes in it."""

    def __init__(self, broker: SimBroker, actor: Actor) -> None:
        self.broker = broker
        self.actor = actor
        self.cut = False
        self.hole = False
        self.on_taken_off: Callable[[str, str], None] = lambda _request_hash, _message_id: None
        """Hears of each request, by hash and id, that this party takes off the queue."""
        self._listeners: list[_Listener] = []
        self.in_hand = 0
        """Messages that are being handled here."""

    @property
    def connected(self) -> bool:
        """Whether messages come through."""
        return self.actor.alive and self.broker.up and not self.cut and not self.hole

    @property
    def gone(self) -> bool:
        """Whether the broker knows that nobody is there: the process ended, or the connection was closed."""
        return not self.actor.alive

    async def publish(self, subject: str, data: bytes) -> None:
        """See `kvbus.transport.Bus`."""
        self._check()
        if not self.hole:
            self.broker.send(Delivery(subject, data))

    async def store(
        self, subject: str, data: bytes, *, message_id: str, wait_s: float = CALL_S, after: int | None = None
    ) -> Stored | NotStored:
        """See `kvbus.transport.Bus`; where no ack comes, the message may be stored all the same."""
        await self._reach(wait_s)
        answer = self.broker.store(subject, data, message_id, after)
        await self._return(wait_s)
        return answer

    async def request(self, subject: str, data: bytes, *, wait_s: float) -> bytes | NoAnswer:
        """See `kvbus.transport.Bus`."""
        loop = self.broker.loop
        answer: asyncio.Future[bytes | NoAnswer] = loop.create_future()
        if not self.ask(subject, data, partial(_resolve, answer)):
            return NoAnswer("nobody_listens")
        # Of the asker, and a turn of its own: a process that stood still finds an answer that came meanwhile (P18).
        timer = loop.call_later(wait_s, _resolve, answer, NoAnswer("late"))
        try:
            return await answer
        finally:
            timer.cancel()

    def ask(self, subject: str, data: bytes, heard: Callable[[bytes], object]) -> bool:
        """Ask without waiting; `heard` is called with an answer that comes. False where nobody listens."""
        self._check()
        return (
            self.hole or self.broker.send(Delivery(subject, data), partial(self._answered, heard, self.broker.life)) > 0
        )

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """See `kvbus.transport.Bus`."""
        await self._reach(CALL_S)

        async def one_by_one(delivery: Delivery) -> bytes:
            await handler(delivery)
            return b""

        return self._listen(_Listener(self, subject, one_by_one, places=1, answers=False))

    async def respond(self, subject: str, responder: Responder) -> Subscription:
        """See `kvbus.transport.Bus`."""
        await self._reach(CALL_S)
        return self._listen(_Listener(self, subject, responder, places=ANSWERS_MAX, answers=True))

    async def take_work(self, subject_filter: str, *, consumer: str, most: int, wait_s: float) -> Sequence[Work]:
        """See `kvbus.transport.Bus`; a request may come to a connection that then breaks."""
        del consumer
        loop = self.broker.loop
        ends_at = loop.time() + wait_s
        while True:
            given = self.broker.offer(subject_filter, most) if self.connected else []
            if given or (left_s := ends_at - loop.time()) <= 0:
                return [_SimWork(self, one) for one in given]
            more = self.broker.await_work(subject_filter)
            wake_s = max(0.001, min(left_s, self.broker.due_s(subject_filter)))
            timer = loop.arrive(wake_s, _resolve, more, None)
            try:
                await more
            finally:
                timer.cancel()

    async def queued(self, subject_filter: str) -> int:
        """See `kvbus.transport.Bus`."""
        await self._reach(CALL_S)
        return self.broker.queued_in(subject_filter)

    async def history(self, subject_filter: str, *, after_sequence: int = 0, most: int = 10_000) -> Sequence[Delivery]:
        """See `kvbus.transport.Bus`; settle subjects only, since of facts this broker keeps no more than their ids."""
        self._check_kept(subject_filter)
        await self._reach(CALL_S)
        found = self.broker.history(subject_filter, after_sequence, most)
        await self._return(CALL_S)
        return found

    async def last(self, subject: str) -> Delivery | None:
        """See `kvbus.transport.Bus`; settle subjects only."""
        if "*" in subject:
            raise ValueError(f"a stored message has one subject, got the filter {subject!r}")
        self._check_kept(subject)
        await self._reach(CALL_S)
        found = self.broker.last(subject)
        await self._return(CALL_S)
        return found

    async def log_end(self, subject_filter: str) -> int:
        """See `kvbus.transport.Bus`; settle subjects only."""
        self._check_kept(subject_filter)
        await self._reach(CALL_S)
        found = self.broker.log_end
        await self._return(CALL_S)
        return found

    async def get(self, bucket: str, key: str) -> Entry | None:
        """See `kvbus.transport.Bus`."""
        await self._reach(CALL_S)
        found = self.broker.entries(bucket).get(key)
        return found[0] if found else None

    async def put(self, bucket: str, key: str, value: bytes) -> None:
        """See `kvbus.transport.Bus`."""
        await self._reach(CALL_S)
        self.broker.put(bucket, key, value)
        await self._return(CALL_S)

    async def compare_and_set(self, bucket: str, key: str, value: bytes, *, revision: int) -> int:
        """See `kvbus.transport.Bus`."""
        await self._reach(CALL_S)
        found = self.broker.entries(bucket).get(key)
        if (found[0].revision if found else 0) != revision:
            return 0
        self.broker.put(bucket, key, value)
        stored = self.broker.entries(bucket)[key][0].revision
        await self._return(CALL_S)
        return stored

    async def keys(self, bucket: str) -> Sequence[str]:
        """See `kvbus.transport.Bus`."""
        await self._reach(CALL_S)
        return sorted(self.broker.entries(bucket))

    async def ensure_assets(self) -> None:
        """See `kvbus.transport.Bus`; the simulated broker always has them."""

    def health(self) -> BusHealth:
        """See `kvbus.transport.Bus`."""
        return BusHealth(self.connected, "simulated", {"reconnected": self.broker.life})

    async def close(self) -> None:
        """Stop hearing."""
        for listener in tuple(self._listeners):
            await listener.close()

    # -------------------------------------------------------------------------------------------------------- inside

    def _check(self) -> None:
        if not self.actor.alive or not self.broker.up or self.cut:
            raise BusError("no connection to the broker", broker="simulated")

    def _check_kept(self, subject: str) -> None:
        if not subject.startswith(self.broker.topics.settle_filter().removesuffix("*")):
            raise ValueError(f"the simulated broker keeps settle subjects only, got {subject!r}")

    async def _reach(self, wait_s: float) -> None:
        """Get a call to the broker, or fail; mostly at once, so that most calls cost no turn of the loop."""
        self._check()
        is_slow = self.broker.random.random() < SLOW
        if is_slow or self.hole:
            await self._travel(wait_s, is_slow=is_slow)

    async def _return(self, wait_s: float) -> None:
        """Get the answer back, or fail although the call was obeyed."""
        random = self.broker.random
        if random.random() < self.broker.rates.lost:
            await asyncio.sleep(wait_s)
            raise BusError("the broker did not confirm in time", broker="simulated")
        is_slow = random.random() < SLOW
        if is_slow or not self.connected:
            await self._travel(wait_s, is_slow=is_slow)

    async def _travel(self, wait_s: float, *, is_slow: bool) -> None:
        """Take the time that a slow way takes; in a hole the call waits in vain."""
        life = self.broker.life
        if is_slow:
            await asyncio.sleep(self.broker.random.expovariate(1 / HOP_S))
        if self.hole:
            await asyncio.sleep(wait_s)
        if not self.connected or self.broker.life != life:
            raise BusError("the connection to the broker was lost", broker="simulated")

    def _answered(self, heard: Callable[[bytes], object], life: int, said: bytes) -> None:
        """Somebody has answered; the broker that was asked brings it back, if it still lives."""
        if self.broker.life == life:
            self.broker.carry(self._bring, heard, said)

    def _bring(self, heard: Callable[[bytes], object], said: bytes) -> None:
        if self.connected:
            heard(said)

    def _listen(self, listener: "_Listener") -> "_Listener":
        self._listeners.append(listener)
        self.broker.listen(listener)
        return listener

    def forget(self, listener: "_Listener") -> None:
        """Let a listener hear nothing more."""
        if listener in self._listeners:
            self._listeners.remove(listener)
        self.broker.unlisten(listener)


class _Listener:
    """One subscription: messages wait here, and at most `places` of them are being handled, each by a task of its own.

    Who has handled one waits for the next: tasks cost more than all else that a message does.
    """

    def __init__(self, bus: SimBus, subject: str, responder: Responder, *, places: int, answers: bool) -> None:
        self.subject = subject
        self.answers = answers
        self._bus = bus
        self._responder = responder
        self._places = places
        self._queue: deque[_Message] = deque()
        self._resting: list[asyncio.Future[_Message | None]] = []
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether messages reach it."""
        return self._bus.connected and not self._closed

    @property
    def gone(self) -> bool:
        """Whether the broker knows that nobody is there."""
        return self._bus.gone or self._closed

    def hear(self, delivery: Delivery, answer: Callable[[bytes], None] | None) -> None:
        """Handle a message in a turn of its own, or keep it until there is a place."""
        if self._resting:
            self._resting.pop().set_result((delivery, answer))
        elif self._places:
            self._places -= 1
            self._bus.broker.loop.spawn(self._bus.actor, self._serve((delivery, answer)), "listener")
        elif len(self._queue) < QUEUED_MAX:
            self._queue.append((delivery, answer))

    async def close(self) -> None:
        """Hear nothing more."""
        self._closed = True
        self._queue.clear()
        while self._resting:
            self._resting.pop().set_result(None)
        self._bus.forget(self)

    async def _serve(self, message: "_Message") -> None:
        heard: _Message | None = message
        while heard is not None:
            self._bus.in_hand += 1
            try:
                await self._handle(*heard)
            finally:
                self._bus.in_hand -= 1
            if self._queue:
                await asyncio.sleep(0)  # a message, a turn: a crash may come between any two
            heard = self._queue.popleft() if self._queue else await self._rest()

    async def _rest(self) -> "_Message | None":
        """Wait for a message; None where none comes any more."""
        if self._closed:
            return None
        rest: asyncio.Future[_Message | None] = self._bus.broker.loop.create_future()
        self._resting.append(rest)
        return await rest

    async def _handle(self, delivery: Delivery, answer: Callable[[bytes], None] | None) -> None:
        try:
            said = await self._responder(delivery)
            if answer is not None and self._bus.connected:
                answer(said)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - as on the real bus: that is noted
            self._bus.broker.trail.note(self._bus.actor.name, f"{self.subject} raised {error!r}")


class _SimWork:
    """A request in somebody's hands."""

    def __init__(self, bus: SimBus, waiting: Waiting) -> None:
        self._bus = bus
        self._waiting = waiting
        self.delivery = Delivery(waiting.subject, waiting.data, waiting.sequence)
        """The message as it came."""
        self.attempt = waiting.attempts
        """1 for the first delivery."""
        self.waited_s = bus.broker.loop.time() - waiting.stored_at
        self._ended = False

    async def keep(self) -> None:
        """Push the ack wait out."""
        await self._bus._reach(CALL_S)  # noqa: SLF001 - one module
        self._waiting.offered_again_at = self._bus.broker.loop.time() + self._bus.broker.work.ack_wait_s
        await self._bus._return(CALL_S)  # noqa: SLF001

    async def finish(self) -> None:
        """Take the message off the queue."""
        self._claim()
        await self._bus._reach(CALL_S)  # noqa: SLF001
        waiting = self._waiting
        if self._bus.broker.remove(waiting):
            self._bus.on_taken_off(waiting.subject.rpartition(".")[2], waiting.message_id)
        await self._bus._return(CALL_S)  # noqa: SLF001
        self._ended = True

    async def give_back(self, delay_s: float) -> None:
        """Let the queue offer the message again."""
        self._claim()
        await self._bus._reach(CALL_S)  # noqa: SLF001
        self._waiting.offered_again_at = self._bus.broker.loop.time() + delay_s
        self._ended = True

    def _claim(self) -> None:
        if self._ended:
            raise BusError("this work has ended; a second ack could end another's", subject=self._waiting.subject)


def _resolve(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)
