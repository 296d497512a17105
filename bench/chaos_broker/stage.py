"""A row's parts: a broker or a cluster, and real workers that take notes beside the bus."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from bench.chaos_broker.load import RATE_BYTES_S
from bench.chaos_broker.plants import IN_WORKERS
from bench.chaos_broker.table import Row
from bench.chaos_broker.worker import CLOCK, NOTES, PLANT, move_clock
from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.commands.auth import RULES, credential_path, write_folder
from kvbus.errors import BusError
from kvbus.permissions import User
from kvbus.publisher import Publisher
from kvbus.testing.cluster import REPLICATED, LocalCluster, free_ports
from tests.flow.guarded import DASH, GATEWAY, OPERATOR, GuardedTown, keys_of
from tests.flow.town import TOPICS, WorkerProcess
from tests.waiting import until

INFLIGHT_MAX = 32
ASSETS_S = 30.0


@dataclass(slots=True)
class Stage(GuardedTown):
    """A town whose workers take notes beside the bus; `users` is empty where a token is enough."""

    plant: str = ""
    findings: list[str] = field(default_factory=list)
    """What was wrong before there was a row's load, and what is worth a note."""
    remarks: list[str] = field(default_factory=list)

    @property
    def notes(self) -> Path:
        """The file of what the workers say beside the bus."""
        return self.folder / "notes"

    def clock(self, instance: str, member: str = "m0") -> Path:
        """The file by which a worker's wall clock is moved."""
        return self.folder / f"{instance}.{member}.clock"

    def _spawn(self, name: str, arguments: list[str]) -> WorkerProcess:
        instance, _, member = name.partition("/")
        member = member or "m0"
        stem, clock = self.folder / f"{instance}.{member}.log", self.clock(instance, member)
        if not clock.exists():
            move_clock(clock, 0.0)
        user = next((one for one in self.users if one.name == instance), None)
        given = ["--credentials", str(self.credential(user))] if user else []
        plant = self.plant if self.plant in IN_WORKERS else ""
        run_dir = ["--run-dir", str(self.folder / "run")]
        entry = {"KVBUS_NATS_URL": self.broker.url, "KVBUS_NATS_TOKEN": self.broker.token}
        with stem.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "bench.chaos_broker.worker", "worker", *run_dir, *arguments, *given],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **entry, NOTES: str(self.notes), CLOCK: str(clock), PLANT: plant},
            )
        socket = self.folder / "run" / f"{instance}.{member}.sock"
        return WorkerProcess(instance, member, process, socket, stem, arguments)

    async def enter(self, name: str, user: User | None = None) -> NatsBus:
        """Connect: with the town's token, or as one of its users."""
        if self.users:
            return await self.connect(user or OPERATOR)
        return await NatsBus.connect(self.broker.url, name=name, token=self.broker.token, topics=TOPICS)

    async def begin(self, *members: str) -> None:
        """Start a source and a destination, with these members each."""
        options: dict[str, Any] = {"backend": "memory", "inflight_max": INFLIGHT_MAX, "pages": 1_024}
        names = members or ("",)
        starting = [self.start("a", member=one, members=members, **options) for one in names]
        options |= {"allow": ["a"], "rate_limit_bytes_s": RATE_BYTES_S}
        starting += [self.start("b", member=one, members=members, **options) for one in names]
        await asyncio.gather(*starting)

    async def restart(self, name: str) -> None:
        """End a worker as an operator would, and start its successor."""
        worker = self.workers[name]
        worker.signal(signal.SIGTERM)
        await until(lambda: not worker.alive, 40, what=f"{name} has ended")
        await self.start_again(name)

    async def assets(self) -> None:
        """Make streams and buckets, as soon as the broker lets us."""

        async def stand() -> bool:
            try:
                await self.bus.ensure_assets()
            except BusError:
                return False
            return True

        await until(stand, ASSETS_S, what="streams and buckets stand")

    async def end_workers(self, row: Row) -> None:
        """End the workers as an operator would, while the broker still hears them."""
        alive = [worker for worker in self.workers.values() if worker.alive]
        row.check(len(alive) == len(self.workers), "a worker has ended by itself")
        for worker in alive:
            worker.signal(signal.SIGTERM)
        await until(lambda: not any(worker.alive for worker in alive), 40, what="workers have ended")
        row.check(all(worker.process.returncode == 0 for worker in alive), "a worker did not end in order")


@asynccontextmanager
async def staged(
    folder: Path, broker: EmbeddedBroker | LocalCluster, plant: str, users: Sequence[User] = ()
) -> AsyncIterator[Stage]:
    """Start a broker, and make the parts around it; all of them end with the block, whatever it raises."""
    (folder / "state").mkdir()
    limits = REPLICATED if isinstance(broker, LocalCluster) else EMBEDDED

    async def enter(name: str, user: User) -> NatsBus:
        credentials = credential_path(keys_of(folder), user) if users else None
        bus = await NatsBus.connect(
            broker.url, name=name, token=broker.token, credentials=credentials, topics=TOPICS, limits=limits
        )
        ends.push_async_callback(bus.close)
        return bus

    async with AsyncExitStack() as ends:
        ends.push_async_callback(broker.stop)
        await broker.start()
        bus = await enter("tester", OPERATOR)
        publisher = await Publisher(bus=await enter("gateway", GATEWAY), topics=TOPICS).__aenter__()
        # A town asks its broker for a URL and a token, and to stop: a cluster has all three.
        stage = Stage(folder, cast("EmbeddedBroker", broker), bus, publisher, users=users, plant=plant)
        ends.push_async_callback(stage.stop)
        await stage.assets()
        yield stage


@asynccontextmanager
async def single(folder: Path, plant: str) -> AsyncIterator[Stage]:
    """One broker with its store in files."""
    async with staged(folder, EmbeddedBroker(folder / "broker", port=free_ports(1)[0]), plant) as stage:
        yield stage


@asynccontextmanager
async def guarded(folder: Path, plant: str, *instances: User) -> AsyncIterator[Stage]:
    """One broker that knows its users."""
    users = (OPERATOR, *instances, GATEWAY, DASH)
    write_folder(keys_of(folder), users, TOPICS)
    broker = EmbeddedBroker(folder / "broker", port=free_ports(1)[0], include=keys_of(folder) / RULES)
    async with staged(folder, broker, plant, users) as stage:
        yield stage


@asynccontextmanager
async def clustered(folder: Path, plant: str) -> AsyncIterator[Stage]:
    """Three brokers, and each stream on all of them."""
    async with staged(folder, LocalCluster(folder / "cluster"), plant) as stage:
        yield stage
