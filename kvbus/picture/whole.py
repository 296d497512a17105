"""The picture itself: facts, decisions, heartbeats and records in, rows out.

It has no clock and no I/O, decides nothing, and frees nothing. What the log has lost, snapshots say again.
"""

from collections.abc import Collection, Iterable

from kvbus.events import (
    AttemptMade,
    Event,
    FactsSeen,
    Header,
    HeartbeatSeen,
    InstanceRecord,
    LeaseGranted,
    OutcomeFixed,
    SnapshotTaken,
    TransferOutcome,
    TransferStep,
)
from kvbus.picture.leases import HeldLeases
from kvbus.picture.members import Members, PoolSaid
from kvbus.picture.rows import MemberRow, Shown, Who
from kvbus.picture.transfers import Transfers

ROWS_MAX = 100
"""Rows of each kind that a picture shows unless it is asked for more: more than a screen, and soon drawn."""


class Picture:
    """Folds what is heard of a cluster into what is shown of it; every table is bounded."""

    def __init__(self) -> None:
        self._leases = HeldLeases()
        self._transfers = Transfers()
        self._members = Members(self._drop)
        self.events = 0
        """Events heard; grows with each change, so that an unchanged picture need not be drawn again."""
        self.lost = 0

    def hear(self, event: Event) -> None:
        """Take an event of the facts log, live or stored, or a snapshot that a member was asked for."""
        self.events += 1
        header, body = event.header, event.body
        counts, anew = self._members.hears(header)
        if anew:
            self._drop({(header.i, header.m)})
        if not counts:
            if isinstance(body, TransferOutcome):  # it ended, whichever run says so
                self._transfers.outcome(header, body)
            return
        self._take(event)

    def beat(self, header: Header, body: HeartbeatSeen) -> None:
        """Take a heartbeat; one of a run that has ended says nothing."""
        counts, anew = self._members.hears(header)
        if anew:
            self._drop({(header.i, header.m)})
        if counts:
            self.events += 1
            self._members.beat(header, body)

    def registered(self, records: Iterable[tuple[Header, InstanceRecord]], now_ns: int | None = None) -> None:
        """Take the whole registry, as it was just read; told the time, forget who was not in it for an hour."""
        self.events += 1
        self._members.registered(records, now_ns)

    def pool(self, said: PoolSaid, now_ns: int) -> None:
        """Take what a member answered of its pages."""
        self.events += 1
        self._members.pool(said, now_ns)

    def note_loss(self) -> None:
        """Note that the log no longer held what followed; the members' snapshots come next."""
        self.events += 1
        self.lost += 1

    def span(self, transfer: str) -> tuple[int, int] | None:
        """Return when a transfer began and ended, 0 while it runs; None where the picture does not hold it."""
        return self._transfers.span(transfer)

    def members(self) -> tuple[MemberRow, ...]:
        """Return all members by name."""
        return self._members.rows()

    def show(self, rows_max: int = ROWS_MAX) -> Shown:
        """Return the picture as it is now, with at most so many rows of each kind."""
        leases, leases_count = self._leases.oldest(rows_max)
        out_of_use = sorted([*self._leases.out_of_use(), *self._members.out_of_use()], key=lambda row: row.since_ns)
        return Shown(
            members=_present_first(self._members.rows())[:rows_max],
            transfers=tuple(self._transfers.longest(rows_max)),
            transfers_count=len(self._transfers),
            leases=tuple(leases),
            leases_count=leases_count,
            leases_local=len(self._leases) - leases_count,
            out_of_use=tuple(out_of_use[:rows_max]),
            out_of_use_pages=sum(row.pages for row in out_of_use),
            isolated=self._members.isolated()[:rows_max],
            ended=tuple(self._transfers.newest(rows_max)),
            totals=self._transfers.totals(),
            events=self.events,
            lost=self.lost,
        )

    def _drop(self, members: Collection[Who]) -> None:
        self._leases.drop(members)
        self._transfers.drop(members)

    def _take(self, event: Event) -> None:
        header, body = event.header, event.body
        match body:
            case TransferStep():
                self._transfers.step(header, body)
            case FactsSeen():
                self._leases.facts(header, body)
                self._members.isolations(header, body)
            case LeaseGranted():
                if self._leases.granted(header, body):
                    self._transfers.granted(header, body)
            case AttemptMade():
                self._members.attempted(header, body)
            case OutcomeFixed():
                self._transfers.arrived(*self._leases.written(header, body))
            case TransferOutcome():
                self._transfers.outcome(header, body)
            case SnapshotTaken():
                self._leases.snapshot(header, body)
                self._transfers.snapshot(header, body)
            case _:
                pass


def _present_first(rows: Iterable[MemberRow]) -> tuple[MemberRow, ...]:
    """Return rows in their order, those of members that are registered before all others."""
    return tuple(sorted(rows, key=lambda row: not row.registered))
