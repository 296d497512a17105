"""One compose file brought up under a project name of its own: commands in containers, faults, logs, and the way down.

Nothing of kvbus is imported by the containers but what their image holds: what is asked, a command of kvbus answers.
"""

import json
import os
import platform
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any
from zlib import crc32

ROOT = Path(__file__).resolve().parents[2]
INSIDE = Path(__file__).with_name("inside.py")
OVERLAYS = Path(__file__).with_name("overlays")
MODELS = ROOT / "test-results" / "models"
"""Where the story with a real model finds a tiny one."""
FAKETIME = f"/usr/lib/{platform.machine()}-linux-gnu/faketime/libfaketime.so.1"
"""Debian's and Ubuntu's libfaketime, lent to one container."""
HOME = "/home/kvbus"
"""Where the image's user may write."""
UP_S = 180.0
"""Every container of a story, on a machine with two busy cores; without load it takes about ten seconds."""
BUILD_S = 900.0
"""Downloads some 100 MB where nothing is cached."""
DEVICE = "eth0"
"""What the workers of partition.yaml were told to use; a container that is joined again would get another name."""
NETWORKS = "198.18"
"""Addresses that are reserved for tests of networks, and that Docker gives to no network of its own accord: so files
with fixed addresses may run beside others."""
TOOLS = "tools"
"""The container of each story in which commands of kvbus run: to make one for each takes longer than most of them."""
QUICKSTART, TRANSFORMERS = "quickstart", "transformers"
"""Files that build the image of all stories but one, and of that one."""
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
    """A compose file that runs, perhaps with an overlay of ours; made by `stack()`, which also takes it down."""

    def __init__(self, name: str, overlay: str = "", part: str = "") -> None:
        self.files = [ROOT / "compose" / f"{name}.yaml"]
        if overlay:
            self.files.append(OVERLAYS / f"{overlay}.yaml")
        self.project = "-".join(("kvbus-test", name, *filter(None, (overlay, part))))
        self.network = f"{self.project}_default"
        self.subnet = f"{NETWORKS}.{crc32(self.project.encode()) % 256}"  # the same in each run, as the project is

    def command(self, *words: str) -> list[str]:
        """Return the command line for one word of compose."""
        files = [part for file in self.files for part in ("-f", str(file))]
        return ["docker", "compose", "--progress", "quiet", "-p", self.project, *files, *words]

    def compose(self, *words: str, wait_s: float = COMMAND_S) -> str:
        """Run one word of compose and return what it says; StackError if it fails."""
        return run(self.command(*words), wait_s, subnet=self.subnet)

    def config(self, *profiles: str) -> Document:
        """Return the file as compose resolves it, with these profiles; StackError where it takes offence at it."""
        asked = [part for profile in profiles for part in ("--profile", profile)]
        found: Document = json.loads(self.compose(*asked, "config", "--format", "json"))
        return found

    def container(self, service: str) -> str:
        """Return the container's name."""
        return f"{self.project}-{service}-1"

    # ------------------------------------------------------------------------------------------------------ questions

    def start_tools(self) -> None:
        """Start the container in which commands run: the file's own service for them, which waits."""
        name = self.container(TOOLS)
        self.compose("run", "--detach", "--no-deps", "--name", name, "--entrypoint", "sleep", "kvbus", "infinity")

    def kvbus(self, *words: str) -> Document:
        """Run a command of kvbus; return its document. Its status does not matter here."""
        return document(self.start_kvbus(*words), COMMAND_S)

    def kvbus_apart(self, *words: str) -> Document:
        """Run a command of kvbus as the headers tell people to: in a container of its own; return its document."""
        line = self.command("run", "--rm", "--no-TTY", "--no-deps", "kvbus", *words, "--json")
        return document(_started(line, self.subnet), COMMAND_S)

    def start_kvbus(self, *words: str) -> "subprocess.Popen[str]":
        """Start a command of kvbus, and return at once; `document` awaits its answer."""
        return _started(["docker", "exec", self.container(TOOLS), "kvbus", *words, "--json"], self.subnet)

    def tool(self, *words: str) -> str:
        """Run a program where the commands run; return what it says."""
        return run(["docker", "exec", self.container(TOOLS), *words], COMMAND_S)

    def start_apart(self, service: str, *words: str) -> None:
        """Start a command of kvbus in a container with a service's name, which outlives the caller; `said` reads it."""
        name = self.container(service)
        self.compose("run", "--detach", "--no-deps", "--name", name, "kvbus", *words, "--json")

    def said(self, service: str, wait_s: float = COMMAND_S) -> str:
        """Await a container's end and return what it said on stdout; it is removed with the others."""
        run(["docker", "wait", self.container(service)], wait_s)
        return run(["docker", "logs", self.container(service)], COMMAND_S)

    def ask(self, service: str, *words: str) -> Document:
        """Ask a worker on its local socket; StackError where it does not answer."""
        line = ["docker", "exec", "--interactive", self.container(service), "python", "-", *words]
        answer: Document = json.loads(run(line, COMMAND_S, given=INSIDE.read_text(encoding="utf-8")))
        return answer

    def inspect(self, service: str) -> Mapping[str, Any]:
        """Return what the engine knows of a container."""
        found: list[Mapping[str, Any]] = json.loads(run(["docker", "inspect", self.container(service)], 30))
        return found[0]

    def health(self, service: str) -> str:
        """Return what its health check says: "healthy", "starting", "unhealthy", or how the container stands."""
        state = self.inspect(service)["State"]
        return str(state["Health"]["Status"] if state["Running"] and "Health" in state else state["Status"])

    def is_well(self, service: str) -> bool:
        """Whether a container that runs passes its own health check, run now: the engine runs it every few seconds."""
        found = self.inspect(service)
        if not found["State"]["Running"] or found["State"]["Paused"]:
            return False
        try:
            run(["docker", "exec", self.container(service), *found["Config"]["Healthcheck"]["Test"][1:]], COMMAND_S)
        except StackError:
            return False
        return True

    def fetch(self, service: str, port: int, path: str) -> Document:
        """Return what a container answers over HTTP, through the port that its file publishes on this machine."""
        host = self.compose("port", service, str(port)).strip()
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"http://{host}{path}", timeout=HTTP_S) as answer:
            found: Document = json.load(answer)
        return found

    def page(self, service: str, port: int, path: str) -> bool:
        """Whether a container serves a page of HTML there."""
        host = self.compose("port", service, str(port)).strip()
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(f"http://{host}{path}", timeout=HTTP_S) as answer:
                return b"<html" in answer.read()
        except OSError:
            return False

    # --------------------------------------------------------------------------------------------------------- faults

    def docker(self, *words: str) -> None:
        """Run one command of docker; StackError if it fails."""
        run(["docker", *words], COMMAND_S)

    def fault(self, verb: str, service: str) -> None:
        """Let docker do something to one container: `pause`, `unpause`, `stop`, `start`, `kill`, `restart`."""
        self.docker(verb, self.container(service))

    def kill(self, service: str) -> None:
        """End a container's processes at once."""
        self.docker("kill", "--signal", "KILL", self.container(service))

    def host(self, number: int) -> str:
        """Return an address in the network of a file that fixes them."""
        return f"{self.subnet}.{number}"

    def address(self, service: str) -> str:
        """Return a container's address in the network of its file."""
        return str(self.inspect(service)["NetworkSettings"]["Networks"][self.network]["IPAddress"])

    def recreate(self, service: str, overlay: str = "") -> None:
        """Replace a container by a new one, by its file or with an overlay beside it."""
        files = ("-f", str(OVERLAYS / f"{overlay}.yaml")) if overlay else ()
        words = ("up", "--detach", "--no-build", "--no-deps", "--force-recreate", service)
        run([*self.command(), *files, *words], UP_S, subnet=self.subnet)

    def cut(self, service: str) -> str:
        """Take a container off its network; return the address that it had."""
        address = self.address(service)
        self.docker("network", "disconnect", self.network, self.container(service))
        return address

    def join(self, service: str, address: str) -> None:
        """Bring a container back to its network, under the address and the device name that it had."""
        names = ("--alias", service, "--driver-opt", f"com.docker.network.endpoint.ifname={DEVICE}")
        fixed = ("--ip", address) if address else ()
        self.docker("network", "connect", *names, *fixed, self.network, self.container(service))

    def filter(self, service: str, *rule: str) -> None:
        """Change the packet filter of one container: this host's own iptables, in the network of that container."""
        beside = ("--network", f"container:{self.container(service)}", "--cap-add", "NET_ADMIN", "--user", "root")
        chroot = (
            "--volume",
            "/:/host",
            "--entrypoint",
            "/usr/sbin/chroot",
            "kvbus",
            "/host",
            "/usr/sbin/iptables",
            "--wait",
        )
        self.docker("run", "--rm", *beside, *chroot, *rule)

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
        self._keep_dump(folder)
        return folder

    def _keep_dump(self, folder: Path) -> None:
        """Write the archive that a user would attach to a report."""
        name = self.container("dump")
        try:
            self.compose("run", "--no-deps", "--name", name, "kvbus", "dump", "-o", f"{HOME}/dump.tar.gz")
            self.docker("cp", f"{name}:{HOME}/dump.tar.gz", str(folder))
        except StackError as error:
            (folder / "dump.txt").write_text(f"{error}\n", encoding="utf-8")


@contextmanager
def stack(name: str, overlay: str = "", part: str = "", *, without: Sequence[str] = ()) -> Iterator[Stack]:
    """Bring a compose file up with empty volumes, and take it down with them, whatever happens in between."""
    one = Stack(name, overlay, part)
    one.compose("--profile", "*", "down", "--volumes", "--remove-orphans")
    left_out = [part for service in without for part in ("--scale", f"{service}=0")]
    try:
        one.compose("up", "--detach", "--no-build", *left_out, wait_s=UP_S)
        one.start_tools()
        yield one
    finally:
        one.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "10")


def build(name: str) -> float:
    """Build the image of a file; return how long that took."""
    began = time.monotonic()
    Stack(name).compose("build", "--quiet", wait_s=BUILD_S)
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


def environment(subnet: str = "") -> dict[str, str]:
    """Compose's own settings; any free port, and a network of their own, so that stories may run beside each other."""
    ports = dict.fromkeys(("KVBUS_HTTP_PORT", "KVBUS_PROMETHEUS_PORT"), "0")
    paths = {"KVBUS_MODELS": str(MODELS), "KVBUS_FAKETIME": FAKETIME}
    return {**os.environ, **ports, **paths, **({"KVBUS_SUBNET": subnet} if subnet else {})}


def run(line: Sequence[str], wait_s: float, *, given: str | None = None, subnet: str = "") -> str:
    """Run a command line and return its stdout; StackError with its last words where it fails."""
    try:
        ran = subprocess.run(
            line, check=False, capture_output=True, text=True, timeout=wait_s, input=given, env=environment(subnet)
        )
    except subprocess.TimeoutExpired as error:
        raise StackError(f"{' '.join(line[:8])} … took longer than {wait_s:g} s") from error
    if ran.returncode:
        last = (ran.stderr or ran.stdout).strip().splitlines()[-3:]
        raise StackError(f"{' '.join(line[:10])} …: {' | '.join(last)}")
    return ran.stdout


def _started(line: Sequence[str], subnet: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(subnet))
