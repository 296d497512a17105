"""Spans of transfers, told from what a member records: each is one step of a story, on both sides of it.

On the destination `kvbus.admit` and `kvbus.transfer` follow the request, and `kvbus.lease`, `kvbus.read` and
`kvbus.settle` are what the transfer does; on the source `kvbus.lend` lasts from the question until the lease went back,
and hangs below the destination's `kvbus.lease`. Where nobody traces, this remembers the traceparents of requests that
had one, to carry them on, and nothing else (R23).
"""

from collections import OrderedDict
from collections.abc import Awaitable
from dataclasses import dataclass

from kvbus import tracing
from kvbus.events import (
    Event,
    LendAnswered,
    LendRequested,
    TransferOutcome,
    TransferRequested,
    TransferStep,
    TransferVerdict,
    decode,
)
from kvbus.ledger.facts import Fact, GrantedRow, LeaseFacts, evidence_names
from kvbus.parts import Body
from kvbus.tracing import NO_SPAN, Span

OPEN_MAX = 4_096
"""Transfers and leases with a span at a time: as many as a member lends. The oldest is ended first, as forgotten."""
FORGOTTEN = "its end was not recorded in time"
UNANSWERED = "no answer"

Key = tuple[str, str]
"""A transfer and the instance that reads for it: one lease at each member of its source."""

_BAD = frozenset({"failed", "cancelled"})


@dataclass(slots=True)
class _Traced:
    """The spans of one transfer on its destination; `phase` is the one that lasts."""

    whole: Span
    about: dict[str, str]
    phase: Span = NO_SPAN

    def enter(self, name: str) -> None:
        """End the phase that lasted, and begin another."""
        self.phase.end()
        self.phase = tracing.begin(name, self.whole.traceparent, self.about)


@dataclass(slots=True)
class _Lent:
    """A question, and then the lease that it led to, with the facts that were told of it."""

    key: Key
    span: Span
    bits: int = 0


class Spans:
    """What a member does for transfers, as spans; its recorder has one, and lets it hear all that is recorded."""

    def __init__(self, instance: str, member: str) -> None:
        self._who = {"instance": instance, "member": member}
        self._transfers: OrderedDict[str, _Traced] = OrderedDict()
        self._asked: OrderedDict[Key, _Lent] = OrderedDict()
        self._granted: set[Key] = set()
        self._lent: dict[int, _Lent] = {}
        self.page_bytes = 0
        """Of the pool, once there is one."""

    # -------------------------------------------------------------------------------------------------- destination

    def admitting(
        self, request: TransferRequested, answering: Awaitable[tuple[TransferVerdict, str]]
    ) -> Awaitable[tuple[TransferVerdict, str]]:
        """Return the destination's answer to a request, and tell of it."""
        return self._admitting(request, answering) if tracing.is_on() else answering

    async def _admitting(
        self, request: TransferRequested, answering: Awaitable[tuple[TransferVerdict, str]]
    ) -> tuple[TransferVerdict, str]:
        about = self._who | {"request_hash": request.request_hash, "source": request.source}
        span = tracing.begin("kvbus.admit", request.traceparent, about)
        failure = UNANSWERED
        try:
            verdict, transfer = await answering
            span.note(verdict=verdict.verdict, transfer=transfer)
            failure = verdict.reason if verdict.verdict == "refused" else ""
        finally:
            span.end(failure)
        return verdict, transfer

    def began(self, transfer: str, request: TransferRequested) -> None:
        """A request has become a transfer here."""
        if request.traceparent is None and not tracing.is_on():
            return
        about = self._who | {"transfer": transfer, "request_hash": request.request_hash, "source": request.source}
        whole = tracing.begin("kvbus.transfer", request.traceparent, about, kind="consumer")
        if whole.traceparent is None:
            return
        self._transfers[transfer] = _Traced(whole, about=about)
        if len(self._transfers) > OPEN_MAX:
            self.forget(next(iter(self._transfers)), FORGOTTEN)

    def traceparent(self, transfer: str) -> str | None:
        """Return what goes to whoever acts for a transfer now."""
        traced = self._transfers.get(transfer)
        return (traced.phase.traceparent or traced.whole.traceparent) if traced else None

    def hear(self, body: Body) -> None:
        """Take an event that this member records."""
        if not self._transfers:
            return
        if isinstance(body, TransferStep):
            self.step(body.transfer, body.step, body.text)
        elif isinstance(body, TransferOutcome) and (traced := self._transfers.get(body.transfer)):
            self._outcome(traced, body)

    def step(self, transfer: str, step: str, text: str) -> None:
        """Take a step of a transfer that this member records."""
        traced = self._transfers.get(transfer)
        if traced is None:
            return
        traced.whole.event(step, text)
        match step:
            case "leased":
                traced.enter("kvbus.lease")
            case "granted":
                traced.enter("kvbus.read")
            case "access_ended":
                traced.phase.note(evidence=tuple(text.split(", ")))
                traced.enter("kvbus.settle")
            case "handed_back":  # its next run begins a transfer of its own
                self.forget(transfer)
            case _:
                pass

    def forget(self, transfer: str, failure: str = "") -> None:
        """End what is left of a transfer; of a share, whose outcome another member tells, this is its end."""
        if traced := self._transfers.pop(transfer, None):
            traced.phase.end(failure)
            traced.whole.end(failure)

    def _outcome(self, traced: _Traced, body: TransferOutcome) -> None:
        failure = (body.reason or body.failure or body.outcome) if body.outcome in _BAD else ""
        for span in (traced.phase, traced.whole):
            span.note(outcome=body.outcome, pages=body.pages_moved, bytes=body.length_bytes)
            span.note(evidence=body.evidence, failure=body.failure)
        self.forget(body.transfer, failure)

    # ------------------------------------------------------------------------------------------------------- source

    def lending(self, event: Event, answering: Awaitable[bytes]) -> Awaitable[bytes]:
        """Return a source's answer, and tell of it where it is one to a reader's question."""
        asked = event.body
        return self._lending(asked, answering) if isinstance(asked, LendRequested) and tracing.is_on() else answering

    async def _lending(self, asked: LendRequested, answering: Awaitable[bytes]) -> bytes:
        key = (asked.key.transfer, asked.key.instance)
        if key not in self._asked and key not in self._granted:
            about = self._who | {"transfer": asked.key.transfer, "reader": asked.key.instance}
            span = tracing.begin("kvbus.lend", asked.traceparent, about, kind="server")
            if span.is_recorded:
                self._asked[key] = _Lent(key, span)
                if len(self._asked) > OPEN_MAX:
                    self._asked.popitem(last=False)[1].span.end(FORGOTTEN)
        answer = await answering
        if key in self._asked:
            self._answered(key, answer)
        return answer

    def facts(self, facts: LeaseFacts) -> None:
        """Take a round's facts: which lease a question led to, and when it went back."""
        if not self._asked and not self._lent:
            return
        for row in facts.rows:
            if isinstance(row, GrantedRow) and not row.writes:
                self._granted_row(row)
        for ticket, _, bits, _, _ in facts.lines:
            if lent := self._lent.get(ticket):
                lent.bits |= bits
                if bits & Fact.RETURNED:
                    self._returned(ticket, lent)

    def _answered(self, key: Key, data: bytes) -> None:
        """A question that led to no lease is still open here: is it refused, or is the prompt computed?"""
        answer = decode(data).body
        if not isinstance(answer, LendAnswered) or answer.status == "computing":
            self._asked[key].span.event("computing")
            return
        span = self._asked.pop(key).span
        span.note(outcome=answer.status, failure=answer.failure)
        span.end(answer.reason or answer.failure)

    def _granted_row(self, row: GrantedRow) -> None:
        lent = self._asked.pop((row.transfer, row.peer), None)
        if lent is None:
            return
        lent.span.event("granted")
        lent.span.note(ticket=row.ticket, pages=len(row.pages), bytes=len(row.pages) * self.page_bytes)
        self._lent[row.ticket] = lent
        self._granted.add(lent.key)
        if len(self._lent) > OPEN_MAX:
            self._close(next(iter(self._lent)), FORGOTTEN)

    def _returned(self, ticket: int, lent: _Lent) -> None:
        evidence = evidence_names(lent.bits)
        lent.span.note(outcome="fenced" if lent.bits & Fact.FENCED else "returned", evidence=evidence)
        self._close(ticket)

    def _close(self, ticket: int, failure: str = "") -> None:
        lent = self._lent.pop(ticket)
        self._granted.discard(lent.key)
        lent.span.end(failure)
