"""The destination: admits transfer requests, runs them, and tells everybody who asked how they ended.

A request comes from the durable queue or by request-reply; both meet the same gate. Whoever repeats a request hears of
the transfer that it joined, also when that has ended already.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvbus.engines.desk import Refusal
from kvbus.errors import BusError, KvbusError
from kvbus.events import TransferOutcome, TransferRequested, TransferStep, TransferVerdict, encode
from kvbus.ledger.admission import Admission, AdmissionGate, Verdict
from kvbus.ledger.facts import FactDetail, FailureClass, OutcomeRow
from kvbus.ledger.transfer import Phase, Transfer
from kvbus.names import tokens_from_bytes
from kvbus.parts import Body, Prompt, VerdictWord
from kvbus.roles.registry import Registered, lookup
from kvbus.roles.running import ReaderSide, Running
from kvbus.topics import Topics
from kvbus.transport import Bus

LISTENERS_MAX = 64
"""Requesters that hear of one transfer; more than that joining one prompt within its life is a loop, not a need."""
OUTCOMES_MAX = 4_096
"""Outcomes kept for late repeats; about 1 KiB each."""
TELL_WAIT_S = 5.0

WORD: Final[dict[Verdict, VerdictWord]] = {
    Verdict.ACCEPTED: "accepted",
    Verdict.DEDUPED: "deduped",
    Verdict.SKIPPED_BUSY: "skipped_busy",
    Verdict.REFUSED: "refused",
}

log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """The local engine, as far as a destination needs it."""

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...] | Refusal:
        """Return a prompt's token ids, or why it has none."""


@dataclass(slots=True)
class _Joined:
    """Who wants to hear how a transfer ends; `ended` fires once that is known."""

    requesters: set[str] = field(default_factory=set)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Destination:
    """Runs this member's transfers; a `TransferFacts` follower of the rounds."""

    def __init__(
        self,
        *,
        side: ReaderSide,
        gate: AdmissionGate,
        bus: Bus,
        topics: Topics,
        tokenizer: Tokenizer,
        wall_s: Callable[[], float],
    ) -> None:
        self._side = side
        self._gate = gate
        self._bus = bus
        self._topics = topics
        self._tokenizer = tokenizer
        self._wall_s = wall_s
        self._running: dict[str, Running] = {}
        self._by_ticket: dict[int, Running] = {}
        self._by_hash: dict[str, str] = {}
        self._joined: dict[str, _Joined] = {}
        self._outcomes: OrderedDict[str, TransferOutcome] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._isolated_epochs: dict[str, int] = {}
        self._number = 0
        self._stopping = False

    @property
    def running(self) -> int:
        """Transfers that have not ended."""
        return sum(1 for one in self._running.values() if one.transfer.phase is not Phase.ENDED)

    # ----------------------------------------------------------------------------------------------------- requests

    async def request(self, request: TransferRequested, *, sent_unix_s: float) -> tuple[TransferVerdict, str]:
        """Answer one request; return the verdict, and the transfer whose end the caller may await, or ""."""
        queue_s = max(0.0, self._wall_s() - sent_unix_s)
        admission = await self._admit(request, queue_s)
        adopted = admission.verdict is Verdict.ADOPTED  # its own request, delivered again
        answer = TransferVerdict(
            request_id=request.request_id,
            request_hash=request.request_hash,
            verdict=WORD[Verdict.ACCEPTED if adopted else admission.verdict],
            reason=admission.reason,
            transfer=admission.transfer,
        )
        if admission.transfer:
            self._join(request, admission.transfer)
        return answer, admission.transfer

    async def ended(self, transfer: str, wait_s: float) -> bool:
        """Wait until a transfer has ended; False where that takes longer than the wait."""
        joined = self._joined.get(transfer)
        if joined is None:
            return True
        try:
            async with asyncio.timeout(wait_s):
                await joined.ended.wait()
        except TimeoutError:
            return False
        return True

    def cancel(self, request_hash: str, text: str) -> bool:
        """Stop the transfer of a request; False where none is running."""
        running = self._running.get(self._by_hash.get(request_hash, ""))
        if running is None or running.transfer.phase is Phase.ENDED:
            return False
        running.cancelled(text)
        return True

    def stop(self, text: str) -> None:
        """Take nothing new, and stop what runs."""
        self._stopping = True
        for running in list(self._running.values()):
            running.cancelled(text)

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

    # ------------------------------------------------------------------------------------------------------- inside

    async def _admit(self, request: TransferRequested, queue_s: float) -> Admission:
        if self._stopping:
            return self._gate.refuse(f"{self._side.instance} is stopping")
        if self._side.recorder.is_busy or self._side.asker.is_full:
            return self._gate.refuse("bus_unavailable: facts wait for the broker")
        if queue_s > request.queue_limit_s:
            return self._gate.refuse(
                f"waited {queue_s:.1f} s in the queue, at most {request.queue_limit_s:g} s allowed"
            )
        self._number += 1
        transfer_id = f"{self._side.instance}-{self._side.epoch & 0xFFFFFFFF:08x}-{self._number}"
        now = self._side.clock()
        admission = self._gate.admit(
            request.request_hash, request_id=request.request_id, source=request.source, transfer=transfer_id, now=now
        )
        if admission.verdict is not Verdict.ACCEPTED:
            return admission
        # Joined before anything can end, so that nobody who asked misses the outcome.
        self._joined[transfer_id] = _Joined()
        source = await self._registered(request.source)
        if isinstance(source, str):
            self._gate.ended(request.request_hash, settled=False)
            self._joined.pop(transfer_id).ended.set()
            return self._gate.refuse(source)
        transfer = Transfer(transfer_id, request.request_hash, request.source, now, request.budget_s, queue_s)
        running = Running(self._side, request, transfer, self._index, self._on_ended)
        self._running[transfer_id] = running
        self._by_hash[request.request_hash] = transfer_id
        self._note(transfer, "accepted", f"from {request.source}, on_miss {request.on_miss}")
        self._spawn(self._resolve(running, source))
        return admission

    async def _registered(self, source: str) -> Registered | str:
        try:
            registered = await lookup(self._bus, source)
        except BusError as error:
            return f"bus_unavailable: {error}"
        if not registered:
            return f"no instance {source!r} is registered: is its worker running?"
        return registered[0]

    async def _resolve(self, running: Running, source: Registered) -> None:
        """Find the prompt's token ids and let the transfer go on, or say why it ends here."""
        token_ids = await self._token_ids(running.request, running.transfer)
        if isinstance(token_ids, Refusal):
            running.failed(FailureClass.BAD_REQUEST, token_ids.text)
        elif reason := self._too_long(len(token_ids)):
            running.failed(FailureClass.BAD_REQUEST, reason)
        else:
            await self._wait_for_same_content(running, token_ids)
            self._readmit(source)
            running.resolved(source, token_ids)
        self._forget_if_finished(running)

    def _too_long(self, tokens: int) -> str | None:
        pool = self._side.pool
        if tokens > pool.tokens_max:
            return f"the prompt has {tokens} tokens, the engine of {self._side.instance} takes {pool.tokens_max}"
        blocks = tokens // pool.layout.block_tokens
        if blocks > pool.lent_cap_pages:
            return (
                f"the prompt needs {blocks} pages, {self._side.instance} takes at most {pool.lent_cap_pages} for peers"
            )
        return None

    async def _wait_for_same_content(self, running: Running, token_ids: tuple[int, ...]) -> None:
        """Two prompts worded differently may tokenize alike: the second waits, and finds its pages here."""
        names = self._side.pool.names(token_ids, running.request.salt)
        other = self._gate.same_content(running.request.request_hash, names[-1]) if names else None
        if other is not None:
            self._note(running.transfer, "waiting", f"transfer {other} brings the same tokens")
            await self.ended(other, running.transfer.remaining_s(self._side.clock()))

    async def _token_ids(self, request: TransferRequested, transfer: Transfer) -> tuple[int, ...] | Refusal:
        if request.prompt.tokens is not None:
            return tokens_from_bytes(request.prompt.tokens)
        wait_s = transfer.remaining_s(self._side.clock())
        try:  # asked whole: it may raise where the engine goes away meanwhile
            async with asyncio.timeout(wait_s):
                return await self._tokenizer.tokenize(request.prompt)
        except TimeoutError:
            return Refusal("the engine did not tokenize the prompt within the budget")
        except KvbusError as error:
            return Refusal(str(error))

    def _readmit(self, source: Registered) -> None:
        """A source that was isolated and came back under a new epoch is a new process: take it again."""
        isolated = self._isolated_epochs.get(source.instance)
        if isolated is not None and isolated != source.epoch:
            del self._isolated_epochs[source.instance]
            self._side.rounds.holder.readmit(self._side.binding, source.instance)

    def _index(self, running: Running) -> None:
        for ticket in running.tickets:
            self._by_ticket[ticket] = running

    def _on_ended(self, running: Running) -> None:
        if running.transfer.isolated and running.source is not None:
            self._isolated_epochs[running.request.source] = running.source.epoch
        self._conclude(running.transfer, running.request)

    def _conclude(self, transfer: Transfer, request: TransferRequested) -> None:
        outcome = self._outcome(transfer, request)
        self._gate.ended(request.request_hash, settled=outcome.outcome in {"settled", "partial"})
        self._outcomes[transfer.transfer] = outcome
        if len(self._outcomes) > OUTCOMES_MAX:
            self._outcomes.popitem(last=False)
        self._side.recorder.event(outcome, cause=request.request_id)
        joined = self._joined.pop(transfer.transfer, None)
        if joined is not None:
            joined.ended.set()
            for requester in joined.requesters:
                self._spawn(self._tell(requester, outcome, request.request_id))

    def _outcome(self, transfer: Transfer, request: TransferRequested) -> TransferOutcome:
        lo, hi = transfer.bounds
        timings = transfer.timings
        return TransferOutcome(
            transfer=transfer.transfer,
            request_hash=request.request_hash,
            source=request.source,
            destination=self._side.instance,
            outcome=transfer.outcome or "failed",  # type: ignore[arg-type]
            failure=transfer.failure.name.lower() if transfer.failure else "",
            reason=transfer.reason[:2_000],
            evidence=transfer.evidence,
            prompt_tokens=transfer.prompt_tokens,
            pages_wanted=transfer.blocks_wanted,
            pages_held=transfer.blocks_held,
            pages_moved=transfer.blocks_moved,
            length_bytes=transfer.length_bytes,
            lo=lo,
            hi=hi,
            queue_s=timings.queue_s,
            grant_s=timings.grant_s,
            move_s=timings.move_s,
            total_s=timings.total_s,
        )

    def _forget_if_finished(self, running: Running) -> None:
        if running.transfer.finished:
            self._running.pop(running.transfer.transfer, None)
            self._by_hash.pop(running.request.request_hash, None)
            for ticket in running.tickets:
                self._by_ticket.pop(ticket, None)

    # ----------------------------------------------------------------------------------------------------- telling

    def _join(self, request: TransferRequested, transfer: str) -> None:
        """Let a requester hear the outcome: when it comes, or now if it has come."""
        joined = self._joined.get(transfer)
        if joined is not None and len(joined.requesters) < LISTENERS_MAX:
            joined.requesters.add(request.requester)
        elif outcome := self._outcomes.get(transfer):
            self._spawn(self._tell(request.requester, outcome, request.request_id))

    async def _tell(self, requester: str, body: Body, cause: str) -> None:
        """Send a result; the facts stream holds it too, so a requester that is not there loses nothing."""
        try:
            data = encode(self._side.recorder.header(body.KIND, cause), body)
            await self._bus.publish(self._topics.result(requester), data)
        except BusError as error:
            log.info("result for %s not sent: %s", requester, error)

    async def tell_verdict(self, request: TransferRequested, verdict: TransferVerdict) -> None:
        """Send a verdict to its requester."""
        await self._tell(request.requester, verdict, request.request_id)

    def _note(self, transfer: Transfer, step: str, text: str) -> None:
        body = TransferStep(transfer=transfer.transfer, request_hash=transfer.request_hash, step=step, text=text)
        self._side.recorder.event(body)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
