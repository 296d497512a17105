"""Moments: what happens once, and how whoever waits for it gives up after a while."""

import asyncio


class Moment:
    """Something that happens once. A wait for it needs a future and a timer, and neither a task nor a cancel."""

    def __init__(self) -> None:
        self.has_come = False
        self._waiting: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return f"<Moment {'has come' if self.has_come else f'waiting={len(self._waiting)}'}>"

    def come(self) -> None:
        """Let everybody go on who waits; harmless to repeat."""
        self.has_come = True
        for waiter in self._waiting:
            wake(waiter)

    async def within(self, wait_s: float) -> bool:
        """Wait until it has come; False where that takes longer than the wait."""
        if self.has_come:
            return True
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        timer = loop.call_later(wait_s, wake, waiter)
        self._waiting.append(waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiting.remove(waiter)
        return self.has_come


def wake(waiter: "asyncio.Future[None]") -> None:
    """Let one waiter go on, unless it was woken before, or cancelled."""
    if not waiter.done():
        waiter.set_result(None)
