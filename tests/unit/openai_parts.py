"""A gateway whose instance b has a real toy engine behind a real worker's port; what the bus has of b is played."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvbus.engines.base import End
from kvbus.engines.client import LocalClient, TimedAnswer
from kvbus.gateway.engines import LineStatistics
from tests.unit.engine_parts import TOY, Worker, worker_with
from tests.unit.gateway_parts import Stage, stage
from tests.waiting import until

QUICK: dict[str, object] = {**TOY, "work_rounds": 1}
LAST = "[" + "DO" + "NE" + "]"
"""What ends a stream of the API."""


@dataclass(slots=True)
class Room:
    """The gateway, and b's worker."""

    stage: Stage
    worker: Worker

    @property
    def client(self) -> httpx.AsyncClient:
        """A client of the gateway."""
        return self.stage.client

    def line(self, instance: str = "b") -> LineStatistics:
        """What waits for an engine and what is with it."""
        return self.stage.parts.engines.statistics().get(instance, LineStatistics())

    async def complete(self, **body: object) -> dict[str, Any]:
        """A completion as one document."""
        return await self.told("/v1/completions", **body)

    async def told(self, path: str, **body: object) -> dict[str, Any]:
        """An answer as one document."""
        answered = await self.client.post(path, json={"model": "b", **body})
        assert answered.status_code == 200, answered.text
        return dict(answered.json())

    async def streamed(self, path: str, **body: object) -> list[dict[str, Any]]:
        """An answer as the chunks of a stream that ended as it should."""
        answered = await self.client.post(path, json={"model": "b", "stream": True, **body})
        assert answered.status_code == 200, answered.text
        assert answered.headers["content-type"].startswith("text/event-stream")
        events = answered.text.split("\n\n")
        assert events[-2:] == [f"data: {LAST}", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    async def alone(
        self, *, max_tokens: int, text: str | None = None, messages: Sequence[dict[str, str]] | None = None
    ) -> End:
        """What the engine says to a client of its worker, computing all of it."""

        def ask(client: LocalClient) -> TimedAnswer:
            return client.generate(text=text, messages=messages, max_tokens=max_tokens, store=False, reuse=False)

        return (await self.worker.ask(ask)).end

    async def at_rest(self) -> None:
        """Wait until nothing waits, runs or is held."""

        def idle() -> bool:
            held = self.worker.desk.stats()
            return not any((self.line().waiting, self.line().running, *held.values()))

        await until(idle, what="nothing waits, runs or is held")
        self.worker.desk.check_nothing_held()


def run_dir_of(worker: Worker, folder: Path, *names: str) -> Path:
    """A folder in which this worker's socket goes by the names of these instances' workers."""
    run_dir = folder / "run"
    run_dir.mkdir()
    for name in names:
        (run_dir / f"{name}.m0.sock").symlink_to(worker.path)
    return run_dir


@asynccontextmanager
async def room(folder: Path, options: dict[str, object] = QUICK) -> AsyncIterator[Room]:
    """The gateway over a and b, where b can be asked here."""
    async with worker_with(folder) as worker:
        await worker.start_engine(options=options)
        run_dir = run_dir_of(worker, folder, "b")
        async with stage(run_dir=run_dir) as running:
            yield Room(running, worker)
