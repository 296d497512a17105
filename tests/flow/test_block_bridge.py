"""`kvbus bridge vllm-events` as a person runs it: on a real broker, until vLLM dies or somebody ends it."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from docs.prefix_index import PrefixIndex
from kvbus.blocks import BlocksUnseen
from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.events import Event
from kvbus.subscriber import Seen, Subscriber
from tests.flow.command_line import environment
from tests.unit.helpers.vllm_publisher import VllmPublisher, stored
from tests.waiting import until, wait_until

ROOT = Path(__file__).resolve().parents[2]
PROMPT = tuple(range(8))


@asynccontextmanager
async def connected(broker: EmbeddedBroker) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(broker.url, name="test", token=broker.token, limits=EMBEDDED)
    await bus.ensure_assets()
    try:
        yield bus
    finally:
        await bus.close()


@contextmanager
def bridging(tmp_path: Path, broker: EmbeddedBroker, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-m", "kvbus", "bridge", "vllm-events", "--instance", "a", *arguments]
    command += ["--nats", broker.url, "--token", broker.token]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment(tmp_path), stdin=subprocess.DEVNULL, stderr=log, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def read_until_alarm(bus: NatsBus) -> tuple[list[Event], PrefixIndex]:
    """What the stream holds, up to and with an alarm."""
    index, events = PrefixIndex(), list[Event]()
    async with aclosing(Subscriber(bus).blocks()) as items:
        async for item in items:
            if isinstance(item, Seen):
                events.append(item.event)
                index.take(item.event)
                if isinstance(item.event.body, BlocksUnseen):
                    break
    return events, index


async def asked(broker: EmbeddedBroker, tmp_path: Path) -> str:
    """What the example in docs says of the prompt."""
    env = environment(tmp_path, {"KVBUS_NATS_URL": broker.url, "KVBUS_NATS_TOKEN": broker.token})
    command = [sys.executable, "-m", "docs.prefix_index", *map(str, PROMPT)]
    ran = await asyncio.to_thread(
        subprocess.run, command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=150, check=True
    )
    return ran.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["dead", "signal"])
async def test_a_bridge_leaves_an_alarm_behind_whether_vllm_dies_or_it_is_ended(
    tmp_path: Path, broker: EmbeddedBroker, end: str
) -> None:
    async with VllmPublisher() as vllm, connected(broker) as bus:
        live, replay = vllm.addresses
        given = ("--endpoint", live, "--replay", replay, "--dead-after", "5")
        with bridging(tmp_path, broker, *given) as process:
            await vllm.until_subscribed()
            await vllm.publish(stored([1, 2], PROMPT))

            async def is_stored() -> bool:
                return len(await bus.history("kv.blocks.a")) == 2

            await until(is_stored)
            assert await asked(broker, tmp_path) == "a holds 8 of 8 tokens"
            if end == "dead":
                await vllm.__aexit__()
            else:
                process.send_signal(signal.SIGTERM)
            wait_until(lambda: process.poll() is not None)
            assert process.returncode == (1 if end == "dead" else 0)
        events, index = await read_until_alarm(bus)
        assert [event.body.KIND for event in events] == ["blocks", "blocks", "blocks_unseen"]  # type: ignore[union-attr]
        assert len({event.header.e for event in events}) == 1
        assert index.prefixes(PROMPT) == {"a": 0}
    log = (tmp_path / "log").read_text()
    assert ("no sign of life of the engine's KV events any more" in log) is (end == "dead")
