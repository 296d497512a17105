"""The destination: admits transfer requests and runs them.

A request comes from the durable queue or by request-reply; both meet the same gate. Each transfer lives in a `Running`;
this file starts them, lets the ledger's facts and the time reach them, and forgets them when they are over.
"""

import math
from collections.abc import Sequence
from functools import partial

from kvbus.errors import BusError
from kvbus.events import PlanAnswered, TransferRequested, TransferVerdict
from kvbus.ledger.admission import Admission, AdmissionGate, Ground, Verdict
from kvbus.ledger.facts import FactDetail, FailureClass, OutcomeRow
from kvbus.ledger.transfer import STOP_WAIT_S, Phase, Transfer
from kvbus.ledger.types import LeaseFailure
from kvbus.names import token_bytes, tokens_from_bytes
from kvbus.roles.admitting import HANDED_BACK, WORD, Admitting, Offer, QueuedCancels, request_in, spent
from kvbus.roles.past import Past
from kvbus.roles.registry import Registered, Sources
from kvbus.roles.results import SETTLED, Results, outcome_of
from kvbus.roles.running import Agreed, ReaderSide, Running
from kvbus.roles.tasks import Tasks
from kvbus.roles.tokens import Content, Tokenizer, content_of
from kvbus.transport import Bus

OPEN_SHARE = 0.9
"""Of what remains, what may be spent on waiting for the other members: so that the answer says who is not there."""
SOURCES_MAX = 4_096
"""Sources whose epoch is remembered, several times the instances of a large cluster."""
_ENDED = Phase.ENDED  # looking a name up in an enum costs more than what is decided by it, for each line of facts


class Destination:
    """Runs this member's transfers; a `TransferFacts` follower of the rounds."""

    def __init__(
        self,
        *,
        side: ReaderSide,
        gate: AdmissionGate,
        results: Results,
        bus: Bus,
        tokenizer: Tokenizer,
        past: Past | None = None,
    ) -> None:
        self.results = results
        self._past = past
        self._side = side
        self._gate = gate
        self._sources = Sources(bus, side.clock)
        self._tokenizer = tokenizer
        self._running: dict[str, Running] = {}
        self._by_ticket: dict[int, Running] = {}
        self._by_hash: dict[str, str] = {}
        self._admitting: dict[str, Admitting] = {}
        self._cancels = QueuedCancels()
        self._tasks = Tasks()
        self._source_epochs: dict[str, int] = {}
        self._sharing: dict[str, Running] = {}
        self._number, self._faulted = 0, False
        self.closed = ""
        """Why nothing new is taken now; empty while requests are."""

    @property
    def running(self) -> int:
        """Transfers that have not ended."""
        return sum(one.transfer.phase is not _ENDED for one in self._running.values())

    def open_transfers(self) -> tuple[Transfer, ...]:
        """Return the transfers that have not ended."""
        return tuple(one.transfer for one in self._running.values() if one.transfer.phase is not _ENDED)

    # ----------------------------------------------------------------------------------------------------- requests

    async def request(self, request: TransferRequested, offer: Offer) -> tuple[TransferVerdict, str]:
        """Answer one request; return the verdict, and the transfer whose end the caller may await, or ""."""
        request_id, request_hash = request.request_id, request.request_hash
        verdict, reason, transfer = await self._admit(request, request_id, request_hash, offer)
        answer = TransferVerdict(
            request_id=request_id, request_hash=request_hash, verdict=WORD[verdict], reason=reason, transfer=transfer
        )
        if transfer:
            self.results.join(request, transfer)
        return answer, transfer

    def cancel(self, request_hash: str, text: str, *, said_unix_s: float) -> bool:
        """Stop the transfer of a request; False where none is running or being admitted here.

        What may still stand in the queue by then is cancelled when it is offered.
        """
        if request_hash in self._admitting:  # remembered until the transfer exists (contract 49)
            self._admitting[request_hash].cancelled = text
            return True
        running = self._running.get(self._by_hash.get(request_hash, ""))
        if running is None or running.transfer.phase is Phase.ENDED:
            self._cancels.note(request_hash, text, said_s=said_unix_s)
            return False
        running.unwanted = text  # so it is not handed back either, where this member is stopping already
        group = self._side.group
        if group is None or not group.cancel(running.transfer.transfer, text):
            running.cancelled(FailureClass.CANCELLED, text)
        return True

    def stop(self, text: str, *, fault: bool = False) -> None:
        """Take nothing new, and stop what runs; harmless to repeat. What the queue offered is handed back to it.

        `fault`: something broke in this run, perhaps by what it ran; so handing back counts as one of the few tries.
        """
        self.closed, self._faulted = text, fault
        for running in list(self._running.values()):
            running.cancelled(FailureClass.SHUTDOWN, text)

    def tick(self) -> None:
        """Let every transfer look at the time."""
        for running in list(self._running.values()):
            running.tick()
            if running.transfer.phase is _ENDED:
                self._forget_if_finished(running)
        for running in list(self._sharing.values()):
            self._conclude_if_overdue(running)

    async def close(self) -> None:
        """End the tasks that serve transfers."""
        await self._tasks.close()
        await self.results.close()

    # -------------------------------------------------------------------------------------------------------- facts

    def on_line(self, ticket: int, bits: int, lo: int, hi: int) -> None:
        """A line of facts, perhaps about one of ours."""
        if running := self._by_ticket.get(ticket):
            running.on_line(ticket, bits, lo, hi)
            if running.transfer.phase is _ENDED:
                self._forget_if_finished(running)

    def on_outcome(self, row: OutcomeRow) -> None:
        """An attempt ended."""
        if running := self._by_ticket.get(row.ticket):
            running.transfer.arrived(row.ticket, row.arrived, row.length_bytes)

    def on_detail(self, detail: FactDetail) -> None:
        """Why a lease failed."""
        if running := self._by_ticket.get(detail.ticket):
            running.transfer.detail(detail.ticket, detail.failure, detail.text)

    # ---------------------------------------------------------------------------------------------------- admission

    async def _admit(self, request: TransferRequested, request_id: str, request_hash: str, offer: Offer) -> Admission:
        """Answer a request. Those of one hash come one after the other, and one request is refused once.

        Else a second delivery might be refused, and taken off the queue, while the first is still to be admitted (P20).
        """
        while (other := self._admitting.get(request_hash)) is not None:
            await other.ended()
            if other.request_id == request_id and other.refusal is not None:
                return other.refusal
        cancelled = self._cancels.of(request_hash, sent_s=offer.sent_unix_s)
        own = self._admitting[request_hash] = Admitting(request_id, request_hash, cancelled)
        try:
            admission = await self._admit_alone(request, own, offer)
        finally:
            del self._admitting[request_hash]
            own.end()
        own.refusal = None if admission.transfer else admission
        return admission

    async def _admit_alone(self, request: TransferRequested, own: Admitting, offer: Offer) -> Admission:
        """Answer a request. Repeats are known before anything else is asked, whatever the state of this member."""
        asked_at, number = self._side.clock(), offer.number
        request_id, request_hash, source_name = own.request_id, own.request_hash, request.source
        known = self._gate.repeat(request_hash, request_id=request_id, source=source_name, now=asked_at)
        if known is not None:
            return known
        if number > 1 and (ended := await self._ended_before(request)) is not None:
            return ended
        past = self._past
        handed_back, left = past.spared(request_id, request_hash) if past is not None else (0, 0)
        limit_s = math.inf if handed_back else request.queue_limit_s  # what was accepted once was so in time
        if unable := self._unable(offer.waited_s, limit_s):
            return self._gate.refuse(*unable)
        source: Registered | str = spent(number - handed_back - left)
        if not source and not own.cancelled:
            source = await self._sources.find(source_name, self._side.pool.layout.fingerprint())
            if isinstance(source, str):
                return self._gate.refuse(source, "source")
        now = self._side.clock()
        queue_s = offer.waited_s + now - asked_at
        if unable := self._unable(queue_s, limit_s):  # once more: that took its time
            return self._gate.refuse(*unable)
        self._number += 1
        transfer_id = f"{self._side.instance}-{self._side.epoch & 0xFFFFFFFF:08x}-{self._number}"
        admission = self._gate.admit(
            request_hash, request_id=request_id, source=source_name, transfer=transfer_id, now=now
        )
        if admission.verdict is Verdict.ACCEPTED:
            transfer = Transfer(transfer_id, request_hash, source_name, now, request.budget_s, queue_s)
            self._start(request, transfer, source, cancelled=own.cancelled, queued=offer.queued)
        return admission

    async def _ended_before(self, request: TransferRequested) -> Admission | None:
        """Return the end of a request that another run of this instance has recorded, to be told again (P22)."""
        if self._past is None:
            return None
        try:
            outcome = await self._past.outcome(request.request_id)
        except BusError as error:
            return self._gate.refuse(f"bus_unavailable: {error}", "bus_unavailable")
        if outcome is None:
            return None
        self.results.recall(outcome)
        return Admission(Verdict.ADOPTED, "delivered again, and ended in an earlier run", outcome.transfer)

    async def left_before(self, request_hash: str) -> int:
        """Return how many offers of requests of this hash earlier runs have left to the next; BusError: not known."""
        return await self._past.left_before(request_hash) if self._past is not None else 0

    def _unable(self, queue_s: float, limit_s: float) -> tuple[str, Ground] | None:
        if self.closed:
            return self.closed, "stopping"
        if self._side.group is not None and not self._side.group.leads:
            return f"not_leading: {self._side.member} does not lead {self._side.instance} now; ask again", "not_leading"
        if self._side.recorder.is_busy or self._side.asker.is_full:
            return "bus_unavailable: facts or releases wait for the broker", "bus_unavailable"
        if queue_s > limit_s:
            return f"waited: {queue_s:.1f} s in the queue, at most {limit_s:g} s allowed", "waited"
        return None

    def _start(
        self, request: TransferRequested, transfer: Transfer, source: Registered | str, *, cancelled: str, queued: bool
    ) -> None:
        """Let a transfer begin; one that was cancelled, or whose source is a reason not to run it, ends at once."""
        running = Running(self._side, request, transfer, self._index, self._on_ended, queued=queued)
        self.results.open(transfer.transfer)
        self._running[transfer.transfer] = running
        self._by_hash[transfer.request_hash] = transfer.transfer
        self._note(transfer, "accepted", f"from {transfer.source}, on_miss {request.on_miss}", request.request_id)
        if cancelled:
            running.cancelled(FailureClass.CANCELLED, cancelled)
        if isinstance(source, str):
            running.failed(FailureClass.EXHAUSTED, source)
            self._forget_if_finished(running)
            return
        on_fault = partial(running.failed, FailureClass.CONTRADICTION)
        self._tasks.start(self._resolve(running, source), name="resolving", on_fault=on_fault)

    # ---------------------------------------------------------------------------------------------------- resolving

    async def _resolve(self, running: Running, source: Registered) -> None:
        """Find the prompt's token ids and let the transfer go on, or say why it ends here."""
        wait_s = running.transfer.remaining_s(self._side.clock())
        content = await content_of(running.request, self._side, self._tokenizer, source, wait_s=wait_s)
        if isinstance(content, LeaseFailure):
            running.failed(content.failure, content.text)
        else:
            await self._wait_for_same_content(running, content.names)
            if await self._opened(running, content.token_ids):
                self._readmit(source)
                running.resolved(source, content)
        self._forget_if_finished(running)

    async def _wait_for_same_content(self, running: Running, names: Sequence[bytes]) -> None:
        """Two prompts worded differently may tokenize alike: the second waits, and finds its pages here."""
        other = self._gate.same_content(running.transfer.request_hash, names[-1]) if names else None
        if other is not None:
            self._note(running.transfer, "waiting", f"transfer {other} brings the same tokens")
            await self.results.ended(other, running.transfer.remaining_s(self._side.clock()))

    def _readmit(self, source: Registered) -> None:
        """A source that comes under another epoch is a new process: whatever isolated the old one is over."""
        before = self._source_epochs.get(source.instance)
        if before != source.epoch:
            if len(self._source_epochs) >= SOURCES_MAX:
                self._source_epochs.clear()
            self._source_epochs[source.instance] = source.epoch
            if before is not None:
                self._side.rounds.holder.readmit(self._side.binding, source.instance)

    # --------------------------------------------------------------------------------------- with the other members

    def plan(self, transfer: str) -> PlanAnswered:
        """Return what the other members of this instance shall bring for a transfer that this one admitted."""
        running = self._running.get(transfer)
        if running is None or running.follows or not running.token_ids:
            return PlanAnswered(transfer=transfer, known=False)
        return PlanAnswered(
            transfer=transfer,
            known=True,
            request_id=running.request.request_id,
            request_hash=running.request.request_hash,
            source=running.request.source,
            salt=running.request.salt,
            on_miss=running.request.on_miss,
            tokens=token_bytes(running.token_ids),
            remaining_s=running.transfer.remaining_s(self._side.clock()),
            traceparent=self._side.recorder.spans.traceparent(transfer),
        )

    async def take_part(self, plan: PlanAnswered) -> None:
        """Bring this member's ranks of a transfer that another member admitted."""
        source = await self._sources.find(plan.source, self._side.pool.layout.fingerprint())
        group = self._side.group
        if group is None or not group.is_open(plan.transfer):
            return  # voided meanwhile
        request, now = request_in(plan, self._side.instance), self._side.clock()
        transfer = Transfer(plan.transfer, plan.request_hash, plan.source, now, plan.remaining_s)
        running = Running(self._side, request, transfer, self._index, self._on_ended, follows=True)
        self._running[plan.transfer] = self._sharing[plan.transfer] = running
        token_ids = tokens_from_bytes(plan.tokens)
        if self.closed or isinstance(source, str):
            running.failed(FailureClass.PEER_LOST, self.closed or str(source))
        elif reason := self._side.pool.unfit(token_ids, self._side.instance):
            running.failed(FailureClass.BAD_REQUEST, reason)
        else:
            self._readmit(source)
            running.resolved(source, Content.of_tokens(self._side.pool, token_ids, plan.salt))
        self._forget_if_finished(running)

    def stop_share(self, transfer: str, text: str) -> None:
        """Stop this member's share of a transfer that was cancelled."""
        if running := self._sharing.get(transfer):
            running.cancelled(FailureClass.CANCELLED, text)
            self._forget_if_finished(running)

    def over(self, transfer: str, agreed: Agreed) -> None:
        """Note how the members ended a transfer; what was pinned for it goes free, and who asked is told."""
        running = self._sharing.pop(transfer, None)
        if running is None:
            return
        running.agreed = agreed
        running.drop_pins()
        if not agreed.visible:
            running.failed(FailureClass.CONTRADICTION, agreed.reason)
        if running.transfer.phase is Phase.ENDED:
            self._conclude(running)
        self._forget_if_finished(running)

    async def _opened(self, running: Running, token_ids: tuple[int, ...]) -> bool:
        """Open a transfer over all members of this instance, where there are others; False ends it here."""
        group, transfer = self._side.group, running.transfer
        if group is None:
            return True
        running.token_ids = token_ids  # the others ask for them as soon as it is open
        self._sharing[transfer.transfer] = running
        wait_s = OPEN_SHARE * transfer.remaining_s(self._side.clock())
        reason = await group.open(transfer.transfer, transfer.deadline + STOP_WAIT_S, wait_s=wait_s)
        if reason:
            self._sharing.pop(transfer.transfer, None)
            running.failed(FailureClass.BINDING_STOPPED, reason)
            self._conclude(running)  # also where it was cancelled, and ended, before it was refused
        elif transfer.phase is Phase.ENDED:  # cancelled meanwhile
            group.refuse(transfer.transfer, transfer.reason)
        return not reason

    def _conclude_if_overdue(self, running: Running) -> None:
        """Stop waiting for the others: whoever asked is told, and the leases go on waiting for their decision."""
        if running.transfer.phase is Phase.ENDED and self._side.clock() >= running.transfer.deadline + 2 * STOP_WAIT_S:
            self._conclude(running)

    # ------------------------------------------------------------------------------------------------------- ending

    def _index(self, running: Running) -> None:
        for ticket in running.tickets:
            self._by_ticket[ticket] = running

    def _on_ended(self, running: Running) -> None:
        if running.transfer.transfer not in self._sharing:
            self._conclude(running)

    def _conclude(self, running: Running) -> None:
        if running.follows or running.concluded:
            return
        running.concluded = True
        outcome = outcome_of(running.transfer, destination=self._side.instance, agreed=running.agreed)
        if running.unwanted and outcome.outcome == "cancelled":
            outcome = outcome.model_copy(update={"failure": "cancelled", "reason": running.unwanted})
        settled = outcome.outcome in SETTLED
        if not settled:  # another run of the source may stand in the registry by now
            self._sources.forget(running.transfer.source)
        self._gate.ended(running.transfer.request_hash, settled=settled)
        if running.is_handed_back and not settled:
            if not self._faulted:
                self._note(running.transfer, HANDED_BACK, outcome.reason, running.request.request_id)
            self.results.hand_back(outcome, running.request)
        else:
            self.results.conclude(outcome, running.request)

    def _forget_if_finished(self, running: Running) -> None:
        if not running.transfer.finished:
            return
        transfer, request_hash = running.transfer.transfer, running.transfer.request_hash
        self._running.pop(transfer, None)
        if self._by_hash.get(request_hash) == transfer:
            del self._by_hash[request_hash]
        for ticket in running.tickets:
            self._by_ticket.pop(ticket, None)

    def _note(self, transfer: Transfer, step: str, text: str, cause: str = "") -> None:
        self._side.recorder.step(transfer.transfer, transfer.request_hash, step, text, cause)
