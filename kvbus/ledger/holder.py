"""The holder: takes leases, hands them to backends, reports facts, returns each lease exactly once.

It decides no deadline and frees nothing on its own account. A round has four calls, in this order (R4):

    facts = holder.collect()        what changed here since the last round
    …publish, agree…                outside
    holder.settle(tickets)          what all members agreed to return
    holder.advance()                the only caller of lenders' progress; ready leases go to their backends
    holder.finish()                 what may go back goes back

An idle round costs a few calls, however many leases are held; a busy one costs what changed. What one lease goes
through stands in `held.py`, what happens to backends and lenders that misbehave in `foreign.py`.
"""

from collections.abc import Collection, Iterable

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.binding import Binding
from kvbus.ledger.books import HolderShutdown, HolderStatistics, check_books, count_books
from kvbus.ledger.facts import EVIDENCE_NAMES, AttemptRow, Fact, FactDetail, FailureClass, LeaseFacts, Row
from kvbus.ledger.fencing import raise_fence
from kvbus.ledger.foreign import Foreign
from kvbus.ledger.held import NOT_YET, Held
from kvbus.ledger.holding import BlockingLease, blocking_leases
from kvbus.ledger.types import (
    Cancelled,
    Change,
    Delivered,
    Failed,
    Lease,
    LeaseFailure,
    LeaseView,
    Lender,
    Order,
    Result,
    SubmissionRejectedError,
    SubmitMode,
)

STOPPING = "this member is shutting down"

# Looking a name up in an enum costs more than what is computed with it here, for every lease.
_SUBMITTED, _ABANDONED, _SETTLED = int(Fact.SUBMITTED), int(Fact.ABANDONED), int(Fact.SETTLED)
_RETURNED, _CONSUMED = int(Fact.RETURNED), int(Fact.CONSUMED)


class LeaseHolder:
    """One holder for every kind of backend (R1). Built once, complete; one thread; raises only for misuse."""

    def __init__(self, *, bindings: Iterable[Binding], lenders: Iterable[Lender]) -> None:
        self._foreign = Foreign(bindings, lenders)
        self._held: dict[int, Held] = {}
        self._by_lease: dict[tuple[str, int], Held] = {}
        self._to_poll: list[Held] = []
        self._to_submit: list[Held] = []
        self._to_check: dict[int, Held] = {}
        self._changed: dict[int, Held] = {}
        self._rows: list[Row] = []
        self._next_ticket = 1
        self._returned = 0
        self._shutting_down = False

    def __repr__(self) -> str:
        oldest = f"T{next(iter(self._held))}" if self._held else "none"
        return f"<LeaseHolder held={len(self._held)} retained={self.retained} oldest={oldest}>"

    # ---------------------------------------------------------------------------------------------------- one lease

    def take(
        self,
        lease: Lease,
        mode: SubmitMode,
        hint: object = NOT_YET,
        timeout_s: float | None = None,
        *,
        now: float,
        peer: str = "",
        transfer: str = "",
    ) -> int:
        """Take a lease over and return its ticket; it always does (R2): what stands in the way becomes a fact.

        With the hint NOT_YET the lease is only held until `assign` gives its order. Only arguments that fit nothing
        raise: ValueError for an unknown binding or lender, for directions that differ, for a lease that is held now.
        """
        ticket, binding = self._next_ticket, self._foreign.binding_for(lease, mode)
        held = Held(ticket, lease, mode, binding, peer, transfer, hint, timeout_s, now)
        key = (held.lender, held.lease_id)
        if key in self._by_lease:
            raise ValueError(f"lease {key} is held already, as T{self._by_lease[key].ticket}")
        self._next_ticket = ticket + 1
        self._held[ticket] = self._by_lease[key] = held
        binding.unreturned += 1
        self._touch(held)
        if self._shutting_down:
            self._fail(held, FailureClass.SHUTDOWN, STOPPING)
        elif held.lender in self._foreign.stopped_lenders:
            self._contain(held)
        elif refusal := binding.refusal(peer):
            self._fail(held, *refusal)
        else:
            self._to_poll.append(held)
        return ticket

    def assign(self, ticket: int, hint: object) -> None:
        """Give the order of a lease that was taken without one; once its result is fixed this changes nothing."""
        held = self._known(ticket, "assign")
        if held.hint is not NOT_YET:
            raise LedgerContradictionError("a second order for one lease", ticket=ticket)
        held.hint = hint
        if held.view is not None:
            self._to_submit.append(held)

    def cancel(self, ticket: int, text: str) -> None:
        """Ask the lease's attempt to stop, at most once. What arrived whole still counts; nothing is freed by this."""
        held = self._known(ticket, "cancel")
        if held.attempt_open:
            self._cancel_once(held)
        elif not held.closed:
            self._fix(held, Cancelled((False,) * held.rows, 0), FailureClass.CANCELLED, text)

    def abandon(self, ticket: int, failure: FailureClass, text: str) -> None:
        """Give a lease up for good: a later result does not count (contract 4); memory still waits for its evidence."""
        if not (held := self._known(ticket, "abandon")).bits & _ABANDONED:
            held.bits |= _ABANDONED
            self._touch(held)  # also where a result was there already: others decide by it (P11)
            if held.attempt_open:
                self._cancel_once(held)
            self._fail(held, failure, text)

    def isolate(self, binding_name: str, peer: str, text: str) -> None:
        """Submit nothing more to a peer on one binding; its backend ends what runs with it (R18)."""
        self._foreign.isolate(self._foreign.bindings[binding_name], peer, text)

    def readmit(self, binding_name: str, peer: str) -> None:
        """Accept a peer again, after it came back under a new epoch."""
        self._foreign.bindings[binding_name].isolated.discard(peer)

    def fence(self, ticket: int, text: str) -> str:
        """Let a read lease go back although its isolated reader may still read; return why it stays, or "" (P5)."""
        held = self._known(ticket, "fence")
        if refusal := raise_fence(held, self._foreign):
            return refusal
        self._fail(held, FailureClass.PEER_LOST, text)
        held.fence()
        self._rows.append(held.binding.ended(held.outcome("fenced", text)))
        self._touch(held)
        return ""

    # --------------------------------------------------------------------------------------- the round, and looking

    def collect(self) -> LeaseFacts:
        """Return the facts of everything that changed since the last call; an idle call asks each backend once."""
        foreign = self._foreign
        foreign.hear(foreign.bindings.values(), self._observe)
        if not self._changed and not foreign.details:  # no row comes without a lease that changed
            return LeaseFacts()
        lines = [(held.ticket, held.rank, held.bits, held.lo, held.hi) for held in self._changed.values()]
        facts = LeaseFacts(lines, foreign.details, self._rows)
        self._changed, foreign.details, self._rows = {}, [], []
        return facts

    def settle(self, tickets: Iterable[int]) -> tuple[int, ...]:
        """Note that all members agreed to return these leases; return the tickets that were never given out here.

        A ticket that has been returned already is left alone (contract 5), so a decision may be applied twice.
        """
        unknown: list[int] = []
        for ticket in tickets:
            if (held := self._held.get(ticket)) is not None:
                if held.writes:  # a read needs none (contract 2)
                    held.bits |= _SETTLED
                    self._touch(held)
            elif not 0 < ticket < self._next_ticket:
                unknown.append(ticket)
        return tuple(unknown)

    def advance(self, unsettled_lenders: Collection[str] = ()) -> None:
        """Let lenders grant what they can, poll what changed, submit what is ready.

        Lenders named in `unsettled_lenders` are passed over: a decision about their pages is still being applied.
        """
        foreign = self._foreign
        polls, self._to_poll = self._to_poll, []
        for name, lender in foreign.lenders.items():
            if name not in unsettled_lenders and name not in foreign.stopped_lenders:
                for lease_id in foreign.progress(lender):
                    if (held := self._by_lease.get((name, lease_id))) is not None:
                        polls.append(held)
        for held in polls:
            self._poll(held)
        if foreign.just_stopped:
            self._contain_stopped_lenders()
        submits, self._to_submit = self._to_submit, []
        for held in submits:
            self._submit(held)

    def finish(self) -> None:
        """Return every lease whose conditions hold, and retire bindings that have stopped and retain nothing."""
        foreign = self._foreign
        check, self._to_check = self._to_check, {}
        for held in check.values():
            if held.returnable and held.ticket in self._held and held.lender not in foreign.stopped_lenders:
                self._give_back(held)
        if foreign.just_stopped:
            self._contain_stopped_lenders()
        if foreign.retiring:
            foreign.retire()

    def shutdown(self, budget_s: float) -> HolderShutdown:
        """Do one pass towards the end; repeatable, never raises, frees nothing without evidence (R15, contract 54–56).

        Call it until `complete`, or until patience ends: what is left then stays mapped until the process exits.
        """
        self._shutting_down = True
        foreign = self._foreign
        for held in list(self._held.values()):
            if not (held.closed and held.bits & _SETTLED):  # nobody is left to agree with
                self.abandon(held.ticket, FailureClass.SHUTDOWN, STOPPING)
        share_s = budget_s / max(1, len(foreign.bindings))
        for binding in foreign.bindings.values():
            foreign.stop(binding, STOPPING)
            if not binding.hold_released:
                backend = binding.backend
                foreign.call(binding, "shutdown", lambda backend=backend: backend.shutdown(share_s))  # type: ignore[misc]
                foreign.hear((binding,), self._observe)
        self.settle([ticket for ticket, held in self._held.items() if held.bits & Fact.ACCESS_ENDED])
        self.finish()
        open_bindings = tuple(name for name, binding in foreign.bindings.items() if not binding.hold_released)
        return HolderShutdown(not self._held and not open_bindings, len(self._held), self.retained, open_bindings)

    @property
    def has_news(self) -> bool:
        """True where the next `collect` has something to report already."""
        return bool(self._changed or self._foreign.details)

    @property
    def has_work(self) -> bool:
        """True where the next round has something to do, whatever backends and lenders say in it."""
        return bool(self._changed or self._to_poll or self._to_submit or self._foreign.details)

    @property
    def retained(self) -> int:
        """How many leases nobody waits for any more although access to them has not ended; costs time in bindings."""
        return sum(len(binding.retained) for binding in self._foreign.bindings.values())

    def view(self, ticket: int) -> LeaseView | None:
        """Return a held lease's view once it is granted."""
        return held.view if (held := self._held.get(ticket)) else None

    def bits(self, ticket: int) -> int:
        """Return a held lease's fact bits; 0 once it has been returned."""
        return held.bits if (held := self._held.get(ticket)) else 0

    def held(self) -> Iterable[Held]:
        """Return what is remembered of each held lease, oldest first: to read, never to change."""
        return self._held.values()

    def tickets(self) -> set[int]:
        """Return the tickets of all leases that are held now."""
        return set(self._held)

    def statistics(self) -> HolderStatistics:
        """Return the counters as a frozen record."""
        return count_books(self._held, self._foreign, taken=self._next_ticket - 1, returned=self._returned)

    def blocking(self) -> tuple[BlockingLease, ...]:
        """Return the leases that keep requests from running; costs time in what is held (R19)."""
        return blocking_leases(self._held)

    def check(self) -> None:
        """Raise LedgerContradictionError where the holder's own books disagree; costs time in what is held."""
        check_books(self._held, self._by_lease, self._foreign.bindings.values())

    # ------------------------------------------------------------------------------------------------------- inside

    def _poll(self, held: Held) -> None:
        if held.view is not None or held.closed or held.lender in self._foreign.stopped_lenders:
            return  # never polled again once the view was seen (contract 6)
        view = self._foreign.poll(held.lease)
        if isinstance(view, LeaseFailure):
            self._fail(held, view.failure, view.text)
        if not isinstance(view, LeaseView):
            return
        self._rows.append(held.grant(view))
        self._touch(held)
        if held.hint is not NOT_YET:
            self._to_submit.append(held)

    def _submit(self, held: Held) -> None:
        if held.closed or held.attempt or held.view is None:
            return
        binding = held.binding
        if refusal := binding.refusal(held.peer):
            self._fail(held, *refusal)
            return
        # The memory counts as accessed before its address can leave (contract 42).
        held.begin_attempt()
        order = Order(held.ticket, 1, held.view, held.mode.direction, held.hint, held.peer, held.timeout_s)
        try:
            binding.backend.submit(order)
        except SubmissionRejectedError as rejection:  # nothing escaped (contract 32)
            held.withdraw_attempt()
            self._fail(held, rejection.failure, rejection.text)
        except Exception as error:  # foreign code: bytes may be moving, so the lease stays (contract 33)
            held.bits |= Fact.UNCERTAIN
            binding.uncertain += 1
            self._fail(held, FailureClass.UNCERTAIN, f"submit raised {error!r}")
            self._foreign.contain(binding, held.peer, f"uncertain submission: {error!r}")
        else:
            held.bits |= _SUBMITTED
            binding.submissions += 1
            self._rows.append(AttemptRow(held.ticket, 1, binding.name, held.peer))
            self._touch(held)

    def _observe(self, binding: Binding, change: Change) -> None:
        """Take note of what a backend says of one of its attempts; an answer for another's advances nothing (44)."""
        held = self._held.get(change.ticket)
        if held is None or held.binding is not binding or not held.attempt or held.attempt != change.attempt:
            self._foreign.contradict(binding, change.ticket, "answers for an attempt that it does not have")
            return
        late, evidence = held.closed, change.evidence if held.attempt_open and not held.contradicted else None
        said = None if change.result is None else held.checked(change.result)
        if said is not None and held.said is not None and held.said != said:
            held.suspect = held.contradicted = True  # its evidence is worth nothing either: the lease is retained
            self._foreign.contradict(binding, change.ticket, "gave two different results for one attempt")
            return
        if evidence is not None:  # first: a lease whose result comes with it is never counted as retained
            held.end_attempt(evidence)
        if said is not None:
            binding.contradictions += said is not change.result
            held.said = said
            self._take_result(held, said, change.text)
        if evidence is not None:
            self._rows.append(binding.ended(held.outcome(EVIDENCE_NAMES[evidence], change.text), late=late))
        self._touch(held)

    def _take_result(self, held: Held, result: Result, text: str) -> None:
        held.binding.deliveries += isinstance(result, Delivered) and not held.closed
        if isinstance(result, Cancelled):
            self._fix(held, result, FailureClass.CANCELLED, text or "stopped on request")
        else:
            self._fix(held, result, result.failure, result.text if isinstance(result, Failed) else text)

    def _fail(self, held: Held, failure: FailureClass, text: str) -> None:
        self._fix(held, Failed(failure, text), failure, text)

    def _fix(self, held: Held, result: Result, failure: FailureClass, text: str) -> None:
        if not held.closed:  # the first result stands, whatever comes later (contract 46)
            held.failure, held.text = failure, text
            if failure or text:
                self._foreign.details.append(FactDetail(held.ticket, failure, text, held.peer))
            held.fix(result)
            if held.writes and held.view is not None:
                held.lo, held.hi = self._foreign.bounds(held.lease, held.arrived)
        self._touch(held)

    def _cancel_once(self, held: Held) -> None:
        if not held.cancel_sent:
            held.cancel_sent = True
            self._foreign.call(held.binding, "cancel", lambda: held.binding.backend.cancel(held.ticket, held.attempt))

    def _touch(self, held: Held) -> None:
        """Note that a lease changed: reported in the next batch, looked at in the next finish."""
        self._changed[held.ticket] = self._to_check[held.ticket] = held

    def _give_back(self, held: Held) -> None:
        """Return one lease. If that raises, it is never tried again and its lender stops (contract 7)."""
        del self._held[held.ticket]
        del self._by_lease[held.lender, held.lease_id]
        counts = held.counts
        try:
            if held.writes and held.view is not None:
                held.lease.mark_arrived(held.arrived if counts else (False,) * held.rows)
            held.lease.release()
        except Exception as error:  # foreign code
            held.bits |= Fact.RETURN_FAILED
            self._foreign.stop_lender(held.lender, f"return of T{held.ticket} raised {error!r}")
        else:
            self._returned += 1
            held.binding.came_back(held, consumed=counts)
            held.bits |= _RETURNED | _CONSUMED if counts else _RETURNED
        self._changed[held.ticket] = held

    def _contain_stopped_lenders(self) -> None:
        """Retain what a stopped lender lent: its pages are in no known state (contract 7)."""
        just_stopped, self._foreign.just_stopped = self._foreign.just_stopped, []
        for held in self._held.values():
            if held.lender in just_stopped:
                self._contain(held)

    def _contain(self, held: Held) -> None:
        held.bits |= Fact.LENDER_STOPPED
        held.suspect = True
        self._fail(held, FailureClass.LENDER_STOPPED, self._foreign.stopped_lenders[held.lender])

    def _known(self, ticket: int, claim: str) -> Held:
        if (held := self._held.get(ticket)) is None:
            raise LedgerContradictionError("no such lease is held", ticket=ticket, claim=claim)
        return held
