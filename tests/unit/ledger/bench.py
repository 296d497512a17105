"""What the ledger's tests share: one holder between a lender and two backends that the test drives by hand."""

from dataclasses import dataclass, field

from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import Fact, FactDetail, LeaseFacts
from kvbus.ledger.held import NOT_YET
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Containment, Direction, SubmitMode
from kvbus.testing.ledger_parts import ListedLease, ListedLender, ManualBackend

PULL = SubmitMode("pull", Direction.WRITE)
SERVE = SubmitMode("serve", Direction.READ)


@dataclass
class Bench:
    """`pull` is the binding that writes into leased pages, `serve` the one that lets a peer read them."""

    containment: Containment = Containment.ISOLATE_PEER
    retained_max: int = 8
    lender: ListedLender = field(default_factory=ListedLender)
    other_lender: ListedLender = field(default_factory=lambda: ListedLender("other"))
    pull: ManualBackend = field(default_factory=lambda: ManualBackend("pull"))
    serve: ManualBackend = field(default_factory=lambda: ManualBackend("serve"))
    details: list[FactDetail] = field(default_factory=list)
    bits: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        bindings = [
            Binding("pull", self.pull, Direction.WRITE, self.containment, self.retained_max),
            Binding("serve", self.serve, Direction.READ, self.containment, self.retained_max),
        ]
        self.holder = LeaseHolder(bindings=bindings, lenders=[self.lender, self.other_lender])

    def write(
        self, rows: int = 1, *, hint: object = "grant", granted: bool = True, peer: str = "peer"
    ) -> tuple[int, ListedLease]:
        """Take a write lease."""
        lease = self.lender.lend(Direction.WRITE, rows, granted=granted)
        return self.holder.take(lease, PULL, hint, now=0.0, peer=peer, transfer="t1"), lease

    def read(
        self, rows: int = 1, *, hint: object = "reader", granted: bool = True, peer: str = "peer"
    ) -> tuple[int, ListedLease]:
        """Take a read lease."""
        lease = self.lender.lend(Direction.READ, rows, granted=granted)
        return self.holder.take(lease, SERVE, hint, now=0.0, peer=peer, transfer="t1"), lease

    def round(self, *settled: int) -> LeaseFacts:
        """Run one round, settle these tickets in it, and check the books after each step."""
        facts = self.holder.collect()
        self.note(facts)
        for step in (lambda: self.holder.settle(settled), self.holder.advance, self.holder.finish):
            step()
            self.holder.check()
        return facts

    def note(self, facts: LeaseFacts) -> None:
        """Keep what a batch says; bits never turn off."""
        assert len(set(map(len, facts.columns))) == 1
        for ticket, _, bits, _, _ in facts.lines:
            before = self.bits.get(ticket, 0)
            assert before & ~bits == 0, f"T{ticket} lost bits"
            self.bits[ticket] = bits
        self.details += facts.details

    def reported(self, ticket: int) -> int:
        """Run an empty round, so that all facts are out, and return the bits last reported of a ticket."""
        self.round()
        self.note(self.holder.collect())
        return self.bits[ticket]

    def submitted_write(self, rows: int = 1, peer: str = "peer") -> tuple[int, ListedLease]:
        """Take a write lease and have its order submitted."""
        ticket, lease = self.write(rows, peer=peer)
        self.round()
        assert ticket in self.pull.orders
        return ticket, lease

    def submitted_read(self, rows: int = 1, peer: str = "peer") -> tuple[int, ListedLease]:
        """Take a read lease and have its order submitted."""
        ticket, lease = self.read(rows, peer=peer)
        self.round()
        assert ticket in self.serve.orders
        return ticket, lease


RETURNED = int(Fact.RETURNED)
CONSUMED = int(Fact.CONSUMED)
HELD_BACK = NOT_YET
