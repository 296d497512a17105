"""`kvbus doctor` beside a running `kvbus up`, as a person runs it, and which way a transfer says that it took."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from kvbus.bus import NatsBus
from kvbus.roles.registry import registry_key
from kvbus.transport import BUCKET_INSTANCES
from tests.absent import absent
from tests.flow.command_line import COMMAND_S, Up, environment, kvbus, start_up, up
from tests.flow.town import FAST, as_text, children, prompt
from tests.waiting import stand_still, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Up]:
    """Two instances that read by UCX."""
    with up(folder, "--transport", "ucx") as one:
        yield one


def checks_of(ran: "subprocess.CompletedProcess[str]") -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(ran.stdout)["checks"]}


def looked(
    state: Path, holds: "Callable[[subprocess.CompletedProcess[str]], bool]", *, as_json: bool = True
) -> "subprocess.CompletedProcess[str]":
    """What the doctor says; it looks again where a busy member let two heartbeats pass while it listened."""
    said: list[subprocess.CompletedProcess[str]] = []

    def holds_now() -> bool:
        said.append(kvbus("doctor", *(["--json"] if as_json else []), state=state))
        return holds(said[-1])

    try:
        wait_until(holds_now, COMMAND_S, what="the doctor finds it so")
    except AssertionError as error:
        raise AssertionError(said[-1].stdout) from error
    return said[-1]


def worker_pid(running: Up, instance: str) -> int:
    """The process of an instance's worker; its command line says which one it is."""

    def is_it(pid: int) -> bool:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        return "--instance" in words and words[words.index("--instance") + 1] == instance

    (pid,) = (pid for pid in children(running.process.pid) if is_it(pid))
    return pid


def stage(running: Up, name: str) -> str:
    """Stage a prompt of its own, and return the story of its transfer."""
    ran = kvbus("stage", "--from", "a", "--to", "b", "--json", as_text(prompt(name, 6)), state=running.state)
    assert ran.returncode == 0, ran.stderr
    transfer = json.loads(ran.stdout.splitlines()[-1])["transfer"]
    told: list[str] = []

    def is_whole() -> bool:
        told[:] = [kvbus("story", transfer, state=running.state).stdout]
        return "settled: 6/6" in told[0]

    wait_until(is_whole, COMMAND_S, what="the story is recorded")
    return " ".join(told[0].split())


def test_a_story_says_by_which_way_the_pages_came_and_over_which_lanes(running: Up) -> None:
    first = stage(running, "first")
    assert "moving by ucx over cma: same host, 6 pages of 64 KiB" in first
    assert "moved over tcp/lo, cma/memory" in first
    second = stage(running, "second")
    assert "moving by ucx over cma (tcp/lo, cma/memory): same host, 6 pages of 64 KiB" in second
    assert "moved over" not in second


def test_a_doctor_finds_a_running_cluster_well_and_says_which_way_pages_take(running: Up) -> None:
    stage(running, "third")
    checks = checks_of(looked(running.state, lambda ran: ran.returncode == 0))
    assert "nats-server" in checks["server"]["found"]
    assert checks["KVB_FACTS"]["level"] == checks["KV_kvbus_epoch"]["level"] == "ok"
    assert "offers ucx, memory" in checks["a/m0"]["found"]
    assert "heartbeat" in checks["a/m0"]["found"]
    assert "has read by ucx" in checks["b/m0"]["found"]
    assert "(ucx lanes cma/memory, tcp/lo)" in checks["b/m0"]["found"]
    assert checks["a → b"]["found"].startswith("pages would come by ucx over cma: same host, 32 pages of 64 KiB")
    person = looked(running.state, lambda ran: ran.returncode == 0, as_json=False)
    assert "\x1b" not in person.stdout
    assert [line for line in person.stdout.splitlines() if line in {"python", "broker", "workers"}]


@asynccontextmanager
async def registered(running: Up, name: str) -> AsyncIterator[None]:
    """Renew a member's registration as it would itself: a doctor on a busy machine looks later than it lasts."""
    url, token = str(running.document["nats_url"]), str(running.document["token"])
    bus = await NatsBus.connect(url, name="test", token=token)
    over = asyncio.Event()
    entry = await bus.get(BUCKET_INSTANCES, registry_key(name, "m0"))
    assert entry is not None

    async def renew() -> None:
        while not over.is_set():
            await bus.put(BUCKET_INSTANCES, registry_key(name, "m0"), entry.value)
            await asyncio.wait({ending}, timeout=1.0)

    ending = asyncio.ensure_future(over.wait())
    renewing = asyncio.ensure_future(renew())
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(renewing, ending)
        await bus.close()


async def test_a_worker_that_stands_still_is_wrong_and_named_first(running: Up) -> None:
    pid = worker_pid(running, "b")
    async with registered(running, "b"):
        stand_still(pid)
        try:
            ran = await asyncio.to_thread(looked, running.state, lambda ran: checks_of(ran)["a/m0"]["level"] == "ok")
        finally:
            os.kill(pid, signal.SIGCONT)
    assert ran.returncode == 1
    checks = checks_of(ran)
    assert checks["b/m0"]["level"] == "wrong"
    assert "no heartbeat" in checks["b/m0"]["found"]
    assert json.loads(ran.stdout)["first"].startswith("workers, b/m0: ")


@contextmanager
def worker_apart(running: Up) -> Iterator[None]:
    """An instance b in a pid namespace of its own, as in another container, that takes pages from a."""
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*apart, "true"], check=False, capture_output=True).returncode:
        absent("this host lets nobody make a pid namespace; run as root, or allow user namespaces")
    command = [sys.executable, "-m", "kvbus", "worker", "--instance", "b", "--allow", "a", "--json"]
    command += ["--engine-options", json.dumps(dict(FAST))]  # as the others have it: layouts must be the same
    process = subprocess.Popen(
        [*apart, *command, "--run-dir", str(running.state / "run")],
        env=environment(running.state),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["ready"]
        yield
    finally:
        process.kill()
        process.communicate()


def test_a_reader_in_another_container_takes_the_socket_and_the_doctor_said_so(tmp_path: Path) -> None:
    with up(tmp_path, "--instances", "a,c", "--transport", "auto") as running, worker_apart(running):
        checks = checks_of(looked(tmp_path, lambda ran: checks_of(ran)["b/m0"]["level"] == "ok"))
        told = stage(running, "apart")
    assert checks["a → b"]["found"].startswith("pages would come by socket: another container of this host")
    assert checks["a → c"]["found"].startswith("pages would come by memory: same host")
    assert "moving by socket: another container of this host, 6 pages of 64 KiB" in told
    assert "ucx not offered; memory not offered" in told  # neither would lead there


def test_a_broker_that_is_gone_is_wrong_with_the_state_file_that_still_names_it(tmp_path: Path) -> None:
    running = start_up(tmp_path)
    wait_until(lambda: running.state_file.exists() or running.process.poll() is not None, 60, what="up is ready")
    left = running.state_file.read_text()
    assert running.end(signal.SIGINT) == 0
    running.process.communicate()
    running.state_file.write_text(left)
    running.state_file.chmod(0o600)
    ran = kvbus("doctor", "--json", state=tmp_path)
    assert ran.returncode == 1
    checks = checks_of(ran)
    assert checks["state file"]["level"] == "ok"
    assert checks["server"]["level"] == "wrong"
    assert "nothing listens there" in checks["server"]["found"]
