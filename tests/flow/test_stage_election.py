"""`kvbus stage` while a cluster of brokers has lost the node that led its queue: it asks again, and then it settles."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbus.bus import NatsBus
from kvbus.errors import BusError
from kvbus.roles.registry import lookup
from kvbus.testing.cluster import REPLICATED, LocalCluster, is_whole, leader_of, started_cluster
from kvbus.topics import Topics
from tests.flow.command_line import Up, finish, kvbus, start
from tests.flow.town import as_text, prompt
from tests.waiting import until

STREAM = "KVB_TRANSFER"
CLUSTER_S = 100.0
"""Three nodes that start on a busy host, and streams on each of them."""


@pytest.fixture
async def cluster(folder: Path) -> AsyncIterator[LocalCluster]:
    async with started_cluster(folder / "nodes") as made:
        yield made


@pytest.fixture
async def bus(cluster: LocalCluster) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(cluster.url, name="tester", token=cluster.token, topics=Topics(), limits=REPLICATED)

    async def made() -> bool:
        with contextlib.suppress(BusError):
            await bus.ensure_assets()
            return await is_whole(bus, STREAM)
        return False

    await until(made, CLUSTER_S, what="the cluster has its streams")
    yield bus
    await bus.close()


@pytest.fixture
async def workers(cluster: LocalCluster, bus: NatsBus, folder: Path) -> AsyncIterator[list[Up]]:
    options = ["--nats", cluster.url, "--token", cluster.token, "--engine-options", json.dumps({"work_rounds": 1})]
    started = []
    for name, allow in (("a", []), ("b", ["--allow", "a"])):
        state = folder / name
        state.mkdir()
        started.append(start(state, "worker", "--instance", name, "--backend", "socket", *options, *allow))

    async def registered() -> bool:
        with contextlib.suppress(BusError):
            return bool(await lookup(bus, "a") and await lookup(bus, "b"))
        return False

    try:
        await until(registered, CLUSTER_S, what="both workers are registered")
        yield started
    finally:
        for one in started:
            await asyncio.to_thread(finish, one)


@pytest.mark.slow
async def test_stage_outlives_the_election_of_a_leader(
    cluster: LocalCluster, bus: NatsBus, workers: list[Up], folder: Path
) -> None:
    assert workers
    leader = await leader_of(bus, STREAM)
    cluster.named(leader).kill()

    ran = await asyncio.to_thread(
        kvbus,
        *("stage", "--from", "a", "--to", "b", "--json", as_text(prompt("election", 2))),
        *("--nats", cluster.url, "--token", cluster.token),
        state=folder,
        deadline_s=90.0,
    )

    assert ran.returncode == 0, ran
    assert json.loads(ran.stdout)["outcome"]["outcome"] == "settled"
    assert await leader_of(bus, STREAM) != leader
