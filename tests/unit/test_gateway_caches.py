"""A change of all members' caches that one of them refuses, or leaves unanswered: what it undoes, what it leaves."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kvbus.caching import CacheAsked, CacheChangeAsked
from kvbus.engines.desk import Refusal
from kvbus.events import Header, InstanceRecord, decode, encode
from kvbus.gateway.answers import Problem
from kvbus.gateway.caches import Caches
from kvbus.gateway.directory import Directory
from kvbus.names import token_bytes, tokens_from_bytes
from kvbus.parts import Prompt
from kvbus.processes import identity
from kvbus.publisher import Publisher
from kvbus.roles.cache_desk import CacheDesk
from kvbus.roles.poolside import PoolSide
from kvbus.roles.registry import registry_key
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Command
from kvbus.transport import BUCKET_INSTANCES, Bus, Delivery
from tests.unit.gateway_parts import TOPICS, prompt, stage
from tests.unit.pool_parts import EPOCH, TOY, fill


class TokenIds:
    """Reads token ids as they come."""

    async def tokenize(self, wanted: Prompt) -> tuple[int, ...] | Refusal:
        """Return them."""
        return tokens_from_bytes(wanted.tokens) if wanted.tokens is not None else Refusal("no token ids")


@dataclass(slots=True)
class Member:
    """A member of instance b with a real pool and a real desk; a silent one hears nobody."""

    name: str
    bus: Bus
    silent: bool = False
    said: int = 0
    pool: PoolSide = field(
        default_factory=lambda: PoolSide.create(TOY, pages=16, tokens_max=16, vocab_size=1_000, epoch=EPOCH)
    )
    desk: CacheDesk = field(init=False)

    async def begin(self) -> None:
        """Register, and answer questions."""
        self.desk = CacheDesk(
            pool=self.pool, tokenizer=TokenIds(), forget=self.pool.lender.forget_names, on_evict=lambda: None
        )
        await self.bus.put(BUCKET_INSTANCES, registry_key("b", self.name), record_of(self.name))
        if not self.silent:
            await self.bus.respond(TOPICS.command("b", Command.CACHE, self.name), self._answer)

    def hold(self, blocks: int) -> Prompt:
        """Bring a prompt in, and return it."""
        ids = [7] * (4 * blocks)
        fill(self.pool.lender, self.pool.names(ids, ""))
        return Prompt(tokens=token_bytes(ids))

    async def pins(self) -> dict[str, int]:
        """What is pinned here, in blocks, by name."""
        return {row.pin: row.blocks for row in (await self.desk.look(CacheAsked())).pins}

    async def _answer(self, delivery: Delivery) -> bytes:
        asked = decode(delivery.data).body
        assert isinstance(asked, CacheChangeAsked)
        body = await self.desk.change(asked)
        self.said += 1
        return encode(Header(k=body.KIND, i="b", m=self.name, e=1, s=self.said, t=1), body)


def record_of(member: str) -> bytes:
    record = InstanceRecord(
        verify_key=b"k" * 32, fingerprint="f", model="toy", engine="toy", block_tokens=32, ranks=2, page_bytes=64,
        pages=8, process=identity(os.getpid()), transports=("memory",), version="1",
    )  # fmt: skip
    return encode(Header(k=record.KIND, i="b", m=member, e=1, s=1, t=1), record)


@asynccontextmanager
async def pair(*, silent: bool = False) -> AsyncIterator[tuple[Caches, Member, Member]]:
    """Two members of one instance, the second of which may be silent, and who asks them."""
    bus: MemoryBus = MemoryBroker(clock=lambda: 0.0).connect()
    one, other = Member("m0", bus), Member("m1", bus, silent=silent)
    for member in (one, other):
        await member.begin()
    async with Publisher(bus=bus, topics=TOPICS) as publisher:
        yield Caches(bus=bus, topics=TOPICS, directory=Directory(bus), publisher=publisher), one, other
    await bus.close()


@pytest.mark.parametrize("silent", [False, True])
async def test_a_pin_that_not_all_take_is_let_go_where_it_was_just_made(*, silent: bool) -> None:
    async with pair(silent=silent) as (caches, one, _other):
        held = one.hold(3)  # and the other one has none of it
        with pytest.raises(Problem) as refused:
            await caches.change("b", CacheChangeAsked(action="pin", pin="system", prompt=held))
        assert refused.value.status == (503 if silent else 409)
        assert await one.pins() == {}


@pytest.mark.parametrize("silent", [False, True])
async def test_an_older_pin_of_that_name_stays_when_another_member_does_not_take_the_new_one(*, silent: bool) -> None:
    async with pair(silent=silent) as (caches, one, other):
        held = one.hold(3)
        await one.desk.change(CacheChangeAsked(action="pin", pin="system", prompt=held))
        kept = other.hold(2)
        await other.desk.change(CacheChangeAsked(action="pin", pin="system", prompt=kept))
        missing = Prompt(tokens=token_bytes([9] * 8))
        asked = CacheChangeAsked(action="pin", pin="system", prompt=held if silent else missing)
        with pytest.raises(Problem):
            await caches.change("b", asked)
        assert (await one.pins(), await other.pins()) == ({"system": 3}, {"system": 2})


async def test_a_pin_that_all_take_is_there_and_told_by_its_blocks() -> None:
    async with pair() as (caches, one, other):
        held = one.hold(3)
        other.hold(2)  # the same token ids, as far as they go
        assert await caches.change("b", CacheChangeAsked(action="pin", pin="p", prompt=held)) == 2
        assert (await one.pins(), await other.pins()) == ({"p": 3}, {"p": 2})


@pytest.mark.parametrize("action", ["evict", "forget"])
async def test_what_some_members_have_dropped_may_be_brought_again_though_another_did_not_answer(action: str) -> None:
    async with stage() as one:
        await one.bus.put(BUCKET_INSTANCES, registry_key("b", "m1"), record_of("m1"))
        await one.parts.directory.refresh()
        asked = (await one.ask(prompt=prompt())).json()
        assert (await one.record(asked["request_hash"]))["status"] == "transferred"
        assert (await one.ask(prompt=prompt())).json()["status"] == "deduped"
        partly = await one.client.post(f"/instances/b/v1/kv_cache/{action}", json={"prompt": prompt()})
        assert partly.status_code == 503
        assert "b/m1 does not answer" in partly.json()["error"]
        assert (await one.ask(prompt=prompt())).json()["status"] == "accepted"
