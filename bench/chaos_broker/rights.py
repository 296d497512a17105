"""Rights that are taken away while workers work, credentials that expire, and a broker that is not there yet."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from bench.chaos_broker.scene import Scene
from bench.chaos_broker.stage import Stage, guarded, staged
from kvbus.broker import EmbeddedBroker
from kvbus.bus_access import new_credential, read_credential
from kvbus.errors import BusError
from kvbus.publisher import Publisher
from kvbus.testing.cluster import free_ports
from kvbus.topics import Command
from tests.flow.guarded import instance
from tests.flow.town import TOPICS
from tests.waiting import until

A, B = instance("a"), instance("b")
AWAY_S = 4.0
REFUSED_S = 10.0
"""Within it a person is told that there is no broker."""


def opening(folder: Path, plant: str) -> AbstractAsyncContextManager[Stage]:
    """A broker that knows both instances as users."""
    return guarded(folder, plant, A, B)


async def right_removed(scene: Scene) -> None:
    """Source and destination lose the right to record facts, and the source also that to be asked."""
    stage = scene.stage
    rights = (TOPICS.facts("a"), TOPICS.facts("b"), f"{TOPICS.command('a', Command.LEASE)}.*")
    await scene.amid()
    stage.change({f'"{right}", ': "" for right in rights})
    try:
        await asyncio.sleep(AWAY_S)
        for name in ("a", "b"):
            log = stage.workers[name].log.read_text().lower()
            scene.row.check("violation" in log or "does not let" in log, f"the log of {name} says nothing of it")
    finally:
        stage.restore()
    await scene.served()


async def credentials_expired(scene: Scene) -> None:
    """The broker forgets both workers' users, and closes their connections; later it knows them again."""
    stage = scene.stage
    users = {user: read_credential(stage.credential(user)).key for user in (A, B)}
    await scene.amid()
    stage.change({key: new_credential(user, "kv").key for user, key in users.items()})
    try:
        await asyncio.sleep(AWAY_S)
        for name in ("a", "b"):
            said = "refused these credentials" in stage.workers[name].log.read_text()
            scene.row.check(said, f"the log of {name} does not say that its credentials are refused")
    finally:
        stage.restore()
    await scene.served()


@asynccontextmanager
async def nothing_there(folder: Path, plant: str) -> AsyncIterator[Stage]:
    """Worker and requester are told within ten seconds that no broker answers; on the same port one starts then."""
    (port,) = free_ports(1)
    url, at = f"nats://127.0.0.1:{port}", time.monotonic()
    command = [sys.executable, "-m", "kvbus", "worker", "--instance", "a", "--run-dir", str(folder / "early")]
    worker = await asyncio.create_subprocess_exec(
        *command, "--nats", url, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        async with Publisher(url):
            raise AssertionError("a requester entered where no broker is")
    except BusError as error:
        asked_s = time.monotonic() - at
        told = str(error)
    try:
        async with asyncio.timeout(2 * REFUSED_S):
            _, said = await worker.communicate()
    finally:
        if worker.returncode is None:
            worker.kill()
    started_s = time.monotonic() - at
    broker = EmbeddedBroker(folder / "broker", port=port)
    async with staged(folder, broker, plant) as stage:
        stage.findings += [
            text
            for holds, text in (
                (asked_s <= REFUSED_S, f"a requester waited {asked_s:.1f} s"),
                ("kvbus up" in told, f"a requester is not told what to do: {told}"),
                (worker.returncode == 2, f"a worker without a broker ended with status {worker.returncode}"),
                (said.decode().count("kvbus: ") == 1, f"a worker without a broker said {said.decode()[-300:]!r}"),
                (started_s <= 2 * REFUSED_S, f"a worker waited {started_s:.1f} s"),
            )
            if not holds
        ]
        stage.remarks.append(
            f"without a broker a requester is told after {asked_s:.1f} s, a worker ends by {started_s:.1f} s"
        )
        yield stage


async def connected_early(scene: Scene) -> None:
    """A requester that connects to nothing finds the broker that starts meanwhile."""
    broker = scene.stage.broker
    broker.kill()
    entering = asyncio.ensure_future(scene.stage.enter("early"))
    await asyncio.sleep(1.0)
    await broker.start()
    bus = await entering
    scene.row.check(bus.health().connected, "whoever connected before the broker was there is not connected")
    await bus.close()
    await until(lambda: scene.follower.bus.health().connected, what="the follower is connected again")
