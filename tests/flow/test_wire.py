"""All that travels over a real broker is what the table of channels says, and all that the table says travels."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.engines.zmq_events import ZmqEvents
from kvbus.events import (
    CacheAsked,
    CacheChangeAsked,
    DrainAsked,
    LeaseGranted,
    PrefixAsked,
    SnapshotAsked,
    SnapshotTaken,
    StatsAsked,
)
from kvbus.ledger.agreement import Decision, Party
from kvbus.roles.block_bridge import BlockBridge, BridgeSettings
from kvbus.roles.recorder import Recorder
from kvbus.topics import Command, Query
from tests.flow.members import MEMBERS, kinds, leader
from tests.flow.town import ANSWER_S, OUTCOME_S, PAGE_BYTES, TOPICS, Town, prompt, town
from tests.flow.wire_tap import tapped
from tests.unit.helpers.vllm_publisher import VllmPublisher
from tests.waiting import until
from tests.wire_table import ANSWERED, SENT, Overheard, is_ours

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

BLOCKS = 40
RATE_BYTES_S = 4 * PAGE_BYTES
"""Ten seconds for a prompt of so many blocks: time to ask for it again, and to cancel it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def heard(folder: Path) -> AsyncIterator[Overheard]:
    """What is said from the first worker's start to the last one's rest."""
    overheard = Overheard()
    asked: dict[str, tuple[str, str]] = {}

    def hear(subject: str, reply: str, data: bytes) -> None:
        if is_ours(subject):
            found = overheard.hear(subject, data)
            if found is not None and reply and found[0] in {channel for channel, _, _ in ANSWERED}:
                asked[reply] = found
        elif subject in asked:
            overheard.hear_answer(asked[subject], data)

    async with town(folder) as running:
        async with tapped(running.broker, hear):
            await running.start_all("a", MEMBERS, backend="memory")
            await running.start_all("b", MEMBERS, backend="memory", allow=["a"], rate_limit_bytes_s=RATE_BYTES_S)
            await leader(running)
            await everything_happens(running)
            await running.at_rest()
        yield overheard


async def everything_happens(running: Town) -> None:
    """A transfer that settles, one that is asked for twice and cancelled, one that fails; questions; lost facts."""
    assert (await running.stage(prompt("settles", 2))).outcome == "settled"
    ids = prompt("is cancelled", BLOCKS)
    handle = await running.ask(ids)
    verdict = await handle.verdict(OUTCOME_S)
    assert verdict.verdict == "accepted"

    async def moving() -> bool:
        facts = [event.body for event in await running.events("b")]
        return any(isinstance(body, LeaseGranted) and body.transfer == verdict.transfer for body in facts)

    await until(moving, OUTCOME_S, what="pages are being moved")
    assert (await running.verdict(ids)).verdict == "deduped"
    assert await running.publisher.cancel(handle.request_hash, "b")
    outcome = await handle.outcome(OUTCOME_S)
    assert outcome is not None
    assert outcome.outcome == "cancelled"
    failed = await running.stage(prompt("is not there", 2), on_miss="fail")
    assert failed.outcome == "failed"
    assert "void" in await kinds(running, failed.transfer)
    await running.stats("b")
    cache = TOPICS.command("b", Command.CACHE, "m0")
    for question in (CacheAsked(), CacheChangeAsked(action="forget")):
        assert isinstance(await running.bus.request(cache, running.encoded(question), wait_s=ANSWER_S), bytes)
    drain = TOPICS.command("b", Command.DRAIN, "m0")
    assert isinstance(await running.bus.request(drain, running.encoded(DrainAsked()), wait_s=ANSWER_S), bytes)
    prefix = PrefixAsked(name=b"p" * 16, fingerprint=running.registered["b/m0"].record.fingerprint)
    data = running.encoded(prefix, speaker="b", member="m0", epoch=running.registered["b/m0"].epoch)
    assert isinstance(await running.bus.request(TOPICS.command("a", Command.LEASE, "m0"), data, wait_s=ANSWER_S), bytes)
    stats = running.encoded(StatsAsked())
    assert isinstance(await running.bus.request(TOPICS.query("b", Query.STATS, "m0"), stats, wait_s=ANSWER_S), bytes)
    asked = running.encoded(SnapshotAsked())
    assert isinstance(await running.bus.request(TOPICS.query("b", Query.SNAPSHOT, "m0"), asked, wait_s=ANSWER_S), bytes)
    await bridged(running)
    await decided_together(running)
    # What was told is gone: it begins again.
    await running.bus.ask("$JS.API.STREAM.DELETE.KVB_FACTS", b"", wait_s=ANSWER_S)
    await running.bus.ensure_assets()
    assert (await running.stage(prompt("begins again", 2))).outcome == "settled"

    async def told_anew() -> bool:
        return any(isinstance(event.body, SnapshotTaken) for event in await running.events("b"))

    await until(told_anew, OUTCOME_S, what="a member tells its state anew")


async def bridged(running: Town) -> None:
    """A bridge begins, and gives up."""
    async with VllmPublisher() as vllm, ZmqEvents(*vllm.addresses) as stream:
        bridge = BlockBridge(stream, running.bus, TOPICS, BridgeSettings("b"), next_epoch=lambda: 1)
        working = asyncio.create_task(bridge.run())
        await until(lambda: bridge.counts["cleared"], OUTCOME_S)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await bridge.give_up("it was told to stop")


async def decided_together(running: Town) -> None:
    """An instance with one member decides more than once while the broker is busy."""
    recorder = Recorder(bus=running.bus, topics=TOPICS, instance="alone", member="m0", epoch=1, unix_ns=time.time_ns)
    for number in (1, 2):
        recorder.decision(Decision("open", f"t{number}", 1, number, "", (Party("m0", 1, 0, number),)))
    working = asyncio.create_task(recorder.run())
    assert await recorder.flush(OUTCOME_S)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)


async def test_every_kind_is_sent_on_the_channels_that_the_table_says_and_on_no_others(heard: Overheard) -> None:
    assert heard.strangers == []
    assert heard.sent == SENT


async def test_every_question_is_answered_with_the_kind_that_the_table_says(heard: Overheard) -> None:
    assert heard.answered == ANSWERED
