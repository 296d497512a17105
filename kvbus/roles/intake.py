"""Intake: what reaches this member over the bus, decoded, handed to whom it concerns, and answered.

A message that cannot be read is counted and left; one from the durable queue ends as a failed request, since it would
come back for ever (P23). Nothing that a peer sends stops the worker.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvbus.errors import BusError, PeerError
from kvbus.events import (
    CacheAsked,
    CacheChangeAsked,
    Event,
    PlanAsked,
    SnapshotAsked,
    StatsAnswered,
    StatsAsked,
    TransferCancelRequested,
    TransferOutcome,
    TransferRequested,
    TransferStep,
    TransferVerdict,
    decode,
)
from kvbus.ledger.facts import FailureClass
from kvbus.names import request_hash
from kvbus.parts import Body
from kvbus.roles.admitting import Offer, left_step
from kvbus.roles.cache_desk import CacheDesk
from kvbus.roles.claims import KEEP_S, Claim
from kvbus.roles.destination import Destination
from kvbus.roles.offer_book import OfferBook
from kvbus.roles.portrait import Portrait
from kvbus.roles.recorder import Recorder
from kvbus.roles.source import Source
from kvbus.roles.tasks import Tasks
from kvbus.topics import Command, Query, Topics, escape
from kvbus.transport import Bus, Delivery, Subscription, Work

FETCH_WAIT_S = 2.0
"""One wait for work: short, since a fetch does not notice that a cluster has another leader."""
IDLE_WAIT_S = 6.0
"""The same where nothing came for a while: rarely asked for, so that an idle instance costs next to nothing, and still
within the time for which a claim stands."""
IDLE_AFTER_S = 30.0
FETCH_MOST = 64
"""Requests taken at a time: more than the usual in-flight cap, so that refusals do not queue behind it."""
BUS_PAUSE_S = 1.0
UNREAD = "?"
"""Stands for the source of a request that cannot be read; no name on the bus is a mark like this by habit."""

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
        portrait: Portrait,
        cache: CacheDesk | None = None,
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
        self._portrait = portrait
        self._cache = cache
        self._counters = counters
        self._leads = leads
        self._subscriptions: list[Subscription] = []
        self._requests: list[Subscription] = []
        self._works = Tasks()
        self._offers = OfferBook()
        self._takes = asyncio.Event()
        self._takes.set()
        self._answering = asyncio.Lock()
        self.statistics = IntakeStatistics()

    async def listen(self) -> None:
        """Answer commands and queries from now on."""
        topics, instance = self._topics, self._instance
        for subject, responder in (
            (topics.command(instance, Command.LEASE, self._member), self._on_lease),
            (topics.command(instance, Command.PLAN, self._member), self._on_plan),
            (topics.command(instance, Command.CACHE, self._member), self._on_cache),
            (topics.query(instance, Query.STATS), self._on_stats),
            (topics.query(instance, Query.STATS, self._member), self._on_stats),
            (topics.query(instance, Query.SNAPSHOT, self._member), self._on_snapshot),
        ):
            self._subscriptions.append(await self._bus.respond(subject, responder))
        if self._leads is None:
            await self._answer_requests()

    async def _answer_requests(self) -> None:
        """Answer cancels from now on, and requests that come directly, unless this member rests."""
        topics, instance, respond = self._topics, self._instance, self._bus.respond
        async with self._answering:
            if not self._requests:
                self._requests.append(await respond(topics.command(instance, Command.CANCEL), self._on_cancel))
            if len(self._requests) == 1 and self._takes.is_set():
                self._requests.append(await respond(topics.command(instance, Command.TRANSFER), self._on_urgent))

    async def rest(self) -> None:
        """Leave requests in the queue, and take none directly either, until `resume`; what is in hand goes on.

        Whoever repeats a request that is queued hears that nobody listens, rather than a refusal of what will be run.
        """
        self._takes.clear()
        async with self._answering:
            while len(self._requests) > 1:
                await self._requests.pop().close()

    async def resume(self) -> None:
        """Take requests again, unless `rest` is asked for meanwhile."""
        self._takes.set()
        if self._requests:
            await self._answer_requests()

    @property
    def in_hand(self) -> int:
        """Requests of the queue that this member has in its hands."""
        return len(self._works)

    async def flush(self, wait_s: float) -> int:
        """Wait until what was in hand is off the queue or given back, bounded; return how many are not."""
        return await self._works.wait(wait_s)

    async def _until_leading(self, leads: Leads) -> None:
        """Leave requests to whichever member leads; where this one does, answer them (BusError: not yet)."""
        if not leads.leading.is_set():
            async with self._answering:
                while self._requests:
                    await self._requests.pop().close()
            await leads.leading.wait()
        await self._answer_requests()

    async def consume(self) -> None:
        """Take requests from the durable queue until cancelled; each one ends exactly once."""
        subjects = self._topics.transfer_filter(self._instance)
        consumer = f"dst-{escape(self._instance)}"
        loop = asyncio.get_running_loop()
        worked_at = -IDLE_AFTER_S
        while True:
            try:
                if self._leads is not None:
                    await self._until_leading(self._leads)
                if not self._takes.is_set():
                    await self._takes.wait()
                    continue  # another may lead by now
                asked_at = loop.time()
                wait_s = IDLE_WAIT_S if asked_at - worked_at > IDLE_AFTER_S else FETCH_WAIT_S
                works = await self._bus.take_work(subjects, consumer=consumer, most=FETCH_MOST, wait_s=wait_s)
            except BusError as error:
                log.info("no work while the broker is away: %s", error)
                await asyncio.sleep(BUS_PAUSE_S)
                continue
            worked_at = loop.time() if works else worked_at
            for work in works:
                self._works.start(self._work(Claim(work, loop.time, asked_at)), name="request")

    async def close(self) -> None:
        """Stop hearing; requests that are being served go back to the queue by themselves."""
        for subscription in (*self._subscriptions, *self._requests):
            await subscription.close()
        await self._works.close()

    # ------------------------------------------------------------------------------------------------- durable path

    async def _work(self, claim: Claim) -> None:
        work = claim.work
        if claim.clock() - claim.signed_at > FETCH_WAIT_S:
            await claim.keep()  # it was asked for long ago, so little may be left of its time
        if not claim.stands or not self._may_take():
            await self._leave(claim)
            return
        try:
            if self._offers.is_deadly(work):
                self._offers.forgive(work, await self._destination.left_before(self._hash_in(work)))
            event, request = self._work_in(work)
            self._offers.note(work)
        except BusError as error:
            log.info("request on %s not judged while the broker is away: %s", work.delivery.subject, error)
            return
        except PeerError as error:
            await self._refuse_poison(work, error)
            await self._until_recorded(claim)
            await self._finish(claim)
            return
        self.statistics.requests += 1
        offer = Offer(event.header.t / 1e9, work.waited_s, work.attempt, queued=True)
        verdict, transfer = await self._recorder.spans.admitting(request, self._destination.request(request, offer))
        if verdict.verdict == "refused" and not self._may_take():
            await self._leave(claim)  # the others may take it: only who leads has a word to say about it
            return
        await self._destination.results.tell_verdict(request, verdict)
        if transfer and verdict.verdict == "accepted":
            while not await self._destination.results.ended(transfer, KEEP_S):
                await claim.keep()
            if self._destination.results.is_handed_back(transfer):  # it has ended here: so it never runs twice at once
                await claim.give_back()
                return
            await self._until_recorded(claim)
        await self._finish(claim)

    async def _leave(self, claim: Claim) -> None:
        """Give a request back that this member does not run; where it rests, that offer is not held against it.

        One rest costs it one offer at most, that of the wait for work which was under way when it began.
        """
        rests = claim.stands and not self._takes.is_set()
        await claim.give_back()
        if rests:
            self._recorder.event(left_step(self._hash_in(claim.work), claim.work.delivery.sequence))

    def _hash_in(self, work: Work) -> str:
        return self._topics.parse(work.delivery.subject).last

    def _may_take(self) -> bool:
        return self._takes.is_set() and (self._leads is None or self._leads.leading.is_set())

    def _work_in(self, work: Work) -> tuple[Event, TransferRequested]:
        """Return what the queue offers; PeerError where no delivery can mend it."""
        if self._offers.is_deadly(work):
            raise PeerError("request was offered too often to be looked at again", offers=work.attempt)
        event = self._decoded(work.delivery)
        request = self._request_in(event)
        self._check_subject(work.delivery, request)
        return event, request

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
        if not delivery.subject.endswith(f".{request.request_hash}"):  # the queue gives no others than this instance's
            raise PeerError("request hash and subject differ", subject=delivery.subject)

    async def _refuse_poison(self, work: Work, error: PeerError) -> None:
        """A request that no delivery can mend: it ends as a failed outcome, not in the stream for ever (P23)."""
        log.warning("request on %s refused: %s", work.delivery.subject, error)
        try:
            request_hash = self._hash_in(work)
        except PeerError:
            return
        transfer, text = f"refused-{request_hash}-{work.delivery.sequence}", str(error)[:2_000]
        request = self._readable(work)
        self._recorder.event(TransferStep(transfer=transfer, request_hash=request_hash, step="refused", text=text))
        outcome = TransferOutcome(
            transfer=transfer,
            request_hash=request_hash,
            source=request.source if request else UNREAD,
            destination=self._instance,
            outcome="failed",
            failure=FailureClass.BAD_REQUEST.name.lower(),
            reason=text,
        )
        self._recorder.event(outcome, cause=request.request_id if request else "")
        if request is not None:
            verdict = TransferVerdict(
                request_id=request.request_id, request_hash=request.request_hash, verdict="refused", reason=text
            )
            await self._destination.results.tell_verdict(request, verdict)

    def _readable(self, work: Work) -> TransferRequested | None:
        """Return a request that does not belong here but says who asks; None for what was not even read."""
        if self._offers.is_deadly(work):
            return None
        try:
            body = decode(work.delivery.data).body
        except PeerError:
            return None
        return body if isinstance(body, TransferRequested) else None

    async def _until_recorded(self, claim: Claim) -> None:
        """Wait until what came of a request stands in the facts: whoever takes it after a crash finds it there."""
        newest = self._recorder.queued_sequence
        while not await self._recorder.handled(newest, KEEP_S):
            await claim.keep()

    async def _finish(self, claim: Claim) -> None:
        await claim.finish()

    # ------------------------------------------------------------------------------------------------ request-reply

    async def _on_lease(self, delivery: Delivery) -> bytes:
        event = self._decoded(delivery)
        try:
            return await self._recorder.spans.lending(event, self._source.answer(event))
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
        answering = self._destination.request(request, Offer(event.header.t / 1e9))
        verdict, _transfer = await self._recorder.spans.admitting(request, answering)
        return self._encoded(verdict, event)

    async def _on_cancel(self, delivery: Delivery) -> bytes:
        event = self._decoded(delivery)
        if not isinstance(event.body, TransferCancelRequested):
            raise self._misplaced(event)
        said_s, text = event.header.t / 1e9, f"cancelled by {event.header.i}"
        stopped = self._destination.cancel(event.body.request_hash, text, said_unix_s=said_s)
        return self._encoded(StatsAnswered(counters={"cancelled": int(stopped)}), event)

    async def _on_cache(self, delivery: Delivery) -> bytes:
        event = self._decoded(delivery)
        body, cache = event.body, self._cache
        if cache is not None and isinstance(body, CacheAsked):
            return self._encoded(await cache.look(body), event)
        if cache is not None and isinstance(body, CacheChangeAsked):
            return self._encoded(await cache.change(body), event)
        raise self._misplaced(event)

    async def _on_stats(self, delivery: Delivery) -> bytes:
        event = self._decoded(delivery)
        if not isinstance(event.body, StatsAsked):
            raise self._misplaced(event)
        return self._encoded(StatsAnswered(counters=dict(self._counters())), event)

    async def _on_snapshot(self, delivery: Delivery) -> bytes:
        event = self._decoded(delivery)
        if not isinstance(event.body, SnapshotAsked):
            raise self._misplaced(event)
        return self._encoded(self._portrait.part(event.body, f"asked by {event.header.i}"), event)

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
        return self._recorder.encoded(body, event.header.event_id)
