"""One row a fault: what was asked, said and seen while it lasted, and whether all of it is as it must be."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

PROBLEMS_SHOWN = 5
HEAD = ("fault", "requests", "settled", "failed", "refused", "sent", "seen")
ZEROS = ("facts_lost", "facts_twice", "applied_twice", "leaked_pages")


@dataclass(slots=True)
class Row:
    """What one fault came to; the four counts of ZEROS must be 0, and `failed` too unless `may_fail`.

    `requests`: all that were asked for; `refused`: those of them that were told at once that nobody takes them now.
    Facts are events of both logs: `facts_sent` by the workers' own notes, `facts_seen` by a follower on the bus.
    `pause_s` is the longest time between two settled transfers, by the workers' own facts.
    """

    fault: str
    pause_max_s: float
    may_fail: bool = False
    requests: int = 0
    settled: int = 0
    failed: int = 0
    refused: int = 0
    facts_sent: int = 0
    facts_seen: int = 0
    facts_lost: int = 0
    facts_twice: int = 0
    applied_twice: int = 0
    leaked_pages: int = 0
    pause_s: float | None = None
    audit: str = ""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong; a row in which nothing settled, or nothing was seen, proves nothing."""
        return not problems([self])

    def check(self, holds: object, text: str) -> None:
        """Note a problem unless something holds."""
        if not holds:
            self.problems.append(text)

    def document(self) -> dict[str, object]:
        """Return the row for programs."""
        return {**asdict(self), "clean": self.is_clean, "wrong": problems([self])}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Return the row that a document tells of."""
        return cls(**{one.name: document[one.name] for one in fields(cls)})


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as text, column by column."""
    asked = (row.requests, row.settled, row.failed, row.refused, row.facts_sent, row.facts_seen)
    zeros = (getattr(row, name) for name in ZEROS)
    pause = "" if row.pause_s is None else f"{row.pause_s:.2f} s"
    return (row.fault, *map(str, asked), *map(str, zeros), row.audit or "none", pause)


def problems(rows: Iterable[Row]) -> list[str]:
    """Return what is wrong, row by row, in sentences."""
    found: list[str] = []
    for row in rows:
        texts = [f"{getattr(row, name)} {name.replace('_', ' ')}" for name in ZEROS if getattr(row, name)]
        if row.failed and not row.may_fail:
            texts.append(f"{row.failed} transfers failed")
        if row.pause_s is not None and row.pause_s > row.pause_max_s:
            texts.append(f"{row.pause_s:.1f} s without service, at most {row.pause_max_s:g} s are promised")
        if not (row.settled and row.facts_seen and row.audit) or row.pause_s is None:
            texts.append("nothing settled, nothing was seen or nothing was audited: that proves nothing")
        found += [f"{row.fault}: {text}" for text in (*texts, *_first(row.problems))]
    return found


def _first(texts: Sequence[str]) -> list[str]:
    more = len(texts) - PROBLEMS_SHOWN
    return [*texts[:PROBLEMS_SHOWN], *([f"and {more} more"] if more > 0 else [])]
