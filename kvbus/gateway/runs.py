"""Transfers that a gateway runs: from a place at the gate, over the destination's verdict, to the outcome.

One task serves each. Whatever happens to it, the gate hears of an end exactly once: a request that was not taken on is
withdrawn, one that was fired ends.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvbus.errors import BusError
from kvbus.events import TransferOutcome
from kvbus.gateway.answers import Problem
from kvbus.gateway.asked import Asked
from kvbus.gateway.gate import TransferGate
from kvbus.gateway.records import Record, Status
from kvbus.publisher import Publisher, TransferHandle, Verdict

VERDICT_WAIT_S = 2.0
"""A destination answers within milliseconds; one that is away leaves the request in its queue, and the caller goes."""
QUEUE_WAIT_S = 60.0
"""As the request itself says: the destination refuses one that waited longer."""
HANDED_BACK_WAIT_S = 600.0
"""The queue keeps a request so long: within it the next run of its destination takes up what was handed back."""
CANCEL_PAUSE_S = 1.0
"""Between two tries of a cancel that nobody has heard; a broker that was restarted is back by then."""
SLACK_S = 10.0
"""Beyond queue and budget: how long an outcome may take to arrive, as in `kvbus stage`."""

log = logging.getLogger(__name__)

_STATUS: dict[str, Status] = {"settled": "transferred", "partial": "transferred", "cancelled": "cancelled"}
_SOURCE_WORDS = "source "  # one that is not registered passes, as what a destination says of itself


@dataclass(frozen=True, slots=True)
class Taken:
    """What the destination made of a request; `problem` where it was not taken on for a reason that is no load."""

    word: Literal["accepted", "deduped", "skipped_busy"] = "accepted"
    reason: str = ""
    problem: Problem | None = None


@dataclass(slots=True, eq=False)
class Run:
    """One request on its way; `taken` is set once the destination, or its queue, has spoken."""

    record: Record
    gate: TransferGate
    asked: Asked
    publisher: Publisher
    on_end: Callable[[Record], None]
    taken: "asyncio.Future[Taken]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    handle: TransferHandle | None = None
    cancel_wanted: bool = False
    stopping: "asyncio.Task[None] | None" = None

    async def serve(self) -> None:
        """See the request through to its end."""
        reason = "a fault of the gateway ended its watch over this: its log says more"
        try:
            verdict = await self._verdict()
            if verdict is not None and self._take(verdict):
                await self._follow(verdict)
        except asyncio.CancelledError:
            reason = "the gateway stopped before an outcome came"
            raise
        finally:
            if self.stopping is not None:
                self.stopping.cancel()
            self._close(reason)

    def hear(self, outcome: TransferOutcome, cause: str) -> None:
        """Take an outcome that the facts told: results may be lost on their way, facts are not.

        One without a cause answers no request: its transfer was handed back, and the queue offers the request again.
        """
        record = self.record
        if self.handle is None or outcome.transfer != record.transfer:
            return
        if cause or not record.ours:
            self.handle.hear_outcome(outcome)
        elif not record.ended:
            record.status = "queued"

    def move(self, transfer: str, cause: str) -> bool:
        """Follow a request to the transfer that serves it now, after a restart; False where it is not this request."""
        record, handle = self.record, self.handle
        if handle is None or not record.transfer or record.ended or cause != handle.request.request_id:
            return False
        record.transfer, record.status = transfer, "running"
        handle.hear_moved(transfer)
        self._stop_soon()
        return True

    async def cancel(self) -> bool:
        """Ask the destination to stop; whether it has heard that, or will once it takes the request on.

        Where it runs already and nobody hears, nothing is left behind; BusError says that the bus is away.
        """
        waits = self.record.status in {"asking", "queued"}
        self.cancel_wanted |= waits
        try:
            heard = await self.publisher.cancel(self.record.request_hash, self.record.destination)
        except BusError:
            if not waits:
                raise
            heard = False
        return heard or waits

    # ------------------------------------------------------------------------------------------------------- inside

    async def _verdict(self) -> Verdict | None:
        record, asked = self.record, self.asked
        try:
            self.handle = await self.publisher.transfer(
                source=record.source,
                destination=record.destination,
                prompt=asked.prompt,
                model=asked.model,
                salt=asked.salt,
                on_miss=asked.on_miss,
                budget_s=asked.budget_s,
            )
        except ValueError as error:
            self._refuse(Problem(400, str(error)))
            return None
        except BusError as error:
            self._refuse(Problem(503, f"the bus took no request: {error}", retry_after_s=1))
            return None
        return await self.handle.verdict(VERDICT_WAIT_S)

    def _take(self, verdict: Verdict) -> bool:
        """Tell the caller; whether there is an end to wait for."""
        record, gate = self.record, self.gate
        match verdict.verdict:
            case "accepted" | "queued":
                gate.fire(record, transfer=verdict.transfer, queued=verdict.verdict == "queued")
                self.taken.set_result(Taken("accepted", verdict.reason))
            case "deduped":  # another gateway or requester has fired it
                gate.withdraw(record)
                record.ours, record.status, record.transfer = False, "running", verdict.transfer
                gate.show(record)
                self.taken.set_result(Taken("deduped", verdict.reason))
            case "skipped_busy":
                gate.withdraw(record)
                self.taken.set_result(Taken("skipped_busy", verdict.reason))
            case "refused":
                self._refuse(refusal(verdict.reason, record.destination))
        return verdict.hopeful

    def _refuse(self, problem: Problem) -> None:
        self.gate.withdraw(self.record)
        self.taken.set_result(Taken(problem=problem))

    async def _follow(self, verdict: Verdict) -> None:
        record, handle = self.record, self.handle
        if handle is None:
            return
        if verdict.verdict == "queued":
            verdict = await handle.verdict(QUEUE_WAIT_S + SLACK_S)
            taken = verdict.verdict in {"accepted", "deduped"}  # else it still waits, or was refused
            record.status, record.transfer = "running" if taken else record.status, verdict.transfer
        if verdict.hopeful:
            self._stop_soon()
        wait_s = self.asked.budget_s + SLACK_S
        outcome = await self._outcome(handle, wait_s)
        if outcome is None:
            late = f"no outcome came within {wait_s:g} s"
            self._close(late if verdict.hopeful else f"{verdict.verdict}: {verdict.reason}")
        else:
            self._end(outcome_status(outcome), outcome.reason, outcome)

    def _stop_soon(self) -> None:
        if self.cancel_wanted and (self.stopping is None or self.stopping.done()):
            self.stopping = asyncio.get_running_loop().create_task(self._stop())

    async def _stop(self) -> None:
        """Repeat a cancel that came before the request was taken on, until it is heard or the request ends."""
        heard = False
        while not heard:
            try:
                heard = await self.publisher.cancel(self.record.request_hash, self.record.destination)
            except BusError as error:
                log.info("a cancel was not heard, and is repeated: %s", error, extra=self._about())
            if not heard:
                await asyncio.sleep(CANCEL_PAUSE_S)

    async def _outcome(self, handle: TransferHandle, wait_s: float) -> TransferOutcome | None:
        """Wait for the outcome, anew for each run that its queue offers it to, which ends in ten minutes."""
        record = self.record
        while True:
            stood = record.transfer, record.status
            handed_back = record.status == "queued" and record.transfer != ""
            outcome = await handle.outcome(wait_s + (HANDED_BACK_WAIT_S if handed_back else 0.0))
            if outcome is not None or stood == (record.transfer, record.status):
                return outcome

    def _close(self, reason: str) -> None:
        """End what has not ended."""
        if self.record.status == "asking" and not self.taken.done():
            self._refuse(Problem(503, reason, retry_after_s=1))
        elif not self.record.ended and self.record.status != "asking":
            self._end("failed", reason, None)
        self.on_end(self.record)

    def _end(self, status: Status, reason: str, outcome: TransferOutcome | None) -> None:
        level = logging.DEBUG if status == "transferred" else logging.INFO
        log.log(level, "%s into %s%s", status, self.record.destination, reason and f": {reason}", extra=self._about())
        if self.record.ours:
            self.gate.end(self.record, status, reason=reason, outcome=outcome)
        else:
            self.record.status, self.record.reason, self.record.outcome = status, reason, outcome

    def _about(self) -> dict[str, str]:
        cause = self.handle.request.request_id if self.handle else ""
        return {"transfer": self.record.transfer, "request_hash": self.record.request_hash, "cause": cause}


def outcome_status(outcome: TransferOutcome) -> Status:
    """Return an outcome in the words of a record: whatever can be used counts as transferred."""
    return _STATUS.get(outcome.outcome, "failed")


def refusal(reason: str, destination: str) -> Problem:
    """Return what a destination's refusal is to a caller: about the source, 403; about its own state, 503."""
    if reason.startswith((_SOURCE_WORDS, f"{destination!r} allows no source")):
        return Problem(403, f"{destination} refuses: {reason}")
    return Problem(503, f"{destination} refuses: {reason}", retry_after_s=1)
