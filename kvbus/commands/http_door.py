"""The gateway of `kvbus up`: a process beside the workers, started and ended by the cluster."""

import asyncio
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbus.errors import ConfigError

READY_WAIT_S = 60.0
"""It imports within a second, and waits for nobody; the rest is for a host on which everything starts at once."""
STOP_WAIT_S = 10.0
"""Its own shutdown is bounded by 5 s for requests that run."""


class HttpDoor:
    """One `kvbus gateway` process; `spawn`, `until_ready` and `stop` once each, `stop` also after a failed start."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._arguments = arguments
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self.log = log
        self.url = ""

    async def spawn(self) -> None:
        """Start it; it need not be ready yet."""
        command = [sys.executable, "-m", "kvbus", "gateway", "--json", *self._arguments]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=dict(self._environment),
            )

    async def until_ready(self) -> None:
        """Wait until it listens; ConfigError with its own words where it does not come to that."""
        process = self._process
        if process is None or process.stdout is None:
            raise ConfigError("the gateway was not started")
        try:
            async with asyncio.timeout(READY_WAIT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        try:
            self.url = str(json.loads(line)["url"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"the gateway did not start: {self._last_words()}", log=str(self.log)) from error

    async def ended(self) -> int:
        """Wait until it has ended, and return its status."""
        return await self._process.wait() if self._process else 0

    async def stop(self) -> None:
        """End it; harmless to repeat."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_WAIT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def _last_words(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return "it left no log"
        told = [line for line in lines if line.startswith(("kvbus:", "Error:"))]
        return (told or lines or ["its log is empty"])[-1]
