"""Two hosts on one machine: namespaces of their own for network, processes and IPC, and a wire that loses and delays.

    host a (10.77.x.2) ── wire: a tun on either side, `link.py` in between ── host b (10.77.x.3)
          └── veth, to the broker ──  this machine  ── veth, to the broker ──┘

Whatever crosses between the hosts' workers but messages of the bus goes over the wire: nothing else leads there.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.publisher import Publisher
from kvbus.roles.registry import lookup
from tests.absent import absent
from tests.flow.town import READY_S, TOPICS, Town, WorkerProcess, children
from tests.waiting import until

WIRE = "wire"
COMMAND_S = 100.0
"""For each `ip` command, and each word of the wire: they take milliseconds."""
APART = ("unshare", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child")
"""Processes see neither each other's memory nor each other's /proc then, as on two machines."""
_numbers = itertools.count(os.getpid() % 200)


def ip(*words: str) -> None:
    """Run one `ip` command; RuntimeError with its own words where it fails."""
    ran = subprocess.run((which("ip") or "ip", *words), check=False, capture_output=True, text=True, timeout=COMMAND_S)
    if ran.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {ran.stderr.strip()}")


@dataclass(frozen=True, slots=True)
class Host:
    """One of the two: its network namespace, its address on the wire, and where this machine is from there."""

    namespace: str
    address: str
    hub: str

    def command(self, *words: str) -> list[str]:
        """What runs a command on that host."""
        return ["ip", "netns", "exec", self.namespace, *APART, *words]


class Wire:
    """The program between the hosts, driven over its stdin."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._ask("count")  # says "ready" first

    def lose(self, share: float) -> None:
        """Lose this share of the packets from now on; 1 cuts the wire."""
        self._ask(f"loss {share}")

    def counts(self) -> tuple[int, int]:
        """How many packets were carried and lost so far."""
        carried, lost = self._ask("count").split()
        return int(carried), int(lost)

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        said = self._process.stdout.readline()
        assert said, f"the wire has ended with status {self._process.poll()}"
        return said


@dataclass(frozen=True, slots=True)
class Hosts:
    """Both hosts and what is between them."""

    a: Host
    b: Host
    wire: Wire


@contextmanager
def two_hosts(*, delay_ms: float, seed: int) -> Iterator[Hosts]:
    """Make the namespaces and the wire, and take all of it away again; skipped where that takes rights we lack."""
    number = next(_numbers) % 250
    names = [f"kvbus-{os.getpid()}-{number}-{letter}" for letter in "ab"]
    with ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "delete", name)
                ip("-n", name, "link", "set", "lo", "up")
            hosts = [_wired(name, number, place) for place, name in enumerate(names)]
            subprocess.run(hosts[0].command("true"), check=True, capture_output=True, timeout=COMMAND_S)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            absent(f"no namespaces can be made here: {error}; run as root, with iproute2 and /dev/net/tun")
        words = [sys.executable, str(Path(__file__).with_name("link.py"))]
        words += [word for name in names for word in (name, WIRE)]
        process = subprocess.Popen(
            [*words, str(delay_ms), str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(process.communicate, timeout=COMMAND_S)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "the wire did not start"
        yield Hosts(hosts[0], hosts[1], Wire(process))


def _wired(name: str, number: int, place: int) -> Host:
    """Give a namespace its end of the wire, and a line to this machine on which the broker is reached."""
    address, hub = f"10.77.{number}.{place + 2}", f"10.78.{number}.{4 * place + 1}"
    ip("-n", name, "tuntap", "add", "dev", WIRE, "mode", "tun")
    ip("-n", name, "address", "add", f"{address}/24", "dev", WIRE)
    ip("-n", name, "link", "set", WIRE, "up")
    ours = f"kvb{os.getpid() % 10_000}.{number}{'ab'[place]}"
    ip("link", "add", ours, "type", "veth", "peer", "name", "hub", "netns", name)
    ip("address", "add", f"{hub}/30", "dev", ours)
    ip("link", "set", ours, "up")
    ip("-n", name, "address", "add", f"10.78.{number}.{4 * place + 2}/30", "dev", "hub")
    ip("-n", name, "link", "set", "hub", "up")
    return Host(name, address, hub)


# ----------------------------------------------------------------------------------------------------- workers on them


@dataclass(frozen=True, slots=True)
class Told:
    """What a far worker's engine answered: its tokens, and how many of the prompt's it found in its cache."""

    tokens: tuple[int, ...]
    cached: int


@dataclass(slots=True)
class FarProcess(WorkerProcess):
    """A worker on one of the hosts: what we started waits for it, and is in our namespace of processes."""

    def signal(self, number: signal.Signals) -> None:
        for pid in children(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass(slots=True, kw_only=True)
class FarTown(Town):
    """A town whose workers run on two hosts; instance a on the first, and b on the second."""

    hosts: dict[str, Host]
    wire: Wire

    async def start_again(self, name: str, arguments: list[str] | None = None) -> WorkerProcess:
        """Start a worker on its host, and wait until the registry has it."""
        worker = self._spawn(name, arguments or self.workers[name].arguments)
        self.workers[name] = worker

        async def ready() -> bool:
            if not worker.alive:
                raise AssertionError(f"worker {name} ended: {worker.log.read_text()[-2000:]}")
            for one in await lookup(self.bus, name):
                self.registered[name] = one
            return name in self.registered

        await until(ready, READY_S, what=f"worker {name} is registered")
        worker.pids = {worker.pid, *children(worker.pid)}
        self.started |= worker.pids | {pid for child in children(worker.pid) for pid in children(child)}
        return worker

    async def counters(self, name: str) -> dict[str, int]:
        """An instance's counters, asked over the bus."""
        return await self.stats(name)

    async def told(self, name: str, ids: Sequence[int], *, store: bool = False, reuse: bool = True) -> Told:
        """Have an instance answer a prompt, asked on its own host."""
        worker = self.workers[name]
        (pid,) = children(worker.process.pid)
        program = str(Path(__file__).with_name("far_client.py"))
        process = await asyncio.create_subprocess_exec(
            "nsenter", "--target", str(pid), "--pid", "--mount", sys.executable, program, str(worker.socket),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(60):
            said, _ = await process.communicate(json.dumps({"ids": ids, "store": store, "reuse": reuse}).encode())
        assert process.returncode == 0, f"the client of {name} ended with status {process.returncode}"
        answer = json.loads(said)
        return Told(tuple(answer["tokens"]), answer["cached"])

    def _spawn(self, name: str, arguments: list[str]) -> WorkerProcess:
        host, log = self.hosts[name], self.folder / f"{name}.m0.log"
        command = [sys.executable, "-m", "kvbus", "worker", "--run-dir", str(self.folder / "run"), *arguments]
        port = self.broker.url.rpartition(":")[2]
        with log.open("ab") as output:
            process = subprocess.Popen(
                host.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={
                    **os.environ,
                    "KVBUS_NATS_URL": f"nats://{host.hub}:{port}",
                    "KVBUS_NATS_TOKEN": self.broker.token,
                },
            )
        return FarProcess(name, "m0", process, self.folder / "run" / f"{name}.m0.sock", log, arguments)


@asynccontextmanager
async def far_town(folder: Path, hosts: Hosts) -> AsyncIterator[FarTown]:
    """A broker on this machine that both hosts reach, and a requester; the workers are the test's to start."""
    broker = EmbeddedBroker(folder / "broker")
    await broker.start()
    doors = [await _door(host.hub, broker.url) for host in (hosts.a, hosts.b)]
    bus = await NatsBus.connect(broker.url, name="tester", token=broker.token, topics=TOPICS, limits=EMBEDDED)
    await bus.ensure_assets()
    publisher = await Publisher(bus=bus, topics=TOPICS).__aenter__()
    built = FarTown(folder, broker, bus, publisher, hosts={"a": hosts.a, "b": hosts.b}, wire=hosts.wire)
    try:
        yield built
    finally:
        try:
            await built.stop()
        finally:
            for door in doors:
                door.close()


async def _door(address: str, url: str) -> asyncio.Server:
    """Let a host in to the broker, which listens on this machine's loopback alone."""
    port = int(url.rpartition(":")[2])
    tasks: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_broker = await asyncio.open_connection("127.0.0.1", port)
        for pair in ((reader, to_broker[1]), (to_broker[0], writer)):
            task = asyncio.get_running_loop().create_task(carry(*pair))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    return await asyncio.start_server(let_in, address, port)


def arguments_of(name: str, host: Host, *, backend: str, allow: Sequence[str] = (), rate_limit: int = 0) -> list[str]:
    """What starts an instance's worker that moves its pages over the wire alone."""
    arguments = ["--instance", name, "--engine", "toy", "--engine-options", '{"work_rounds": 1}', "--pages", "192"]
    arguments += ["--backend", backend, "--digests", "always", "--devices", WIRE, "--rate-limit", str(rate_limit)]
    arguments += ["--socket-address", host.address]
    return arguments + [part for source in allow for part in ("--allow", source)]
