"""The bridge: an engine's own KV events become `blocks` events on the bus, in one order, with gaps repaired or told.

Each run of the engine, and each run of the bridge, is an epoch, and begins with `cleared`: what an epoch before it said
counts no more. A batch that is missing is asked for again; where the engine has it no more, `cleared` says that nothing
is known. While the broker is away the bridge stands still: the engine's buffer keeps what comes meanwhile.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from kvbus.blocks import BLOCKS_MAX, BlockChange, BlocksChanged, BlocksUnseen
from kvbus.engines.kv_events import Batch, BlockBook, StreamPlace
from kvbus.errors import BusError, PeerError
from kvbus.events import EVENT_LENGTH_MAX_BYTES, Header, encode
from kvbus.parts import Body
from kvbus.topics import Topics
from kvbus.transport import Bus

RETRY_S = 1.0
REPLAY_TRIES_MAX = 4
"""A replay in which batches are missing is asked for again; each begins where the one before it stopped."""
PART_LENGTH_MAX_BYTES = EVENT_LENGTH_MAX_BYTES // 2
"""What one message says of blocks; one change may be longer, and fits a message by itself. Half of what an event may
be, so that what is around it and a bound that is a little too low count for nothing."""

_CHANGE_LENGTH_BYTES = 128
"""A change's field names, its kind, its numbers, and the heads of its texts and lists."""

log = logging.getLogger(__name__)


class EventStream(Protocol):
    """What the bridge needs of the sockets."""

    counts: Counter[str]
    connected: bool

    @property
    def has_replay(self) -> bool:
        """Whether batches can be asked for again."""

    async def next(self, wait_s: float) -> Batch | None:
        """Return the next live batch, or None after a quiet spell."""

    def replay(self, first: int) -> AsyncIterator[Batch]:
        """Yield what the engine still holds from a sequence on; PeerError where that does not come to its end."""


@dataclass(frozen=True, slots=True)
class BridgeSettings:
    """Whose blocks, as what they are told, and how long an engine may be silent, at first and later."""

    instance: str
    member: str = "dp0"
    model: str = ""
    start_wait_s: float = 300.0
    dead_after_s: float = 30.0
    look_s: float = 2.0
    """In a quiet stream the engine is asked this often whether anything was missed: a lost last batch leaves no gap."""


class BlockBridge:
    """One bridge; `run` returns only where the engine's stream is dead, and then says why."""

    def __init__(
        self,
        stream: EventStream,
        bus: Bus,
        topics: Topics,
        settings: BridgeSettings,
        *,
        next_epoch: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._bus = bus
        self._subject = topics.blocks(settings.instance)
        self._settings = settings
        self._next_epoch = next_epoch
        self._clock = clock
        self._book = BlockBook(settings.model)
        self._place = StreamPlace()
        self._epoch = self._sequence = self._connects = 0
        self._is_unsure = False
        self._heard_at = clock()
        self._was_heard = False
        self.counts: Counter[str] = Counter()

    async def run(self) -> str:
        """Bridge until the engine has been silent for too long; then raise the alarm, and return its reason."""
        self._heard_at = self._clock()
        await self._begin("the bridge starts")
        if self._stream.has_replay:
            await self._catch_up()
        while True:
            batch = await self._stream.next(self._settings.look_s)
            self._note_connects()
            if batch is not None:
                self._hear()
                await self._take(batch)
            elif self._stream.has_replay:
                await self._catch_up()
            elif self._stream.connected:
                self._hear()
            if (reason := self._dead()) is not None:
                log.error("%s: %s", self._settings.instance, reason)
                await self.give_up(reason)
                return reason

    async def give_up(self, reason: str) -> None:
        """Tell all who route by these blocks that nothing is known of them any more."""
        silent_s = min(86_400.0, max(0.0, self._clock() - self._heard_at))
        await self._store(BlocksUnseen(reason=reason, silent_s=round(silent_s, 3)))

    # ------------------------------------------------------------------------------------------------------- inside

    def _hear(self) -> None:
        self._heard_at = self._clock()
        self._was_heard = True

    def _note_connects(self) -> None:
        """Behind a second connection may be another run of the engine, whose next batch may even fit by its number."""
        connects = self._stream.counts["connected"]
        self._is_unsure |= connects != self._connects and self._was_heard
        self._connects = connects

    def _dead(self) -> str | None:
        bound_s = self._settings.dead_after_s if self._was_heard else self._settings.start_wait_s
        if self._clock() - self._heard_at < bound_s:
            return None
        when = "any more" if self._was_heard else "since the bridge started"
        return f"no sign of life of the engine's KV events {when}, for {bound_s:g} s"

    async def _take(self, batch: Batch) -> None:
        """Take one live batch; where it does not follow on what was seen, or may not, ask the engine first."""
        follows = batch.sequence == self._place.last + 1 or self._place.knows(batch)
        if self._stream.has_replay and (self._is_unsure or not follows):
            await self._catch_up()
        if self._is_unsure:
            self._is_unsure = False
            await self._begin("connected anew, and it is not known whether to the same run of the engine")
            await self._forward(batch)
        elif self._place.knows(batch):
            self.counts["repeated"] += 1
        elif batch.sequence <= self._place.last:
            await self._begin(f"the engine started anew: batch {batch.sequence} came after {self._place.last}")
            await self._forward(batch)
        else:
            await self._forward(batch)

    async def _catch_up(self) -> None:
        """Ask for what follows on the last batch seen, and for that one too: it shows whether this is the same run."""
        for _ in range(REPLAY_TRIES_MAX):
            try:
                whole = await self._replayed(self._place.last)
            except PeerError as error:
                self.counts["replays_lost"] += 1
                log.warning("%s", error)
                return
            self._hear()
            if whole:
                self._is_unsure = False
                return

    async def _replayed(self, last: int) -> bool:
        """Forward one replay; False where it has to be asked for again, since a batch within it is missing."""
        first = True
        async for batch in self._stream.replay(max(0, last)):
            if first and last >= 0 and batch.sequence == last and not self._place.knows(batch):
                await self._begin(f"the engine started anew: it has another batch {last}")
                return False
            if not first and batch.sequence > self._place.last + 1:
                return False
            first = False
            if batch.sequence > self._place.last:
                self.counts["replayed"] += 1
                await self._forward(batch)
        if first and last >= 0:
            await self._begin(f"the engine started anew: it has no batch {last} yet")
            return False
        return True

    async def _forward(self, batch: Batch) -> None:
        missing = batch.sequence - self._place.last - 1
        if missing > 0 and self._place.last >= 0:  # at an epoch's start nothing is known that could be wrong
            self.counts["lost"] += missing
            await self._clear(f"{missing} batches before {batch.sequence} are lost")
        try:
            rank, changes = self._book.changes(batch.payload)
        except PeerError as error:
            self.counts["garbage"] += 1
            log.warning("batch %d cannot be read: %s", batch.sequence, error)
            await self._clear(f"batch {batch.sequence} cannot be read")
            self._place.note(batch)
            return
        for part in _split(changes):
            if not await self._store(BlocksChanged(engine_sequence=batch.sequence, rank=rank, changes=part)):
                await self._clear(f"the broker takes no message as long as that of batch {batch.sequence}")
        self._place.note(batch)
        self.counts["batches"] += 1

    async def _begin(self, reason: str) -> None:
        """Begin an epoch: of what was said before, nothing holds."""
        log.info("%s: a new epoch: %s", self._settings.instance, reason)
        self._epoch, self._sequence = self._next_epoch(), 0
        self._place = StreamPlace()
        self.counts["epochs"] += 1
        await self._clear(reason)

    async def _clear(self, reason: str) -> None:
        self._book.forget()
        self.counts["cleared"] += 1
        cleared = BlockChange(change="cleared", reason=reason)
        await self._store(BlocksChanged(engine_sequence=max(0, self._place.last), changes=(cleared,)))

    async def _store(self, body: Body) -> bool:
        """Store one event, however long the broker is away: until then no further batch is taken.

        False where it is too long for the bus: it will be tomorrow too, and no sequence was spent on it.
        """
        self._sequence += 1
        header = Header(
            k=body.KIND,
            i=self._settings.instance,
            m=self._settings.member,
            e=self._epoch,
            s=self._sequence,
            t=time.time_ns(),
        )
        data = encode(header, body)
        while True:
            try:
                await self._bus.store(self._subject, data, message_id=header.event_id)
            except BusError as error:
                if "length_max_bytes" in error.details:
                    self._sequence -= 1
                    self.counts["too_long"] += 1
                    log.warning("%s: what it said is lost: %s", self._settings.instance, error)
                    return False
                self.counts["store_retries"] += 1
                log.warning("the broker did not take it, trying again: %s", error)
                await asyncio.sleep(RETRY_S)
            else:
                return True


def _split(changes: list[BlockChange]) -> list[tuple[BlockChange, ...]]:
    """Cut a batch's changes into messages, none of which says more than fits one."""
    parts: list[tuple[BlockChange, ...]] = []
    part: list[BlockChange] = []
    blocks = length_bytes = 0
    for change in changes:
        more, more_bytes = max(1, len(change.hashes)), length_max(change)
        if part and (blocks + more > BLOCKS_MAX or length_bytes + more_bytes > PART_LENGTH_MAX_BYTES):
            parts.append(tuple(part))
            part, blocks, length_bytes = [], 0, 0
        part.append(change)
        blocks += more
        length_bytes += more_bytes
    if part:
        parts.append(tuple(part))
    return parts


def length_max(change: BlockChange) -> int:
    """Return how many bytes a change takes in a message, at most: without encoding it twice."""
    texts = len(change.medium) + len(change.lora) + len(change.reason)
    blobs = sum(map(len, change.hashes)) + sum(map(len, change.names)) + len(change.parent)
    return _CHANGE_LENGTH_BYTES + 4 * texts + blobs + 2 * (len(change.hashes) + len(change.names))
