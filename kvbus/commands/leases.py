"""Leases as recorded events tell of them: who lent what, which facts are on, by which evidence access ended.

Tickets are a member's own, so a lease is known by instance, member, epoch and ticket together. Nothing here decides
anything: it remembers what was said, in whatever order and however often.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvbus.errors import PeerError
from kvbus.events import (
    AttemptMade,
    CancelDecided,
    Event,
    FactsSeen,
    Header,
    LeaseGranted,
    MadeVisible,
    OutcomeFixed,
    SettleDecided,
    SettleVoided,
    TermTaken,
    TransferOpened,
    from_column,
)
from kvbus.ledger.facts import Fact, evidence_names
from kvbus.parts import FactDetailRow

MEMBER_TICKET = 0
"""Stands in failures that concern a member's binding, peer or lender rather than one lease; holders count from 1."""
FIRST_MEMBER = "m0"
"""What an only member is called unless it is told otherwise; where leases are named it goes without saying."""
Decision = SettleDecided | MadeVisible | SettleVoided
"""What is decided of a transfer once it is open, by which leases end."""
SettleLogBody = TransferOpened | Decision | CancelDecided | TermTaken
"""What stands in a settle log, as a whole."""
LEASES_MAX = 100_000
"""Leases remembered at a time, as many as a holder is built for; about 1 KiB each. The oldest is forgotten first."""


@dataclass(frozen=True, slots=True, order=True)
class LeaseKey:
    """Which lease: a ticket of one run of one member."""

    instance: str
    member: str
    epoch: int
    ticket: int

    def __str__(self) -> str:
        member = "" if self.member == FIRST_MEMBER else f"/{self.member}"
        return f"T{self.ticket}@{self.instance}{member}"

    @classmethod
    def of(cls, header: Header, ticket: int) -> "LeaseKey":
        """Return the key of a ticket that an event of its own member names."""
        return cls(header.i, header.m, header.e, ticket)


@dataclass(slots=True)
class LeaseLife:
    """What is known of one lease; `told` are the bits that a reader has been told of, `returns` events that say so."""

    key: LeaseKey
    transfer: str = ""
    rank: int = 0
    granted: LeaseGranted | None = None
    grants: int = 0
    bits: int = 0
    told: int = 0
    lo: int = 0
    hi: int = 0
    attempt: AttemptMade | None = None
    ended: OutcomeFixed | None = None
    failures: list[FactDetailRow] = field(default_factory=list)
    returns: int = 0

    @property
    def direction(self) -> str:
        """`read`, `write`, or empty while that is not known."""
        return self.granted.direction if self.granted else ""

    @property
    def peer(self) -> str:
        """Whom it was lent for, or from whom its content comes."""
        return self.granted.peer if self.granted else ""

    @property
    def pages(self) -> tuple[int, ...]:
        """The page indexes, in the order of the blocks; empty where they are not known or cannot be read."""
        return readable_column(self.granted.pages, wide=False) if self.granted else ()

    @property
    def counters(self) -> tuple[int, ...]:
        """The generation counters at hand-over."""
        return readable_column(self.granted.counters, wide=True) if self.granted else ()

    @property
    def evidence(self) -> tuple[str, ...]:
        """The kinds of evidence by which access is known to have ended."""
        return evidence_names(self.bits)

    @property
    def is_local(self) -> bool:
        """Whether it belongs to no transfer, as far as is known: the engine's own, as a rule."""
        return not self.transfer


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """What one line of facts added: the bits that a reader has not been told of, bounds, failures."""

    life: LeaseLife
    bits: int
    bounds: bool
    failures: tuple[FactDetailRow, ...]


class LeaseBook:
    """Follows events; `keep_returned` false forgets a lease once it is returned, for readers that never end."""

    def __init__(self, *, keep_returned: bool, leases_max: int = LEASES_MAX) -> None:
        self._keep_returned = keep_returned
        self._leases_max = leases_max
        self._lives: OrderedDict[LeaseKey, LeaseLife] = OrderedDict()

    def lives(self) -> Sequence[LeaseLife]:
        """Return the leases known now, in the order in which they became known."""
        return tuple(self._lives.values())

    def get(self, key: LeaseKey) -> LeaseLife:
        """Return a lease's life, known or not."""
        life = self._lives.get(key)
        if life is None:
            life = self._lives[key] = LeaseLife(key)
            if len(self._lives) > self._leases_max:
                self._lives.popitem(last=False)
        return life

    def note(self, event: Event) -> LeaseLife | None:
        """Take an audit row or a decision in; return the lease of a row."""
        header, body = event.header, event.body
        match body:
            case LeaseGranted():
                life = self.get(LeaseKey.of(header, body.ticket))
                life.granted, life.transfer, life.rank = body, body.transfer, body.rank
                life.grants += 1
                return life
            case AttemptMade():
                life = self.get(LeaseKey.of(header, body.ticket))
                life.attempt = body
                return life
            case OutcomeFixed():
                life = self.get(LeaseKey.of(header, body.ticket))
                life.ended = body
                return life
            case TransferOpened() | SettleDecided() | MadeVisible() | SettleVoided():
                for key in party_keys(event):
                    if key in self._lives or self._keep_returned or isinstance(body, TransferOpened):
                        self.get(key).transfer = body.transfer
            case _:
                pass
        return None

    def changes(self, header: Header, facts: FactsSeen) -> list[LeaseChange]:
        """Take a batch of facts in; return what each of its lines adds, failures of other tickets last."""
        failures: dict[int, list[FactDetailRow]] = {}
        for detail in facts.details:
            if detail.ticket != MEMBER_TICKET:
                failures.setdefault(detail.ticket, []).append(detail)
        changes = [
            self._line(LeaseKey.of(header, ticket), rank, bits, (lo, hi), failures.pop(ticket, []))
            for ticket, rank, bits, lo, hi in fact_lines(facts)
        ]
        for ticket, rows in failures.items():
            life = self.get(LeaseKey.of(header, ticket))
            life.failures += rows
            changes.append(LeaseChange(life, 0, bounds=False, failures=tuple(rows)))
        return changes

    def _line(
        self, key: LeaseKey, rank: int, bits: int, bounds: tuple[int, int], failures: list[FactDetailRow]
    ) -> LeaseChange:
        life = self.get(key)
        life.rank = rank
        life.bits |= bits
        life.returns += bool(bits & Fact.RETURNED)
        life.failures += failures
        new_bounds = bounds not in {(0, 0), (life.lo, life.hi)}
        if new_bounds:
            life.lo, life.hi = bounds
        new = life.bits & ~life.told
        if new == Fact.TAKEN and life.granted is None:
            new = 0  # whose it is shows only when it is granted; it is told then
        life.told |= new
        if bits & Fact.RETURNED and not self._keep_returned:
            self._lives.pop(key, None)
        return LeaseChange(life, new, new_bounds, tuple(failures))


def why_out(life: LeaseLife, *, later_run: bool, decided: bool) -> str:
    """Say, of a lease that was not returned, why that is; `decided`: its transfer was settled or voided."""
    bits = life.bits
    if bits & Fact.RETURN_FAILED:
        return "its return failed, so its lender stopped and retains it"
    if later_run:
        return f"{life.key.instance}/{life.key.member} has run anew since, with an empty pool"
    if bits & Fact.LENDER_STOPPED:
        return "its lender stopped and retains it"
    if not bits & (Fact.ACCESS_ENDED | Fact.FENCED):
        return "no evidence that access has ended is recorded"
    if life.direction == "write" and not life.is_local and not bits & Fact.SETTLED and not decided:
        return "it waits for the settle decision"
    return "no return is recorded, although nothing stood in its way"


def fact_lines(facts: FactsSeen) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (ticket, rank, bits, lo, hi) of each line; the columns' lengths were checked when they were decoded."""
    columns = (
        from_column(facts.ticket, 8),
        from_column(facts.rank, 2),
        from_column(facts.bits, 4),
        from_column(facts.lo, 4),
        from_column(facts.hi, 4),
    )
    return zip(*columns, strict=True)


def party_keys(event: Event) -> Iterator[LeaseKey]:
    """Yield the lease of each party that a decision names; a party that has none, or none yet, is named without one."""
    if isinstance(event.body, TransferOpened | Decision):
        for member, epoch, _rank, ticket in event.body.members:
            if ticket:
                yield LeaseKey(event.header.i, member, epoch, ticket)


def readable_column(data: bytes, *, wide: bool) -> tuple[int, ...]:
    """Return a column of u64 or u32, empty where its length does not fit: a reader goes on without it."""
    try:
        return from_column(data, 8 if wide else 4)
    except PeerError:
        return ()
