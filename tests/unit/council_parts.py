"""An instance on paper: its members' shares, its log and its coordinator; messages come when a test brings them."""

from dataclasses import replace

from kvbus.ledger.agreement import Decision
from kvbus.ledger.attendance import Attendance
from kvbus.ledger.council import Council, Report
from kvbus.ledger.facts import Evidence, Fact
from kvbus.ledger.shares import Acts, Heard, ShareBook, ShareStage

WHOLE = int(Fact.TAKEN | Fact.GRANTED | Fact.DELIVERED | Fact.ACCESS_ENDED | Evidence.COMPLETED)
GIVEN_UP = int(Fact.TAKEN | Fact.FAILED | Fact.ABANDONED | Fact.ACCESS_ENDED | Evidence.NEVER_SUBMITTED)
LATE = 60.0


class Side:
    """One member: its shares, and where it reads the log."""

    def __init__(self, name: str, epoch: int) -> None:
        self.book = ShareBook(name, epoch)
        self.read = 0
        self.said = 0
        self.acts: list[Acts] = []


class House:
    """All members of one instance and its log; messages come when a test brings them."""

    def __init__(self, ranks: int = 2) -> None:
        self.ranks = {f"m{rank}": rank for rank in range(ranks)}
        self.sides = {name: Side(name, 10 + rank) for name, rank in self.ranks.items()}
        self.log: list[Decision] = []
        self.now = 0.0
        self.attendance = Attendance(members=tuple(self.ranks), me="m0", began_at=0.0)
        self.council = self.lead("m0", term=1)

    def lead(self, name: str, term: int) -> Council:
        """Let a member that has read the whole log write a term's record; it knows nothing of the others yet."""
        self.read(name)
        book = self.sides[name].book
        self.attendance = Attendance(members=tuple(self.ranks), me=name, began_at=self.now)
        self.council = Council(
            self.attendance,
            me=(name, book.epoch),
            ranks=self.ranks,
            term=term,
            n=book.n,
            previous=book.head_id,
        )
        self.append(self.council.term_record())
        return self.council

    def append(self, decision: Decision) -> None:
        self.log.append(decision)
        self.council.appended(decision)

    def read(self, *names: str) -> None:
        """Let members apply all that stands in the log."""
        for name in names or self.ranks:
            side = self.sides[name]
            for decision in self.log[side.read :]:
                acts = side.book.hear(decision)
                assert acts.heard in {Heard.APPLIED, Heard.REFUSED}
                side.acts.append(acts)
            side.read = len(self.log)

    def report_of(self, name: str) -> Report:
        """Return what a member would say now; as over the wire, only itself knows all parties of its shares."""
        side = self.sides[name]
        side.said += 1
        shares = tuple(replace(share, parties=()) for share in side.book.rows())
        return Report(name, side.book.epoch, side.said, side.book.term, side.book.n, shares)

    def tell(self, *names: str) -> None:
        for name in names or self.ranks:
            own = self.report_of(name)
            if name == self.council_member:
                own = replace(own, shares=tuple(map(replace, self.sides[name].book.rows())))
            self.council.report(self.now, own)

    @property
    def council_member(self) -> str:
        return self.council.term_record().parties[0].member

    def turn(self) -> Decision | None:
        """Append what is due, and return it."""
        due = self.council.next(self.now)
        assert self.council.next(self.now) == due  # the same answer, until it stands in the log
        if due is not None:
            self.append(due)
        return due

    def run(self) -> list[Decision]:
        """Let everybody read and tell until nothing is due."""
        made: list[Decision] = []
        for _ in range(1_000):
            self.read()
            self.tell()
            due = self.turn()
            if due is None:
                return made
            made.append(due)
        raise AssertionError("it never comes to rest")

    def open(self, transfer: str = "t", *, give_up_at: float = LATE) -> None:
        self.run()
        assert self.council.propose(transfer, give_up_at)
        due = self.turn()
        assert due is not None
        assert (due.kind, due.transfer) == ("open", transfer)
        self.read()

    def bring(self, name: str, transfer: str = "t", *, bits: int = WHOLE, lo: int = 0, hi: int = 4) -> int:
        """Let a member lease its pages and have so much of them."""
        ticket = 100 * (self.ranks[name] + 1) + self.sides[name].said
        self.sides[name].book.leased(transfer, ticket)
        assert self.sides[name].book.note(ticket, bits, lo, hi)
        return ticket

    def restart(self, name: str) -> None:
        """Let a member start again: it holds nothing, and reads the log from its beginning."""
        epoch = self.sides[name].book.epoch + 100
        self.sides[name] = Side(name, epoch)
        self.attendance.heard(self.now, name, epoch)

    def stage(self, name: str, transfer: str = "t") -> ShareStage | None:
        share = self.sides[name].book.of(transfer)
        return share.stage if share else None

    def wait(self, seconds: float, *heard: str) -> None:
        """Let time pass, in which these go on being heard of."""
        self.now += seconds
        for name in heard:
            self.attendance.heard(self.now, name, self.sides[name].book.epoch)


def kinds(decisions: list[Decision]) -> list[str]:
    return [one.kind for one in decisions]
