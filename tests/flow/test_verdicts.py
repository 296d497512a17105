"""What a destination says to a request: taken on, joined to an earlier one, too busy, or refused with its reason.

Instance b reads slowly, so that its transfers can be seen running; `shut` has no allowlist.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.events import AttemptMade, LeaseGranted, TransferRequested, TransferVerdict, decode, encode
from kvbus.names import request_hash, token_bytes
from kvbus.parts import Prompt
from kvbus.publisher import Publisher
from kvbus.topics import Command
from kvbus.transport import Delivery, Stored
from tests.flow.town import ANSWER_S, OUTCOME_S, TOPICS, Town, as_text, prompt, town
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW_BLOCKS = 20
RATE_BYTES_S = 400_000
"""1.3 MB take more than three seconds: a transfer is seen running, also by who looks late."""

HOUR_S = 3_600.0
LIMIT_S = 1.5
"""In the queue: little enough to wait for."""
LIMIT_OF_MOST_S = 60.0
"""More than a busy machine takes to offer a request, and far less than clocks differ here."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trio(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await asyncio.gather(
            running.start("a"),
            running.start("b", allow=["a", "absent"], rate_limit_bytes_s=RATE_BYTES_S, inflight_max=2),
            running.start("shut"),
        )
        yield running


async def test_a_repeat_of_a_running_request_joins_it_and_hears_its_outcome(trio: Town) -> None:
    ids = prompt("running", SLOW_BLOCKS)
    first = await trio.ask(ids)
    await trio.step("b", first.request_hash, "moving")

    async with Publisher(bus=trio.bus, topics=TOPICS) as another:
        second = await another.transfer(source="a", destination="b", prompt=ids)
        verdict = await second.verdict()
        assert (verdict.verdict, verdict.reason) == ("deduped", "the same request is running")
        assert verdict.transfer == (await first.verdict()).transfer
        joined = await second.outcome(OUTCOME_S)

    outcome = await first.outcome(OUTCOME_S)
    assert outcome is not None
    assert outcome == joined
    assert outcome.outcome == "settled"
    await trio.at_rest()


async def test_a_repeat_of_a_settled_request_is_deduped_and_hears_the_outcome_again(trio: Town) -> None:
    ids = prompt("settled", 2)
    outcome = await trio.stage(ids)
    before = await trio.stats("b")

    again = await trio.ask(ids)

    verdict = await again.verdict()
    assert (verdict.verdict, verdict.reason) == ("deduped", "the same request has settled within the dedup time")
    assert await again.outcome(OUTCOME_S) == outcome
    after = await trio.stats("b")
    assert after["ucx_submissions"] == before["ucx_submissions"]
    assert after["deduped"] == before["deduped"] + 1
    await trio.at_rest()


async def test_a_failed_request_may_be_retried_at_once(trio: Town) -> None:
    ids = prompt("retry", 2)
    assert (await trio.stage(ids, on_miss="fail")).outcome == "failed"

    retried = await trio.stage(ids, on_miss="prefill")

    assert (retried.outcome, retried.pages_moved) == ("settled", 2)
    await trio.at_rest()


async def test_a_full_destination_says_so_and_keeps_nothing_of_the_request(trio: Town) -> None:
    running = [await trio.ask(prompt(f"busy {number}", SLOW_BLOCKS)) for number in range(2)]
    for handle in running:
        assert (await handle.verdict()).verdict == "accepted"
    ids = prompt("one too many", 2)

    verdict = await trio.verdict(ids)

    assert verdict.verdict == "skipped_busy"
    assert "2 transfers are running, at most 2" in verdict.reason
    for handle in running:
        outcome = await handle.outcome(OUTCOME_S)
        assert outcome is not None
        assert outcome.outcome == "settled"
    assert (await trio.stage(ids)).outcome == "settled"
    await trio.at_rest()


async def test_a_repeat_under_full_load_is_deduped_not_busy(trio: Town) -> None:
    running = [await trio.ask(prompt(f"loaded {number}", SLOW_BLOCKS)) for number in range(2)]
    for handle in running:
        await trio.step("b", handle.request_hash, "moving")

    assert (await trio.verdict(prompt("loaded 0", SLOW_BLOCKS))).verdict == "deduped"

    for handle in running:
        assert await handle.outcome(OUTCOME_S) is not None
    await trio.at_rest()


async def test_a_source_that_nobody_registered_is_refused(trio: Town) -> None:
    verdict = await trio.verdict(prompt("absent", 2), source="absent")

    assert verdict.verdict == "refused"
    assert "no instance 'absent' is registered" in verdict.reason


async def test_a_refused_source_may_be_asked_for_again(trio: Town) -> None:
    for _ in range(2):
        assert (await trio.verdict(prompt("absent twice", 2), source="absent")).verdict == "refused"
    assert (await trio.stats("b"))["inflight"] == 0


@pytest.mark.parametrize(
    ("destination", "words"),
    [("b", "source 'shut' is not among those that 'b' allows"), ("shut", "'shut' allows no source")],
)
async def test_a_source_that_is_not_allowed_is_refused_and_asked_for_nothing(
    trio: Town, destination: str, words: str
) -> None:
    source = "shut" if destination == "b" else "a"
    before = await rows_of_leases(trio, source), await trio.stats(source)

    verdict = await trio.verdict(prompt(f"not allowed {destination}", 2), source=source, destination=destination)

    assert verdict.verdict == "refused"
    assert words in verdict.reason
    after = await rows_of_leases(trio, source), await trio.stats(source)
    assert after[0] == before[0]
    for counter in ("leases_taken", "pages_free", "requests", "lending_submissions"):
        assert after[1][counter] == before[1][counter]


async def test_an_instance_is_not_its_own_source(trio: Town) -> None:
    with pytest.raises(ValueError, match="not its own source"):
        await trio.ask(prompt("self", 2), source="b", destination="b")

    request = wire_request(trio, prompt("self", 2), source="b")  # as a requester without our publisher might
    answer = await trio.bus.request(TOPICS.command("b", Command.TRANSFER), trio.encoded(request), wait_s=ANSWER_S)

    assert isinstance(answer, bytes)
    verdict = decode(answer).body
    assert isinstance(verdict, TransferVerdict)
    assert (verdict.verdict, verdict.reason) == ("refused", "source 'b' is this instance itself")


async def test_the_same_tokens_in_other_words_wait_for_the_first_and_move_nothing(trio: Town) -> None:
    ids = prompt("worded", SLOW_BLOCKS)
    first = await trio.ask(ids)
    await trio.step("b", first.request_hash, "moving")

    second = await trio.ask(as_text(ids))

    assert second.request_hash != first.request_hash
    assert (await second.verdict()).verdict == "accepted"
    await trio.step("b", second.request_hash, "waiting")
    one, two = await first.outcome(OUTCOME_S), await second.outcome(OUTCOME_S)
    assert one is not None
    assert two is not None
    assert (one.outcome, one.pages_moved) == ("settled", SLOW_BLOCKS)
    assert (two.outcome, two.pages_held, two.pages_moved) == ("settled", SLOW_BLOCKS, 0)
    await trio.at_rest()


@asynccontextmanager
async def verdicts(trio: Town) -> AsyncIterator[list[TransferVerdict]]:
    """What is said to the requester `tester`, in order."""
    heard: list[TransferVerdict] = []

    async def hear(delivery: Delivery) -> None:
        body = decode(delivery.data).body
        if isinstance(body, TransferVerdict):
            heard.append(body)

    subscription = await trio.bus.subscribe(TOPICS.result("tester"), hear)
    yield heard
    await subscription.close()


async def queue(trio: Town, request: TransferRequested, clock_ahead_s: float) -> None:
    """Put a request into the queue of b, from a host whose clock is so far ahead of ours."""
    now_ns = time.time_ns() + int(clock_ahead_s * 1e9)
    header = trio.header(request).model_copy(update={"t": now_ns})
    stored = await trio.bus.store(
        TOPICS.transfer("b", request.request_hash), encode(header, request), message_id=header.event_id
    )
    assert isinstance(stored, Stored)


@pytest.mark.parametrize("clock_ahead_s", [0.0, HOUR_S], ids=["clocks agree", "the requester's clock is an hour ahead"])
async def test_a_request_that_waited_too_long_in_the_queue_is_refused(trio: Town, clock_ahead_s: float) -> None:
    request = wire_request(trio, prompt(f"late {clock_ahead_s}", 2), queue_limit_s=LIMIT_S)
    async with verdicts(trio) as heard:
        trio.workers["b"].signal(signal.SIGSTOP)
        try:
            await queue(trio, request, clock_ahead_s)
            ends_at = time.monotonic() + 2 * LIMIT_S
            await until(lambda: time.monotonic() > ends_at, what="it has waited twice as long as it may")
        finally:
            trio.workers["b"].signal(signal.SIGCONT)
        await until(lambda: heard, what="the verdict")

    assert heard[0].verdict == "refused"
    assert f"in the queue, at most {LIMIT_S:g} s allowed" in heard[0].reason


@pytest.mark.parametrize("clock_ahead_s", [-HOUR_S, HOUR_S], ids=["an hour behind", "an hour ahead"])
async def test_a_requester_whose_clock_is_wrong_is_served_all_the_same(trio: Town, clock_ahead_s: float) -> None:
    request = wire_request(trio, prompt(f"clock {clock_ahead_s}", 2), queue_limit_s=LIMIT_OF_MOST_S)
    async with verdicts(trio) as heard:
        await queue(trio, request, clock_ahead_s)
        await until(lambda: heard, what="the verdict")

    assert (heard[0].verdict, heard[0].reason) == ("accepted", "")
    await trio.at_rest()


async def test_an_urgent_request_by_request_and_reply_meets_the_same_gate(trio: Town) -> None:
    ids = prompt("urgent", 2)
    outcome = await trio.stage(ids)

    answer = await trio.bus.request(
        TOPICS.command("b", Command.TRANSFER), trio.encoded(wire_request(trio, ids)), wait_s=ANSWER_S
    )

    assert isinstance(answer, bytes)
    verdict = decode(answer).body
    assert isinstance(verdict, TransferVerdict)
    assert (verdict.verdict, verdict.transfer) == ("deduped", outcome.transfer)
    await trio.at_rest()


async def test_a_request_leaves_the_queue_when_it_has_ended(trio: Town) -> None:
    ids = prompt("queue", 2)
    outcome = await trio.stage(ids)
    request = wire_request(trio, ids)
    subject = TOPICS.transfer("b", outcome.request_hash)

    async def free() -> bool:
        stored = await trio.bus.store(subject, trio.encoded(request), message_id=f"{time.time_ns()}")
        return isinstance(stored, Stored)  # one request per subject: it is free only once the first has left

    await until(free, what="the queue takes the same request again")
    await trio.at_rest()


async def rows_of_leases(trio: Town, name: str) -> int:
    """How many leases an instance has ever reported."""
    return sum(1 for event in await trio.events(name) if isinstance(event.body, LeaseGranted | AttemptMade))


def wire_request(
    trio: Town, ids: list[int], *, source: str = "a", destination: str = "b", queue_limit_s: float = LIMIT_OF_MOST_S
) -> TransferRequested:
    """A request as it travels, made without the publisher's checks."""
    asked = Prompt(tokens=token_bytes(ids))
    return TransferRequested(
        request_id=f"tester.{time.time_ns()}",
        request_hash=request_hash(model="", salt="", source=source, prompt=asked.canonical()),
        requester="tester",
        source=source,
        destination=destination,
        prompt=asked,
        queue_limit_s=queue_limit_s,
    )
