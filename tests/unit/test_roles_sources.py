"""Whom to ask: the registry is read once for all who ask together, and again once somebody turned out to be gone."""

import asyncio
from collections.abc import Sequence

import pytest

from kvbus.errors import ConfigError
from kvbus.events import Header, HeartbeatSeen, InstanceRecord, encode
from kvbus.handles import Verdict
from kvbus.names import EPOCH_COUNTER_MAX, epoch_counter, epoch_from
from kvbus.patience import may_pass
from kvbus.processes import identity
from kvbus.roles.recorder import Recorder
from kvbus.roles.registry import REMEMBERED_S, Presence, Registered, Sources, lookup, next_epoch, registry_key
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Topics
from kvbus.transport import BUCKET_EPOCH, BUCKET_INSTANCES, Entry

TOPICS = Topics()
KEY = registry_key("a", "m0")


class CountingBus(MemoryBus):
    """A bus that counts how often the registry is asked, and stores of it."""

    listed = 0
    read = 0

    async def keys(self, bucket: str) -> Sequence[str]:
        self.listed += 1
        await asyncio.sleep(0)  # noqa: TID251 - a turn, as each question to a bus takes
        return await super().keys(bucket)

    async def get(self, bucket: str, key: str) -> Entry | None:
        self.read += 1
        return await super().get(bucket, key)


def connect() -> CountingBus:
    return CountingBus(MemoryBroker())


def record(fingerprint: str = "f", ranks: int = 1) -> InstanceRecord:
    return InstanceRecord(
        verify_key=b"k" * 32, fingerprint=fingerprint, model="toy", engine="toy", block_tokens=32, ranks=ranks,
        page_bytes=64, pages=8, process=identity(), transports=("memory",), version="0",
    )  # fmt: skip


async def register(bus: MemoryBus, epoch: int) -> None:
    header = Header(k=InstanceRecord.KIND, i="a", m="m0", e=epoch, s=1, t=1)
    await bus.put(BUCKET_INSTANCES, KEY, encode(header, record()))


async def register_rank(bus: MemoryBus, member: str, fingerprint: str) -> None:
    header = Header(k=InstanceRecord.KIND, i="a", m=member, e=epoch_from(1, 1), s=1, t=1)
    await bus.put(BUCKET_INSTANCES, registry_key("a", member), encode(header, record(fingerprint, ranks=2)))


def presence(bus: MemoryBus, epoch: int) -> Presence:
    recorder = Recorder(bus=bus, topics=TOPICS, instance="a", member="m0", epoch=epoch, unix_ns=lambda: 1)
    load = HeartbeatSeen(
        transfers_running=0, leases_held=0, pages_free=0, pages_cached=0, pages_lent=0, facts_sequence=0, settle_n=0
    )
    return Presence(
        bus=bus, topics=TOPICS, recorder=recorder, instance="a", member="m0", record=record(), load=lambda: load
    )


async def test_those_who_ask_together_and_soon_after_share_one_look() -> None:
    bus, now = connect(), [0.0]
    await register(bus, epoch_from(1, 1))
    sources = Sources(bus, lambda: now[0])
    found = await asyncio.gather(*(sources.find("a", "f") for _ in range(64)))
    now[0] += REMEMBERED_S / 2
    found.append(await sources.find("a", "f"))
    assert {one.epoch for one in found if isinstance(one, Registered)} == {epoch_from(1, 1)}
    assert (len(found), bus.listed) == (65, 1)


async def test_where_who_asks_is_cancelled_one_of_those_who_wait_for_its_answer_asks_instead() -> None:
    bus = connect()
    await register(bus, epoch_from(1, 1))
    sources = Sources(bus, lambda: 0.0)
    asking = [asyncio.get_running_loop().create_task(sources.find("a", "f")) for _ in range(3)]
    for _ in range(10):  # turns, and no more of them: the answer would come in the next
        if not bus.listed:
            await asyncio.sleep(0)  # noqa: TID251 - a turn, no time passes
    assert bus.listed == 1
    asking[0].cancel()
    gone, *found = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(gone, asyncio.CancelledError)
    assert {getattr(one, "epoch", 0) for one in found} == {epoch_from(1, 1)}
    assert bus.listed == 2


async def test_what_was_seen_is_not_believed_for_long() -> None:
    bus, now = connect(), [0.0]
    await register(bus, epoch_from(1, 1))
    sources = Sources(bus, lambda: now[0])
    await sources.find("a", "f")
    await register(bus, epoch_from(2, 1))
    now[0] += REMEMBERED_S
    found = await sources.find("a", "f")
    assert isinstance(found, Registered)
    assert found.epoch == epoch_from(2, 1)


async def test_one_that_turned_out_to_be_gone_is_looked_up_anew() -> None:
    bus = connect()
    await register(bus, epoch_from(1, 1))
    sources = Sources(bus, lambda: 0.0)
    await sources.find("a", "f")
    await register(bus, epoch_from(2, 1))
    sources.forget("another")
    assert getattr(await sources.find("a", "f"), "epoch", 0) == epoch_from(1, 1)
    sources.forget("a")
    assert getattr(await sources.find("a", "f"), "epoch", 0) == epoch_from(2, 1)


async def test_that_nobody_is_there_is_not_remembered() -> None:
    bus = connect()
    sources = Sources(bus, lambda: 0.0)
    assert "no instance 'a' is registered" in str(await sources.find("a", "f"))
    await register(bus, epoch_from(1, 1))
    assert isinstance(await sources.find("a", "f"), Registered)


async def test_while_a_rank_is_missing_nobody_is_sent_to_another_rank_which_would_refuse_for_good() -> None:
    bus = connect()
    sources = Sources(bus, lambda: 0.0)
    await register_rank(bus, "m1", "of rank 1")

    missing = await sources.find("a", "of rank 0")

    assert "1 of its 2 members are registered" in str(missing)
    assert may_pass(Verdict("refused", str(missing)), None)
    assert getattr(await sources.find("a", "of rank 1"), "member", "") == "m1"
    await register_rank(bus, "m0", "of rank 0")
    assert getattr(await sources.find("a", "of rank 0"), "member", "") == "m0"


async def test_an_instance_that_is_whole_and_has_no_such_pages_is_asked_and_says_so_itself() -> None:
    bus = connect()
    sources = Sources(bus, lambda: 0.0)
    for rank in range(2):
        await register_rank(bus, f"m{rank}", f"of rank {rank}")

    assert isinstance(await sources.find("a", "of another model"), Registered)


async def test_one_who_stops_waiting_does_not_stop_the_others() -> None:
    bus = connect()
    await register(bus, epoch_from(1, 1))
    sources = Sources(bus, lambda: 0.0)
    asking = [asyncio.ensure_future(sources.find("a", "f")) for _ in range(3)]
    asyncio.get_running_loop().call_soon(asking[0].cancel)
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(isinstance(one, Registered) for one in found[1:])


# ------------------------------------------------------------------------------------------------- one's own record


async def test_a_record_that_stands_is_refreshed_without_being_read() -> None:
    bus = connect()
    ours = presence(bus, epoch_from(4, 9))
    await ours.register()
    await ours.refresh()  # the first one finds out where it stands
    bus.read = 0
    for _ in range(5):
        await ours.refresh()
    assert bus.read == 0
    assert [one.epoch for one in await lookup(bus, "a")] == [epoch_from(4, 9)]


async def test_a_record_that_expired_is_written_again() -> None:
    bus = connect()
    ours = presence(bus, epoch_from(4, 9))
    await ours.register()
    await ours.refresh()
    bus.broker.buckets[BUCKET_INSTANCES].clear()
    await ours.refresh()
    assert [one.epoch for one in await lookup(bus, "a")] == [epoch_from(4, 9)]


async def test_a_refresh_does_not_write_over_a_later_start() -> None:
    bus = connect()
    ours = presence(bus, epoch_from(4, 9))
    await ours.register()
    await ours.refresh()
    await register(bus, epoch_from(3, 9))  # an earlier one's last words
    await ours.refresh()
    assert [one.epoch for one in await lookup(bus, "a")] == [epoch_from(4, 9)]
    await register(bus, epoch_from(5, 9))
    with pytest.raises(ConfigError, match="this one stops"):
        await ours.refresh()
    assert [one.epoch for one in await lookup(bus, "a")] == [epoch_from(5, 9)]


@pytest.mark.parametrize("stored", [EPOCH_COUNTER_MAX, EPOCH_COUNTER_MAX + 1, 2**40])
async def test_an_epoch_that_nobody_can_have_taken_holds_no_start_up(stored: int) -> None:
    bus = connect()
    await bus.put(BUCKET_EPOCH, KEY, str(stored << 32 | 1).encode())
    assert epoch_counter(await next_epoch(bus, "a", "m0")) == 1
