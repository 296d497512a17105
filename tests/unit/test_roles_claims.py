"""A member speaks about a delivery of the queue only while no other can have been made, and only while it leads."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED, WorkLimits
from kvbus.errors import BusError
from kvbus.events import Header, TransferRequested, TransferVerdict, encode
from kvbus.names import request_hash
from kvbus.parts import Prompt
from kvbus.roles.admitting import Offer
from kvbus.roles.claims import CLAIM_S, CONFIRMED_S, KEEP_S, Claim
from kvbus.roles.intake import Intake
from kvbus.roles.offer_book import OFFERS_MAX, OfferBook
from kvbus.roles.recorder import Recorder
from kvbus.testing.bus import MemoryBroker
from kvbus.topics import Command, Topics
from kvbus.transport import Bus, NoAnswer, NotStored, Stored, Work
from tests.waiting import until

TOPICS = Topics()
SUBJECT = TOPICS.transfer("b", "0" * 32)
WORK, PATIENT = WorkLimits(ack_wait_s=1.0), WorkLimits(ack_wait_s=120.0)


@pytest.fixture(params=["nats", "memory"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    """A bus whose queue offers a request again after a second."""
    if request.param == "memory":
        yield MemoryBroker(work=WORK).connect()
        return
    async with EmbeddedBroker.started(tmp_path / "broker") as broker:
        made = await NatsBus.connect(broker.url, name="t", token=broker.token, limits=EMBEDDED, work=WORK)
        await made.ensure_assets()
        yield made
        await made.close()


class Clock:
    """A member's own clock, as it would go."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def take(bus: Bus, wait_s: float = 10.0) -> Work:
    (work,) = await bus.take_work(TOPICS.transfer_filter("b"), consumer="dst-b", most=1, wait_s=wait_s)
    return work


async def take_from_a_broker_that_came_back(bus: Bus) -> Work:
    """It takes connections before it has its consumers."""
    taken: list[Work] = []

    async def is_taken() -> bool:
        with contextlib.suppress(BusError):
            taken.extend(await bus.take_work(TOPICS.transfer_filter("b"), consumer="dst-b", most=1, wait_s=5.0))
        return bool(taken)

    await until(is_taken, what="the request is offered")
    return taken[0]


async def is_queued(bus: Bus) -> bool:
    return await bus.queued(TOPICS.transfer_filter("b")) == 1


async def claimed(bus: Bus) -> tuple[Claim, Clock]:
    assert isinstance(await bus.store(SUBJECT, b"x", message_id="x"), Stored)
    clock = Clock()
    return Claim(await take(bus), clock, clock()), clock


async def test_a_claim_that_stands_takes_its_request_off_the_queue(bus: Bus) -> None:
    claim, clock = await claimed(bus)
    clock.now += CLAIM_S - 0.1
    await claim.finish()
    assert not await is_queued(bus)
    assert isinstance(await bus.store(SUBJECT, b"y", message_id="y"), Stored)


# P20
@pytest.mark.contract("P20")
async def test_a_claim_that_may_be_anothers_says_nothing_and_the_request_stays_with_its_next_holder(bus: Bus) -> None:
    claim, clock = await claimed(bus)
    second = await take(bus)  # nothing was said for a second: the broker has made another delivery
    assert second.attempt == 2
    clock.now += CLAIM_S
    assert not claim.stands
    await claim.keep()
    await claim.finish()
    await claim.give_back()
    assert await is_queued(bus)
    assert await bus.store(SUBJECT, b"y", message_id="y") == NotStored("pending")
    await second.finish()
    assert not await is_queued(bus)


@dataclass
class Late:
    """Work whose words are under way for a while."""

    work: Work
    clock: Clock
    under_way_s: float
    said: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> object:
        return getattr(self.work, name)

    async def keep(self) -> None:
        self.said.append("keep")
        await self.work.keep()
        self.clock.now += self.under_way_s

    async def finish(self) -> None:
        self.said.append("finish")
        await self.work.finish()


# P20
@pytest.mark.parametrize(("under_way_s", "said"), [(0.1, ["keep", "finish"]), (3.5, ["keep"])])
async def test_a_last_word_that_could_come_after_the_next_offer_waits_for_a_sign_of_life_that_came_before_it(
    bus: Bus, under_way_s: float, said: list[str]
) -> None:
    # Planted fault that this catches: whatever is confirmed lengthens the claim, or a claim that stands says all.
    claim, clock = await claimed(bus)
    late = Late(claim.work, clock, under_way_s)
    claim.work = late  # type: ignore[assignment] # it hands on what it does not say itself
    clock.now += CONFIRMED_S - 3.0
    assert claim.stands
    await claim.finish()
    assert late.said == said
    assert await is_queued(bus) == ("finish" not in said)


# P20
async def test_the_queue_itself_would_take_the_stale_word(bus: Bus) -> None:
    """Why a claim has to end by itself: the broker asks nobody which delivery a word is about."""
    claim, _ = await claimed(bus)
    await take(bus)
    await claim.work.finish()
    assert not await is_queued(bus)


async def test_a_sign_of_life_lengthens_a_claim_from_when_it_was_sent(bus: Bus) -> None:
    claim, clock = await claimed(bus)
    clock.now += KEEP_S
    await claim.keep()
    stood = []
    for step_s in (CLAIM_S - 0.1, 0.2):
        clock.now += step_s
        stood.append(claim.stands)
    await claim.keep()  # too late: another may hold it
    assert [*stood, claim.stands] == [True, False, False]


async def test_a_sign_of_life_that_the_broker_does_not_confirm_lengthens_nothing(
    broker: EmbeddedBroker,
) -> None:
    bus = await NatsBus.connect(broker.url, name="t", token=broker.token, limits=EMBEDDED, work=WORK)
    await bus.ensure_assets()
    claim, clock = await claimed(bus)
    broker.kill()
    await until(lambda: not bus.health().connected)
    clock.now += KEEP_S
    await claim.keep()
    await claim.finish()  # neither does it raise, nor is it heard
    clock.now += CLAIM_S - KEEP_S
    assert not claim.stands
    await broker.start()
    await until(lambda: bus.health().connected)
    assert await is_queued(bus)
    # The broker was killed, so it may have forgotten that it offered the request before: which attempt this is says
    # nothing, but it is offered.
    await (await take_from_a_broker_that_came_back(bus)).finish()
    assert not await is_queued(bus)
    await bus.close()


@pytest.fixture
async def patient(broker: EmbeddedBroker) -> AsyncIterator[NatsBus]:
    """A bus whose queue waits two minutes before it offers a request again by itself."""
    made = await NatsBus.connect(broker.url, name="t", token=broker.token, limits=EMBEDDED, work=PATIENT)
    await made.ensure_assets()
    yield made
    await made.close()


async def test_a_request_that_is_given_back_is_offered_again_long_before_its_time(patient: NatsBus) -> None:
    claim, _ = await claimed(patient)
    await claim.give_back()
    assert (await take(patient, wait_s=60)).attempt == 2


class Leading:
    """A member that leads when it asks for requests, and does not any more when they come."""

    def __init__(self) -> None:
        self.leading = asyncio.Event()
        self.leading.set()


async def waits_at_the_queue(bus: NatsBus) -> bool:
    """Whether somebody waits for what the queue of b offers."""
    try:
        told = json.loads(await bus.ask("$JS.API.CONSUMER.INFO.KVB_TRANSFER.dst-b", b"", wait_s=5))
    except BusError:
        return False
    return bool(told.get("num_waiting"))


# P20
async def test_a_member_that_lost_its_lead_gives_back_what_it_took_and_says_nothing(patient: NatsBus) -> None:
    recorder = Recorder(bus=patient, topics=TOPICS, instance="b", member="m0", epoch=1, unix_ns=lambda: 1)
    leads = Leading()
    parts = {"destination": None, "source": None, "portrait": None}  # whoever asks one of them fails
    intake = Intake(
        bus=patient, topics=TOPICS, instance="b", member="m0", recorder=recorder, counters=dict, leads=leads,
        **parts,  # type: ignore[arg-type]
    )  # fmt: skip
    await intake._until_leading(leads)
    taking = asyncio.create_task(intake.consume())
    await until(lambda: waits_at_the_queue(patient), what="it waits for the queue")
    leads.leading.clear()
    assert isinstance(await patient.store(SUBJECT, b"x", message_id="x"), Stored)

    again = await take(patient, wait_s=60)  # as whoever leads now does; the first one stands back

    assert again.attempt == 2
    assert intake.statistics.requests == 0
    assert recorder.queued_bytes == 0
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    await intake.close()


# P23
async def test_offers_that_a_run_lived_to_see_do_not_count_against_a_request() -> None:
    """A transfer that runs for long through many outages is offered again and again, to the run that brings it."""
    bus, offers = MemoryBroker().connect(), OfferBook()
    assert isinstance(await bus.store(SUBJECT, b"x", message_id="x"), Stored)
    deadly: list[bool] = []
    for offer in range(1, 3 * OFFERS_MAX):
        work = await take(bus)
        assert work.attempt == offer
        deadly.append(offers.is_deadly(work))
        if offer >= 3:  # until then other runs took it
            offers.note(work)
        await work.give_back(0.0)
    assert not any(deadly)
    stranger, work = OfferBook(), await take(bus)
    assert stranger.is_deadly(work)  # a run that has not seen it yet leaves it alone
    stranger.forgive(work, work.attempt - OFFERS_MAX)
    assert not stranger.is_deadly(work)  # unless former runs are known to have left it to the next one
    stranger.forgive(work, work.attempt - OFFERS_MAX - 1)
    assert stranger.is_deadly(work)
    await bus.close()


class Stopping:
    """A destination whose one transfer runs until it is told to end, and is then handed back."""

    def __init__(self) -> None:
        self.results = self
        self.runs = 0
        self.over = asyncio.Event()

    async def request(self, request: TransferRequested, offer: Offer) -> tuple[TransferVerdict, str]:
        assert offer.queued
        self.runs += 1
        verdict = TransferVerdict(
            request_id=request.request_id, request_hash=request.request_hash, verdict="accepted", transfer="b-1"
        )
        return verdict, "b-1"

    async def tell_verdict(self, request: TransferRequested, verdict: TransferVerdict) -> None:
        """Nobody listens."""

    async def ended(self, transfer: str, wait_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(wait_s, 0.05)):  # in short turns: each of them may do something wrong
                await self.over.wait()
        return self.over.is_set() and transfer == "b-1"

    def is_handed_back(self, transfer: str) -> bool:
        return self.over.is_set() and transfer == "b-1"


# P20, P22
async def test_a_request_goes_back_to_the_queue_only_once_its_transfer_has_ended_and_rest_takes_no_other() -> None:
    broker = MemoryBroker()
    bus, other = broker.connect(), broker.connect()
    recorder = Recorder(bus=bus, topics=TOPICS, instance="b", member="m0", epoch=1, unix_ns=lambda: 1)
    parts = {"destination": (stopping := Stopping()), "source": None, "portrait": None}
    intake = Intake(
        bus=bus, topics=TOPICS, instance="b", member="m0", recorder=recorder, counters=dict,
        **parts,  # type: ignore[arg-type]
    )  # fmt: skip
    prompt = Prompt(tokens=b"\0\0\0\0")
    hash_ = request_hash(model="", salt="", source="a", prompt=prompt.canonical())
    asked = TransferRequested(
        request_id="r.1", request_hash=hash_, requester="r", source="a", destination="b", prompt=prompt
    )
    await intake._answer_requests()
    taking = asyncio.create_task(intake.consume())
    data = encode(Header(k=asked.KIND, i="r", s=1, t=1), asked)
    assert isinstance(await bus.store(TOPICS.transfer("b", hash_), data, message_id="r.1"), Stored)
    await until(lambda: stopping.runs == 1)

    await intake.rest()
    assert await intake.flush(0.2) == intake.in_hand == 1  # it runs, so it is nobody else's
    assert await other.take_work(TOPICS.transfer_filter("b"), consumer="dst-b", most=1, wait_s=1.0) == []
    answer = await other.request(TOPICS.command("b", Command.TRANSFER), data, wait_s=1)
    assert answer == NoAnswer("nobody_listens")  # so a repeat is not refused what will be run
    stopping.over.set()
    (again,) = await other.take_work(TOPICS.transfer_filter("b"), consumer="dst-b", most=1, wait_s=30)
    # The wait for work that was under way when it began to rest may have been offered it once more, and left it.
    assert again.attempt in {2, 3}
    assert stopping.runs == 1
    await again.finish()

    await intake.resume()
    assert isinstance(await bus.store(TOPICS.transfer("b", hash_), data, message_id="r.2"), Stored)
    await until(lambda: stopping.runs == 2)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    await intake.close()
    await bus.close()
    await other.close()
