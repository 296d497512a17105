"""Whole workers with digests: one changed bit costs one page, never an answer, and it is told where it was found."""

import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.commands.audit import audit_log, lines
from kvbus.commands.auditing import Verdict
from kvbus.commands.stories import Story, tell
from kvbus.engines.desk import Where
from kvbus.events import OutcomeFixed
from tests.flow.town import BLOCK, PAGE_BYTES, TOPICS, Town, prompt, town
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
BLOCKS = 12
MODES = {"a": "always", "b": "always", "c": "off", "d": "grant"}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ucx", "memory", "socket"])
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[Town]:
    """Four instances, each of which takes from all the others; see MODES for what they make of digests."""
    with tempfile.TemporaryDirectory(prefix="kvflow-") as name:
        async with town(Path(name)) as running:
            for instance, mode in MODES.items():
                arguments = ["--instance", instance, "--engine", "toy", "--engine-options", '{"work_rounds": 1}']
                arguments += ["--backend", request.param, "--digests", mode]
                arguments += [part for other in MODES if other != instance for part in ("--allow", other)]
                await running.start_again(instance, arguments)
            yield running


def flip_a_bit(where: Where, page: int) -> None:
    """Change one bit of a page, as no lease allows."""
    descriptor = os.open(f"/proc/{where.pid}/fd/{where.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        at = where.offset + page * where.stride + PAGE_BYTES - 7
        os.pwrite(descriptor, bytes([os.pread(descriptor, 1, at)[0] ^ 1]), at)
    finally:
        os.close(descriptor)


def where_of(workers: Town, name: str, ids: list[int]) -> Where:
    with workers.workers[name].client() as client:
        return client.where(ids)


async def stored(workers: Town, name: str, ids: list[int]) -> Where:
    """Have an instance store a prompt, and wait until its pages have their digests, where it makes them at once."""
    before = await workers.counters(name)
    await workers.answer(name, ids, store=True)
    made = before["digests_made"] + (BLOCKS if MODES[name] == "always" else 0)

    async def are_made() -> bool:
        return (await workers.counters(name))["digests_made"] == made

    await until(are_made, what=f"{name} has made digests")
    return where_of(workers, name, ids)


async def test_staged_pages_keep_the_digests_that_they_came_with(workers: Town) -> None:
    ids = prompt("whole", BLOCKS)
    await stored(workers, "a", ids)
    made = (await workers.counters("b"))["digests_made"]

    outcome = await workers.stage(ids)

    assert (outcome.outcome, outcome.pages_moved) == ("settled", BLOCKS)
    onward = await workers.stage(ids, source="b", destination="d", on_miss="fail")
    assert (onward.outcome, onward.pages_moved) == ("settled", BLOCKS)
    assert (await workers.counters("b"))["digests_made"] == made, "none was made of what came with one"
    answer = await workers.answer("d", ids)
    assert answer.end.cached_tokens == BLOCKS * BLOCK
    assert answer.end.tokens == await workers.cold("d", ids)
    for name in MODES:
        counters = await workers.counters(name)
        assert (counters["pages_differ"], counters["pages_spoiled"]) == (0, 0)


async def test_a_bit_changed_at_the_source_after_the_seal_costs_its_page_and_is_told(workers: Town) -> None:  # P2
    ids = prompt("source", BLOCKS)
    where = await stored(workers, "a", ids)
    differ, before = (await workers.counters("b"))["pages_differ"], await workers.counters("a")
    flip_a_bit(where, where.pages[5])

    outcome = await workers.stage(ids, on_miss="fail")

    assert (outcome.outcome, outcome.failure) == ("failed", "page_differs")
    assert f"block 5 of page {where.pages[5]}" in outcome.reason
    assert (outcome.pages_moved, outcome.hi) == (BLOCKS - 1, 5)
    assert (await workers.counters("b"))["pages_differ"] == differ + 1
    fixed: list[OutcomeFixed] = []

    async def is_told() -> bool:
        bodies = [event.body for event in await workers.events("b")]
        fixed[:] = [body for body in bodies if isinstance(body, OutcomeFixed) and body.text == outcome.reason]
        return bool(fixed)

    await until(is_told, what="the facts tell of the page")

    said = f"b/m0 found 1 pages with other bytes than their digests: {where.pages[5]}"

    async def story_is_told() -> bool:
        story = tell([event for name in "ab" for event in await workers.events(name)], outcome.transfer)
        assert isinstance(story, Story)
        heard = [entry.line.text for entry in story.entries if said in entry.line.text]
        return heard == [f"reader found: {said}"] and f"page_differs: {outcome.reason}" in story.summary

    await until(story_is_told, what="the source has heard of it, and both tell of it in the story")
    _, audited = await audit_log(workers.bus, TOPICS)
    assert outcome.reason in [read.text for read in audited.differing]
    assert [line for line in lines(audited) if "no fault of ownership" in line and outcome.reason in line]

    async def is_looked_at() -> bool:
        return (await workers.counters("a"))["pages_spoiled"] > before["pages_spoiled"]

    await until(is_looked_at, what="the source has looked at the page itself")
    after = await workers.counters("a")
    assert after["pages_reported"] == before["pages_reported"] + 1
    assert after["pages_spoiled"] == before["pages_spoiled"] + 1, "its bytes are wrong at the source too"
    assert len(where_of(workers, "a", ids).pages) == 5, "the source lends it no more"
    answer = await workers.answer("b", ids)
    assert answer.end.cached_tokens == 5 * BLOCK
    assert answer.end.tokens == await workers.cold("b", ids)


async def test_a_source_computes_a_changed_page_anew_once_its_engine_has_met_it(workers: Town) -> None:
    ids = prompt("met", BLOCKS)
    where = await stored(workers, "a", ids)
    flip_a_bit(where, where.pages[3])
    before = await workers.counters("a")

    answer = await workers.answer("a", ids, store=True)

    assert answer.end.cached_tokens == 3 * BLOCK
    after = await workers.counters("a")
    assert after["pages_spoiled"] == before["pages_spoiled"] + 1
    assert after["pages_quarantined"] == before["pages_quarantined"] + 1
    outcome = await workers.stage(ids, on_miss="fail")
    assert (outcome.outcome, outcome.pages_moved) == ("settled", BLOCKS)
    assert (await workers.answer("b", ids)).end.tokens == answer.end.tokens == await workers.cold("b", ids)


async def test_a_bit_changed_at_the_destination_after_arrival_is_a_miss_there(workers: Town) -> None:
    ids = prompt("destination", BLOCKS)
    await stored(workers, "a", ids)
    assert (await workers.stage(ids)).outcome == "settled"
    where = where_of(workers, "b", ids)
    before = await workers.counters("b")
    flip_a_bit(where, where.pages[7])

    answer = await workers.answer("b", ids, store=True)

    assert answer.end.cached_tokens == 7 * BLOCK
    assert answer.end.tokens == await workers.cold("b", ids)
    after = await workers.counters("b")
    assert after["pages_spoiled"] == before["pages_spoiled"] + 1
    assert after["pages_quarantined"] == before["pages_quarantined"] + 1
    assert where.pages[7] not in where_of(workers, "b", ids).pages
    again = await workers.answer("b", ids)
    assert (again.end.cached_tokens, again.end.tokens) == (BLOCKS * BLOCK, answer.end.tokens)


@pytest.mark.parametrize(("source", "destination"), [("c", "b"), ("a", "c"), ("d", "b")])
async def test_sides_that_make_digests_at_other_times_or_never_understand_each_other(
    workers: Town, source: str, destination: str
) -> None:
    ids = prompt(f"{source} to {destination}", BLOCKS)
    await stored(workers, source, ids)

    outcome = await workers.stage(ids, source=source, destination=destination, on_miss="fail")

    assert (outcome.outcome, outcome.pages_moved) == ("settled", BLOCKS)
    answer = await workers.answer(destination, ids)
    assert answer.end.cached_tokens == BLOCKS * BLOCK
    assert answer.end.tokens == await workers.cold(destination, ids)


async def test_a_prefilled_prompt_is_lent_with_its_digests(workers: Town) -> None:
    ids = prompt("prefill", BLOCKS)
    made = (await workers.counters("d"))["digests_made"]

    outcome = await workers.stage(ids, source="d", destination="b")

    assert (outcome.outcome, outcome.pages_moved) == ("settled", BLOCKS)
    assert (await workers.counters("d"))["digests_made"] == made + BLOCKS
    where = where_of(workers, "b", ids)
    flip_a_bit(where, where.pages[0])
    answer = await workers.answer("b", ids)
    assert answer.end.cached_tokens == 0, "the digest came along: the page is known to be changed"
    assert answer.end.tokens == await workers.cold("b", ids)


async def test_nothing_is_owed_afterwards_but_the_pages_in_quarantine(workers: Town) -> None:
    quarantined = {name: (await workers.counters(name))["pages_quarantined"] for name in MODES}
    assert quarantined["c"] == quarantined["d"] == 0
    await workers.at_rest("c", "d")

    async def returned() -> bool:
        return all([not (await workers.counters(name))["leases_held"] for name in MODES])

    await until(returned)
    _, audited = await audit_log(workers.bus, TOPICS)
    assert audited.verdict is Verdict.CLEAN, list(lines(audited))
    for name in MODES:
        counters = await workers.counters(name)
        assert counters["pages_free"] + counters["pages_cached"] + quarantined[name] == counters["pages"]
