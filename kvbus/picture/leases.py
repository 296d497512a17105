"""Leases that are held, as the facts say: there once they are named, gone when returned or with their member's run."""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from kvbus.columns import from_column
from kvbus.events import FactsSeen, Header, LeaseGranted, OutcomeFixed
from kvbus.ledger.facts import Fact
from kvbus.ledger.held import stage_of
from kvbus.picture.rows import LeaseRow, OutOfUseRow, Who
from kvbus.snapshots import HeldLeaseRow, SnapshotTaken

LEASES_MAX = 100_000
"""Leases remembered at a time, as many as a holder is built for; the oldest is forgotten first. 400 bytes each."""
RETURNED_MAX = 100_000
"""Tickets known to be returned: what is heard of them late, or twice, must not bring them back. 200 bytes each."""
MEMBER_TICKET = 0
"""Stands in failures that concern a member rather than one of its leases; holders count from 1."""

_ENDED = int(Fact.ACCESS_ENDED | Fact.FENCED)
_UNWANTED = int(Fact.FAILED | Fact.CANCELLED | Fact.ABANDONED | Fact.UNCERTAIN)
_STOPPED = int(Fact.RETURN_FAILED | Fact.LENDER_STOPPED)
_RETURNED = int(Fact.RETURNED)

Key = tuple[str, str, int]
"""Instance, member, ticket: of one run at a time, since what an older run held ended with it."""


@dataclass(slots=True)
class _Lease:
    instance: str
    member: str
    epoch: int
    ticket: int
    since_ns: int
    since_known: bool = True
    transfer: str = ""
    rank: int = 0
    direction: str = ""
    peer: str = ""
    pages: int = 0
    bits: int = 0
    unwanted_ns: int = 0
    failure: str = ""
    heard: int = 0
    """The highest sequence of its member that said something of it."""
    ended: bool = False

    def row(self) -> LeaseRow:
        return LeaseRow(
            self.instance, self.member, self.epoch, self.ticket, self.transfer, self.rank, self.direction,
            self.peer, self.pages, str(stage_of(self.bits)), self.since_ns, self.since_known,
        )  # fmt: skip

    @property
    def out_of_use(self) -> bool:
        """Whether its pages serve nobody: it is never returned, or nobody waits for it and access has not ended."""
        return bool(self.bits & _STOPPED or (self.bits & _UNWANTED and not self.bits & _ENDED))


class HeldLeases:
    """The leases of all members. Facts only turn bits on and tickets are never used twice, so order hardly matters."""

    def __init__(self, leases_max: int = LEASES_MAX) -> None:
        self._leases_max = leases_max
        self._held: OrderedDict[Key, _Lease] = OrderedDict()
        self._returned: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def granted(self, header: Header, body: LeaseGranted) -> bool:
        """Take a lease whose pages are known; whether that is news."""
        lease = self._get(header, body.ticket)
        if lease is None:
            return False
        news = not lease.pages
        lease.transfer, lease.rank, lease.direction = body.transfer, body.rank, body.direction
        lease.peer, lease.pages = body.peer, len(body.pages) // 4
        return news

    def facts(self, header: Header, body: FactsSeen) -> None:
        """Turn bits on; a lease that is returned is forgotten."""
        for row in body.details:
            if row.ticket != MEMBER_TICKET and (lease := self._held.get((header.i, header.m, row.ticket))):
                lease.failure = row.text or row.failure
        tickets, bits = from_column(body.ticket, 8), from_column(body.bits, 4)
        for ticket, on in zip(tickets, bits, strict=True):
            if on & _RETURNED:
                self._gone((header.i, header.m, ticket))
            elif lease := self._get(header, ticket):
                lease.bits |= on
                if not lease.unwanted_ns and lease.out_of_use:
                    lease.unwanted_ns = header.t

    def written(self, header: Header, body: OutcomeFixed) -> tuple[str, int]:
        """Return the transfer of a write lease and the pages that arrived for it, once; "" where it is none."""
        lease = self._held.get((header.i, header.m, body.ticket))
        if lease is None or lease.ended or lease.direction != "write":
            return "", 0
        lease.ended = True
        return lease.transfer, body.arrived

    def snapshot(self, header: Header, body: SnapshotTaken) -> None:
        """Hold what a member says that it holds, within the tickets that this part speaks of, and nothing else."""
        last = body.leases[-1].ticket if body.more and body.leases else None
        said = {row.ticket for row in body.leases}
        gone = [
            key for key in self._of(header.i, header.m)
            if key[2] > body.after and (last is None or key[2] <= last) and key[2] not in said
            and self._held[key].heard < header.s
        ]  # fmt: skip
        for key in gone:
            self._gone(key)
        for row in body.leases:
            self._said(header, row)

    def drop(self, members: Collection[Who]) -> None:
        """Forget the leases of members whose run has ended, or who are forgotten themselves."""
        for key in [key for key in self._held if key[:2] in members]:
            del self._held[key]
        for key in [key for key in self._returned if key[:2] in members]:
            del self._returned[key]

    def oldest(self, most: int) -> tuple[list[LeaseRow], int]:
        """Return the oldest leases of transfers, and how many there are in all."""
        of_transfers = [lease for lease in self._held.values() if lease.transfer]
        oldest = heapq.nsmallest(most, of_transfers, key=lambda lease: lease.since_ns)
        return [lease.row() for lease in oldest], len(of_transfers)

    def out_of_use(self) -> list[OutOfUseRow]:
        """Return those whose pages serve nobody, and why."""
        return [
            OutOfUseRow(
                lease.instance, lease.member, lease.pages, _why(lease), lease.unwanted_ns, lease.ticket, lease.transfer
            )
            for lease in self._held.values()
            if lease.out_of_use
        ]

    def _get(self, header: Header, ticket: int) -> _Lease | None:
        """Return a lease, known or not; None where it was returned."""
        key = header.i, header.m, ticket
        lease = self._held.get(key)
        if lease is None and key in self._returned:
            return None
        if lease is None:
            lease = self._held[key] = _Lease(header.i, header.m, header.e, ticket, header.t)
            if len(self._held) > self._leases_max:
                self._held.popitem(last=False)
        lease.heard = max(lease.heard, header.s)
        return lease

    def _gone(self, key: Key) -> None:
        self._held.pop(key, None)
        self._returned[key] = None
        if len(self._returned) > RETURNED_MAX:
            self._returned.popitem(last=False)

    def _said(self, header: Header, row: HeldLeaseRow) -> None:
        new = (header.i, header.m, row.ticket) not in self._held
        lease = self._get(header, row.ticket)
        if lease is None:
            return
        if new:
            lease.since_known = False
        lease.transfer, lease.rank, lease.direction, lease.peer = row.transfer, row.rank, row.direction, row.peer
        lease.pages, lease.bits = len(row.pages) // 4, lease.bits | row.bits
        if not lease.unwanted_ns and lease.out_of_use:
            lease.unwanted_ns = header.t

    def _of(self, instance: str, member: str) -> Iterator[Key]:
        return (key for key in self._held if key[0] == instance and key[1] == member)


def _why(lease: _Lease) -> str:
    if lease.bits & Fact.RETURN_FAILED:
        why = "its return failed, and is never tried again"
    elif lease.bits & Fact.LENDER_STOPPED:
        why = "its lender stopped and retains it"
    elif lease.bits & Fact.UNCERTAIN:
        why = "whether its submission took effect is not known"
    else:
        why = "nobody waits for it, and nothing says that access has ended"
    return f"{why}: {lease.failure}" if lease.failure else why
