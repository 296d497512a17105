"""What `audit`, `story` and `watch` make of an instance with two members: `visible` returns leases, `settle` does not.

The trail is made by hand: members m0 and m1 of instance b each read three pages for one transfer, m0 leads in term 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from kvbus.commands.auditing import Audit, Verdict, audit
from kvbus.commands.leases import LeaseBook
from kvbus.commands.recordings import Record
from kvbus.commands.rules import Rule
from kvbus.commands.stories import Story, tell
from kvbus.commands.trails import in_order
from kvbus.commands.wording import lines_of
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
    TransferStep,
    column,
    decode,
    encode,
)
from kvbus.ledger.facts import Evidence, Fact
from kvbus.parts import Body
from kvbus.topics import Family
from tests.tampering import Copy, beginning, id_in, turned_on
from tests.unit.story_parts import BEGAN_NS

TRANSFER = "b-00000007-1"
HASH = "9f3c" + "0" * 28
EPOCHS = {"m0": 7, "m1": 9}
OTHER_RUN = 11
PAGES = 3
ARRIVED = Fact.TAKEN | Fact.GRANTED | Fact.SUBMITTED | Fact.DELIVERED | Fact.ACCESS_ENDED | int(Evidence.COMPLETED)
GIVEN_UP = ARRIVED | Fact.ABANDONED
ROWS = (("m0", 7, 0, 1), ("m1", 9, 1, 1))
NO_TICKETS = (("m0", 7, 0, 0), ("m1", 9, 1, 0))


@dataclass
class Trail:
    """Events as they happened; every member has a clock of its own."""

    events: list[Event] = field(default_factory=list)
    clocks_ns: dict[str, int] = field(default_factory=dict)
    term: int = 1
    n: int = 0
    previous: str = ""

    def say(self, member: str, body: Body, *, epoch: int = 0) -> Event:
        number = len(self.events) + 1
        at_ns = BEGAN_NS + number * 1_000_000 + self.clocks_ns.get(member, 0)
        header = Header(k=body.KIND, i="b", m=member, e=epoch or EPOCHS[member], s=number, t=at_ns)
        event = decode(encode(header, body))
        self.events.append(event)
        return event

    def decide(self, speaker: str, kind: Callable[..., Body], **fields: object) -> Event:
        """Append to the settle log."""
        self.n += 1
        event = self.say(speaker, kind(term=self.term, n=self.n, previous=self.previous, **fields))
        self.previous = f"{self.term}.{self.n}"
        return event

    def lead(self, member: str) -> Event:
        return self.decide(member, TermTaken, member=member, epoch=EPOCHS[member])

    def facts(self, member: str, bits: int, *, ticket: int = 1) -> Event:
        blocks = PAGES if bits & Fact.DELIVERED else 0
        numbers, told = column([ticket], 8), column([int(bits)], 4)
        lo, hi, rank = column([0], 4), column([blocks], 4), column([list(EPOCHS).index(member)], 2)
        return self.say(member, FactsSeen(n=1, ticket=numbers, rank=rank, bits=told, lo=lo, hi=hi))

    def open(self, member: str = "m0") -> Event:
        return self.decide(member, TransferOpened, transfer=TRANSFER, members=NO_TICKETS)

    def settle(self, member: str = "m0", *, hi: int = PAGES) -> Event:
        return self.decide(member, SettleDecided, transfer=TRANSFER, lo=0, hi=hi, members=ROWS)

    def visible(self, member: str = "m0", *, hi: int = PAGES) -> Event:
        return self.decide(member, MadeVisible, transfer=TRANSFER, lo=0, hi=hi, members=ROWS)

    def void(self, member: str = "m0") -> Event:
        return self.decide(member, SettleVoided, transfer=TRANSFER, reason="m1 gave its share up", members=ROWS)

    def bring(self, member: str) -> None:
        """Lease pages for the transfer, and read them whole."""
        self.facts(member, Fact.TAKEN)
        pages, counters = column(range(PAGES), 4), column([1] * PAGES, 8)
        self.say(
            member,
            LeaseGranted(
                ticket=1,
                transfer=TRANSFER,
                rank=list(EPOCHS).index(member),
                direction="write",
                lender="pool",
                peer="a",
                pages=pages,
                counters=counters,
            ),
        )
        self.say(member, AttemptMade(ticket=1, attempt=1, binding="memory", peer="a"))
        self.facts(member, Fact.TAKEN | Fact.GRANTED | Fact.SUBMITTED)
        self.say(
            member,
            OutcomeFixed(ticket=1, attempt=1, result="delivered", arrived=PAGES, length_bytes=99, evidence="completed"),
        )
        self.facts(member, ARRIVED)

    def give_back(self, member: str) -> None:
        self.facts(member, ARRIVED | Fact.SETTLED)
        self.facts(member, ARRIVED | Fact.SETTLED | Fact.CONSUMED | Fact.RETURNED)

    def give_up(self, member: str) -> None:
        self.facts(member, GIVEN_UP | Fact.SETTLED)
        self.facts(member, GIVEN_UP | Fact.SETTLED | Fact.RETURNED)

    def go_on(self) -> None:
        """Both members record later batches: whatever is due has been recorded by now."""
        for member in EPOCHS:
            for ticket in (2, 3):
                self.facts(member, Fact.TAKEN, ticket=ticket)

    def record(self) -> Record:
        """Write it down as the broker holds it."""
        return Copy(self.events).record()

    def stored(self) -> Record:
        """Write it down with the members' own clocks."""
        record = self.record()
        for place, event in enumerate(self.events):
            told = replace(event, header=decode(record.stored[place].data).header)
            header = told.header.model_copy(update={"t": event.header.t})
            object.__setattr__(record.stored[place], "data", encode(header, told.body))  # type: ignore[arg-type]
        return record


def opened(trail: Trail | None = None) -> Trail:
    trail = trail or Trail()
    trail.lead("m0")
    trail.say("m0", TransferStep(transfer=TRANSFER, request_hash=HASH, step="accepted"))
    trail.open()
    for member in EPOCHS:
        trail.bring(member)
    return trail


def whole() -> Trail:
    trail = opened()
    trail.settle()
    trail.visible()
    for member in EPOCHS:
        trail.give_back(member)
    trail.go_on()
    return trail


def refuted(trail: Trail, rule: Rule, first: Event) -> Audit:
    record = trail.record()
    result = audit(record)
    assert result.verdict is Verdict.REFUTED, result.reasons
    assert result.first is not None
    assert (result.first.rule, result.first.event.header.event_id) == (rule, id_in(record, first)), result.first.text
    return result


def clean(record: Record) -> Audit:
    result = audit(record)
    assert (result.verdict, result.offences, result.reasons) == (Verdict.CLEAN, (), ())
    return result


# ------------------------------------------------------------------------------------------------------- what is clean


def test_a_transfer_that_both_members_settled_and_showed_is_clean() -> None:
    result = clean(whole().record())

    assert (result.runs, result.leases, result.returned) == (2, 6, 2)


def test_a_voided_transfer_is_clean_and_its_pages_go_back_free() -> None:
    trail = opened()
    trail.void()
    for member in EPOCHS:
        trail.give_up(member)
    trail.go_on()

    assert clean(trail.record()).returned == 2


def test_a_settled_transfer_may_yet_be_voided() -> None:
    trail = opened()
    trail.settle()
    trail.void()
    for member in EPOCHS:
        trail.give_up(member)
    trail.go_on()

    clean(trail.record())


def test_a_cancelled_transfer_is_settled_with_what_arrived() -> None:
    trail = opened()
    trail.decide("m0", CancelDecided, transfer=TRANSFER, reason="cancelled by gateway")
    trail.settle()
    trail.visible()
    for member in EPOCHS:
        trail.give_back(member)
    trail.go_on()

    clean(trail.record())


def test_a_member_that_had_all_of_it_takes_part_without_a_lease() -> None:
    trail = Trail()
    trail.lead("m0")
    trail.open()
    trail.bring("m0")
    rows = (("m0", 7, 0, 1), ("m1", 9, 1, 0))
    trail.decide("m0", SettleDecided, transfer=TRANSFER, lo=0, hi=PAGES, members=rows)
    trail.decide("m0", MadeVisible, transfer=TRANSFER, lo=0, hi=PAGES, members=rows)
    trail.give_back("m0")

    assert clean(trail.record()).leases == 1


# P15
def test_what_a_successor_decides_again_in_the_same_words_is_clean() -> None:
    trail = opened()
    trail.settle()
    trail.visible()
    trail.give_back("m0")
    trail.term = 2
    trail.lead("m1")
    trail.visible("m1")
    trail.give_back("m1")
    trail.go_on()

    clean(trail.record())


@pytest.mark.parametrize("behind_s", [-3_600, 3_600])
def test_clocks_that_differ_between_members_spoil_nothing(behind_s: int) -> None:
    trail = opened(Trail(clocks_ns={"m1": behind_s * 1_000_000_000}))
    trail.settle()
    trail.term = 2
    trail.lead("m1")
    trail.settle("m1")
    trail.visible("m1")
    for member in EPOCHS:
        trail.give_back(member)
    trail.go_on()

    clean(trail.stored())


def test_a_lease_that_waits_for_its_visible_decision_is_out_and_explained() -> None:
    trail = opened()
    trail.settle()
    trail.go_on()
    result = clean(trail.record())

    waiting = [out for out in result.out if out.life.transfer == TRANSFER]
    assert [str(out.life.key) for out in waiting] == ["T1@b", "T1@b/m1"]
    assert {out.why for out in waiting} == {"it waits for the settle decision"}


# --------------------------------------------------------------------------------------------------- what is refuted


# P10
@pytest.mark.parametrize("member", EPOCHS)
def test_a_return_upon_settle_alone_is_refuted(member: str) -> None:
    trail = opened()
    trail.settle()
    trail.give_back(member)
    returned = trail.events[-1]
    trail.go_on()

    result = refuted(trail, Rule.SETTLED, returned)
    assert result.first is not None
    assert f"no `visible` or `void` about {TRANSFER} precedes it" in result.first.text


# P10
def test_a_coordinator_that_returns_before_its_own_visible_decision_is_refuted() -> None:
    trail = opened()
    trail.settle()
    trail.give_back("m0")
    returned = trail.events[-1]
    trail.visible()
    trail.give_back("m1")
    trail.go_on()

    refuted(trail, Rule.SETTLED, returned)


# P10
def test_visible_without_a_settle_before_it_is_refuted() -> None:
    trail = opened()
    visible = trail.visible()
    for member in EPOCHS:
        trail.give_back(member)
    trail.go_on()

    refuted(trail, Rule.ONE_END, visible)


def test_visible_of_a_transfer_that_was_never_opened_is_refuted() -> None:
    trail = Trail()
    trail.lead("m0")
    for member in EPOCHS:
        trail.bring(member)
    visible = trail.visible()

    refuted(trail, Rule.DECIDED, visible)


# P11, P15
@pytest.mark.parametrize("first", ["visible", "void"])
def test_visible_and_void_of_one_transfer_are_refuted(first: str) -> None:
    trail = opened()
    trail.settle()
    second = [trail.visible, trail.void] if first == "visible" else [trail.void, trail.visible]
    before, wrong = (decide() for decide in second)

    result = refuted(trail, Rule.ONE_END, wrong)
    assert result.first is not None
    assert result.first.other_event is not None
    assert result.first.other_event.header.event_id == id_in(trail.record(), before)
    assert result.first.proved


# P15, P17
def test_other_bounds_than_those_that_were_settled_are_refuted() -> None:
    trail = opened()
    trail.settle()
    wrong = trail.visible(hi=PAGES - 1)

    result = refuted(trail, Rule.ONE_END, wrong)
    assert result.first is not None
    assert "was settled with blocks 0 to 3, by event" in result.first.text


# P13
def test_a_decision_of_a_lower_term_behind_a_higher_one_is_refuted_and_named() -> None:
    trail = opened()
    higher = trail.say("m1", TermTaken(term=2, n=3, previous="1.2", member="m1", epoch=9))
    late = trail.settle()

    result = refuted(trail, Rule.TERM, late)
    assert result.first is not None
    assert result.first.other_event is not None
    assert result.first.other_event.header.event_id == id_in(trail.record(), higher)


# P12
def test_a_decision_about_another_run_than_was_opened_is_refuted() -> None:
    trail = opened()
    rows = (ROWS[0], ("m1", OTHER_RUN, 1, 1))
    wrong = trail.decide("m0", SettleDecided, transfer=TRANSFER, lo=0, hi=PAGES, members=rows)

    refuted(trail, Rule.DECIDED, wrong)


# 11
def test_a_lease_in_two_transfers_is_refuted() -> None:
    trail = whole()
    trail.decide("m0", TransferOpened, transfer="b-00000007-2", members=NO_TICKETS)
    wrong = trail.decide("m0", SettleVoided, transfer="b-00000007-2", reason="late", members=ROWS)

    refuted(trail, Rule.DECIDED, wrong)


def test_a_missing_decision_is_a_hole_and_not_an_offence() -> None:
    trail = opened()
    trail.settle()
    visible = trail.visible()
    for member in EPOCHS:
        trail.give_back(member)
    result = audit(Copy(trail.events).without(visible).record())
    trail.settle()
    gap = audit(Copy(trail.events).without(visible).record())

    assert result.verdict is Verdict.REFUTED, "nothing shows that a decision is missing at the end of the log"
    assert gap.verdict is Verdict.INCOMPLETE
    assert "decision 4 of b, term 1, is not recorded" in "\n".join(gap.reasons)


# ---------------------------------------------------------------------------------------------- order, story and words


def test_decisions_keep_the_order_of_their_log_whatever_the_clocks_say() -> None:
    trail = opened(Trail(clocks_ns={"m1": -(10**12)}))
    trail.settle()
    trail.term = 2
    trail.lead("m1")
    trail.visible("m1")
    ordered = in_order(reversed(trail.events))

    log = [event.header.k for event in ordered if event.header.k in {"term", "open", "settle", "visible"}]
    assert log == ["term", "open", "settle", "term", "visible"]
    assert sorted(ordered, key=lambda event: event.header.s) == trail.events


def test_runs_whose_decisions_contradict_their_own_order_are_told_all_the_same() -> None:
    trail = Trail()
    for member, n in (("m0", 4), ("m1", 2), ("m0", 1), ("m1", 3)):
        trail.say(member, TermTaken(term=1, n=n, previous="", member=member, epoch=EPOCHS[member]))

    assert len(in_order(trail.events)) == 4


def test_the_story_of_a_transfer_names_each_members_lease() -> None:
    story = tell(whole().events, TRANSFER)

    assert isinstance(story, Story)
    assert not story.contradictions
    assert [(str(told.life.key), told.returned) for told in story.leases] == [("T1@b", True), ("T1@b/m1", True)]
    assert "the settle decision" not in " ".join(story.missing)


def test_the_story_of_a_settled_transfer_says_that_its_leases_wait() -> None:
    trail = opened()
    trail.settle()
    story = tell(trail.events, "T1@b/m1")

    assert isinstance(story, Story)
    assert story.transfer == TRANSFER
    assert {told.out for told in story.leases} == {"it waits for the settle decision"}


def test_the_story_says_what_contradicts_itself() -> None:
    trail = opened()
    trail.settle()
    trail.visible()
    trail.void()
    story = tell(trail.events, TRANSFER)

    assert isinstance(story, Story)
    assert [text for text in story.contradictions if "is voided by event" in text]


def test_every_decision_has_a_line() -> None:
    trail = opened()
    trail.settle()
    trail.visible()
    trail.decide("m0", CancelDecided, transfer=TRANSFER, reason="cancelled by gateway")
    trail.void()
    book = LeaseBook(keep_returned=True)
    lines = [line for event in trail.events for line in lines_of(event, book) if "#" in line.subject]

    assert [(line.subject, line.text) for line in lines] == [
        ("term #1", "m0 leads, in term 1"),
        ("open #2", "m0 rank 0, m1 rank 1"),
        ("settle #3", "blocks 0–3"),
        ("visible #4", "blocks 0–3"),
        ("cancel #5", "cancelled by gateway"),
        ("void #6", "m1 gave its share up"),
    ]
    assert not any(turned_on(event, Fact.RETURNED) for event in trail.events)


# --------------------------------------------------------------------------------------------- logs that begin late


def cuts_of(record: Record) -> list[tuple[int, int]]:
    """All pairs of places where both logs may begin."""
    facts, settle = (sum(one.family is log for one in record.stored) for log in (Family.FACTS, Family.SETTLE))
    return [(first, second) for first in range(facts + 1) for second in range(settle + 1) if first or second]


def test_wherever_the_logs_of_several_members_begin_what_is_there_is_clean_since_then() -> None:
    voided = opened()
    voided.void()
    for member in EPOCHS:
        voided.give_up(member)
    voided.go_on()
    for record in (whole().record(), voided.record()):
        for facts, settle in cuts_of(record):
            result = audit(beginning(record, facts=facts, settle=settle))
            assert result.verdict is Verdict.CLEAN_SINCE, (facts, settle, result.offences, result.reasons)


def test_what_began_before_the_log_and_waits_for_its_decision_is_not_about_to_come_back() -> None:
    record = opened().record()
    assert len(clean(record).out) == 2
    for facts, settle in cuts_of(record):
        result = audit(beginning(record, facts=facts, settle=settle))
        assert (result.verdict, result.reasons) == (Verdict.CLEAN_SINCE, ()), (facts, settle)
