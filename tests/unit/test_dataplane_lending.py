"""The source's side of a read: only evidence ends what was lent."""

import asyncio
import sys
from pathlib import Path

import pytest

from kvbus.dataplane import lending
from kvbus.dataplane.lending import LendingBackend, Reader
from kvbus.events import ReaderKey
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import (
    Backend,
    Delivered,
    Direction,
    Failed,
    LeaseView,
    Order,
    SubmissionRejectedError,
)
from kvbus.processes import ProcessWatch, identity
from tests.waiting import until

SHAPES = Path(__file__).parent / "helpers" / "process_shapes.py"
NONCE = b"0123456789abcdef"


def key_of(transfer: str = "t1", *, member: str = "m0", epoch: int = 7, attempt: int = 1) -> ReaderKey:
    return ReaderKey(instance="B", member=member, epoch=epoch, transfer=transfer, attempt=attempt, rank=0)


def order_for(
    key: ReaderKey, *, ticket: int = 1, direction: Direction = Direction.READ, hint: object = None, nonce: bytes = NONCE
) -> Order:
    view = LeaseView("pool", 0, 5, (0, 1, 2), (b"a", b"b", b"c"), (4, 5, 6), (2, 2, 2))
    return Order(ticket, 1, view, direction, hint or Reader(key, nonce), "B", None)


class Lent:
    """A backend and how often it woke its owner."""

    def __init__(self) -> None:
        self.wakes = 0
        self.backend = LendingBackend(wake=self._wake)

    def _wake(self) -> None:
        self.wakes += 1


@pytest.fixture
def lent() -> Lent:
    return Lent()


def test_it_is_a_backend(lent: Lent) -> None:
    backend: Backend = lent.backend
    assert backend.name == "lending"
    assert backend.changes() == []


def test_the_readers_word_ends_the_lease(lent: Lent) -> None:  # contract 41, P4
    lent.backend.submit(order_for(key_of()))
    assert lent.backend.changes() == []
    assert lent.backend.acknowledge(key_of(), NONCE)
    (change,) = lent.backend.changes()
    assert change.evidence is Evidence.PEER_ACK
    assert change.result == Delivered((True, True, True), 0)
    assert (change.ticket, change.attempt) == (1, 1)
    assert lent.wakes == 1
    assert lent.backend.changes() == []


def test_a_repeated_word_is_confirmed_and_changes_nothing(lent: Lent) -> None:  # P18
    lent.backend.submit(order_for(key_of()))
    assert lent.backend.acknowledge(key_of(), NONCE)
    assert lent.backend.acknowledge(key_of(), NONCE)
    assert len(lent.backend.changes()) == 1
    assert lent.backend.statistics().repeated == 1


def test_a_word_without_the_grants_nonce_ends_nothing(lent: Lent) -> None:  # contract 48
    lent.backend.submit(order_for(key_of()))
    assert not lent.backend.acknowledge(key_of(), b"x" * 16)
    assert not lent.backend.acknowledge(key_of(), b"")
    assert not lent.backend.acknowledge(key_of("t2"), NONCE)
    assert lent.backend.changes() == []
    assert lent.backend.statistics().refused == 3
    assert lent.backend.acknowledge(key_of(), NONCE)
    assert not lent.backend.acknowledge(key_of(), b"x" * 16)


def test_the_first_of_two_readers_frees_only_its_own(lent: Lent) -> None:  # P4
    lent.backend.submit(order_for(key_of(member="m0"), ticket=1))
    lent.backend.submit(order_for(key_of(member="m1"), ticket=2))
    lent.backend.acknowledge(key_of(member="m0"), NONCE)
    assert [change.ticket for change in lent.backend.changes()] == [1]
    assert lent.backend.shutdown(0) == ((2, 1),)


def test_a_new_epoch_of_a_reader_never_vouches_for_an_old_one(lent: Lent) -> None:  # P4
    lent.backend.submit(order_for(key_of(epoch=7)))
    assert not lent.backend.acknowledge(key_of(epoch=8), NONCE)
    assert lent.backend.reader_died("B", "m0", 8) == 0
    assert lent.backend.changes() == []


def test_a_dead_reader_ends_all_of_its_leases_and_no_others(lent: Lent) -> None:  # P6
    lent.backend.submit(order_for(key_of("t1"), ticket=1))
    lent.backend.submit(order_for(key_of("t2"), ticket=2))
    lent.backend.submit(order_for(key_of("t3", member="m1"), ticket=3))
    assert lent.backend.reader_died("B", "m0", 7) == 2
    changes = lent.backend.changes()
    assert {change.ticket for change in changes} == {1, 2}
    assert all(change.evidence is Evidence.PROCESS_DEAD for change in changes)
    assert all(isinstance(change.result, Failed) for change in changes)
    assert lent.backend.acknowledge(key_of("t1"), NONCE)  # its last word, late on the way: confirmed, nothing more
    assert lent.backend.changes() == []


def test_a_grant_that_never_left_is_withdrawn(lent: Lent) -> None:
    lent.backend.submit(order_for(key_of()))
    assert lent.backend.withdraw(1)
    assert not lent.backend.withdraw(1)
    (change,) = lent.backend.changes()
    assert change.evidence is Evidence.NEVER_SUBMITTED


def test_cancel_isolation_and_shutdown_end_nothing(lent: Lent) -> None:  # contract 39, 40, P7
    lent.backend.submit(order_for(key_of()))
    lent.backend.cancel(1, 1)
    lent.backend.isolate("B")
    assert lent.backend.shutdown(0.0) == ((1, 1),)
    assert lent.backend.shutdown(5.0) == ((1, 1),)
    lent.backend.release_hold()
    assert lent.backend.changes() == []
    assert lent.backend.acknowledge(key_of(), NONCE)
    assert lent.backend.shutdown(0.0) == ()


def refusal_of(lent: Lent, order: Order) -> FailureClass:
    with pytest.raises(SubmissionRejectedError) as caught:
        lent.backend.submit(order)
    return caught.value.failure


def test_an_isolated_reader_gets_nothing_new_until_it_restarts(lent: Lent) -> None:
    lent.backend.submit(order_for(key_of()))
    lent.backend.isolate("B")
    assert refusal_of(lent, order_for(key_of("t2"), ticket=2)) is FailureClass.PEER_LOST
    lent.backend.submit(order_for(key_of("t2", epoch=8), ticket=2))


def test_one_key_is_lent_to_once(lent: Lent) -> None:  # P18
    lent.backend.submit(order_for(key_of()))
    assert refusal_of(lent, order_for(key_of(), ticket=2)) is FailureClass.LEASE_REFUSED
    lent.backend.acknowledge(key_of(), NONCE)
    assert refusal_of(lent, order_for(key_of(), ticket=3)) is FailureClass.LEASE_REFUSED


def test_only_read_leases_with_a_reader_are_lent(lent: Lent) -> None:
    assert refusal_of(lent, order_for(key_of(), direction=Direction.WRITE)) is FailureClass.GRANT_REFUSED
    assert refusal_of(lent, order_for(key_of(), hint="B")) is FailureClass.GRANT_REFUSED
    lent.backend.shutdown(0)
    assert refusal_of(lent, order_for(key_of())) is FailureClass.SHUTDOWN


def test_what_is_lent_and_remembered_is_bounded(lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "LENT_MAX", 2)
    monkeypatch.setattr(lending, "TOMBSTONES_MAX", 2)
    for n in (1, 2):
        lent.backend.submit(order_for(key_of(f"t{n}"), ticket=n))
    assert refusal_of(lent, order_for(key_of("t3"), ticket=3)) is FailureClass.LEASE_REFUSED
    for n in (1, 2, 3):
        if n == 3:
            lent.backend.submit(order_for(key_of("t3"), ticket=3))
        assert lent.backend.acknowledge(key_of(f"t{n}"), NONCE)
    assert lent.backend.statistics().tombstones == 2
    assert not lent.backend.acknowledge(key_of("t1"), NONCE)  # forgotten: counted, and nothing is freed by it


def test_it_says_who_may_be_reading(lent: Lent) -> None:
    lent.backend.submit(order_for(key_of()))
    assert [reader.key for reader in lent.backend.readers()] == [key_of()]
    assert "lent=1" in repr(lent.backend)


async def test_a_killed_reader_is_proved_dead_by_its_pidfd(lent: Lent) -> None:  # P6
    watch = ProcessWatch(asyncio.get_running_loop())
    pipe = asyncio.subprocess.PIPE
    reader = await asyncio.create_subprocess_exec(sys.executable, str(SHAPES), "plain", stdin=pipe, stdout=pipe)
    assert reader.stdout is not None
    assert await reader.stdout.readline() == b"ready\n"
    who = identity(reader.pid)
    lent.backend.submit(order_for(key_of(), hint=Reader(key_of(), NONCE, who)))
    assert watch.watch(who, lambda: lent.backend.reader_died("B", "m0", 7))
    reader.kill()
    await until(lambda: lent.wakes)
    await reader.communicate()
    (change,) = lent.backend.changes()
    assert change.evidence is Evidence.PROCESS_DEAD
    watch.close()


def checked_order(ticket: int = 1, *, epoch: int = 7, checked: bool = True) -> Order:
    key = key_of(f"t{ticket}", epoch=epoch)
    return order_for(key, ticket=ticket, hint=Reader(key, NONCE, checked=checked))


def test_a_reader_may_be_fenced_only_if_it_looks_and_is_isolated_in_its_epoch(lent: Lent) -> None:
    # P5, P16
    backend = lent.backend
    for ticket, epoch, checked in ((1, 7, True), (2, 7, False), (3, 8, True)):
        backend.submit(checked_order(ticket, epoch=epoch, checked=checked))
    assert "not isolated in epoch 7" in backend.fence_refusal(1, 1)
    backend.isolate_epoch("B", 7)
    assert backend.fence_refusal(1, 1) == ""
    assert "on the terms that it looks" in backend.fence_refusal(2, 1)
    assert "not isolated in epoch 8" in backend.fence_refusal(3, 1)
    assert backend.fence_refusal(1, 2) == backend.fence_refusal(9, 1) == "nothing is lent under it"
    with pytest.raises(SubmissionRejectedError):
        backend.submit(checked_order(4, epoch=7))
    backend.submit(checked_order(5, epoch=9))
    assert backend.changes() == []


def test_a_fenced_reader_stays_known_until_it_speaks_or_dies_and_changes_nothing_then(lent: Lent) -> None:
    # P5, P4, contract 48, 50
    backend = lent.backend
    for ticket in (1, 2):
        backend.submit(checked_order(ticket))
    backend.isolate_epoch("B", 7)
    for ticket in (1, 2):
        backend.fenced(ticket, 1)
    backend.fenced(2, 1)  # again, and of one that is unknown: nothing
    assert backend.statistics().fenced == 2
    assert backend.shutdown(0.0) == ((1, 1), (2, 1))
    assert not backend.acknowledge(key_of("t1"), b"another's nonce!")
    assert backend.acknowledge(key_of("t1"), NONCE)
    assert backend.acknowledge(key_of("t1"), NONCE), "a repeat"
    assert backend.reader_died("B", "m0", 7) == 0
    assert backend.statistics().fenced == 0
    assert backend.shutdown(0.0) == ()
    assert backend.changes() == [], "the holder has heard of their end before"


def test_fenced_readers_count_toward_the_bound_of_what_is_lent(lent: Lent, monkeypatch: pytest.MonkeyPatch) -> None:
    # contract 50
    monkeypatch.setattr(lending, "LENT_MAX", 1)
    lent.backend.submit(checked_order(1))
    lent.backend.isolate_epoch("B", 7)
    lent.backend.fenced(1, 1)
    with pytest.raises(SubmissionRejectedError, match="1 leases are lent"):
        lent.backend.submit(checked_order(2, epoch=8))
