"""A member that rests leaves requests to others and to its next run, whoever leads, whatever it is told meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from kvbus.config import WorkerSettings
from kvbus.draining import DrainAnswered, DrainAsked
from kvbus.events import Header, TransferStep, decode, decode_all, encode
from kvbus.parts import Body
from kvbus.roles.admitting import LEFT
from kvbus.roles.assembly import Parts
from kvbus.roles.draining import DRAINED, DRAINING, LEAVING, Drain
from kvbus.roles.intake import Intake
from kvbus.roles.offer_book import OFFERS_MAX
from kvbus.roles.recorder import Recorder
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Command, Topics
from kvbus.transport import NoAnswer, Responder, Stored, Subscription, Work
from kvbus.worker import Worker
from tests.waiting import until

TOPICS = Topics()
HASH = "0" * 32
TRANSFER, CANCEL = (TOPICS.command("b", what) for what in (Command.TRANSFER, Command.CANCEL))


class SlowBus(MemoryBus):
    """A connection whose subscriptions wait for the broker while `answers` is not set."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.answers = asyncio.Event()
        self.answers.set()
        self.waits_for_work = False

    async def take_work(self, subject_filter: str, *, consumer: str, most: int, wait_s: float) -> Sequence[Work]:
        self.waits_for_work = True
        return await super().take_work(subject_filter, consumer=consumer, most=most, wait_s=wait_s)

    async def respond(self, subject: str, responder: Responder) -> Subscription:
        await self.answers.wait()
        return await super().respond(subject, responder)


class Leading:
    """A member of several, which leads when a test says so."""

    def __init__(self) -> None:
        self.leading = asyncio.Event()


@dataclass
class Resting:
    """One member's intake, with nothing behind it: whoever looked at a request would fail."""

    leads: Leading | None = None
    broker: MemoryBroker = field(default_factory=MemoryBroker)

    def __post_init__(self) -> None:
        self.bus = SlowBus(self.broker)
        self.recorder = Recorder(bus=self.bus, topics=TOPICS, instance="b", member="m0", epoch=1, unix_ns=lambda: 1)
        parts = {"destination": None, "source": None, "portrait": None}
        self.intake = Intake(
            bus=self.bus, topics=TOPICS, instance="b", member="m0", recorder=self.recorder, counters=dict,
            leads=self.leads, **parts,  # type: ignore[arg-type]
        )  # fmt: skip
        self.tasks: list[asyncio.Task[None]] = []

    def spawn(self) -> None:
        self.tasks += [asyncio.create_task(self.intake.consume()), asyncio.create_task(self.recorder.run())]

    async def steps(self) -> list[TransferStep]:
        """The steps that it has told."""
        found = await self.bus.history(TOPICS.facts("b"))
        events = [event for delivery in found for event in decode_all(delivery.data)]
        return [body for event in events if isinstance(body := getattr(event, "body", None), TransferStep)]

    def hears(self, subject: str) -> int:
        """How many subscriptions of this member answer a subject."""
        return sum(one.subject_filter == subject for one in self.broker.listeners)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.intake.close()
        await self.bus.close()


@pytest.fixture
async def member() -> AsyncIterator[Resting]:
    made = Resting()
    await made.intake._answer_requests()
    yield made
    await made.close()


async def test_a_resting_member_that_comes_to_lead_answers_cancels_and_takes_no_request_until_it_resumes() -> None:
    leads = Leading()
    one = Resting(leads)
    await one.intake.rest()
    one.spawn()
    assert isinstance(await one.bus.store(TOPICS.transfer("b", HASH), b"x", message_id="x"), Stored)
    leads.leading.set()
    await until(lambda: one.hears(CANCEL) == 1)
    assert one.hears(TRANSFER) == 0
    (work,) = await one.bus.take_work(TOPICS.transfer_filter("b"), consumer="other", most=1, wait_s=5.0)
    assert work.attempt == 1  # the member that rests was offered nothing
    await work.finish()

    await one.intake.resume()
    await until(lambda: one.hears(TRANSFER) == 1)
    assert one.hears(CANCEL) == 1
    await one.close()


async def test_a_request_that_a_wait_for_work_brings_to_a_resting_member_is_told_to_be_left(member: Resting) -> None:
    member.spawn()
    await until(lambda: bool(member.tasks) and member.hears(TRANSFER) == 1)
    await until(lambda: member.bus.waits_for_work)
    await member.intake.rest()
    assert isinstance(await member.bus.store(TOPICS.transfer("b", HASH), b"x", message_id="x"), Stored)

    await until(member.steps, what="it says that it left a request")
    (step,) = await member.steps()
    assert (step.step, step.request_hash) == (LEFT, HASH)
    (work,) = await member.bus.take_work(TOPICS.transfer_filter("b"), consumer="other", most=1, wait_s=5.0)
    assert work.attempt == 2


async def test_a_member_that_is_told_to_rest_while_it_resumes_rests(member: Resting) -> None:
    await member.intake.rest()
    member.bus.answers.clear()
    resuming = asyncio.create_task(member.intake.resume())
    await asyncio.wait({resuming}, timeout=0.05)
    resting = asyncio.create_task(member.intake.rest())
    await asyncio.wait({resting}, timeout=0.05)
    member.bus.answers.set()
    await asyncio.gather(resuming, resting)
    assert (member.hears(TRANSFER), member.hears(CANCEL)) == (0, 1)
    assert not member.intake._may_take()


def draining(member: Resting, **counts: int) -> tuple[Drain, SimpleNamespace]:
    """The drain of a member whose other parts hold what a test says."""

    async def tell() -> None:
        """Nobody listens."""

    nothing = {"held": 0, "running": 0, "unconfirmed": 0, "computing": 0} | counts
    holder = SimpleNamespace(statistics=lambda: SimpleNamespace(held=nothing["held"]), held=lambda: ())
    parts = SimpleNamespace(
        intake=member.intake,
        destination=SimpleNamespace(closed="", running=nothing["running"]),
        source=SimpleNamespace(computing=nothing["computing"], stop_lending=lambda: None, lend_again=lambda: None),
        asker=SimpleNamespace(unconfirmed=nothing["unconfirmed"], awaited=nothing["unconfirmed"]),
        rounds=SimpleNamespace(holder=holder),
        presence=SimpleNamespace(state="", tell=tell),
    )
    return Drain(member.bus, TOPICS, member.recorder, ("b", "m0"), parts), parts


async def ask(member: Resting, body: Body) -> DrainAnswered:
    data = encode(Header(k=body.KIND, i="operator", s=1, t=1), body)
    answer = await member.bus.request(TOPICS.command("b", Command.DRAIN, "m0"), data, wait_s=10)
    assert not isinstance(answer, NoAnswer)
    answered = decode(answer).body
    assert isinstance(answered, DrainAnswered)
    return answered


async def test_an_undo_that_is_under_way_when_a_worker_is_told_to_stop_takes_nothing_again(member: Resting) -> None:
    drain, parts = draining(member)
    await drain.listen()
    assert (await ask(member, DrainAsked(action="drain", requests="keep"))).state == DRAINED
    member.bus.answers.clear()
    undone = asyncio.create_task(ask(member, DrainAsked(action="undo")))
    await until(lambda: not parts.destination.closed)
    stopping = asyncio.create_task(drain.stop("draining: b is shutting down"))
    await asyncio.wait({stopping}, timeout=0.05)
    member.bus.answers.set()
    await stopping
    assert (await undone).state == LEAVING
    assert parts.destination.closed
    assert not member.intake._may_take()
    assert member.hears(TRANSFER) == 0
    await drain.close()


async def test_a_member_whose_source_still_computes_for_a_reader_is_not_drained(member: Resting) -> None:
    drain, parts = draining(member, computing=1)
    await drain.listen()
    assert (await ask(member, DrainAsked(action="drain"))).state == DRAINING
    parts.source.computing = 0
    assert (await ask(member, DrainAsked())).state == DRAINED
    await drain.close()


# P23
@pytest.mark.parametrize("left", [0, 1])
async def test_a_request_that_runs_left_to_the_next_one_is_looked_at_however_often_it_was_offered(
    member: Resting, left: int
) -> None:
    async def left_before(request_hash: str) -> int:
        assert request_hash == HASH
        return left

    member.intake._destination = SimpleNamespace(left_before=left_before)  # type: ignore[assignment]
    assert isinstance(await member.bus.store(TOPICS.transfer("b", HASH), b"x", message_id="x"), Stored)
    for _ in range(OFFERS_MAX):
        (work,) = await member.bus.take_work(TOPICS.transfer_filter("b"), consumer="other", most=1, wait_s=5.0)
        await work.give_back(0.0)
    member.spawn()

    async def refused() -> list[TransferStep]:
        return [step for step in await member.steps() if step.step == "refused"]

    await until(refused)
    (step,) = await refused()
    assert ("offered too often" in step.text) == (not left)  # else it is read, and is no message


class Ending(Worker):
    """A worker without parts of its own, at its end."""

    faults: ClassVar[list[bool]] = []

    async def _end_traffic(self, parts: Parts, *, fault: bool) -> None:
        del parts
        self.faults.append(fault)

    async def _shut_holder(self, parts: Parts) -> None:
        """Nothing is held."""

    async def _stop_listening(self, parts: Parts, tasks: dict[str, asyncio.Task[None]]) -> None:
        """Nobody is heard."""


@pytest.mark.parametrize("told", [True, False])
async def test_a_worker_that_ends_without_having_been_told_to_ends_by_a_fault(tmp_path: Path, told: bool) -> None:  # noqa: FBT001
    async def flush(wait_s: float) -> bool:
        return wait_s > 0

    parts = SimpleNamespace()
    base = SimpleNamespace(recorder=SimpleNamespace(flush=flush), watch=SimpleNamespace(close=lambda: None))
    settings = WorkerSettings(instance="b", nats_url="nats://127.0.0.1:1", run_dir=tmp_path)
    worker = Ending(settings, MemoryBus(), print, parts)  # type: ignore[arg-type]
    if told:
        worker.stop()
    await worker._close(base, {})  # type: ignore[arg-type]
    assert worker.faults.pop() == (not told)
