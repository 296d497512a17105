"""The picture of a cluster: what real members record comes to the same rows, in whatever order and however often."""

import os
import random

import pytest

from kvbus.columns import column
from kvbus.events import AttemptMade, Event, Header, HeartbeatSeen, InstanceRecord, SnapshotTaken
from kvbus.ledger.facts import Fact
from kvbus.parts import Body
from kvbus.picture.members import KEEP_NS, Members, PoolSaid
from kvbus.picture.transfers import ENDED_MAX
from kvbus.picture.whole import Picture
from kvbus.processes import identity
from kvbus.snapshots import HeldLeaseRow, OpenTransferRow
from tests.unit.picture_parts import FIRST_RUN, HASH, SECOND, SECOND_RUN, Teller


def picture(*events: Event) -> Picture:
    made = Picture()
    for event in events:
        made.hear(event)
    return made


def test_a_transfer_in_flight_shows_its_step_its_pages_and_its_lease() -> None:
    b = Teller()
    shown = picture(*b.life()[:5]).show()
    (transfer,) = shown.transfers
    assert (transfer.source, transfer.destination, transfer.step, transfer.text) == ("a", "b", "moving", "by ucx")
    assert (transfer.pages_asked, transfer.pages_moved) == (4, 4)
    (lease,) = shown.leases
    assert (lease.ticket, lease.direction, lease.peer, lease.pages, lease.stage) == (1, "write", "a", 4, "granted")
    assert lease.since_ns == SECOND + 2_000_000
    assert not shown.ended


def test_a_transfer_that_ended_leaves_no_row_but_its_outcome() -> None:
    shown = picture(*Teller().life()).show()
    assert (shown.transfers, shown.leases, shown.out_of_use) == ((), (), ())
    assert [row.outcome for row in shown.ended] == ["settled"]
    assert (shown.totals.outcomes, shown.totals.pages_moved, shown.totals.ended) == ({"settled": 1}, 4, 1)


@pytest.mark.parametrize("seed", range(20))
def test_order_and_repetition_change_nothing_in_the_end(seed: int) -> None:
    b = Teller()
    events = [event for number in range(1, 6) for event in b.life(number, f"b-{number}")]
    pick = random.Random(seed)
    heard = events + pick.choices(events, k=20)
    pick.shuffle(heard)
    shown, straight = picture(*heard).show(), picture(*events).show()
    assert (shown.transfers, shown.leases, shown.totals) == (straight.transfers, straight.leases, straight.totals)
    assert shown.ended == straight.ended


def test_a_later_run_of_a_member_ends_what_its_earlier_one_held_and_old_words_count_no_more() -> None:
    b, later = Teller(), Teller(epoch=SECOND_RUN, from_ns=9 * SECOND)
    first = b.life()
    made = picture(*first[:5], later.step("accepted", "b-2"))
    assert [row.transfer for row in made.show().transfers] == ["b-2"]
    assert not made.show().leases
    made.hear(first[1])
    made.hear(first[3])
    assert [row.transfer for row in made.show().transfers] == ["b-2"]
    assert not made.show().leases


def test_pages_whose_lease_nobody_waits_for_are_out_of_use_until_access_has_ended() -> None:
    b = Teller()
    made = picture(b.granted(7, pages=3), b.facts(7, Fact.TAKEN, Fact.GRANTED, Fact.SUBMITTED))
    assert not made.show().out_of_use
    made.hear(b.facts(7, Fact.CANCELLED, Fact.ABANDONED, failure="deadline", text="30 s have passed"))
    (row,) = made.show().out_of_use
    assert (row.pages, row.ticket, row.transfer, row.since_ns) == (3, 7, "b-1", b.now_ns)
    assert "nothing says that access has ended: 30 s have passed" in row.why
    made.hear(b.facts(7, Fact.ACCESS_ENDED))
    assert not made.show().out_of_use
    made.hear(b.facts(7, Fact.RETURN_FAILED))
    assert "return failed" in made.show().out_of_use[0].why


def test_a_pools_quarantine_is_shown_with_its_reason_and_since_when() -> None:
    made = Picture()
    made.pool(PoolSaid("a", "m0", pages=8, pages_quarantined=2, pages_spoiled=2), 5 * SECOND)
    made.pool(PoolSaid("a", "m0", pages=8, pages_quarantined=3, pages_spoiled=2), 6 * SECOND)
    (row,) = made.show().out_of_use
    assert (row.instance, row.pages, row.ticket, row.since_ns) == ("a", 3, 0, 5 * SECOND)
    assert "changed after they were sealed" in row.why
    assert made.show().out_of_use_pages == 3
    made.pool(PoolSaid("a", "m0", pages=8, pages_quarantined=0), 7 * SECOND)
    assert not made.show().out_of_use


def test_an_isolated_peer_stays_until_its_member_tries_with_it_again() -> None:
    b, a = Teller(), Teller("a")
    made = picture(a.step("accepted", "a-1"), b.facts(0, failure="peer_lost", peer="a", text="ucx: it does not move"))
    (row,) = made.show().isolated
    assert (row.instance, row.peer, row.why, row.runs_anew) == ("b", "a", "ucx: it does not move", False)
    made.hear(Teller("a", epoch=SECOND_RUN, from_ns=9 * SECOND).step("accepted", "a-2"))
    assert made.show().isolated[0].runs_anew
    made.hear(b(AttemptMade(ticket=3, attempt=1, binding="ucx", peer="a")))
    assert not made.show().isolated


def test_a_snapshot_brings_what_is_held_and_takes_what_is_not() -> None:
    b = Teller()
    gone, kept = b.life(1, "b-1")[:3], b.life(2, "b-2")[:3]
    made = picture(*gone, *kept)
    row = HeldLeaseRow(
        ticket=9, transfer="b-9", rank=0, direction="read", lender="pool", peer="c", bits=int(Fact.TAKEN),
        pages=column(range(5), 4),
    )  # fmt: skip
    old = HeldLeaseRow(ticket=2, transfer="b-2", rank=0, direction="write", lender="pool", peer="a", bits=3)
    opened = OpenTransferRow(transfer="b-2", request_hash=HASH, source="a", phase="moving")
    made.hear(
        b(
            SnapshotTaken(
                reason="asked", leases_held=2, leases=(old, row), transfers_running=1, transfers=(opened,),
                facts_sequence=1, settle_n=0,
            )
        )
    )  # fmt: skip
    shown = made.show()
    assert [(lease.ticket, lease.since_known) for lease in shown.leases] == [(2, True), (9, False)]
    assert [transfer.transfer for transfer in shown.transfers] == ["b-2"]


def test_a_snapshot_that_comes_late_takes_nothing_that_was_told_after_it() -> None:
    b = Teller()
    empty = b(SnapshotTaken(reason="asked", leases_held=0, transfers_running=0, facts_sequence=0, settle_n=0))
    made = picture(*b.life()[:4])
    made.hear(empty)
    assert len(made.show().leases) == len(made.show().transfers) == 1


def records(*names: str) -> list[tuple[Header, InstanceRecord]]:
    """What the registry holds while these instances are there."""
    record = InstanceRecord(
        verify_key=b"k" * 32, fingerprint="f", model="toy", engine="toy", block_tokens=32, ranks=1, page_bytes=64,
        pages=8, process=identity(os.getpid()), transports=("memory",), version="1",
    )  # fmt: skip
    return [(Header(k=record.KIND, i=name, m="m0", e=FIRST_RUN, s=1, t=1), record) for name in names]


def beat() -> Body:
    return HeartbeatSeen(
        transfers_running=0, leases_held=0, pages_free=8, pages_cached=0, pages_lent=0, facts_sequence=1, settle_n=0
    )


def test_a_member_that_is_registered_no_more_is_forgotten_with_all_that_it_held_but_not_at_once() -> None:
    b, now_ns = Teller(), 5 * SECOND
    made = picture(*b.life()[:4])
    made.pool(PoolSaid("b", "m0", pages=8, pages_quarantined=2), now_ns)
    made.registered(records("a", "b"), now_ns)
    made.registered(records("a"), now_ns + KEEP_NS)
    assert [(row.instance, row.registered) for row in made.show().members] == [("a", True), ("b", False)]
    made.registered(records("a"), now_ns + 2 * KEEP_NS)  # it was seen to be gone no longer than that
    assert len(made.show().leases) == len(made.show().transfers) == len(made.show().out_of_use) == 1
    made.registered(records("a"), now_ns + 2 * KEEP_NS + 1)
    shown = made.show()
    assert [row.instance for row in shown.members] == ["a"]
    assert (shown.leases, shown.transfers, shown.out_of_use) == ((), (), ())
    made.hear(b.step("accepted", "b-2"))  # and may come back
    assert [row.transfer for row in made.show().transfers] == ["b-2"]


def test_a_member_that_comes_back_or_speaks_is_gone_for_no_time() -> None:
    made, b = Picture(), Teller()
    made.registered(records("b"), 0)
    made.registered([], 1)
    made.registered(records("b"), 2)
    made.registered([], KEEP_NS)
    made.hear(b.step("accepted"))
    made.registered([], 2 * KEEP_NS)
    made.registered([], 3 * KEEP_NS)
    assert [row.instance for row in made.members()] == ["b"]
    made.registered([], 3 * KEEP_NS + 1)
    assert made.members() == ()


def test_members_that_are_registered_stand_before_all_that_are_gone() -> None:
    made = Picture()
    made.registered(records(*(f"gone-{number:02}" for number in range(60))))
    made.registered(records("z", "y"))
    assert [row.instance for row in made.show(3).members] == ["y", "z", "gone-00"]


def test_among_too_many_members_those_that_were_silent_longest_make_room() -> None:
    gone: list[tuple[str, str]] = []
    members = Members(gone.extend, members_max=4, room=2)
    tellers = [Teller(f"i{number}") for number in range(5)]
    for teller in (*tellers[:4], tellers[0], tellers[4]):
        header = teller(beat()).header
        assert members.hears(header)[0]
    assert set(gone) == {("i1", "m0"), ("i2", "m0")}
    for number in range(100):
        members.pool(PoolSaid(f"pool-{number}", "m0", pages=1), 0)
        assert len(members.rows()) <= 4
    assert members.hears(tellers[1](beat()).header) == (True, False)


def test_heartbeats_and_records_make_a_members_row() -> None:
    made, b = Picture(), Teller()
    event = b(
        HeartbeatSeen(
            transfers_running=1,
            leases_held=2,
            pages_free=3,
            pages_cached=4,
            pages_lent=1,
            facts_sequence=1,
            settle_n=0,
            state="draining",
        )
    )
    assert isinstance(event.body, HeartbeatSeen)
    made.beat(event.header, event.body)
    (row,) = made.members()
    assert (row.pages_free, row.leases_held, row.transfers_running, row.heard_ns) == (3, 2, 1, b.now_ns)
    assert (row.registered, row.pages_quarantined, row.state) == (False, None, "draining")
    made.beat(event.header, event.body.model_copy(update={"state": None}))
    assert made.members()[0].state == ""


def test_everything_is_bounded_and_the_rows_that_are_shown_are_those_that_matter() -> None:
    b = Teller()
    made = Picture()
    for number in range(ENDED_MAX + 50):
        made.hear(b.step("accepted", f"open-{number}"))
        made.hear(b.outcome(f"over-{number}"))
    shown = made.show(10)
    assert shown.transfers_count == ENDED_MAX + 50
    assert [row.transfer for row in shown.transfers][:2] == ["open-0", "open-1"]
    assert [row.transfer for row in shown.ended][:2] == [f"over-{ENDED_MAX + 49}", f"over-{ENDED_MAX + 48}"]
    assert len(made.show(ENDED_MAX * 2).ended) == ENDED_MAX
    assert shown.totals.outcomes == {"settled": ENDED_MAX + 50}


@pytest.mark.parametrize(("word", "told"), [("failed", 0), ("partial", 2), ("cancelled", 1)])
def test_outcomes_are_counted_by_their_words(word: str, told: int) -> None:
    b = Teller()
    shown = picture(b.outcome("b-1", word, moved=told), b.outcome("b-2")).show()
    assert shown.totals.outcomes == {word: 1, "settled": 1}
    assert shown.totals.pages_moved == 4 + told


def test_a_picture_knows_when_a_transfer_ran() -> None:
    b = Teller()
    made = picture(b.step("accepted"))
    assert made.span("b-1") == (b.now_ns, 0)
    made.hear(b.outcome())
    assert made.span("b-1") == (b.now_ns, b.now_ns)
    assert made.span("b-2") is None
