"""The running parts: a broker, two workers as processes, raw peers as processes, and how much processor each takes."""

import asyncio
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

from controls import raw

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.engines.client import LocalClient
from kvbus.roles.registry import lookup
from kvbus.topics import Topics

TOPICS = Topics()
BLOCK = 32
ENGINE = {"work_rounds": 1, "page_bytes": 1024, "block_tokens": BLOCK}
"""Pages of 1 KiB: what is measured here is control, not bytes."""
READY_S = 60.0
LOOK_S = 0.02
HERTZ = os.sysconf("SC_CLK_TCK")


def prompt(number: int) -> list[int]:
    """The token ids of one prompt: one whole block, and a few tokens more."""
    pick = random.Random(number)
    return [pick.randrange(97, 123) for _ in range(BLOCK + 3)]


def cpu_s(pid: int) -> float:
    """Return the processor seconds that a process has used, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / HERTZ


@dataclass(slots=True)
class Town:
    """What runs, and who is who."""

    folder: Path
    broker: EmbeddedBroker
    workers: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    peers: dict[str, BaseProcess] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where the broker listens, its token included."""
        return self.broker.url.replace("://", f"://{self.broker.token}@")

    def cpu(self) -> dict[str, float]:
        """Return the processor seconds of each process, this one included."""
        pids = {name: process.pid for name, process in self.workers.items()}
        pids |= {name: process.pid or 0 for name, process in self.peers.items()}
        pids |= {"broker": self.broker.pid or 0, "requester": os.getpid()}
        return {name: cpu_s(pid) for name, pid in pids.items()}

    async def start(self, bus: NatsBus, name: str, *, allow: Sequence[str], pages: int, in_flight: int) -> None:
        """Start a worker and wait until the registry has it."""
        worker = self.workers[name] = self._spawn(name, allow, pages, in_flight)
        ends_at = time.monotonic() + READY_S
        while not any(one.record.process.pid == worker.pid for one in await lookup(bus, name)):
            if worker.poll() is not None or time.monotonic() > ends_at:
                raise SystemExit(f"worker {name} did not start: {(self.folder / f'{name}.log').read_text()[-2000:]}")
            await asyncio.sleep(LOOK_S)

    def _spawn(self, name: str, allow: Sequence[str], pages: int, in_flight: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "kvbus", "worker", "--instance", name, "--engine", "toy", "--log-level"]
        command += ["warning", "--engine-options", json.dumps(ENGINE), "--pages", str(pages), "--transport", "memory"]
        command += ["--run-dir", str(self.folder / "run"), "--inflight-max", str(in_flight), "--dedup-ttl", "2"]
        command += [part for source in allow for part in ("--allow", source)]
        environment = {**os.environ, "KVBUS_NATS_URL": self.broker.url, "KVBUS_NATS_TOKEN": self.broker.token}
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    def start_peers(self) -> None:
        """Start the raw client's source and destination, and wait until they answer."""
        context = multiprocessing.get_context("spawn")
        for name, run in (("raw source", raw.run_source), ("raw destination", raw.run_destination)):
            ours, theirs = context.Pipe()
            self.peers[name] = context.Process(target=run, args=(self.url, theirs), daemon=True)
            self.peers[name].start()
            if not ours.poll(READY_S):
                raise SystemExit(f"the {name} did not start")

    def client(self, name: str) -> LocalClient:
        """Return a client of a worker's own socket."""
        return LocalClient(self.folder / "run" / f"{name}.m0.sock")

    def end(self) -> None:
        """End all processes but the broker."""
        for worker in self.workers.values():
            worker.terminate()
        for peer in self.peers.values():
            peer.terminate()
        for worker in self.workers.values():
            worker.wait(READY_S)
        for peer in self.peers.values():
            peer.join(READY_S)


@asynccontextmanager
async def town(folder: Path) -> AsyncIterator[tuple[Town, NatsBus]]:
    """Run a broker with its assets; who works there is started by the caller."""
    async with EmbeddedBroker.started(folder / "broker") as broker:
        bus = await NatsBus.connect(broker.url, name="bench", token=broker.token, topics=TOPICS, limits=EMBEDDED)
        built = Town(folder, broker)
        try:
            await bus.ensure_assets()
            yield built, bus
        finally:
            built.end()
            await bus.close()
