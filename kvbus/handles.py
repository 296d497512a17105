"""A requester's end of its requests: what is known of each, and the waits for more."""

import asyncio
from dataclasses import dataclass
from typing import Literal

from kvbus.events import TransferOutcome, TransferRequested

UNASKED = "bus_unavailable: no connection to the broker, so nothing was asked: compute the prompt, or ask again later"
UNSURE = "bus_unavailable: the connection was lost before the broker confirmed the request; it may be queued or not"
LOST = (
    "bus_unavailable: the connection was lost before the broker confirmed the request, and asking again did not come "
    "through: compute the prompt, or ask again later, which joins the request if it was queued all the same"
)
_UNANSWERED = "the destination has not answered yet"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a request: `queued` until the destination has spoken, then its own word.

    `transfer` names the transfer that serves it, where the destination said so.
    """

    verdict: Literal["queued", "accepted", "deduped", "skipped_busy", "refused"]
    reason: str = ""
    transfer: str = ""

    @property
    def hopeful(self) -> bool:
        """Whether an outcome may still come."""
        return self.verdict in {"queued", "accepted", "deduped"}


class TransferHandle:
    """One request of ours and what came back for it; let go of it and later answers are ignored."""

    def __init__(self, request: TransferRequested) -> None:
        self.request = request
        self._verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._outcome: asyncio.Future[TransferOutcome | None] = asyncio.get_running_loop().create_future()
        self._so_far = Verdict("queued", _UNANSWERED)
        self._unsure = False
        self._transfer = ""

    @property
    def request_hash(self) -> str:
        """The hash by which broker and destination tell a repeat of this request."""
        return self.request.request_hash

    async def verdict(self, wait_s: float = 10.0) -> Verdict:
        """Return the destination's verdict; `queued` with the reason if none came within the wait.

        Where it is not even known whether the request is queued, it says so at once, the first time that it is asked.
        """
        unsure, self._unsure = self._unsure, False
        if not unsure:
            await asyncio.wait({self._verdict}, timeout=wait_s)
        return self._verdict.result() if self._verdict.done() else self._so_far

    async def outcome(self, wait_s: float = 60.0) -> TransferOutcome | None:
        """Return how the transfer ended; None if it has not within the wait, or at once if it was not taken on."""
        await asyncio.wait({self._outcome}, timeout=wait_s)
        return self._outcome.result() if self._outcome.done() else None

    def hear_queued(self, reason: str) -> None:
        """Note why there is no verdict yet."""
        self._so_far = Verdict("queued", reason)

    def hear_unsure(self) -> None:
        """Note that the connection was lost while the request was on its way."""
        self._unsure = True
        self.hear_queued(UNSURE)

    def hear_submitted(self, error: Exception | None) -> None:
        """Note what became of a request that was unsure: the broker has it, or, with an error, nobody can say."""
        self._unsure = False
        if error is None and self._so_far.reason == UNSURE:
            self.hear_queued(_UNANSWERED)
        elif error is not None and not self._verdict.done():
            self.hear_verdict(Verdict("refused", LOST))

    def hear_verdict(self, verdict: Verdict) -> None:
        """Take the first verdict; one that leaves no hope ends the wait for an outcome too.

        A later one tells which transfer serves now: a destination that died and came back runs the request anew.
        """
        self._transfer = verdict.transfer
        if not self._verdict.done():
            self._verdict.set_result(verdict)
        if not verdict.hopeful and not self._outcome.done():
            self._outcome.set_result(None)

    def hear_moved(self, transfer: str) -> None:
        """Follow a transfer of the same prompt that has been taken on since, where another one was joined before."""
        if self._transfer:
            self._transfer = transfer

    def hear_outcome(self, outcome: TransferOutcome) -> None:
        """Take the outcome, unless it is that of another transfer of the same prompt."""
        if not self._outcome.done() and self._transfer in {"", outcome.transfer}:
            self._outcome.set_result(outcome)
