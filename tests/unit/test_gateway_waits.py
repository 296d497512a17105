"""Who waits for a transfer, who stops one, and what becomes of those of others: nothing is left, or said wrongly."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvbus.errors import BusError
from kvbus.events import TransferStep
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.transport import NoAnswer, NotStored, Stored
from tests.unit.gateway_parts import Stage, prompt, stage
from tests.waiting import until

HASH = "ab" * 16


@pytest.fixture
async def gateway() -> AsyncIterator[Stage]:
    async with stage() as running:
        yield running


class Failing(MemoryBus):
    """A connection whose next calls fail as the test says: cancels for lack of a broker, stores by a fault of ours."""

    cancels_refused = 0
    cancels_failed = 0
    stores_failed = 0

    async def request(self, subject: str, data: bytes, *, wait_s: float) -> bytes | NoAnswer:
        """Ask, unless it is a cancel that is to fail."""
        if subject.endswith(".cancel") and self.cancels_refused:
            self.cancels_refused -= 1
            self.cancels_failed += 1
            raise BusError("no connection to the broker")
        return await super().request(subject, data, wait_s=wait_s)

    async def store(
        self, subject: str, data: bytes, *, message_id: str, wait_s: float = 5.0, after: int | None = None
    ) -> Stored | NotStored:
        """Store, unless a fault is wanted."""
        if self.stores_failed:
            self.stores_failed -= 1
            raise ZeroDivisionError(subject)
        return await super().store(subject, data, message_id=message_id, wait_s=wait_s, after=after)


def failing() -> Callable[[], Failing]:
    broker = MemoryBroker(clock=lambda: 0.0)
    return lambda: Failing(broker)


# H19
async def test_a_cancel_that_the_bus_refuses_as_the_request_is_taken_on_is_repeated_and_nothing_is_said_to_have_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbus.gateway.runs.VERDICT_WAIT_S", 0.05)
    monkeypatch.setattr("kvbus.gateway.runs.CANCEL_PAUSE_S", 0.05)
    async with stage(failing(), present=False) as one:
        bus: Any = one.bus
        one.b.settles = False
        request_hash = (await one.ask(prompt=prompt())).json()["request_hash"]
        assert (await one.client.delete(f"/v1/kv_transfer/{request_hash}")).status_code == 202
        bus.cancels_refused = 3
        serving = asyncio.ensure_future(one.b.serve())
        await until(lambda: one.b.cancelled == [request_hash], what="the cancel is heard in the end")
        assert bus.cancels_failed == 3
        stats = await one.stats()
        assert (stats["fired"], stats["failed"], stats["inflight"]) == (1, 0, 1)
        await one.b.end(await one.b.taken(), "cancelled")
        assert (await one.record(request_hash))["status"] == "cancelled"
        serving.cancel()


async def test_a_cancel_that_nobody_hears_is_said_not_to_be_and_leaves_nothing_behind() -> None:
    async with stage(failing()) as one:
        bus: Any = one.bus
        one.b.settles = False
        request_hash = (await one.ask(prompt=prompt())).json()["request_hash"]
        bus.cancels_refused = 1
        refused = await one.client.delete(f"/v1/kv_transfer/{request_hash}")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        first = await one.b.taken()
        await one.b.end(first, "cancelled", told="handed back")

        async def queued() -> bool:
            return (await one.record(request_hash, 0))["status"] == "queued"

        await until(queued)
        one.b.requests.append(first)
        await one.b.step(first, "accepted")
        await one.b.end(first)
        assert (await one.record(request_hash))["status"] == "transferred"
        assert one.b.cancelled == []


async def test_a_cancel_of_a_request_that_was_handed_back_reaches_its_next_run(gateway: Stage) -> None:
    gateway.b.settles = False
    request_hash = (await gateway.ask(prompt=prompt())).json()["request_hash"]
    first = await gateway.b.taken()
    await gateway.b.end(first, "cancelled", told="handed back")

    async def queued() -> bool:
        return (await gateway.record(request_hash, 0))["status"] == "queued"

    await until(queued)
    assert (await gateway.client.delete(f"/v1/kv_transfer/{request_hash}")).status_code == 202
    heard = len(gateway.b.cancelled)
    gateway.b.requests.append(first)
    await gateway.b.step(first, "accepted")
    await until(lambda: len(gateway.b.cancelled) > heard, what="the next run hears it")


# H19
async def test_a_fault_of_the_gateway_is_not_called_a_stop_of_it() -> None:
    async with stage(failing()) as one:
        bus: Any = one.bus
        bus.stores_failed = 1
        answered = await one.ask(prompt=prompt())
        assert answered.status_code == 503
        assert "a fault of the gateway ended its watch" in answered.json()["error"]
        stats = await one.stats()
        assert (stats["fired"], stats["seen"], stats["inflight"]) == (0, 0, 0)


async def test_what_a_run_left_open_for_others_ends_with_the_next_one_and_is_followed_there(gateway: Stage) -> None:
    b = gateway.b
    await b.report(TransferStep(transfer="T-old", request_hash=HASH, step="accepted"))

    async def stands_as(status: str, transfer: str) -> bool:
        answered = await gateway.client.get(f"/v1/kv_transfer/{HASH}")
        told = answered.json() if answered.status_code == 200 else {}
        return (told.get("status"), told.get("transfer")) == (status, transfer)

    await until(lambda: stands_as("running", "T-old"))
    waiting = asyncio.ensure_future(gateway.record(HASH))
    await until(lambda: gateway.parts.transfers._waited, what="somebody waits for it")
    b.epoch += 1
    await b.report(TransferStep(transfer="T-other", request_hash="cd" * 16, step="accepted"))
    told = await waiting
    assert (told["status"], told["transfer"]) == ("failed", "T-old")
    assert "b/m0 started anew" in str(told["reason"])
    await b.report(TransferStep(transfer="T-new", request_hash=HASH, step="accepted"))
    await until(lambda: stands_as("running", "T-new"))
    assert (await gateway.stats())["failed"] == 0  # what others made counts nowhere


async def test_who_waits_in_vain_leaves_nothing_behind(gateway: Stage) -> None:
    gateway.b.settles = False
    await gateway.b.report(TransferStep(transfer="T", request_hash=HASH, step="accepted"))

    async def seen() -> bool:
        return (await gateway.client.get(f"/v1/kv_transfer/{HASH}")).status_code == 200

    await until(seen)
    both = await asyncio.gather(*(gateway.record(HASH, 0.05) for _ in range(2)))
    assert [told["status"] for told in both] == ["running"] * 2
    assert gateway.parts.transfers._waited == {}


async def test_who_waits_for_a_request_that_is_then_not_taken_on_is_told_that_it_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbus.gateway.runs.VERDICT_WAIT_S", 60.0)
    async with stage(present=False) as one:
        one.b.word, one.b.reason = "refused", "bus_unavailable: facts wait for the broker"
        asking = asyncio.ensure_future(one.ask(prompt=prompt()))
        await until(lambda: one.bus.health().connected and len(one.parts.transfers.gate("b")) == 1)
        (record,) = one.parts.transfers.gate("b")._entries.values()
        path = f"/instances/b/v1/kv_transfer/{record.request_hash}"
        waiting = asyncio.ensure_future(one.client.get(path, params={"wait_s": 30}))
        await until(lambda: one.parts.transfers._waited, what="somebody waits for it")
        serving = asyncio.ensure_future(one.b.serve())
        assert (await asking).status_code == 503
        assert (await waiting).status_code == 404
        serving.cancel()
