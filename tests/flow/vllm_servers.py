"""Real vLLM servers for whole-system tests: each is `python -m vllm…` out of .venv-vllm, with kvbus's connector.

vLLM pins a transformers of its own, so it lives in a virtual environment of its own; where that is missing the tests
say so. Every wait has a deadline and waits for a fact.
"""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvbus.engines.link import EngineError
from kvbus.roles.registry import lookup
from kvbus.testing.cluster import free_ports
from tests.absent import absent
from tests.flow.town import Town, WorkerProcess, is_alive
from tests.waiting import until

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
START_S = 400.0
"""Importing vLLM alone takes half a minute on a busy core, and three processes do it."""
ANSWER_S = 120.0
CACHE_BYTES = 8 << 20
"""512 blocks of the tiny model."""


def require_vllm() -> None:
    """End the test where vLLM is not installed; CI says so itself where it cannot be."""
    if not PYTHON.is_file():
        absent("no vLLM here: make vllm installs it into .venv-vllm", excused="KVBUS_WITHOUT_VLLM")


@dataclass(frozen=True, slots=True)
class Answered:
    """What a server said to a prompt: the tokens, and all of its document."""

    tokens: tuple[int, ...]
    document: Mapping[str, object]


@dataclass(slots=True)
class VllmServer:
    """One server, and how to reach it."""

    name: str
    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def complete(
        self, ids: Sequence[int], *, max_tokens: int = 16, salt: str = "", ours: Mapping[str, object] | None = None
    ) -> Answered:
        """Answer a prompt greedily; AssertionError with the server's words where it does not."""
        body: dict[str, object] = {"model": "tiny", "prompt": list(ids), "max_tokens": max_tokens, "temperature": 0.0}
        body |= {"return_token_ids": True, "ignore_eos": True}
        body |= {"cache_salt": salt} if salt else {}
        body |= {"kv_transfer_params": {"kvbus": dict(ours)}} if ours is not None else {}
        status, raw = self.ask("POST", "/v1/completions", body)
        assert status == http.client.OK, raw[:2000]
        document = json.loads(raw)
        return Answered(tuple(document["choices"][0]["token_ids"]), document)

    def ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> tuple[int, bytes]:
        """Make one request, and return its status and what came back."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=ANSWER_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """The sum of one metric of vLLM's own, 0 where it has none of that name."""
        _, raw = self.ask("GET", "/metrics")
        lines = [line for line in raw.decode().splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def external_hits(self) -> float:
        """How many tokens came from outside, as vLLM counts them."""
        return self.metric("vllm:external_prefix_cache_hits_total")

    def is_empty(self) -> bool:
        """Whether no request holds a block."""
        return self.metric("vllm:kv_cache_usage_perc") == 0.0

    async def ready(self) -> None:
        """Wait until it answers."""
        await until(self._answers, START_S, what=f"vLLM {self.name} answers; its log: {self.log}")

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"vLLM {self.name} ended: {self.log.read_text()[-4000:]}")
        try:
            return self.ask("GET", "/health")[0] == http.client.OK
        except OSError:
            return False

    def end(self) -> None:
        """End it with all of its processes."""
        group = self.process.pid
        for number, wait_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
            if _signal_group(group, number):
                _wait_for_group(group, wait_s)
        self.process.wait(10)

    def kill(self) -> None:
        """End it as a power cut would."""
        _signal_group(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


def start_server(
    folder: Path,
    worker_socket: Path | None,
    name: str,
    model: Path,
    *,
    store: str = "every",
    cache_bytes: int = CACHE_BYTES,
    more: Sequence[str] = (),
    extra: Mapping[str, object] | None = None,
) -> VllmServer:
    """Start a server with the tiny model beside a worker's socket, or without kvbus where there is none."""
    (port,) = free_ports(1)  # it is taken only when vLLM has been loaded
    url = f"http://127.0.0.1:{port}"
    command = ["nice", "-n", "5", str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--model", str(model), "--served-model-name", "tiny", "--dtype", "float32"]
    command += ["--kv-cache-memory-bytes", str(cache_bytes), "--block-size", "32", "--enforce-eager"]
    command += ["--max-num-seqs", "16", *more]
    if worker_socket is not None:
        told = {"socket": str(worker_socket), "server": url, "store": store, **(extra or {})}
        command += ["--kv-transfer-config", json.dumps(transfer_config(told))]
    log = folder / f"vllm-{name}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=folder,
            env=environment(core=sum(name.encode()) % 2),
        )
    return VllmServer(name, url, process, log)


def transfer_config(told: Mapping[str, object]) -> dict[str, object]:
    """What vLLM is given to load the connector."""
    return {
        "kv_connector": "KvbusConnector",
        "kv_connector_module_path": "kvbus.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(told),
    }


def environment(core: int = 0) -> dict[str, str]:
    """One core each: two spinning pools of threads on the same cores are many times slower."""
    cores = os.cpu_count() or 1
    ours = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core % cores),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "PYTHONPATH": str(ROOT),
    }
    return {**os.environ, **ours}


async def attached(worker: WorkerProcess) -> None:
    """Wait until a worker has its engine."""

    def has_pool() -> bool:
        try:
            with worker.client() as client:
                return int(str(client.stats().get("pages", 0))) > 0
        except EngineError:  # it does not listen yet
            return False

    await until(lambda: asyncio.to_thread(has_pool), START_S, what=f"vLLM is attached to {worker.name}")


async def registered(town: Town, *names: str) -> None:
    """Wait until these instances' present workers are ready for requests."""
    for name in names:
        pid = town.workers[name].pid

        async def ready(name: str = name, pid: int = pid) -> bool:
            return any(one.record.process.pid == pid for one in await lookup(town.bus, name))

        await until(ready, what=f"{name} is registered")


def _signal_group(group: int, number: signal.Signals) -> bool:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _wait_for_group(group: int, wait_s: float) -> None:
    ends_at = time.monotonic() + wait_s
    while time.monotonic() < ends_at:
        members = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        if not any(_group_of(pid) == group and is_alive(pid) for pid in members):
            return
        os.sched_yield()


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
