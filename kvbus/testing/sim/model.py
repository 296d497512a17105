"""The model: what each member's facts add up to, held against its books, its pool, and the truth.

Facts come in as the roles record them. The model keeps per ticket which bits stand, and knows what must never be: a bit
that turns off, a return without its evidence, a second return, access that ended although somebody still touches.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.agreement import Decision
from kvbus.ledger.facts import (
    EVIDENCE_BITS,
    RESULT_BITS,
    Evidence,
    Fact,
    GrantedRow,
    LeaseFacts,
    OutcomeRow,
    fact_names,
)
from kvbus.pool.allocator import PageState
from kvbus.roles.poolside import PoolSide
from kvbus.roles.rounds import FactsSink, Rounds
from kvbus.testing.sim.pages import strange
from kvbus.testing.sim.trail import Trail
from kvbus.testing.sim.truth import SimProcess

_RETURNED = int(Fact.RETURNED)
_ACCESS_ENDED = int(Fact.ACCESS_ENDED)
_FENCED = int(Fact.FENCED)
_CONSUMED = int(Fact.CONSUMED)
_SETTLED = int(Fact.SETTLED)
_RETURN_FAILED = int(Fact.RETURN_FAILED)
_LENDER_STOPPED = int(Fact.LENDER_STOPPED)


@dataclass(slots=True)
class _Lease:
    """One ticket as its facts tell."""

    bits: int = 0
    writes: bool = False
    pages: tuple[int, ...] = ()
    names: tuple[bytes, ...] = ()
    bounds: tuple[int, int] | None = None


@dataclass(slots=True)
class Model:
    """The model of one member, and the sink before its recorder."""

    trail: Trail
    process: SimProcess
    sink: FactsSink
    rounds: Rounds | None = None
    pool: PoolSide | None = None
    held: defaultdict[int, _Lease] = field(default_factory=lambda: defaultdict(_Lease))
    returned: set[int] = field(default_factory=set)
    contents: dict[int, bytes] = field(default_factory=dict)
    last_decision: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    # ---------------------------------------------------------------------------------------------------- as a sink

    def facts(self, facts: LeaseFacts) -> None:
        """Take a batch: check it, then let it be recorded."""
        if self.process.alive:
            for row in facts.rows:
                if isinstance(row, GrantedRow):
                    self._granted(row)
                elif isinstance(row, OutcomeRow) and not row.evidence:
                    self._violate(f"T{row.ticket} has an outcome without evidence", row.ticket)
            for ticket, _, bits, lo, hi in facts.lines:
                if ticket in self.returned:
                    self._violate(f"T{ticket} is reported after its return", ticket)
                else:
                    self._line(ticket, bits, (lo, hi))
        self.sink.facts(facts)

    def decision(self, decision: Decision) -> None:
        """Take a decision: numbers are without gaps, and each names the one before (P15)."""
        if decision.n != self.last_decision + 1:
            self._violate(f"decision {decision.n} follows {self.last_decision}")
        self.last_decision = decision.n
        self.counts[f"decisions_{decision.kind}"] += 1
        name = self.process.name
        tickets = " ".join([f"{name}.T{party.ticket}" for party in decision.parties])
        self.trail.note(name, f"{decision.kind} {decision.transfer} {tickets}")
        self.sink.decision(decision)

    def _granted(self, row: GrantedRow) -> None:
        ticket, _, _, writes, _, peer, pages, _ = row
        lease = self.held[ticket]
        lease.writes, lease.pages = writes, pages
        view = self.rounds.holder.view(ticket) if self.rounds else None
        lease.names = view.names if view else ()
        name = self.process.name
        named = " ".join([f"{name}.p{page}" for page in pages])
        self.trail.note(name, f"{name}.T{ticket} granted to {'write' if writes else 'read'} for {peer} : {named}")

    def _line(self, ticket: int, bits: int, bounds: tuple[int, int]) -> None:
        lease = self.held[ticket]
        before, lease.bits = lease.bits, bits
        new = bits & ~before
        if before & ~bits:
            self._violate(f"T{ticket} lost the bits {' and '.join(fact_names(before & ~bits))}", ticket)
        if results := bits & RESULT_BITS:
            if results & (results - 1):  # more than one bit
                self._violate(f"T{ticket} has two results", ticket)
            if lease.writes:
                self._bounded(ticket, lease, bounds)
        if new & _ACCESS_ENDED:
            self._access_ended(ticket, lease)
        if new & _RETURNED:
            self._returned(ticket, lease)
        if new & _RETURN_FAILED:
            self._return_failed(ticket)

    def _bounded(self, ticket: int, lease: _Lease, bounds: tuple[int, int]) -> None:
        """There is one result, and with it the bounds of a write are fixed (P17)."""
        if lease.bounds is not None and lease.bounds != bounds:
            self._violate(f"T{ticket} changed its bounds from {lease.bounds} to {bounds}", ticket)
        lease.bounds = bounds

    def _access_ended(self, ticket: int, lease: _Lease) -> None:
        process = self.process
        kinds, told = _evidence(lease.bits & EVIDENCE_BITS)
        for kind in kinds:
            self.counts[kind] += 1
        self.trail.note(process.name, f"{process.name}.T{ticket} access ended by {told}")
        if not kinds:
            self._violate(f"access to T{ticket} ended without evidence", ticket)
        if lease.writes:
            if lease.names and not process.writers.keys().isdisjoint(lease.pages):
                self._violate(f"access to T{ticket} is said to have ended, and its pages are being written", ticket)
        elif ticket in process.lease_readers:
            self._violate(f"access to T{ticket} is said to have ended, and it is being read", ticket)

    def _returned(self, ticket: int, lease: _Lease) -> None:
        name = self.process.name
        del self.held[ticket]
        self.returned.add(ticket)
        self.counts["leases_returned"] += 1
        self.trail.note(name, f"{name}.T{ticket} returned")
        if lease.bits & _LENDER_STOPPED:
            self._violate(f"T{ticket} was returned to a lender that has stopped", ticket)
        if lease.bits & _FENCED and not lease.writes:
            self.process.fenced.add(ticket)
        elif not lease.bits & _ACCESS_ENDED:
            self._violate(f"T{ticket} was returned before access ended", ticket)
        if lease.writes and not lease.bits & _SETTLED:
            self._violate(f"T{ticket}, a write, was returned without a settle", ticket)
        if lease.writes and lease.bits & _CONSUMED and self.pool is not None:
            self._check_content(self.pool, lease.pages, lease.names)

    def _return_failed(self, ticket: int) -> None:
        """A return that failed is never tried again; that it fails has to be the lender's fault (contract 7)."""
        if self.process.lender_failed:
            del self.held[ticket]
            self.returned.add(ticket)
            self.counts["returns_failed"] += 1
        else:
            self._violate(f"the return of T{ticket} failed", ticket)

    # ------------------------------------------------------------------------------------------------------ all of it

    def check_touched(self) -> None:
        """Hold the held tickets against the model's; O(held)."""
        if self.rounds is None or not self.process.alive:
            return
        holder = self.rounds.holder
        if not holder.has_news and holder.tickets() != self.held.keys():
            self._violate(f"tickets {holder.tickets()} are held, {set(self.held)} by the facts")

    def check_all(self) -> None:
        """Hold every book against every other, and every page's bytes against its name."""
        if self.rounds is None or self.pool is None:
            return
        try:
            self.rounds.holder.check()
            self.pool.lender.check()
        except LedgerContradictionError as error:
            self._violate(f"the books disagree: {error}")
        self.check_touched()
        if not self.rounds.holder.has_news:  # at shutdown leases go back before the round that tells of it
            self._check_states()
        contents = self.contents
        self.contents = {}
        self._check_content(self.pool, list(contents), list(contents.values()))

    def _check_states(self) -> None:
        """Pages under a write lease are in writing; pages under a read lease are pinned as often as they are lent."""
        pool = self.pool
        if pool is None:
            return
        pins: dict[int, int] = {}
        for ticket, lease in self.held.items():
            for page in lease.pages:
                if not lease.writes:
                    pins[page] = pins.get(page, 0) + 1
                elif pool.allocator.state(page) is not PageState.WRITING:
                    self._violate(f"p{page} of T{ticket} is {pool.allocator.state(page).name}, not WRITING", ticket)
        for page, count in pins.items():
            if pool.allocator.pins(page) < count:
                self._violate(f"p{page} is lent {count} times and pinned {pool.allocator.pins(page)} times")

    def _check_content(self, pool: PoolSide, pages: Sequence[int], names: Sequence[bytes]) -> None:
        """Remember which of these pages the index has under these names, and hold their bytes against those."""
        found = pool.lender._index.match(names)  # noqa: SLF001 - all at once, as nobody else asks
        named = [(page, name) for page, name, there in zip(pages, names, found, strict=True) if there == page]
        self.contents.update(named)
        for page, name in strange(pool.memory, [page for page, _ in named], [name for _, name in named]):
            text = f"wrong bytes: p{page} is in the index as {name.hex()[:8]} and does not hold it"
            self.trail.violate(self.process.name, text, f"p{page}")

    def _violate(self, text: str, ticket: int = 0) -> None:
        pages = self.held[ticket].pages if ticket in self.held else ()
        subjects = (f"T{ticket}", *(f"p{page}" for page in pages)) if ticket else ()
        self.trail.violate(self.process.name, text, *subjects)


@lru_cache(maxsize=32)  # what five kinds of evidence may come to
def _evidence(bits: int) -> tuple[tuple[str, ...], str]:
    """Return the names under which these kinds of evidence are counted, and how the trail tells them."""
    kinds = [evidence for evidence in Evidence if bits & evidence]
    return tuple(kind.name.lower() for kind in kinds), "|".join(fact_names(bits)).upper()
