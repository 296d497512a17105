"""One member's shares: decisions apply in the log's order and once, a promise is kept, an end ends a share for good."""

from hypothesis import given
from hypothesis import strategies as st

from kvbus.ledger.agreement import Decision, Party
from kvbus.ledger.facts import Evidence, Fact
from kvbus.ledger.shares import SHARES_MAX, Acts, Heard, ShareBook, ShareStage

WHOLE = int(Fact.TAKEN | Fact.GRANTED | Fact.DELIVERED | Fact.ACCESS_ENDED | Evidence.COMPLETED)
M0, M1 = Party("m0", 10, 0, 0), Party("m1", 20, 1, 0)
BOTH = (M0, M1)


class Log:
    """Chains decisions as a coordinator does."""

    def __init__(self, term: int = 1, n: int = 0, previous: str = "") -> None:
        self.term, self.n, self.previous = term, n, previous

    def say(
        self, kind: str, transfer: str = "t", *, parties: tuple[Party, ...] = BOTH, lo: int = 0, hi: int = 0
    ) -> Decision:
        self.n += 1
        decision = Decision(kind, transfer, self.term, self.n, self.previous, parties, lo, hi, reason="as asked")
        self.previous = decision.decision_id
        return decision

    def record(self, who: Party = M0) -> Decision:
        return self.say("term", "", parties=(who,))


def member() -> tuple[ShareBook, Log]:
    """Return m1 in a term that m0 leads."""
    book, log = ShareBook("m1", 20), Log()
    assert book.hear(log.record()).heard is Heard.APPLIED
    return book, log


def opened(transfer: str = "t", *, ticket: int = 5, bits: int = WHOLE) -> tuple[ShareBook, Log]:
    """Return m1 with a share that is leased, and of which this much is known."""
    book, log = member()
    begun = book.hear(log.say("open", transfer)).begin
    assert begun is not None
    assert begun.rank == 1
    book.leased(transfer, ticket)
    assert book.note(ticket, bits, 0, 4)
    return book, log


def stage(book: ShareBook, transfer: str = "t") -> ShareStage | None:
    share = book.of(transfer)
    return share.stage if share else None


# ------------------------------------------------------------------------------------------------------------ the order


# P15
def test_a_decision_is_applied_once_and_only_behind_the_one_that_it_names() -> None:
    book, log = member()
    first, second = log.say("open", "t"), log.say("open", "u")
    assert book.hear(second).heard is Heard.GAP
    assert book.of("u") is None
    assert book.hear(first).heard is Heard.APPLIED
    assert book.hear(first).heard is Heard.REPEATED
    other = Decision("open", "v", 1, second.n, "1.99", BOTH)  # the right number behind another decision
    assert book.hear(other).heard is Heard.GAP
    assert book.hear(second).heard is Heard.APPLIED
    assert book.place == (1, 3)
    assert book.live == 2


# P13
def test_a_lower_term_is_refused_and_its_decision_changes_nothing() -> None:
    book, log = opened()
    settle = log.say("settle", hi=4)
    assert book.hear(Log(2, log.n, log.previous).record(M1)).heard is Heard.APPLIED
    assert book.coordinator == ("m1", 20)
    assert book.hear(settle).heard is Heard.REFUSED
    assert stage(book) is ShareStage.OPEN


# P13
def test_a_higher_term_begins_with_its_record_and_with_nothing_else() -> None:
    book, _ = opened()
    later = Log(3, 40, "2.40")
    assert book.hear(later.say("void")).heard is Heard.GAP
    assert stage(book) is ShareStage.OPEN
    assert book.hear(later.record(M1)).heard is Heard.APPLIED  # wherever its count goes on
    assert book.place == (3, 42)


@given(st.lists(st.integers(0, 7), max_size=60))
def test_in_whatever_order_decisions_come_they_are_applied_in_the_order_of_the_log(order: list[int]) -> None:
    log = Log()
    decisions = [log.record(), *(log.say("open", f"t{number}") for number in range(7))]
    book, applied = ShareBook("m1", 20), 0
    for at in order:
        heard = book.hear(decisions[at]).heard
        expected = Heard.APPLIED if at == applied else Heard.REPEATED if at < applied else Heard.GAP
        assert heard is expected
        applied += heard is Heard.APPLIED
        assert book.n == applied
        assert book.live == max(0, applied - 1)


# ---------------------------------------------------------------------------------------------------------- the promise


# P10
def test_a_complete_share_is_promised_by_the_settle_and_shown_by_the_word_only() -> None:
    book, log = opened()
    settled = book.hear(log.say("settle", hi=4))
    assert settled.show == ()
    assert stage(book) is ShareStage.SETTLED
    shown = book.hear(log.say("visible", hi=3))
    assert shown.show == (5,)
    assert shown.give_up == ()
    share = shown.over
    assert share is not None
    assert (share.stage, share.lo, share.hi) == (ShareStage.VISIBLE, 0, 3)
    assert book.live == 0


# P11
def test_a_member_may_give_up_before_its_promise_and_not_after() -> None:
    book, log = opened()
    assert book.may_give_up("t")
    book.hear(log.say("settle", hi=4))
    assert not book.may_give_up("t")
    book.hear(log.say("void"))
    assert book.may_give_up("t")


# P11
def test_a_share_that_was_given_up_is_not_promised_and_not_shown() -> None:
    book, log = opened()
    assert book.note(5, int(Fact.ABANDONED), 0, 4)
    book.hear(log.say("settle", hi=4))
    assert stage(book) is ShareStage.OPEN
    acts = book.hear(log.say("visible", hi=4))
    assert acts.show == ()
    assert acts.give_up == (5,)


# P10
def test_a_share_whose_access_has_not_ended_is_not_promised() -> None:
    book, log = opened(bits=int(Fact.TAKEN | Fact.DELIVERED))
    book.hear(log.say("settle", hi=4))
    assert stage(book) is ShareStage.OPEN
    assert book.may_give_up("t")


# P10
def test_a_void_gives_the_lease_up_whatever_was_promised() -> None:
    book, log = opened()
    book.hear(log.say("settle", hi=4))
    acts = book.hear(log.say("void"))
    assert (acts.show, acts.give_up, acts.reason) == ((), (5,), "as asked")
    assert stage(book) is ShareStage.VOID


def test_a_second_end_of_a_transfer_asks_for_nothing() -> None:
    book, log = opened()
    book.hear(log.say("void"))
    assert book.hear(log.say("visible", hi=4)) == Acts(Heard.APPLIED)
    assert stage(book) is ShareStage.VOID


# ------------------------------------------------------------------------------------------------------ what is a share


# P12, contract 48
def test_an_open_begins_a_share_for_this_run_of_this_member_only() -> None:
    book, log = member()
    assert book.hear(log.say("open", "old", parties=(M0, Party("m1", 19, 1, 0)))).begin is None
    assert book.hear(log.say("open", "other", parties=(M0,))).begin is None
    assert book.live == 0
    assert book.hear(log.say("open", "mine")).begin is not None
    assert book.hear(log.say("open", "mine")).begin is None  # it is open already
    assert book.live == 1


# contract 48
def test_tickets_that_belong_to_no_share_wait_for_nobody() -> None:
    book, log = opened()
    assert not book.note(6, WHOLE, 0, 4)
    book.hear(log.say("void"))
    assert not book.note(5, WHOLE, 0, 4)  # over
    book.leased("t", 7)
    book.nothing_missing("t", 4)
    book.refuse("t")
    assert not book.note(7, WHOLE, 0, 4)


def test_a_member_that_has_every_block_already_is_complete_without_a_ticket() -> None:
    book, log = member()
    book.hear(log.say("open"))
    book.nothing_missing("t", 4)
    share = book.of("t")
    assert share is not None
    assert share.complete
    assert (share.ticket, share.lo, share.hi) == (0, 0, 4)
    book.hear(log.say("settle", hi=4))
    assert stage(book) is ShareStage.SETTLED
    acts = book.hear(log.say("visible", hi=4))
    assert (acts.show, acts.give_up) == ((), ())
    assert acts.over is share


def test_a_member_that_cannot_take_part_says_so_and_one_that_leased_does_not() -> None:
    book, log = member()
    book.hear(log.say("open", "t"))
    book.refuse("t")
    refused = book.of("t")
    assert refused is not None
    assert refused.complete
    assert refused.bits & Fact.ABANDONED
    book.hear(log.say("open", "u"))
    book.leased("u", 8)
    book.refuse("u")
    leased = book.of("u")
    assert leased is not None
    assert leased.bits == 0


# P17
def test_bounds_are_written_once_with_the_result() -> None:
    book, _ = opened(bits=int(Fact.TAKEN))
    book.note(5, int(Fact.TAKEN | Fact.GRANTED), 7, 8)
    book.note(5, WHOLE, 0, 4)
    book.note(5, WHOLE, 0, 3)
    share = book.of("t")
    assert share is not None
    assert (share.lo, share.hi) == (0, 4)


def test_a_cancel_names_the_share_to_stop_and_ends_nothing() -> None:
    book, log = opened()
    acts = book.hear(log.say("cancel"))
    assert acts.stop is book.of("t")
    assert acts.reason == "as asked"
    assert book.live == 1
    assert book.hear(log.say("cancel", "unknown")).stop is None


# ----------------------------------------------------------------------------------------------------- what is reported


# P13, P15
def test_ended_shares_are_reported_until_the_new_term_has_decided_something() -> None:
    book, log = opened()
    book.hear(log.say("void"))
    assert book.rows() == []
    assert (book.gathering, book.live) == (False, 0)
    later = Log(2, log.n, log.previous)
    book.hear(later.record(M1))
    assert book.gathering
    assert [(share.transfer, share.stage) for share in book.rows()] == [("t", ShareStage.VOID)]
    book.hear(later.record(M1))  # the record, written again
    assert [share.transfer for share in book.rows()] == ["t"]
    book.hear(later.say("open", "u"))
    assert (book.gathering, book.live) == (False, 1)
    assert [share.transfer for share in book.rows()] == ["u"]


def test_every_change_is_worth_a_report() -> None:
    book, log = member()
    for act in (
        lambda: book.hear(log.say("open")),
        lambda: book.leased("t", 5),
        lambda: book.note(5, WHOLE, 0, 4),
        lambda: book.hear(log.say("settle", hi=4)),
        lambda: book.hear(log.say("visible", hi=4)),
        lambda: book.hear(log.say("void")),  # of what is over: its number is still news
    ):
        book.changed = False
        act()
        assert book.changed
    book.changed = False
    book.note(99, WHOLE, 0, 4)
    book.leased("gone", 9)
    assert not book.changed


# contract 50
def test_ended_shares_are_remembered_up_to_a_bound_and_the_oldest_go() -> None:
    book, log = member()
    for number in range(SHARES_MAX + 3):
        book.hear(log.say("open", f"t{number}"))
        book.hear(log.say("void", f"t{number}"))
    book.hear(Log(2, log.n, log.previous).record(M1))
    rows = [share.transfer for share in book.rows()]
    assert len(rows) == SHARES_MAX
    assert rows[0] == "t3"
    assert rows[-1] == f"t{SHARES_MAX + 2}"
