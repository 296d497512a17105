"""A clock that goes on only when it is told to: for whatever takes a `clock`, or a time as an argument."""


class HandClock:
    """Monotonic seconds, moved by hand. Call it for the time, as one calls `time.monotonic`."""

    def __init__(self, at_s: float = 0.0) -> None:
        self._at_s = at_s

    def __repr__(self) -> str:
        return f"<HandClock {self._at_s:g} s>"

    def __call__(self) -> float:
        """Return the time."""
        return self._at_s

    def advance(self, by_s: float) -> float:
        """Go on, and return the time; ValueError for a step back, which no monotonic clock makes."""
        if by_s < 0:
            raise ValueError(f"a monotonic clock does not go back; by_s is {by_s:g}, expected at least 0")
        self._at_s += by_s
        return self._at_s
