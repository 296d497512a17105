"""`kvbus stage` to a destination that refuses at first: it asks again where an election is why, and not for long."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.events import Header, TransferOutcome, TransferRequested, TransferVerdict, decode, encode
from kvbus.parts import Body
from kvbus.topics import Topics
from tests.flow.command_line import kvbus

TOPICS = Topics()
TRANSFER = "b-00000007-1"
ELECTING = "bus_unavailable: the registry did not answer"


@dataclass(slots=True)
class Refusing:
    """A destination that refuses so many requests, and takes the next one, which settles."""

    bus: NatsBus
    refusals: int
    reason: str = ELECTING
    heard: list[TransferRequested] = field(default_factory=list)

    async def serve(self) -> None:
        while True:
            offered = await self.bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=1, wait_s=1.0)
            for work in offered:
                request = decode(work.delivery.data).body
                assert isinstance(request, TransferRequested)
                self.heard.append(request)
                for body in self.words(request):
                    header = Header(k=body.KIND, i="b", m="m0", e=7, s=len(self.heard), t=1)
                    await self.bus.publish(TOPICS.result(request.requester), encode(header, body))
                await work.finish()

    def words(self, request: TransferRequested) -> list[Body]:
        about = {"request_hash": request.request_hash, "transfer": TRANSFER}
        if len(self.heard) <= self.refusals:
            said = {"request_id": request.request_id, "request_hash": request.request_hash, "reason": self.reason}
            return [TransferVerdict.model_validate({**said, "verdict": "refused"})]
        return [
            TransferVerdict.model_validate({**about, "request_id": request.request_id, "verdict": "accepted"}),
            TransferOutcome.model_validate({**about, "source": "a", "destination": "b", "outcome": "settled"}),
        ]

    async def staged(self, broker: EmbeddedBroker, state: Path, *more: str) -> "subprocess.CompletedProcess[str]":
        """Run `kvbus stage` to its end while this destination serves."""
        serving = asyncio.ensure_future(self.serve())
        command = ("stage", "--from", "a", "--to", "b", "--json", "text", *more)
        at = ("--nats", broker.url, "--token", broker.token)
        try:
            return await asyncio.to_thread(kvbus, *command, *at, state=state)
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving


@pytest.fixture
async def bus(broker: EmbeddedBroker) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(broker.url, name="b", token=broker.token, topics=TOPICS, limits=EMBEDDED)
    try:
        await bus.ensure_assets()
        yield bus
    finally:
        await bus.close()


async def test_a_destination_that_cannot_reach_the_registry_for_a_moment_is_asked_again_and_stderr_says_why(
    broker: EmbeddedBroker, bus: NatsBus, folder: Path
) -> None:
    b = Refusing(bus, refusals=2)

    ran = await b.staged(broker, folder)

    assert ran.returncode == 0, ran
    document = json.loads(ran.stdout)
    assert (document["verdict"], document["transfer"]) == ("accepted", TRANSFER)
    assert document["outcome"]["outcome"] == "settled"
    assert ran.stderr.count(f"refused: {ELECTING}; asking again\n") == 2
    assert len(b.heard) == 3
    assert {one.request_hash for one in b.heard} == {document["request_hash"]}


async def test_a_refusal_that_no_election_explains_ends_it_at_once(
    broker: EmbeddedBroker, bus: NatsBus, folder: Path
) -> None:
    b = Refusing(bus, refusals=1, reason="source 'a' is not among those that 'b' allows (--allow a)")

    ran = await b.staged(broker, folder)

    assert ran.returncode == 1, ran
    document = json.loads(ran.stdout)
    assert (document["verdict"], document["reason"], document["outcome"]) == ("refused", b.reason, None)
    assert "asking again" not in ran.stderr
    assert len(b.heard) == 1


async def test_it_is_asked_again_for_as_long_as_the_budget_and_then_ends_with_the_last_refusal(
    broker: EmbeddedBroker, bus: NatsBus, folder: Path
) -> None:
    b = Refusing(bus, refusals=10**6)

    ran = await b.staged(broker, folder, "--budget", "6")

    assert ran.returncode == 1, ran
    assert json.loads(ran.stdout)["reason"] == ELECTING
    asked_again = ran.stderr.count("asking again")
    assert len(b.heard) == asked_again + 1
    assert 0 < asked_again < 10, "pauses of 0.1, 0.2, 0.4, 0.8, 1.6 and 2 s spend six seconds"
