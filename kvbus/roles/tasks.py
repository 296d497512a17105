"""Tasks of one part of a member: ended with it, and what one of them raises is logged and told, not lost with it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine

log = logging.getLogger(__name__)

OnFault = Callable[[str], None]
"""Hears in words what a task raised; whatever waits for it has to end by that."""


def unheard(_text: str) -> None:
    """Do nothing more about a fault: the log has it, and nothing waits for the task."""


def started(
    work: Coroutine[object, object, None],
    *,
    name: str,
    on_fault: OnFault = unheard,
    on_end: Callable[[asyncio.Task[None]], object] | None = None,
) -> asyncio.Task[None]:
    """Run something as a task; what it raises is a fault of ours, since what may go wrong ends it in words."""

    def ended(task: asyncio.Task[None]) -> None:
        if on_end is not None:  # here, since each callback of a task takes a turn of the loop
            on_end(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("a fault in the task %r", name, exc_info=error)
        on_fault(f"a fault in {name}: {type(error).__name__}: {error}")

    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(ended)
    return task


class Tasks:
    """The tasks of one part that have not ended."""

    def __init__(self) -> None:
        self._open: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Tasks open={len(self._open)}>"

    def __len__(self) -> int:
        return len(self._open)

    def start(
        self, work: Coroutine[object, object, None], *, name: str, on_fault: OnFault = unheard
    ) -> asyncio.Task[None]:
        """Run something until it ends or `close` ends it."""
        task = started(work, name=name, on_fault=on_fault, on_end=self._open.discard)
        self._open.add(task)
        return task

    async def wait(self, wait_s: float) -> int:
        """Wait until all have ended, bounded; return how many have not."""
        if self._open:
            await asyncio.wait(self._open, timeout=wait_s)
        return len(self._open)

    async def close(self) -> None:
        """Cancel all, and wait until they have ended; bounded by the cancellation itself."""
        open_now = tuple(self._open)
        for task in open_now:
            task.cancel()
        await asyncio.gather(*open_now, return_exceptions=True)
