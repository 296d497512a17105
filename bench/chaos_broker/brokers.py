"""A broker that is killed, emptied or stopped, and a cluster that loses its nodes."""

import asyncio
import shutil
import signal
import time
from functools import partial

from bench.chaos_broker.scene import Scene
from kvbus.broker import EmbeddedBroker
from kvbus.commands.auditing import Verdict
from kvbus.errors import BusError
from kvbus.testing.cluster import LocalCluster, is_whole, leader_of, signal_process
from tests.waiting import until

STREAMS = ("KVB_FACTS", "KVB_TRANSFER", "KVB_SETTLE")
STOPPED_S = 12.0
"""Beyond the two pings of three seconds each by which a half-open connection is found."""
NOTICED_S = 10.0
LEADER_KILLS = 10
WHOLE_S = 60.0
TWO_DOWN_S = 8.0
ELECTED_S = 15.0
"""A node that follows waits four to nine seconds for its leader, and each stream elects its own; then those who ask
find the new ones."""


async def killed(scene: Scene, *, away_s: float) -> None:
    """The broker is killed, and comes back over its store."""
    await scene.amid()
    scene.stage.broker.kill()
    await asyncio.sleep(away_s)
    await scene.stage.broker.start()
    await scene.served()
    await scene.repeat()


async def emptied(scene: Scene) -> None:
    """The broker is killed and comes back with nothing; streams and buckets are made anew."""
    broker = scene.stage.broker
    await scene.amid()
    broker.kill()
    scene.thrown_away_at = time.monotonic()
    shutil.rmtree(broker.folder / "store")
    await broker.start()
    await scene.stage.assets()
    scene.verdicts = (Verdict.CLEAN, Verdict.INCOMPLETE)  # what was thrown away cannot be audited
    await scene.served()
    await scene.repeat()


async def stopped(scene: Scene) -> None:
    """The broker stands still with all connections open, and goes on."""
    await scene.amid()
    pid, at = scene.stage.broker.pid, time.monotonic()
    if pid is None:
        raise BusError("the broker does not run")
    signal_process(pid, signal.SIGSTOP)
    try:
        await until(lambda: not scene.follower.bus.health().connected, STOPPED_S, what="the connection is found dead")
        noticed_s = time.monotonic() - at
        await asyncio.sleep(max(0.0, STOPPED_S - noticed_s))
    finally:
        signal_process(pid, signal.SIGCONT)
    scene.row.notes.append(f"found dead after {noticed_s:.1f} s")
    scene.row.check(noticed_s <= NOTICED_S, f"a half-open connection was found after {noticed_s:.1f} s")
    await scene.served()
    await scene.repeat()


async def leaders_killed(scene: Scene, *, kills: int) -> None:
    """The node that leads a stream is killed, ten times, and comes back each time."""
    pauses = []
    for number in range(kills):
        node = await leading(scene, STREAMS[number % len(STREAMS)])
        await scene.amid()
        at = time.monotonic()
        node.kill()
        await scene.served()
        pauses.append(time.monotonic() - at)
        await node.start()
        await whole(scene)
    told = ", ".join(f"{pause:.1f}" for pause in pauses)
    scene.row.notes.append(f"after each of {kills} kills five transfers had settled within {told} s")
    await scene.repeat()


async def lame_duck(scene: Scene) -> None:
    """The node that leads the facts is told to leave in an orderly way."""
    node = await leading(scene, "KVB_FACTS")
    cluster_of(scene).lame_duck(node)
    await until(lambda: node.pid is None, WHOLE_S, what="the node has ended")
    await scene.served()
    await node.start()
    await whole(scene)


async def two_down(scene: Scene) -> None:
    """Two of three nodes are killed, and come back."""
    cluster = cluster_of(scene)
    leads = await leading(scene, "KVB_FACTS")
    down = [leads, next(node for node in cluster.nodes if node is not leads)]
    await scene.amid()
    for node in down:
        node.kill()
    await asyncio.sleep(TWO_DOWN_S)
    for node in down:
        await node.start()
    await whole(scene)
    await scene.served()
    await scene.repeat()


def cluster_of(scene: Scene) -> LocalCluster:
    """Return the cluster of a row that has one."""
    broker: EmbeddedBroker | LocalCluster = scene.stage.broker
    if not isinstance(broker, LocalCluster):
        raise BusError("this row has no cluster")
    return broker


async def leading(scene: Scene, stream: str) -> EmbeddedBroker:
    """Return the node that leads a stream, once one does."""
    found: list[str] = []

    async def known() -> bool:
        try:
            found.append(await leader_of(scene.stage.bus, stream))
        except (BusError, TimeoutError):
            return False
        return True

    await until(known, WHOLE_S, what=f"{stream} has a leader")
    return cluster_of(scene).named(found[-1])


async def whole(scene: Scene) -> None:
    """Wait until each stream stands on all nodes."""
    for stream in STREAMS:
        await until(partial(is_whole, scene.stage.bus, stream), WHOLE_S, what=f"{stream} is on all nodes")
