"""Tasks of one part of a member: ended with it, and what one of them raises is logged and told, not lost with it."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import coroutine

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
    on_end: Callable[[], object] | None = None,
) -> asyncio.Task[None]:
    """Run something as a task; what it raises is a fault of ours, since what may go wrong ends it in words.

    `on_end` is called at the end of the task itself, however it ends: as a callback it would take a turn of the loop.
    """
    watched = _watched(work, name, on_fault, on_end)
    watched.send(None)  # into its `try`, so that a cancel before the first turn finds it there
    return asyncio.get_running_loop().create_task(watched, name=name)


async def _watched(
    work: Coroutine[object, object, None],
    name: str,
    on_fault: OnFault,
    on_end: Callable[[], object] | None,
) -> None:
    try:
        await _first_turn()
        await work
    except Exception:
        if (task := asyncio.current_task()) is not None:  # None where a loop's leftovers are closed
            task.add_done_callback(partial(_faulted, name, on_fault))
        raise
    finally:
        work.close()  # where it was cancelled before its first turn
        if on_end is not None:
            on_end()


@coroutine
def _first_turn() -> Generator[None, None, None]:
    yield


def _faulted(name: str, on_fault: OnFault, task: asyncio.Task[None]) -> None:
    error = task.exception()
    log.error("a fault in the task %r", name, exc_info=error)
    on_fault(f"a fault in {name}: {type(error).__name__}: {error}")


class Tasks:
    """The tasks of one part that have not ended."""

    def __init__(self) -> None:
        self._open: dict[object, asyncio.Task[None]] = {}  # by its work, since a task ends it before it is known itself

    def __repr__(self) -> str:
        return f"<Tasks open={len(self._open)}>"

    def __len__(self) -> int:
        return len(self._open)

    def start(
        self, work: Coroutine[object, object, None], *, name: str, on_fault: OnFault = unheard
    ) -> asyncio.Task[None]:
        """Run something until it ends or `close` ends it."""
        task = started(work, name=name, on_fault=on_fault, on_end=partial(self._open.pop, work))
        self._open[work] = task
        return task

    async def wait(self, wait_s: float) -> int:
        """Wait until all have ended, bounded; return how many have not."""
        if self._open:
            await asyncio.wait(self._open.values(), timeout=wait_s)
        return len(self._open)

    async def close(self) -> None:
        """Cancel all, and wait until they have ended; bounded by the cancellation itself."""
        open_now = tuple(self._open.values())
        for task in open_now:
            task.cancel()
        await asyncio.gather(*open_now, return_exceptions=True)
