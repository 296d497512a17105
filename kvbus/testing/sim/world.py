"""One run of the simulator, from the first member's start to rest."""

import math
import time
from collections import Counter
from dataclasses import dataclass

from kvbus.testing.sim.broker import SimBroker
from kvbus.testing.sim.chaos import Chaos
from kvbus.testing.sim.driver import Driver
from kvbus.testing.sim.loop import Actor, SimLoop
from kvbus.testing.sim.rest import left_over
from kvbus.testing.sim.settings import Rates, SimSettings
from kvbus.testing.sim.town import Town
from kvbus.testing.sim.trail import Step, Trail, Violation
from kvbus.testing.sim.truth import Truth

CHECK_STEPS = 600
CHECK_STEPS_PER_MEMBER = 15
"""All of the state is checked once in so many steps, what a round touched at its end. Where more than
forty members share the steps, once in so many of each: looking at a thousand that have not moved shows nothing."""
REST_S = 240.0
"""Virtual seconds that everything may take to come to rest: eight times the longest stalled get."""
REST_LOOK_S = 1.0
STEPS_MAX_PER_TRANSFER = 12_000
"""A run that takes so many steps for each of its transfers does not get anywhere: hundreds of times what they need."""


@dataclass(frozen=True, slots=True)
class SimResult:
    """What one run came to."""

    settings: SimSettings
    steps: int
    virtual_s: float
    wall_s: float
    cpu_s: float
    hash: str
    violation: Violation | None
    leaked: tuple[str, ...]
    transfers: Counter[str]
    faults: Counter[str]
    last: tuple[Step, ...]


class World:
    """Everything of one run. Equal settings give equal runs."""

    def __init__(self, settings: SimSettings) -> None:
        self.settings = settings
        seed = str(settings.seed)
        self.loop = SimLoop(seed, self._on_fault)  # type: ignore[abstract] # no I/O: nobody asks for those
        self.trail = Trail(self.loop, self._look_soon)
        self.truth = Truth(self.loop, seed, self.trail)
        self.broker = SimBroker(self.loop, seed, settings.weather, self.trail)
        self.actor = Actor("world")
        self.town = Town(settings, self.truth, self.broker, self.actor)
        self.chaos = Chaos(self.town)
        self.driver = Driver(self.town)
        self._healed_at: float | None = None
        self._look_at = 0.0
        self._left: tuple[str, ...] = ("not started",)
        self._stop_at_step = math.inf if settings.stop_at_step is None else settings.stop_at_step
        self._check_steps = max(CHECK_STEPS, CHECK_STEPS_PER_MEMBER * settings.instances * settings.ranks)
        self._next_check = self._check_steps
        moving = settings.transfers + settings.instances  # what starts and rests, and what moves
        self._steps_max = 100_000 + settings.ranks * moving * STEPS_MAX_PER_TRANSFER

    def run(self) -> SimResult:
        """Run until everything is at rest, or a promise was broken."""
        began, cpu_began = time.perf_counter(), time.process_time()
        self.town.start()
        self.driver.start()
        self.loop.spawn(self.actor, self.chaos.run(), "chaos")
        self.loop.run(self._look)
        counts = self.town.counts()
        violation, digest, last = self.trail.violation, self.trail.hash, self.trail.last(40)
        self.loop.close()
        self.truth.close()
        return SimResult(
            settings=self.settings,
            steps=self.loop.step,
            virtual_s=self.loop.time(),
            wall_s=time.perf_counter() - began,
            cpu_s=time.process_time() - cpu_began,
            hash=digest,
            violation=violation,
            leaked=self._left if self._healed_at is not None else (),
            transfers=counts,
            faults=self._faults(),
            last=last,
        )

    def _look(self, _actor: Actor) -> bool:
        """Check all now and then, and end where a promise was broken; True ends the run."""
        loop = self.loop
        if loop.step >= self._next_check:
            self._next_check = loop.step + self._check_steps
            self._check_all()
            if loop.step > self._steps_max:
                self.trail.violate("world", f"{loop.step} steps, and no rest")
        if self.trail.violation is not None or loop.step == self._stop_at_step:
            return True
        is_over = loop.now >= self._look_at and self._is_over()
        loop.look_step, loop.look_s = min(self._next_check, self._stop_at_step), self._look_at
        return is_over or self.trail.violation is not None  # also one while all was healed

    def _look_soon(self) -> None:
        self.loop.look_step = 0

    def _check_all(self) -> None:
        for member in self.town.up():
            if member.parts is not None:
                member.parts.model.check_all()

    def _is_over(self) -> bool:
        now = self.loop.time()
        self._look_at = now + REST_LOOK_S
        if self.town.fired() < self.settings.transfers:
            return False
        if self._healed_at is None:
            self._healed_at = now
            self.chaos.heal()
            for member in self.town.up():
                if member.parts is not None:
                    member.parts.reader.rates = Rates(0, 0, 0, 0, 0, 0, 0)
            return False
        self._left = left_over(self.town)
        if not self._left:
            self._check_all()
            return True
        if now > self._healed_at + REST_S:
            self.trail.violate("world", f"left over after {REST_S:g} s of rest: {'; '.join(self._left)}")
            return True
        return False

    def _faults(self) -> Counter[str]:
        faults = Counter(self.chaos.counts)
        faults["messages"], faults["lost"], faults["doubled"] = (
            self.broker.sent,
            self.broker.lost,
            self.broker.doubled,
        )
        faults.update(self.driver.counts)
        faults["starts"] = self.town.starts
        return faults

    def _on_fault(self, actor: Actor, text: str, error: BaseException | None) -> None:
        if actor.alive and not isinstance(error, GeneratorExit):
            self.trail.violate(actor.name, text)
