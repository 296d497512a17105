"""A timer on an event loop that measures how late the loop calls it, and how long the loop itself was at work."""

import asyncio
import time
from dataclasses import dataclass, field

TICK_S = 0.001


@dataclass(slots=True)
class Beats:
    """How late each tick was, and how much processor time the loop's thread took before it, both in seconds."""

    late: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)

    def add(self, more: "Beats") -> None:
        """Take those of another turn too."""
        self.late += more.late
        self.held += more.held


class Heartbeat:
    """Ticks each millisecond on the running loop, from `start` to `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._beats = Beats()
        self._due = self._cpu_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Tick from now on."""
        self._beats = Beats()
        self._again(self._loop.time())

    def stop(self) -> Beats:
        """Tick no more, and return what was measured; a tick that is late now counts as well."""
        if self._timer is not None:
            self._timer.cancel()
        now = self._loop.time()
        if now > self._due:
            self._note(now)
        return self._beats

    def _beat(self) -> None:
        now = self._loop.time()
        self._note(now)
        self._again(now)

    def _again(self, now: float) -> None:
        self._due, self._cpu_s = now + TICK_S, time.thread_time()
        self._timer = self._loop.call_at(self._due, self._beat)

    def _note(self, now: float) -> None:
        self._beats.late.append(max(0.0, now - self._due))
        self._beats.held.append(time.thread_time() - self._cpu_s)
