"""One compose file brought up under a project name of its own: commands in containers, faults, logs, and the way down.

Nothing of kvbus is imported by the containers but what their image holds: what is asked, a command of kvbus answers.
"""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INSIDE = Path(__file__).with_name("inside.py")
UP_S = 180.0
"""Every container of a story, on a machine with two busy cores; without load it takes about ten seconds."""
BUILD_S = 900.0
"""Downloads some 100 MB where nothing is cached."""
DEVICE = "eth0"
"""What the workers of partition.yaml were told to use; a container that is joined again would get another name."""
HTTP_S = 10.0
"""A gateway and a broker answer within milliseconds."""
COMMAND_S = 120.0
"""A transfer has a budget of 30 s, its word takes 10 s more, and a container starts within seconds."""


Document = dict[str, Any]
"""What a command of kvbus prints with --json."""


class StackError(Exception):
    """Docker, or kvbus in a container, did not do what it was told; its own words say why, and its status."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


def engine_trouble() -> str:
    """Return why no story can be run here, or nothing."""
    docker = which("docker")
    if docker is None:
        return "there is no `docker` here"
    for words in (("info", "--format", "{{.ServerVersion}}"), ("compose", "version")):
        ran = subprocess.run([docker, *words], check=False, capture_output=True, text=True, timeout=30)
        if ran.returncode:
            return f"`docker {words[0]}` says: {(ran.stderr or ran.stdout).strip().splitlines()[-1]}"
    return ""


class Stack:
    """A compose file that runs; made by `stack()`, which also takes it down."""

    def __init__(self, name: str) -> None:
        self.file = ROOT / "compose" / f"{name}.yaml"
        self.project = f"kvbus-test-{name}"

    def command(self, *words: str) -> list[str]:
        """Return the command line for one word of compose."""
        return ["docker", "compose", "--progress", "quiet", "-p", self.project, "-f", str(self.file), *words]

    def compose(self, *words: str, wait_s: float = COMMAND_S) -> str:
        """Run one word of compose and return what it says; StackError if it fails."""
        return _run(self.command(*words), wait_s)

    def container(self, service: str) -> str:
        """Return the container's name."""
        return f"{self.project}-{service}-1"

    # ------------------------------------------------------------------------------------------------------ questions

    def kvbus(self, *words: str) -> Document:
        """Run a command of kvbus in a container of its own; return its document. Its status does not matter here."""
        return document(self.start_kvbus(*words), COMMAND_S)

    def start_kvbus(self, *words: str) -> "subprocess.Popen[str]":
        """Start a command of kvbus in a container of its own, and return at once; `document` awaits its answer."""
        line = self.command("run", "--rm", "--no-TTY", "--no-deps", "kvbus", *words, "--json")
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment())

    def ask(self, service: str, *words: str) -> Document:
        """Ask a worker on its local socket; StackError where it does not answer."""
        line = ["docker", "exec", "--interactive", self.container(service), "python", "-", *words]
        answer: Document = json.loads(_run(line, COMMAND_S, given=INSIDE.read_text(encoding="utf-8")))
        return answer

    def inspect(self, service: str) -> Mapping[str, Any]:
        """Return what the engine knows of a container."""
        found: list[Mapping[str, Any]] = json.loads(_run(["docker", "inspect", self.container(service)], 30))
        return found[0]

    def health(self, service: str) -> str:
        """Return what its health check says: "healthy", "starting", "unhealthy", or how the container stands."""
        state = self.inspect(service)["State"]
        return str(state["Health"]["Status"] if state["Running"] and "Health" in state else state["Status"])

    def fetch(self, service: str, port: int, path: str) -> Document:
        """Return what a container answers over HTTP, through the port that its file publishes on this machine."""
        host = self.compose("port", service, str(port)).strip()
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"http://{host}{path}", timeout=HTTP_S) as answer:
            found: Document = json.load(answer)
        return found

    # --------------------------------------------------------------------------------------------------------- faults

    def docker(self, *words: str) -> None:
        """Run one command of docker; StackError if it fails."""
        _run(["docker", *words], COMMAND_S)

    def cut(self, service: str) -> str:
        """Take a container off its network; return the address that it had."""
        networks = self.inspect(service)["NetworkSettings"]["Networks"]
        self.docker("network", "disconnect", f"{self.project}_default", self.container(service))
        return str(networks[f"{self.project}_default"]["IPAddress"])

    def join(self, service: str, address: str) -> None:
        """Bring a container back to its network, under the address and the device name that it had."""
        names = ("--alias", service, "--driver-opt", f"com.docker.network.endpoint.ifname={DEVICE}")
        network = f"{self.project}_default"
        self.docker("network", "connect", *names, "--ip", address, network, self.container(service))

    # ---------------------------------------------------------------------------------------------------------- end

    def keep_logs(self, folder: Path) -> Path:
        """Write what all containers said, how they stand, and all facts, into a folder; return it."""
        folder.mkdir(parents=True, exist_ok=True)
        watch = ("run", "--rm", "--no-TTY", "--no-deps", "kvbus", "watch", "--once", "--all", "--since", "3600")
        asked = {"logs.txt": ("logs", "--no-color", "--timestamps"), "ps.txt": ("ps", "--all"), "facts.txt": watch}
        for name, words in asked.items():
            try:
                (folder / name).write_text(self.compose(*words), encoding="utf-8")
            except StackError as error:
                (folder / name).write_text(f"{error}\n", encoding="utf-8")
        return folder


@contextmanager
def stack(name: str) -> Iterator[Stack]:
    """Bring a compose file up with empty volumes, and take it down with them, whatever happens in between."""
    one = Stack(name)
    one.compose("down", "--volumes", "--remove-orphans")
    try:
        one.compose("up", "--detach", "--no-build", wait_s=UP_S)
        yield one
    finally:
        one.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "10")


def build() -> float:
    """Build the image that all stories use; return how long it took."""
    began = time.monotonic()
    Stack("quickstart").compose("build", "--quiet", wait_s=BUILD_S)
    return time.monotonic() - began


def document(process: "subprocess.Popen[str]", wait_s: float) -> Document:
    """Await a command of kvbus and return its document; StackError with its own words where it gave none."""
    try:
        said, told = process.communicate(timeout=wait_s)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.communicate()
        raise StackError(f"no answer within {wait_s:g} s") from error
    try:
        answer: Document = json.loads(said)
    except ValueError as error:
        last = (told or said).strip().splitlines()[-3:]
        raise StackError(f"status {process.returncode}: {' | '.join(last)}", process.returncode) from error
    return answer


def _environment() -> dict[str, str]:
    """Compose's own settings; any free port, so that a quickstart may run beside the stories."""
    return {**os.environ, "KVBUS_HTTP_PORT": "0"}


def _run(line: Sequence[str], wait_s: float, *, given: str | None = None) -> str:
    try:
        ran = subprocess.run(
            line, check=False, capture_output=True, text=True, timeout=wait_s, input=given, env=_environment()
        )
    except subprocess.TimeoutExpired as error:
        raise StackError(f"{' '.join(line[:8])} … took longer than {wait_s:g} s") from error
    if ran.returncode:
        last = (ran.stderr or ran.stdout).strip().splitlines()[-3:]
        raise StackError(f"{' '.join(line[:10])} …: {' | '.join(last)}")
    return ran.stdout
