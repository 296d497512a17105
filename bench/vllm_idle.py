"""What the connector costs a vLLM that has no use for it: decode steps and first tokens, with it and without it.

Two vLLM engines, each in one process of .venv-vllm, take turns, so that a noisy neighbour disturbs both: one has the
connector, attached to a real kvbus worker that holds nothing, and stores only what is asked for; the other has none. A
turn is one answer of each: a prompt of a few tokens and many decode steps, then prompts of 300 fresh tokens and one
token each, for which the connector asks its worker. Prints medians, the median of the ratios within each turn and the
middle half of them; `--json` prints one document. `--model` names a folder; the default is a tiny one made here, whose
steps take milliseconds, so that a fixed cost shows best.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
TURNS, STEPS, PROMPTS = 20, 40, 3
PROMPT_TOKENS = 300
Foreign = Any
# vLLM's own types are not there to check.


# The engine, in vLLM's own virtual environment -----------------------------------------------------------------------


def serve(model: str, socket: str) -> None:
    """Answer lines on stdin: each asks for one turn, and gets the seconds of its steps and of its first tokens."""
    from vllm import LLM  # noqa: PLC0415 - installed in the engine's process only

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
    pick = random.Random(7)
    for _ in sys.stdin:
        steps = timed(engine, [pick.randrange(3, 512) for _ in range(8)], STEPS)[1:]
        firsts = [timed(engine, [pick.randrange(3, 512) for _ in range(PROMPT_TOKENS)], 1) for _ in range(PROMPTS)]
        print("TURN " + json.dumps([steps, [sum(each) for each in firsts]]), flush=True)
    os._exit(0)


def timed(engine: Foreign, ids: list[int], tokens: int) -> list[float]:
    """Answer one prompt, and return the seconds of each step that computed something."""
    from vllm import SamplingParams  # noqa: PLC0415 - as above

    parameters = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    engine.add_request(str(random.random()), {"prompt_token_ids": ids}, parameters)
    took: list[float] = []
    scheduler = engine.engine_core.engine_core.scheduler
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        engine.step()
        if not scheduler.running and scheduler.has_requests():
            # As vLLM's server does where nothing could run: other threads get their turn.
            time.sleep(0.001)  # noqa: TID251
        took.append(time.perf_counter() - started)
    return took


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

    def turn(self) -> tuple[list[float], list[float]]:
        """Have it take one turn."""
        if self.process.stdin is not None:
            self.process.stdin.write("turn\n")
            self.process.stdin.flush()
        steps, firsts = json.loads(self.line("TURN "))
        return steps, firsts

    def end(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


async def measure(model: Path | None, turns: int) -> dict[str, list[float]]:
    """Run broker, worker and both engines, and return the medians of each turn."""
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
        with_it = Child(model, str(folder / "run" / "idle.m0.sock"), folder / "with.log")
        without = Child(model, "", folder / "without.log")
        try:
            return await asyncio.to_thread(take_turns, with_it, without, turns)
        finally:
            with_it.end()
            without.end()
            with contextlib.suppress(ProcessLookupError):
                worker.terminate()
            await worker.wait()
            await broker.stop()


def take_turns(with_it: Child, without: Child, turns: int) -> dict[str, list[float]]:
    """Let both take turns, each first every other time; the first turn of each only warms up."""
    for child in (with_it, without):
        child.line("READY")
        child.turn()
    found: dict[str, list[float]] = {"step with": [], "step without": [], "first with": [], "first without": []}
    for turn in range(turns):
        pair = [("with", with_it), ("without", without)]
        for name, child in pair if turn % 2 else reversed(pair):
            steps, firsts = child.turn()
            found[f"step {name}"].append(statistics.median(steps))
            found[f"first {name}"].append(statistics.median(firsts))
    if "attached to the kvbus worker" not in with_it.log.read_text():
        raise SystemExit("the connector was not attached, so nothing was measured")
    return found


def summary(found: dict[str, list[float]]) -> dict[str, object]:
    """Return medians in milliseconds, and what the connector adds in percent."""
    document: dict[str, object] = {
        f"{name} ms": round(statistics.median(each) * 1e3, 3) for name, each in found.items()
    }
    for what in ("step", "first"):
        pairs = zip(found[f"{what} with"], found[f"{what} without"], strict=True)
        added = sorted((one / other - 1) * 100 for one, other in pairs)
        quarter = len(added) // 4
        document[f"{what} added %"] = round(statistics.median(added), 2)
        document[f"{what} added % middle half"] = [round(added[quarter], 2), round(added[-1 - quarter], 2)]
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description="What an idle connector costs vLLM.")
    parser.add_argument("--turns", type=int, default=TURNS)
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
    document = summary(asyncio.run(measure(given.model, given.turns)))
    if given.json:
        print(json.dumps(document))
    else:
        for name, value in document.items():
            print(f"{name:>26}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
