"""Real workers whose facts stream loses its past: they tell their state anew, and a follower can go on from it."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.errors import BusError
from kvbus.events import Event, FactsSeen, LeaseGranted, SnapshotAsked, SnapshotTaken, decode, from_column
from kvbus.ledger.facts import Fact
from kvbus.subscriber import Lagged, Seen, Subscriber
from kvbus.topics import Query
from tests.flow.pool_eye import eye_on
from tests.flow.town import ANSWER_S, OUTCOME_S, TOPICS, Town, prompt, town
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

BLOCKS = 36
RATE_BYTES_S = 400_000
"""Six seconds for a prompt of so many blocks: time for a broker to go and come back."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await asyncio.gather(
            running.start("a", backend="memory"),
            running.start("b", backend="memory", allow=["a"], rate_limit_bytes_s=RATE_BYTES_S),
        )
        yield running


@dataclass(slots=True)
class Books:
    """What a follower knows of the leases that are out: by instance and ticket, from facts and from snapshots."""

    out: dict[tuple[str, int], int] = field(default_factory=dict)
    snapshots: list[Event] = field(default_factory=list)
    lags: list[Lagged] = field(default_factory=list)
    _since: dict[str, int] = field(default_factory=dict)

    async def follow(self, pair: Town) -> None:
        async with aclosing(Subscriber(pair.bus, TOPICS).facts(settle=False)) as items:
            async for item in items:
                if isinstance(item, Seen):
                    self.take(item.event)
                else:
                    self.lags.append(item)

    def take(self, event: Event) -> None:
        instance, body = event.header.i, event.body
        if isinstance(body, SnapshotTaken):
            self.snapshots.append(event)
            if not body.after:
                self.out = {key: bits for key, bits in self.out.items() if key[0] != instance}
                self._since[instance] = event.header.s
            self.out |= {(instance, row.ticket): row.bits for row in body.leases}
        elif event.header.s < self._since.get(instance, 0):
            return  # the state that was taken later contains it
        elif isinstance(body, LeaseGranted):
            self.out.setdefault((instance, body.ticket), int(Fact.TAKEN))
        elif isinstance(body, FactsSeen):
            for ticket, bits in zip(from_column(body.ticket, 8), from_column(body.bits, 4), strict=True):
                if bits & Fact.RETURNED:
                    self.out.pop((instance, ticket), None)
                else:
                    self.out[instance, ticket] = bits


async def held_by(pair: Town, name: str) -> dict[int, int]:
    """The leases of a worker with their bits, asked of itself."""
    subject, found, after = TOPICS.query(name, Query.SNAPSHOT, "m0"), dict[int, int](), 0
    while True:
        data = await pair.bus.request(subject, pair.encoded(SnapshotAsked(after=after)), wait_s=ANSWER_S)
        assert isinstance(data, bytes)
        body = decode(data).body
        assert isinstance(body, SnapshotTaken)
        found |= {row.ticket: row.bits for row in body.leases}
        if not body.more:
            return found
        after = body.leases[-1].ticket


async def halfway(pair: Town, name: str) -> str:
    eye = await eye_on(pair, "b")
    handle = await pair.ask(prompt(name, BLOCKS))
    verdict = await handle.verdict(OUTCOME_S)
    assert verdict.verdict == "accepted", verdict
    await eye.until_row(verdict.transfer, 5)
    return verdict.transfer


async def test_a_worker_says_what_it_holds_when_it_is_asked(pair: Town) -> None:
    transfer = await halfway(pair, "asked")
    subject = TOPICS.query("b", Query.SNAPSHOT, "m0")
    data = await pair.bus.request(subject, pair.encoded(SnapshotAsked()), wait_s=ANSWER_S)
    assert isinstance(data, bytes)
    body = decode(data).body
    assert isinstance(body, SnapshotTaken)
    (row,) = body.leases
    assert (row.transfer, row.direction, row.peer) == (transfer, "write", "a")
    assert len(from_column(row.pages, 4)) == BLOCKS
    assert [(one.transfer, one.source, one.phase) for one in body.transfers] == [(transfer, "a", "moving")]
    await pair.at_rest()
    assert await held_by(pair, "a") == await held_by(pair, "b") == {}


async def test_a_stream_that_was_lost_is_answered_by_each_worker_and_a_follower_has_whole_books_again(
    pair: Town,
) -> None:
    books = Books()
    following = asyncio.create_task(books.follow(pair))
    transfer = await halfway(pair, "lost stream")

    pair.broker.kill()
    shutil.rmtree(pair.broker.folder / "store")
    await pair.broker.start()
    await until(lambda: pair.bus.health().connected)
    await pair.bus.ensure_assets()

    def told() -> bool:
        return {event.header.i for event in books.snapshots} >= {"a", "b"}

    await until(told, what="both have told their state anew")
    assert any(lag.lost for lag in books.lags)
    first = {event.header.i: event.body for event in reversed(books.snapshots)}
    for instance, direction in (("a", "read"), ("b", "write")):
        body = first[instance]
        assert isinstance(body, SnapshotTaken)
        assert [(row.transfer, row.direction) for row in body.leases] == [(transfer, direction)]

    async def ended() -> bool:
        try:
            return not await held_by(pair, "a") and not await held_by(pair, "b")
        except (AssertionError, BusError):
            return False

    await until(ended, OUTCOME_S, what="the transfer has ended at both")
    await until(lambda: not books.out, what="the follower knows that nothing is out any more")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert (await pair.stats("b"))["snapshots"] == (await pair.stats("a"))["snapshots"] == 1


async def test_a_broker_that_comes_back_with_its_store_is_told_nothing_anew(pair: Town) -> None:
    before = [(await pair.stats(name))["snapshots"] for name in ("a", "b")]
    pair.broker.kill()
    await pair.broker.start()

    async def goes_on() -> bool:
        try:
            return (await pair.stage(prompt("goes on", 2))).outcome == "settled"
        except (AssertionError, BusError):
            return False

    await until(goes_on, 60, what="transfers go on")
    await pair.at_rest()
    assert [(await pair.stats(name))["snapshots"] for name in ("a", "b")] == before
