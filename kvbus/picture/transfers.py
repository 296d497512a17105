"""Transfers in flight and how the last ones ended, as the facts say."""

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass

from kvbus.events import Header, LeaseGranted, TransferOutcome, TransferStep
from kvbus.picture.rows import EndedRow, Totals, TransferRow, Who
from kvbus.snapshots import OpenTransferRow, SnapshotTaken

TRANSFERS_MAX = 20_000
"""In flight at a time: a thousand each second, for the twenty that a slow one takes. The oldest is forgotten first."""
ENDED_MAX = 500
"""Ended ones kept for showing; the log holds the others."""
_OF_NO_LIFE = frozenset({"reader_found", "refused", "left"})
"""The source says it of one that may be over; an outcome follows; it names a request that nobody has run yet."""
_KNOWN_MAX = 8_192  # ids of ended ones: what other members report of them afterwards must not open them again


@dataclass(slots=True)
class _Transfer:
    transfer: str
    request_hash: str
    destination: str
    member: str
    began_ns: int
    step_ns: int
    heard: int = 0
    """The highest sequence of its member that said something of it."""
    source: str = ""
    step: str = ""
    text: str = ""
    pages_asked: int = 0
    pages_moved: int = 0

    def row(self) -> TransferRow:
        return TransferRow(
            self.transfer, self.request_hash, self.source, self.destination, self.step, self.text,
            self.began_ns, self.step_ns, self.pages_asked, self.pages_moved,
        )  # fmt: skip


class Transfers:
    """Keeps those in flight by id, those that ended in their order, and what ended in all."""

    def __init__(self, *, transfers_max: int = TRANSFERS_MAX, ended_max: int = ENDED_MAX) -> None:
        self._transfers_max = transfers_max
        self._running: OrderedDict[str, _Transfer] = OrderedDict()
        self._ended: deque[EndedRow] = deque(maxlen=ended_max)
        self._known: OrderedDict[str, None] = OrderedDict()
        self._outcomes: Counter[str] = Counter()
        self._pages_moved = 0
        self._length_bytes = 0

    def __len__(self) -> int:
        return len(self._running)

    def step(self, header: Header, body: TransferStep) -> None:
        """Take one step of a transfer in."""
        if body.transfer in self._known or body.step in _OF_NO_LIFE:
            return
        transfer = self._get(body.transfer, body.request_hash, header)
        if header.m == transfer.member and header.s > transfer.heard:
            transfer.step, transfer.text, transfer.step_ns = body.step, body.text, header.t
            transfer.heard = header.s

    def granted(self, header: Header, body: LeaseGranted) -> None:
        """Count the pages that its destination leased for it; from whom they come stands there as well."""
        transfer = self._running.get(body.transfer) if body.direction == "write" else None
        if transfer is not None and header.i == transfer.destination:
            transfer.source = transfer.source or body.peer
            transfer.pages_asked += len(body.pages) // 4

    def arrived(self, transfer_id: str, pages: int) -> None:
        """Count pages that arrived whole."""
        if transfer := self._running.get(transfer_id):
            transfer.pages_moved += pages

    def outcome(self, header: Header, body: TransferOutcome) -> None:
        """End a transfer; said twice, it is counted once."""
        if body.destination == header.i and body.transfer not in self._known:
            self._end(_ended(body, header.t))

    def snapshot(self, header: Header, body: SnapshotTaken) -> None:
        """Hold what a member says is open with it; what it does not name has ended, where it names all."""
        said = {row.transfer for row in body.transfers}
        if body.after == 0 and len(said) == body.transfers_running:
            for name in [
                one.transfer for one in self._of(header.i, header.m)
                if one.transfer not in said and one.heard < header.s
            ]:  # fmt: skip
                del self._running[name]
        for row in body.transfers:
            self._said(header, row)

    def drop(self, members: Collection[Who]) -> None:
        """Forget those of members whose run has ended: it tells of their outcomes in its next one, where it can."""
        for name in [one.transfer for one in self._running.values() if (one.destination, one.member) in members]:
            del self._running[name]

    def longest(self, most: int) -> list[TransferRow]:
        """Return those in flight that began first."""
        return [one.row() for one in heapq.nsmallest(most, self._running.values(), key=lambda one: one.began_ns)]

    def newest(self, most: int) -> list[EndedRow]:
        """Return those that ended last, the last one first."""
        return heapq.nlargest(most, self._ended, key=lambda row: row.ended_ns)

    def span(self, name: str) -> tuple[int, int] | None:
        """Return when a transfer began and ended, the latter 0 while it runs; None where it is not known here."""
        if transfer := self._running.get(name):
            return transfer.began_ns, 0
        for row in self._ended:
            if row.transfer == name:
                return row.ended_ns - round(1e9 * row.total_s), row.ended_ns
        return None

    def totals(self) -> Totals:
        """Return what ended in all."""
        return Totals(dict(self._outcomes), self._pages_moved, self._length_bytes)

    def _get(self, name: str, request_hash: str, header: Header) -> _Transfer:
        transfer = self._running.get(name)
        if transfer is None:
            transfer = _Transfer(name, request_hash, header.i, header.m, header.t, header.t)
            self._running[name] = transfer
            if len(self._running) > self._transfers_max:
                self._running.popitem(last=False)
        return transfer

    def _said(self, header: Header, row: OpenTransferRow) -> None:
        if row.transfer in self._known:
            return
        transfer = self._get(row.transfer, row.request_hash, header)
        transfer.source = transfer.source or row.source
        transfer.step = transfer.step or row.phase
        transfer.heard = max(transfer.heard, header.s)

    def _end(self, row: EndedRow) -> None:
        self._running.pop(row.transfer, None)
        self._known[row.transfer] = None
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
        self._ended.append(row)
        self._outcomes[row.outcome] += 1
        self._pages_moved += row.pages_moved
        self._length_bytes += row.length_bytes

    def _of(self, instance: str, member: str) -> list[_Transfer]:
        return [one for one in self._running.values() if one.destination == instance and one.member == member]


def _ended(body: TransferOutcome, ended_ns: int) -> EndedRow:
    return EndedRow(
        body.transfer, body.request_hash, body.source, body.destination, body.outcome, body.failure, body.reason,
        body.pages_wanted, body.pages_held, body.pages_moved, body.length_bytes,
        body.queue_s, body.grant_s, body.move_s, body.total_s, ended_ns,
    )  # fmt: skip
