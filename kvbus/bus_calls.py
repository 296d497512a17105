"""Calls of one bus's client, each with a hard bound, none of them cancelled while the client lives.

The client would later set the result of a cancelled future, and its read loop would die of that. So a call that takes
too long is given up: it runs on by the client's own time limits, and is ended at the latest when the bus is closed.
"""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

from kvbus.errors import BusError

T = TypeVar("T")

_CANCELS_MAX, _CANCEL_S = 8, 0.25
"""Two seconds in all. Each wait of the client that loses a cancellation does so at most once; it has few, in a row."""

log = logging.getLogger(__name__)


class Calls:
    """The calls of one bus that are under way or were given up: as many as there are callers, and no more."""

    def __init__(self) -> None:
        self._open: set[asyncio.Future[Any]] = set()  # the loop keeps only weak references to tasks

    def __len__(self) -> int:
        return len(self._open)

    async def within(self, awaitable: Awaitable[T], budget_s: float) -> T:
        """Await a call with a hard bound; TimeoutError past it.

        A callee that the client itself cancelled, because it was closed, is a BusError.
        """
        task = asyncio.ensure_future(awaitable)
        if not task.done():
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        task.add_done_callback(_take_note)
        await asyncio.wait({task}, timeout=budget_s)
        if not task.done():
            raise TimeoutError
        if task.cancelled():
            raise BusError("the connection was closed while a call was in progress; call again once it is back")
        return task.result()

    async def within_unless(self, awaitable: Awaitable[T], hopeless: asyncio.Event, budget_s: float) -> T:
        """Await with a hard bound; TimeoutError past it, or as soon as the event says that waiting is in vain."""
        attempt = asyncio.ensure_future(self.within(awaitable, budget_s))
        in_vain = asyncio.ensure_future(hopeless.wait())
        try:
            await asyncio.wait({attempt, in_vain}, return_when=asyncio.FIRST_COMPLETED)
            if not attempt.done():
                raise TimeoutError
            return attempt.result()
        finally:
            in_vain.cancel()
            attempt.cancel()

    async def end(self, grace_s: float) -> None:
        """Once the client is closed, wait for what was given up, then cancel it: nothing answers any more.

        The client's own code may take a cancellation for something else and go on (its close and its connect wait by
        `asyncio.wait_for`, which can lose one), so it is asked several times. What goes on even then is told and left.
        """
        left = set(self._open)
        if left:
            _, left = await asyncio.wait(left, timeout=grace_s)
        for _ in range(_CANCELS_MAX):
            if not left:
                return
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=_CANCEL_S)
        if left:
            log.warning("calls of the client go on although they were cancelled: %d", len(left))


def _take_note(task: "asyncio.Future[T]") -> None:
    if not task.cancelled():
        task.exception()  # marks it as seen: an abandoned call's late error has nobody left to tell
