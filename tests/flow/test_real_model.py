"""The story with a real model: SmolLM2's KV staged from one instance to another, as `make demo` shows it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real_model import smollm2_folder

KEYS = {
    "engine", "model", "prompt_tokens", "pages", "bytes", "ttft_cold_s", "ttft_staged_s", "speedup",
    "tokens_identical", "poison_detected", "transfer_s", "facts", "ok",
}  # fmt: skip
SPEEDUP_WANTED = 8.0


@pytest.mark.model
@pytest.mark.timeout(900)
def test_a_real_prompt_is_answered_from_staged_pages_with_the_same_tokens(tmp_path: Path) -> None:
    smollm2_folder()
    ended = subprocess.run(
        [sys.executable, "-m", "kvbus", "demo", "--engine", "transformers", "--json"],
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, "KVBUS_STATE": str(tmp_path)},
        check=False,
    )
    shown = json.loads(ended.stdout)
    assert set(shown) == KEYS
    assert shown["tokens_identical"], ended.stderr[-3000:]
    assert shown["poison_detected"]
    assert 900 <= shown["prompt_tokens"] <= 1100
    assert shown["pages"] == shown["prompt_tokens"] // 32
    # Both times come from one run on one host; a neighbour that takes the core during the short one can still spoil
    # their ratio, so that the demo's own threshold is judged by the demo, and only its sense by this test.
    assert shown["speedup"] > 2
    assert shown["ok"] == (ended.returncode == 0)
    assert shown["ok"] or shown["speedup"] < SPEEDUP_WANTED, ended.stderr[-3000:]
