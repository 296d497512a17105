"""A lane: what waits for one stream, in order; what stands at its front leaves as one message."""

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice

from kvbus.events import BATCH_EVENTS_MAX, EVENT_LENGTH_MAX_BYTES, FactsSeen, TransferStep
from kvbus.roles.collapsing import newest_lines

BATCH_LENGTH_MAX_BYTES = EVENT_LENGTH_MAX_BYTES // 2
"""What the events of one batch hold together; each is far smaller than the other half."""
COLLAPSE_LENGTH_BYTES = 1 << 20
"""So much is looked through at a time when the outbox is full: nothing else runs in the 0.15 s that takes at most."""

STEP = TransferStep.KIND

Pack = Callable[[list[bytes], int], bytes]
"""Makes one message of the events of a batch, under the number of the last of them."""


Outgoing = tuple[bytes, int, str]
"""An event, its number, and its kind; a bare tuple, since one is made for every event."""


class Lane:
    """Events for one subject. What is leaving stays as it is until it has left: the broker may have it already."""

    def __init__(self, subject: str, pack: Pack) -> None:
        self.subject = subject
        self.queue: deque[Outgoing] = deque()
        self.asleep: asyncio.Future[None] | None = None
        """While nothing may leave: what ends that wait, for the one task that lets it leave."""
        self.leaving = 0
        self._leaving_bytes = self._leaving_sequence = 0
        self.leaves_steps = False
        """Whether what is leaving tells steps of transfers, which will be followed by more."""
        self.left_sequence = 0
        """The newest event that has left."""
        self.collapsed = 0
        self._pack = pack
        self._looked_through = 0

    @property
    def newest_sequence(self) -> int:
        """The newest event that waits; where none does, the last one that has left."""
        return self.queue[-1][1] if self.queue else self.left_sequence

    async def sleep(self) -> None:
        """Wait until something more may leave."""
        self.asleep = asyncio.get_running_loop().create_future()
        try:
            await self.asleep
        finally:
            self.asleep = None

    def wake(self) -> None:
        """Something came, or what it had to wait for has left."""
        if self.asleep is not None and not self.asleep.done():
            self.asleep.set_result(None)
        self.asleep = None

    def begin(self, before: int | None) -> tuple[bytes, int] | None:
        """Return what leaves next, as many events as fit, under the number of the last; None where nothing may.

        Those from `before` on may not.
        """
        batch: list[bytes] = []
        length_bytes = last = 0
        tells_steps = False
        for data, sequence, kind in islice(self.queue, BATCH_EVENTS_MAX):
            with_it = length_bytes + len(data)
            if (before is not None and sequence >= before) or (batch and with_it > BATCH_LENGTH_MAX_BYTES):
                break
            batch.append(data)
            length_bytes, last = with_it, sequence
            if kind == STEP:
                tells_steps = True
        self.leaving, self.leaves_steps = len(batch), tells_steps
        self._leaving_bytes, self._leaving_sequence = length_bytes, last
        if not batch:
            return None
        return (batch[0] if len(batch) == 1 else self._pack(batch, last)), last

    def end(self) -> int:
        """Forget what was leaving, now that it has left; return its length."""
        for _ in range(self.leaving):
            self.queue.popleft()
        self.left_sequence = self._leaving_sequence
        self._looked_through = max(0, self._looked_through - self.leaving)
        self.leaving = 0
        return self._leaving_bytes

    def collapse(self) -> int | None:
        """Leave out of the oldest facts what later ones contain; return what that freed.

        None where all of them were looked through already.
        """
        begin = max(self.leaving, self._looked_through)
        length_bytes, end = 0, begin
        for data, _, _ in islice(self.queue, begin, None):
            length_bytes, end = length_bytes + len(data), end + 1
            if length_bytes >= COLLAPSE_LENGTH_BYTES:
                break
        if end == begin:
            return None
        queue = list(self.queue)
        places = [place for place in range(begin, end) if queue[place][2] == FactsSeen.KIND]
        left = dict(zip(places, newest_lines([queue[place][0] for place in places]), strict=True))
        kept: list[Outgoing] = []
        freed_bytes = 0
        for place in range(begin, end):
            whole, sequence, kind = queue[place]
            newest = left.get(place, whole)
            freed_bytes += len(whole) - len(newest or b"")
            if newest is not None:
                kept.append((newest, sequence, kind))
        self.collapsed += end - begin - len(kept)
        self.queue = deque([*queue[:begin], *kept, *queue[end:]])
        self._looked_through = begin + len(kept)
        return freed_bytes
