"""The portrait of a member: its whole state as it is now, in pieces that fit the wire.

The worker is the truth about its memory, and the logs are what it said. Where a log has lost that, the state is told
again: nothing is freed or taken for it.
"""

from collections.abc import Callable, Iterable

from kvbus.columns import column
from kvbus.events import EVENT_LENGTH_MAX_BYTES, SnapshotAsked, SnapshotTaken
from kvbus.ledger.held import Held
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.transfer import Transfer
from kvbus.roles.recorder import Recorder
from kvbus.snapshots import TRANSFERS_MAX, HeldLeaseRow, OpenTransferRow

LEASES_LENGTH_MAX_BYTES = EVENT_LENGTH_MAX_BYTES // 2
"""Of leases in one event; open transfers take a third of one at most, and the rest is for what surrounds them."""
ROW_LENGTH_BYTES, PAGE_LENGTH_BYTES = 500, 12
"""A lease's names at their longest, and each of its pages: its index, its generation."""


class Portrait:
    """Says what a member holds; `place` is its place in the settle log, as term and number."""

    def __init__(
        self,
        *,
        holder: LeaseHolder,
        recorder: Recorder,
        transfers: Callable[[], tuple[Transfer, ...]],
        place: Callable[[], tuple[int, int]],
    ) -> None:
        self._holder = holder
        self._recorder = recorder
        self._transfers = transfers
        self._place = place

    def record(self, reason: str) -> None:
        """Record all of it on the facts stream, in one step: it shows one moment."""
        parts = [part := self.part(SnapshotAsked(), reason)]
        while part.more:
            parts.append(part := self.part(SnapshotAsked(after=part.leases[-1].ticket), reason))
        for one in parts:
            self._recorder.event(one)

    def part(self, asked: SnapshotAsked, reason: str) -> SnapshotTaken:
        """Return as much as fits, of what is behind the ticket that was named."""
        transfers = self._transfers()
        rows, more = _filled(held for held in self._holder.held() if held.ticket > asked.after)
        term, n = self._place()
        return SnapshotTaken(
            reason=reason,
            after=asked.after,
            more=more,
            leases_held=self._holder.statistics().held,
            leases=rows,
            transfers_running=len(transfers),
            transfers=tuple(map(_transfer_row, transfers[:TRANSFERS_MAX])),
            facts_sequence=self._recorder.stored_sequence,
            settle_n=n,
            settle_term=term,
        )


def _filled(leases: Iterable[Held]) -> tuple[tuple[HeldLeaseRow, ...], bool]:
    rows, length_bytes = list[HeldLeaseRow](), 0
    for held in leases:
        length_bytes += ROW_LENGTH_BYTES + PAGE_LENGTH_BYTES * held.rows
        if rows and length_bytes > LEASES_LENGTH_MAX_BYTES:
            return tuple(rows), True
        rows.append(_lease_row(held))
    return tuple(rows), False


def _lease_row(held: Held) -> HeldLeaseRow:
    view = held.view
    return HeldLeaseRow(
        ticket=held.ticket,
        transfer=held.transfer,
        rank=held.rank,
        direction="write" if held.writes else "read",
        lender=held.lender,
        peer=held.peer,
        bits=held.bits,
        lo=held.lo,
        hi=held.hi,
        pages=column(view.pages, 4) if view else b"",
        counters=column(view.counters, 8) if view else b"",
    )


def _transfer_row(transfer: Transfer) -> OpenTransferRow:
    return OpenTransferRow(
        transfer=transfer.transfer,
        request_hash=transfer.request_hash,
        source=transfer.source,
        phase=str(transfer.phase),
    )
