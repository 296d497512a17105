"""Submitting a request: a broker that is away is a refusal at once, and a full queue is its own destination's only."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_access import DeniedError
from kvbus.bus_assets import EMBEDDED
from kvbus.errors import BusError
from kvbus.events import Header, TransferRequested, TransferVerdict, decode, encode
from kvbus.handles import LOST, UNSURE, Verdict
from kvbus.publisher import Publisher, TransferHandle
from kvbus.submitting import QUEUED_MAX, Rooms
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Command, Topics
from kvbus.transport import Delivery
from tests.unit.helpers.cut_bus import CutBus
from tests.waiting import DEADLINE_S, stand_still, until

TOPICS = Topics()
SMALL = replace(EMBEDDED, transfer_messages_max=QUEUED_MAX + 500)


@pytest.fixture
async def bus(broker: EmbeddedBroker) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(broker.url, name="t", token=broker.token, limits=EMBEDDED)
    await made.ensure_assets()
    yield made
    await made.close()


async def asked(publisher: Publisher, name: str, destination: str = "b", *, urgent: bool = False) -> TransferHandle:
    return await publisher.transfer(source="a", destination=destination, prompt=name, urgent=urgent)


@pytest.mark.parametrize("urgent", [False, True])
async def test_while_the_broker_is_away_a_request_is_refused_at_once_and_after_it_not(
    bus: NatsBus, broker: EmbeddedBroker, *, urgent: bool
) -> None:
    async with Publisher(bus=bus) as publisher:
        broker.kill()
        await until(lambda: not bus.health().connected)
        loop = asyncio.get_running_loop()
        began = loop.time()
        handle = await asked(publisher, "away", urgent=urgent)
        verdict = await handle.verdict(wait_s=60)
        assert loop.time() - began < 5  # far below any wait for an answer
        assert verdict.verdict == "refused"
        assert verdict.reason.startswith("bus_unavailable: no connection")
        assert await handle.outcome(wait_s=60) is None
        await broker.start()
        await until(lambda: bus.health().connected)
        assert await bus.queued(TOPICS.transfer_filter("b")) == 0
        await asked(publisher, "back")
        assert await bus.queued(TOPICS.transfer_filter("b")) == 1


async def test_a_request_that_was_on_its_way_when_the_broker_died_is_unsure_at_once(
    bus: NatsBus, broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbus.submitting.AWAY_S", DEADLINE_S)  # a starved machine starts a broker slowly
    async with Publisher(bus=bus) as publisher:
        pid = broker.pid
        assert pid is not None
        stand_still(pid)  # it takes the bytes, and confirms nothing
        asking = asyncio.ensure_future(asked(publisher, "on its way"))
        await asyncio.wait({asking}, timeout=0.3)
        assert not asking.done()
        broker.kill()
        await until(lambda: not bus.health().connected)
        loop = asyncio.get_running_loop()
        began = loop.time()
        handle = await asking
        verdict = await handle.verdict(wait_s=60)
        assert loop.time() - began < 5
        assert (verdict.verdict, verdict.reason[:16]) == ("queued", "bus_unavailable:")
        await broker.start()
        await until(lambda: bus.health().connected)
        hearing = asyncio.ensure_future(handle.verdict(wait_s=60))  # asked again, it waits for the destination's word
        answer = TransferVerdict(
            request_id=handle.request.request_id, request_hash=handle.request_hash, verdict="accepted", transfer="T"
        )
        header = Header(k=answer.KIND, i="b", m="m0", e=1, s=1, t=1)
        await bus.publish(TOPICS.result(publisher.requester), encode(header, answer))
        assert (await hearing).verdict == "accepted"

        async def is_queued() -> bool:
            with suppress(BusError):  # a broker that has just come back
                return await bus.queued(TOPICS.transfer_filter("b")) == 1
            return False

        await until(is_queued, what="the request was put again")


@pytest.mark.parametrize("unready", [0, 2])
async def test_a_request_that_was_lost_with_the_connection_is_in_the_queue_once_that_is_back(unready: int) -> None:
    bus = CutBus(MemoryBroker(), unready=unready)
    async with Publisher(bus=bus) as publisher:
        handle = await asked(publisher, "on its way")
        assert await handle.verdict(60) == Verdict("queued", UNSURE)
        bus.restore()

        async def is_queued() -> bool:
            return await bus.queued(TOPICS.transfer_filter("b")) == 1

        await until(is_queued, what="the request is put again, without its caller")

        async def is_known() -> bool:
            return (await handle.verdict(0)).reason.startswith("the destination has not answered")

        await until(is_known)
    await bus.close()


async def test_a_request_that_cannot_be_put_again_is_refused_rather_than_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbus.submitting.AWAY_S", 0.1)
    bus = CutBus(MemoryBroker())
    async with Publisher(bus=bus) as publisher:
        handle = await asked(publisher, "on its way")
        assert await handle.verdict(60) == Verdict("queued", UNSURE)
        async with asyncio.timeout(60):
            assert await handle.verdict(600) == Verdict("refused", LOST)
            assert await handle.outcome(600) is None
        assert bus.stores == 1
    await bus.close()


async def test_what_the_destination_said_outweighs_a_connection_that_was_lost() -> None:
    bus = MemoryBus()
    async with Publisher(bus=bus) as publisher:
        handle = await asked(publisher, "heard")
        handle.hear_unsure()
        handle.hear_verdict(Verdict("accepted", transfer="T"))
        handle.hear_submitted(BusError("gone"))
        assert (await handle.verdict(0)).verdict == "accepted"
        asking = asyncio.ensure_future(handle.outcome(600))
        await asyncio.wait({asking}, timeout=0.05)
        assert not asking.done(), "its outcome is still waited for"
        asking.cancel()
    await bus.close()


async def test_what_the_broker_would_not_take_while_it_is_there_is_an_error(broker: EmbeddedBroker) -> None:
    bare = await NatsBus.connect(broker.url, name="t", token=broker.token, topics=Topics("other"), limits=EMBEDDED)
    try:
        async with Publisher(bus=bare, topics=Topics("other")) as publisher:
            with pytest.raises(BusError, match=r"kvbus init|JetStream"):
                await asked(publisher, "no stream")
    finally:
        await bare.close()


async def test_an_urgent_request_is_answered_by_its_destination_and_never_queued(bus: NatsBus) -> None:
    async def accept(delivery: Delivery) -> bytes:
        body = decode(delivery.data).body
        assert isinstance(body, TransferRequested)
        verdict = TransferVerdict(request_id=body.request_id, request_hash=body.request_hash, verdict="accepted")
        return encode(Header(k=verdict.KIND, i="b", m="m0", e=1, s=1, t=1), verdict)

    async with Publisher(bus=bus) as publisher:
        nobody = await (await asked(publisher, "urgent", urgent=True)).verdict()
        assert (nobody.verdict, nobody.reason) == (
            "refused",
            "b does not listen now, and an urgent request is not queued",
        )
        await bus.respond(TOPICS.command("b", Command.TRANSFER), accept)
        assert (await (await asked(publisher, "urgent", urgent=True)).verdict()).verdict == "accepted"
        assert await bus.queued(TOPICS.transfer_filter("b")) == 0


# P24
@pytest.mark.contract("P24")
async def test_a_destination_that_is_away_fills_its_own_share_of_the_queue_and_nobody_elses(tmp_path: Path) -> None:
    async with EmbeddedBroker.started(tmp_path / "broker") as broker:
        bus = await NatsBus.connect(broker.url, name="t", token=broker.token, limits=SMALL)
        await bus.ensure_assets()
        async with Publisher(bus=bus) as publisher:
            words, last = [], ""
            for number in range(SMALL.transfer_messages_max + 1):  # more than the stream holds
                handle = await asked(publisher, f"{number}", "dead")
                verdict = await handle.verdict(wait_s=0)
                words.append(verdict.verdict)
                last = verdict.reason
            assert words.count("queued") == QUEUED_MAX
            assert words[QUEUED_MAX:] == ["skipped_busy"] * (len(words) - QUEUED_MAX)
            assert f"{QUEUED_MAX} requests wait for dead" in last
            other = await asked(publisher, "other", "alive")
            assert await left_open(other)
            assert await bus.queued(TOPICS.transfer_filter("alive")) == 1
        await bus.close()


async def left_open(handle: TransferHandle) -> bool:
    """Whether a request has no verdict yet: it is queued."""
    return (await handle.verdict(wait_s=0)).verdict == "queued"


# P24
async def test_what_others_have_queued_counts_and_room_comes_back_with_those_that_left() -> None:
    memory = MemoryBroker()
    mine, other = memory.connect(), memory.connect()
    for number in range(QUEUED_MAX):
        await other.store(TOPICS.transfer("b", f"{number:032x}"), b"x", message_id=f"{number}")
    rooms = Rooms(TOPICS)
    assert "1000 requests wait for b" in await rooms.refusal(mine, "b")
    assert await rooms.refusal(mine, "c") == ""
    (work,) = await other.take_work(TOPICS.transfer_filter("b"), consumer="b", most=1, wait_s=30)
    await work.finish()

    async def room() -> bool:
        return await rooms.refusal(mine, "b") == ""

    await until(room, what="the number is looked at again")
    assert await rooms.refusal(mine, "b") != ""  # the one place was taken by the look that found it
    await asyncio.gather(mine.close(), other.close())


async def test_a_requester_without_the_right_to_count_asks_once_and_goes_on() -> None:
    class Shut(MemoryBus):
        looks = 0

        async def queued(self, subject_filter: str) -> int:
            del subject_filter
            self.looks += 1
            raise DeniedError("no right")

    shut, rooms = Shut(), Rooms(TOPICS)
    assert [await rooms.refusal(shut, name) for name in ("b", "b", "c")] == ["", "", ""]
    assert shut.looks == 1
    await shut.close()


async def test_the_queue_is_counted_alike_by_both_buses(bus: NatsBus) -> None:
    memory = MemoryBus()
    for one in (bus, memory):
        assert await one.queued(TOPICS.transfer_filter("b")) == 0
        for number in range(3):
            await one.store(TOPICS.transfer("b", f"{number:032x}"), b"x", message_id=f"{number}")
        await one.store(TOPICS.transfer("c", f"{0:032x}"), b"x", message_id="c")
        assert await one.queued(TOPICS.transfer_filter("b")) == 3
        (work,) = await one.take_work(TOPICS.transfer_filter("b"), consumer="b", most=1, wait_s=30)
        assert await one.queued(TOPICS.transfer_filter("b")) == 3
        await work.finish()
        await until(partial(counts, one, 2))
    await memory.close()


async def counts(bus: NatsBus | MemoryBus, number: int) -> bool:
    return await bus.queued(TOPICS.transfer_filter("b")) == number
