"""What the workers noted beside the bus: each event that a recorder took, and each message that a stream confirmed."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path


@dataclass(slots=True)
class Notes:
    """By event id, the time of each on the clock that all processes of a host share, in seconds.

    `said` must be seen: what a recorder took, and what a stream confirmed. A decision that met another one in its log
    was tried, and is not.
    """

    said: dict[str, float] = field(default_factory=dict)
    confirmed: dict[str, float] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    """Hashes of requests that a destination did not take on."""

    @classmethod
    def read(cls, path: Path) -> "Notes":
        """Return what the workers of a row noted so far."""
        notes, waiting = cls(), dict[tuple[str, str], list[tuple[int, str]]]()
        for sign, at, what in _lines(path):
            if sign in "TV":
                (notes.tried if sign == "T" else notes.refused).add(what)
                continue
            speaker, _, sequence = what.rpartition(".")
            own = waiting.setdefault((speaker, "facts" if sign in "SA" else "decisions"), [])
            if sign in "SD":
                notes.said[what] = at
                own.append((int(sequence), what))
            elif (
                what in notes.said
            ):  # a recorder's: those of one stream leave in their order, several in one message under its last id
                taken = bisect_right(own, (int(sequence), what))
                notes.confirmed.update(dict.fromkeys((event_id for _, event_id in own[:taken]), at))
                del own[:taken]
            else:
                notes.said[what] = notes.confirmed[what] = at
        return notes


def _lines(path: Path) -> Iterator[tuple[str, float, str]]:
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        sign, at_ns, what = line.split(" ", 2)
        yield sign, int(at_ns) / 1e9, what


def longest_pause(times: Sequence[float], began: float, ended: float) -> float:
    """Return the longest time between two neighbours, the ends of the span included."""
    within = [began, *sorted(at for at in times if began < at < ended), ended]
    return max(late - early for early, late in pairwise(within))
