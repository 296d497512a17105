"""Calls of the client that were given up end with the bus, also where its code loses a cancellation."""

import asyncio
from collections.abc import Iterator

import pytest

from kvbus import bus_calls
from kvbus.bus_calls import Calls
from tests.waiting import DEADLINE_S, until


@pytest.fixture
def go_on() -> Iterator[list[bool]]:
    """What lets a call that nothing cancels end after its test."""
    switch: list[bool] = []
    yield switch
    assert switch, "the test has to let it end"


async def stubborn(loses: int, lost: list[str]) -> None:
    """Wait for what never comes, and take the first cancellations for something else."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            lost.append("a cancellation")
            if len(lost) > loses:
                raise


async def test_a_call_that_loses_a_cancellation_is_asked_again_and_ends() -> None:
    # Planted fault that this catches: one cancellation, and a wait until it has ended.
    lost: list[str] = []
    calls = Calls()
    with pytest.raises(TimeoutError):
        await calls.within(stubborn(2, lost), 0.01)
    async with asyncio.timeout(DEADLINE_S):
        await calls.end(0.01)
    assert len(lost) == 3
    assert not [task for task in asyncio.all_tasks() if "stubborn" in repr(task)]


async def test_a_call_that_nothing_cancels_is_told_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, go_on: list[bool]
) -> None:
    async def deaf() -> None:
        while not go_on:
            try:
                await asyncio.sleep(0.01)  # noqa: TID251 - a call of foreign code, which waits as it likes
            except asyncio.CancelledError:
                continue

    monkeypatch.setattr(bus_calls, "_CANCEL_S", 0.01)
    calls = Calls()
    with pytest.raises(TimeoutError):
        await calls.within(deaf(), 0.01)
    async with asyncio.timeout(DEADLINE_S):
        await calls.end(0.01)
    assert "go on although they were cancelled: 1" in caplog.text
    go_on.append(True)
    await until(lambda: not [task for task in asyncio.all_tasks() if "deaf" in repr(task)])


async def test_a_bus_that_is_closed_ends_no_call_of_another_one() -> None:
    ours, others = Calls(), Calls()
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(others.within(answer, DEADLINE_S))
    with pytest.raises(TimeoutError):
        await ours.within(asyncio.Event().wait(), 0.01)
    await until(lambda: len(others) == 1)
    await ours.end(0.01)
    assert not len(ours)
    answer.set_result("it came")
    assert await waiting == "it came"
