"""What goes wrong, and when: each kind of fault has its own clock, drawn from the seed."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from functools import partial

from kvbus.testing.sim.member import Member
from kvbus.testing.sim.town import Town

TURNS_MAX = 24
"""Turns that a member has before it is struck, at most: as many as a transfer takes on one side, more or less."""
PARTITION_MAX_S = 15.0
OUTAGE_MAX_S = 5.0
PAUSE_MAX_S = 6.0
JUMP_MAX_S = 3_600.0
WRONG_CLOCK_MAX_S = 10.0
"""Somebody sets it right again: a clock that is hours off refuses every request as too old, which shows nothing new."""


class Chaos:
    """Partitions, restarts, deaths, pauses, clock jumps; `heal` ends them all for good."""

    def __init__(self, town: Town) -> None:
        self.counts: Counter[str] = Counter()
        self._town = town
        self._rates = town.settings.weather
        self._random = random.Random(f"{town.settings.seed}:chaos")
        self._healed = False

    async def run(self) -> None:
        """Start every kind of fault that has a rate."""
        rates = self._rates
        kinds: tuple[tuple[float, Callable[[Member], None]], ...] = (
            (rates.partition_s, self._partition),
            (rates.broker_restart_s, self._broker),
            (rates.crash_s, self._crash),
            (rates.engine_death_s, self._engine),
            (rates.pause_s, self._pause),
            (rates.clock_jump_s, self._jump),
            (rates.lender_failure_s, self._lender),
        )
        await asyncio.gather(*(self._repeat(pause_s, strike) for pause_s, strike in kinds if pause_s))

    def heal(self) -> None:
        """Bring everything back, and let nothing more go wrong."""
        self._healed = True
        town = self._town
        town.healed = True
        town.broker.heal()
        town.truth.trail.note("world", "everything heals")
        if not town.broker.up:
            town.broker.start()
        for member in list(town.members.values()):
            self._replace(member)
        for member in town.members.values():
            self._reconnect(member)
            member.process.lender_fails = False
            town.truth.loop.resume(member.actor)

    async def _repeat(self, pause_s: float, strike: Callable[[Member], None]) -> None:
        while not self._healed:
            await asyncio.sleep(self._random.expovariate(1 / pause_s))
            member = self._one()
            if member is not None:  # also between two turns that follow each other: now, nobody had anything to do
                turns = self._random.randrange(TURNS_MAX)
                self._town.truth.loop.after_turns(member.actor, turns, partial(self._strike, strike, member))

    def _strike(self, strike: Callable[[Member], None], member: Member) -> None:
        if member.alive and not self._healed:
            strike(member)

    def _one(self) -> Member | None:
        running = [member for member in self._town.members.values() if member.alive]
        return self._random.choice(running) if running else None

    def _partition(self, member: Member) -> None:
        hole = self._random.random() < 0.5
        member.bus.hole, member.bus.cut = hole, not hole
        self._count("partitions", f"{member.process.name} is cut off, {'unseen' if hole else 'seen'}")
        self._after(self._random.random() * PARTITION_MAX_S, lambda: self._reconnect(member))

    def _reconnect(self, member: Member) -> None:
        member.bus.hole = member.bus.cut = False

    def _broker(self, _member: Member) -> None:
        broker = self._town.broker
        if broker.up:
            keep = self._random.random() >= self._rates.store_lost
            self.counts["broker_restarts" if keep else "broker_restarts_without_store"] += 1
            broker.stop(keep_store=keep)
            self._after(self._random.random() * OUTAGE_MAX_S, broker.start)

    def _crash(self, member: Member) -> None:
        if self._random.random() < self._rates.graceful:
            self.counts["stops"] += 1
            self._town.quit(member)
        else:
            self.counts["crashes"] += 1
            self._town.kill(member)

    def _engine(self, member: Member) -> None:
        if member.parts is not None:
            self.counts["engine_deaths"] += 1
            member.parts.engine.die()

    def _pause(self, member: Member) -> None:
        self._count("pauses", f"{member.process.name} stands still")
        loop = self._town.truth.loop
        loop.pause(member.actor)
        self._after(self._random.random() * PAUSE_MAX_S, lambda: loop.resume(member.actor))

    def _lender(self, member: Member) -> None:
        """Let a lender fail at its next return; somebody ends that member a while later, as its log asks for."""
        member.process.lender_fails = True
        self._count("lender_failures", f"{member.process.name} has a lender that will fail")
        self._after(self._random.random() * PARTITION_MAX_S, lambda: self._replace(member))

    def _replace(self, member: Member) -> None:
        if member.alive and member.process.lender_failed:
            self._town.kill(member)

    def _jump(self, member: Member) -> None:
        member.wall_offset_s += self._random.uniform(-JUMP_MAX_S, JUMP_MAX_S)
        self._count("clock_jumps", f"{member.process.name} has its clock set")
        self._after(self._random.random() * WRONG_CLOCK_MAX_S, lambda: self._set_right(member))

    def _set_right(self, member: Member) -> None:
        member.wall_offset_s = 0.0

    def _count(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        self._town.truth.trail.note("world", text)

    def _after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._town.truth.loop.post(self._town.world, call, delay_s=delay_s)
