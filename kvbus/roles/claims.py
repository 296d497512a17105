"""Claims: a request in this member's hands, by one delivery of the queue, for as long as that delivery stands.

The broker remembers by stream sequence which delivery of a request is the current one. A word about an older one still
takes the request off the queue, whoever runs it by then (P20). So a member says nothing any more about a delivery once
the broker may have made another: that one comes to whoever leads now, and joins what runs or has ended here.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvbus.errors import BusError
from kvbus.transport import Work

KEEP_S = 3.0
"""The queue offers a request again 10 s after the last sign of life: three signs, so that one may be lost."""
CLAIM_S = 7.0
"""So long a delivery is surely the current one: 10 s, less 2 s that a word may be under way, less one to spare."""
CONFIRMED_S = 9.0
"""A sign of life that is confirmed by then came before the next offer: 10 s, less one to spare."""
LAST_WORD_S = 4.0
"""Said by then, a last word comes before the next offer, although it is under way for as long as a call to the broker
waits: 10 s, less those 5 s, less one to spare."""
GIVE_BACK_S = 0.5
"""Before the request is offered again to whoever leads by then; less than a member takes to see that it leads."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Claim:
    """One delivery. `signed_at`: when it was asked for, or the last sign of life that the broker confirmed was sent."""

    work: Work
    clock: Callable[[], float]
    signed_at: float

    @property
    def stands(self) -> bool:
        """Whether nobody else can have been offered the request since."""
        return self._age_s < CLAIM_S

    @property
    def _age_s(self) -> float:
        return self.clock() - self.signed_at

    async def keep(self) -> None:
        """Say that it is worked on; a broker that does not answer offers it again."""
        now = self.clock()
        if not self.stands:
            return
        try:
            await self.work.keep()
        except BusError as error:
            log.info("sign of life not sent: %s", error)
        else:
            if self._age_s < CONFIRMED_S:  # else it may have lengthened another's delivery
                self.signed_at = now

    async def finish(self) -> None:
        """Take the request off the queue, unless it may be another's by now."""
        await self._end(self.work.finish, "taken off the queue")

    async def give_back(self) -> None:
        """Leave the request to whoever leads now."""
        await self._end(lambda: self.work.give_back(GIVE_BACK_S), "given back")

    async def _end(self, say: Callable[[], Awaitable[None]], what: str) -> None:
        if self._age_s >= LAST_WORD_S:
            await self.keep()
        if self._age_s >= LAST_WORD_S:
            log.info("request on %s not %s: it may be offered again by then", self.work.delivery.subject, what)
            return
        try:
            await say()
        except BusError as error:  # it is offered again, and adopted (P22)
            log.info("request not %s: %s", what, error)
