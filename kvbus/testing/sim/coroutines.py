"""Coroutines that were begun outside of a task and go on in one, or that end with their process."""

import asyncio
import contextlib
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any


async def resumed(work: Coroutine[Any, Any, None], awaited: object) -> None:
    """Go on with work that waits already."""
    await _going_on(work, awaited)


@coroutine
def _going_on(work: Coroutine[Any, Any, None], awaited: object) -> Generator[object, None, None]:
    try:
        while True:
            try:
                yield awaited
            except Exception as error:  # noqa: BLE001 - what it waits for has failed, which is the work's to hear
                awaited = work.throw(error)
            else:
                awaited = work.send(None)
    except StopIteration:
        return
    finally:
        work.close()


def closed(task: "asyncio.Task[Any]") -> None:
    """Close the coroutine of a dead task; whatever its `finally` blocks do, they do to a dead process."""
    coro: Any = task.get_coro()
    with contextlib.suppress(BaseException):  # a dead process has nobody to tell
        coro.close()
