"""The capacity page is the one that its script makes of what was counted, and a transfer still costs about that."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "capacity.py"
COSTS = ROOT / "docs" / "capacity.json"


@pytest.fixture(scope="module")
def capacity() -> ModuleType:
    """The script, as a module."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("capacity", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["capacity"] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(SCRIPT.parent))


def costs() -> dict[str, Any]:
    """What was counted."""
    found: dict[str, Any] = json.loads(COSTS.read_text(encoding="utf-8"))
    return found


def test_the_page_is_the_one_that_the_script_makes() -> None:
    line = [sys.executable, str(SCRIPT), "--check"]
    ran = subprocess.run(line, check=False, capture_output=True, text=True, timeout=150)

    assert ran.returncode == 0, f"run bench/capacity.py once more {ran.stderr}"


def test_a_load_is_what_instances_cost_and_what_their_transfers_cost(capacity: ModuleType) -> None:
    one = costs() | {"instance_messages_s": 2.0, "transfer_messages": 50.0, "transfer_facts_bytes": 1_000.0}
    one |= {"instance_bytes_s": 100.0, "transfer_bytes": 10_000.0, "instance_facts_bytes_s": 0.0}
    found = capacity.load(one, 100, 0.5)

    assert found.messages_s == 100 * 2.0 + 50 * 50.0
    assert found.bytes_s == 100 * 100.0 + 50 * 10_000.0
    assert found.facts_bytes_day == 50 * 1_000.0 * 86_400
    assert found.facts_full_h == pytest.approx(1024 * 2**20 / 50_000 / 3_600)


def test_another_cost_makes_another_page(capacity: ModuleType) -> None:
    assert capacity.page(costs() | {"transfer_messages": 99.0}) != capacity.page(costs())


@pytest.mark.slow
async def test_a_transfer_costs_about_what_the_page_says(capacity: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "IDLE_S", 6.0)
    monkeypatch.setattr(capacity, "TRANSFERS", 10)

    counted = await capacity.measure()
    for name in ("instance_messages_s", "transfer_messages", "transfer_bytes", "transfer_facts_bytes"):
        assert counted[name] == pytest.approx(costs()[name], rel=0.4), name
