"""What the connector costs a vLLM that has no use for it: decode steps and first tokens, with it and without it.

Three vLLM engines, each in one process of .venv-vllm: one has the connector, attached to a real kvbus worker that holds
nothing, and stores only what is asked for; the other two have none, and what they differ by is what this machine cannot
tell. They take turns step by step, the order changing, so that a noisy neighbour disturbs all: one decode step of each
on the same prompt, and for the first token one prompt of 300 fresh tokens of each, for which the connector asks its
worker. No two processes are equally fast (where their memory lies is luck), so the engines are started anew for each
of several rounds. Prints medians, and the median of what each step with the connector took beside the mean of the two
steps without it, in percent, with the middle half and with the same for the two without. `--json` prints one document.
`--model` names a folder; the default is a tiny one made here, whose steps take milliseconds, so that a fixed cost shows
best.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
ROLES = ("with", "without", "also without")
ROUNDS, TURNS, STEPS, PROMPTS = 4, 5, 40, 3
PROMPT_TOKENS = 300
Foreign = Any
# vLLM's own types are not there to check.


# The engine, in vLLM's own virtual environment -----------------------------------------------------------------------


def serve(model: str, socket: str) -> None:
    """Answer lines on stdin: an empty one asks for one step, one of token ids begins a prompt with a first step."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - installed in the engine's process only

    told: dict[str, object] = {}
    if socket:
        told["kv_transfer_config"] = {
            "kv_connector": "KvbusConnector",
            "kv_connector_module_path": "kvbus.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": socket, "store": "asked"},
        }
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        **told,
    )
    engine = llm.llm_engine
    print("READY", flush=True)
    for line in sys.stdin:
        if line.strip():
            ids, tokens = json.loads(line)
            parameters = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
            engine.add_request(str(random.random()), {"prompt_token_ids": ids}, parameters)
        print(f"STEP {step(engine)!r}", flush=True)
    os._exit(0)


def step(engine: Foreign) -> float:
    """Go on until something was computed, and return the seconds that it took."""
    scheduler = engine.engine_core.engine_core.scheduler
    started = time.perf_counter()
    while not engine.step():
        if not scheduler.running and scheduler.has_requests():
            # As vLLM's server does where nothing could run: other threads get their turn.
            time.sleep(0.001)  # noqa: TID251
    return time.perf_counter() - started


# The bench -----------------------------------------------------------------------------------------------------------


class Child:
    """One engine process."""

    def __init__(self, model: Path, socket: str, log: Path) -> None:
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": str(ROOT),
        }
        self.log = log
        self.process = subprocess.Popen(
            [str(PYTHON), __file__, "--serve", str(model), "--socket", socket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("wb"),
            text=True,
            env=environment,
        )

    def line(self, word: str) -> str:
        """Return the rest of the next line that begins with a word; vLLM writes others between."""
        for line in self.process.stdout or ():
            if line.startswith(word):
                return line.removeprefix(word)
        raise SystemExit(f"an engine ended: {self.log.read_text()[-2000:]}")

    def step(self, line: str = "") -> float:
        """Have it take one step, with a prompt to begin or without; the seconds."""
        if self.process.stdin is not None:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        return float(self.line("STEP "))

    def end(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


@dataclass(slots=True)
class Found:
    """Seconds of each step and of each first token: a row for each, in the order of the roles."""

    steps: list[list[float]] = field(default_factory=list)
    firsts: list[list[float]] = field(default_factory=list)


async def measure(model: Path | None, rounds: int, turns: int) -> Found:
    """Run broker and worker, and in each round all engines."""
    from kvbus.broker import EmbeddedBroker  # noqa: PLC0415 - none of these in the engine's process
    from kvbus.bus import NatsBus  # noqa: PLC0415
    from kvbus.bus_assets import EMBEDDED  # noqa: PLC0415
    from kvbus.topics import Topics  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="kvidle-") as name:
        folder = Path(name)
        if model is None:
            sys.path.insert(0, str(ROOT))
            from tests.tiny_llama import make_tiny_llama  # noqa: PLC0415 - found by the line above

            model = make_tiny_llama(folder / "tiny")
        broker = EmbeddedBroker(folder / "broker")
        await broker.start()
        bus = await NatsBus.connect(broker.url, name="idle", token=broker.token, topics=Topics(), limits=EMBEDDED)
        await bus.ensure_assets()
        await bus.close()
        command = [sys.executable, "-m", "kvbus", "worker", "--instance", "idle", "--engine", "vllm"]
        command += ["--run-dir", str(folder / "run"), "--pages", "128"]
        named = {"KVBUS_NATS_URL": broker.url, "KVBUS_NATS_TOKEN": broker.token}
        with (folder / "worker.log").open("wb") as log:
            worker = await asyncio.create_subprocess_exec(*command, stderr=log, env=os.environ | named)
        children: list[Child] = []
        try:
            found = Found()
            for number in range(rounds):
                for role in ROLES:
                    socket = str(folder / "run" / "idle.m0.sock") if role == "with" else ""
                    children.append(Child(model, socket, folder / f"{role}-{number}.log"))
                await asyncio.to_thread(take_turns, children, turns, found)
                while children:
                    children.pop().end()
            return found
        finally:
            for child in children:
                child.end()
            with contextlib.suppress(ProcessLookupError):
                worker.terminate()
            await worker.wait()
            await broker.stop()


def take_turns(children: list[Child], turns: int, found: Found) -> None:
    """Let all take turns step by step, each of them first as often as the others; the first turn only warms up."""
    pick = random.Random(7)
    for child in children:
        child.line("READY")
    for turn in range(-1, turns):
        prompt = json.dumps([[pick.randrange(3, 512) for _ in range(8)], STEPS])
        steps = [each_once(children, prompt if number == 0 else "", number) for number in range(STEPS)][1:]
        firsts = [
            each_once(children, json.dumps([[pick.randrange(3, 512) for _ in range(PROMPT_TOKENS)], 1]), number)
            for number in range(PROMPTS)
        ]
        if turn >= 0:
            found.steps += steps
            found.firsts += firsts
    if "attached to the kvbus worker" not in children[0].log.read_text():
        raise SystemExit("the connector was not attached, so nothing was measured")


def each_once(children: list[Child], line: str, number: int) -> list[float]:
    """Have each take one step, one after the other; the seconds, in the order of the roles."""
    took = [0.0] * len(children)
    for place in range(len(children)):
        at = (number + place) % len(children)
        took[at] = children[at].step(line)
    return took


def summary(found: Found) -> dict[str, object]:
    """Return medians in milliseconds, and what the connector adds in percent."""
    document: dict[str, object] = {}
    for what, rows in (("step", found.steps), ("first token", found.firsts)):
        for role, column in zip(ROLES, zip(*rows, strict=True), strict=True):
            document[f"{what} {role} ms"] = round(statistics.median(column) * 1e3, 3)
        added = [(one / statistics.mean(others) - 1) * 100 for one, *others in rows]
        differ = [(second / first - 1) * 100 for _, first, second in rows]
        for name, percents in ((f"{what} added %", added), (f"{what} without by without %", differ)):
            low, middle, high = statistics.quantiles(percents, n=4)
            document[name] = round(middle, 2)
            document[f"{name}, middle half"] = [round(low, 2), round(high, 2)]
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description="What an idle connector costs vLLM.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often the engines are started anew")
    parser.add_argument("--turns", type=int, default=TURNS, help="answers of each engine in a round")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--socket", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.socket)
    if not PYTHON.is_file():
        print("nothing measured, since there is no .venv-vllm: make vllm installs it", file=sys.stderr)
        return 0
    document = summary(asyncio.run(measure(given.model, given.rounds, given.turns)))
    if given.json:
        print(json.dumps(document))
    else:
        for name, value in document.items():
            print(f"{name:>40}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
