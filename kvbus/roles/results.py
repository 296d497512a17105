"""Results: who wants to hear how a transfer ends, and what was said to whom.

Whoever repeats a request joins the transfer that serves it, and hears its outcome, also where that came before. Results
travel as core messages; the facts stream holds each outcome too, so a requester that is away loses nothing.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Final

from kvbus.errors import BusError
from kvbus.events import TransferOutcome, TransferRequested, TransferVerdict
from kvbus.ledger.facts import FailureClass
from kvbus.ledger.transfer import Transfer
from kvbus.parts import Body
from kvbus.roles.counting import TransferTotals
from kvbus.roles.moments import Moment, wake
from kvbus.roles.recorder import Recorder
from kvbus.roles.running import Agreed
from kvbus.roles.tasks import started
from kvbus.topics import Topics
from kvbus.transport import Bus

LISTENERS_MAX = 64
"""Requesters that are told of one transfer; more than that joining one prompt within its life is a loop, not a need.
The facts stream tells the others."""
OUTCOMES_MAX = 4_096
"""Outcomes kept for late repeats; about 1 KiB each."""
SETTLED: Final = frozenset({"settled", "partial"})

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Joined:
    requesters: dict[str, None] = field(default_factory=dict)  # in order of asking: told in one order in every run
    ended: Moment = field(default_factory=Moment)


class Results:
    """Keeps the listeners of running transfers and the outcomes of ended ones; tells both."""

    def __init__(self, *, bus: Bus, topics: Topics, recorder: Recorder) -> None:
        self._bus = bus
        self._topics = topics
        self._recorder = recorder
        self._joined: dict[str, _Joined] = {}
        self._outcomes: OrderedDict[str, TransferOutcome] = OrderedDict()
        self._handed_back: OrderedDict[str, None] = OrderedDict()
        # Of what ended in one turn, or while the bus stood: at most all that runs, since nothing new is begun then.
        self._unsaid: deque[tuple[str, Body, str]] = deque()
        self._telling: asyncio.Task[None] | None = None
        self._silent: asyncio.Future[None] | None = None
        self._closed = False
        self.totals = TransferTotals()

    def open(self, transfer: str) -> None:
        """Let requesters join a transfer; before anything of it can end, so that nobody misses the outcome."""
        self._joined[transfer] = _Joined()

    def join(self, request: TransferRequested, transfer: str) -> None:
        """Let a requester hear the outcome: when it comes, or now if it has come."""
        joined = self._joined.get(transfer)
        if joined is not None:
            if len(joined.requesters) < LISTENERS_MAX:
                joined.requesters[request.requester] = None
        elif outcome := self._outcomes.get(transfer):
            self._say(request.requester, outcome, request.request_id)

    def recall(self, outcome: TransferOutcome) -> None:
        """Know how a transfer of an earlier run ended, for whoever joins it."""
        self._outcomes[outcome.transfer] = outcome
        if len(self._outcomes) > OUTCOMES_MAX:
            self._outcomes.popitem(last=False)

    async def ended(self, transfer: str, wait_s: float) -> bool:
        """Wait until a transfer has ended; False where that takes longer than the wait."""
        joined = self._joined.get(transfer)
        return joined is None or await joined.ended.within(wait_s)

    def conclude(self, outcome: TransferOutcome, request: TransferRequested) -> None:
        """Record how a transfer ended, and tell everybody who asked."""
        self.recall(outcome)
        self.totals.add(outcome)
        self._recorder.event(outcome, cause=request.request_id)
        joined = self._joined.pop(outcome.transfer, None)
        if joined is not None:
            joined.ended.come()
            for requester in joined.requesters:
                self._say(requester, outcome, request.request_id)

    def hand_back(self, outcome: TransferOutcome, request: TransferRequested) -> None:
        """Record that a transfer ended without an answer to its request, which the queue is to offer again.

        The outcome does not stand under the request's id: whoever is offered it next runs it (P22). Others who joined
        are told, since nobody will know of them there.
        """
        self._handed_back[outcome.transfer] = None
        if len(self._handed_back) > OUTCOMES_MAX:
            self._handed_back.popitem(last=False)
        self._recorder.event(outcome)
        joined = self._joined.pop(outcome.transfer, None)
        if joined is not None:
            joined.ended.come()
            for requester in joined.requesters:
                if requester != request.requester:
                    self._say(requester, outcome, request.request_id)

    def is_handed_back(self, transfer: str) -> bool:
        """Whether a transfer has ended such that its request is the queue's again."""
        return transfer in self._handed_back

    async def tell_verdict(self, request: TransferRequested, verdict: TransferVerdict) -> None:
        """Send a verdict to its requester."""
        await self._tell(request.requester, verdict, request.request_id)

    async def close(self) -> None:
        """End what is still being told; what is said after this is told too, by a task that ends with it."""
        self._closed = True
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)

    async def _tell(self, requester: str, body: Body, cause: str) -> None:
        try:
            await self._bus.publish(self._topics.result(requester), self._recorder.encoded(body, cause))
        except BusError as error:
            log.info("result for %s not sent: %s", requester, error)

    def _say(self, requester: str, body: Body, cause: str) -> None:
        """Tell something soon: one task, which lasts until the close, tells in order what there is to say by then."""
        self._unsaid.append((requester, body, cause))
        self._go_on()

    def _go_on(self, _fault: str = "") -> None:
        """Have a task tell what is not told yet; a fault in telling one thing costs none of the others."""
        if self._telling is None or self._telling.done():
            self._telling = started(self._tell_all(), name="telling", on_fault=self._go_on)
        elif self._silent is not None:
            wake(self._silent)

    async def _tell_all(self) -> None:
        while True:
            while self._unsaid:
                await self._tell(*self._unsaid.popleft())
            if self._closed:
                return
            self._silent = asyncio.get_running_loop().create_future()
            try:
                await self._silent
            finally:
                self._silent = None


def outcome_of(transfer: Transfer, *, destination: str, agreed: Agreed | None = None) -> TransferOutcome:
    """Return how a transfer ended, as everybody hears it; with other members, as all of them agreed."""
    lo, hi = transfer.bounds
    outcome = _outcome_here(transfer, destination, lo, hi)
    return outcome if agreed is None else _outcome_of_all(outcome, agreed)


def _outcome_of_all(here: TransferOutcome, agreed: Agreed) -> TransferOutcome:
    """Return what a transfer came to over all ranks: never more than what it came to here."""
    if not agreed.visible:
        changes: dict[str, object] = {"lo": 0, "hi": 0}
        if here.outcome in SETTLED:
            failure = FailureClass.CONTRADICTION.name.lower()
            changes |= {"outcome": "failed", "failure": failure, "reason": agreed.reason[:2_000]}
        return here.model_copy(update=changes)
    changes = {"lo": agreed.lo, "hi": agreed.hi}
    if here.outcome == "settled" and agreed.hi < here.pages_wanted:
        reason = f"every rank has blocks {agreed.lo} to {agreed.hi} of {here.pages_wanted}"
        changes |= {"outcome": "partial" if agreed.hi else "failed", "reason": reason}
        changes |= {} if agreed.hi else {"failure": FailureClass.TRANSPORT.name.lower()}
    return here.model_copy(update=changes)


def _outcome_here(transfer: Transfer, destination: str, lo: int, hi: int) -> TransferOutcome:
    timings = transfer.timings
    return TransferOutcome(
        transfer=transfer.transfer,
        request_hash=transfer.request_hash,
        source=transfer.source,
        destination=destination,
        outcome=transfer.outcome or "failed",  # type: ignore[arg-type] # the transfer's words are the event's
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
