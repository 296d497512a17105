"""One run of one simulated member: started as the worker starts, it ends told to, in the worker's order, or killed.

A kill may come between any two turns of its loop.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

from kvbus.errors import BusError
from kvbus.roles.registry import next_epoch
from kvbus.testing.sim.assembly import Builder, Parts, Place
from kvbus.testing.sim.broker import SimBroker
from kvbus.testing.sim.bus import SimBus
from kvbus.testing.sim.councils import Councils, member_name
from kvbus.testing.sim.loop import Actor
from kvbus.testing.sim.settings import SimSettings
from kvbus.testing.sim.truth import SimProcess, Truth

T = TypeVar("T")

START_PAUSE_S = 0.5
TICK_S = 1.0
STOP_BUDGET_S = 3.0
FLUSH_S = 1.0
LINGER_MAX_S = 6.0
"""How long a killed process may still touch memory: longer than most successors take to start and ask."""


@dataclass(slots=True, eq=False)
class Member:
    """One process of one instance, from its start to its end."""

    settings: SimSettings
    truth: Truth
    broker: SimBroker
    instance: str
    rank: int
    others: tuple[str, ...]
    number: int
    councils: Councils
    actor: Actor = field(init=False)
    device: Actor = field(init=False)
    process: SimProcess = field(init=False)
    bus: SimBus = field(init=False)
    parts: Parts | None = None
    wall_offset_s: float = 0.0
    leaving: bool = False
    ended: bool = False
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _nonces: random.Random = field(init=False)

    def start(self) -> None:
        """Start the process."""
        name = f"{self.instance}/{self.number}"
        self.actor, self.device = Actor(name), Actor(f"{name}-device")
        self.process = self.truth.start(name)
        self.bus = SimBus(self.broker, self.actor)
        self._nonces = random.Random(f"{self._seed}:nonces")
        self.truth.trail.note("world", f"{name} starts as {self.process.identity.pid} ")
        self._spawn(self._run(), "run")

    @property
    def alive(self) -> bool:
        """Whether the process runs; one that lingers does not."""
        return not self.ended

    def kill(self) -> None:
        """End the process at once, wherever it stands."""
        if self.alive:
            self.truth.trail.note("world", f"{self.process.name} dies ")
            chance = self.settings.weather.linger
            draw = random.Random(f"{self._seed}:death")
            if self.parts is not None and chance and draw.random() < chance:
                self._linger(draw.random() * LINGER_MAX_S)
            else:
                self._end()

    def quit(self, and_then: Callable[[], None]) -> None:
        """Ask the process to end in order."""
        if self.alive and self.parts is not None and not self.leaving:
            self.leaving = True
            self.truth.trail.note("world", f"{self.process.name} is told to stop ")
            self._spawn(self._leave(self.parts, and_then), "leave")

    def unix_ns(self) -> int:
        """Return what the wall clock shows: virtual time, and whatever it was set to."""
        return int((1_700_000_000.0 + self.truth.loop.now + self.wall_offset_s) * 1e9)

    # --------------------------------------------------------------------------------------------------------- run

    async def _run(self) -> None:
        member = member_name(self.rank)
        epoch = await self._until_taken(lambda: next_epoch(self.bus, self.instance, member, nonce=self._nonce))
        self.parts = parts = self._parts(epoch)
        parts.engine.attach()
        self._spawn(parts.recorder.run(), "recorder")
        await self._until_taken(parts.intake.listen)
        await self._until_taken(parts.presence.register)
        self._spawn(parts.presence.run(), "presence")
        if parts.council is not None:
            await self._until_taken(parts.council.listen)
            self._spawn(parts.council.run(), "council")
        self._spawn(parts.intake.consume(), "consume")
        await self._rounds(parts)

    async def _until_taken(self, call: Callable[[], Coroutine[object, object, T]]) -> T:
        while True:
            try:
                return await call()
            except BusError:
                await asyncio.sleep(START_PAUSE_S)

    async def _rounds(self, parts: Parts) -> None:
        while True:
            wait_s = TICK_S / 4 if parts.destination.running else TICK_S
            timer = self.truth.loop.arrive(wait_s, self._wake.set)
            await self._wake.wait()
            timer.cancel()
            self._wake.clear()
            parts.rounds.run()
            parts.destination.tick()

    def _parts(self, epoch: int) -> Parts:
        place = Place(
            settings=self.settings,
            truth=self.truth,
            process=self.process,
            actor=self.actor,
            device=self.device,
            bus=self.bus,
            topics=self.broker.topics,
            instance=self.instance,
            rank=self.rank,
            others=self.others,
            seed=f"{self._seed}:parts",
            ring=self._wake.set,
            unix_ns=self.unix_ns,
            nonce=self._nonces.randbytes,
            councils=self.councils,
        )
        return Builder(place, epoch).build()

    def _nonce(self, bits: int) -> int:
        return self._nonces.getrandbits(bits)

    @property
    def _seed(self) -> str:
        return f"{self.settings.seed}:{self.instance}:{self.number}"

    # ------------------------------------------------------------------------------------------------------ leaving

    async def _leave(self, parts: Parts, and_then: Callable[[], None]) -> None:
        """End as the worker does: stop taking, wait bounded, shut the holder, tell, and be gone."""
        parts.source.stop_lending()
        await parts.intake.rest()
        parts.destination.stop(f"{self.instance} is shutting down")
        await self._until(lambda: not parts.destination.running and not parts.lending.statistics().lent)
        await parts.asker.flush(FLUSH_S)
        await self._until(lambda: _is_shut(parts))
        parts.rounds.run()
        await parts.asker.flush(FLUSH_S)
        await parts.asker.close()
        await parts.intake.close()
        if parts.council is not None and parts.sharing is not None:
            await parts.council.close()
            await parts.sharing.close()
        await parts.source.close()
        await parts.destination.close()
        await parts.recorder.flush(STOP_BUDGET_S)
        self.truth.trail.note("world", f"{self.process.name} has stopped ")
        self._end()
        and_then()

    async def _until(self, true: Callable[[], bool]) -> None:
        deadline = self.truth.loop.time() + STOP_BUDGET_S
        while not true() and self.truth.loop.time() < deadline:  # noqa: ASYNC110 - as the worker does
            await asyncio.sleep(0.05)

    def _linger(self, delay_s: float) -> None:
        """End all but the thread that reads: nothing answers any more, and no pidfd is readable yet (P6)."""
        loop, parts, self.ended = self.truth.loop, self.parts, True
        if parts is not None:
            parts.engine.die()
        loop.kill(self.actor)
        loop.post(self.device, self._end, parts, delay_s=delay_s)

    def _end(self, parts: Parts | None = None) -> None:
        loop, self.ended = self.truth.loop, True
        parts = parts or self.parts
        if parts is not None:
            parts.reader.process_ended()
            parts.engine.die()
        self.truth.end(self.process)
        loop.kill(self.device)
        loop.kill(self.actor)

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> None:
        self.truth.loop.spawn(self.actor, work, name)


def _is_shut(parts: Parts) -> bool:
    """Do one pass towards the end, and tell at once what was given up: others decide by it (P11)."""
    complete = parts.rounds.holder.shutdown(0.0).complete
    parts.rounds.run()
    return complete
