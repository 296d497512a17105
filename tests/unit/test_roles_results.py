"""Outcomes are told by one task, and what goes wrong in telling one of them costs none of the others."""

import asyncio

import pytest

from kvbus.events import TransferOutcome, decode
from kvbus.testing.bus import MemoryBroker
from tests.unit.test_roles_leaving import Reader, request
from tests.waiting import until


@pytest.fixture
def reader() -> Reader:
    return Reader(MemoryBroker().connect())


def conclude(reader: Reader, number: int) -> None:
    """Have a transfer fail that its requester waits for."""
    asked = request(number)
    reader.results.open(f"b-{number}")
    reader.results.join(asked, f"b-{number}")
    outcome = TransferOutcome(
        transfer=f"b-{number}",
        request_hash=asked.request_hash,
        source="a",
        destination="b",
        outcome="failed",
        failure="deadline",
        reason="",
    )
    reader.results.conclude(outcome, asked)


# R21
async def test_a_fault_in_telling_one_requester_is_logged_and_the_others_are_told(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Planted fault that this catches: the task that tells is not started again before there is more to tell.
    told: list[str] = []
    publish = reader.bus.publish

    async def broken(subject: str, data: bytes) -> None:
        if not told:
            told.append("nobody")
            raise RuntimeError("planted")
        await publish(subject, data)
        body = decode(data).body
        assert isinstance(body, TransferOutcome)
        told.append(body.transfer)

    monkeypatch.setattr(reader.bus, "publish", broken)
    for number in (1, 2, 3):
        conclude(reader, number)
    await until(lambda: told == ["nobody", "b-2", "b-3"])
    assert "planted" in caplog.text
    await reader.results.close()


async def test_what_ends_after_the_close_is_told_as_well_and_by_a_task_that_ends(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    async def heard(_subject: str, data: bytes) -> None:
        body = decode(data).body
        assert isinstance(body, TransferOutcome)
        told.append(body.transfer)

    monkeypatch.setattr(reader.bus, "publish", heard)
    conclude(reader, 1)
    await until(lambda: told == ["b-1"])
    await reader.results.close()
    conclude(reader, 2)
    await until(lambda: told == ["b-1", "b-2"])
    await until(lambda: not [one for one in asyncio.all_tasks() if one.get_name() == "telling"])
