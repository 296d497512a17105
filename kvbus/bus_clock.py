"""The broker's clock, as its own answers tell it: what waits in a queue is not timed by the clocks of two hosts.

The broker stamps each message that it stores. How long ago that was, only the same clock can say: a requester or a
destination whose clock is an hour off would else refuse everything, or nothing.
"""

from collections.abc import Mapping
from datetime import datetime

AGE_CERTAIN_S = 1.0
"""A message that seems older than this is worth one more question: by now another broker may stamp, or time was set."""


class BrokerClock:
    """How far the broker's clock stands from a clock of ours that only goes on; `now` is always that one's time."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None

    def note(self, answer: Mapping[str, object], now: float) -> None:
        """Read the time that an answer of the broker bears; one without it changes nothing."""
        told = answer.get("ts")
        if isinstance(told, str):
            self._ahead_s = datetime.fromisoformat(told).timestamp() - now

    def age_s(self, stored_unix_s: float, now: float) -> float:
        """Return how long ago the broker stored a message; 0 while its clock is not known.

        At most a round trip too little: the answer that told the time was on its way for a part of that.
        """
        return 0.0 if self._ahead_s is None else max(0.0, self._ahead_s + now - stored_unix_s)
