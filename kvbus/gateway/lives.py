"""The tasks that a gateway lives by: it goes on while all of them do, and ends with the first that ends."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress

from kvbus.errors import KvbusError

log = logging.getLogger(__name__)


class Lives:
    """Tasks that run for as long as their gateway does; none of them may end unheard."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, work: Coroutine[object, object, None]) -> "asyncio.Task[None]":
        """Begin one more."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        return task

    async def last_until(self, stop: asyncio.Event) -> None:
        """Return once `stop` is set; where a task ends before that, raise what ended it."""
        stopped = asyncio.get_running_loop().create_task(_wait(stop))
        try:
            await asyncio.wait({stopped, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        for task in self._tasks:
            if task.done() and not stop.is_set():
                log.error("a part of the gateway has ended, and the gateway ends with it: %r", task)
                await task
                raise KvbusError("a part of the gateway has ended by itself")

    async def end(self) -> None:
        """Cancel them all; raise what one of them had ended with before."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                task.result()


async def _wait(stop: asyncio.Event) -> None:
    await stop.wait()
