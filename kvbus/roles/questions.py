"""Questions that wait for a source to decide: woken by key, bounded in number."""

import asyncio

from kvbus.ledger.lending import Key

WAITING_MAX = 32
"""Questions that wait here at a time: half of what the bus lets be answered at once, so that releases always get
through. Beyond that a reader hears `computing` at once, and asks again."""


class WaitingQuestions:
    """Who waits for which key to be decided; all of it belongs to one loop."""

    def __init__(self) -> None:
        self._decided: dict[Key, asyncio.Event] = {}
        self._waiting = 0

    def __repr__(self) -> str:
        return f"<WaitingQuestions waiting={self._waiting}>"

    @property
    def open(self) -> int:
        """How many keys somebody waits for."""
        return len(self._decided)

    async def wait(self, key: Key, wait_s: float) -> None:
        """Wait until something was decided for a key, or the wait is over; at once where too many wait already."""
        if self._waiting >= WAITING_MAX:
            return
        decided = self._decided.setdefault(key, asyncio.Event())
        self._waiting += 1
        try:
            async with asyncio.timeout(wait_s):
                await decided.wait()
        except TimeoutError:
            return
        finally:
            self._waiting -= 1

    def wake(self, key: Key) -> None:
        """Let whoever waits for this key look again."""
        decided = self._decided.pop(key, None)
        if decided is not None:
            decided.set()
