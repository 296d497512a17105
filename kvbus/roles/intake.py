"""Intake: what reaches this member over the bus, decoded, handed to whom it concerns, and answered.

A message that cannot be read is counted and left; one from the durable queue is taken off it, since it would come back
for ever. Nothing that a peer sends stops the worker.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvbus.errors import BusError, PeerError
from kvbus.events import (
    Event,
    PlanAsked,
    StatsAnswered,
    StatsAsked,
    TransferCancelRequested,
    TransferRequested,
    TransferStep,
    decode,
    encode,
)
from kvbus.names import request_hash
from kvbus.parts import Body
from kvbus.roles.destination import Destination
from kvbus.roles.recorder import Recorder
from kvbus.roles.source import Source
from kvbus.topics import Command, Query, Topics, escape
from kvbus.transport import Bus, Delivery, Subscription, Work

FETCH_WAIT_S = 2.0
"""One wait for work: short, because a fetch does not notice that its connection broke."""
FETCH_MOST = 64
"""Requests taken at a time: more than the usual in-flight cap, so that refusals do not queue behind it."""
KEEP_S = 3.0
"""The queue offers a request again 10 s after the last sign of life: three signs, so that one may be lost."""
BUS_PAUSE_S = 1.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class IntakeStatistics:
    """Messages by what became of them."""

    requests: int = 0
    malformed: int = 0
    misplaced: int = 0


class Leads(Protocol):
    """Whether this is the member that takes requests, where an instance has several."""

    leading: asyncio.Event


class Intake:
    """Subscribes to this member's subjects, and consumes its instance's queue."""

    def __init__(
        self,
        *,
        bus: Bus,
        topics: Topics,
        instance: str,
        member: str,
        destination: Destination,
        source: Source,
        recorder: Recorder,
        counters: Callable[[], Mapping[str, int | float | str]],
        leads: Leads | None = None,
    ) -> None:
        self._bus = bus
        self._topics = topics
        self._instance = instance
        self._member = member
        self._destination = destination
        self._source = source
        self._recorder = recorder
        self._counters = counters
        self._leads = leads
        self._subscriptions: list[Subscription] = []
        self._requests: list[Subscription] = []
        self._works: set[asyncio.Task[None]] = set()
        self.statistics = IntakeStatistics()

    async def listen(self) -> None:
        """Answer commands and queries from now on."""
        topics, instance = self._topics, self._instance
        for subject, responder in (
            (topics.command(instance, Command.LEASE, self._member), self._on_lease),
            (topics.command(instance, Command.PLAN, self._member), self._on_plan),
            (topics.query(instance, Query.STATS), self._on_stats),
        ):
            self._subscriptions.append(await self._bus.respond(subject, responder))
        if self._leads is None:
            await self._answer_requests()

    async def _answer_requests(self) -> None:
        topics, instance, respond = self._topics, self._instance, self._bus.respond
        self._requests.append(await respond(topics.command(instance, Command.TRANSFER), self._on_urgent))
        self._requests.append(await respond(topics.command(instance, Command.CANCEL), self._on_cancel))

    async def _until_leading(self, leads: Leads) -> None:
        """Leave requests to whichever member leads; where this one does, answer them (BusError: not yet)."""
        if not leads.leading.is_set():
            while self._requests:
                await self._requests.pop().close()
            await leads.leading.wait()
        if not self._requests:
            await self._answer_requests()

    async def consume(self) -> None:
        """Take requests from the durable queue until cancelled; each one ends exactly once."""
        subjects = self._topics.transfer_filter(self._instance)
        consumer = f"dst-{escape(self._instance)}"
        while True:
            try:
                if self._leads is not None:
                    await self._until_leading(self._leads)
                works = await self._bus.take_work(subjects, consumer=consumer, most=FETCH_MOST, wait_s=FETCH_WAIT_S)
            except BusError as error:
                log.info("no work while the broker is away: %s", error)
                await asyncio.sleep(BUS_PAUSE_S)
                continue
            for work in works:
                task = asyncio.get_running_loop().create_task(self._work(work))
                self._works.add(task)
                task.add_done_callback(self._works.discard)

    async def close(self) -> None:
        """Stop hearing; requests that are being served go back to the queue by themselves."""
        for subscription in (*self._subscriptions, *self._requests):
            await subscription.close()
        for task in self._works:
            task.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------- durable path

    async def _work(self, work: Work) -> None:
        try:
            event = self._decoded(work.delivery)
            request = self._request_in(event)
            self._check_subject(work.delivery, request)
        except PeerError as error:
            self._refuse_poison(work, error)
            await self._finish(work)
            return
        self.statistics.requests += 1
        verdict, transfer = await self._destination.request(request, sent_unix_s=event.header.t / 1e9)
        await self._destination.results.tell_verdict(request, verdict)
        if transfer and verdict.verdict == "accepted":
            while not await self._destination.results.ended(transfer, KEEP_S):
                await self._keep(work)
        await self._finish(work)

    def _request_in(self, event: Event) -> TransferRequested:
        """Return the request for this instance that an event holds; its hash must be its own.

        Who repeats a hash joins that transfer, so a request under another one's hash would be answered with its pages.
        """
        request = event.body
        if not isinstance(request, TransferRequested) or request.destination != self._instance:
            raise self._misplaced(event)
        prompt = request.prompt.canonical()
        own = request_hash(model=request.model, salt=request.salt, source=request.source, prompt=prompt)
        if request.request_hash != own:
            self.statistics.malformed += 1
            raise PeerError("request hash is not that of the request", got=request.request_hash, expected=own)
        return request

    def _check_subject(self, delivery: Delivery, request: TransferRequested) -> None:
        if self._topics.parse(delivery.subject).last != request.request_hash:
            raise PeerError("request hash and subject differ", subject=delivery.subject)

    def _refuse_poison(self, work: Work, error: PeerError) -> None:
        """A request that no delivery can mend: it ends as a fact, not in the stream for ever."""
        log.warning("request on %s refused: %s", work.delivery.subject, error)
        try:
            request_hash = self._topics.parse(work.delivery.subject).last
            body = TransferStep(
                transfer=f"refused-{request_hash}", request_hash=request_hash, step="refused", text=str(error)[:2_000]
            )
            self._recorder.event(body)
        except PeerError:
            return

    async def _keep(self, work: Work) -> None:
        try:
            await work.keep()
        except BusError as error:
            log.info("sign of life not sent: %s", error)

    async def _finish(self, work: Work) -> None:
        try:
            await work.finish()
        except BusError as error:  # it will be offered again, and adopted (P22)
            log.info("request not taken off the queue: %s", error)

    # ------------------------------------------------------------------------------------------------ request-reply

    async def _on_lease(self, delivery: Delivery) -> bytes:
        event = self._decoded(delivery)
        try:
            return await self._source.answer(event)
        except PeerError:
            self.statistics.misplaced += 1
            raise

    async def _on_plan(self, delivery: Delivery) -> bytes:
        event = self._decoded(delivery)
        if not isinstance(event.body, PlanAsked) or event.header.i != self._instance:
            raise self._misplaced(event)
        return self._encoded(self._destination.plan(event.body.transfer), event)

    async def _on_urgent(self, delivery: Delivery) -> bytes:
        event = self._decoded(delivery)
        request = self._request_in(event)
        self.statistics.requests += 1
        verdict, _transfer = await self._destination.request(request, sent_unix_s=event.header.t / 1e9)
        return self._encoded(verdict, event)

    async def _on_cancel(self, delivery: Delivery) -> bytes:
        event = self._decoded(delivery)
        if not isinstance(event.body, TransferCancelRequested):
            raise self._misplaced(event)
        stopped = self._destination.cancel(event.body.request_hash, f"cancelled by {event.header.i}")
        return self._encoded(StatsAnswered(counters={"cancelled": int(stopped)}), event)

    async def _on_stats(self, delivery: Delivery) -> bytes:
        event = self._decoded(delivery)
        if not isinstance(event.body, StatsAsked):
            raise self._misplaced(event)
        return self._encoded(StatsAnswered(counters=dict(self._counters())), event)

    # ------------------------------------------------------------------------------------------------------- inside

    def _decoded(self, delivery: Delivery) -> Event:
        try:
            return decode(delivery.data)
        except PeerError:
            self.statistics.malformed += 1
            raise

    def _misplaced(self, event: Event) -> PeerError:
        self.statistics.misplaced += 1
        return PeerError("this kind does not belong on this subject", kind=event.header.k, sender=event.header.i)

    def _encoded(self, body: Body, event: Event) -> bytes:
        return encode(self._recorder.header(body.KIND, event.header.event_id), body)
