"""Tasks and moments: an end is told however it came, and a wait ends with what it waits for or with its time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kvbus.roles.moments import Moment
from kvbus.roles.tasks import Tasks, started
from tests.waiting import until


class Told:
    """What was told of one task, in order."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def start(self, *, lasts: bool = False, fault: Exception | None = None) -> asyncio.Task[None]:
        async def work() -> None:
            self.words.append("began")
            if lasts:
                await asyncio.Event().wait()
            if fault is not None:
                raise fault

        return started(work(), name="work", on_fault=self.words.append, on_end=lambda: self.words.append("ended"))


@asynccontextmanager
async def waiting(moment: Moment, wait_s: float) -> AsyncIterator[asyncio.Task[bool]]:
    task = asyncio.get_running_loop().create_task(moment.within(wait_s))
    await until(lambda: "waiting=0" not in repr(moment))
    yield task


async def test_the_end_of_a_task_is_told_when_it_has_run() -> None:
    told = Told()
    await told.start()
    assert told.words == ["began", "ended"]


async def test_a_task_that_is_cancelled_before_its_first_turn_ends_all_the_same() -> None:
    told = Told()
    task = told.start(lasts=True)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert told.words == ["ended"]


async def test_a_task_that_is_cancelled_while_it_waits_ends() -> None:
    told = Told()
    task = told.start(lasts=True)
    await until(lambda: bool(told.words))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert told.words == ["began", "ended"]


async def test_what_a_task_raises_is_told_once_it_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    task = told.start(fault=LookupError("nothing there"))
    await asyncio.gather(task, return_exceptions=True)
    assert told.words == ["began", "ended", "a fault in work: LookupError: nothing there"]
    assert [record.getMessage() for record in caplog.records] == ["a fault in the task 'work'"]


async def test_tasks_that_ended_are_not_kept_and_those_that_have_not_begun_are_closed() -> None:
    tasks, told = Tasks(), Told()

    async def work() -> None:
        told.words.append("ran")

    tasks.start(work(), name="one")
    assert len(tasks) == 1
    assert await tasks.wait(60.0) == 0
    tasks.start(work(), name="two")
    await tasks.close()
    assert (len(tasks), told.words) == (0, ["ran"])


@pytest.mark.parametrize("end", [Moment.come, lambda moment: (moment.come(), moment.come())])
async def test_whoever_waits_for_a_moment_goes_on_when_it_comes(end: Callable[[Moment], object]) -> None:
    moment = Moment()
    async with waiting(moment, 60.0) as one, waiting(moment, 60.0) as other:
        end(moment)
        assert all(await asyncio.gather(one, other))
    assert await moment.within(60.0)
    assert repr(moment) == "<Moment has come>"


async def test_a_moment_that_does_not_come_is_waited_for_no_longer_than_asked() -> None:
    moment = Moment()
    async with waiting(moment, 60.0) as patient:
        assert not await moment.within(0.001)
        assert not patient.done()
        patient.cancel()
        await asyncio.gather(patient, return_exceptions=True)
    assert repr(moment) == "<Moment waiting=0>"
