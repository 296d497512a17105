"""Faults that are planted on purpose into the bare members of a run, to see that the table shows them."""

from collections.abc import Callable, Sequence

from kvbus.dataplane.reader import Outbox, Pair, Progress
from kvbus.dataplane.reading import Segment
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Change, Failed


def _unverified() -> None:
    """Readers count what has arrived, and take no notice of generations afterwards (against P2)."""
    verified = Progress.verified

    def counts_all(self: Progress, segment: Segment, unchanged: Sequence[int]) -> None:
        del unchanged
        verified(self, segment, segment.rows)

    Progress.verified = counts_all  # type: ignore[method-assign]


def _cancel_is_evidence() -> None:
    """A cancel counts as the end of access, while the bytes still come in (against contract 39)."""
    first_cancel, report = Outbox.first_cancel, Outbox.report
    cancelled: set[Pair] = set()

    def ends_at_once(self: Outbox, pair: Pair) -> bool:
        if first_cancel(self, pair):
            failed = Failed(FailureClass.CANCELLED, "cancelled")
            report(self, Change(*pair, failed, Evidence.COMPLETED))
            cancelled.add(pair)
        return False

    def unless_cancelled(self: Outbox, change: Change) -> None:
        if (change.ticket, change.attempt) not in cancelled:
            report(self, change)

    Outbox.first_cancel = ends_at_once  # type: ignore[method-assign]
    Outbox.report = unless_cancelled  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    "unverified": _unverified,
    "cancel-is-evidence": _cancel_is_evidence,
}


def sow(name: str) -> None:
    """Plant a fault in this process; none under the empty name."""
    if name:
        PLANTS[name]()
