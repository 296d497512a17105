"""What `drain`, `migrate --evict` and `dump` may say and do: each on what somebody answered, none on silence alone."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvbus.caching import CacheAnswered, CacheAsked, CacheChangeAsked, CacheChanged
from kvbus.commands.drain import LEFT, Draining
from kvbus.commands.dump import write
from kvbus.commands.dumping import Dump
from kvbus.commands.members import members_of
from kvbus.commands.migrate import migrate
from kvbus.commands.moving import Move, Moved, Mover, document
from kvbus.commands.replicate import replicate
from kvbus.draining import DrainAnswered, DrainAsked
from kvbus.errors import BusError, ConfigError
from kvbus.events import Header, InstanceRecord, decode, encode
from kvbus.parts import Body
from kvbus.prefixes import PrefixRow
from kvbus.processes import identity
from kvbus.publisher import Publisher
from kvbus.roles.registry import registry_key
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Command, Topics
from kvbus.transport import BUCKET_INSTANCES, Delivery, NoAnswer, Subscription
from tests.waiting import until

TOPICS = Topics()
LENDS = DrainAnswered(state="draining", leases_held=1)
NAMES = [bytes([number]) * 16 for number in range(3)]


@dataclass
class Played:
    """One member as a command meets it: its record, and what it answers while it listens."""

    bus: MemoryBus
    name: str
    member: str = "m0"
    epoch: int = 7
    drains: DrainAnswered = LENDS
    holds: dict[bytes, CacheAnswered] = field(default_factory=dict)
    evicted: list[bytes] = field(default_factory=list)
    listening: list[Subscription] = field(default_factory=list)

    async def register(self) -> None:
        record = InstanceRecord(
            verify_key=b"k" * 32, fingerprint="f", model="toy", engine="toy", block_tokens=32, ranks=1, page_bytes=64,
            pages=8, process=identity(os.getpid()), transports=("memory",), version="1",
        )  # fmt: skip
        await self.bus.put(BUCKET_INSTANCES, registry_key(self.name, self.member), self.said(record))

    async def listen(self) -> None:
        for verb, answer in ((Command.DRAIN, self._on_drain), (Command.CACHE, self._on_cache)):
            self.listening.append(await self.bus.respond(TOPICS.command(self.name, verb, self.member), answer))

    async def fall_silent(self) -> None:
        for one in self.listening:
            await one.close()
        self.listening.clear()

    def said(self, body: Body) -> bytes:
        return encode(Header(k=body.KIND, i=self.name, m=self.member, e=self.epoch, s=1, t=time.time_ns()), body)

    async def _on_drain(self, _delivery: Delivery) -> bytes:
        return self.said(self.drains)

    async def _on_cache(self, delivery: Delivery) -> bytes:
        body = decode(delivery.data).body
        assert isinstance(body, CacheAsked | CacheChangeAsked)
        assert body.prompt is not None
        assert body.prompt.prefix is not None
        if isinstance(body, CacheAsked):
            return self.said(self.holds.get(body.prompt.prefix, cache(refusal="no prefix of this name is known here")))
        self.evicted.append(body.prompt.prefix)
        return self.said(CacheChanged(blocks=4))


def cache(held: int = 0, wanted: int = 0, refusal: str = "") -> CacheAnswered:
    return CacheAnswered(
        pages=8, pages_free=8, pages_cached=0, pages_lent=0, pages_quarantined=0, blocks_held=held,
        blocks_wanted=wanted, refusal=refusal,
    )  # fmt: skip


@pytest.fixture
async def broker() -> MemoryBroker:
    return MemoryBroker(clock=lambda: 0.0)


async def there(broker: MemoryBroker, name: str, member: str = "m0") -> Played:
    one = Played(broker.connect(), name, member)
    await one.register()
    await one.listen()
    return one


# --------------------------------------------------------------------------------------------------------------- drain


async def draining(broker: MemoryBroker, clock: Callable[[], float] = time.monotonic) -> Draining:
    bus = broker.connect()
    begun = Draining(bus, TOPICS, await members_of(bus, "a"), leaves=True, clock=clock)
    await begun.begin(DrainAsked(action="drain", leave=True))
    return begun


def unseen(_held: int, _text: str) -> None:
    """A drain without a terminal."""


# contract 53
async def test_a_member_that_loses_its_connection_while_it_lends_has_not_left(broker: MemoryBroker) -> None:
    now = [100.0]
    a = await there(broker, "a")
    begun = await draining(broker, lambda: now[0])
    await a.fall_silent()
    await begun.wait(time.monotonic() + 1.0, unseen)
    assert begun.states == {"m0": "draining"}
    now[0] += 60.0  # silent for long, and registered still: it may only have lost the broker
    await begun.wait(time.monotonic() + 0.5, unseen)
    assert begun.states == {"m0": "draining"}
    assert begun.held == 1
    broker.buckets[BUCKET_INSTANCES].clear()
    await begun.wait(time.monotonic() + 10.0, unseen)
    assert (begun.states, begun.ended) == ({"m0": LEFT}, True)


async def test_a_member_that_held_nothing_has_left_once_nobody_has_listened_for_some_seconds(
    broker: MemoryBroker,
) -> None:
    now = [100.0]
    a = await there(broker, "a")
    a.drains = DrainAnswered(state="leaving")
    begun = await draining(broker, lambda: now[0])
    await a.fall_silent()
    await begun.wait(time.monotonic() + 1.0, unseen)
    assert begun.states == {"m0": "leaving"}
    now[0] += 2.0
    await a.listen()  # it is back
    await begun.wait(time.monotonic() + 0.5, unseen)
    await a.fall_silent()
    now[0] += 2.0
    await begun.wait(time.monotonic() + 0.5, unseen)
    assert begun.states == {"m0": "leaving"}
    now[0] += 3.0
    await begun.wait(time.monotonic() + 10.0, unseen)
    assert begun.states == {"m0": LEFT}


async def looks(begun: Draining, times: int = 2) -> None:
    """Let a drain look again, at least so often."""
    shown: list[int] = []
    waiting = asyncio.ensure_future(begun.wait(time.monotonic() + 600.0, lambda held, _text: shown.append(held)))
    await until(lambda: len(shown) >= times or waiting.done())
    waiting.cancel()
    (ended,) = await asyncio.gather(waiting, return_exceptions=True)
    assert ended is None or isinstance(ended, asyncio.CancelledError), ended


async def test_a_look_without_a_connection_has_failed_and_tells_nothing_of_a_member(broker: MemoryBroker) -> None:
    now, bus = [100.0], broker.connect()
    a = await there(broker, "a")
    a.drains = DrainAnswered(state="leaving")
    begun = Draining(bus, TOPICS, await members_of(bus, "a"), leaves=True, clock=lambda: now[0])
    await begun.begin(DrainAsked(action="drain", leave=True))
    await a.fall_silent()
    await looks(begun)
    bus.cut()
    now[0] += 60.0
    await looks(begun)
    assert (begun.states, begun.ended) == ({"m0": "leaving"}, False)
    assert "no connection" in str(begun.document("a", took_s=1.0)["unheard"])
    assert next(begun.lines("a")).startswith("the last look failed")
    bus.restore()
    await looks(begun)
    assert (begun.states, begun.unheard) == ({"m0": "leaving"}, ""), "its silence counts from now on"
    now[0] += 60.0
    await looks(begun, 600)
    assert begun.states == {"m0": LEFT}


async def test_a_member_that_cannot_be_asked_is_named_with_those_that_drain_already(broker: MemoryBroker) -> None:
    await there(broker, "a")
    await (await there(broker, "a", "m1")).fall_silent()
    with pytest.raises(ConfigError, match=r"a/m1 does not answer.*; asked before it, and not undone: a/m0 \(draining"):
        await draining(broker)


# ------------------------------------------------------------------------------------------------------------- migrate


class FlickeringBus(MemoryBus):
    """Loses its connection for each of some questions, by their number."""

    lost: frozenset[int] = frozenset()
    asked = 0

    async def request(self, subject: str, data: bytes, *, wait_s: float) -> bytes | NoAnswer:
        """Ask, unless it is lost."""
        self.asked += 1
        if self.asked in self.lost:
            raise BusError("no connection to the broker", broker="memory")
        return await super().request(subject, data, wait_s=wait_s)


@asynccontextmanager
async def moved(broker: MemoryBroker, *lost: int) -> AsyncIterator[Mover]:
    """Three prefixes that have settled at b, by what the transfers said; the questions of these numbers are lost."""
    bus = FlickeringBus(broker)
    bus.lost = frozenset(lost)
    async with Publisher(bus=bus, topics=TOPICS) as publisher:
        mover = Mover(bus, TOPICS, publisher, "a", 1.0, member=(await members_of(bus, "a"))[0])
        mover.moved = [Moved(Move(PrefixRow(name=name, blocks=4, uses=1), "b"), 4, 256) for name in NAMES]
        yield mover


async def test_what_a_destination_does_not_hold_any_more_stays_at_its_source(broker: MemoryBroker) -> None:
    a, b = await there(broker, "a"), await there(broker, "b")
    b.holds = {NAMES[0]: cache(4, 4), NAMES[1]: cache(3, 4)}  # the third is not even known
    async with moved(broker) as mover:
        assert await mover.evict() == 4
        failures = [one.failure for one in mover.moved]
    assert a.evicted == [NAMES[0]]
    assert failures == [
        "",
        "kept at a: b/m0 holds 3 of 4 blocks of it by now",
        "kept at a: b/m0 does not know it any more",
    ]


async def test_what_every_member_of_a_destination_holds_is_dropped_and_nothing_on_silence(broker: MemoryBroker) -> None:
    a, b, other = await there(broker, "a"), await there(broker, "b"), await there(broker, "b", "m1")
    b.holds = dict.fromkeys(NAMES, cache(4, 4))
    other.holds = {NAMES[0]: cache(4, 4)}
    async with moved(broker) as mover:
        assert await mover.evict() == 4
    await other.fall_silent()
    async with moved(broker) as mover:
        assert await mover.evict() == 0
        assert {one.failure for one in mover.moved} == {"kept at a: b/m1 does not say what it holds of it"}
    assert a.evicted == [NAMES[0]]


async def test_a_question_that_is_lost_fails_its_own_prefix_and_what_was_dropped_is_told(broker: MemoryBroker) -> None:
    a, b = await there(broker, "a"), await there(broker, "b")
    b.holds = dict.fromkeys(NAMES, cache(4, 4))
    async with moved(broker, 3, 5) as mover:  # whether b holds the second one, and that a drops the third
        assert await mover.evict() == 4
        told = document("a", mover.moved, 4)
    assert a.evicted == [NAMES[0]]
    assert (told["moved"], told["failed"], told["evicted"]) == (1, 2, 4)
    assert [one.failure.partition(" (")[0] for one in mover.moved] == [
        "",
        "kept at a: no connection to the broker",
        "a was asked to drop it, and may have: no connection to the broker",
    ]


async def test_what_a_destination_that_is_gone_had_stays_at_its_source(broker: MemoryBroker) -> None:
    a = await there(broker, "a")
    async with moved(broker) as mover:
        assert await mover.evict() == 0
        assert {one.failure[:40] for one in mover.moved} == {"kept at a: no worker of 'b' is registere"}
    assert a.evicted == []


async def test_a_name_that_nobody_can_have_is_a_failure_of_its_own_move(broker: MemoryBroker) -> None:
    await there(broker, "a")
    async with moved(broker) as mover:
        row, mover.moved = mover.moved[0].move.row, []
        await mover.run([Move(row, name) for name in ("", "x" * 65)], lambda _moved: None)
    assert all("destination: " in one.failure for one in mover.moved)


@pytest.mark.parametrize("name", ["", "x" * 64, "é" * 40])
@pytest.mark.parametrize("command", [migrate, replicate])
def test_a_command_that_names_no_instance_ends_with_one_sentence(command: click.Command, name: str) -> None:
    arguments = ["--from", "a", "--to", name, "--nats", "nats://127.0.0.1:1"]
    ran = CliRunner().invoke(command, [*arguments, *(["--hot", "1"] if command is replicate else [])])
    assert isinstance(ran.exception, ConfigError)
    assert "cannot be the name of an instance" in str(ran.exception) or "--to names the instances" in str(ran.exception)


# ---------------------------------------------------------------------------------------------------------------- dump


def test_a_dump_over_a_file_that_all_could_read_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "dump.tar.gz"
    path.write_bytes(b"an earlier one")
    path.chmod(0o644)
    write(path, Dump())
    assert path.stat().st_mode & 0o777 == 0o600
