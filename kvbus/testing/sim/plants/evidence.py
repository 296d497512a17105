"""Faults of the holder: what counts as the end of access, what is returned, and how often."""

# ruff: noqa: SLF001, ANN401 - a fault sits inside of what it spoils, and hands on what it does not look at

from collections.abc import Sequence
from typing import Any

from kvbus.dataplane.reader import Outbox
from kvbus.ledger.agreement import Agreement
from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import RESULT_BITS, Evidence, Fact
from kvbus.ledger.foreign import Foreign
from kvbus.ledger.held import Held
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Cancelled, Change, Direction, Failed, LeaseView, Order
from kvbus.testing.sim.plants.plant import Change as Replaced
from kvbus.testing.sim.plants.plant import plant

_ENDED = int(Fact.ACCESS_ENDED)
_SETTLED = int(Fact.SETTLED)


def _end_at_once(held: Held) -> None:
    if held.attempt_open:
        held.binding.open_attempts -= 1
        held.end_attempt(Evidence.COMPLETED)


@plant("access end is taken from the result", "contract 34, 41")
def result_is_access_end() -> Sequence[Replaced]:
    """Take a fixed result as proof that nobody touches the memory any more."""

    def end_access_if_proved(self: Held) -> None:
        if self.closed:
            self.bits |= int(Fact.ACCESS_ENDED | Fact.EVIDENCE_COMPLETED)

    return [(Held, "end_access_if_proved", end_access_if_proved)]


@plant("an abandoned lease is freed at once", "contract 4, R12", weathers=("stalled", "usual"))
def free_when_abandoned() -> Sequence[Replaced]:
    """Give a lease back when its deadline has passed, whoever still writes it."""
    abandon = LeaseHolder.abandon

    def at_once(self: LeaseHolder, ticket: int, failure: Any, text: str) -> None:
        abandon(self, ticket, failure, text)
        _end_at_once(self._held[ticket])

    return [(LeaseHolder, "abandon", at_once)]


@plant("a cancel from the bus frees its lease", "contract 39, 40")
def cancel_is_access_end() -> Sequence[Replaced]:
    """Return on a message alone: who asked that a read stop is believed to have stopped it."""
    cancel = LeaseHolder.cancel

    def at_once(self: LeaseHolder, ticket: int, text: str) -> None:
        cancel(self, ticket, text)
        held = self._held[ticket]
        if not held.closed:
            rows = len(held.view.pages) if held.view else 0
            held.fix(Cancelled((False,) * rows, 0))
        _end_at_once(held)
        self._touch(held)

    return [(LeaseHolder, "cancel", at_once)]


@plant("a settle returns without access end", "contract 3")
def settle_is_enough() -> Sequence[Replaced]:
    """Return a write as soon as it is settled."""

    def without_evidence(self: Agreement, transfer: str, opened: Any) -> Any:
        if not all(report.bits & RESULT_BITS for report in opened.reports.values()):
            return None
        self._close(transfer)
        return self._decision("settle", transfer, opened.parties)

    returnable = property(lambda self: bool(self.bits & (_SETTLED | _ENDED)))
    return [(Agreement, "_settle_if_complete", without_evidence), (Held, "returnable", returnable)]


@plant("a write is returned without a settle", "contract 3, R6")
def no_settle_needed() -> Sequence[Replaced]:
    """Return a write as soon as access has ended, agreed or not."""
    return [(Held, "returnable", property(lambda self: not self.suspect and bool(self.bits & _ENDED)))]


@plant("late completions are dropped", "contract 8, 45", weathers=("usual", "stalled"))
def drop_late_completions() -> Sequence[Replaced]:
    """Ignore what a backend says of an attempt that was cancelled."""
    report = Outbox.report

    def unless_cancelled(self: Outbox, change: Any) -> None:
        if not self._open.get((change.ticket, change.attempt)):
            report(self, change)

    return [(Outbox, "report", unless_cancelled)]


@plant("an abandoned write is forgotten", "contract 8, 9", weathers=("stalled", "usual"))
def forget_abandoned() -> Sequence[Replaced]:
    """Drop the holder's reference to a lease when nobody waits for it any more."""
    abandon = LeaseHolder.abandon

    def and_forget(self: LeaseHolder, ticket: int, failure: Any, text: str) -> None:
        abandon(self, ticket, failure, text)
        held = self._held[ticket]
        if held.attempt_open:
            del self._held[ticket]
            del self._by_lease[held.lender, held.lease.lease_id]
            self._to_check.pop(ticket, None)

    return [(LeaseHolder, "abandon", and_forget)]


@plant("one ticket in five is kept", "contract 1, 9")
def keep_one_in_five() -> Sequence[Replaced]:
    """Forget to look at every fifth ticket."""
    touch = LeaseHolder._touch

    def sometimes(self: LeaseHolder, held: Held) -> None:
        touch(self, held)
        if held.ticket % 5 == 0:
            self._to_check.pop(held.ticket, None)

    return [(LeaseHolder, "_touch", sometimes)]


@plant("leases are returned twice", "contract 1, 5", check="holder")
def return_twice() -> Sequence[Replaced]:
    """Give some leases back a second time."""
    give_back = LeaseHolder._give_back

    def again(self: LeaseHolder, held: Held) -> None:
        give_back(self, held)
        if held.ticket % 7 == 0:
            held.lease.release()

    return [(LeaseHolder, "_give_back", again)]


@plant("a failed return is tried again", "contract 7", weathers=("failing", "usual"))
def retry_return() -> Sequence[Replaced]:
    """Give a lease back once more where its lender raised, and call it returned if that works."""
    give_back = LeaseHolder._give_back

    def once_more(self: LeaseHolder, held: Held) -> None:
        give_back(self, held)
        if held.bits & Fact.RETURN_FAILED:
            held.lease._keeper.give_back(held.lease)  # type: ignore[attr-defined]
            held.bits = held.bits & ~int(Fact.RETURN_FAILED) | int(Fact.RETURNED)
            self._foreign.stopped_lenders.pop(held.lender)
            self._foreign.just_stopped.remove(held.lender)

    return [(LeaseHolder, "_give_back", once_more)]


@plant("a stopped lender is given leases back", "contract 7", weathers=("failing", "usual"))
def return_to_stopped() -> Sequence[Replaced]:
    """Go on returning leases to a lender one of whose returns has failed."""

    def contain(self: LeaseHolder, held: Held) -> None:
        del self
        held.bits |= int(Fact.LENDER_STOPPED)

    finish = LeaseHolder.finish

    def to_all(self: LeaseHolder) -> None:
        stopped, self._foreign.stopped_lenders = self._foreign.stopped_lenders, {}
        finish(self)
        self._foreign.stopped_lenders = stopped | self._foreign.stopped_lenders

    return [(LeaseHolder, "_contain", contain), (LeaseHolder, "finish", to_all)]


@plant("success overwrites failure", "contract 46, P17", weathers=("stalled", "usual"))
def success_after_failure() -> Sequence[Replaced]:
    """Let a late success overwrite a failure."""

    def fix(self: LeaseHolder, held: Held, result: Any, failure: Any, text: str) -> None:
        held.failure, held.text = failure, text
        held.fix(result)
        self._touch(held)

    return [(LeaseHolder, "_fix", fix)]


@plant("a late result changes the bounds", "P17", weathers=("stalled", "frail"))
def rewrite_bounds() -> Sequence[Replaced]:
    """Take the bounds of whatever result came last."""
    fix = LeaseHolder._fix

    def and_rewrite(self: LeaseHolder, held: Held, result: Any, failure: Any, text: str) -> None:
        late = held.closed
        fix(self, held, result, failure, text)
        if late and held.view is not None and held.mode.direction is Direction.WRITE:
            rows = (False,) * len(held.view.pages) if isinstance(result, Failed) else result.arrived
            held.lo, held.hi = self._foreign.bounds(held.lease, rows)

    return [(LeaseHolder, "_fix", and_rewrite)]


@plant("a lease is polled after its view was seen", "contract 6, R4", check="holder")
def poll_after_ready() -> Sequence[Replaced]:
    """Ask each held lease for its view in every round."""
    advance = LeaseHolder.advance

    def and_poll(self: LeaseHolder, unsettled_lenders: Any = ()) -> None:
        advance(self, unsettled_lenders)
        for held in self._held.values():
            if held.view is not None:
                self._foreign.poll(held.lease)

    return [(LeaseHolder, "advance", and_poll)]


@plant("the hold is let go while an attempt is open", "contract 54, 55", check="holder")
def release_hold_early() -> Sequence[Replaced]:
    """Let the memory of a stopped binding go at once."""

    def at_once(self: Foreign, binding: Binding) -> bool:
        self.call(binding, "shutdown", lambda: binding.backend.shutdown(0.0))
        self.call(binding, "release_hold", binding.backend.release_hold)
        binding.hold_released = True
        return True

    return [(Foreign, "_retired", at_once)]


@plant("a second attempt starts before the first one's access ended", "P3")
def attempt_too_early() -> Sequence[Replaced]:
    """Read into the same pages again as soon as the first attempt's result is known."""
    observe = LeaseHolder._observe

    def and_try_again(self: LeaseHolder, binding: Binding, change: Change) -> None:
        observe(self, binding, change)
        held = self._held.get(change.ticket)
        if held is None or not held.attempt_open or change.result is None or change.attempt != 1:
            return
        if isinstance(held.view, LeaseView) and held.mode.direction is Direction.WRITE:
            order = Order(held.ticket, 2, held.view, held.mode.direction, held.hint, held.peer, held.timeout_s)
            binding.backend.submit(order)

    return [(LeaseHolder, "_observe", and_try_again)]


@plant("what was given up is consumed at a settle", "P11, contract 4", check="holder")
def consume_abandoned() -> Sequence[Replaced]:
    """Let a settle that comes after the local abandonment make content of what had arrived."""
    give_back = LeaseHolder._give_back

    def as_if_wanted(self: LeaseHolder, held: Held) -> None:
        held.bits &= ~int(Fact.ABANDONED)
        give_back(self, held)

    return [(LeaseHolder, "_give_back", as_if_wanted)]
