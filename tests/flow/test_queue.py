"""The durable queue over a real broker: what it offers again, what nobody could end, and what is cancelled in it.

Instance b reads at 0.5 MB/s, so that its transfers can be seen running. The test plays whoever took a request before b,
or instead of it: it takes from b's own consumer.
"""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.bus_assets import WorkLimits, work_consumer
from kvbus.events import (
    LeaseGranted,
    TransferCancelRequested,
    TransferOutcome,
    TransferRequested,
    TransferVerdict,
    decode,
    encode,
)
from kvbus.names import request_hash, token_bytes
from kvbus.parts import Prompt
from kvbus.permissions import work_consumer_of
from kvbus.publisher import TransferHandle
from kvbus.roles.admitting import TRIES_MAX
from kvbus.roles.intake import FETCH_MOST
from kvbus.roles.offer_book import OFFERS_MAX
from kvbus.topics import Command
from kvbus.transport import Delivery, Stored, Work
from tests.flow.town import ANSWER_S, OUTCOME_S, TOPICS, Town, as_text, prompt, town
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

SLOW_BLOCKS = 36
"""2.4 MB at 0.5 MB/s."""
OFFER_S = 60.0
"""A request is offered again ten seconds after the last sign of life; six of those."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await asyncio.gather(
            running.start("a", backend="memory"),
            running.start("b", backend="memory", allow=["a"], rate_limit_bytes_s=500_000),
        )
        yield running


@dataclass(slots=True)
class Told:
    """What the destination says to a requester of the test's own."""

    verdicts: list[TransferVerdict] = field(default_factory=list)
    outcomes: list[TransferOutcome] = field(default_factory=list)

    async def __call__(self, delivery: Delivery) -> None:
        body = decode(delivery.data).body
        if isinstance(body, TransferVerdict):
            self.verdicts.append(body)
        elif isinstance(body, TransferOutcome):
            self.outcomes.append(body)


def request(name: str, blocks: int = 2, *, source: str = "a", destination: str = "b") -> TransferRequested:
    asked = Prompt(tokens=token_bytes(prompt(name, blocks)))
    return TransferRequested(
        request_id=f"{name}.{time.time_ns()}",
        request_hash=request_hash(model="", salt="", source=source, prompt=asked.canonical()),
        requester="tester",
        source=source,
        destination=destination,
        prompt=asked,
    )


async def queue(pair: Town, asked: TransferRequested, data: bytes = b"", request_hash_: str = "") -> str:
    subject = TOPICS.transfer("b", request_hash_ or asked.request_hash)
    stored = await pair.bus.store(subject, data or pair.encoded(asked), message_id=asked.request_id)
    assert isinstance(stored, Stored), stored
    return subject


async def b_killed(pair: Town) -> None:
    """End b, and see that the broker knows it: what is queued from now on is offered to nobody who is dead."""
    pair.workers["b"].kill()

    async def nobody_waits() -> bool:
        answer = await pair.bus.ask(f"$JS.API.CONSUMER.INFO.KVB_TRANSFER.{work_consumer_of('b')}", b"", wait_s=ANSWER_S)
        return bool(json.loads(answer).get("num_waiting", 0) == 0)  # it may have died before it asked for work at all

    await until(nobody_waits, what="the broker has noticed that b is gone")


async def take(pair: Town, wait_s: float = OFFER_S) -> Work:
    """Take the one request that b's queue offers, as a member of b would."""
    consumer = work_consumer_of("b")
    (work,) = await pair.bus.take_work(TOPICS.transfer_filter("b"), consumer=consumer, most=1, wait_s=wait_s)
    return work


async def is_queued(pair: Town, subject: str) -> bool:
    """Whether the queue holds a request on this subject, running or not."""
    question = json.dumps({"subjects_filter": subject}).encode()
    answer = json.loads(await pair.bus.ask("$JS.API.STREAM.INFO.KVB_TRANSFER", question, wait_s=ANSWER_S))
    return subject in (answer["state"].get("subjects") or {})


async def left(pair: Town, subject: str) -> None:
    """Wait until the queue holds nothing on this subject."""

    async def free() -> bool:
        return not await is_queued(pair, subject)

    await until(free, OFFER_S, what=f"{subject} is free")


async def outcomes(pair: Town, hash_: str) -> list[TransferOutcome]:
    bodies = [event.body for event in await pair.events("b")]
    return [body for body in bodies if isinstance(body, TransferOutcome) and body.request_hash == hash_]


async def offered_and_dropped(pair: Town, times: int) -> None:
    """Play so many runs of b that took the request and died."""
    for number in range(times):
        work = await take(pair)
        assert work.attempt == number + 1
        await work.give_back(0.01)


# P23
@pytest.mark.contract("P23")
async def test_a_request_that_nobody_lived_to_end_ends_as_failed_and_leaves_the_queue(pair: Town) -> None:
    await b_killed(pair)
    told, asked = Told(), request("deadly")
    subscription = await pair.bus.subscribe(TOPICS.result("tester"), told)
    subject = await queue(pair, asked)
    await offered_and_dropped(pair, TRIES_MAX)

    await pair.start_again("b")

    await until(lambda: told.outcomes, OFFER_S, what="the requester is told")
    await subscription.close()
    (outcome,) = told.outcomes
    assert (outcome.outcome, outcome.failure) == ("failed", "exhausted")
    assert f"offered it {TRIES_MAX + 1} times" in outcome.reason
    assert [(one.verdict, one.transfer) for one in told.verdicts] == [("accepted", outcome.transfer)]
    await left(pair, subject)  # and so its end stands in the facts
    assert await outcomes(pair, asked.request_hash) == [outcome]
    rows = [event.body for event in await pair.events("b")]
    assert not [row for row in rows if isinstance(row, LeaseGranted) and row.transfer == outcome.transfer]
    again = await pair.stage(prompt("deadly", 2))  # the place is free, and its hash is not held against it
    assert again.outcome == "settled"
    await left(pair, subject)
    await pair.at_rest()


# P23
async def test_a_request_that_even_the_refusal_does_not_end_leaves_the_queue_unread(pair: Town) -> None:
    await b_killed(pair)
    asked = request("deadlier")
    subject = await queue(pair, asked)
    await offered_and_dropped(pair, OFFERS_MAX)

    await pair.start_again("b")

    refused = await pair.step("b", asked.request_hash, "refused")
    assert "offered too often" in refused.text
    await left(pair, subject)
    assert [(one.outcome, one.source) for one in await outcomes(pair, asked.request_hash)] == [("failed", "?")]


# P23
@pytest.mark.parametrize("fault", ["another hash", "another destination", "no message"])
async def test_a_poisoned_request_ends_as_failed_and_its_requester_hears_it(pair: Town, fault: str) -> None:
    told = Told()
    subscription = await pair.bus.subscribe(TOPICS.result("tester"), told)
    asked = request(f"poison {fault}", destination="c" if fault == "another destination" else "b")
    forged = asked.model_copy(update={"request_hash": "f" * 32})
    data = {"another hash": pair.encoded(forged), "no message": b"\xff\xff"}.get(fault, pair.encoded(asked))
    subject = await queue(pair, asked, data, "f" * 32 if fault == "another hash" else "")
    hash_ = subject.rpartition(".")[2]

    await left(pair, subject)
    await subscription.close()

    (outcome,) = await outcomes(pair, hash_)
    assert (outcome.outcome, outcome.failure) == ("failed", "bad_request")
    readable = fault != "no message"
    assert outcome.source == ("a" if readable else "?")
    assert [(one.verdict, one.reason) for one in told.verdicts] == [("refused", outcome.reason)] * readable
    await pair.at_rest()


# P22
@pytest.mark.contract("P22")
async def test_a_request_that_ended_before_its_member_died_is_told_again_and_not_run(pair: Town) -> None:
    ids = prompt("ended, not taken off", 2)
    await b_killed(pair)
    told, asked = Told(), request("ended, not taken off")
    subject = await queue(pair, asked)
    assert (await take(pair)).attempt == 1  # the run that took it ends it, tells it, and dies before its last word
    ended = TransferOutcome(
        transfer="b-00000001-1",
        request_hash=asked.request_hash,
        source="a",
        destination="b",
        outcome="settled",
        pages_wanted=2,
        pages_moved=2,
    )
    header = pair.header(ended, speaker="b", member="m0", epoch=1).model_copy(update={"c": asked.request_id})
    assert isinstance(await pair.bus.store(TOPICS.facts("b"), encode(header, ended), message_id="ended"), Stored)
    subscription = await pair.bus.subscribe(TOPICS.result("tester"), told)

    await pair.start_again("b")

    await until(lambda: told.outcomes, OFFER_S, what="the outcome is told again")
    await subscription.close()
    assert told.outcomes == [ended]
    assert [(one.verdict, one.transfer) for one in told.verdicts] == [("accepted", ended.transfer)]
    await left(pair, subject)
    assert (await pair.stats("b"))["fired"] == 0
    assert await pair.held("b", ids) == 0


# P20
@pytest.mark.contract("P20")
async def test_a_member_that_stood_still_leaves_its_request_to_whoever_took_it_meanwhile(pair: Town) -> None:
    handle = await pair.ask(prompt("stood still", SLOW_BLOCKS))
    assert (await handle.verdict()).verdict == "accepted"
    await pair.step("b", handle.request_hash, "moving")
    subject = TOPICS.transfer("b", handle.request_hash)

    pair.workers["b"].signal(signal.SIGSTOP)
    successor = await take(pair)  # ten seconds without a sign of life: it is offered again
    assert successor.attempt == 2
    pair.workers["b"].signal(signal.SIGCONT)
    outcome = await handle.outcome(OUTCOME_S)
    assert outcome is not None

    def has_spoken() -> bool:
        return f"request on {subject} not taken off the queue" in pair.workers["b"].log.read_text()

    await until(has_spoken, OFFER_S, what="b leaves it to whoever was offered it since")
    assert await is_queued(pair, subject)
    await successor.finish()
    await left(pair, subject)


# contract 49
async def test_a_request_that_is_cancelled_in_the_queue_ends_as_cancelled_and_a_later_one_runs(pair: Town) -> None:
    ids = prompt("cancelled in the queue", 2)
    told, asked = Told(), request("cancelled in the queue")
    subscription = await pair.bus.subscribe(TOPICS.result("tester"), told)
    header = pair.header(asked)  # it was sent before the cancel, and comes behind it
    body = TransferCancelRequested(request_hash=asked.request_hash)
    answer = await pair.bus.request(TOPICS.command("b", Command.CANCEL), pair.encoded(body), wait_s=ANSWER_S)
    assert isinstance(answer, bytes)

    await queue(pair, asked, encode(header, asked))

    await until(lambda: told.outcomes, OFFER_S, what="the requester is told")
    await subscription.close()
    (outcome,) = told.outcomes
    assert (outcome.outcome, outcome.failure) == ("cancelled", "cancelled")
    assert outcome.reason == "cancelled by tester"
    assert await pair.held("b", ids) == 0
    assert (await pair.stage(ids)).outcome == "settled"
    await pair.at_rest()


# contract 49
async def test_a_request_that_is_cancelled_while_it_waits_for_another_ends_at_once(pair: Town) -> None:
    ids = prompt("waits", SLOW_BLOCKS)
    first = await pair.ask(ids)
    await pair.step("b", first.request_hash, "moving")
    second = await pair.ask(as_text(ids))
    await pair.step("b", second.request_hash, "waiting")

    assert await pair.publisher.cancel(second.request_hash, "b")
    cancelled = await second.outcome(OUTCOME_S)

    assert cancelled is not None
    assert (cancelled.outcome, cancelled.pages_moved) == ("cancelled", 0)
    assert not first_ended(first)
    outcome = await first.outcome(OUTCOME_S)
    assert outcome is not None
    assert (outcome.outcome, outcome.pages_moved) == ("settled", SLOW_BLOCKS)
    await pair.at_rest()


def first_ended(handle: TransferHandle) -> bool:
    """Whether a transfer's outcome has come."""
    return handle._outcome.done()


# P23, P24
async def test_the_queue_offers_without_end_and_holds_more_than_may_run_also_where_an_older_consumer_stood(
    pair: Town,
) -> None:
    filter_, consumer = TOPICS.transfer_filter("c"), work_consumer_of("c")
    old = {**work_consumer(consumer, filter_, WorkLimits()), "max_deliver": 3}
    asked = json.dumps({"stream_name": "KVB_TRANSFER", "config": old}).encode()
    create = f"$JS.API.CONSUMER.CREATE.KVB_TRANSFER.{consumer}.{filter_}"
    made = json.loads(await pair.bus.ask(create, asked, wait_s=ANSWER_S))
    assert made["config"]["max_deliver"] == 3

    await pair.start("c", backend="memory", allow=["a"], inflight_max=7)
    assert (await pair.stage(prompt("older consumer", 2), destination="c")).outcome == "settled"

    told = await pair.bus.ask(f"$JS.API.CONSUMER.INFO.KVB_TRANSFER.{consumer}", b"", wait_s=ANSWER_S)
    found = json.loads(told)["config"]
    assert (found["max_deliver"], found["max_ack_pending"]) == (-1, 7 + FETCH_MOST)
    await pair.at_rest("c")
