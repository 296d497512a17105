"""Wait for a fact with a deadline: the only way in which a test may wait.

Both helpers return as soon as the predicate holds, so a generous deadline costs nothing on a fast machine.
"""

import asyncio
import inspect
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

POLL_S = 0.005
"""Short against every real wait in the suite (a broker's round trip takes about a millisecond)."""

DEADLINE_S = 60.0
"""Far beyond what any awaited fact takes, also on a machine that many others starve; only a hang meets it."""


def wait_until(predicate: Callable[[], object], deadline_s: float = DEADLINE_S, what: str = "") -> None:
    """Return once the predicate holds; AssertionError, naming what was awaited, if it never does.

    It blocks the thread: use `until` on an event loop.
    """
    never_set = threading.Event()
    ends_at = time.monotonic() + deadline_s
    while not predicate():
        if time.monotonic() >= ends_at:
            raise AssertionError(_never_held(predicate, deadline_s, what))
        never_set.wait(POLL_S)


async def until(
    predicate: Callable[[], object | Awaitable[object]], deadline_s: float = DEADLINE_S, what: str = ""
) -> None:
    """Return once the predicate (plain or async) holds; AssertionError if it never does. The loop runs on."""
    ends_at = time.monotonic() + deadline_s
    while True:
        answer = predicate()
        if inspect.isawaitable(answer):
            answer = await asyncio.wait_for(answer, max(POLL_S, ends_at - time.monotonic()))
        if answer:
            return
        if time.monotonic() >= ends_at:
            raise AssertionError(_never_held(predicate, deadline_s, what))
        await asyncio.sleep(POLL_S)  # noqa: TID251 - the one place that polls


def stand_still(pid: int) -> None:
    """Stop a process, and return when each of its threads stands: the signal alone lets them run on for a while."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_until(lambda: all(_stands(thread) for thread in threads.iterdir()), what=f"process {pid} stands still")


def _stands(thread: Path) -> bool:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it ended between the look at the folder and this one
        return False


def _never_held(predicate: Callable[[], object], deadline_s: float, what: str) -> str:
    awaited = what or getattr(predicate, "__qualname__", repr(predicate))
    return f"waited {deadline_s:g} s, and it never held: {awaited}"
