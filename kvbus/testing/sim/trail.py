"""The trail: what happened, step by step, with a running hash that tells two runs apart; and the first violation."""

import hashlib
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

KEPT_MAX = 20_000
"""Events kept: some hundred transfers, far more than the life of one lease."""
DIGESTED_MAX = 1_000
"""Events that are hashed at once, which costs a third of hashing each."""
SHOWN_MAX = 60
"""Events shown for a violation: what a person reads at once."""

_NUMBERED = re.compile(r"[\w/]*\d[\w/]*")


_Event = tuple[int, float, str, str]
"""A `Step` as it is kept: few of them are ever shown."""


class Step(NamedTuple):
    """One event of a run."""

    step: int
    at_s: float
    who: str
    text: str

    def __str__(self) -> str:
        return f"{self.step:>9} {self.at_s:10.4f} s  {self.who:<8} {self.text}"


@dataclass(frozen=True, slots=True)
class Violation:
    """The first promise that was broken, and the events that led there."""

    step: int
    at_s: float
    text: str
    trail: tuple[Step, ...]

    @property
    def promise(self) -> str:
        """Which promise it was: the text without names and numbers, and without the list of what is left over."""
        _, _, what = self.text.partition(": ")
        return _NUMBERED.sub("#", what.partition(": ")[0])


class Clock(Protocol):
    """What tells where a run stands: its loop."""

    step: int
    now: float


class Trail:
    """Keeps the last events of a run, and the first violation."""

    def __init__(self, clock: Clock, on_violation: Callable[[], None] = lambda: None) -> None:
        self._clock = clock
        self._on_violation = on_violation
        self._digest = hashlib.blake2b(digest_size=8)
        self._new: list[_Event] = []
        self._kept: deque[_Event] = deque(maxlen=KEPT_MAX)
        self.violation: Violation | None = None

    @property
    def hash(self) -> str:
        """Sixteen hex characters over every event so far."""
        self._digest_new()
        return self._digest.hexdigest()

    def note(self, who: str, text: str) -> None:
        """Add one event."""
        clock, new = self._clock, self._new
        new.append((clock.step, clock.now, who, text))
        if len(new) >= DIGESTED_MAX:
            self._digest_new()

    def violate(self, who: str, text: str, *subjects: str) -> None:
        """Note that a promise was broken; the first one counts.

        `subjects` are tickets and pages of `who`, as in T4 and p7; with `who` before them they mark what led there.
        """
        self.note(who, f"VIOLATION {text}")
        if self.violation is None:
            clock = self._clock
            self.violation = Violation(clock.step, clock.now, f"{who}: {text}", self._relevant(who, subjects))
            self._on_violation()

    def last(self, count: int) -> tuple[Step, ...]:
        """Return the newest events."""
        self._digest_new()
        return tuple(Step(*event) for event in tuple(self._kept)[-count:])

    def _digest_new(self) -> None:
        """Hash the new events, and move them to those that are kept."""
        self._digest.update("".join([f"{step}|{who}|{text}\n" for step, _, who, text in self._new]).encode())
        self._kept.extend(self._new)
        self._new.clear()

    def _relevant(self, who: str, subjects: tuple[str, ...]) -> tuple[Step, ...]:
        """Return the newest events that speak of the subjects, or of the world at large."""
        self._digest_new()
        wanted = {subject if "." in subject else f"{who}.{subject}" for subject in subjects}
        found = [
            event
            for event in self._kept
            if event[2] == "world" or not wanted or not wanted.isdisjoint(event[3].split())
        ]
        return tuple(Step(*event) for event in found[-SHOWN_MAX:])
