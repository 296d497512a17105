"""One row a fault and transport: what was counted, and whether all of it is as it must be."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

PROBLEMS_SHOWN = 5


@dataclass(slots=True)
class Row:
    """What the runs of one fault over one transport came to; all counts but `runs` must be 0.

    `processes`: "bare" members, driven by the parent, or whole "workers" over a real broker. `seconds` go from the
    fault to the evidence that access has ended.
    """

    fault: str
    transport: str
    processes: str
    runs: int = 0
    bytes_wrong: int = 0
    pages_leaked: int = 0
    aborted: int = 0
    audits: int = 0
    audits_unclean: int = 0
    seconds: list[float] = field(default_factory=list)
    evidence: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    note: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong; a row without a run or without an audit proves nothing, so it is not."""
        counts = self.bytes_wrong + self.pages_leaked + self.aborted + self.audits_unclean
        return bool(self.runs and self.audits) and not counts and not self.problems

    def ended(self, evidence: str, since: float, at: float) -> None:
        """Count one attempt's evidence, and the time since the fault, unless it had ended before."""
        self.evidence[evidence] = self.evidence.get(evidence, 0) + 1
        if at > since:
            self.seconds.append(at - since)

    def check(self, holds: object, text: str) -> None:
        """Note a problem unless something holds."""
        if not holds:
            self.problems.append(text)

    @property
    def p50_s(self) -> float | None:
        """The median time from fault to evidence."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def max_s(self) -> float | None:
        """The longest time from fault to evidence."""
        return max(self.seconds) if self.seconds else None

    def document(self) -> dict[str, object]:
        """Return the row for programs."""
        return {
            "fault": self.fault,
            "transport": self.transport,
            "processes": self.processes,
            "clean": self.is_clean,
            "runs": self.runs,
            "bytes_wrong": self.bytes_wrong,
            "pages_leaked": self.pages_leaked,
            "processes_aborted": self.aborted,
            "audits": self.audits,
            "audits_unclean": self.audits_unclean,
            "evidence": self.evidence,
            "evidence_s_p50": self.p50_s,
            "evidence_s_max": self.max_s,
            "problems": self.problems,
            "note": self.note,
        }


# Bytes that are wrong, pages that are leaked, processes that aborted.
HEAD = ("fault", "transport", "processes", "runs", "wrong", "leaked", "aborted", "audit", "evidence")
TIMES = ("p50", "max")


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as text, column by column."""
    audit = f"{row.audits_unclean} not clean" if row.audits_unclean else "clean" if row.audits else "none"
    told = ", ".join(f"{name} {count}" for name, count in sorted(row.evidence.items()))
    counts = (row.runs, row.bytes_wrong, row.pages_leaked, row.aborted)
    return (
        row.fault,
        row.transport,
        row.processes,
        *map(str, counts),
        audit,
        told,
        *map(_time, (row.p50_s, row.max_s)),
    )


WIDTHS = (34, 9, 9, 4, 5, 6, 7, 11, 0, 9, 9)
"""Of the cells of a line by itself; the evidence has as much room as it takes, behind all others."""


def line(texts: Sequence[str]) -> str:
    """Return one row's cells as a line that stands below others, whatever those will be."""
    told = [text.ljust(width) for text, width in zip(texts, WIDTHS, strict=True)]
    evidence = told.pop(HEAD.index("evidence"))
    return "  ".join([*told, evidence]).rstrip()


def problems(rows: Iterable[Row]) -> list[str]:
    """Return what is wrong, row by row, in sentences."""
    found: list[str] = []
    for row in rows:
        found += [f"{row.fault}, {row.transport}: {text}" for text in _first(row.problems)]
        if not row.runs or not row.audits:
            found.append(f"{row.fault}, {row.transport}: {row.runs} runs and {row.audits} audits prove nothing")
    return found


def _first(texts: Sequence[str]) -> list[str]:
    more = len(texts) - PROBLEMS_SHOWN
    return [*texts[:PROBLEMS_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
