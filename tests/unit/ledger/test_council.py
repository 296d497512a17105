"""The coordinator's book: what the log says next follows from what the members hold, and from nothing else."""

from dataclasses import replace

import pytest

from kvbus.ledger.agreement import Decision, Party
from kvbus.ledger.attendance import GONE_S
from kvbus.ledger.council import ADOPTED_S, LAG_S
from kvbus.ledger.facts import Fact
from kvbus.ledger.shares import SHARES_MAX, Acts, Heard, ShareStage
from tests.unit.council_parts import GIVEN_UP, LATE, WHOLE, House, kinds

# -------------------------------------------------------------------------------------------------- one transfer's life


# P10, R6
def test_a_transfer_is_settled_when_all_have_their_pages_and_shown_when_all_have_promised() -> None:
    house = House()
    house.open()
    house.bring("m0", hi=4)
    house.tell()
    assert house.turn() is None  # m1 has nothing yet
    house.bring("m1", hi=3)
    house.tell()
    settle = house.turn()
    assert settle is not None
    assert (settle.kind, settle.lo, settle.hi) == ("settle", 0, 3)
    house.read("m0")
    house.tell()
    assert house.turn() is None  # m1 has not promised
    house.read("m1")
    assert house.turn() is None  # nor has it said so
    house.tell("m1")
    visible = house.turn()
    assert visible is not None
    assert (visible.kind, visible.lo, visible.hi) == ("visible", 0, 3)
    house.read()
    assert [house.stage(name) for name in house.ranks] == [ShareStage.VISIBLE] * 2
    assert house.council.open_transfers == 1  # until both have said that they applied it
    house.tell()
    assert house.turn() is None
    assert house.council.open_transfers == 0


# contract 26
@pytest.mark.parametrize(
    ("ranges", "common"),
    [(((0, 8), (0, 3), (0, 5)), (0, 3)), (((2, 8), (0, 5), (1, 9)), (2, 5)), (((4, 8), (0, 3), (0, 9)), (0, 0))],
)
def test_the_bounds_are_what_every_rank_has(ranges: tuple[tuple[int, int], ...], common: tuple[int, int]) -> None:
    house = House(ranks=3)
    house.open()
    for name, (lo, hi) in zip(house.ranks, ranges, strict=True):
        house.bring(name, lo=lo, hi=hi)
    settle, visible = house.run()
    assert (settle.lo, settle.hi) == (visible.lo, visible.hi) == common


# P12
def test_decisions_name_each_member_under_its_own_ticket() -> None:
    house = House()
    house.open()
    tickets = {name: house.bring(name) for name in house.ranks}
    settle = house.run()[0]
    assert {party.member: party.ticket for party in settle.parties} == tickets
    assert {party.member: party.epoch for party in settle.parties} == {"m0": 10, "m1": 11}


# P11, P10
def test_one_rank_that_gave_its_share_up_voids_the_transfer_everywhere() -> None:
    house = House()
    house.open()
    house.bring("m0")
    house.bring("m1", bits=GIVEN_UP)
    void = house.run()[0]
    assert (void.kind, void.reason) == ("void", "m1 gave its share up")
    assert [house.stage(name) for name in house.ranks] == [ShareStage.VOID] * 2


# P11
def test_a_member_that_gave_up_between_its_report_and_the_settle_is_voided_and_nobody_shows() -> None:
    house = House()
    house.open()
    house.bring("m0")
    ticket = house.bring("m1")
    house.tell()
    house.sides["m1"].book.note(ticket, int(Fact.ABANDONED), 0, 4)  # its deadline passed
    settle = house.turn()
    assert settle is not None
    assert settle.kind == "settle"
    assert kinds(house.run()) == ["void"]
    assert [house.stage(name) for name in house.ranks] == [ShareStage.VOID] * 2


# P10, contract 48
def test_a_member_that_starts_again_voids_what_its_last_run_had_promised() -> None:
    house = House()
    house.open()
    house.bring("m0")
    house.bring("m1")
    house.tell()
    assert house.turn() is not None
    house.read()
    house.restart("m1")
    house.tell("m0")
    void = house.turn()
    assert void is not None
    assert void.kind == "void"
    assert "m1 started again" in void.reason


# contract 48
def test_a_report_of_a_run_that_was_replaced_advances_nothing() -> None:
    house = House()
    house.open()
    house.bring("m0")
    house.bring("m1")
    old = house.report_of("m1")
    house.restart("m1")
    house.council.report(house.now, old)
    house.tell("m0")
    assert house.turn() is not None
    assert house.log[-1].kind == "void"


# P17
def test_two_results_of_one_member_are_a_contradiction_and_void_it() -> None:
    house = House()
    house.open()
    house.bring("m0")
    house.bring("m1", bits=WHOLE | int(Fact.CANCELLED))
    assert "two different results" in house.run()[0].reason


# P17
def test_two_different_bounds_of_one_member_are_a_contradiction_and_void_it() -> None:
    house = House()
    house.open()
    house.bring("m1", hi=4)
    house.tell()
    report = house.report_of("m1")
    others = tuple(replace(share, hi=3) for share in report.shares)
    house.council.report(house.now, replace(report, shares=others))
    house.bring("m0")
    house.tell()
    void = house.turn()
    assert void is not None
    assert void.kind == "void"
    assert "m1 gave two different bounds" in void.reason


def test_an_older_report_changes_nothing_once_a_newer_one_came() -> None:
    house = House()
    house.open()
    early = house.report_of("m1")
    house.bring("m0")
    house.bring("m1")
    house.tell()
    house.council.report(house.now, early)
    assert house.turn() is not None
    assert house.log[-1].kind == "settle"


def test_a_transfer_on_which_the_members_do_not_agree_in_time_is_voided() -> None:
    house = House()
    house.open(give_up_at=20.0)
    house.bring("m0")
    house.wait(20.0, "m0", "m1")
    house.tell()
    void = house.turn()
    assert void is not None
    assert void.reason == "the members did not agree in time"


def test_a_member_that_has_applied_the_open_and_holds_nothing_voids_it() -> None:
    house = House()
    house.open()
    report = house.report_of("m1")
    house.council.report(house.now, replace(report, shares=()))
    void = house.turn()
    assert void is not None
    assert void.reason == "m1 holds nothing of it"


def test_a_cancel_is_decided_before_all_else_and_what_arrived_is_settled() -> None:
    house = House()
    house.open()
    assert not house.council.cancel("unknown", "x")
    assert house.council.cancel("t", "no longer wanted")
    assert house.council.cancel("t", "asked twice")
    cancel = house.turn()
    assert cancel is not None
    assert (cancel.kind, cancel.reason) == ("cancel", "no longer wanted")
    house.read()
    assert all(side.acts[-1].stop is not None for side in house.sides.values())
    cancelled = int(Fact.TAKEN | Fact.CANCELLED | Fact.ACCESS_ENDED)
    for name in house.ranks:
        house.bring(name, bits=cancelled, hi=2)
    assert kinds(house.run()) == ["settle", "visible"]


# -------------------------------------------------------------------------------------------------------------- opening


# P12
def test_nothing_is_opened_while_a_member_is_not_there() -> None:
    house = House()
    house.run()
    assert house.council.propose("t", 100.0)
    house.wait(GONE_S + 1, "m0")
    house.tell("m0")
    assert house.turn() is None
    assert house.council.open_transfers == 1
    house.attendance.heard(house.now, "m1", 11)
    due = house.turn()
    assert due is not None
    assert due.kind == "open"


def test_a_proposal_that_waited_too_long_is_not_opened_any_more() -> None:
    house = House()
    house.run()
    assert house.council.propose("t", 5.0)
    house.wait(5.0, "m0", "m1")
    house.tell()
    assert house.turn() is None
    assert house.council.open_transfers == 0


# contract 50
def test_a_coordinator_keeps_so_many_transfers_and_no_more() -> None:
    house = House()
    house.run()
    assert all(house.council.propose(f"t{number}", LATE) for number in range(SHARES_MAX))
    assert not house.council.propose("one more", LATE)


# ------------------------------------------------------------------------------------------------------------ new terms


# P13
def test_a_new_coordinator_decides_nothing_before_every_member_has_reported_to_its_term() -> None:
    house = House(ranks=3)
    house.open()
    for name in house.ranks:
        house.bring(name)
    house.tell()
    assert house.turn() is not None
    before = house.report_of("m2")
    council = house.lead("m1", term=2)
    house.read("m1", "m0")
    house.tell("m1", "m0")
    assert house.turn() is None
    council.report(house.now, before)  # of the term before
    assert (house.turn(), council.leads) == (None, False)
    house.read("m2")
    house.tell("m2")
    due = house.turn()
    assert council.leads
    assert due is not None
    assert due.kind == "settle"


# P13, P15
def test_what_only_a_member_that_came_late_still_holds_is_decided_too() -> None:
    house = House()
    house.open()
    house.bring("m1")
    house.restart("m0")
    council = house.lead("m0", term=2)
    house.wait(GONE_S + 1, "m0")
    house.read("m0")
    house.tell("m0")
    assert (house.turn(), council.leads) == (None, True)  # m1 was not heard of, and nobody else knows of its share
    house.wait(1.0, "m0", "m1")
    house.tell("m1")  # before it has read the log: what it holds may be decided there
    assert house.turn() is None
    assert kinds(house.run()) == ["void"]
    assert house.stage("m1") is ShareStage.VOID
    assert council.open_transfers == 0


# P13
def test_a_new_coordinator_does_not_wait_for_a_member_that_is_not_heard_of() -> None:
    house = House()
    house.run()
    council = house.lead("m1", term=2)
    house.read("m1")
    house.wait(GONE_S, "m1")
    house.tell("m1")
    assert (house.turn(), council.leads) == (None, False)
    house.wait(1.0, "m1")
    assert house.turn() is None
    assert council.leads


# P15
def test_what_one_member_has_shown_is_decided_again_in_the_same_words() -> None:
    house = House(ranks=3)
    house.open()
    for name, hi in zip(house.ranks, (4, 3, 5), strict=True):
        house.bring(name, hi=hi)
    house.tell()
    assert house.turn() is not None
    house.read()
    house.tell()
    visible = house.turn()
    assert visible is not None
    house.read("m0")
    house.log.pop()  # the broker lost it with its power; m0 has applied it
    house.sides["m0"].read -= 1
    house.lead("m1", term=2)
    again = house.run()
    assert kinds(again) == ["visible"]
    assert (again[0].transfer, again[0].lo, again[0].hi) == ("t", visible.lo, visible.hi) == ("t", 0, 3)
    assert [house.stage(name) for name in house.ranks] == [ShareStage.VISIBLE] * 3
    assert house.sides["m0"].acts[-1] == Acts(Heard.APPLIED)  # it has shown them already


# P15
def test_what_one_member_has_voided_is_voided_again_though_the_others_could_go_on() -> None:
    house = House()
    house.open()
    house.bring("m1")
    ticket = house.bring("m0")
    house.sides["m0"].book.note(ticket, int(Fact.ABANDONED), 0, 4)
    house.tell()
    assert house.turn() is not None
    house.read("m0")
    house.log.pop()
    house.sides["m0"].read -= 1
    house.lead("m1", term=2)
    again = house.run()
    assert kinds(again) == ["void"]
    assert house.stage("m1") is ShareStage.VOID


# P15
def test_what_nobody_has_ended_goes_on_under_a_new_coordinator() -> None:
    house = House(ranks=3)
    house.open()
    for name in house.ranks:
        house.bring(name)
    house.tell()
    house.turn()
    house.read("m0")
    house.lead("m2", term=2)
    assert kinds(house.run()) == ["settle", "visible"]
    assert [house.stage(name) for name in house.ranks] == [ShareStage.VISIBLE] * 3


def test_a_transfer_of_which_a_party_is_gone_is_voided_by_a_new_coordinator() -> None:
    house = House()
    house.open()
    house.bring("m1")
    house.restart("m0")
    house.read("m0")
    house.lead("m1", term=2)
    house.attendance.heard(house.now, "m0", 110)
    assert kinds(house.run()) == ["void"]
    assert house.stage("m1") is ShareStage.VOID


def test_what_ended_alike_at_all_members_is_not_decided_again() -> None:
    house = House()
    house.open()
    for name in house.ranks:
        house.bring(name)
    house.run()
    house.lead("m1", term=2)
    assert house.run() == []
    assert house.council.open_transfers == 0


def test_an_adopted_transfer_gets_a_bounded_time() -> None:
    house = House()
    house.open()
    house.bring("m0")
    house.lead("m1", term=2)
    assert house.run() == []
    house.wait(ADOPTED_S, "m0", "m1")
    assert [one.reason for one in house.run()] == ["the members did not agree in time"]


# P13
def test_a_term_that_a_member_knows_to_be_higher_outranks_this_one() -> None:
    house = House()
    house.run()
    report = house.report_of("m1")
    house.council.report(house.now, replace(report, term=7))
    assert house.council.outranked_by == 7


# P13
def test_a_coordinator_that_was_not_appended_has_decided_nothing() -> None:
    house = House()
    house.open()
    for name in house.ranks:
        house.bring(name)
    house.tell()
    zombie, wanted = house.council, house.council.next(house.now)
    assert wanted is not None
    house.lead("m1", term=2)  # in between; the fence refuses the zombie
    assert zombie.next(house.now) == wanted
    assert kinds(house.run()) == ["settle", "visible"]
    assert house.sides["m1"].book.hear(wanted).heard is Heard.REFUSED


# -------------------------------------------------------------------------------------------------------- who is behind


# P25
def test_a_member_that_lives_and_lags_makes_the_record_due_and_one_that_keeps_up_does_not() -> None:
    house = House()
    house.open()
    assert not house.council.is_unheard(house.now)
    house.wait(LAG_S - 0.1, "m0", "m1")
    house.tell()
    assert not house.council.is_unheard(house.now)
    house.wait(0.1, "m0", "m1")
    assert not house.council.is_unheard(house.now)  # all had applied what stood there at the look before
    house.bring("m0", bits=GIVEN_UP)
    house.tell("m0")
    assert house.turn() is not None
    house.wait(LAG_S, "m0", "m1")
    assert not house.council.is_unheard(house.now)  # written since that look
    house.wait(LAG_S, "m0", "m1")
    house.read("m0")
    house.tell("m0")
    assert house.council.is_unheard(house.now)


# P15
def test_a_member_whom_the_record_does_not_help_makes_a_new_term_due() -> None:
    house = House()
    house.open()
    house.bring("m0", bits=GIVEN_UP)
    house.tell("m0")
    assert house.turn() is not None  # m1 will never read this: the log lost it
    for _ in range(4):
        house.wait(LAG_S, "m0", "m1")
        house.read("m0")
        house.tell()
        if house.council.is_unheard(house.now):
            house.append(house.council.term_record())
    assert house.council.outranked_by == 1


def test_a_member_that_is_not_heard_of_is_not_waited_for() -> None:
    house = House()
    house.run()
    assert not house.council.is_unheard(house.now)
    house.council.propose("t", LATE)
    house.turn()
    house.wait(LAG_S, "m0", "m1")
    house.council.is_unheard(house.now)
    house.wait(GONE_S + 1, "m0")
    house.read("m0")
    house.tell("m0")
    assert not house.council.is_unheard(house.now)


def test_an_ended_transfer_keeps_its_place_until_whoever_lives_has_applied_the_end() -> None:
    house = House()
    house.open()
    house.bring("m0", bits=GIVEN_UP)
    house.tell("m0")
    assert house.turn() is not None
    house.read("m0")
    house.tell("m0")
    assert house.turn() is None
    assert house.council.open_transfers == 1
    house.wait(GONE_S + 1, "m0")
    house.tell("m0")
    assert house.turn() is None
    assert house.council.open_transfers == 0


def test_the_record_names_who_leads() -> None:
    house = House()
    assert house.log[0] == Decision("term", "", 1, 1, "", (Party("m0", 10, 0, 0),))
    house.run()
    house.append(house.council.term_record())
    house.read()
    assert house.sides["m1"].book.coordinator == ("m0", 10)
    assert house.sides["m1"].book.place == (1, 2)
