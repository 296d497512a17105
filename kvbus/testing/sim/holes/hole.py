"""A hole: what happens in it, the script that makes it happen, and how to take its rule out of the code."""

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbus.testing.sim.trail import Step

if TYPE_CHECKING:
    from kvbus.testing.sim.holes.script import Script

Without = Callable[[], AbstractContextManager[None]]

Patch = tuple[object, str, Any]
"""A class or module, the name of one of its attributes, and what stands there instead."""


@dataclass(frozen=True, slots=True)
class Hole:
    """One interleaving. `held` says what holds in it, `bites` a part of what is seen where the rule is taken out."""

    rule: str
    title: str
    held: str
    script: "Callable[[Script], Coroutine[Any, Any, None]]"
    without: Without
    bites: str
    instances: int = 2
    settings: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The rule, and which of its holes."""
        return f"{self.rule} {self.title}"


@dataclass(frozen=True, slots=True)
class HoleResult:
    """What one hole came to; `violation` is empty where its rule held to the end of the script."""

    hole: Hole
    violation: str
    steps: int
    virtual_s: float
    trail: tuple[Step, ...]


class NotStagedError(Exception):
    """The script did not get its interleaving: what it waits for did not happen, so the hole says nothing."""


@contextmanager
def patched(changes: Sequence[Patch]) -> Iterator[None]:
    """Put something else in the place of attributes for as long as the block runs."""
    before: list[Patch] = []
    try:
        for owner, attribute, value in changes:
            before.append((owner, attribute, vars(owner).get(attribute, _ABSENT)))
            setattr(owner, attribute, value)
        yield
    finally:
        for owner, attribute, value in reversed(before):
            if value is _ABSENT:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, value)


def taken_out(make: Callable[[], Sequence[Patch]]) -> Without:
    """Return a context manager that takes a rule out, by the patches that `make` returns for each use."""
    return lambda: patched(make())


_ABSENT = object()
