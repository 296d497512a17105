"""What kvbus costs an engine that it does nothing for: step times of the toy engine, side by side in one run.

Four ways to answer the same prompt take turns, so that a noisy neighbour disturbs all: the bare engine, a session
without a worker (`NoWorker`), a session with an attached worker that has nothing to do, and one that asks it at each
prompt and stores what it computed. The worker is a process of its own with a real socket, desk, ledger and pool; the
engine has the threads that it has in `kvbus.engines.process`. The bare engine and `NoWorker` run in a process without
either. A step is one token after the first; the first comes after the prompt. Prints medians, and the median of the
ratios within each turn; `--json` prints one document.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

from kvbus.engines.alone import session_alone
from kvbus.engines.base import EngineSession, Request, TextStream, Token
from kvbus.engines.desk import Hello
from kvbus.engines.port import EnginePort
from kvbus.engines.process import EngineServer, attach, connect
from kvbus.engines.toy import ToyEngine
from kvbus.engines.worker_link import WorkerLink
from kvbus.ledger.agreement import Agreement, Decision
from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import LeaseFacts
from kvbus.ledger.holder import LeaseHolder
from kvbus.ledger.types import Direction
from kvbus.pool.layout import PageLayout
from kvbus.roles.desk import PoolDesk
from kvbus.roles.local import LocalBackend
from kvbus.roles.poolside import PoolSide
from kvbus.roles.rounds import Rounds

TURNS = 40
PROMPT_TOKENS, ANSWER_TOKENS = 64, 100
TICK_S = 1.0  # as a worker's
EPOCH = 1 << 32 | 1

Answer = Callable[[tuple[int, ...], Callable[[], None]], None]
"""Answers a prompt and calls back at each token."""


class Unrecorded:
    """Takes what a round would record: nobody reads it here."""

    def facts(self, facts: LeaseFacts) -> None:
        """Take one batch."""

    def decision(self, decision: Decision) -> None:
        """Take one decision."""


class Worker:
    """A worker's side of its engine: port, desk, rounds, ledger and pool, without a bus or a data plane."""

    def __init__(self, path: Path) -> None:
        self.reads, self.writes = LocalBackend(name="engine-read"), LocalBackend(name="engine-write")
        self.rounds: Rounds | None = None
        self.desk = PoolDesk(
            attach=self.attach,
            rounds=self.rounds_of_pool,
            reads=self.reads,
            writes=self.writes,
            clock=time.monotonic,
            counters=dict,
        )
        self.port = EnginePort(path, self.desk, lambda _: None, lambda _: None)

    def attach(self, layout: PageLayout, hello: Hello) -> PoolSide:
        """Make the pool, and the ledger over it."""
        pool = PoolSide.create(layout, pages=512, tokens_max=2048, vocab_size=hello.vocab_size, epoch=EPOCH)
        bindings = [
            Binding("engine-read", self.reads, Direction.READ),
            Binding("engine-write", self.writes, Direction.WRITE),
        ]
        holder = LeaseHolder(bindings=bindings, lenders=[pool.lender])
        agreement = Agreement(term=EPOCH)
        self.rounds = Rounds(holder=holder, agreement=agreement, sink=Unrecorded(), member="m0", epoch=EPOCH)
        return pool

    def rounds_of_pool(self) -> Rounds:
        """Return the rounds; there are some once an engine has attached."""
        if self.rounds is None:
            raise RuntimeError("no engine has attached")
        return self.rounds

    async def serve(self) -> None:
        """Run a round each tick, as a worker with nothing to do, until this process is ended."""
        await self.port.start()
        while True:
            await asyncio.sleep(TICK_S)
            if self.rounds is not None:
                self.rounds.run()


def serve_worker(path: Path) -> None:
    asyncio.run(Worker(path).serve())


def bare(engine: ToyEngine) -> Answer:
    """Return how the engine answers by itself, with its tokens turned into text as every server of text does."""

    def answer(ids: tuple[int, ...], on_token: Callable[[], None]) -> None:
        run, texts = engine.resume(ids, (), lambda: False), TextStream(engine.decode)
        for _ in range(ANSWER_TOKENS):
            texts.push(run.next_token() or 0)
            on_token()

    return answer


def through(session: EngineSession, *, kept: bool) -> Answer:
    """Return how a session answers, with what is computed kept or not."""

    def answer(ids: tuple[int, ...], on_token: Callable[[], None]) -> None:
        def emit(token: Token) -> None:
            del token
            on_token()

        session.generate(Request(ids, ANSWER_TOKENS, kept, kept, ""), emit, lambda: False)

    return answer


def attached_session(engine: ToyEngine, path: Path) -> EngineSession:
    """Attach to the worker as an engine process does, with its two threads."""
    about = engine.describe()
    blocking = connect(path)
    pool = attach(blocking, about)
    worker = WorkerLink(blocking)
    session = EngineSession(engine, about, worker, pool)
    server = EngineServer(session, worker)
    threading.Thread(target=worker.read, daemon=True).start()
    threading.Thread(target=server.serve, args=(worker.tokenizations,), daemon=True).start()
    return session


def serve_engine(turns: Connection, path: Path | None) -> None:
    """Answer prompts in the ways that this process has, and send back when each token came, in nanoseconds."""
    engine = ToyEngine.load({})
    ways: dict[str, Answer] = {}
    if path is None:
        ways = {"bare": bare(engine), "no_worker": through(session_alone(engine), kept=True)}
    else:
        session = attached_session(engine, path)
        ways = {"attached_idle": through(session, kept=False), "attached_storing": through(session, kept=True)}
    while (asked := turns.recv()) is not None:
        way, ids = asked
        turns.send(token_times(ways[way], ids))


def token_times(answer: Answer, ids: tuple[int, ...]) -> list[int]:
    """Return the clock before a request and at each token, in nanoseconds."""
    times = [time.perf_counter_ns()]
    answer(ids, lambda: times.append(time.perf_counter_ns()))
    return times


def measure(turns: int) -> dict[str, float]:
    """Let the four ways take turns, each turn with a prompt of its own."""
    context = multiprocessing.get_context("spawn")
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run" / "engine.sock"
        ends = {"alone": context.Pipe(), "attached": context.Pipe()}
        processes = [
            context.Process(target=serve_worker, args=(path,), daemon=True),
            context.Process(target=serve_engine, args=(ends["alone"][1], None), daemon=True),
            context.Process(target=serve_engine, args=(ends["attached"][1], path), daemon=True),
        ]
        for process in processes:
            process.start()
        alone, attached = ends["alone"][0], ends["attached"][0]
        ways = {"bare": alone, "no_worker": alone, "attached_idle": attached, "attached_storing": attached}
        taken: dict[str, list[list[int]]] = {way: [] for way in ways}
        for turn in range(turns + 1):
            order = list(ways.items())
            for way, engine in order[::-1] if turn % 2 else order:
                prompt = f"{turn:08d} {way}".ljust(PROMPT_TOKENS)[:PROMPT_TOKENS]
                engine.send((way, tuple(prompt.encode())))
                taken[way].append(engine.recv())
        for process in reversed(processes):
            process.terminate()
            process.join()
    return summary({way: times[1:] for way, times in taken.items()})  # the first turn loads and warms


def summary(taken: dict[str, list[list[int]]]) -> dict[str, float]:
    """Return the medians, and the median ratio to the bare engine and to `NoWorker` within each turn."""
    steps = {
        way: [statistics.median(after - before for before, after in pairwise(times[1:])) for times in turns]
        for way, turns in taken.items()
    }
    firsts = {way: [times[1] - times[0] for times in turns] for way, turns in taken.items()}
    result = {f"step_{way}_us": statistics.median(of) / 1e3 for way, of in steps.items()}
    result |= {f"first_{way}_us": statistics.median(of) / 1e3 for way, of in firsts.items()}
    for way, base in (("no_worker", "bare"), ("attached_idle", "no_worker"), ("attached_storing", "no_worker")):
        for name, of in (("step", steps), ("first", firsts)):
            ratios = [one / other for one, other in zip(of[way], of[base], strict=True)]
            result[f"{name}_ratio_{way}_to_{base}"] = statistics.median(ratios)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--turns", type=int, default=TURNS)
    given = parser.parse_args()
    result = measure(given.turns)
    if given.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    for name, value in result.items():
        print(f"{name:44} {value:10.4f}")


if __name__ == "__main__":
    main()
