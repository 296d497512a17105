"""Draining a member: it takes and lends nothing new, finishes what runs, and leaves when nothing is held any more.

Nothing is freed for it: what is lent ends on evidence, as ever. Whoever waits has a budget; the member has none, and
says at each question what still holds it.
"""

import asyncio
import logging
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from kvbus.draining import HOLDING_MAX, DrainAnswered, DrainAsked, HoldingRow
from kvbus.errors import BusError, KvbusError, PeerError
from kvbus.events import decode
from kvbus.ledger.facts import Fact
from kvbus.ledger.held import Held
from kvbus.roles.asking import Asker
from kvbus.roles.destination import Destination
from kvbus.roles.intake import Intake
from kvbus.roles.recorder import Recorder
from kvbus.roles.registry import Presence
from kvbus.roles.rounds import Rounds
from kvbus.roles.source import Source
from kvbus.topics import Command, Topics
from kvbus.transport import Bus, Delivery, Subscription

DRAINING, DRAINED, LEAVING = "draining", "drained", "leaving"
REST_S = 1.0
"""For telling the broker that requests are left to the next run: a round trip takes milliseconds."""

log = logging.getLogger(__name__)


class Drained(Protocol):
    """The parts of a member that take, lend and hold."""

    intake: Intake
    destination: Destination
    source: Source
    asker: Asker
    rounds: Rounds
    presence: Presence


class Drain:
    """One member's way out, and back. `leave` ends its worker in order."""

    def __init__(self, bus: Bus, topics: Topics, recorder: Recorder, place: tuple[str, str], parts: Drained) -> None:
        self._bus = bus
        self._instance, member = place
        self._subject = topics.command(self._instance, Command.DRAIN, member)
        self._recorder = recorder
        self._intake = parts.intake
        self._destination = parts.destination
        self._source = parts.source
        self._asker = parts.asker
        self._holder = parts.rounds.holder
        self._presence = parts.presence
        self._subscription: Subscription | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self._leaves = False
        self._told = ""
        self.leave: Callable[[], None] = lambda: None

    async def listen(self) -> None:
        """Answer whoever may drain this member."""
        self._subscription = await self._bus.respond(self._subject, self._on_drain)

    async def close(self) -> None:
        """Stop answering."""
        if self._subscription is not None:
            await self._subscription.close()
        for task in self._telling:
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)

    @property
    def state(self) -> str:
        """Where this member stands; empty while it takes part."""
        if not self._destination.closed:
            return ""
        if self._told == LEAVING:
            return LEAVING
        return DRAINING if self._is_held else DRAINED

    def tick(self) -> None:
        """Look, each round, whether nothing is held any more; tell others of a new state."""
        state = self.state
        if state != self._told:
            self._tell(state)
        if state == DRAINED and self._leaves:
            log.info("%s is drained: nothing is held, and it leaves", self._instance)
            self._leaves = False
            self.leave()

    async def stop(self, why: str) -> None:
        """The worker is told to end: take and lend nothing more, and leave requests in the queue to the next run."""
        self._destination.closed = self._destination.closed or why
        self._source.stop_lending()
        self._tell(LEAVING)
        try:
            async with asyncio.timeout(REST_S):
                await self._intake.rest()
        except (BusError, TimeoutError) as error:
            log.info("the broker was not told that requests are left to the next run: %s", error)

    # ------------------------------------------------------------------------------------------------------- inside

    async def _on_drain(self, delivery: Delivery) -> bytes:
        event = decode(delivery.data)
        if not isinstance(event.body, DrainAsked):
            raise PeerError("expected drain_asked", kind=event.header.k)
        refusal = await self._obey(event.body, event.header.i)
        return self._recorder.encoded(self._answer(refusal), event.header.event_id)

    async def _obey(self, asked: DrainAsked, who: str) -> str:
        """Do what is asked; return why not, in words."""
        if asked.action == "look":
            return ""
        if self._told == LEAVING:
            return f"{self._instance} is leaving already: start it again"
        log.info("%s asks to %s (requests: %s, leave: %s)", who, asked.action, asked.requests, asked.leave)
        if asked.action == "undo":
            self._leaves = False
            self._destination.closed = ""
            self._source.lend_again()
            await self._intake.resume()
        else:
            again = ", and takes part again soon" if asked.requests == "keep" else ""
            self._destination.closed = f"draining: {self._instance} takes nothing new{again}; ask another instance"
            self._source.stop_lending()
            await (self._intake.rest() if asked.requests == "keep" else self._intake.resume())
            self._leaves = asked.leave
        self.tick()
        return ""

    def _answer(self, refusal: str) -> DrainAnswered:
        return DrainAnswered(
            state=self.state,
            transfers_running=self._destination.running,
            requests_in_hand=self._intake.in_hand,
            releases_unconfirmed=self._asker.unconfirmed,
            leases_held=self._holder.statistics().held,
            holding=tuple(map(_row, islice(self._holder.held(), HOLDING_MAX))),
            refusal=refusal,
        )

    @property
    def _is_held(self) -> bool:
        return bool(
            self._destination.running
            or self._intake.in_hand
            or self._asker.awaited
            or self._holder.statistics().held
            or self._source.computing  # it would lend what it pins
        )

    def _tell(self, state: str) -> None:
        """Say in heartbeats and in the registry where this member stands; at once, so that requests go elsewhere."""
        self._told = state
        self._presence.state = state
        task = asyncio.get_running_loop().create_task(self._refresh())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _refresh(self) -> None:
        try:
            await self._presence.tell()
        except KvbusError as error:  # the next beat says it
            log.info("new state not told: %s", error)


def _row(held: Held) -> HoldingRow:
    return HoldingRow(
        ticket=held.ticket,
        direction="write" if held.writes else "read",
        peer=held.peer,
        transfer=held.transfer,
        pages=held.rows,
        quiet=bool(held.bits & Fact.ACCESS_ENDED),
    )
