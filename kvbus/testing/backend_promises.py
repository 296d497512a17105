"""What every backend promises, each checked on a fresh one; `check_backend` runs them all."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Cancelled, Change, Delivered, Failed, Order, SubmissionRejectedError
from kvbus.testing.cases import BackendCase, require, violated

POLL_S = 0.002
"""Short against what any attempt takes; an attempt that has ended is seen at once."""

Pair = tuple[int, int]


@dataclass(slots=True)
class Heard:
    """A backend and everything that it said of the attempts that it was given; each word is checked when it comes."""

    case: BackendCase
    orders: dict[Pair, Order] = field(default_factory=dict)
    results: dict[Pair, Delivered | Failed | Cancelled] = field(default_factory=dict)
    evidence: dict[Pair, Evidence] = field(default_factory=dict)

    def submit(self, ticket: int, attempt: int = 1, peer: str = "one") -> Order:
        """Submit an order that has to be taken."""
        order = self.case.order(ticket, attempt, peer)
        try:
            self._offer(order)
        except SubmissionRejectedError as rejection:
            violated("32", f"a sound order, T{ticket} attempt {attempt}, was rejected: {rejection}")
        return order

    def rejects(self, order: Order, statement: str, why: str) -> SubmissionRejectedError:
        """Submit an order that has to be rejected; return the rejection."""
        try:
            self._offer(order)
        except SubmissionRejectedError as rejection:
            del self.orders[order.ticket, order.attempt]
            require(rejection.failure, "32", f"the rejection names no failure class: {rejection}")
            return rejection
        return violated(statement, f"an order was taken {why}")

    def _offer(self, order: Order) -> None:
        self.orders[order.ticket, order.attempt] = order
        backend = self.case.backend
        self.case.calls.ask("submit", lambda: backend.submit(order), (SubmissionRejectedError,))

    def listen(self) -> None:
        """Take what the backend lists now."""
        for change in self.case.calls.ask("changes", lambda: tuple(self.case.backend.changes())):
            require(isinstance(change, Change), "29", f"changes holds a {type(change).__name__}, expected a Change")
            self._note(change)

    def end_of(self, order: Order) -> None:
        """Let an attempt end, and wait until it has its result and its evidence."""
        if self.case.end is not None:
            self.case.end(order)
        self.await_end(order)

    def await_end(self, order: Order) -> None:
        """Wait until an attempt has its result and its evidence; a violation if it never does."""
        pair, ends_at = (order.ticket, order.attempt), time.monotonic() + self.case.deadline_s
        pause = threading.Event()
        while pair not in self.results or pair not in self.evidence:
            self.listen()
            if time.monotonic() >= ends_at:
                missing = "result" if pair not in self.results else "evidence"
                violated("41", f"T{pair[0]} attempt {pair[1]} has no {missing} after {self.case.deadline_s:g} s")
            pause.wait(POLL_S)

    def _note(self, change: Change) -> None:
        pair, whom = (change.ticket, change.attempt), f"T{change.ticket} attempt {change.attempt}"
        require(pair in self.orders, "44", f"it answers for {whom}, which it was not asked about")
        require(pair not in self.results or pair not in self.evidence, "29", f"it says more of {whom}, which has ended")
        if change.result is not None:
            before = self.results.setdefault(pair, change.result)
            require(before == change.result, "44", f"it says two different results of {whom}")
            self._check_result(change.result, len(self.orders[pair].view.pages), whom)
        if change.evidence is not None:
            kind = type(change.evidence).__name__
            require(isinstance(change.evidence, Evidence), "41", f"evidence of {whom} is a {kind}, expected Evidence")
            before_that = self.evidence.setdefault(pair, change.evidence)
            require(before_that == change.evidence, "44", f"it says two different kinds of evidence of {whom}")
        self._check_both(pair, whom)

    def _check_result(self, result: object, rows: int, whom: str) -> None:
        if isinstance(result, Failed):
            require(result.failure, "30", f"the failure of {whom} has no class")
        elif isinstance(result, Delivered | Cancelled):
            kind = type(result.arrived).__name__
            require(
                isinstance(result.arrived, tuple), "31", f"the mask of {whom} is a {kind}, expected a tuple of bool"
            )
            require(len(result.arrived) == rows, "31", f"the mask of {whom} has {len(result.arrived)} of {rows} rows")
            require(set(map(type, result.arrived)) <= {bool}, "31", f"the mask of {whom} holds something but bools")
        else:
            violated("29", f"the result of {whom} is a {type(result).__name__}")

    def _check_both(self, pair: Pair, whom: str) -> None:
        result = self.results.get(pair)
        if self.evidence.get(pair) is Evidence.NEVER_SUBMITTED and isinstance(result, Delivered | Cancelled):
            require(not any(result.arrived), "43", f"rows of {whom} arrived, and nothing of it was ever submitted")


def it_has_a_name_and_nothing_to_say_at_first(heard: Heard) -> None:
    """A cancel of nothing is harmless, and with nothing submitted nothing is without evidence (34)."""
    backend = heard.case.backend
    name = heard.case.calls.ask("name", lambda: backend.name)
    require(name and str(name) == name, "R5", f"the name is {name!r}, expected a word for facts and texts")
    heard.case.calls.ask("cancel of an attempt that it does not have", lambda: backend.cancel(99, 1))
    heard.listen()
    left = heard.case.calls.ask("shutdown", lambda: tuple(backend.shutdown(0.0)))
    require(not left, "34", f"with nothing submitted, {left} are without evidence")


def an_attempt_gets_one_result_and_one_evidence(heard: Heard) -> None:
    """Both come, once, and a wake signal follows (29, 41, R9)."""
    before = heard.case.wakes() if heard.case.wakes else 0
    order = heard.submit(1)
    heard.end_of(order)
    heard.listen()
    if heard.case.wakes:
        wakes, ends_at = heard.case.wakes, time.monotonic() + heard.case.deadline_s
        while wakes() == before and time.monotonic() < ends_at:
            threading.Event().wait(POLL_S)
        require(wakes() > before, "R9", "a change was listed, and no wake signal followed")


def an_attempt_ends_for_itself_alone(heard: Heard) -> None:
    """The end of one attempt says nothing of another, nor of a later one of the same ticket (34, 44, 48)."""
    first, second = heard.submit(1), heard.submit(2, peer="two")
    heard.end_of(first)
    if heard.case.end is not None:
        require((2, 1) not in heard.evidence, "34", "the end of T1 brought evidence for T2")
    heard.end_of(second)
    again = heard.submit(1, attempt=2)
    heard.end_of(again)


def what_has_ended_touches_nothing(heard: Heard) -> None:
    """After the evidence its pages stay as they are (41)."""
    if heard.case.content is None:
        return
    first = heard.submit(1)
    heard.end_of(first)
    before = heard.case.content(first)
    for ticket in (2, 3):  # whatever stood in line behind the evidence goes first
        heard.end_of(heard.submit(ticket))
        require(heard.case.content(first) == before, "41", "pages of T1 changed after the evidence of its access end")


def a_rejected_order_leaves_nothing(heard: Heard) -> None:
    """A rejection means that nothing escaped: no word, no byte (32)."""
    if heard.case.refused is None:
        return
    order = heard.case.refused(1)
    before = heard.case.content(order) if heard.case.content else b""
    heard.rejects(order, "32", "that fits nothing")
    sound = heard.submit(2)
    heard.end_of(sound)
    heard.listen()
    if heard.case.content:
        require(heard.case.content(order) == before, "32", "pages of a rejected order have changed")


def a_cancel_is_a_request_and_no_evidence(heard: Heard) -> None:
    """It may come twice or too late, and concerns nobody else (39, 40)."""
    backend, order = heard.case.backend, heard.submit(1)
    for _ in range(2):
        heard.case.calls.ask("cancel", lambda: backend.cancel(1, 1))
    other = heard.submit(2, peer="two")
    heard.listen()
    if heard.case.end is not None:
        require((1, 1) not in heard.evidence, "40", "a cancel was taken for evidence")
    heard.end_of(order)
    heard.end_of(other)
    heard.case.calls.ask("cancel of an attempt that has ended", lambda: backend.cancel(1, 1))
    heard.listen()
    require(not isinstance(heard.results[2, 1], Cancelled), "39", "the cancel of T1 cancelled T2")


def an_isolated_peer_gets_no_new_work(heard: Heard) -> None:
    """New orders for it are rejected, other peers go on, and its own attempts have not ended by that (R18, 40, P7)."""
    backend, order = heard.case.backend, heard.submit(1)
    heard.case.calls.ask("isolate", lambda: backend.isolate("one"))
    if heard.case.isolates:
        rejection = heard.rejects(heard.case.order(2, 1, "one"), "R18", "for a peer that is isolated")
        require(rejection.failure is FailureClass.PEER_LOST, "R18", f"isolation is called {rejection.failure!r}")
    other = heard.submit(3, peer="two")
    heard.listen()
    if heard.case.end is not None:
        require((1, 1) not in heard.evidence, "40", "an isolation was taken for evidence")
    heard.end_of(order)
    heard.end_of(other)
    kept = heard.results[3, 1]
    require(isinstance(kept, Delivered) and any(kept.arrived), "R18", f"another peer's attempt came to {kept!r}")


def a_shutdown_names_what_has_no_evidence(heard: Heard) -> None:
    """What it leaves out has evidence; it may be called again (34, 54, 56)."""
    backend, order = heard.case.backend, heard.submit(1)
    left = heard.case.calls.ask("shutdown", lambda: tuple(backend.shutdown(0.0)))
    require(set(left) <= set(heard.orders), "34", f"shutdown names {left}, of which it was not asked about some")
    heard.listen()
    require((1, 1) in left or (1, 1) in heard.evidence, "54", "shutdown left out T1, which has no evidence")
    heard.end_of(order)
    left = heard.case.calls.ask("shutdown again", lambda: tuple(backend.shutdown(heard.case.deadline_s)))
    require(not left, "56", f"everything has evidence, and shutdown still names {left}")


def a_shutdown_closes_the_door(heard: Heard) -> None:
    """Nothing is taken after it (54)."""
    backend = heard.case.backend
    heard.case.calls.ask("shutdown", lambda: tuple(backend.shutdown(0.0)))
    heard.rejects(heard.case.order(1, 1, "one"), "54", "after shutdown")


def the_hold_is_let_go_and_the_memory_stays(heard: Heard) -> None:
    """Letting the hold go is no reason to touch, or take away, a page (55)."""
    backend, order = heard.case.backend, heard.submit(1)
    heard.end_of(order)
    before = heard.case.content(order) if heard.case.content else b""
    heard.case.calls.ask("shutdown", lambda: tuple(backend.shutdown(heard.case.deadline_s)))
    heard.case.calls.ask("release_hold", backend.release_hold)
    heard.listen()
    if heard.case.content:
        require(heard.case.content(order) == before, "55", "pages changed, or went, with the hold")


BACKEND_PROMISES: tuple[Callable[[Heard], None], ...] = (
    it_has_a_name_and_nothing_to_say_at_first,
    an_attempt_gets_one_result_and_one_evidence,
    an_attempt_ends_for_itself_alone,
    what_has_ended_touches_nothing,
    a_rejected_order_leaves_nothing,
    a_cancel_is_a_request_and_no_evidence,
    an_isolated_peer_gets_no_new_work,
    a_shutdown_names_what_has_no_evidence,
    a_shutdown_closes_the_door,
    the_hold_is_let_go_and_the_memory_stays,
)
