"""What `kvbus up` waits for."""

import asyncio
from pathlib import Path

from kvbus.commands.cluster import Cluster, ClusterPlan
from tests.waiting import until


async def left(cluster: Cluster, command: str) -> tuple[list[str], "asyncio.Task[str]"]:
    """Let the one worker be a process that ends; return who has left, and the wait for a part that fails."""
    cluster.workers["a"] = await asyncio.create_subprocess_exec("sh", "-c", command)
    names: list[str] = []
    waiting = asyncio.ensure_future(cluster.until_part_ends(names.append))
    await until(lambda: names or waiting.done(), what="the wait has heard of its end")
    return names, waiting


def alone(tmp_path: Path) -> Cluster:
    """One worker, at a broker of somebody else, without a gateway."""
    plan = ClusterPlan(("a",), "toy", {}, 8, nats_url="nats://127.0.0.1:4222")
    return Cluster(plan, run_dir=tmp_path)


async def test_when_the_last_instance_was_drained_all_else_goes_on_although_nothing_else_is_ours(
    tmp_path: Path,
) -> None:
    # Planted fault that this catches: a wait for the first of no parts, which is an error.
    names, waiting = await left(alone(tmp_path), "exit 0")
    assert names == ["a"]
    assert not waiting.done()
    waiting.cancel()


async def test_an_instance_that_fails_ends_all(tmp_path: Path) -> None:
    names, waiting = await left(alone(tmp_path), "exit 3")
    assert names == []
    assert "instance a ended with status 3, so everything stops" in await waiting
