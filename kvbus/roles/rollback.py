"""Rollback: notices that the facts stream has lost what this member stored there, and answers with a snapshot.

A broker that lost its power, or its disk, goes on from an earlier place, or from none. Then facts are missing that the
member told and that nobody will find again; and the stream may have grown beyond its old head since. So sequences are
compared where the broker names them, and contents after each reconnect.
"""

import asyncio
import logging
from collections.abc import Callable

from kvbus.errors import BusError
from kvbus.roles.recorder import NOWHERE, Recorder
from kvbus.transport import Bus

LOOK_S = 1.0
"""As often as a heartbeat: that is what a follower would otherwise go by."""

log = logging.getLogger(__name__)


class Rollback:
    """Looks after the stream on one subject; `tell` records a snapshot for a reason."""

    def __init__(self, *, bus: Bus, subject: str, recorder: Recorder, tell: Callable[[str], None]) -> None:
        self._bus = bus
        self._subject = subject
        self._recorder = recorder
        self._tell = tell
        self._fell_back = 0
        self._connections: int | None = None
        self.snapshots = 0

    async def run(self) -> None:
        """Look each second until cancelled; a broker that is away is looked at when it is back."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                reason = await self.reason()
            except BusError as error:
                log.info("the facts stream cannot be looked at: %s", error)
                continue
            if reason:
                log.warning("%s: this member's state is told anew", reason)
                self.snapshots += 1
                self._tell(reason)

    async def reason(self) -> str:
        """Return why followers need this member's state, "" where the stream holds what it should."""
        fell_back, self._fell_back = self._fell_back != self._recorder.fell_back, self._recorder.fell_back
        counters = self._bus.health().counters
        connections = counters.get("reconnected", 0) + counters.get("rebuilt", 0)
        if self._connections is None:
            self._connections = connections
        if fell_back:
            self._connections = connections
            return "the facts stream went back: it gave a place away for the second time"
        if connections == self._connections:
            return ""
        lost = await self._lost()
        self._connections = connections
        if lost:  # the state that is told now contains all that was stored so far, whichever place that was given
            self._fell_back = self._recorder.fell_back
            self._recorder.newest = NOWHERE
        return lost

    async def _lost(self) -> str:
        sequence, data = self._recorder.newest
        if not sequence:
            return ""  # nothing was stored yet, so nothing can be lost
        found = await self._bus.history(self._subject, after_sequence=sequence - 1, most=1)
        if found and (found[0].sequence, found[0].data) == (sequence, data):
            return ""
        return f"the facts stream does not hold any more what stood at {sequence}"
