"""The stage of one hole: the simulator's world without chance, and a script that acts between two of its steps.

Nothing moves while the script acts: it is resumed after a step, by the loop itself, as soon as what it waits for is
true. So a hole is contained at exactly one place, and a run is the same each time.
"""

import random
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from kvbus.testing.sim.holes.gates import GatedBroker
from kvbus.testing.sim.holes.hole import Hole, NotStagedError
from kvbus.testing.sim.loop import Actor, SimLoop
from kvbus.testing.sim.member import Member
from kvbus.testing.sim.settings import CALM, SimSettings
from kvbus.testing.sim.town import Town
from kvbus.testing.sim.trail import Trail
from kvbus.testing.sim.truth import Truth

STEPS_MAX = 36_000
"""Twenty times what the longest script takes; more means that a member runs in circles."""


class Even(random.Random):
    """A source of chance without chance: each draw is the same, so that only the script decides."""

    draw = 0.5

    def random(self) -> float:
        """Return the same number each time."""
        return self.draw

    def expovariate(self, lambd: float = 1.0) -> float:
        """Return the mean."""
        return 1 / lambd


class BrokenError(Exception):
    """A script's own statement does not hold: it is noted as a violation, and the script goes no further."""


class Wait(Awaitable[None]):
    """What a script waits for, and until when."""

    def __init__(self, what: str, true: Callable[[], bool], deadline_s: float) -> None:
        self.what = what
        self.true = true
        self.deadline_s = deadline_s

    def __await__(self) -> Generator["Wait", None, None]:
        yield self


class Stage:
    """One world, and the script that plays in it."""

    def __init__(self, hole: Hole) -> None:
        self.hole = hole
        seed = f"hole {hole.name}"
        self.settings = SimSettings(seed=0, transfers=0, instances=hole.instances, rates=CALM, **hole.settings)  # type: ignore[arg-type] # all of them are whole numbers
        self.loop = SimLoop(seed, self._on_fault)  # type: ignore[abstract] # no I/O: nobody asks for those
        self.trail = Trail(self.loop)
        self.truth = Truth(self.loop, seed, self.trail)
        self.broker = GatedBroker(self.loop, seed, CALM, self.trail)
        self.world = Actor("world")
        self.town = Town(self.settings, self.truth, self.broker, self.world)
        self._calm: set[Member] = set()
        self._script: Coroutine[Any, Any, None] | None = None
        self._wait: Wait | None = None
        self._ended = False
        for part in (self.truth, self.broker, self.town):
            _make_even(part)

    def run(self, script: Coroutine[Any, Any, None]) -> None:
        """Play the script to its end, or to the first broken promise; NotStagedError where it gets stuck."""
        self._script = script
        try:
            self.town.start()
            self.loop.run(self._after_step)
            if not self._ended and self.trail.violation is None:
                raise NotStagedError(f"{self.hole.name}: nothing moves any more")
        finally:
            script.close()
            self.loop.close()
            self.truth.close()

    def at(self, when_s: float) -> None:
        """See that the loop stops at an instant, though nobody has anything to do then."""
        self.loop.post(self.world, lambda: None, delay_s=when_s - self.loop.time())

    def _after_step(self, _actor: Actor) -> bool:
        for member in self.town.members.values():
            if member.parts is not None and member not in self._calm:
                self._calm.add(member)
                _make_even(member.parts.engine)
                _make_even(member.parts.reader)
        if self.trail.violation is None and not self._ended:
            self._advance()
        if self.loop.step > STEPS_MAX:
            raise NotStagedError(f"{self.hole.name}: {STEPS_MAX} steps, and no end")
        return self._ended or self.trail.violation is not None

    def _advance(self) -> None:
        """Let the script act for as long as what it waits for is true."""
        while self._wait is None or self._wait.true():
            if self._script is None:
                return
            try:
                self._wait = self._script.send(None)
            except (StopIteration, BrokenError):
                self._ended = True
                return
            if self.trail.violation is not None:
                return
        if self.loop.time() >= self._wait.deadline_s:
            raise NotStagedError(f"{self.hole.name}: waited in vain until {self._wait.what}")

    def _on_fault(self, actor: Actor, text: str, error: BaseException | None) -> None:
        if actor.alive and not isinstance(error, GeneratorExit):
            self.trail.violate(actor.name, text)


def _make_even(part: object) -> None:
    """Take the chance out of a part, wherever it keeps it."""
    for name in ("random", "_random"):
        if isinstance(getattr(part, name, None), random.Random):
            setattr(part, name, Even())
