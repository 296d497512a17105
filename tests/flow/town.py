"""A small town of real parts for whole-worker tests: one broker, workers as processes, and a requester's door.

Each worker is `python -m kvbus worker` with options of its own, so that one town can hold a source with another
layout, a destination without an allowlist, and one that reads slowly. Every wait has a deadline and waits for a fact.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.engines.client import LocalClient, TimedAnswer
from kvbus.events import (
    Event,
    Header,
    StatsAnswered,
    StatsAsked,
    TransferOutcome,
    TransferStep,
    decode,
    decode_all,
    encode,
)
from kvbus.parts import Body, OnMiss
from kvbus.publisher import Publisher, TransferHandle, Verdict
from kvbus.roles.registry import Registered, lookup
from kvbus.testing.cluster import free_ports
from kvbus.topics import Query, Topics
from tests.waiting import until

TOPICS = Topics()
BLOCK = 32
PAGE_BYTES = 65536
FAST: Mapping[str, object] = {"work_rounds": 1}
"""The toy's options where its own speed does not matter: a thousand tokens cost some 20 ms."""
READY_S = 100.0
OUTCOME_S = 60.0
ANSWER_S = 30.0
"""A worker answers within milliseconds; one that shares its core with many others does within some seconds."""
OWED = (
    "pages_writing",
    "pages_quarantined",
    "leases_held",
    "leases_retained",
    "releases_unconfirmed",
    "transfers_running",
    "inflight",
)
"""The counters that are 0 while nothing is going on."""
REST_S = 60.0
"""A release that the source missed is repeated after at most 10 s; six of those."""


def prompt(name: str, blocks: int, *, extra: int = 3) -> list[int]:
    """The token ids of a prompt that no other name shares: so many whole blocks, and a few tokens more."""
    pick = random.Random(name)
    return [pick.randrange(97, 123) for _ in range(BLOCK * blocks + extra)]


def as_text(ids: Sequence[int]) -> str:
    """The text that the toy engine tokenizes into exactly these ids."""
    return bytes(ids).decode()


def children(pid: int) -> list[int]:
    """The processes that a process started and that it has not buried."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


@dataclass(slots=True)
class WorkerProcess:
    """One worker: its process, what it was started with, and how to reach it. `name` is its instance's."""

    name: str
    member: str
    process: "subprocess.Popen[bytes]"
    socket: Path
    log: Path
    arguments: list[str]
    pids: set[int] = field(default_factory=set)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def engine_pid(self) -> int:
        """The process of its engine."""
        (pid,) = children(self.pid)
        return pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as a power cut would, and see that it is gone."""
        self.process.kill()
        self.process.wait(ANSWER_S)

    def client(self) -> LocalClient:
        return LocalClient(self.socket)


@dataclass(slots=True)
class Town:
    """The running parts; made by `town()`, which also ends them and checks that nothing is left."""

    folder: Path
    broker: EmbeddedBroker
    bus: NatsBus
    publisher: Publisher
    workers: dict[str, WorkerProcess] = field(default_factory=dict)
    registered: dict[str, Registered] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    programs: dict[str, Path] = field(default_factory=dict)
    """By worker: a script that is `kvbus` with something changed, for those that are not to run it as it is."""

    async def start(
        self,
        name: str,
        *,
        allow: Sequence[str] = (),
        engine: str = "toy",
        options: Mapping[str, object] = FAST,
        pages: int = 192,
        backend: str = "ucx",
        rate_limit_bytes_s: int = 0,
        inflight_max: int = 4,
        dedup_ttl_s: float = 300.0,
        member: str = "",
        members: Sequence[str] = (),
    ) -> WorkerProcess:
        """Start a worker and wait until the registry has it; one of several members is known as instance/member."""
        arguments = ["--instance", name, "--engine", engine, "--engine-options", json.dumps(dict(options))]
        arguments += ["--member", member, "--members", ",".join(members)] if member else []
        arguments += ["--pages", str(pages), "--backend", backend, "--rate-limit", str(rate_limit_bytes_s)]
        arguments += ["--inflight-max", str(inflight_max), "--dedup-ttl", str(dedup_ttl_s)]
        arguments += [part for source in allow for part in ("--allow", source)]
        return await self.start_again(f"{name}/{member}" if member else name, arguments)

    async def start_all(
        self,
        name: str,
        members: Sequence[str],
        *,
        allow: Sequence[str] = (),
        backend: str = "ucx",
        rate_limit_bytes_s: int = 0,
    ) -> None:
        """Start all members of an instance."""

        def start(member: str) -> Coroutine[object, object, WorkerProcess]:
            return self.start(
                name,
                member=member,
                members=members,
                allow=allow,
                backend=backend,
                rate_limit_bytes_s=rate_limit_bytes_s,
            )

        await asyncio.gather(*map(start, members))

    async def start_again(self, name: str, arguments: list[str] | None = None) -> WorkerProcess:
        """Start a worker, with the arguments of the one that it follows unless others are given."""
        worker = self._spawn(name, arguments or self.workers[name].arguments)
        self.workers[name] = worker
        ends_at = time.monotonic() + READY_S

        async def ready() -> bool:
            if not worker.alive:
                raise AssertionError(f"worker {name} ended: {worker.log.read_text()[-2000:]}")
            for one in await lookup(self.bus, worker.name):
                if one.record.process.pid == worker.pid:
                    self.registered[name] = one
                    return True
            return False

        await until(ready, ends_at - time.monotonic(), what=f"worker {name} is registered")
        worker.pids = {worker.pid, *children(worker.pid)}
        self.started |= worker.pids
        return worker

    def _spawn(self, name: str, arguments: list[str]) -> WorkerProcess:
        instance, _, member = name.partition("/")
        log = self.folder / f"{instance}.{member or 'm0'}.log"
        program = [str(self.programs[name])] if name in self.programs else ["-m", "kvbus"]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *program, "worker", "--run-dir", str(self.folder / "run"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "KVBUS_NATS_URL": self.broker.url, "KVBUS_NATS_TOKEN": self.broker.token},
            )
        socket = self.folder / "run" / f"{instance}.{member or 'm0'}.sock"
        return WorkerProcess(instance, member or "m0", process, socket, log, arguments)

    # ------------------------------------------------------------------------------------------------- what one asks

    async def ask(
        self,
        ids: str | Sequence[int],
        *,
        source: str = "a",
        destination: str = "b",
        on_miss: OnMiss = "prefill",
        budget_s: float = 30.0,
        salt: str = "",
    ) -> TransferHandle:
        """Ask for a transfer; returns once the request is queued."""
        return await self.publisher.transfer(
            source=source, destination=destination, prompt=ids, on_miss=on_miss, budget_s=budget_s, salt=salt
        )

    async def stage(
        self,
        ids: str | Sequence[int],
        *,
        source: str = "a",
        destination: str = "b",
        on_miss: OnMiss = "prefill",
        budget_s: float = 30.0,
    ) -> TransferOutcome:
        """Ask for a transfer that is taken on, and return how it ended."""
        handle = await self.ask(ids, source=source, destination=destination, on_miss=on_miss, budget_s=budget_s)
        verdict = await handle.verdict(OUTCOME_S)
        assert verdict.verdict == "accepted", verdict
        outcome = await handle.outcome(OUTCOME_S)
        assert outcome is not None, "no outcome came"
        return outcome

    async def verdict(self, ids: str | Sequence[int], *, source: str = "a", destination: str = "b") -> Verdict:
        """Ask for a transfer, and return only what the destination says to it at first."""
        handle = await self.ask(ids, source=source, destination=destination)
        return await handle.verdict(OUTCOME_S)

    async def answer(
        self, name: str, ids: Sequence[int], *, store: bool = False, reuse: bool = True, max_tokens: int = 8
    ) -> TimedAnswer:
        """Have an instance answer a prompt."""

        def generate() -> TimedAnswer:
            with self.workers[name].client() as client:
                return client.generate(ids=ids, max_tokens=max_tokens, store=store, reuse=reuse)

        return await asyncio.to_thread(generate)

    async def cold(self, name: str, ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that an instance gives to a prompt by computing all of it."""
        answer = await self.answer(name, ids, reuse=False)
        assert answer.end.cached_tokens == 0
        return answer.end.tokens

    async def held(self, name: str, ids: Sequence[int]) -> int:
        """How many leading blocks of a prompt an instance holds."""

        def ask() -> int:
            with self.workers[name].client() as client:
                return client.held(ids)

        return await asyncio.to_thread(ask)

    async def evict(self, name: str, ids: Sequence[int]) -> int:
        """Have an instance forget a prompt."""

        def ask() -> int:
            with self.workers[name].client() as client:
                return client.evict(ids)

        return await asyncio.to_thread(ask)

    # ------------------------------------------------------------------------------------------------ what one hears

    def header(self, body: Body, *, speaker: str = "tester", member: str = "", epoch: int = 0) -> Header:
        """A header for a message of the test's own."""
        number = random.SystemRandom().randrange(1, 2**62)
        return Header(k=body.KIND, i=speaker, m=member, e=epoch, s=number, t=time.time_ns())

    def encoded(self, body: Body, *, speaker: str = "tester", member: str = "", epoch: int = 0) -> bytes:
        """A message of the test's own, as it should be."""
        return encode(self.header(body, speaker=speaker, member=member, epoch=epoch), body)

    async def counters(self, name: str) -> dict[str, int]:
        """A worker's counters, asked over its own socket: all members of an instance answer on the bus."""

        def ask() -> dict[str, object]:
            with self.workers[name].client() as client:
                return client.stats()

        answer = await asyncio.to_thread(ask)
        return {key: int(value) for key, value in answer.items() if isinstance(value, int | float)}

    async def stats(self, name: str) -> dict[str, int]:
        """An instance's counters, asked over the bus; those of one member of several from itself."""
        if "/" in name:
            return await self.counters(name)
        data = await self.bus.request(TOPICS.query(name, Query.STATS), self.encoded(StatsAsked()), wait_s=ANSWER_S)
        assert isinstance(data, bytes), f"{name} does not answer: {data}"
        body = decode(data).body
        assert isinstance(body, StatsAnswered)
        return {key: int(value) for key, value in body.counters.items() if isinstance(value, int | float)}

    async def events(self, name: str, *, settle: bool = False) -> list[Event]:
        """What an instance has reported so far: its facts stream, or its settle log."""
        subject = TOPICS.settle(name) if settle else TOPICS.facts(name)
        found = [one for delivery in await self.bus.history(subject) for one in decode_all(delivery.data)]
        assert all(isinstance(event, Event) for event in found), "the log holds what cannot be read"
        return [event for event in found if isinstance(event, Event)]

    async def step(self, name: str, ids_hash: str, step: str, deadline_s: float = 60.0) -> TransferStep:
        """Wait until a request's transfer has reached a step, as the facts tell."""
        found: list[TransferStep] = []

        async def reached() -> bool:
            for event in await self.events(name):
                body = event.body
                if isinstance(body, TransferStep) and body.step == step and body.request_hash == ids_hash:
                    found.append(body)
            return bool(found)

        await until(reached, deadline_s, what=f"{name} reports step {step}")
        return found[-1]

    async def at_rest(self, *names: str, deadline_s: float = REST_S) -> None:
        """Wait until nothing is lent, written, held back or owed at these instances: all of the pool is back."""
        for name in names or tuple(name for name, worker in self.workers.items() if worker.alive):
            last: dict[str, int] = {}

            async def idle(name: str = name, last: dict[str, int] = last) -> bool:
                last.update(await self.stats(name))
                whole = last["pages_free"] + last["pages_cached"] == last["pages"]
                return whole and not any(last[counter] for counter in OWED)

            try:
                await until(idle, deadline_s)
            except AssertionError as error:
                raise AssertionError(f"{name} is not at rest after {deadline_s:g} s: {last}") from error

    # ----------------------------------------------------------------------------------------------------------- end

    async def stop(self) -> None:
        """End the workers as an operator would, then the broker; nothing that they started may live on."""
        for worker in self.workers.values():
            self.started |= {worker.pid, *children(worker.pid)}
            if worker.alive:
                worker.signal(signal.SIGCONT)
                worker.signal(signal.SIGTERM)
        try:
            await until(
                lambda: not any(worker.alive for worker in self.workers.values()), 60, what="workers have ended"
            )
        finally:
            for worker in self.workers.values():
                worker.kill()
            await self.publisher.close()
            await self.bus.close()
            await self.broker.stop()
        await until(lambda: not any(map(is_alive, self.started)), what="no process of the town is left")


@asynccontextmanager
async def town(folder: Path) -> AsyncIterator[Town]:
    """A broker and a requester; the workers are the test's to start."""
    broker = EmbeddedBroker(folder / "broker", port=free_ports(1)[0])  # kept for it while it is away
    await broker.start()
    bus = await NatsBus.connect(broker.url, name="tester", token=broker.token, topics=TOPICS, limits=EMBEDDED)
    await bus.ensure_assets()
    publisher = await Publisher(bus=bus, topics=TOPICS).__aenter__()
    built = Town(folder, broker, bus, publisher)
    try:
        yield built
    finally:
        await built.stop()
