"""The requester of a script: sends what the script asks for, and hears verdicts and outcomes."""

from kvbus.events import Header, TransferOutcome, TransferRequested, TransferVerdict, decode, encode
from kvbus.parts import Body
from kvbus.testing.sim.bus import SimBus
from kvbus.testing.sim.holes.stage import Stage
from kvbus.testing.sim.loop import Actor
from kvbus.topics import Command
from kvbus.transport import Delivery, NoAnswer

REQUESTER = "asker"
ANSWER_S = 5.0


class Requester:
    """One process with a connection of its own."""

    def __init__(self, stage: Stage) -> None:
        self.outcomes: list[TransferOutcome] = []
        self.verdicts: list[TransferVerdict] = []
        self._loop, self._trail, self._topics = stage.loop, stage.trail, stage.broker.topics
        self._actor = Actor(REQUESTER)
        self._bus = SimBus(stage.broker, self._actor)
        self._headers = iter(range(1, 100_000))

    def start(self) -> None:
        """Hear outcomes from now on."""
        self._loop.spawn(self._actor, self._listen(), "results")

    def send(self, request: TransferRequested, *, queued: bool) -> None:
        """Send a request, by request-reply or through the durable queue."""
        self._loop.spawn(self._actor, self._queued(request) if queued else self._asked(request), "request")

    async def _listen(self) -> None:
        await self._bus.subscribe(self._topics.result(REQUESTER), self._heard)

    async def _heard(self, delivery: Delivery) -> None:
        self._hear(decode(delivery.data).body)

    def _hear(self, body: object) -> None:
        if isinstance(body, TransferOutcome):
            self.outcomes.append(body)
            what = f"{body.outcome}: {body.pages_moved} pages moved {body.reason}"
            self._trail.note("script", f"transfer {body.transfer} has ended, {what}")
        elif isinstance(body, TransferVerdict):
            self.verdicts.append(body)
            self._trail.note("script", f"{body.request_id} is {body.verdict} {body.transfer} {body.reason}")

    async def _queued(self, request: TransferRequested) -> None:
        subject = self._topics.transfer(request.destination, request.request_hash)
        await self._bus.store(subject, self._encoded(request), message_id=request.request_id)

    async def _asked(self, request: TransferRequested) -> None:
        subject = self._topics.command(request.destination, Command.TRANSFER)
        answer = await self._bus.request(subject, self._encoded(request), wait_s=ANSWER_S)
        if isinstance(answer, NoAnswer):
            self._trail.note("script", f"{request.request_id} has no answer: {answer.reason}")
        else:
            self._hear(decode(answer).body)

    def _encoded(self, body: Body) -> bytes:
        sent_ns = int((1_700_000_000 + self._loop.time()) * 1e9)
        return encode(Header(k=body.KIND, i=REQUESTER, s=next(self._headers), t=sent_ns), body)
