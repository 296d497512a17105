"""The round: what is agreed is returned in the same round; what is voided is given up first, so that nothing counts."""

import asyncio

from kvbus.ledger.agreement import Agreement, Decision, Party
from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import Evidence, Fact, FactDetail, LeaseFacts, OutcomeRow
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Delivered, Direction, SubmitMode
from kvbus.roles.rounds import Rounds
from kvbus.testing.ledger_parts import ListedLender, ManualBackend

PULL = SubmitMode("pull", Direction.WRITE)


class Sink:
    """Keeps what a round recorded."""

    def __init__(self) -> None:
        self.batches: list[LeaseFacts] = []
        self.decisions: list[Decision] = []

    def facts(self, facts: LeaseFacts) -> None:
        self.batches.append(facts)

    def decision(self, decision: Decision) -> None:
        self.decisions.append(decision)


class Follower:
    """Runs a round from inside a round, as a transfer does."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds
        self.bits: dict[int, int] = {}

    def on_line(self, ticket: int, bits: int, lo: int, hi: int) -> None:
        del lo, hi
        self.bits[ticket] = self.bits.get(ticket, 0) | bits
        self.rounds.run()

    def on_outcome(self, row: OutcomeRow) -> None:
        del row

    def on_detail(self, detail: FactDetail) -> None:
        del detail


class Town:
    """One member with one lender and one backend, both driven by hand."""

    def __init__(self, *, follower: bool = True) -> None:
        self.lender, self.backend, self.sink = ListedLender(), ManualBackend("pull"), Sink()
        holder = LeaseHolder(bindings=[Binding("pull", self.backend, Direction.WRITE)], lenders=[self.lender])
        self.rounds = Rounds(holder=holder, agreement=Agreement(term=1), sink=self.sink, member="m0", epoch=7)
        self.follower = Follower(self.rounds)
        if follower:
            self.rounds.follow(self.follower)

    def take(self, rows: int = 2) -> int:
        ticket = self.rounds.holder.take(self.lender.lend(Direction.WRITE, rows), PULL, "grant", now=0.0, peer="a")
        self.rounds.run()
        return ticket


def test_a_lease_that_no_transfer_shares_is_settled_and_returned_at_once() -> None:
    town = Town()
    ticket = town.take()
    town.backend.answer(ticket, Delivered((True, True), 2), Evidence.COMPLETED)
    town.rounds.run()
    assert town.rounds.holder.tickets() == set()
    assert town.follower.bits[ticket] & (Fact.RETURNED | Fact.CONSUMED) == Fact.RETURNED | Fact.CONSUMED
    assert not town.sink.decisions


def test_a_transfers_lease_goes_back_by_its_decision_and_both_are_recorded() -> None:
    town = Town()
    ticket = town.take()
    town.rounds.decide(lambda agreement: agreement.open("t", (Party("m0", 7, 0, ticket),)))
    town.backend.answer(ticket, Delivered((True, False), 1), None)
    town.rounds.run()
    assert town.rounds.holder.tickets() == {ticket}  # the bytes are here; who may still touch them is not known
    town.backend.end(ticket)
    town.rounds.run()
    assert [decision.kind for decision in town.sink.decisions] == ["open", "settle"]
    assert town.rounds.holder.tickets() == set()


def test_what_is_voided_goes_back_without_content() -> None:
    # P10: two bounds from one party; the rows arrived, and none of them may count
    town = Town()
    ticket = town.take()
    town.rounds.decide(lambda agreement: agreement.open("t", (Party("m0", 7, 0, ticket), Party("m1", 9, 0, 1))))
    town.backend.answer(ticket, Delivered((True, True), 2), Evidence.COMPLETED)
    town.rounds.run()
    assert town.rounds.holder.tickets() == {ticket}  # the other member has not reported
    agreement = town.rounds.agreement
    agreement.report(("m1", 9, 1), int(Fact.DELIVERED), lo=0, hi=1)
    decision = agreement.report(("m1", 9, 1), int(Fact.DELIVERED), lo=0, hi=2)
    assert decision is not None
    town.rounds.apply(decision)
    town.rounds.run()
    assert town.follower.bits[ticket] & Fact.RETURNED
    assert not town.follower.bits[ticket] & Fact.CONSUMED
    assert not town.lender.content


def test_a_decision_about_another_members_ticket_of_the_same_number_touches_nothing_here() -> None:
    town = Town()
    ticket = town.take()
    town.rounds.apply(Decision("settle", "t", 1, 1, "", (Party("m1", 9, 0, ticket),)))
    assert not town.rounds.holder.bits(ticket) & Fact.SETTLED
    town.rounds.apply(Decision("settle", "t", 1, 2, "", (Party("m0", 8, 0, ticket),)))  # our name, another epoch
    assert not town.rounds.holder.bits(ticket) & Fact.SETTLED


def test_those_who_wait_in_one_turn_share_one_round_and_find_their_leases_moved_on() -> None:
    town = Town()
    leases = [town.lender.lend(Direction.WRITE, 1) for _ in range(3)]

    async def one(number: int) -> int:
        ticket = town.rounds.holder.take(leases[number], PULL, "grant", now=0.0, peer="a")
        await town.rounds.shared()
        return town.rounds.holder.bits(ticket)

    async def all_at_once() -> list[int]:
        return await asyncio.gather(*(one(number) for number in range(3)))

    bits = asyncio.run(all_at_once())
    assert all(one & Fact.SUBMITTED for one in bits)
    assert [len(batch.lines) for batch in town.sink.batches] == [3, 3]  # taken, then granted and submitted


def test_a_round_that_somebody_ran_meanwhile_is_not_run_again_for_who_waits() -> None:
    town = Town()

    async def another() -> int:
        town.rounds.run()
        return town.rounds.statistics.rounds

    async def both() -> tuple[int, int]:
        _, before = await asyncio.gather(town.rounds.shared(), another())  # the first waits by then
        return before, town.rounds.statistics.rounds

    before, after = asyncio.run(both())
    assert after == before > 0


def test_a_round_with_nothing_left_to_do_asks_backends_and_lenders_no_more() -> None:
    town = Town(follower=False)
    town.rounds.run()
    assert town.rounds.statistics.rounds == 1  # nothing is known before it is asked for
    town.take()
    assert [len(batch.lines) for batch in town.sink.batches] == [1, 1]  # taken, then granted and submitted
    assert town.rounds.statistics.rounds == 3
