"""The engines that this gateway can ask: those whose worker has its local socket on this host.

An engine computes one request at a time, in the order in which its worker sent them, and a transfer's prefill is one of
them. So only few answers are with a worker at any time, and the others wait here: a prefill has to wait for those few,
not for all that clients have asked.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvbus.config import socket_path
from kvbus.engines.calls import Generation
from kvbus.engines.link import EngineError
from kvbus.errors import PeerError
from kvbus.gateway.answers import Problem
from kvbus.gateway.directory import Directory
from kvbus.gateway.engine_client import EngineClient
from kvbus.parts import Prompt
from kvbus.processes import same_host
from kvbus.roles.registry import Registered

AT_ENGINE_MAX = 2
"""One that is computed, and one that follows without a pause."""
WAITING_MAX = 512
"""Answers that wait for one engine: more than it gives in the time that clients wait."""
WAIT_S = 600.0
"""How long the usual client waits for an answer; nobody listens after that."""


class Engines:
    """Asks engines by the name of their instance. `close` ends what runs."""

    def __init__(self, directory: Directory, run_dir: Path | None) -> None:
        self._directory = directory
        self._run_dir = run_dir
        self._lines: dict[str, Line] = {}

    def statistics(self) -> Mapping[str, "LineStatistics"]:
        """Return what waits and what runs, by instance that was asked and is known still."""
        return {name: line.statistics() for name, line in self._lines.items()}

    def unreachable(self, instance: str) -> str:
        """Return why this gateway cannot ask an instance's engine, and what to do; empty where it can."""
        members = self._directory.instances.get(instance, {})
        if not members:
            return f"no instance {instance!r} is registered: is its worker running?"
        record = next(iter(members.values())).record
        if len(members) > 1 or record.ranks > 1:
            return f"instance {instance!r} has several ranks, and no engine that answers for all of them"
        if self._socket(instance) is None:
            return (
                f"instance {instance!r} has no worker that this gateway can reach: ask a gateway that runs on its "
                "host as its user, started with the --run-dir of its worker"
            )
        return ""

    @asynccontextmanager
    async def answer(self, instance: str, prompt: Prompt, *, max_tokens: int, salt: str) -> AsyncIterator[Generation]:
        """Wait until it is this answer's turn and begin it; leaving cancels it. Problem 400, 429 or 503."""
        if instance not in self._lines:
            await self._drop_gone()
        line = self._lines.setdefault(instance, Line())
        await line.enter()
        try:
            client = await self._client(instance, line)
            generation = client.generate(prompt, max_tokens=max_tokens, salt=salt, on_over=line.leave)
        except PeerError as error:
            line.leave()
            raise Problem(400, str(error)) from error
        except EngineError as error:
            line.leave()
            raise Problem(503, str(error), retry_after_s=1) from error
        except BaseException:
            line.leave()
            raise
        with generation:
            yield generation

    async def close(self) -> None:
        """Close all connections."""
        for line in self._lines.values():
            if line.client is not None:
                await line.client.close()

    async def _drop_gone(self) -> None:
        """Drop the lines of instances that were not registered for an hour, where nobody stands in them."""
        for name, line in list(self._lines.items()):
            if line.is_idle and not self._directory.knows(name):
                del self._lines[name]
                if line.client is not None:
                    await line.client.close()

    async def _client(self, instance: str, line: "Line") -> EngineClient:
        async with line.connecting:
            if line.client is None or line.client.is_lost:
                await self._directory.refresh()  # a worker that was started anew is another process
                path = self._socket(instance)
                if path is None:
                    raise EngineError(self.unreachable(instance))
                line.client = await EngineClient.connect(path, self._pids(instance))
            return line.client

    def _socket(self, instance: str) -> Path | None:
        """Return the local socket of an instance's only worker, if it is here."""
        for one in self._here(instance):
            path = socket_path(self._run_dir or Path(), instance, one.member)
            if self._run_dir is not None and _is_socket(path):
                return path
        return None

    def _pids(self, instance: str) -> frozenset[int]:
        return frozenset(one.record.process.pid for one in self._here(instance))

    def _here(self, instance: str) -> list[Registered]:
        members = self._directory.instances.get(instance, {})
        return [one for one in members.values() if same_host(one.record.process)]


def _is_socket(path: Path) -> bool:
    try:
        return path.is_socket()
    except OSError:  # somebody else's folder
        return False


@dataclass(frozen=True, slots=True)
class LineStatistics:
    """Answers that wait for their turn and that are with the worker; those that left it, and those refused."""

    waiting: int = 0
    running: int = 0
    left: int = 0
    refused: int = 0


class Line:
    """Those who wait for one engine, first come, first served, and the connection to its worker."""

    def __init__(self) -> None:
        self.client: EngineClient | None = None
        self.connecting = asyncio.Lock()
        self._room = asyncio.Semaphore(AT_ENGINE_MAX)
        self._counts = Counter[str]()

    def statistics(self) -> LineStatistics:
        """Return the counters as they stand."""
        return LineStatistics(**self._counts)

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits, and nothing is with the worker."""
        return not self._counts["waiting"] and not self._counts["running"]

    async def enter(self) -> None:
        """Wait for one's turn; Problem 429 where too many do, 503 where it does not come."""
        if self._counts["waiting"] >= WAITING_MAX:
            self._counts["refused"] += 1
            raise Problem(429, f"{WAITING_MAX} answers wait for this engine already", retry_after_s=1)
        self._counts["waiting"] += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._room.acquire()
        except TimeoutError as error:
            self._counts["refused"] += 1
            raise Problem(503, f"the engine was busy for {WAIT_S:g} s", retry_after_s=1) from error
        finally:
            self._counts["waiting"] -= 1
        self._counts["running"] += 1

    def leave(self) -> None:
        """Make room for the next: the engine has ended this one."""
        self._counts["running"] -= 1
        self._counts["left"] += 1
        self._room.release()
