"""A member's share of transfers that another one admitted: asks what to bring, and lets the destination bring it.

The prompt's token ids do not stand in the log: whoever admitted the transfer tells them, to a member that asks.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvbus.errors import BusError, PeerError
from kvbus.events import PlanAnswered, PlanAsked, decode
from kvbus.ledger.shares import Share, ShareStage
from kvbus.roles.council import InstanceCouncil
from kvbus.roles.destination import Destination
from kvbus.roles.recorder import Recorder
from kvbus.roles.running import Agreed
from kvbus.roles.tasks import started
from kvbus.topics import Command, Topics
from kvbus.transport import Bus, NoAnswer

ANSWER_S = 2.0
ASK_PAUSE_S = 0.25
ASK_S = 10.0
"""How long a plan is asked for; the transfer is given up by the coordinator's own deadline in any case."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Sharing:
    """Carries out what the council says about this member's shares."""

    bus: Bus
    topics: Topics
    recorder: Recorder
    instance: str
    council: InstanceCouncil
    destination: Destination
    clock: Callable[[], float]
    _stopped: dict[str, str] = field(default_factory=dict)
    _tasks: "dict[str, asyncio.Task[None]]" = field(default_factory=dict)

    def begin_share(self, share: Share, coordinator: str) -> None:
        """See `Carrier`."""
        on_fault = partial(self.council.refuse, share.transfer)
        task = started(self._bring(share.transfer, coordinator), name="share", on_fault=on_fault)
        self._tasks[share.transfer] = task
        task.add_done_callback(lambda _task: self._tasks.pop(share.transfer, None))

    def stop_share(self, share: Share, reason: str) -> None:
        """See `Carrier`."""
        self._stopped[share.transfer] = reason
        self.destination.stop_share(share.transfer, reason)

    def share_over(self, share: Share, reason: str) -> None:
        """See `Carrier`."""
        self._stopped.pop(share.transfer, None)
        agreed = Agreed(share.stage is ShareStage.VISIBLE, share.lo, share.hi, f"the transfer was voided: {reason}")
        self.destination.over(share.transfer, agreed)

    async def close(self) -> None:
        """Ask no more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _bring(self, transfer: str, coordinator: str) -> None:
        plan = await self._plan(transfer, coordinator)
        if plan is None:
            self.council.refuse(transfer, f"{coordinator} did not say what to bring")
        elif transfer in self._stopped:  # cancelled before it was known what to bring (contract 49)
            self.council.refuse(transfer, self._stopped[transfer])
        else:
            await self.destination.take_part(plan)

    async def _plan(self, transfer: str, coordinator: str) -> PlanAnswered | None:
        """Return what to bring, or None where nobody knows, or nobody answers in time."""
        subject = self.topics.command(self.instance, Command.PLAN, coordinator)
        deadline = self.clock() + ASK_S
        while self.clock() < deadline and self.council.is_open(transfer):
            body = PlanAsked(transfer=transfer)
            try:
                data = await self.bus.request(subject, self.recorder.encoded(body), wait_s=ANSWER_S)
                answer = None if isinstance(data, NoAnswer) else decode(data).body
            except (BusError, PeerError) as error:
                log.info("no plan for %s yet: %s", transfer, error, extra={"transfer": transfer})
                answer = None
            if isinstance(answer, PlanAnswered) and answer.transfer == transfer:
                return answer if answer.known else None
            await asyncio.sleep(ASK_PAUSE_S)
        return None
