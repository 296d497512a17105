"""How the vLLM connector lives with its worker: real workers, and a process that attaches as vLLM's would."""

import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.engines.client import LocalClient
from kvbus.engines.link import EngineRefusedError
from tests.flow.town import Town, WorkerProcess, town
from tests.flow.vllm_servers import ROOT, attached, registered
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

ARGUMENTS = ["--engine", "vllm", "--pages", "192", "--backend", "memory"]


class StandIn:
    """The process, spoken to by lines."""

    def __init__(self, socket: Path, block_tokens: int, log: Path, *, is_served: bool) -> None:
        self.log = log
        self.output = log.open("wb")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.flow.vllm_stand_in", str(socket), str(block_tokens)),
                *(["served"] if is_served else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.output,
            cwd=ROOT,
        )

    def ask(self, what: str, ids: Sequence[int]) -> object:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([what, list(ids)]).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.said()
        return json.loads(line)

    def said(self) -> str:
        return self.log.read_text()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.output.close()


@pytest_asyncio.fixture(loop_scope="module")
async def place() -> AsyncIterator[tuple[Town, WorkerProcess]]:
    with tempfile.TemporaryDirectory(prefix="kvatt-") as name:
        async with town(Path(name)) as running:
            worker = running.workers["a"] = running._spawn("a", ["--instance", "a", *ARGUMENTS])
            await until(worker.socket.exists, 100)
            yield running, worker


@contextmanager
def stand_in(worker: WorkerProcess, block_tokens: int = 32, *, is_served: bool = False) -> Iterator[StandIn]:
    log = worker.log.with_suffix(f".{block_tokens}.engine")
    one = StandIn(worker.socket, block_tokens, log, is_served=is_served)
    try:
        yield one
    finally:
        one.end()


async def stored(engine: StandIn, ids: list[int], blocks: int) -> None:
    """Have a prompt stored; what is asked before the engine is attached is stored nowhere."""
    await until(lambda: engine.ask("store", ids) == "stored" and engine.ask("look", ids) == blocks)


def prompt(name: str, blocks: int) -> list[int]:
    pick = random.Random(name)
    return [pick.randrange(512) for _ in range(32 * blocks)]


async def test_what_was_stored_is_found_and_loaded_and_the_worker_is_at_rest(place: tuple[Town, WorkerProcess]) -> None:
    running, worker = place
    ids = prompt("stored", 6)
    with stand_in(worker) as engine:
        await attached(worker)
        await until(lambda: engine.ask("look", ids) == 0)
        await stored(engine, ids, 6)
        assert engine.ask("load", ids) == [[], [ids[32 * row] % 251 for row in range(6)]]
        await running.at_rest("a")


async def test_class_15_and_39_an_engine_with_another_block_size_is_refused_in_words_and_goes_on_alone(
    place: tuple[Town, WorkerProcess],
) -> None:
    _, worker = place
    ids = prompt("refused", 2)
    with stand_in(worker) as engine:
        await attached(worker)
        engine.ask("store", ids)
    with stand_in(worker, block_tokens=16) as other:
        await until(lambda: "without a kvbus worker for now" in other.said())
        assert "this worker's pool has layout" in other.said()
        assert "the engine's is" in other.said()
        assert other.ask("load", ids) == [[0, 1, 2, 3], [0, 0, 0, 0]]
        assert other.process.poll() is None
    assert worker.alive


async def test_class_9_and_23_a_worker_that_is_killed_costs_nothing_and_the_next_one_is_attached_to(
    place: tuple[Town, WorkerProcess],
) -> None:
    running, worker = place
    ids = prompt("killed", 5)
    with stand_in(worker) as engine:
        await attached(worker)
        await stored(engine, ids, 5)
        worker.kill()
        assert engine.ask("load", ids) == [[0, 1, 2, 3, 4], [0] * 5]
        assert engine.ask("store", ids) == "stored"
        await until(lambda: engine.ask("look", ids) == "nobody")

        fresh = running.workers["a"] = running._spawn("a", worker.arguments)
        await attached(fresh)
        await until(lambda: engine.ask("look", ids) == 0)
        assert engine.ask("load", ids) == [[0, 1, 2, 3, 4], [0] * 5]
        await stored(engine, ids, 5)
        await running.at_rest("a")


async def test_a_worker_that_stood_still_for_longer_than_a_call_waits_takes_the_same_engine_again(
    place: tuple[Town, WorkerProcess],
) -> None:
    # P8, R4
    running, worker = place
    ids, later = prompt("silent", 5), prompt("behind the silence", 4)
    with stand_in(worker) as engine:
        await attached(worker)
        await stored(engine, ids, 5)
        await registered(running, "a")  # a worker that is stopped while it starts may end by its broker's silence
        worker.process.send_signal(signal.SIGSTOP)
        try:
            told = await asyncio.to_thread(engine.ask, "load", ids)
        finally:
            worker.process.send_signal(signal.SIGCONT)
        assert told == [[0, 1, 2, 3, 4], [0] * 5], "what does not answer has nothing"
        await stored(engine, later, 4)
        assert engine.process.poll() is None
        assert engine.ask("load", ids) == [[], [ids[32 * row] % 251 for row in range(5)]]
        await running.at_rest("a")


async def test_without_a_server_of_its_own_the_engine_says_what_to_set(place: tuple[Town, WorkerProcess]) -> None:
    _, worker = place
    with stand_in(worker):
        await attached(worker)

        def tokenize() -> None:
            with LocalClient(worker.socket) as client:
                client.tokenize(text="hello")

        with pytest.raises(EngineRefusedError, match="set server in kv_connector_extra_config"):
            await asyncio.to_thread(tokenize)


async def test_an_engine_that_is_killed_gives_all_back(place: tuple[Town, WorkerProcess]) -> None:
    running, worker = place
    with stand_in(worker) as engine:
        await attached(worker)
        await stored(engine, prompt("killed engine", 4), 4)
    await running.at_rest("a")
    with stand_in(worker) as engine:
        whole = [[], [prompt("killed engine", 4)[32 * row] % 251 for row in range(4)]]
        await until(lambda: engine.ask("load", prompt("killed engine", 4)) == whole)


async def test_what_nobody_has_is_computed_by_the_sources_own_server_and_staged(
    place: tuple[Town, WorkerProcess],
) -> None:
    running, source = place
    arguments = ["--instance", "b", "--allow", "a", *ARGUMENTS]
    worker = running.workers["b"] = running._spawn("b", arguments)
    await until(worker.socket.exists, 100)
    ids = prompt("computed", 4)
    with stand_in(source, is_served=True) as computes, stand_in(worker, is_served=True) as engine:
        await attached(source)
        await attached(worker)
        await registered(running, "a", "b")
        outcome = await running.stage(ids)
        assert (outcome.outcome, outcome.pages_moved) == ("settled", 4), outcome.reason
        assert computes.ask("look", ids) == 4
        assert engine.ask("load", ids) == [[], [ids[32 * row] % 251 for row in range(4)]]

        again = await running.stage("a text whose bytes are its token ids, long enough for a block or two of them")
        assert (again.outcome, again.pages_moved) == ("settled", 2), again.reason
        await running.at_rest("a", "b")

        told = await running.answer("b", prompt("answered", 3), store=True, max_tokens=5)
        assert told.end.tokens == tuple(prompt("answered", 3)[:5])
        assert (told.end.reason, told.end.stored_blocks) == ("length", 3)
        await running.at_rest("a", "b")
