"""Workers whose requesters and readers speak a later version of the wire, over a real broker."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.events import (
    LeaseReleased,
    LendAnswered,
    LendRequested,
    ReaderKey,
    ReleaseConfirmed,
    TransferRequested,
    TransferVerdict,
    decode,
)
from kvbus.names import request_hash, token_bytes
from kvbus.parts import Body, Prompt
from kvbus.processes import identity
from kvbus.topics import Command
from kvbus.transport import NoAnswer, Stored
from tests.flow.town import ANSWER_S, OUTCOME_S, TOPICS, Town, prompt, town
from tests.versions import later_major, later_minor, unknown_kind
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = ReaderKey(instance="tester", member="m0", epoch=77, transfer="t", attempt=1, rank=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await asyncio.gather(running.start("a", backend="memory"), running.start("b", backend="memory", allow=["a"]))
        yield running


def request(name: str) -> TransferRequested:
    asked = Prompt(tokens=token_bytes(prompt(name, 2)))
    return TransferRequested(
        request_id=f"tester.{time.time_ns()}",
        request_hash=request_hash(model="", salt="", source="a", prompt=asked.canonical()),
        requester="tester",
        source="a",
        destination="b",
        prompt=asked,
    )


async def queue(pair: Town, asked: TransferRequested, data: bytes) -> None:
    stored = await pair.bus.store(TOPICS.transfer("b", asked.request_hash), data, message_id=asked.request_id)
    assert isinstance(stored, Stored)


async def to_source(
    pair: Town, version: Callable[[bytes], bytes], body: Body, *, wait_s: float = ANSWER_S
) -> bytes | NoAnswer:
    """What the source answers to a message of a reader of that version."""
    data = version(pair.encoded(body, member="m0", epoch=KEY.epoch))
    return await pair.bus.request(TOPICS.command("a", Command.LEASE, "m0"), data, wait_s=wait_s)


async def is_served(pair: Town, name: str) -> None:
    """A request of this version is served, whatever came before it."""
    outcome = await pair.stage(prompt(name, 2))
    assert (outcome.outcome, outcome.pages_moved) == ("settled", 2)
    await pair.at_rest()


async def test_a_request_of_a_later_minor_version_is_served_from_the_queue(pair: Town) -> None:
    asked = request("later minor")
    await queue(pair, asked, later_minor(pair.encoded(asked)))

    async def staged() -> bool:
        return await pair.held("b", prompt("later minor", 2)) == 2

    await until(staged, OUTCOME_S, what="the prompt is at b")
    await pair.at_rest()


async def test_questions_of_a_later_minor_version_are_answered(pair: Town) -> None:
    asked = request("asked directly")
    said = later_minor(pair.encoded(asked))
    data = await pair.bus.request(TOPICS.command("b", Command.TRANSFER), said, wait_s=ANSWER_S)
    assert isinstance(data, bytes)
    verdict = decode(data).body
    assert isinstance(verdict, TransferVerdict)
    assert verdict.verdict == "accepted"
    await pair.at_rest()

    question = LendRequested(
        key=KEY,
        nonce=b"n" * 16,
        fingerprint=pair.registered["a"].record.fingerprint,
        names=b"m" * 16,
        first_block=0,
        on_miss="fail",
        budget_s=5.0,
        wait_s=0.5,
        process=identity(),
        transports=("memory",),
    )
    answers = [await to_source(pair, later_minor, body) for body in (question, LeaseReleased(key=KEY, nonce=b"n" * 16))]
    lent, released = (decode(answer).body for answer in answers if isinstance(answer, bytes))
    assert isinstance(lent, LendAnswered)
    assert lent.status == "refused"
    assert lent.reason.startswith("a holds 0 of the 1 blocks")
    assert isinstance(released, ReleaseConfirmed)
    await pair.at_rest()


async def test_a_request_of_a_later_major_version_leaves_the_queue_with_a_sentence_for_people(pair: Town) -> None:
    before, asked = await pair.stats("b"), request("later major")
    await queue(pair, asked, later_major(pair.encoded(asked)))

    refused = await pair.step("b", asked.request_hash, "refused")

    assert refused.text == "event has an unknown major version (got=2, expected=1)"
    await is_served(pair, "later major")  # its subject is free, and its hash was never taken for known
    after = await pair.stats("b")
    assert after["messages_malformed"] == before["messages_malformed"] + 1


async def test_a_request_of_a_kind_that_came_later_leaves_the_queue_with_its_name(pair: Town) -> None:
    before, asked = await pair.stats("b"), request("later kind")
    await queue(pair, asked, unknown_kind(pair.encoded(asked)))

    refused = await pair.step("b", asked.request_hash, "refused")

    assert "does not belong on this subject" in refused.text
    assert "from_the_future" in refused.text
    await is_served(pair, "later kind")
    after = await pair.stats("b")
    assert after["messages_misplaced"] == before["messages_misplaced"] + 1


async def test_a_question_of_a_later_major_version_is_not_answered_and_the_log_says_why(pair: Town) -> None:
    before = await pair.stats("a")

    assert await to_source(pair, later_major, LeaseReleased(key=KEY, nonce=b"n" * 16), wait_s=0.5) == NoAnswer("late")

    after = await pair.stats("a")
    assert after["messages_malformed"] == before["messages_malformed"] + 1
    assert "event has an unknown major version" in pair.workers["a"].log.read_text()
    await is_served(pair, "after a question of a later major version")
