"""A real gateway over a real bus, with an instance whose part a test plays: what it says and when is the test's."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from kvbus.caching import CacheAnswered, CacheAsked, CacheChangeAsked, CacheChanged, PinRow
from kvbus.events import (
    Header,
    InstanceRecord,
    TransferCancelRequested,
    TransferOutcome,
    TransferRequested,
    TransferStep,
    TransferVerdict,
    decode,
    encode,
)
from kvbus.gateway.parts import Parts
from kvbus.gateway.serving import running, served
from kvbus.gateway.settings import GatewaySettings
from kvbus.parts import Body
from kvbus.processes import identity
from kvbus.roles.registry import registry_key
from kvbus.testing.bus import MemoryBroker
from kvbus.topics import Command, Topics
from kvbus.transport import BUCKET_INSTANCES, Bus, Delivery
from tests.waiting import until

TOPICS = Topics()


@dataclass(slots=True)
class Played:
    """An instance as the gateway meets it: in the registry, at its queue, and in the facts."""

    name: str
    bus: Bus
    urls: tuple[str, ...] = ()
    word: str = "accepted"
    reason: str = ""
    settles: bool = True
    """Whether a transfer ends at once; else the test ends it."""
    requests: list[TransferRequested] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    epoch: int = 1
    state: str | None = None
    _said: int = 0

    async def register(self) -> None:
        """Write this instance's record into the registry."""
        record = InstanceRecord(
            verify_key=b"k" * 32, fingerprint="f", model="toy", engine="toy", block_tokens=32, ranks=1, page_bytes=64,
            pages=8, process=identity(os.getpid()), transports=("memory",), version="1", urls=self.urls or None,
            state=self.state,
        )  # fmt: skip
        await self.bus.put(BUCKET_INSTANCES, registry_key(self.name, "m0"), self.said(record))

    async def serve(self) -> None:
        """Take requests and answer them until cancelled."""
        await self.bus.respond(TOPICS.command(self.name, Command.CANCEL), self._on_cancel)
        await self.bus.respond(TOPICS.command(self.name, Command.CACHE, "m0"), self._on_cache)
        while True:
            works = await self.bus.take_work(
                TOPICS.transfer_filter(self.name), consumer=f"dst-{self.name}", most=16, wait_s=1
            )
            for work in works:
                request = decode(work.delivery.data).body
                assert isinstance(request, TransferRequested)
                self.requests.append(request)
                await self.answer(request)
                await work.finish()

    async def answer(self, request: TransferRequested) -> None:
        """Say this instance's word, and settle where that is its way."""
        taken = self.word in {"accepted", "deduped"}
        verdict = TransferVerdict.model_validate(
            {
                "request_id": request.request_id,
                "request_hash": request.request_hash,
                "verdict": self.word,
                "reason": self.reason,
                "transfer": self.transfer(request) if taken else "",
            }
        )
        await self.bus.publish(TOPICS.result(request.requester), self.said(verdict))
        if taken and self.settles:
            await self.end(request)

    def transfer(self, request: TransferRequested) -> str:
        """The id of the transfer that serves the latest request of this hash."""
        place = max(at for at, one in enumerate(self.requests) if one.request_hash == request.request_hash)
        return f"T{place}"

    async def end(self, request: TransferRequested, word: str = "settled", *, told: str = "both") -> None:
        """End a transfer; `told`: over the facts, to the requester, both, or `handed back`: the facts, causeless."""
        outcome = TransferOutcome.model_validate(
            {
                "transfer": self.transfer(request), "request_hash": request.request_hash, "source": request.source,
                "destination": self.name, "outcome": word, "pages_wanted": 3, "pages_moved": 2, "pages_held": 1,
                "length_bytes": 128, "failure": "" if word == "settled" else "source_misses",
                "reason": "" if word == "settled" else "it is not there",
            }
        )  # fmt: skip
        if told in {"both", "facts", "handed back"}:
            await self.report(outcome, "" if told == "handed back" else request.request_id)
        if told in {"both", "requester"}:
            await self.bus.publish(TOPICS.result(request.requester), self.said(outcome))

    async def step(self, request: TransferRequested, step: str) -> None:
        """Report one step in the facts."""
        body = TransferStep(transfer=self.transfer(request), request_hash=request.request_hash, step=step)
        await self.report(body, request.request_id)

    async def report(self, body: Body, cause: str = "") -> None:
        """Put an event into the facts."""
        data = self.said(body, cause)
        await self.bus.store(TOPICS.facts(self.name), data, message_id=f"{self.name}.{self._said}")

    def said(self, body: Body, cause: str = "") -> bytes:
        """An event of this instance."""
        self._said += 1
        header = Header(k=body.KIND, i=self.name, m="m0", e=self.epoch, s=self._said, t=time.time_ns(), c=cause)
        return encode(header, body)

    async def taken(self, count: int = 1) -> TransferRequested:
        """Wait until so many requests have come; the last one."""
        await until(lambda: len(self.requests) >= count, what=f"{self.name} has {count} requests")
        return self.requests[count - 1]

    async def _on_cache(self, delivery: Delivery) -> bytes:
        body = decode(delivery.data).body
        if isinstance(body, CacheAsked):
            pins = (PinRow(pin="system", blocks=1, held_s=1.5),)
            return self.said(
                CacheAnswered(pages=8, pages_free=7, pages_cached=1, pages_lent=1, pages_quarantined=0, pins=pins)
            )
        assert isinstance(body, CacheChangeAsked)
        return self.said(CacheChanged(blocks=1, refusal=self.reason))

    async def _on_cancel(self, delivery: Delivery) -> bytes:
        body = decode(delivery.data).body
        assert isinstance(body, TransferCancelRequested)
        self.cancelled.append(body.request_hash)
        return b""


@dataclass(slots=True)
class Stage:
    """A gateway that is served, its parts, a client, and the played instances by name."""

    parts: Parts
    url: str
    client: httpx.AsyncClient
    bus: Bus
    played: dict[str, Played]

    @property
    def b(self) -> Played:
        """The usual destination."""
        return self.played["b"]

    async def ask(self, **body: object) -> httpx.Response:
        """Ask for a transfer from a into b."""
        return await self.client.post("/v1/kv_transfer", json={"source": "a", "destination": "b", **body})

    async def stats(self, instance: str = "b") -> dict[str, int]:
        """The published counters."""
        answered = await self.client.get(f"/instances/{instance}/v1/kv_transfer/stats")
        assert answered.status_code == 200, answered.text
        return dict(answered.json())

    async def record(self, request_hash: str, wait_s: float = 30) -> dict[str, object]:
        """Where a request is, once it has ended."""
        answered = await self.client.get(
            f"/instances/b/v1/kv_transfer/{request_hash}", params={"wait_s": wait_s}, timeout=100
        )
        assert answered.status_code == 200, answered.text
        return dict(answered.json())


@asynccontextmanager
async def stage(
    connect: Callable[[], Bus] | None = None,
    *,
    names: tuple[str, ...] = ("a", "b"),
    urls: Mapping[str, tuple[str, ...]] | None = None,
    source_allow: str = "a",
    present: bool = True,
    **settings: object,
) -> AsyncIterator[Stage]:
    """A gateway over a bus, and played instances; `present` tells whether they take requests."""
    connect = connect or MemoryBroker(clock=lambda: 0.0).connect
    played = {name: Played(name, connect(), (urls or {}).get(name, ())) for name in names}
    for one in played.values():
        await one.register()
    tasks = [asyncio.ensure_future(one.serve()) for one in played.values() if present]
    checked = GatewaySettings.model_validate({"source_allow": source_allow, **settings})
    bus = connect()
    try:
        async with (
            running(checked, bus, TOPICS) as parts,
            served(parts) as url,
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):
            await until(lambda: parts.feed.listening, what="the facts are heard")
            yield Stage(parts, url, client, bus, played)
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            if not task.cancelled() and task.done() and (error := task.exception()):
                raise error
        await asyncio.gather(*tasks, return_exceptions=True)


def prompt(name: str = "x") -> str:
    """A prompt of this name."""
    return f"{name} " * 50
