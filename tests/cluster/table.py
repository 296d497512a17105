"""One row a story and fault: what was asked for, how it ended, and whether all of it is as it must be."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

HEAD = ("story", "fault", "transfers", "settled", "failed with evidence", "lost", "leaked", "wrong answers", "audit")


@dataclass(slots=True)
class Row:
    """What one story came to; `lost`, `leaked` and `wrong` must be 0.

    `transfers` are all that were asked for. `failed`: told with a failure and with the evidence that access had ended,
    or that it never began. `lost`: no word within the time, or a failure that names no evidence. `leaked`: pages and
    leases that did not come home. `wrong`: answers other than those that the engine computes alone.
    """

    story: str
    fault: str
    must_settle: bool = True
    transfers: int = 0
    settled: int = 0
    failed: int = 0
    lost: int = 0
    leaked: int = 0
    answers: int = 0
    wrong: int = 0
    audit: str = ""
    seconds: float = 0.0
    evidence: list[str] = field(default_factory=list)
    move_s: list[float] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    shown: str = ""
    """The transfer that the fault met, or nothing: then the first one is shown."""
    trail: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong; a row in which nothing settled or nothing was audited proves nothing."""
        return not self.wrongs()

    def check(self, holds: object, text: str) -> None:
        """Note a problem unless something holds."""
        if not holds:
            self.problems.append(text)

    def wrongs(self) -> list[str]:
        """Return what is wrong, in sentences."""
        texts = [f"{getattr(self, name)} {name}" for name in ("lost", "leaked", "wrong") if getattr(self, name)]
        if self.audit != "clean":
            texts.append(f"the audit says {self.audit or 'nothing'}")
        if not self.settled or not self.answers:
            texts.append("nothing settled, or nothing was answered: that proves nothing")
        if self.must_settle and self.settled != self.transfers:
            texts.append(f"{self.transfers - self.settled} of {self.transfers} transfers did not settle")
        return [f"{self.story}, {self.fault}: {text}" for text in (*texts, *self.problems)]

    def document(self) -> dict[str, object]:
        """Return the row for programs."""
        return {**asdict(self), "clean": self.is_clean, "wrongs": self.wrongs()}


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as text, column by column."""
    counts = (row.transfers, row.settled, row.failed, row.lost, row.leaked, row.wrong)
    return (row.story, row.fault, *map(str, counts), row.audit or "none")


def wrongs(rows: Iterable[Row]) -> Sequence[str]:
    """Return all that is wrong."""
    return [text for row in rows for text in row.wrongs()]
