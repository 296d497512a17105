"""What a planted fault is: a name that says what it does, the rule that it breaks, what stands where in its place."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Change = tuple[type | ModuleType, str, Any]
"""A class or module, the name of one of its attributes, and what stands there instead."""
Make = Callable[[], Sequence[Change]]

WEATHERS = ("usual", "frail")
"""The weathers of the simulated world in which a fault is looked for, in this order, unless it needs others."""


@dataclass(frozen=True, slots=True)
class Plant:
    """One fault. `check` names the check that has to notice it, `weathers` what the simulated world needs for that."""

    name: str
    rule: str
    make: Make
    check: str = "world"
    weathers: tuple[str, ...] = WEATHERS

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Make the fault, and take it out again."""
        before: list[Change] = []
        for owner, attribute, value in self.make():
            before.append((owner, attribute, owner.__dict__.get(attribute, _ABSENT)))
            setattr(owner, attribute, value)
        try:
            yield
        finally:
            for owner, attribute, value in reversed(before):
                if value is _ABSENT:
                    delattr(owner, attribute)
                else:
                    setattr(owner, attribute, value)


def plant(
    name: str, rule: str, *, check: str = "world", weathers: tuple[str, ...] = WEATHERS
) -> Callable[[Make], Plant]:
    """Make a plant of a function that returns its changes."""
    return lambda make: Plant(name, rule, make, check, weathers)


_ABSENT = object()
