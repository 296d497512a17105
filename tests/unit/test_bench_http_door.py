"""The HTTP door's benchmark: it runs with real parts, and what it prints is what its head says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "http_door.py"
KEYS = {"p50_us", "p50_us_spread", "per_s", "per_s_spread", "p50_ratio", "per_s_ratio"}


@pytest.mark.slow
def test_it_asks_all_contestants_and_prints_what_it_found() -> None:
    command = [sys.executable, str(BENCH), "--rounds", "2", "--asks", "5", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ran.returncode == 0, ran.stderr[-2_000:]
    found = json.loads(ran.stdout)
    for kind in ("bare", "accepted", "refused"):
        assert set(found[kind]) == KEYS
        assert all(found[kind][name] > 0 for name in ("p50_us", "per_s", "p50_ratio", "per_s_ratio"))
    assert (found["bare"]["p50_ratio"], found["bare"]["per_s_ratio"]) == (1, 1)
    assert (found["rounds"], found["body_bytes"] > 1_000) == (2, True)
