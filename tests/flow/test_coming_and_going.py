"""Instances that come while others run, and that leave for good: usable at once, and then forgotten everywhere."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.bus_assets import INSTANCE_TTL_S
from kvbus.gateway.directory import Directory
from kvbus.roles.registry import lookup
from tests.flow.command_line import kvbus
from tests.flow.members import assert_audit_is_clean
from tests.flow.town import Town, prompt, town
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await asyncio.gather(running.start("a", allow=["c"]), running.start("b", allow=["a", "c"]))
        yield running


GONE = -1
"""What the system says of a process that has ended, where a pidfd of it is still open."""
CLOSE_WAIT = "08"


def watched(pid: int) -> list[int]:
    """The processes of which a worker has a pidfd open; GONE for those that have ended."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found += [int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith("Pid:")]
    return found


def half_open(pid: int) -> int:
    """How many connections a worker keeps whose other end is closed."""
    links: set[str] = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.add(str(path.readlink()))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(f"socket:[{row[9]}]" in links for row in rows if row[3] == CLOSE_WAIT)


async def test_an_instance_that_comes_is_usable_at_once_and_one_that_leaves_is_forgotten_everywhere(pair: Town) -> None:
    assert (await pair.stage(prompt("before it comes", 2))).outcome == "settled"
    await pair.at_rest()
    directory = Directory(pair.bus)

    await pair.start("c", allow=["a"])
    for source, destination in ("ac", "cb", "ca"):
        outcome = await pair.stage(prompt(f"{source} to {destination}", 3), source=source, destination=destination)
        assert (outcome.outcome, outcome.pages_moved) == ("settled", 3)
    await directory.refresh()
    assert set(directory.instances) == {"a", "b", "c"}
    pids = {name: pair.workers[name].pid for name in "abc"}
    assert pids["c"] in watched(pids["a"])  # a lends to it

    broker = ("--nats", pair.broker.url, "--token", pair.broker.token or "")
    told = await asyncio.to_thread(kvbus, "drain", "c", *broker, state=pair.folder / "state")
    assert told.returncode == 0, told.stderr
    await until(lambda: not pair.workers["c"].alive, 60, what="c has ended")
    await pair.at_rest("a", "b")

    async def forgotten() -> bool:
        await directory.refresh()
        return not await lookup(pair.bus, "c") and set(directory.instances) == {"a", "b"}

    await until(forgotten, 6 * INSTANCE_TTL_S, what="the registry and a gateway have forgotten c")
    for pid in (pids["a"], pids["b"]):
        await until(lambda pid=pid: GONE not in watched(pid), 60, what="its process is watched no more")  # type: ignore[misc]
        await until(lambda pid=pid: not half_open(pid), 60, what="no connection to it is kept")  # type: ignore[misc]
    refused = await pair.verdict(prompt("of nobody", 2), source="c")
    assert refused.reason == "no instance 'c' is registered: is its worker running?"
    assert (await pair.stage(prompt("after it has left", 2))).outcome == "settled"
    await pair.at_rest("a", "b")
    await assert_audit_is_clean(pair)
