"""A steady load: one prompt after another at one pace, whatever becomes of each."""

import asyncio
import re
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from kvbus.errors import BusError
from kvbus.events import Header, encode
from kvbus.handles import UNSURE
from kvbus.names import request_hash
from kvbus.publisher import TransferHandle, checked_prompt
from tests.flow.town import TOPICS, Town, prompt

PACE_S = 0.1
"""Some 150 events a second between two workers: a third of a core, so that a row measures its fault and no queue."""
BLOCKS, BLOCKS_LONG, LONG = 2, 16, 4
RATE_BYTES_S = 4 << 20
"""Of the destination: four long prompts of 1 MiB each take a second, so that a fault meets them under way."""
BUDGET_S = 30.0
REPEATED = 8
_NUMBERS = re.compile(r"[0-9]+(\.[0-9]+)?")


@dataclass(slots=True)
class Asked:
    """One request: its hash, and the handle where the broker took it."""

    request_hash: str
    handle: TransferHandle | None = None
    told: str = ""
    why: str = ""
    answered_s: float = 0.0
    """How long asking took."""
    unsure: bool = False
    """Whether the requester was told that its broker was lost before it confirmed."""

    @property
    def refused(self) -> bool:
        """Whether the requester was told that nobody takes it: by its own bus, or by the destination."""
        return self.told in {"bus_unavailable", "skipped_busy", "refused"}


@dataclass(slots=True)
class Load:
    """Asks until it is stopped; what became of it stands in `asked`."""

    town: Town
    tag: str
    asked: list[Asked] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    faults: list[str] = field(default_factory=list)
    _tasks: "set[asyncio.Task[None]]" = field(default_factory=set)
    _pacing: "asyncio.Task[None] | None" = None

    def start(self) -> None:
        """Begin to ask."""
        self.began = time.monotonic()
        self._pacing = asyncio.create_task(self._pace(), name="load")

    async def stop(self) -> None:
        """Ask nothing new, and wait until the broker has taken or refused what was asked."""
        if self._pacing is not None:
            self._pacing.cancel()
            await asyncio.wait({self._pacing})
            self._pacing = None
            self.ended = time.monotonic()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def long(self) -> set[str]:
        """Ask for some long prompts at once; return their hashes."""
        return {self._begin(BLOCKS_LONG).request_hash for _ in range(LONG)}

    def all_refused(self, hashes: Collection[str]) -> bool:
        """Whether nobody took any of these."""
        return all(one.refused for one in self.asked if one.request_hash in hashes)

    async def repeat(self, ended: Collection[str]) -> int:
        """Send the newest requests that have ended again under their own ids, as after a lost ack; return how many."""
        known = [one.handle for one in self.asked if one.request_hash in ended]
        taken = [handle.request for handle in known if handle is not None][-REPEATED:]
        sent = 0
        for request in taken:
            subject = TOPICS.transfer(request.destination, request.request_hash)
            header = Header(k=request.KIND, i=request.requester, s=sent + 1, t=time.time_ns())
            try:
                await self.town.publisher._running().store(  # noqa: SLF001 - as the requester, on its own connection
                    subject, encode(header, request), message_id=request.request_id
                )
                sent += 1
            except BusError:
                continue
        return sent

    async def hear(self, ended: Collection[str]) -> None:
        """Take note of what requesters were told at first, where no end is known."""
        for one in self.asked:
            if one.handle is not None and not one.told and one.request_hash not in ended:
                verdict = await one.handle.verdict(0)
                one.told = "" if verdict.verdict == "queued" else verdict.verdict
                one.why = _NUMBERS.sub("…", verdict.reason)
                one.unsure |= verdict.verdict == "queued" and verdict.reason == UNSURE

    def missed(self, refused: Collection[str]) -> int:
        """Take note of refusals of which requesters have not heard, though a destination told them; return how many."""
        lost = [one for one in self.asked if not one.told and one.request_hash in refused]
        for one in lost:
            one.told = "refused"
        return len(lost)

    async def give_up_unsure(self, begun: Collection[str]) -> int:
        """Take note of requests whose requester was told that they may be queued or not, and are not: how many."""
        count = 0
        for one in self.asked:
            if one.unsure and not one.told and one.request_hash not in begun:
                queued = await self.town.bus.last(TOPICS.transfer("b", one.request_hash))
                one.told = "" if queued else "bus_unavailable"
                count += not queued
        return count

    def waiting(self, ended: Collection[str]) -> list[str]:
        """Return the hashes of requests that a broker took and of which no end is known."""
        return [one.request_hash for one in self.asked if not one.refused and one.request_hash not in ended]

    async def _pace(self) -> None:
        due = time.monotonic()
        while True:
            self._begin(BLOCKS)
            due = max(due + PACE_S, time.monotonic())
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def _begin(self, blocks: int) -> Asked:
        ids = prompt(f"{self.tag} {len(self.asked)}", blocks)
        asked = Asked(request_hash(model="", salt="", source="a", prompt=checked_prompt(ids).canonical()))
        self.asked.append(asked)
        task = asyncio.create_task(self._ask(asked, ids))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return asked

    async def _ask(self, asked: Asked, ids: list[int]) -> None:
        began = time.monotonic()
        try:
            asked.handle = await self.town.ask(ids, budget_s=BUDGET_S)
        except BusError:
            asked.told = "bus_unavailable"
        except Exception as error:  # noqa: BLE001 - what asking raises is a finding of the row
            self.faults.append(f"asking raised {type(error).__name__}: {error}")
        asked.answered_s = time.monotonic() - began
