"""The destination: admits transfer requests and runs them.

A request comes from the durable queue or by request-reply; both meet the same gate. Each transfer lives in a `Running`;
this file starts them, lets the ledger's facts and the time reach them, and forgets them when they are over.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from kvbus.engines.desk import Refusal
from kvbus.errors import BusError, KvbusError
from kvbus.events import TransferRequested, TransferStep, TransferVerdict
from kvbus.ledger.admission import Admission, AdmissionGate, Verdict
from kvbus.ledger.facts import FactDetail, FailureClass, OutcomeRow
from kvbus.ledger.transfer import Phase, Transfer
from kvbus.ledger.types import LeaseFailure
from kvbus.names import tokens_from_bytes
from kvbus.parts import Prompt, VerdictWord
from kvbus.roles.registry import Registered, lookup
from kvbus.roles.results import SETTLED, Results, outcome_of
from kvbus.roles.running import ReaderSide, Running
from kvbus.transport import Bus

WORD: Final[dict[Verdict, VerdictWord]] = {
    Verdict.ACCEPTED: "accepted",
    Verdict.ADOPTED: "accepted",  # its own request, delivered again
    Verdict.DEDUPED: "deduped",
    Verdict.SKIPPED_BUSY: "skipped_busy",
    Verdict.REFUSED: "refused",
}
SOURCES_MAX = 4_096
"""Sources whose epoch is remembered, several times the instances of a large cluster."""


class Tokenizer(Protocol):
    """The local engine, as far as a destination needs it."""

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...] | Refusal:
        """Return a prompt's token ids, or why it has none."""


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
        wall_s: Callable[[], float],
    ) -> None:
        self.results = results
        self._side = side
        self._gate = gate
        self._bus = bus
        self._tokenizer = tokenizer
        self._wall_s = wall_s
        self._running: dict[str, Running] = {}
        self._by_ticket: dict[int, Running] = {}
        self._by_hash: dict[str, str] = {}
        self._admitting: dict[str, bool] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._source_epochs: dict[str, int] = {}
        self._number = 0
        self._stopping = ""

    @property
    def running(self) -> int:
        """Transfers that have not ended."""
        return sum(1 for one in self._running.values() if one.transfer.phase is not Phase.ENDED)

    # ----------------------------------------------------------------------------------------------------- requests

    async def request(self, request: TransferRequested, *, sent_unix_s: float) -> tuple[TransferVerdict, str]:
        """Answer one request; return the verdict, and the transfer whose end the caller may await, or ""."""
        admission = await self._admit(request, max(0.0, self._wall_s() - sent_unix_s))
        answer = TransferVerdict(
            request_id=request.request_id,
            request_hash=request.request_hash,
            verdict=WORD[admission.verdict],
            reason=admission.reason,
            transfer=admission.transfer,
        )
        if admission.transfer:
            self.results.join(request, admission.transfer)
        return answer, admission.transfer

    def cancel(self, request_hash: str, text: str) -> bool:
        """Stop the transfer of a request; False where none is running or being admitted."""
        if request_hash in self._admitting:  # remembered until the transfer exists (contract 49)
            self._admitting[request_hash] = True
            return True
        running = self._running.get(self._by_hash.get(request_hash, ""))
        if running is None or running.transfer.phase is Phase.ENDED:
            return False
        running.cancelled(FailureClass.CANCELLED, text)
        return True

    def stop(self, text: str) -> None:
        """Take nothing new, and stop what runs; harmless to repeat."""
        self._stopping = text
        for running in list(self._running.values()):
            running.cancelled(FailureClass.SHUTDOWN, text)

    def tick(self) -> None:
        """Let every transfer look at the time."""
        for running in list(self._running.values()):
            running.tick()
            self._forget_if_finished(running)

    async def close(self) -> None:
        """End the tasks that serve transfers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.results.close()

    # -------------------------------------------------------------------------------------------------------- facts

    def on_line(self, ticket: int, bits: int, lo: int, hi: int) -> None:
        """A line of facts, perhaps about one of ours."""
        if running := self._by_ticket.get(ticket):
            running.on_line(ticket, bits, lo, hi)
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

    async def _admit(self, request: TransferRequested, queue_s: float) -> Admission:
        """Answer a request. Repeats are known before anything else is asked, whatever the state of this member."""
        who = {"request_id": request.request_id, "source": request.source}
        known = self._gate.repeat(request.request_hash, **who, now=self._side.clock())
        if known is not None:
            return known
        if reason := self._unable(request, queue_s):
            return self._gate.refuse(reason)
        self._admitting.setdefault(request.request_hash, False)
        try:
            source = await self._registered(request.source)
        finally:
            cancelled = self._admitting.pop(request.request_hash, False)
        if isinstance(source, str):
            return self._gate.refuse(source)
        self._number += 1
        transfer_id = f"{self._side.instance}-{self._side.epoch & 0xFFFFFFFF:08x}-{self._number}"
        now = self._side.clock()
        admission = self._gate.admit(request.request_hash, **who, transfer=transfer_id, now=now)
        if admission.verdict is Verdict.ACCEPTED:
            transfer = Transfer(transfer_id, request.request_hash, request.source, now, request.budget_s, queue_s)
            self._start(request, transfer, source, cancelled=cancelled)
        return admission

    def _unable(self, request: TransferRequested, queue_s: float) -> str:
        if self._stopping:
            return self._stopping
        if self._side.recorder.is_busy or self._side.asker.is_full:
            return "bus_unavailable: facts or releases wait for the broker"
        if queue_s > request.queue_limit_s:
            return f"waited {queue_s:.1f} s in the queue, at most {request.queue_limit_s:g} s allowed"
        return ""

    async def _registered(self, source: str) -> Registered | str:
        try:
            registered = await lookup(self._bus, source)
        except BusError as error:
            return f"bus_unavailable: {error}"
        if not registered:
            return f"no instance {source!r} is registered: is its worker running?"
        return registered[0]

    def _start(self, request: TransferRequested, transfer: Transfer, source: Registered, *, cancelled: bool) -> None:
        running = Running(self._side, request, transfer, self._index, self._on_ended)
        self.results.open(transfer.transfer)
        self._running[transfer.transfer] = running
        self._by_hash[request.request_hash] = transfer.transfer
        self._note(transfer, "accepted", f"from {request.source}, on_miss {request.on_miss}")
        if cancelled:
            running.cancelled(FailureClass.CANCELLED, "cancelled while it was being admitted")
        task = asyncio.get_running_loop().create_task(self._resolve(running, source))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---------------------------------------------------------------------------------------------------- resolving

    async def _resolve(self, running: Running, source: Registered) -> None:
        """Find the prompt's token ids and let the transfer go on, or say why it ends here."""
        token_ids = await self._token_ids(running.request, running.transfer)
        if isinstance(token_ids, LeaseFailure):
            running.failed(token_ids.failure, token_ids.text)
        elif reason := self._unfit(token_ids):
            running.failed(FailureClass.BAD_REQUEST, reason)
        else:
            await self._wait_for_same_content(running, token_ids)
            self._readmit(source)
            running.resolved(source, token_ids)
        self._forget_if_finished(running)

    async def _token_ids(self, request: TransferRequested, transfer: Transfer) -> tuple[int, ...] | LeaseFailure:
        if request.prompt.tokens is not None:
            return tokens_from_bytes(request.prompt.tokens)
        wait_s = transfer.remaining_s(self._side.clock())
        try:
            async with asyncio.timeout(wait_s):
                ids = await self._tokenizer.tokenize(request.prompt)
        except TimeoutError:
            return LeaseFailure(FailureClass.DEADLINE, "the engine did not tokenize the prompt within the budget")
        except KvbusError as error:  # the engine went away
            return LeaseFailure(FailureClass.ENGINE_LOST, str(error))
        return LeaseFailure(FailureClass.BAD_REQUEST, ids.text) if isinstance(ids, Refusal) else ids

    def _unfit(self, token_ids: tuple[int, ...]) -> str | None:
        """Return why a prompt cannot be taken: too long for the engine or the pool, or an id that no token has."""
        pool, name, tokens = self._side.pool, self._side.instance, len(token_ids)
        if tokens > pool.tokens_max:
            return (
                f"the prompt has {tokens} tokens, {name} keeps room for {pool.tokens_max}: shorten it, or start {name} "
                "with a larger --prompt-tokens-max"
            )
        blocks = tokens // pool.layout.block_tokens
        if blocks > pool.lent_cap_pages:
            return f"the prompt needs {blocks} pages, {name} takes at most {pool.lent_cap_pages} for peers"
        if max(token_ids, default=0) >= pool.vocab_size:
            return f"token id {max(token_ids)} is out of range: {name}'s vocabulary has {pool.vocab_size} tokens"
        return None

    async def _wait_for_same_content(self, running: Running, token_ids: tuple[int, ...]) -> None:
        """Two prompts worded differently may tokenize alike: the second waits, and finds its pages here."""
        names = self._side.pool.names(token_ids, running.request.salt)
        other = self._gate.same_content(running.request.request_hash, names[-1]) if names else None
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

    # ------------------------------------------------------------------------------------------------------- ending

    def _index(self, running: Running) -> None:
        for ticket in running.tickets:
            self._by_ticket[ticket] = running

    def _on_ended(self, running: Running) -> None:
        outcome = outcome_of(running.transfer, destination=self._side.instance)
        self._gate.ended(running.request.request_hash, settled=outcome.outcome in SETTLED)
        self.results.conclude(outcome, running.request)

    def _forget_if_finished(self, running: Running) -> None:
        if not running.transfer.finished:
            return
        transfer, request_hash = running.transfer.transfer, running.request.request_hash
        self._running.pop(transfer, None)
        if self._by_hash.get(request_hash) == transfer:
            del self._by_hash[request_hash]
        for ticket in running.tickets:
            self._by_ticket.pop(ticket, None)

    def _note(self, transfer: Transfer, step: str, text: str) -> None:
        body = TransferStep(transfer=transfer.transfer, request_hash=transfer.request_hash, step=step, text=text)
        self._side.recorder.event(body)
