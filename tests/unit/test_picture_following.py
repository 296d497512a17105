"""What keeps a picture current: it begins at the end of the log, and asks each member for what its user may ask."""

import asyncio
import os
import time
from collections import Counter

import pytest

from kvbus.bus_access import DeniedError
from kvbus.commands.permission_checks import asset_names
from kvbus.events import Header, InstanceRecord, SnapshotTaken, StatsAnswered, TransferStep, encode
from kvbus.parts import Body
from kvbus.permissions import Role, User, permissions_of
from kvbus.picture.following import Surroundings, begin
from kvbus.picture.whole import Picture
from kvbus.processes import identity
from kvbus.restoring import snapshots
from kvbus.roles.registry import registry_key
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Query, Topics
from kvbus.transport import BUCKET_INSTANCES, Delivery, NoAnswer
from tests.waiting import DEADLINE_S

TOPICS = Topics()
HASH = "0" * 32
USERS = [User(Role.REQUESTER, "gateway"), User(Role.OBSERVER, "dash")]


class GuardedBus(MemoryBus):
    """A connection of one user, who may ask what its permissions say."""

    def __init__(self, broker: MemoryBroker, user: User) -> None:
        super().__init__(broker)
        self.may = permissions_of(user, "UKEY", TOPICS, asset_names(TOPICS))
        self.denied: list[str] = []

    async def request(self, subject: str, data: bytes, *, wait_s: float) -> bytes | NoAnswer:
        """Ask, if that is allowed."""
        if not self.may.may_publish(subject):
            self.denied.append(subject)
            raise DeniedError("the broker does not let this user publish", subject=subject)
        return await super().request(subject, data, wait_s=wait_s)


class Crowd:
    """Those who are asked at the same time; none of them answers before so many are."""

    def __init__(self, parties: int) -> None:
        self.together = asyncio.Barrier(parties)
        self.asked = self.most = 0

    async def enter(self) -> None:
        self.asked += 1
        self.most = max(self.most, self.asked)
        await self.together.wait()
        self.asked -= 1


class Member:
    """One member: its record, its counters, its snapshot; `held` lets an answer wait for others."""

    def __init__(self, bus: MemoryBus, instance: str, name: str, *, held: Crowd | None = None) -> None:
        self.bus, self.instance, self.name, self.held = bus, instance, name, held

    async def begin(self) -> None:
        record = InstanceRecord(
            verify_key=b"k" * 32, fingerprint="f", model="toy", engine="toy", block_tokens=32, ranks=1, page_bytes=64,
            pages=8, process=identity(os.getpid()), transports=("memory",), version="1",
        )  # fmt: skip
        await self.bus.put(BUCKET_INSTANCES, registry_key(self.instance, self.name), self.said(record))
        for verb, answer in ((Query.STATS, self._on_stats), (Query.SNAPSHOT, self._on_snapshot)):
            await self.bus.respond(TOPICS.query(self.instance, verb, self.name), answer)

    def said(self, body: Body) -> bytes:
        return encode(Header(k=body.KIND, i=self.instance, m=self.name, e=1, s=1, t=time.time_ns()), body)

    async def _on_stats(self, _delivery: Delivery) -> bytes:
        if self.held is not None:
            await self.held.enter()
        return self.said(StatsAnswered(counters={"pages": 8, "pages_quarantined": int(self.name[1:]) + 1}))

    async def _on_snapshot(self, _delivery: Delivery) -> bytes:
        if self.held is not None:
            await self.held.enter()
        return self.said(
            SnapshotTaken(reason="asked", leases_held=0, transfers_running=0, facts_sequence=0, settle_n=0)
        )


@pytest.mark.parametrize("user", USERS, ids=lambda user: user.role.value)
async def test_each_member_is_asked_for_its_own_counters_and_state_and_no_user_is_denied(user: User) -> None:
    broker, picture = MemoryBroker(), Picture()
    for name in ("m0", "m1"):
        await Member(broker.connect(), "b", name).begin()
    bus = GuardedBus(broker, user)
    await Surroundings(bus, TOPICS, picture).look()
    assert {row.member: row.pages_quarantined for row in picture.members()} == {"m0": 1, "m1": 2}
    counts: Counter[str] = Counter()
    heard = [event.header.m async for event in snapshots(bus, TOPICS, counts)]
    assert (heard, counts["snapshot_missing"], bus.denied) == (["m0", "m1"], 0, [])


async def test_a_user_who_may_not_ask_for_counters_asks_once_and_not_at_each_look() -> None:
    broker, picture = MemoryBroker(), Picture()
    await Member(broker.connect(), "b", "m0").begin()
    bus = GuardedBus(broker, User(Role.INSTANCE, "a", ("m0",)))
    surroundings = Surroundings(bus, TOPICS, picture)
    for _ in range(3):
        await surroundings.look()
    assert bus.denied == [TOPICS.query("b", Query.STATS, "m0")]
    assert [row.pages for row in picture.members()] == [8], "its record is shown all the same"


async def test_members_are_asked_side_by_side_and_only_so_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.restoring.ASKED_MAX", 4)
    monkeypatch.setattr("kvbus.picture.following.ASKED_MAX", 4)
    for module in ("restoring", "picture.following"):
        monkeypatch.setattr(f"kvbus.{module}.ANSWER_S", DEADLINE_S)
    broker, picture, four = MemoryBroker(clock=lambda: 0.0), Picture(), Crowd(4)
    for number in range(8):
        await Member(broker.connect(), "b", f"m{number}", held=four).begin()
    bus, counts = broker.connect(), Counter[str]()
    async with asyncio.timeout(DEADLINE_S):
        heard = [event.header.m async for event in snapshots(bus, TOPICS, counts)]
        assert heard == [f"m{number}" for number in range(8)]
        assert (counts, four.most) == ({"snapshots": 8}, 4)
        await Surroundings(bus, TOPICS, picture).look()
    assert [row.pages_quarantined for row in picture.members()] == list(range(1, 9))
    assert four.most == 4


async def say(bus: MemoryBus, number: int) -> None:
    """One step of a transfer of its own, by an instance that is not registered."""
    body = TransferStep(transfer=f"T-{number}", request_hash=HASH, step="accepted")
    header = Header(k=body.KIND, i="gone", m="m0", e=1, s=number, t=number)
    await bus.store(TOPICS.facts("gone"), encode(header, body), message_id=f"{number}")


async def test_a_picture_begins_with_the_last_that_was_said_also_where_nobody_is_registered_any_more() -> None:
    bus, picture = MemoryBus(), Picture()
    for number in range(1, 11):
        await say(bus, number)
    assert await begin(bus, TOPICS, picture, past_max=3) == 10
    assert {row.transfer for row in picture.show().transfers} == {"T-8", "T-9", "T-10"}
    bus.broker.logs[0].messages.clear()  # too old by now: what comes next follows on it all the same
    assert await begin(bus, TOPICS, Picture(), past_max=3) == 10
    await bus.close()
