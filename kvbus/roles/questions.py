"""Questions that wait for a source to decide: woken by key, bounded in number."""

from kvbus.ledger.lending import Key
from kvbus.roles.moments import Moment

WAITING_MAX = 32
"""Questions that wait here at a time: half of what the bus lets be answered at once, so that releases always get
through. Beyond that a reader hears `computing` at once, and asks again."""


class WaitingQuestions:
    """Who waits for which key to be decided; all of it belongs to one loop."""

    def __init__(self) -> None:
        self._decided: dict[Key, Moment] = {}
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
        decided = self._decided.setdefault(key, Moment())
        self._waiting += 1
        try:
            await decided.within(wait_s)
        finally:
            self._waiting -= 1

    def wake(self, key: Key) -> None:
        """Let whoever waits for this key look again."""
        decided = self._decided.pop(key, None)
        if decided is not None:
            decided.come()
