"""Requests before they are transfers: those being answered, cancelled in the queue, or offered too often."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvbus.events import PlanAnswered, TransferRequested, TransferStep
from kvbus.ledger.admission import Admission, Verdict
from kvbus.parts import Prompt, VerdictWord

WORD: Final[dict[Verdict, VerdictWord]] = {
    Verdict.ACCEPTED: "accepted",
    Verdict.ADOPTED: "accepted",  # its own request, delivered again
    Verdict.DEDUPED: "deduped",
    Verdict.SKIPPED_BUSY: "skipped_busy",
    Verdict.REFUSED: "refused",
}
TRIES_MAX = 3
"""The first try, and two after whoever ran it had died; what fails three times would fail again."""
HANDED_BACK: Final = "handed_back"
"""The step by which a run that stops leaves a request to the next one; such an offer is not held against it."""
LEFT: Final = "left"
"""The step of a run that rests: it has been offered a request, and left it in the queue unread; not held against it."""
CANCELS_MAX = 4_096
"""Cancelled requests that were not offered here yet; the queue holds 10,000 in all, and few of them are cancelled."""


class Offer(NamedTuple):
    """How a request reached this member.

    `sent_unix_s` is its requester's time, and compared with times of requesters only. `waited_s` is how long it stood
    in the queue by the broker's clock: two hosts' clocks may be an hour apart. `number`: how often the queue gave it.
    `queued`: it comes from there, so it can be handed back.
    """

    sent_unix_s: float
    waited_s: float = 0.0
    number: int = 1
    queued: bool = False


@dataclass(slots=True)
class Admitting:
    """A request that is being answered; `refusal` is the answer, where it was not admitted."""

    request_id: str
    request_hash: str
    cancelled: str = ""
    """Who does not want it any more; empty while nobody has said so."""
    refusal: Admission | None = None
    _ended: asyncio.Event | None = None

    async def ended(self) -> None:
        """Wait until it is answered; nearly never does another request of its hash come meanwhile."""
        if self._ended is None:
            self._ended = asyncio.Event()
        await self._ended.wait()

    def end(self) -> None:
        """Let those go on who wait for its answer."""
        if self._ended is not None:
            self._ended.set()


class QueuedCancels:
    """Cancels of requests that the queue has not offered here yet: they end when it does.

    A cancel says when it was made, and ends nothing that was asked for later.
    """

    def __init__(self) -> None:
        self._said: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def note(self, request_hash: str, text: str, *, said_s: float) -> None:
        """Remember a cancel; the oldest one is forgotten where there are too many."""
        self._said.pop(request_hash, None)
        self._said[request_hash] = said_s, text
        if len(self._said) > CANCELS_MAX:
            self._said.popitem(last=False)

    def of(self, request_hash: str, *, sent_s: float) -> str:
        """Return who cancelled a request that was sent then, or ""."""
        said_s, text = self._said.get(request_hash, (0.0, ""))
        return text if text and sent_s <= said_s else ""


def request_in(plan: PlanAnswered, instance: str) -> TransferRequested:
    """Return the request that a member takes part in, as whoever admitted it tells it."""
    return TransferRequested(
        request_id=plan.request_id,
        request_hash=plan.request_hash,
        requester=instance,
        source=plan.source,
        destination=instance,
        prompt=Prompt(tokens=plan.tokens),
        salt=plan.salt,
        on_miss=plan.on_miss,
        traceparent=plan.traceparent,
    )


def left_step(request_hash: str, sequence: int) -> TransferStep:
    """Return what is told of a request that was offered, by its place in the queue, and left there unread."""
    transfer = f"left-{request_hash}-{sequence}"
    return TransferStep(transfer=transfer, request_hash=request_hash, step=LEFT, text="in the queue, for the next run")


def spent(offer: int) -> str:
    """Return why a request is not run any more, or "" while it may be."""
    if offer <= TRIES_MAX:
        return ""
    return f"the queue has offered it {offer} times: whoever took it did not live to end it, so it is not run again"
