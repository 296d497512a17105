"""What a doctor says of members whose transports have broken down: wrong, by name, and no way that leads there."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.commands.findings import Finding, Level, Notes
from kvbus.commands.worker_checks import check_workers
from kvbus.events import Header, HeartbeatSeen, InstanceRecord, StatsAnswered, encode
from kvbus.names import epoch_from
from kvbus.processes import identity
from kvbus.roles.registry import registry_key
from kvbus.topics import Query, Topics
from kvbus.transport import BUCKET_INSTANCES, Delivery
from kvbus.version import VERSION

BEAT_S = 0.3
Counted = dict[str, int | float | str]


class Member:
    """One instance's member as the broker knows it: its record, its heartbeat, its counters."""

    def __init__(self, bus: NatsBus, instance: str, counters: Counted) -> None:
        self._bus, self._instance, self._counters = bus, instance, counters
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False

    async def start(self) -> None:
        record = InstanceRecord(
            verify_key=b"k" * 32, fingerprint="f" * 32, model="m", engine="toy", block_tokens=32, ranks=1,
            page_bytes=65536, pages=8, process=identity(), transports=("ucx",), version=VERSION,
        )  # fmt: skip
        await self._bus.put(BUCKET_INSTANCES, registry_key(self._instance, "m0"), encode(self._header(record), record))
        await self._bus.respond(Topics().query(self._instance, Query.STATS), self._answer)
        self._beat()

    async def end(self) -> None:
        self._ended = True
        await asyncio.gather(*self._tasks)

    def _header(self, body: InstanceRecord | HeartbeatSeen | StatsAnswered) -> Header:
        return Header(k=body.KIND, i=self._instance, m="m0", e=epoch_from(1, 7), s=0, t=0)

    async def _answer(self, _delivery: Delivery) -> bytes:
        said = StatsAnswered(counters=self._counters)
        return encode(self._header(said), said)

    def _beat(self) -> None:
        if self._ended:
            return
        load = HeartbeatSeen(
            transfers_running=0, leases_held=0, pages_free=8, pages_cached=0, pages_lent=0, facts_sequence=0, settle_n=0
        )
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._bus.publish(Topics().heartbeat(self._instance), encode(self._header(load), load)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        loop.call_later(BEAT_S, self._beat)


async def look(folder: Path, counters: dict[str, Counted]) -> dict[str, Finding]:
    async with EmbeddedBroker.started(folder / "nats") as server, AsyncExitStack() as stack:
        bus = await NatsBus.connect(server.url, name="tester", token=server.token, limits=EMBEDDED)
        stack.push_async_callback(bus.close)
        await bus.ensure_assets()
        for instance, counted in counters.items():
            member = Member(bus, instance, counted)
            await member.start()
            stack.push_async_callback(member.end)
        notes = Notes("workers")
        await check_workers(notes, bus, "kv")
        return {one.name: one for one in notes.findings}


@pytest.mark.parametrize("counted", [{"ways_failed_ucx": "the UCX thread has failed"}, {"ucx_stopped": 1}])
async def test_a_member_that_broke_down_is_wrong_and_says_what_to_do(tmp_path: Path, counted: Counted) -> None:
    well: Counted = {"ways_open_ucx": 1, "ucx_stopped": 0, "ways_ucx_tls": "rc,tcp"}
    found = await look(tmp_path, {"a": {**well, **counted}, "b": well})
    assert (found["a/m0"].level, found["b/m0"].level) == (Level.WRONG, Level.OK)
    assert ("the UCX thread has failed" in found["a/m0"].found) is ("ways_failed_ucx" in counted)
    assert ("ucx is stopped" in found["a/m0"].found) is ("ucx_stopped" in counted)
    assert "start it again" in found["a/m0"].next_step
    assert "UCX may take rc,tcp" in found["b/m0"].found
    broke_ways = "ways_failed_ucx" in counted
    assert (found["a → b"].level is Level.WRONG) is (found["b → a"].level is Level.WRONG) is broke_ways
