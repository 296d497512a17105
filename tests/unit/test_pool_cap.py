"""What peers take up, in whichever way, leaves the engine its longest prompt: lent, retained, quarantined and bound."""

from collections.abc import Callable

import pytest

from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.holding import holding_cost
from kvbus.ledger.types import Direction, SubmitMode
from kvbus.pool.lender import PoolLender
from kvbus.testing.ledger_parts import ManualBackend
from tests.unit.pool_parts import fill, names_of, small_lender

PAGES, LONGEST = 16, 6
CAP = PAGES - LONGEST


class Pool:
    """A pool whose leases a real holder has, between backends that a test drives."""

    def __init__(self) -> None:
        self.lender: PoolLender = small_lender(PAGES, LONGEST)
        self.pull, self.serve = ManualBackend("pull"), ManualBackend("serve")
        self.holder = LeaseHolder(
            bindings=[Binding("pull", self.pull, Direction.WRITE), Binding("serve", self.serve, Direction.READ)],
            lenders=[self.lender],
        )

    def round(self) -> None:
        self.holder.collect()
        self.holder.settle(self.holder.tickets())
        self.holder.advance()
        self.holder.finish()
        self.holder.check()
        self.lender.check()

    def writes(self, count: int, prompt: int = 2) -> int:
        lease = self.lender.lend_write(names_of(count, prompt), range(count))
        ticket = self.holder.take(lease, SubmitMode("pull", Direction.WRITE), "grant", now=0.0, peer="peer")
        self.round()
        return ticket

    def reads(self, count: int) -> int:
        fill(self.lender, names_of(count))
        lease = self.lender.lend_read(names_of(count))
        ticket = self.holder.take(lease, SubmitMode("serve", Direction.READ), "reader", now=0.0, peer="peer")
        self.round()
        return ticket


def lent_for_reading(pool: Pool) -> Callable[[], object]:
    ticket = pool.reads(4)
    return lambda: pool.serve.deliver(ticket, evidence=Evidence.PEER_ACK)


def lent_for_writing(pool: Pool) -> Callable[[], object]:
    ticket = pool.writes(4)
    return lambda: pool.pull.deliver(ticket)


def retained_reads(pool: Pool) -> Callable[[], object]:
    ticket = pool.reads(4)
    pool.holder.abandon(ticket, FailureClass.DEADLINE, "nobody waits")
    pool.round()
    assert holding_cost(pool.holder.statistics()).pages == 4
    return lambda: pool.serve.end(ticket, Evidence.PEER_ACK)


def retained_writes(pool: Pool) -> Callable[[], object]:
    ticket = pool.writes(4)
    pool.holder.abandon(ticket, FailureClass.DEADLINE, "the budget is spent")
    pool.round()
    assert holding_cost(pool.holder.statistics()).pages == 4
    return lambda: pool.pull.end(ticket)


def quarantined(pool: Pool) -> Callable[[], object]:
    pages = fill(pool.lender, names_of(4))
    pool.lender.quarantine(pages)
    return lambda: pool.lender.readmit(pages)


def released_unmarked(pool: Pool) -> Callable[[], object]:
    lease = pool.lender.lend_write(names_of(4, prompt=3), range(4))
    assert lease.poll() is not None
    lease.release()
    return lambda: lease.mark_arrived((False,) * 4)


WAYS = (lent_for_reading, lent_for_writing, retained_reads, retained_writes, quarantined, released_unmarked)


@pytest.mark.parametrize("take_up", WAYS)
def test_pages_count_however_peers_take_them_up_and_until_there_is_evidence(
    take_up: Callable[[Pool], Callable[[], object]],
) -> None:
    # P26, R18
    pool = Pool()
    give_up = take_up(pool)
    assert pool.lender.statistics().pages.claimed == 4
    for _ in range(10):
        pool.round()
    refused = pool.lender.refusal(CAP - 3)
    assert refused is not None
    assert "4 of at most 10 are lent, retained, quarantined" in refused.text
    assert pool.lender.refusal(CAP - 4) is None
    give_up()
    pool.round()
    assert pool.lender.statistics().pages.claimed == 0
    assert pool.lender.refusal(CAP) is None


def test_all_of_them_count_together_and_the_longest_prompt_still_fits() -> None:
    # P26
    pool = Pool()
    lent_for_reading(pool)
    retained_writes(pool)
    pool.lender.quarantine((pool.lender.pages_held(names_of(4))[0], 15, 14))
    assert pool.lender.statistics().pages.claimed == CAP
    assert pool.lender.lend_write(names_of(1, prompt=5), (0,)).failure is not None
    assert len(fill(pool.lender, names_of(LONGEST, prompt=6))) == LONGEST
    pool.lender.check()
