"""A small cluster of real nats-servers on loopback, for tests of what happens when nodes die.

Each node is an `EmbeddedBroker` with a store of its own; they share one token and know each other by routes whose ports
were free when the cluster was made.
"""

import json
import os
import random
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import cast

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import AssetLimits
from kvbus.errors import BusError, ConfigError

NODES = 3
CALL_S = 5.0
PORT_FIRST, PORT_LAST = 10_000, 65_535
"""Above the ports that services are known by."""
LAME_DUCK_S = 30
"""The shortest that nats-server takes; a node with few clients has let go of them, and ends, much sooner."""


class LocalCluster:
    """Nodes of one cluster; each can be killed, started again over its store, or told to leave in an orderly way."""

    def __init__(self, folder: Path, *, nodes: int = NODES, token: str | None = None) -> None:
        self.folder = folder
        self.token = token or secrets.token_urlsafe(24)
        ports = free_ports(2 * nodes)
        self._routes = ports[nodes:]
        self.nodes: Sequence[EmbeddedBroker] = [
            EmbeddedBroker(folder / f"n{place}", port=port, include=folder / f"n{place}.conf")
            for place, port in enumerate(ports[:nodes])
        ]

    @property
    def url(self) -> str:
        """All nodes, as `NatsBus.connect` takes them."""
        return ",".join(node.url for node in self.nodes)

    async def start(self) -> None:
        """Start all nodes; they agree on a leader some seconds later."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for place, node in enumerate(self.nodes):
            path = self.folder / f"n{place}.conf"
            path.touch(mode=0o600)
            path.write_text(self._config(place))
            await node.start()

    async def stop(self) -> None:
        """Stop all nodes, kindly and then by force; repeatable."""
        for node in self.nodes:
            await node.stop()

    def named(self, name: str) -> EmbeddedBroker:
        """Return the node that the cluster knows by this name."""
        return self.nodes[int(name.removeprefix("n"))]

    def lame_duck(self, node: EmbeddedBroker) -> None:
        """Tell a node to hand over what it leads, to let its clients go one by one, and to end."""
        if node.pid is not None:
            signal_process(node.pid, signal.SIGUSR2)

    def _config(self, place: int) -> str:
        routes = [f"nats://127.0.0.1:{port}" for port in self._routes]
        cluster = {"name": "kvbus", "host": "127.0.0.1", "port": self._routes[place], "routes": routes}
        lines = {
            "server_name": f"n{place}",
            "authorization": {"token": self.token},
            "cluster": cluster,
            "lame_duck_duration": f"{LAME_DUCK_S}s",
            "lame_duck_grace_period": "1s",
        }
        return "".join(f"{name}: {json.dumps(value)}\n" for name, value in lines.items())


def signal_process(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def free_ports(count: int) -> list[int]:
    """Return so many ports of loopback that nobody listens on now, all of them different.

    They lie below those that the system gives out by itself, so that none of them becomes somebody else's by chance
    until it is used, or while whoever listened on it is away.
    """
    given_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    below = range(PORT_FIRST, given_out) if given_out > 2 * PORT_FIRST else range(PORT_FIRST, PORT_LAST)
    free: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(below, len(below)):
            if len(free) == count:
                break
            one = held.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                free.append(port)
    if len(free) < count:
        raise ConfigError("so many ports of loopback are not free", wanted=count, free=len(free))
    return free


@asynccontextmanager
async def started_cluster(folder: Path, *, nodes: int = NODES) -> AsyncIterator[LocalCluster]:
    """Run a cluster for the length of a `with` block."""
    cluster = LocalCluster(folder, nodes=nodes)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


REPLICATED = AssetLimits(facts_bytes_max=256 << 20, replicas=NODES)
"""Streams and buckets on each of three nodes, within the disk that each of them may use."""


async def leader_of(bus: NatsBus, stream: str) -> str:
    """Return the name of the node that leads a stream; BusError while there is none."""
    leader = (await _placement(bus, stream)).get("leader")
    if not isinstance(leader, str) or not leader:
        raise BusError("nobody leads this stream now", stream=stream)
    return leader


async def is_whole(bus: NatsBus, stream: str) -> bool:
    """Whether a stream has a leader, and all its replicas have what it has; False while nobody can say."""
    try:
        placed = await _placement(bus, stream)
    except (BusError, TimeoutError):
        return False
    replicas = cast("list[dict[str, object]]", placed.get("replicas") or [])
    current = [one for one in replicas if one.get("current") and not one.get("offline")]
    return bool(placed.get("leader")) and len(current) == NODES - 1


async def _placement(bus: NatsBus, stream: str) -> dict[str, object]:
    answer = json.loads(await bus.ask(f"$JS.API.STREAM.INFO.{stream}", b"", wait_s=CALL_S))
    if "error" in answer:
        raise BusError("the cluster does not say where this stream is", stream=stream, reason=str(answer["error"]))
    return cast("dict[str, object]", answer.get("cluster") or {})
