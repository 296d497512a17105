"""A small cluster on this host for `kvbus up` and `kvbus demo`: a broker, unless one is named, and some workers.

Workers run in process sessions of their own, so that Ctrl-C reaches only the command, which then ends them in order:
workers first, the broker last.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_access import TlsFiles
from kvbus.bus_assets import EMBEDDED, AssetLimits
from kvbus.commands.auth import RULES, credential_path, write_folder
from kvbus.commands.http_door import HttpDoor
from kvbus.config import TransferLimits, checked_settings
from kvbus.errors import ConfigError
from kvbus.permissions import Role, User
from kvbus.roles.registry import Registered, lookup
from kvbus.topics import Topics

READY_WAIT_S = 240.0
"""Two models that load at once on two busy cores: twice what one takes, with room."""
STOP_WAIT_S = 30.0
"""A worker's own shutdown is bounded by its parts' budgets of 5 s each; then it is killed."""
POLL_S = 0.1
OPERATOR = User(Role.OPERATOR, "operator")
REQUESTER = User(Role.REQUESTER, "requester")


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What to start. `nats_url` empty: a broker of our own. Each instance may take KV from all the others."""

    instances: tuple[str, ...]
    engine: str
    engine_options: Mapping[str, object]
    pages: int
    backend: str = "ucx"
    prompt_tokens_max: int = 2_048
    rate_limit_bytes_s: int = 0
    digests: str = "off"
    nats_url: str = ""
    nats_token: str = ""
    nats_port: int = 0
    guarded: bool = False
    """Whether a broker of our own has users, each with a credential, instead of one token for all."""
    credentials: Path | None = None
    """How to enter a broker that was named; its workers enter in the same way."""
    tls: TlsFiles | None = None
    prefix: str = "kv"
    store_dir: Path | None = None
    log_level: str = "info"
    log_form: str = "text"
    limits: TransferLimits = field(default_factory=TransferLimits)
    ready_wait_s: float = READY_WAIT_S
    metrics_port: int = 0
    """The first of the ports of loopback at which the workers serve their metrics; 0: they serve none."""
    http_port: int | None = None
    """Where a gateway for these instances listens; 0 takes a free port, None starts none."""


@dataclass(slots=True)
class Cluster:
    """The running parts; `start` and `stop` once each, `stop` also after a failed start."""

    plan: ClusterPlan
    run_dir: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="kvbus-")))
    bus: NatsBus | None = None
    broker: EmbeddedBroker | None = None
    workers: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    registered: dict[str, Registered] = field(default_factory=dict)
    door: HttpDoor | None = None
    keep_logs: bool = False
    _minder: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """The broker's URL."""
        return self.broker.url if self.broker else self.plan.nats_url

    @property
    def token(self) -> str:
        """The broker's token."""
        return self.broker.token if self.broker else self.plan.nats_token

    @property
    def keys(self) -> Path:
        """Where a guarded broker's credentials lie, for as long as it runs."""
        return self.run_dir / "keys"

    @property
    def credentials(self) -> Path | None:
        """The credential of who starts all this: an operator's."""
        if self.plan.guarded:
            return credential_path(self.keys, OPERATOR)
        return self.plan.credentials if self.plan.nats_url else None

    def socket(self, instance: str) -> Path:
        """The local socket of an instance's worker."""
        return self.run_dir / f"{instance}.m0.sock"

    def log(self, instance: str) -> Path:
        """Where an instance's worker and engine write their log."""
        return self.run_dir / f"{instance}.log"

    def metrics_url(self, instance: str) -> str:
        """Where an instance's worker serves its metrics; empty where it serves none."""
        first = self.plan.metrics_port
        return f"http://127.0.0.1:{first + self.plan.instances.index(instance)}/metrics" if first else ""

    async def start(self, progress: Callable[[str], None]) -> None:
        """Start everything; ConfigError or BusError with the failing part's own words where that does not work."""
        plan = self.plan
        if not plan.nats_url:
            progress("starting the broker")
            binary = os.environ.get("KVBUS_NATS_SERVER")
            store_dir = plan.store_dir or self.run_dir / "nats"
            include = self._write_keys() if plan.guarded else None
            self.broker = EmbeddedBroker(store_dir, port=plan.nats_port, binary=binary, include=include)
            await self.broker.start()
            self._minder = await self._start_minder(self.broker)
        self.bus = await NatsBus.connect(
            self.url,
            name="kvbus-cluster",
            token=self.token or None,
            credentials=self.credentials,
            tls=plan.tls,
            topics=Topics(plan.prefix),
            limits=EMBEDDED if self.broker else AssetLimits(),
        )
        await self.bus.ensure_assets()
        if plan.http_port is not None:
            self.door = HttpDoor(
                self._door_arguments(plan.http_port), self._environment(), self.run_dir / "gateway.log"
            )
            await self.door.spawn()
        for instance in plan.instances:
            progress(f"starting instance {instance}")
            self.workers[instance] = await self._start_worker(instance)
        for instance in plan.instances:
            progress(f"waiting until instance {instance} is ready")
            self.registered[instance] = await self._until_ready(instance)
        if self.door is not None:
            await self.door.until_ready()

    async def stop(self) -> None:
        """End the gateway and the workers, then the broker; bounded, and harmless to repeat."""
        if self.door is not None:
            await self.door.stop()
        for worker in self.workers.values():
            if worker.returncode is None:
                worker.send_signal(signal.SIGTERM)
        await asyncio.gather(*(_end(worker) for worker in self.workers.values()))
        if self.bus is not None:
            await self.bus.close()
        if self.broker is not None:
            await self.broker.stop()
        if self._minder is not None:  # it ends with the broker
            await _end(self._minder)
        if not self.keep_logs:  # a log that somebody was told to read stays
            shutil.rmtree(self.run_dir, ignore_errors=True)

    async def restart(self, instance: str, plan: ClusterPlan) -> None:
        """End an instance's worker, and start it again as another plan has it; return once it is ready."""
        await self.end(instance, signal.SIGTERM)
        self.plan = plan
        self.workers[instance] = await self._start_worker(instance)
        self.registered[instance] = await self._until_ready(instance)

    async def end(self, instance: str, number: signal.Signals) -> None:
        """End an instance's worker by a signal, and wait until it is gone."""
        worker = self.workers[instance]
        if worker.returncode is None:
            worker.send_signal(number)
        await _end(worker)

    async def until_part_ends(self, on_leave: Callable[[str], None]) -> str:
        """Wait until a worker, the gateway or our broker fails, and return a sentence about it.

        A worker that ends with status 0 was drained, or told to end: `on_leave` hears its instance, and all else goes
        on. That holds for the last of them too, since whoever drained it still asks the broker what became of it.
        """
        instances = {asyncio.ensure_future(worker.wait()): name for name, worker in self.workers.items()}
        waits = {one: (f"instance {name}", self.log(name)) for one, name in instances.items()}
        if self.door is not None:
            waits[asyncio.ensure_future(self.door.ended())] = ("the gateway", self.door.log)
        if self.broker is not None and self._minder is not None:  # which ends with the broker
            waits[asyncio.ensure_future(self._minder.wait())] = ("the broker", self.broker.folder / "run")
        try:
            while waits:
                ended, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for one in ended:
                    (name, log), status = waits.pop(one), one.result()
                    if status or one not in instances:
                        return f"{name} {_how(name, status)}, so everything stops; its log: {log}"
                    on_leave(instances[one])
            never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            return await never  # all have left, and the broker is another's: until Ctrl-C
        finally:
            for wait in waits:
                wait.cancel()

    # ------------------------------------------------------------------------------------------------------- inside

    @staticmethod
    async def _start_minder(broker: EmbeddedBroker) -> asyncio.subprocess.Process:
        command = [sys.executable, "-m", "kvbus.commands.minder", str(os.getpid()), str(broker.pid)]
        return await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, start_new_session=True
        )

    async def _start_worker(self, instance: str) -> asyncio.subprocess.Process:
        plan = self.plan
        others = tuple(name for name in plan.instances if name != instance)
        checked_settings(  # so that a bad setting is named here, not in a log file
            instance=instance, nats_url=self.url, engine=plan.engine, pages=plan.pages, run_dir=self.run_dir
        )
        command = [sys.executable, "-m", "kvbus", "worker", "--instance", instance, "--engine", plan.engine]
        command += ["--engine-options", json.dumps(dict(plan.engine_options)), "--pages", str(plan.pages)]
        command += ["--prompt-tokens-max", str(plan.prompt_tokens_max), "--backend", plan.backend]
        command += ["--digests", plan.digests]
        command += ["--rate-limit", str(plan.rate_limit_bytes_s), "--run-dir", str(self.run_dir)]
        command += ["--inflight-max", str(plan.limits.inflight_max), "--dedup-ttl", str(plan.limits.dedup_ttl_s)]
        command += ["--nats", self.url, "--prefix", plan.prefix, "--log-level", plan.log_level, "--log", plan.log_form]
        command += ["--parent-pid", str(os.getpid())]
        command += [part for name in others for part in ("--allow", name)]
        if url := self.metrics_url(instance):
            command += ["--metrics", url.removeprefix("http://").removesuffix("/metrics")]
        command += self._tls_arguments()
        with self.log(instance).open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._environment(instance),
            )

    def _door_arguments(self, port: int) -> list[str]:
        plan = self.plan
        arguments = ["--port", str(port), "--nats", self.url, "--prefix", plan.prefix]
        arguments += ["--log-level", plan.log_level, "--log", plan.log_form]
        arguments += ["--inflight-max", str(plan.limits.inflight_max), "--dedup-ttl", str(plan.limits.dedup_ttl_s)]
        arguments += [part for name in plan.instances for part in ("--instance", name)]
        if "KV_TRANSFER_SOURCE_ALLOW" not in os.environ:
            arguments += ["--source-allow", ",".join(plan.instances)]
        arguments += ["--run-dir", str(self.run_dir), "--parent-pid", str(os.getpid())]
        return [*arguments, *self._tls_arguments()]

    def _tls_arguments(self) -> list[str]:
        tls = self.plan.tls
        files = {"--tls-ca": tls.ca, "--tls-cert": tls.cert, "--tls-key": tls.key} if tls else {}
        return [part for name, file in files.items() if file for part in (name, str(file))]

    def _environment(self, instance: str = "") -> dict[str, str]:
        """What a worker or the gateway enters with; not on its command line, where all can read it."""
        environment = {**os.environ, "KVBUS_NATS_TOKEN": self.token}
        environment.pop("KVBUS_NATS_CREDENTIALS", None)  # that may be for another broker than ours
        user = _user(instance) if instance else REQUESTER
        own = credential_path(self.keys, user) if self.plan.guarded else self.credentials
        return environment | ({"KVBUS_NATS_CREDENTIALS": str(own)} if own else {})

    def _write_keys(self) -> Path:
        """Make a credential for each instance, for who asks, who watches and who runs this; return the rules."""
        users = [OPERATOR, *map(_user, self.plan.instances)]
        users += [REQUESTER, User(Role.OBSERVER, "observer")]
        write_folder(self.keys, users, Topics(self.plan.prefix))
        return self.keys / RULES

    async def _until_ready(self, instance: str) -> Registered:
        if self.bus is None:
            raise ConfigError("the cluster has no broker")
        worker = self.workers[instance]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.plan.ready_wait_s
        while loop.time() < deadline:
            found = await lookup(self.bus, instance)
            ours = [one for one in found if one.record.process.pid == worker.pid]
            if ours:
                return ours[0]
            if worker.returncode is not None:
                self.keep_logs = True
                words = self._last_words(instance)
                raise ConfigError(f"instance {instance} did not start: {words}", log=str(self.log(instance)))
            await asyncio.sleep(POLL_S)
        words, wait_s = self._last_words(instance), self.plan.ready_wait_s
        raise ConfigError(f"instance {instance} was not ready within {wait_s:g} s: {words}")

    def _last_words(self, instance: str) -> str:
        try:
            lines = self.log(instance).read_text(errors="replace").splitlines()
        except OSError:
            return "it left no log"
        for speaker in ("kvbus engine:", "kvbus:", "Error:"):  # an engine's own words say more than that it ended
            if told := [line for line in lines if line.startswith(speaker)]:
                return told[-1]
        return " | ".join(lines[-3:]) or "its log is empty"


def _how(name: str, status: int) -> str:
    """Return how a part ended; of the broker's own status nothing is known here."""
    if name == "the broker":
        return "ended"
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def _user(instance: str) -> User:
    return User(Role.INSTANCE, instance, ("m0",))


async def _end(worker: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(STOP_WAIT_S):
            await worker.wait()
    except TimeoutError:
        worker.kill()
        await worker.wait()
