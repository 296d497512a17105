"""Statements of the contract that no other test names: what one holder, a pool and their parts do together."""

import os
import threading

from kvbus.dataplane.lending import LendingBackend
from kvbus.dataplane.reader import Outbox
from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import Evidence, Fact, FailureClass
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.transfer import AskSource, CloseKey, LeasePages, Read, Report, Transfer
from kvbus.ledger.types import Change, Direction, Lease, LeaseView, Lender, Order, SubmitMode
from kvbus.pool.memory import PoolMemory
from kvbus.roles.local import LocalBackend
from kvbus.testing.ledger_parts import ListedLender, ManualBackend
from tests.unit.helpers.contract_makers import NONCE, lending_case
from tests.unit.pool_parts import EPOCH, TOY, fill, names_of, small_lender


def test_one_holder_serves_a_peer_the_engine_and_a_third_party() -> None:
    # R1
    wakes: list[None] = []
    lending, local, theirs = (
        LendingBackend(wake=lambda: wakes.append(None)),
        LocalBackend(name="local"),
        ManualBackend(),
    )
    bindings = [
        Binding("lend", lending, Direction.READ),
        Binding("fill", local, Direction.WRITE),
        Binding("store", theirs, Direction.WRITE),
    ]
    lender = ListedLender()
    holder = LeaseHolder(bindings=bindings, lenders=[lender])
    with lending_case() as case:
        reader = case.order(1, 1, "b").hint
    leases = [lender.lend(Direction.READ), lender.lend(Direction.WRITE), lender.lend(Direction.WRITE)]
    tickets = [
        holder.take(lease, SubmitMode(name, lease.direction), hint, now=0.0, peer="b")
        for lease, name, hint in zip(leases, ("lend", "fill", "store"), (reader, "engine", "any"), strict=True)
    ]
    holder.advance()
    for end in (
        lambda: lending.acknowledge(lending.readers()[0].key, NONCE),
        lambda: local.completed(tickets[1], whole=True, page_bytes=64),
        lambda: theirs.deliver(tickets[2]),
    ):
        end()
        holder.collect()
        holder.settle(tickets)
        holder.finish()
        holder.check()
    assert [lease.releases for lease in leases] == [1, 1, 1]


def test_a_backend_is_given_data_and_nobody_to_return_a_lease_to() -> None:
    # R3, R11
    lender, backend = ListedLender(), ManualBackend()
    holder = LeaseHolder(bindings=[Binding("pull", backend, Direction.WRITE)], lenders=[lender])
    lease = lender.lend(Direction.WRITE)
    ticket = holder.take(lease, SubmitMode("pull", Direction.WRITE), "go", now=0.0)
    holder.advance()
    given = [*backend.orders[ticket], *backend.orders[ticket].view]
    assert not [one for one in given if one is lease or one is lender or one is holder]
    assert not {Lease, Lender} & {*Order.__annotations__.values(), *LeaseView.__annotations__.values()}


def test_the_wake_signal_is_raised_under_no_lock() -> None:
    # contract 51, R9
    heard: list[Change] = []
    outbox = Outbox(lambda: heard.extend(outbox.drain()))  # would wait for itself for ever under the outbox's lock
    outbox.open((1, 1))
    reports = threading.Thread(target=lambda: outbox.report(Change(1, 1, evidence=Evidence.COMPLETED)), daemon=True)
    reports.start()
    reports.join(10.0)
    assert [change.evidence for change in heard] == [Evidence.COMPLETED]


def test_nothing_is_lent_by_a_name_that_was_forgotten_and_readers_run_on() -> None:
    # contract 24
    lender, names = small_lender(4), names_of(2)
    pages = fill(lender, names)
    reading = lender.lend_read(names[:1])
    view = reading.poll()
    lender.quarantine(pages)  # as after a change of weights: what is there may answer nobody any more
    later = lender.lend_read(names).poll()
    assert later is not None
    assert later.pages == ()
    assert reading.poll() is view
    reading.release()
    lender.check()


def test_asking_what_is_held_keeps_nothing() -> None:
    # contract 38
    lender, names = small_lender(4), names_of(2)
    fill(lender, names)
    before = lender.statistics()
    assert lender.held(names) == [True, True]
    assert lender.statistics() == before
    assert lender.evict(names) == 2  # nothing was reserved by the question
    short = lender.lend_read(names)
    assert short.failure is None
    assert lender.held(names) == [False, False]


def test_written_pages_are_found_by_nobody_before_they_are_given_back() -> None:
    # contract 25, contract 36
    lender, names = small_lender(6), names_of(3)
    lease = lender.lend_write(names, range(3))
    lease.poll()
    assert lender.held(names) == [False] * 3
    lease.mark_arrived([True, False, True])
    assert lender.held(names) == [False] * 3
    lease.release()
    assert lender.held(names) == [True, False, True]
    again = lender.lend_write(names, range(3))  # brings the missing block, and takes away none that is there
    again.poll()
    again.mark_arrived([False, True, False])
    again.release()
    assert lender.held(names) == [True] * 3
    lender.check()


def test_a_worker_begins_with_a_pool_of_its_own() -> None:
    # P8: nothing is ever adopted from a predecessor, so no old get can meet a page in use
    first, second = PoolMemory.create(TOY, 2, EPOCH), PoolMemory.create(TOY, 2, EPOCH + 1)
    assert os.fstat(first.fd).st_ino != os.fstat(second.fd).st_ino
    first.page_bytes(0)[:] = 7
    assert not second.page_bytes(0).any()
    assert (first.epoch, second.epoch) == (EPOCH, EPOCH + 1)


def test_an_undisturbed_transfer_asks_once_and_closes_once() -> None:
    # contract 52
    one = Transfer("t", "hash", "a", admitted_at=0.0, budget_s=30.0)
    actions = one.resolved(0.0, prompt_tokens=64, blocks_wanted=2, blocks_held=0, prefix_held=0)
    actions += one.leased(0.0, {1: 0})
    actions += one.granted(0.1, 2)
    one.arrived(1, 2, 128)
    ended = int(Fact.DELIVERED | Fact.ACCESS_ENDED | Fact.EVIDENCE_COMPLETED)
    actions += one.facts(0.2, 1, ended, 0, 2)
    actions += one.facts(0.3, 1, int(Fact.RETURNED), 0, 2)
    assert [type(action) for action in actions] == [LeasePages, AskSource, Read, CloseKey, Report]
    assert (one.outcome, one.failure) == ("settled", FailureClass.NONE)
