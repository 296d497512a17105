"""The registry: one live worker a name, epochs that never repeat, and records of others that cannot be read."""

import os
import subprocess
import sys

import pytest

from kvbus.errors import ConfigError
from kvbus.events import Header, HeartbeatSeen, InstanceRecord, encode
from kvbus.names import epoch_counter, epoch_from
from kvbus.parts import ProcessIdentity
from kvbus.processes import identity
from kvbus.roles.recorder import Recorder
from kvbus.roles.registry import Presence, lookup, next_epoch, registry_key, require_alone
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Topics
from kvbus.transport import BUCKET_INSTANCES

TOPICS = Topics()


def record(process: ProcessIdentity) -> InstanceRecord:
    return InstanceRecord(
        verify_key=b"k" * 32, fingerprint="f", model="toy", engine="toy", block_tokens=32, ranks=1, page_bytes=64,
        pages=8, process=process, transports=("memory",), version="0",
    )  # fmt: skip


async def registered(
    bus: MemoryBus, process: ProcessIdentity, *, epoch: int, instance: str = "a", speaker: str = "m0"
) -> None:
    header = Header(k=InstanceRecord.KIND, i=instance, m=speaker, e=epoch, s=1, t=1)
    await bus.put(BUCKET_INSTANCES, registry_key(instance, "m0"), encode(header, record(process)))


def ended_process() -> ProcessIdentity:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    who = identity(child.pid)
    child.communicate()
    return who


def presence(bus: MemoryBus, *, epoch: int) -> Presence:
    recorder = Recorder(bus=bus, topics=TOPICS, instance="a", member="m0", epoch=epoch, unix_ns=lambda: 1)
    load = HeartbeatSeen(
        transfers_running=0, leases_held=0, pages_free=0, pages_cached=0, pages_lent=0, facts_sequence=0, settle_n=0
    )
    return Presence(
        bus=bus, topics=TOPICS, recorder=recorder, instance="a", member="m0", record=record(identity()),
        load=lambda: load,
    )  # fmt: skip


async def test_a_name_that_nobody_has_is_free() -> None:
    await require_alone(MemoryBroker().connect(), "a", "m0")


async def test_a_live_process_of_this_host_keeps_its_name() -> None:
    bus = MemoryBroker().connect()
    await registered(bus, identity(), epoch=epoch_from(1, 1))
    with pytest.raises(ConfigError, match=f"running already .process {os.getpid()} of this host"):
        await require_alone(bus, "a", "m0")
    await require_alone(bus, "b", "m0")


async def test_the_record_of_a_process_that_has_ended_holds_nobody_up() -> None:
    bus = MemoryBroker().connect()
    await registered(bus, ended_process(), epoch=epoch_from(1, 1))
    await require_alone(bus, "a", "m0")


async def test_each_start_takes_another_epoch_and_counts_on() -> None:
    bus = MemoryBroker().connect()
    epochs = [await next_epoch(bus, "a", "m0") for _ in range(3)]
    assert [epoch_counter(epoch) for epoch in epochs] == [1, 2, 3]
    assert epoch_counter(await next_epoch(bus, "b", "m0")) == 1


async def test_a_worker_that_sees_a_later_start_of_its_own_name_stops() -> None:
    bus = MemoryBroker().connect()
    ours = presence(bus, epoch=epoch_from(4, 9))
    await ours.register()
    await ours.require_own_name()
    await registered(bus, identity(), epoch=epoch_from(3, 9))  # an earlier one's last words change nothing
    await ours.require_own_name()
    await registered(bus, identity(), epoch=epoch_from(5, 9))
    with pytest.raises(ConfigError, match="this one stops"):
        await ours.require_own_name()


async def test_records_that_cannot_be_read_hide_no_others() -> None:
    bus = MemoryBroker().connect()
    await bus.put(BUCKET_INSTANCES, registry_key("a", "broken"), b"\xff")
    await registered(bus, identity(), epoch=epoch_from(1, 1))
    await registered(bus, identity(), epoch=epoch_from(1, 1), instance="ab")
    assert [(one.instance, one.member) for one in await lookup(bus, "a")] == [("a", "m0")]


@pytest.mark.parametrize("speaker", ["", "m1", "." * 64])
async def test_a_record_of_one_member_under_the_name_of_another_is_nobodys(speaker: str) -> None:
    # a source's member is asked on a subject of its own, which an empty or overlong name would not make
    bus = MemoryBroker().connect()
    await registered(bus, identity(), epoch=epoch_from(1, 1), speaker=speaker)
    nameless = Header(k=InstanceRecord.KIND, i="a", m="", e=epoch_from(1, 1), s=1, t=1)
    await bus.put(BUCKET_INSTANCES, registry_key("a", ""), encode(nameless, record(identity())))
    assert await lookup(bus, "a") == []
