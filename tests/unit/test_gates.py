"""The gates can fail: each is run on a copy of the package with one planted fault, and on one without."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts import check_coverage, check_sizes, check_words

ROOT = Path(__file__).resolve().parents[2]
GATE_BUDGET_S = 250  # the import gate takes about a second; only a hang meets this


@dataclass(frozen=True)
class Copy:
    """A copy of the package that a test may spoil."""

    root: Path

    def plant(self, module_file: str, line: str) -> None:
        """Add one line at the end of a file of the copy, making the file where it is missing."""
        path = self.root / module_file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")

    def make(self, target: str) -> subprocess.CompletedProcess[str]:
        """Run one gate of the Makefile in the copy, with the tools of this environment."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        return subprocess.run(
            ["make", target, f"VENV={sys.prefix}"],  # noqa: S607 - whichever make the operator has
            cwd=self.root,
            env=env,
            capture_output=True,
            text=True,
            timeout=GATE_BUDGET_S,
            check=False,
        )


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Copy]:
    for folder in ("kvbus", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "constraints.txt", "Makefile"):
        shutil.copy2(ROOT / file, tmp_path / file)
    yield Copy(tmp_path)
    shutil.rmtree(tmp_path)


class TestImportGate:
    def test_passes_without_a_planted_fault(self, copy: Copy) -> None:
        gate = copy.make("imports")

        assert gate.returncode == 0, gate.stdout + gate.stderr

    def test_a_word_may_not_import_an_edge(self, copy: Copy) -> None:
        copy.plant("kvbus/topics.py", "import kvbus.transport")

        gate = copy.make("imports")

        assert gate.returncode != 0
        assert "kvbus.topics -> kvbus.transport" in gate.stdout

    def test_the_ledger_may_not_read_a_clock(self, copy: Copy) -> None:
        copy.plant("kvbus/ledger/facts.py", "import time")

        gate = copy.make("imports")

        assert gate.returncode != 0
        assert "kvbus.ledger.facts -> time" in gate.stdout

    def test_a_third_party_has_one_home(self, copy: Copy) -> None:
        copy.plant("kvbus/transport.py", "def late() -> None:\n    import nats")

        gate = copy.make("imports")

        assert gate.returncode != 0
        assert "kvbus.transport -> nats" in gate.stdout

    def test_a_new_module_must_be_given_a_ring(self, copy: Copy) -> None:
        copy.plant("kvbus/helpers.py", "ANSWER = 42")

        gate = copy.make("imports")

        assert gate.returncode != 0
        assert "helpers" in gate.stdout


@pytest.mark.parametrize(
    ("module_file", "line", "told"),
    [
        ("kvbus/ledger/facts.py", "import time", "no clock"),
        ("kvbus/events.py", "from asyncio import Future", "no clock"),
        ("kvbus/topics.py", "def late() -> None:\n    import socket", "no clock"),
        ("kvbus/names.py", 'CLOCK = importlib.import_module("time")', "no clock"),
        ("kvbus/publisher.py", "import nats", "only kvbus.bus may"),
        ("kvbus/bus.py", "from msgpack import packb", "only kvbus.codec may"),
        ("kvbus/pool/pages.py", "import torch.nn", "only kvbus.engines.transformers"),
        ("kvbus/pool/lender.py", "import nacl.signing", "only kvbus.grants may"),
        ("kvbus/dataplane/socket.py", "import ctypes", "only kvbus.dataplane.ucp"),
        ("kvbus/worker.py", "from rich import print", "only kvbus.cli"),
        ("kvbus/worker.py", "from kvbus import testing", "only kvbus.cli"),
        ("kvbus/dataplane/memory.py", "from kvbus import bus", "edge families dataplane and bus"),
        ("kvbus/engines/base.py", "import kvbus.dataplane", "edge families engines and dataplane"),
    ],
)
def test_one_planted_import_is_one_more_violation(copy: Copy, module_file: str, line: str, told: str) -> None:
    before = _check_imports(copy)
    copy.plant(module_file, line)

    after = _check_imports(copy)

    added = [fault for fault in after if fault not in before]
    assert len(added) == 1
    assert told in added[0]


def _check_imports(copy: Copy) -> list[str]:
    gate = subprocess.run(
        [sys.executable, "scripts/check_imports.py"],
        cwd=copy.root,
        capture_output=True,
        text=True,
        timeout=GATE_BUDGET_S,
        check=False,
    )
    faults = gate.stdout.splitlines()[:-1]
    assert gate.returncode == (1 if faults else 0), gate.stdout + gate.stderr
    return faults


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("tests/unit/test_planted.py", "from unittest import mock\n\nmock.patch"),
        ("tests/unit/test_planted.py", "import time\n\ntime.sleep(1)"),
        ("tests/unit/test_planted.py", "import asyncio\n\nasyncio.sleep(1)"),
        ("kvbus/planted.py", "import time\n\ntime.sleep(1)"),
    ],
)
def test_mocks_and_bare_sleeps_are_banned(file: str, source: str) -> None:
    gate = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--stdin-filename", file, "-"],
        cwd=ROOT,
        input=source,
        capture_output=True,
        text=True,
        timeout=GATE_BUDGET_S,
        check=False,
    )

    assert gate.returncode == 1
    assert "TID251" in gate.stdout


class TestSizeGate:
    def test_a_function_may_have_sixty_lines_and_not_one_more(self, tmp_path: Path) -> None:
        file = tmp_path / "long.py"
        file.write_text("def longest() -> None:\n" + "    pass\n" * 59)
        assert not list(check_sizes.faults_of(file))

        file.write_text("def too_long() -> None:\n" + "    pass\n" * 60)
        assert [fault for fault in check_sizes.faults_of(file) if "too_long has 61 lines" in fault]

    def test_a_module_may_have_four_hundred_lines_and_not_one_more(self, tmp_path: Path) -> None:
        file = tmp_path / "long.py"
        file.write_text("ANSWER = 42\n" * 400)
        assert not list(check_sizes.faults_of(file))

        file.write_text("ANSWER = 42\n" * 401)
        assert [fault for fault in check_sizes.faults_of(file) if "module has 401 lines" in fault]


class TestWordGate:
    BANNED = "do" + "ne"

    @pytest.mark.parametrize("line", ["{} = 1", "is_{} = 1", "x = 1  # {}", 'x = "all {}."', "def mark_{}(): ..."])
    def test_the_banned_word_is_found(self, line: str) -> None:
        assert list(check_words.faults_of_source(line.format(self.BANNED)))

    @pytest.mark.parametrize("line", ["aban{}d = 1", "future.{}()", "task.add_{}_callback(f)", "x = 1"])
    def test_other_words_and_foreign_attributes_are_not(self, line: str) -> None:
        assert not list(check_words.faults_of_source(line.format(self.BANNED)))

    def test_it_is_found_in_prose(self) -> None:
        assert list(check_words.faults_of_prose(f"fine\nwell {self.BANNED}\n")) == [(2, f"well {self.BANNED}")]


class TestCoverageGate:
    def test_passes_when_every_part_reaches_the_bound(self, tmp_path: Path) -> None:
        assert _coverage_verdict(tmp_path, ledger=90, topics=100, events=95) == 0

    def test_one_line_below_the_bound_fails(self, tmp_path: Path) -> None:
        assert _coverage_verdict(tmp_path, ledger=89, topics=100, events=95) == 1

    def test_a_part_that_was_not_measured_fails(self, tmp_path: Path) -> None:
        assert _coverage_verdict(tmp_path, ledger=100, topics=100, events=None) == 1

    def test_a_missing_report_fails(self, tmp_path: Path) -> None:
        assert _run_coverage_gate(tmp_path / "coverage.json") == 2


def _coverage_verdict(folder: Path, *, ledger: int, topics: int, events: int | None) -> int:
    percents = {"kvbus/ledger/holder.py": ledger, "kvbus/topics.py": topics, "kvbus/events.py": events}
    percents["kvbus/settling.py"] = 100
    files = {
        name: {"summary": {"num_statements": 100, "covered_lines": percent}}
        for name, percent in percents.items()
        if percent is not None
    }
    report = folder / "coverage.json"
    report.write_text(json.dumps({"files": files}))
    return _run_coverage_gate(report)


def _run_coverage_gate(report: Path) -> int:
    gate = subprocess.run(
        [sys.executable, check_coverage.__file__, str(report)],
        capture_output=True,
        text=True,
        timeout=GATE_BUDGET_S,
        check=False,
    )
    return gate.returncode
