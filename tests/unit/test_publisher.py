"""The requester's door: a durable request, a verdict, an outcome; and clear refusals of what cannot be asked."""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbus import config
from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED, AssetLimits
from kvbus.errors import BusError
from kvbus.events import (
    Header,
    TransferCancelRequested,
    TransferOutcome,
    TransferRequested,
    TransferVerdict,
    decode,
    encode,
)
from kvbus.names import request_hash, tokens_from_bytes
from kvbus.parts import Body, Prompt
from kvbus.publisher import Publisher, TransferHandle, Verdict, checked_prompt
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Command, Topics
from kvbus.transport import Bus, Delivery
from tests.waiting import until

TOPICS = Topics()


def said(body: Body) -> bytes:
    return encode(Header(k=body.KIND, i="b", m="m0", e=1, s=1, t=time.time_ns()), body)


class Destination:
    """Plays instance b over a bus: takes requests, says verdicts and outcomes."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.cancelled: list[str] = []

    async def take(self) -> TransferRequested:
        (work,) = await self.bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=1, wait_s=60)
        request = decode(work.delivery.data).body
        assert isinstance(request, TransferRequested)
        await work.keep()
        return request

    def verdict(self, request: TransferRequested, word: str = "accepted", transfer: str = "T1") -> TransferVerdict:
        return TransferVerdict.model_validate(
            {
                "request_id": request.request_id,
                "request_hash": request.request_hash,
                "verdict": word,
                "transfer": transfer,
            }
        )

    def outcome(self, request: TransferRequested, transfer: str = "T1") -> TransferOutcome:
        return TransferOutcome(
            transfer=transfer, request_hash=request.request_hash, source="a", destination="b", outcome="settled"
        )

    async def tell(self, request: TransferRequested, body: Body) -> None:
        await self.bus.publish(TOPICS.result(request.requester), said(body))

    async def answer(self, delivery: Delivery) -> bytes:
        body = decode(delivery.data).body
        if isinstance(body, TransferCancelRequested):
            self.cancelled.append(body.request_hash)
            return b""
        assert isinstance(body, TransferRequested)
        return said(self.verdict(body, "deduped"))


@pytest.fixture(params=["nats", "memory"])
async def buses(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Bus, Bus]]:
    """The requester's connection and the destination's."""
    if request.param == "memory":
        shared = MemoryBroker()
        yield shared.connect(), shared.connect()
        return
    async with EmbeddedBroker.started(tmp_path / "broker") as broker:
        ours = await NatsBus.connect(broker.url, name="ours", token=broker.token, limits=EMBEDDED)
        theirs = await NatsBus.connect(broker.url, name="theirs", token=broker.token, limits=EMBEDDED)
        await ours.ensure_assets()
        yield ours, theirs
        await ours.close()
        await theirs.close()


@pytest.fixture
def destination(buses: tuple[Bus, Bus]) -> Destination:
    return Destination(buses[1])


@pytest.fixture
async def publisher(buses: tuple[Bus, Bus]) -> AsyncIterator[Publisher]:
    async with Publisher(bus=buses[0]) as running:
        yield running


async def ask(publisher: Publisher) -> TransferHandle:
    return await publisher.transfer(source="a", destination="b", prompt=[1, 2, 3])


async def test_a_request_travels_whole_and_its_verdict_and_outcome_come_back(
    publisher: Publisher, destination: Destination
) -> None:
    handle = await ask(publisher)
    assert (await handle.verdict(0.01)).verdict == "queued"
    assert await handle.outcome(0.01) is None
    request = await destination.take()
    assert request == handle.request
    assert request.prompt.tokens is not None
    assert tokens_from_bytes(request.prompt.tokens) == (1, 2, 3)
    assert request.request_hash == request_hash(model="", salt="", source="a", prompt=request.prompt.canonical())
    await destination.tell(request, destination.verdict(request))
    assert await handle.verdict() == Verdict("accepted", "", "T1")
    await destination.tell(request, destination.outcome(request, "T0"))  # of an earlier transfer of the same prompt
    await destination.tell(request, destination.outcome(request, "T1"))
    outcome = await handle.outcome()
    assert outcome is not None
    assert (outcome.transfer, outcome.outcome) == ("T1", "settled")


async def test_a_repeat_of_a_queued_request_is_answered_by_the_destination_itself(
    publisher: Publisher, destination: Destination
) -> None:
    await ask(publisher)
    alone = await (await ask(publisher)).verdict(0.01)
    assert alone.verdict == "queued"
    assert "b does not listen now" in alone.reason
    await destination.bus.respond(TOPICS.command("b", Command.TRANSFER), destination.answer)
    assert (await (await ask(publisher)).verdict(5)).verdict == "deduped"


async def test_a_refusal_ends_the_wait_for_an_outcome_at_once(publisher: Publisher, destination: Destination) -> None:
    handle = await ask(publisher)
    request = await destination.take()
    await destination.tell(request, destination.verdict(request, "refused", ""))
    assert (await handle.verdict()).verdict == "refused"
    assert await handle.outcome(60) is None


async def test_malformed_results_are_counted_and_ignored(publisher: Publisher, destination: Destination) -> None:
    handle = await ask(publisher)
    request = await destination.take()
    subject = TOPICS.result(publisher.requester)
    good = said(destination.verdict(request))
    for junk in (b"", b"\xc1", bytes(1000), good[:-1], good.replace(b"\xa1v\x01", b"\xa1v\x02")):
        await destination.bus.publish(subject, junk)
    await destination.bus.publish(subject, good)
    assert (await handle.verdict()).verdict == "accepted"
    assert publisher.malformed == 5


async def test_a_cancel_reaches_the_destination_or_says_that_it_did_not(
    publisher: Publisher, destination: Destination
) -> None:
    handle = await ask(publisher)
    assert not await publisher.cancel(handle.request_hash, "b")
    await destination.bus.respond(TOPICS.command("b", Command.CANCEL), destination.answer)
    assert await publisher.cancel(handle.request_hash, "b")
    assert destination.cancelled == [handle.request_hash]


async def test_a_full_queue_is_a_verdict() -> None:
    bus = MemoryBus(MemoryBroker(limits=AssetLimits(transfer_messages_max=0)))
    async with Publisher(bus=bus) as publisher:
        handle = await ask(publisher)
        assert (await handle.verdict(0)).verdict == "skipped_busy"
        assert await handle.outcome() is None
    await bus.close()


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([1, True], "token 1 must be a whole number, got bool"),
        ([1.0], "token 0 must be a whole number, got float"),
        ([-1], "token 0 must lie in"),
        ([1, 2**32], "token 1 must lie in"),
        ([{"role": "user"}], "message 0: content"),
        ([{"role": "user", "content": "x"}, "x"], "message 1 must be a dict"),
        (7, "prompt must be text, token ids or chat messages, got int"),
        (b"x", "got bytes"),
        ("x" * 800_000, "expected at most"),
        ([7] * 200_000, "expected at most"),
    ],
)
async def test_a_prompt_that_does_not_fit_is_refused_by_name(prompt: object, problem: str) -> None:
    async with Publisher(bus=MemoryBus()) as publisher:
        with pytest.raises(ValueError, match=problem):
            await publisher.transfer(source="a", destination="b", prompt=prompt)  # type: ignore[arg-type] # wrong on purpose


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"source": "b"}, "not its own source"),
        ({"source": ""}, "source: a name on the bus must not be empty"),
        ({"destination": "x" * 65}, "destination: .*at most 64"),
        ({"budget_s": 0.0}, "budget_s"),
        ({"on_miss": "guess"}, "on_miss"),
        ({"salt": "s" * 201}, "salt"),
    ],
)
async def test_a_field_that_does_not_fit_is_refused_by_name(fields: dict[str, object], problem: str) -> None:
    async with Publisher(bus=MemoryBus()) as publisher:
        asked: dict[str, object] = {"source": "a", "destination": "b", "prompt": "x", **fields}
        with pytest.raises(ValueError, match=problem):
            await publisher.transfer(**asked)  # type: ignore[arg-type] # wrong on purpose


def test_chat_messages_and_text_become_prompts() -> None:
    assert checked_prompt("x") == Prompt(text="x")
    messages = checked_prompt([{"role": "user", "content": "hi"}]).messages
    assert messages is not None
    assert (messages[0].role, messages[0].content) == ("user", "hi")


async def test_outside_its_block_a_publisher_refuses() -> None:
    with pytest.raises(BusError, match="async with"):
        await ask(Publisher(bus=MemoryBus()))


async def test_with_no_address_it_finds_the_broker_that_the_state_file_names(
    broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBUS_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("KVBUS_NATS_URL", raising=False)
    config.write_state({"nats_url": broker.url, "token": broker.token})
    setup = await NatsBus.connect(broker.url, name="setup", token=broker.token, limits=EMBEDDED)
    await setup.ensure_assets()
    async with Publisher(requester="me") as publisher:
        handle = await ask(publisher)
        assert handle.request.requester == "me"
        destination = Destination(setup)
        request = await destination.take()
        await destination.tell(request, destination.outcome(request))
        assert await handle.outcome() is not None
    await until(lambda: setup.health().connected)
    await setup.close()


async def test_the_script_in_docs_prints_verdict_and_outcome(broker: EmbeddedBroker) -> None:
    script = Path(__file__).parents[2] / "docs" / "request_transfer.py"
    assert len(script.read_text().splitlines()) <= 10
    bus = await NatsBus.connect(broker.url, name="b", token=broker.token, limits=EMBEDDED)
    await bus.ensure_assets()
    environment = {**os.environ, "KVBUS_NATS_URL": broker.url, "KVBUS_NATS_TOKEN": broker.token}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), env=environment, stdout=pipe)
    destination = Destination(bus)
    request = await destination.take()
    await destination.tell(request, destination.verdict(request))
    await destination.tell(request, destination.outcome(request))
    printed, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert b"verdict='accepted'" in printed
    assert b"outcome='settled'" in printed
    await bus.close()
