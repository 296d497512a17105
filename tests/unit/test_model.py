"""The Promela model of a lease's life holds, each planted fault breaks its claim, and the check itself can fail."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.absent import absent

ROOT = Path(__file__).resolve().parents[2]
CHECK_BUDGET_S = 1500  # three minutes on two idle cores; only a hang, or a machine far too small, meets this
pytestmark = [pytest.mark.slow, pytest.mark.timeout(CHECK_BUDGET_S + 60)]


@pytest.fixture
def spin() -> None:
    """Skip where spin or a compiler is missing; in CI, which installs them, that is a failure."""
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing:
        absent(f"{' and '.join(missing)} not found; on Debian: apt-get install spin gcc libc6-dev")


def _check(root: Path, *names: str) -> tuple[int, dict[str, Any]]:
    ended = subprocess.run(
        [sys.executable, str(root / "scripts" / "check_model"), "--json", *names],
        capture_output=True,
        text=True,
        timeout=CHECK_BUDGET_S,
        check=False,
    )
    assert ended.stdout, ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout)
    return ended.returncode, answer


def _copy(folder: Path) -> Path:
    for name in ("scripts/check_model", "model/lease.pml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.mark.contract("P1, P2, P3, P4, P5, P6, P10, P11, P18")
def test_the_model_holds_and_each_planted_fault_breaks_its_claim(spin: None) -> None:
    # All but the largest, 22 million states and 2.3 GiB, which only `make model` searches.
    listed = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_model"), "--list"], capture_output=True, text=True, check=True
    )
    status, answer = _check(ROOT, *(name for name in listed.stdout.split() if name != "two-transfers"))

    wrong = [search for search in answer["searches"] if not search["ok"]]
    assert not wrong
    assert status == 0
    assert sum(search["planted"] for search in answer["searches"]) >= 2
    assert all(search["complete"] for search in answer["searches"] if not search["planted"])


def test_a_plant_that_changes_nothing_fails_the_check(spin: None, tmp_path: Path) -> None:
    model = _copy(tmp_path) / "model" / "lease.pml"
    model.write_text(model.read_text().replace("PLANT_AFTER_READ", "PLANT_NOWHERE"))

    status, answer = _check(tmp_path, "AFTER_READ")

    assert (status, answer["ok"]) == (1, False)
    assert answer["searches"][0]["errors"] == 0


def test_a_fault_in_the_model_itself_fails_the_check_and_is_told_in_words(spin: None, tmp_path: Path) -> None:
    model = _copy(tmp_path) / "model" / "lease.pml"
    model.write_text(re.sub(r"#ifdef PLANT_ZOMBIE", "#ifndef PLANT_ZOMBIE", model.read_text()))

    status, answer = _check(tmp_path, "one-transfer")

    assert (status, answer["ok"]) == (1, False)
    assert answer["searches"][0]["trail"][-1].startswith("BROKEN (c)")


def test_without_spin_the_check_says_so_and_does_not_claim_success(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_model")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )

    assert ended.returncode == 3
    assert "the model was not verified" in ended.stdout
