"""What nobody should send, sent on every subject: counted, ignored, and a good request is served afterwards."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.codec import pack, unpack
from kvbus.events import (
    HeartbeatSeen,
    TransferRequested,
    TransferVerdict,
)
from kvbus.names import request_hash, token_bytes
from kvbus.parts import Prompt
from kvbus.publisher import Publisher
from kvbus.topics import Command, Query
from kvbus.transport import Stored
from tests.flow.raw_door import raw_door
from tests.flow.town import FAST, OUTCOME_S, TOPICS, Town, prompt, town
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOBODY_HASH = "0123456789abcdef" * 2
OVERSIZED_BYTES = 800 << 10
"""More than a request may have (768 KiB), less than the broker takes in one message (1 MiB)."""
SMALL_CAP_PAGES = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def crowd(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await asyncio.gather(
            running.start("a"),
            running.start("b", allow=["a", "other"]),
            running.start("small", allow=["a"], pages=2048 // 32 + SMALL_CAP_PAGES),
            running.start("other", options={**FAST, "page_bytes": 32768}),
        )
        yield running


# ------------------------------------------------------------------------------------------------------------ prompts


@pytest.mark.parametrize("empty", ["", []])
async def test_an_empty_prompt_never_leaves_the_requester(crowd: Town, empty: str | list[int]) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        await crowd.ask(empty)


@pytest.mark.parametrize("token", [-1, 2**32])
async def test_a_token_id_out_of_range_never_leaves_the_requester(crowd: Town, token: int) -> None:
    with pytest.raises(ValueError, match=r"prompt token 1 must lie in 0…4294967295"):
        await crowd.ask([5, token])


async def test_a_token_that_the_model_does_not_know_fails_with_its_range(crowd: Town) -> None:
    ids = [*prompt("vocabulary", 2), 4_000_000]

    outcome = await crowd.stage([4_000_000, *ids])

    assert (outcome.outcome, outcome.failure) == ("failed", "bad_request")
    assert "4000000" in outcome.reason
    assert "259 tokens" in outcome.reason
    await crowd.at_rest()


async def test_a_prompt_longer_than_the_engine_takes_fails_and_says_both_lengths(crowd: Town) -> None:
    ids = prompt("too long", 64)

    outcome = await crowd.stage(ids)

    assert (outcome.outcome, outcome.failure) == ("failed", "bad_request")
    assert f"the prompt has {len(ids)} tokens" in outcome.reason
    assert "2048" in outcome.reason
    await crowd.at_rest()


async def test_a_prompt_longer_than_the_pool_lends_fails_and_says_both_sizes(crowd: Town) -> None:
    outcome = await crowd.stage(prompt("too many pages", SMALL_CAP_PAGES + 1), destination="small")

    assert (outcome.outcome, outcome.failure) == ("failed", "bad_request")
    assert "needs 7 pages, small takes at most 6" in outcome.reason
    assert (await crowd.stage(prompt("just right", SMALL_CAP_PAGES), destination="small")).outcome == "settled"
    await crowd.at_rest()


async def test_a_prompt_longer_than_a_message_never_leaves_the_requester(crowd: Town) -> None:
    with pytest.raises(ValueError, match="expected at most"):
        await crowd.ask("x" * (1 << 20))


async def test_a_source_with_another_layout_is_refused_before_any_byte_moves(crowd: Town) -> None:
    before = await crowd.stats("b"), await crowd.stats("other")

    outcome = await crowd.stage(prompt("layout", 2), source="other")

    assert (outcome.outcome, outcome.failure) == ("failed", "grant_refused")
    for name in ("b", "other"):
        assert crowd.registered[name].record.fingerprint in outcome.reason
    assert (outcome.length_bytes, outcome.evidence) == (0, ("never_submitted",))
    after = await crowd.stats("b"), await crowd.stats("other")
    assert after[0]["ucx_submissions"] == before[0]["ucx_submissions"]
    assert after[1]["lending_submissions"] == before[1]["lending_submissions"]
    await crowd.at_rest()


# ----------------------------------------------------------------------------------------------------------- messages


def request_for(town_: Town, ids: list[int], **changed: object) -> TransferRequested:
    """A request as it travels, with some fields as no publisher would make them."""
    asked = Prompt(tokens=token_bytes(ids))
    fields: dict[str, object] = {
        "request_id": f"tester.{time.time_ns()}",
        "request_hash": request_hash(model="", salt="", source="a", prompt=asked.canonical()),
        "requester": "tester",
        "source": "a",
        "destination": "b",
        "prompt": asked,
    }
    return TransferRequested.model_validate(fields | changed)


def bad_messages(crowd: Town) -> dict[str, bytes]:
    """One of each kind of message that no subject takes."""
    good = unpack(crowd.encoded(HEARTBEAT), length_max_bytes=1 << 20)
    empty_prompt = unpack(crowd.encoded(request_for(crowd, [1])), length_max_bytes=1 << 20)
    empty_prompt["b"] = {**as_map(empty_prompt["b"]), "prompt": {"tokens": b""}}
    nested: object = 1
    for _ in range(200):
        nested = [nested]
    return {
        "nothing": b"",
        "not msgpack": b"\xc1" * 40,
        "half an event": crowd.encoded(HEARTBEAT)[:-5],
        "a list": pack({"v": 1})[:0] + b"\x93\x01\x02\x03",
        "another major version": pack({**good, "v": 2}),
        "no version": pack({key: value for key, value in good.items() if key != "v"}),
        "a version that is text": pack({**good, "v": "1"}),
        "an unknown kind": pack({**good, "k": "no_such_kind"}),
        "a kind that belongs elsewhere": crowd.encoded(HEARTBEAT),
        "a body that is a list": pack({**good, "b": [1, 2]}),
        "a name that is no name": pack({**good, "i": "x" * 65}),
        "an empty prompt": pack(empty_prompt),
        "too long": pack({**good, "padding": b"x" * OVERSIZED_BYTES}),
    }


HEARTBEAT = HeartbeatSeen(
    transfers_running=0, leases_held=0, pages_free=0, pages_cached=0, pages_lent=0, facts_sequence=0, settle_n=0
)


def as_map(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(
    "subject",
    [
        TOPICS.command("b", Command.TRANSFER),
        TOPICS.command("b", Command.LEASE, "m0"),
        TOPICS.command("b", Command.CANCEL),
        TOPICS.query("b", Query.STATS),
    ],
)
async def test_bad_messages_on_a_command_are_counted_and_ignored(crowd: Town, subject: str) -> None:
    before = await crowd.stats("b")
    messages = bad_messages(crowd)

    async with raw_door(crowd.broker) as door:
        for data in messages.values():
            await door.send(subject, data)

    def counted(after: dict[str, int]) -> int:
        return sum(after[name] - before[name] for name in ("messages_malformed", "messages_misplaced"))

    async def all_counted() -> bool:
        return counted(await crowd.stats("b")) >= len(messages)

    await until(all_counted, what="every bad message is counted")
    after = await crowd.stats("b")
    assert counted(after) == len(messages)
    assert after["requests"] == before["requests"]
    await serves(crowd, subject)


async def test_bad_messages_in_the_queue_are_counted_and_taken_off_it(crowd: Town) -> None:
    before = await crowd.stats("b")
    messages = {name: data for name, data in bad_messages(crowd).items() if name != "too long"}
    subjects = [TOPICS.transfer("b", f"{number:032x}") for number in range(len(messages))]

    async with raw_door(crowd.broker) as door:
        for subject, data in zip(subjects, messages.values(), strict=True):
            await door.send(subject, data)
        # The stream itself refuses what is longer than a request.
        await door.send(TOPICS.transfer("b", f"{len(messages):032x}"), bad_messages(crowd)["too long"])

    async def all_counted() -> bool:
        after = await crowd.stats("b")
        return sum(after[name] - before[name] for name in ("messages_malformed", "messages_misplaced")) >= len(messages)

    await until(all_counted, what="every bad message is counted")
    for subject in subjects:
        await until(partial(takes_again, crowd, subject), what=f"{subject} is free again")
    await serves(crowd, "the queue")


async def test_a_request_whose_hash_is_not_its_subject_is_taken_off_the_queue(crowd: Town) -> None:
    ids = prompt("wrong subject", 2)
    subject = TOPICS.transfer("b", NOBODY_HASH)
    request = request_for(crowd, ids)
    before = await crowd.stats("b")

    stored = await crowd.bus.store(subject, crowd.encoded(request), message_id=request.request_id)

    assert isinstance(stored, Stored)
    refused = await crowd.step("b", NOBODY_HASH, "refused")
    assert "request hash and subject differ" in refused.text
    assert (await crowd.stats("b"))["fired"] == before["fired"]
    await until(lambda: takes_again(crowd, subject), what="the subject is free again")
    await serves(crowd, "a wrong subject")


async def test_a_request_whose_hash_is_not_that_of_its_prompt_is_taken_off_the_queue(crowd: Town) -> None:
    honest, other = request_for(crowd, prompt("honest", 2)), request_for(crowd, prompt("other prompt", 2))
    lying = other.model_copy(update={"request_hash": honest.request_hash})
    subject = TOPICS.transfer("b", honest.request_hash)

    assert isinstance(await crowd.bus.store(subject, crowd.encoded(lying), message_id=lying.request_id), Stored)

    refused = await crowd.step("b", honest.request_hash, "refused")
    assert "request hash is not that of the request" in refused.text
    outcome = await crowd.stage(prompt("honest", 2))  # would be `deduped`, were the other one believed
    assert (outcome.outcome, outcome.pages_moved) == ("settled", 2)


async def test_a_request_for_another_destination_is_taken_off_the_queue(crowd: Town) -> None:
    request = request_for(crowd, prompt("elsewhere", 2), destination="small")
    subject = TOPICS.transfer("b", request.request_hash)

    await crowd.bus.store(subject, crowd.encoded(request), message_id=request.request_id)

    await until(lambda: takes_again(crowd, subject), what="the subject is free again")
    await serves(crowd, "another destination's request")


async def test_bad_messages_to_a_requester_are_counted_and_its_answer_still_comes(crowd: Town) -> None:
    messages = bad_messages(crowd)
    readable = ("an unknown kind", "a kind that belongs elsewhere", "too long")
    async with Publisher(bus=crowd.bus, requester="patient") as publisher, raw_door(crowd.broker) as door:
        for data in messages.values():
            await door.send(TOPICS.result("patient"), data)
        handle = await publisher.transfer(source="a", destination="b", prompt=prompt("patient", 2))

        outcome = await handle.outcome(OUTCOME_S)

        assert outcome is not None
        assert outcome.outcome == "settled"
        assert publisher.malformed >= len(messages) - len(readable)
    await crowd.at_rest()


async def test_a_verdict_for_another_request_of_the_same_prompt_is_not_taken(crowd: Town) -> None:
    async with Publisher(bus=crowd.bus, requester="careful") as publisher:
        handle = await publisher.transfer(source="a", destination="b", prompt=prompt("careful", 2))
        forged = TransferVerdict(request_id="somebody.else", request_hash=handle.request_hash, verdict="refused")
        await crowd.bus.publish(TOPICS.result("careful"), crowd.encoded(forged))
        outcome = await handle.outcome(OUTCOME_S)
    assert outcome is not None
    assert (await handle.verdict()).verdict == "accepted"


async def test_cancelling_what_does_not_run_changes_nothing(crowd: Town) -> None:
    assert await crowd.publisher.cancel(NOBODY_HASH, "b")
    await serves(crowd, "an idle cancel")


# -------------------------------------------------------------------------------------------------------------- helps


async def takes_again(crowd: Town, subject: str) -> bool:
    """Whether the queue's subject is free: it holds one request at a time."""
    stored = await crowd.bus.store(subject, b"\xc1", message_id=f"probe.{time.time_ns()}")
    return isinstance(stored, Stored)


async def serves(crowd: Town, after: str) -> None:
    """A good request is served, whatever came before."""
    outcome = await crowd.stage(prompt(f"good after {after}", 2))
    assert (outcome.outcome, outcome.pages_moved) == ("settled", 2)
    await crowd.at_rest()
