"""kvbus's side: whole transfers that move nothing, or one page of 1 KiB, by the durable and by the urgent way."""

import asyncio
import time
from collections.abc import Sequence

from controls.town import TOPICS, Town, prompt

from kvbus.bus import NatsBus
from kvbus.events import Header, TransferOutcome, TransferRequested, TransferVerdict, decode, encode
from kvbus.names import request_hash
from kvbus.publisher import Publisher, checked_prompt
from kvbus.topics import Command
from kvbus.transport import Delivery

SOURCE, DESTINATION = "a", "b"
OUTCOME_S = 30.0
URGENT = "urgent-bench"


class Asking:
    """Asks for transfers; each request has a hash of its own, since its `model` counts up."""

    def __init__(self, bus: NatsBus, publisher: Publisher) -> None:
        self._bus = bus
        self._publisher = publisher
        self._number = 0
        self._outcomes: dict[str, asyncio.Future[TransferOutcome]] = {}
        self.accepted_ns: list[int] = []

    async def start(self) -> None:
        """Listen for the results of urgent requests."""
        await self._bus.subscribe(TOPICS.result(URGENT), self._hear)

    async def durable(self, ids: Sequence[int], moved: int) -> int:
        """Ask by the queue; return the nanoseconds until the outcome."""
        self._number += 1
        began = time.perf_counter_ns()
        handle = await self._publisher.transfer(
            source=SOURCE, destination=DESTINATION, prompt=ids, model=f"m{self._number}", on_miss="fail"
        )
        self.accepted_ns.append(time.perf_counter_ns() - began)
        outcome = await handle.outcome(OUTCOME_S)
        took = time.perf_counter_ns() - began
        _require(outcome, moved)
        return took

    async def urgent(self, ids: Sequence[int], moved: int) -> int:
        """Ask by request-reply; return the nanoseconds until the outcome."""
        self._number += 1
        model, asked = f"u{self._number}", checked_prompt(ids)
        hash_ = request_hash(model=model, salt="", source=SOURCE, prompt=asked.canonical())
        waiting = self._outcomes[hash_] = asyncio.get_running_loop().create_future()
        began = time.perf_counter_ns()
        body = TransferRequested(
            request_id=f"{URGENT}.{self._number}", request_hash=hash_, requester=URGENT, source=SOURCE,
            destination=DESTINATION, prompt=asked, model=model, on_miss="fail",
        )  # fmt: skip
        header = Header(k=body.KIND, i=URGENT, s=self._number, t=time.time_ns())
        subject = TOPICS.command(DESTINATION, Command.TRANSFER)
        data = await self._bus.request(subject, encode(header, body), wait_s=OUTCOME_S)
        verdict = decode(data).body if isinstance(data, bytes) else data
        if not isinstance(verdict, TransferVerdict) or verdict.verdict != "accepted":
            raise SystemExit(f"an urgent request was not accepted: {verdict}")
        async with asyncio.timeout(OUTCOME_S):
            outcome = await waiting
        took = time.perf_counter_ns() - began
        _require(outcome, moved)
        return took

    async def _hear(self, delivery: Delivery) -> None:
        body = decode(delivery.data).body
        if isinstance(body, TransferOutcome) and (waiting := self._outcomes.pop(body.request_hash, None)):
            waiting.set_result(body)


def _require(outcome: TransferOutcome | None, moved: int) -> None:
    if outcome is None or outcome.outcome != "settled" or outcome.pages_moved != moved:
        raise SystemExit(f"a transfer that should have moved {moved} pages came to {outcome}")


def store(town: Town, prompts: int) -> None:
    """Have the source compute and keep all prompts."""
    with town.client(SOURCE) as client:
        for number in range(prompts):
            client.generate(ids=prompt(number), max_tokens=1)


def evict(town: Town, prompts: int) -> None:
    """Have the destination forget all prompts."""
    with town.client(DESTINATION) as client:
        for number in range(prompts):
            client.evict(prompt(number))
