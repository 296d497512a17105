"""Agreement: facts of all parties of a transfer in, one settle decision out.

A party is one rank on one member in one epoch. `open` fixes the parties and their tickets before anybody acts (P12);
each reports its result, its access end and its bounds; once all have, one decision names the tickets to return and the
bounds that every rank has. An instance with one member runs this in process and publishes the decisions as a record;
several members agree by `shares.py` and `council.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvbus.ledger.facts import RESULT_BITS, Fact

_ACCESS_ENDED, _ABANDONED = int(Fact.ACCESS_ENDED), int(Fact.ABANDONED)


class Party(NamedTuple):
    """One rank's share in a transfer: who, in which epoch, under which ticket of its own."""

    member: str
    epoch: int
    rank: int
    ticket: int

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells this party's facts from others': member, epoch, ticket."""
        return self.member, self.epoch, self.ticket


class Decision(NamedTuple):
    """What every member applies, in the order of `n`. `previous` chains it to the decision before (P15).

    kind `open`: these parties belong together. `settle`: this is agreed; lo and hi are the bounds in blocks that all
    ranks have, empty (0, 0) where they have none in common. An instance with one member returns the tickets with it;
    where there are several, `visible` follows once all of them have applied the settle, and returns them (P10). `void`:
    do not apply what was decided. `cancel`: stop, and let what arrived be settled. `term`: the one party decides from
    here on (P13); it belongs to no transfer.
    """

    kind: str
    transfer: str
    term: int
    n: int
    previous: str
    parties: tuple[Party, ...]
    lo: int = 0
    hi: int = 0
    reason: str = ""

    @property
    def decision_id(self) -> str:
        """Term and number: what the next decision names as its previous one."""
        return f"{self.term}.{self.n}"


def common_bounds(bounds: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return what all ranks have, in blocks: the largest floor, the smallest end; (0, 0) if that is empty (26)."""
    lows, ends = zip(*bounds, strict=True)
    lo, hi = max(lows), min(ends)
    return (lo, hi) if lo <= hi else (0, 0)


@dataclass(slots=True)
class _Report:
    bits: int = 0
    lo: int | None = None
    hi: int | None = None


@dataclass(slots=True)
class _Open:
    parties: tuple[Party, ...]
    reports: dict[tuple[str, int, int], _Report]  # by each party's key


class Agreement:
    """The coordinator's book of one instance. Reports may repeat and come in any order; each decision is made once."""

    def __init__(self, *, term: int) -> None:
        self._term = term
        self._n = 0
        self._previous = ""
        self._open: dict[str, _Open] = {}
        self._by_party: dict[tuple[str, int, int], str] = {}

    @property
    def head(self) -> int:
        """The number of the last decision."""
        return self._n

    def open(self, transfer: str, parties: tuple[Party, ...]) -> Decision:
        """Fix a transfer's parties; ValueError where it is open already, has no party, or shares a ticket."""
        if transfer in self._open or not parties:
            raise ValueError(f"transfer {transfer!r} is open already, or has no parties")
        reports = {party.key: _Report() for party in parties}
        if len(reports) != len(parties) or not self._by_party.keys().isdisjoint(reports):
            raise ValueError(f"a ticket of transfer {transfer!r} belongs to two parties (contract 11)")
        self._open[transfer] = _Open(parties, reports)
        self._by_party.update(dict.fromkeys(reports, transfer))
        return self._decision("open", transfer, parties)

    def report(self, party_key: tuple[str, int, int], bits: int, *, lo: int, hi: int) -> Decision | None:
        """Take note of one line of facts of (member, epoch, ticket); return the decision if no other word is missing.

        Lines about tickets that belong to no open transfer (local leases, another epoch) change nothing. Bits only
        turn on. Bounds are written once: a party that later says others is contradicting itself, and the transfer is
        voided (P17).
        """
        transfer = self._by_party.get(party_key)
        if transfer is None:
            return None
        opened = self._open[transfer]
        report = opened.reports[party_key]
        report.bits |= bits
        if bits & RESULT_BITS:
            if report.lo is None or report.hi is None:
                report.lo, report.hi = lo, hi
            elif (report.lo, report.hi) != (lo, hi):
                return self.void(transfer, f"{_named(opened, party_key)} gave two different bounds")
            if (report.bits & RESULT_BITS).bit_count() > 1:
                return self.void(transfer, f"{_named(opened, party_key)} gave two different results")
        return self._settle_if_complete(transfer, opened)

    def void(self, transfer: str, reason: str) -> Decision:
        """Close a transfer without content: what it leased goes back as free pages, on the usual evidence."""
        opened = self._close(transfer)
        return self._decision("void", transfer, opened.parties, reason=reason)

    def awaits(self, party_key: tuple[str, int, int]) -> bool:
        """Return True where a ticket belongs to an open transfer, and so waits for its decision."""
        return party_key in self._by_party

    def is_open(self, transfer: str) -> bool:
        """Return True while a decision about this transfer is outstanding."""
        return transfer in self._open

    def _settle_if_complete(self, transfer: str, opened: _Open) -> Decision | None:
        reports, abandoned = opened.reports.values(), 0
        for report in reports:
            if not (report.bits & _ACCESS_ENDED and report.bits & RESULT_BITS):
                return None
            abandoned |= report.bits & _ABANDONED
        if abandoned:
            # One rank that gave up has no content: nobody else's may become visible either (P10, P11).
            return self.void(transfer, "a rank gave its lease up")
        self._close(transfer)
        lo, hi = common_bounds((report.lo or 0, report.hi or 0) for report in reports)
        return self._decision("settle", transfer, opened.parties, lo=lo, hi=hi)

    def _close(self, transfer: str) -> _Open:
        opened = self._open.pop(transfer)
        for party in opened.parties:
            del self._by_party[party.key]
        return opened

    def _decision(
        self, kind: str, transfer: str, parties: tuple[Party, ...], *, lo: int = 0, hi: int = 0, reason: str = ""
    ) -> Decision:
        self._n += 1
        decision = Decision(kind, transfer, self._term, self._n, self._previous, parties, lo, hi, reason)
        self._previous = decision.decision_id
        return decision


def _named(opened: _Open, party_key: tuple[str, int, int]) -> str:
    party = next(one for one in opened.parties if one.key == party_key)
    return f"rank {party.rank} on {party.member}"
