"""One real vLLM with dummy weights in one process, where its scheduler can be looked at."""

import asyncio
import json
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.flow.town import town
from tests.flow.vllm_servers import PYTHON, ROOT, environment, require_vllm
from tests.tiny_llama import make_tiny_llama
from tests.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.slow, pytest.mark.timeout(650)]

LIMIT_S = 500.0


async def test_a_real_scheduler_gets_every_block_back_and_preempted_requests_are_answered_right() -> None:
    require_vllm()
    with tempfile.TemporaryDirectory(prefix="kvone-") as name:
        folder = Path(name)
        model = make_tiny_llama(folder / "tiny")
        async with town(folder) as running:
            arguments = ["--instance", "a", "--engine", "vllm", "--pages", "256", "--backend", "memory"]
            worker = running.workers["a"] = running._spawn("a", arguments)
            await until(worker.socket.exists, 100)
            found = await asyncio.to_thread(run_one, model, worker.socket)
            await running.at_rest("a")

    assert found["loaded"] == found["cold"]
    assert found["loads"] == 1
    assert found["steps_to_forget"] == [True, False], "an idle engine makes one step for it"
    assert found["same"] is True
    assert int(str(found["preempted"])) > 0
    assert found["idle_at_end"] is True
    assert found["free_at_end"] == found["free_at_start"]


def run_one(model: Path, socket: Path) -> dict[str, object]:
    """Run the script in vLLM's own virtual environment, and return what it found."""
    script = ROOT / "tests" / "flow" / "vllm_in_process.py"
    ended = subprocess.run(
        ["/usr/bin/nice", "-n", "5", str(PYTHON), str(script), str(model), str(socket)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, ended.stdout[-2000:] + ended.stderr[-4000:]
    found: dict[str, object] = json.loads(lines[-1].removeprefix("FOUND "))
    return found
