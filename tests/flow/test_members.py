"""Instances with two members each, over real NATS and the real data plane: both ranks settle, or neither does."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio

from kvbus.commands.auditing import Verdict, audit
from kvbus.commands.recordings import LogTap, Record, read_record, write_record
from kvbus.commands.rules import Rule
from kvbus.commands.stories import Story, tell
from kvbus.draining import DrainAsked
from kvbus.events import (
    Event,
    HeartbeatSeen,
    LeaseGranted,
    MadeVisible,
    SettleDecided,
    TermTaken,
    TransferOpened,
    TransferOutcome,
    decode,
)
from kvbus.ledger.facts import Fact
from kvbus.roles.registry import lookup
from kvbus.topics import Command
from kvbus.transport import Delivery
from tests.flow.members import MEMBERS, assert_audit_is_clean, decisions, leader
from tests.flow.pool_eye import eye_on
from tests.flow.town import ANSWER_S, BLOCK, TOPICS, Town, prompt, town
from tests.tampering import Copy, turned_on
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

SOURCE, READERS = ("a/m0", "a/m1"), ("b/m0", "b/m1")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ucx", "memory"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Town]:
    with tempfile.TemporaryDirectory(prefix="kvflow-") as name:
        async with town(Path(name)) as running:
            await asyncio.gather(
                running.start_all("a", MEMBERS, backend=request.param),
                running.start_all("b", MEMBERS, backend=request.param, allow=["a"]),
            )
            await leader(running)
            yield running


async def recorded(pair: Town) -> Record:
    await pair.at_rest()
    record = Record()
    await LogTap(pair.bus, TOPICS).record(record)
    record.end_ns = max(event.header.t for event in record.events())
    return record


async def settled_of(pair: Town, transfer: str) -> dict[str, tuple[int, Event]]:
    """Each member of b: the ticket of its lease for a transfer, and the event by which that was settled."""
    found: dict[str, tuple[int, Event]] = {}

    async def all_recorded() -> bool:
        facts = await pair.events("b")
        for event in facts:
            body, member = event.body, event.header.m
            if isinstance(body, LeaseGranted) and (body.transfer, body.direction) == (transfer, "write"):
                settled = (o for o in facts if o.header.m == member and turned_on(o, Fact.SETTLED, body.ticket))
                if (first := next(settled, None)) is not None:
                    found[member] = body.ticket, first
        return set(found) == set(MEMBERS)

    await until(all_recorded, what="both members have recorded that it is settled")
    return found


# P10, P12, R6
async def test_a_transfer_settles_at_both_ranks_and_shows_at_both(pair: Town) -> None:
    ids = prompt("both ranks", 9)

    outcome = await pair.stage(ids)

    assert (outcome.outcome, outcome.pages_moved, outcome.lo, outcome.hi) == ("settled", 9, 0, 9)
    await pair.at_rest()
    for name in READERS:
        assert await pair.held(name, ids) == 9
        staged = await pair.answer(name, ids)
        assert staged.end.cached_tokens == 9 * BLOCK
        assert staged.end.tokens == await pair.cold(name, ids)
    await pair.at_rest()


async def test_the_log_opens_settles_and_shows_in_this_order_and_nothing_is_settled_before(pair: Town) -> None:
    outcome = await pair.stage(prompt("in order", 4))
    opened, settle, visible = await decisions(pair, outcome.transfer)
    assert isinstance(opened.body, TransferOpened)
    assert isinstance(settle.body, SettleDecided)
    assert isinstance(visible.body, MadeVisible)
    assert [(member, rank, ticket) for member, _, rank, ticket in opened.body.members] == [("m0", 0, 0), ("m1", 1, 0)]
    leases = await settled_of(pair, outcome.transfer)
    for body in (settle.body, visible.body):
        assert (body.lo, body.hi) == (0, 4)
        assert {member: ticket for member, _, _, ticket in body.members} == {
            member: ticket for member, (ticket, _) in leases.items()
        }
    assert all(returned.header.t >= visible.header.t for _, returned in leases.values()), "nobody returned before"
    (first, *_) = await pair.events("b", settle=True)
    assert isinstance(first.body, TermTaken)
    assert (first.body.member, first.body.term) == (opened.header.m, opened.body.term)
    await pair.at_rest()


async def test_each_rank_has_pages_of_its_own(pair: Town) -> None:
    ids = prompt("own pages", 3)
    await pair.stage(ids)
    await pair.at_rest()

    def pages(name: str) -> list[bytes]:
        with pair.workers[name].client() as client:
            where = client.where(ids)
        return [eyes[name].page(page) for page in where.pages]

    eyes = {name: await eye_on(pair, name) for name in (*SOURCE, *READERS)}
    content = {name: await asyncio.to_thread(pages, name) for name in eyes}
    assert content["a/m0"] == content["b/m0"]
    assert content["a/m1"] == content["b/m1"]
    assert not set(content["b/m0"]) & set(content["b/m1"])
    await pair.at_rest()


async def test_blocks_that_one_rank_has_already_move_only_to_the_other(pair: Town) -> None:
    ids = prompt("half here", 6)
    await pair.answer("b/m1", ids, store=True)

    outcome = await pair.stage(ids)

    assert (outcome.outcome, outcome.lo, outcome.hi) == ("settled", 0, 6)
    await pair.at_rest()
    assert [await pair.held(name, ids) for name in READERS] == [6, 6]


async def test_one_member_leads_and_heartbeats_tell_where_each_stands(pair: Town) -> None:
    counters = [await pair.counters(name) for name in READERS]
    assert sum(one["settle_leads"] for one in counters) == 1
    assert len({(one["settle_term"], one["settle_n"]) for one in counters}) == 1
    assert sum(one["settle_decisions"] for one in counters) > 0
    assert {one.member: one.record.ranks for one in await lookup(pair.bus, "b")} == {"m0": 2, "m1": 2}


async def test_requests_at_the_same_time_all_settle_at_both(pair: Town) -> None:
    prompts = [prompt(f"one of many {number}", 3) for number in range(4)]

    outcomes = await asyncio.gather(*(pair.stage(ids) for ids in prompts))

    assert {outcome.outcome for outcome in outcomes} == {"settled"}
    await pair.at_rest()
    for name in READERS:
        assert [await pair.held(name, ids) for ids in prompts] == [3, 3, 3, 3]


# R23
async def test_an_instance_with_one_member_says_nothing_of_members(pair: Town) -> None:
    said: list[Delivery] = []
    beats: list[Delivery] = []

    async def hear(delivery: Delivery) -> None:
        said.append(delivery)

    async def hear_beat(delivery: Delivery) -> None:
        beats.append(delivery)

    heard = [
        await pair.bus.subscribe(TOPICS.shares("alone"), hear),
        await pair.bus.subscribe(TOPICS.live_settle("alone"), hear),
        await pair.bus.subscribe(TOPICS.heartbeat("alone"), hear_beat),
    ]
    try:
        await pair.start("alone")
        await pair.answer("alone", prompt("alone", 2), store=True)
        await until(lambda: len(beats) >= 3, 60, what="three heartbeats of a worker that is alone")
    finally:
        for subscription in heard:
            await subscription.close()
    assert not said
    assert not [name for name in await pair.counters("alone") if name.startswith("settle_")]
    body = decode(beats[-1].data).body
    assert isinstance(body, HeartbeatSeen)
    assert (body.settle_term, body.settle_n) == (0, 0)


# P13
async def test_a_request_that_fails_since_one_of_two_members_leaves_settles_when_it_is_asked_again(pair: Town) -> None:
    ids = prompt("asked again", 3)
    leads = await leader(pair)
    follower = next(member for member in MEMBERS if not leads.endswith(member))

    async def drain(action: Literal["drain", "undo"]) -> None:
        subject = TOPICS.command("b", Command.DRAIN, follower)
        asked = pair.encoded(DrainAsked(action=action), speaker="operator")
        answer = await pair.bus.request(subject, asked, wait_s=ANSWER_S)
        assert isinstance(answer, bytes), answer

    async def voided() -> bool:
        bodies = [event.body for event in await pair.events("b")]
        return any(isinstance(one, TransferOutcome) and one.failure == "contradiction" for one in bodies)

    await drain("drain")
    staging = asyncio.create_task(pair.publisher.stage(source="a", destination="b", prompt=ids, patience_s=120))
    await until(voided, what="the members have voided it")
    assert not staging.done()
    await drain("undo")
    staged = await staging
    assert staged.settled
    assert staged.tries > 1
    await pair.at_rest()


# ------------------------------------------------------------------------------------------------- what was recorded


async def test_the_record_is_clean_and_each_story_is_whole(pair: Town) -> None:
    outcome = await pair.stage(prompt("told", 5))
    record = await recorded(pair)
    story = tell(record.events(), outcome.transfer)

    await assert_audit_is_clean(pair)
    assert isinstance(story, Story)
    assert not story.missing
    assert not story.contradictions
    assert {(lease.life.key.instance, lease.life.key.member) for lease in story.leases} == {
        ("a", "m0"), ("a", "m1"), ("b", "m0"), ("b", "m1"),
    }  # fmt: skip
    assert all(lease.returned for lease in story.leases)


async def test_a_record_without_its_visible_decision_is_refuted(pair: Town, folder: Path) -> None:
    outcome = await pair.stage(prompt("tampered", 2))
    record = await recorded(pair)
    visible = next(
        event
        for event in record.events()
        if isinstance(event.body, MadeVisible) and event.body.transfer == outcome.transfer
    )
    write_record(folder / "told.kvbus", record)
    assert audit(read_record(folder / "told.kvbus")).verdict is Verdict.CLEAN

    result = audit(Copy.of(record).changed(lambda event: later(event, visible)).without(visible).record())

    assert result.verdict is Verdict.REFUTED
    assert result.first is not None
    assert result.first.rule is Rule.SETTLED
    assert f"no `visible` or `void` about {outcome.transfer} precedes it" in result.first.text


def later(event: Event, gone: Event) -> Event:
    """Close the gap that a decision leaves in its chain."""
    body, without = event.body, gone.body
    if not isinstance(without, MadeVisible) or getattr(body, "term", 0) != without.term or event is gone:
        return event
    n = getattr(body, "n", 0)
    if event.header.i != gone.header.i or n <= without.n:
        return event
    return replace(event, body=body.model_copy(update={"n": n - 1}))
