"""A stream that went back in time is noticed, and answered by all that a member holds; nothing else is."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.columns import from_column
from kvbus.events import EVENT_LENGTH_MAX_BYTES, SnapshotAsked, SnapshotTaken, TransferStep, decode, decode_all, encode
from kvbus.ledger.binding import Binding
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.transfer import Transfer
from kvbus.ledger.types import Direction, SubmitMode
from kvbus.names import epoch_counter
from kvbus.roles.portrait import Portrait
from kvbus.roles.recorder import Recorder
from kvbus.roles.registry import next_epoch
from kvbus.roles.rollback import Rollback
from kvbus.snapshots import HeldLeaseRow
from kvbus.testing.bus import MemoryBus
from kvbus.testing.ledger_parts import ListedLender, ManualBackend
from kvbus.topics import Topics
from kvbus.transport import Bus
from tests.waiting import until

TOPICS = Topics()
PULL, PUSH = SubmitMode("in", Direction.WRITE), SubmitMode("out", Direction.READ)


@pytest.fixture
async def bus(broker: EmbeddedBroker) -> AsyncIterator[NatsBus]:
    made = await NatsBus.connect(broker.url, name="t", token=broker.token, limits=EMBEDDED)
    await made.ensure_assets()
    yield made
    await made.close()


@contextlib.asynccontextmanager
async def speaking(bus: Bus, member: str = "m0") -> AsyncIterator[Recorder]:
    """A member's recorder at work."""
    recorder = Recorder(bus=bus, topics=TOPICS, instance="a", member=member, epoch=1, unix_ns=lambda: 1)
    running = asyncio.create_task(recorder.run())
    try:
        yield recorder
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def says(recorder: Recorder, *texts: str) -> None:
    for text in texts:
        recorder.event(TransferStep(transfer="t", request_hash="0" * 32, step="x", text=text))
        assert await recorder.flush(10)


def watcher(bus: Bus, recorder: Recorder, told: list[str]) -> Rollback:
    return Rollback(bus=bus, subject=TOPICS.facts("a"), recorder=recorder, tell=told.append)


async def restarted(broker: EmbeddedBroker, bus: NatsBus, store: Path | None = None, *, empty: bool = False) -> None:
    """The broker is killed, and comes back over its store, over an older copy of it, or over none."""
    broker.kill()
    await until(lambda: not bus.health().connected)
    if empty or store is not None:
        shutil.rmtree(broker.folder / "store")
    if store is not None:
        shutil.copytree(store, broker.folder / "store")
    await broker.start()
    await until(lambda: bus.health().connected)
    await bus.ensure_assets()


async def test_a_broker_that_comes_back_with_its_store_needs_no_snapshot(bus: NatsBus, broker: EmbeddedBroker) -> None:
    async with speaking(bus) as recorder:
        rollback = watcher(bus, recorder, [])
        await says(recorder, "1", "2")
        assert await rollback.reason() == ""
        await restarted(broker, bus)
        assert await rollback.reason() == ""
        await says(recorder, "3")
        assert await rollback.reason() == ""


async def test_a_stream_that_begins_again_is_noticed_by_the_next_fact_without_asking(
    bus: NatsBus, broker: EmbeddedBroker
) -> None:
    async with speaking(bus) as recorder:
        rollback = watcher(bus, recorder, [])
        await says(recorder, "1", "2", "3")
        assert await rollback.reason() == ""
        await restarted(broker, bus, empty=True)
        await says(recorder, "4")
        assert "for the second time" in await rollback.reason()
        assert await rollback.reason() == ""  # said once


async def test_a_stream_that_went_back_and_grew_past_its_old_head_is_noticed_by_what_stands_there(
    bus: NatsBus, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    async with speaking(bus) as recorder, speaking(bus, "m1") as other:
        rollback = watcher(bus, recorder, [])
        await says(recorder, "1")
        await asyncio.to_thread(shutil.copytree, broker.folder / "store", tmp_path / "older")
        await says(recorder, "2", "3")
        assert await rollback.reason() == ""
        await restarted(broker, bus, tmp_path / "older")
        await says(other, *(f"{number}" for number in range(6)))
        sequence = recorder.newest[0]
        assert sequence < other.newest[0]  # a comparison of sequences alone would find nothing missing
        assert await rollback.reason() == f"the facts stream does not hold any more what stood at {sequence}"
        await says(recorder, "4")
        assert await rollback.reason() == ""


async def test_a_rollback_is_answered_on_the_stream_with_what_is_held(bus: NatsBus, broker: EmbeddedBroker) -> None:
    async with speaking(bus) as recorder:
        holder, portrait = member(recorder, leases=3)
        rollback = Rollback(bus=bus, subject=TOPICS.facts("a"), recorder=recorder, tell=portrait.record)
        watching = asyncio.create_task(rollback.run())
        await says(recorder, "1", "2", "3")
        await until(lambda: rollback._connections is not None)
        await restarted(broker, bus, empty=True)

        async def answered() -> bool:
            return await snapshots_in(bus) != []

        await until(answered, what="the state is told anew")
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        (snapshot,) = await snapshots_in(bus)
        assert {row.ticket for row in snapshot.leases} == holder.tickets()
        assert rollback.snapshots == 1


async def snapshots_in(bus: Bus) -> list[SnapshotTaken]:
    events = [event for one in await bus.history(TOPICS.facts("a")) for event in decode_all(one.data)]
    return [
        event.body for event in events if not isinstance(event, Exception) and isinstance(event.body, SnapshotTaken)
    ]


def member(recorder: Recorder, *, leases: int, rows: int = 2, transfers: int = 1) -> tuple[LeaseHolder, Portrait]:
    """A holder with so many leases, every other one a read, and its portrait."""
    lender = ListedLender("pool")
    bindings = [
        Binding("in", ManualBackend("in"), Direction.WRITE),
        Binding("out", ManualBackend("out"), Direction.READ),
    ]
    holder = LeaseHolder(bindings=bindings, lenders=[lender])
    for number in range(leases):
        direction, mode = (Direction.READ, PUSH) if number % 2 else (Direction.WRITE, PULL)
        holder.take(lender.lend(direction, rows), mode, now=0.0, peer="b", transfer=f"t-{number}")
    holder.advance()
    running = tuple(Transfer(f"t-{number}", f"{number:032x}", "b", 0.0, 30.0) for number in range(transfers))
    return holder, Portrait(holder=holder, recorder=recorder, transfers=lambda: running, place=lambda: (2, 7))


async def test_a_portrait_of_many_leases_comes_in_parts_that_fit_and_leave_nothing_out() -> None:
    bus = MemoryBus()
    async with speaking(bus) as recorder:
        holder, portrait = member(recorder, leases=700, rows=40, transfers=600)
        portrait.record("test")
        assert await recorder.flush(10)
        parts = await snapshots_in(bus)
        assert len(parts) > 2
        assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
        assert {(part.reason, part.leases_held, part.settle_term, part.settle_n) for part in parts} == {
            ("test", 700, 2, 7)
        }
        assert all((part.transfers_running, len(part.transfers)) == (600, 500) for part in parts)
        rows = [row for part in parts for row in part.leases]
        assert [row.ticket for row in rows] == sorted(holder.tickets())
        for row in rows:
            assert_shows(row, holder)
    await bus.close()


def assert_shows(row: HeldLeaseRow, holder: LeaseHolder) -> None:
    """A row says of a lease what its holder knows."""
    view = holder.view(row.ticket)
    assert view is not None
    assert row.bits == holder.bits(row.ticket)
    assert (from_column(row.pages, 4), from_column(row.counters, 8)) == (view.pages, view.counters)
    assert row.direction == ("write" if row.ticket % 2 else "read")
    assert (row.transfer, row.peer, row.lender) == (f"t-{row.ticket - 1}", "b", "pool")


async def test_every_part_of_an_answer_fits_an_event_however_many_pages_a_lease_has() -> None:
    bus = MemoryBus()
    async with speaking(bus) as recorder:
        holder, portrait = member(recorder, leases=4, rows=9_000, transfers=500)
        seen, more = [0], True
        while more:
            part = portrait.part(SnapshotAsked(after=seen[-1]), "asked")
            data = encode(recorder.header(part.KIND), part)
            assert len(data) < EVENT_LENGTH_MAX_BYTES
            assert decode(data).body == part
            assert part.leases
            seen += [row.ticket for row in part.leases]
            more = part.more
        assert seen[1:] == sorted(holder.tickets())
    await bus.close()


# P16
@pytest.mark.contract("P16")
async def test_no_epoch_comes_again_although_the_store_went_back_or_was_lost(
    bus: NatsBus, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    epochs = [await next_epoch(bus, "a", "m0")]
    await asyncio.to_thread(shutil.copytree, broker.folder / "store", tmp_path / "older")
    epochs += [await next_epoch(bus, "a", "m0") for _ in range(2)]
    await restarted(broker, bus, tmp_path / "older")
    epochs += [await next_epoch(bus, "a", "m0") for _ in range(2)]
    await restarted(broker, bus, empty=True)
    epochs += [await next_epoch(bus, "a", "m0") for _ in range(2)]
    assert len(set(epochs)) == len(epochs)
    counters = [epoch_counter(epoch) for epoch in epochs]
    assert counters == [1, 2, 3, 2, 3, 1, 2]  # the store gives counters away again: only the nonce keeps runs apart


async def test_of_starts_at_the_same_time_each_has_its_own_epoch_and_counter(bus: NatsBus) -> None:
    epochs = await asyncio.gather(*(next_epoch(bus, "a", "m0") for _ in range(6)))
    assert sorted(map(epoch_counter, epochs)) == [1, 2, 3, 4, 5, 6]
