"""The table of `make cluster` can say that something is wrong, and its stories stand on files that exist."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.stories import STORIES
from tests.cluster.table import HEAD, Row, cells

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
WELL = Row("partition", "source killed", transfers=2, settled=2, answers=2, audit="clean")


def test_a_row_in_which_all_settled_and_was_audited_is_clean() -> None:
    assert WELL.is_clean
    assert len(cells(WELL)) == len(HEAD)


@pytest.mark.parametrize(
    "changed",
    [
        {"lost": 1},
        {"leaked": 1},
        {"wrong": 1},
        {"audit": "refuted"},
        {"audit": "incomplete"},
        {"audit": ""},
        {"settled": 1},
        {"settled": 0, "must_settle": False},
        {"answers": 0},
        {"problems": ["something else"]},
    ],
    ids=str,
)
def test_whatever_is_wrong_makes_a_row_unclean_and_is_told(changed: dict[str, object]) -> None:
    row = replace(WELL, **changed)  # type: ignore[arg-type] # each value has its field's type

    assert not row.is_clean
    assert row.wrongs()[0].startswith("partition, source killed: ")


def test_where_a_transfer_may_fail_one_that_failed_with_evidence_is_no_fault() -> None:
    assert replace(WELL, settled=1, failed=1, must_settle=False).is_clean


def test_every_story_has_its_file() -> None:
    assert {story.stack for story in STORIES} == {path.stem for path in (ROOT / "compose").glob("*.yaml")}


@pytest.mark.parametrize(("where", "status"), [({}, 3), ({"CI": "1"}, 1)], ids=["on a laptop", "in CI"])
def test_without_an_engine_it_says_so(tmp_path: Path, where: dict[str, str], status: int) -> None:
    env = {name: value for name, value in os.environ.items() if name != "CI"} | {"PATH": str(tmp_path)} | where
    line = [sys.executable, "-m", "tests.cluster", "--only", "quickstart"]
    ran = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=START_S, check=False)

    assert ran.returncode == status
    assert "SKIPPED, there is no `docker` here" in ran.stderr
