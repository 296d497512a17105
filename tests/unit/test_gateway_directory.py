"""The gateway's copy of the registry: whom a look finds, who shares it, and what nobody can make it trip over."""

import asyncio
import os
from dataclasses import dataclass, field

import pytest

from kvbus.errors import BusError
from kvbus.events import Header, InstanceRecord, encode
from kvbus.gateway.answers import Problem
from kvbus.gateway.directory import Directory
from kvbus.gateway.sources import source_of
from kvbus.processes import identity
from kvbus.roles.registry import registry_key
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.transport import BUCKET_INSTANCES, Entry
from tests.waiting import until


class Slow(MemoryBus):
    """A connection whose listings of the registry answer when the test says, and are counted."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.open = asyncio.Event()
        self.open.set()
        self.looks = self.looking = self.most = 0

    async def keys(self, bucket: str) -> list[str]:
        """List what is there when the question comes; the answer comes later."""
        self.looks += 1
        self.looking += 1
        self.most = max(self.most, self.looking)
        found = list(await super().keys(bucket))
        try:
            await self.open.wait()
        finally:
            self.looking -= 1
        return found


@dataclass(slots=True)
class Place:
    """A registry, and a directory that reads it."""

    broker: MemoryBroker = field(default_factory=lambda: MemoryBroker(clock=lambda: 0.0))
    bus: Slow = field(init=False)
    directory: Directory = field(init=False)

    def __post_init__(self) -> None:
        self.bus = Slow(self.broker)
        self.directory = Directory(self.bus)

    async def register(self, instance: str, member: str = "m0", *, key: str = "") -> None:
        """Write a record, under its own name unless another key is named."""
        record = InstanceRecord(
            verify_key=b"k" * 32, fingerprint="f", model="toy", engine="toy", block_tokens=32, ranks=1, page_bytes=64,
            pages=8, process=identity(os.getpid()), transports=("memory",), version="1",
        )  # fmt: skip
        header = Header(k=record.KIND, i=instance, m=member, e=1, s=1, t=1)
        await self.bus.put(BUCKET_INSTANCES, key or registry_key(instance, member), encode(header, record))

    def remove(self, instance: str) -> None:
        """Take a record away, as its time to live does."""
        del self.broker.entries(BUCKET_INSTANCES)[registry_key(instance, "m0")]


async def test_no_record_and_no_key_of_anybody_ends_a_look() -> None:
    place = Place()
    await place.register("a" * 40, "b" * 40, key="odd")  # fits its header, and no key
    await place.register("b", key=registry_key("c", "m0"))
    await place.bus.put(BUCKET_INSTANCES, "broken", b"\xff")
    await place.bus.put(BUCKET_INSTANCES, "=zz", b"x")
    place.broker.entries(BUCKET_INSTANCES)["a.b"] = (Entry("a.b", b"x", 1), 0.0)
    await place.register("a")
    await place.directory.refresh()
    assert place.directory.fresh
    assert set(place.directory.instances) == {"a"}


async def test_all_who_miss_a_name_share_a_look_that_begins_after_they_asked() -> None:
    place = Place()
    place.bus.open.clear()
    before = asyncio.ensure_future(place.directory.refresh())
    await until(lambda: place.bus.looking)
    await place.register("a")  # too late for the look that is under way
    asking = [asyncio.ensure_future(place.directory.refresh()) for _ in range(5)]
    place.bus.open.set()
    for each in asking:
        await each
        assert place.directory.names_of(source_of("a")) == {"a"}
    await before
    assert (place.bus.looks, place.bus.most) == (2, 1)


async def test_a_caller_that_goes_away_ends_no_look_for_the_others() -> None:
    place = Place()
    await place.register("a")
    place.bus.open.clear()
    gone, stays = (asyncio.ensure_future(place.directory.refresh()) for _ in range(2))
    await until(lambda: place.bus.looking)
    gone.cancel()
    place.bus.open.set()
    await stays
    assert gone.cancelled()
    assert "a" in place.directory.instances
    assert place.bus.looks == 1


async def test_who_keeps_asking_for_a_name_that_nobody_has_leaves_the_broker_most_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbus.gateway.directory.REST_SHARE", 1e9)  # so the bound on it decides, for any machine
    monkeypatch.setattr("kvbus.gateway.directory.REFRESH_S", 0.2)
    place, clock = Place(), asyncio.get_running_loop().time
    began_at = clock()
    for _ in range(4):
        await place.directory.refresh()
    assert place.bus.looks == 4
    assert clock() - began_at >= 3 * 0.2


async def test_while_the_registry_cannot_be_read_what_was_known_stays_and_nobody_is_said_to_be_absent() -> None:
    place = Place()
    await place.register("a")
    await place.directory.refresh()
    place.bus.cut()
    await place.directory.refresh()
    assert set(place.directory.instances) == {"a"}
    with pytest.raises(Problem) as unread:
        place.directory.require_fresh()
    assert (unread.value.status, unread.value.retry_after_s) == (503, 1)
    place.bus.restore()
    await place.directory.refresh()
    place.directory.require_fresh()


async def test_a_look_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.gateway.directory.LOOK_MAX_S", 0.01)
    place = Place()
    place.bus.open.clear()
    await place.directory.refresh()
    assert not place.directory.fresh
    assert place.bus.looking == 0


async def test_a_name_is_known_while_it_is_registered_and_for_so_long_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place()
    for name in ("a", "b"):
        await place.register(name)
    await place.directory.refresh()
    place.remove("b")
    await place.directory.refresh()
    assert place.directory.knows("b")
    monkeypatch.setattr("kvbus.gateway.directory.KEEP_S", 0.0)
    await place.directory.refresh()
    assert place.directory.knows("a")
    assert not place.directory.knows("b")


async def test_so_many_names_are_known_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.gateway.directory.KNOWN_MAX", 3)
    place = Place()
    for number in range(6):
        await place.register(f"i{number}")
        await place.directory.refresh()
        place.remove(f"i{number}")
    assert [place.directory.knows(f"i{number}") for number in range(6)] == [False] * 3 + [True] * 3


async def test_a_fault_in_a_look_ends_what_keeps_the_copy() -> None:
    class Faulty(MemoryBus):
        async def keys(self, bucket: str) -> list[str]:
            raise ZeroDivisionError(bucket)

    class Away(MemoryBus):
        async def keys(self, bucket: str) -> list[str]:
            raise BusError("away", bucket=bucket)

    async with asyncio.timeout(60):
        with pytest.raises(ZeroDivisionError):
            await Directory(Faulty()).run()
        await Directory(Away()).refresh()
