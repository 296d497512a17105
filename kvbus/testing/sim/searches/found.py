"""What a search finds."""

from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True, slots=True)
class Found:
    """A broken promise, and the step at which it was seen."""

    text: str
    step: int


class BrokenPromiseError(Exception):
    """Raised inside of a search where what was seen cannot be."""


def broken(text: str) -> NoReturn:
    """End a search: this was seen, and cannot be."""
    raise BrokenPromiseError(text)


def require(holds: object, text: str) -> None:
    """End a search unless it holds."""
    if not holds:
        broken(text)
