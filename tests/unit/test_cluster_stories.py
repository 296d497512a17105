"""The table of `make cluster` can say that something is wrong, and its stories stand on files that exist."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.configs import config_troubles, grafana_troubles, has_compose
from tests.cluster.page import LINES_MAX, PAGE, page, write_trail
from tests.cluster.play import turns
from tests.cluster.stack import OVERLAYS, Stack
from tests.cluster.stories import STORIES
from tests.cluster.story import Story
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


def test_every_file_has_a_story_and_every_story_a_file() -> None:
    assert {story.stack for story in STORIES} == {path.stem for path in (ROOT / "compose").glob("*.yaml")}


def test_stories_that_share_containers_stand_together_and_no_two_have_one_title() -> None:
    scenes = [scene for scene, _ in groupby(STORIES, lambda story: story.scene)]

    assert len(set(scenes)) == len(scenes)
    assert len({story.title for story in STORIES}) == len(STORIES)


def test_scenes_that_are_played_beside_each_other_share_neither_a_project_nor_a_network() -> None:
    scenes = [scene for scene, _ in groupby(STORIES, lambda story: story.scene)]
    stacks = [Stack(name, overlay, part) for name, overlay, _, part in scenes]

    assert len({one.project for one in stacks}) == len(scenes)
    assert len({one.subnet for one in stacks}) == len(scenes)
    assert [one.subnet for one in stacks] == [Stack(name, overlay, part).subnet for name, overlay, _, part in scenes]


def test_each_story_is_played_once_the_busy_ones_by_themselves_and_long_scenes_first() -> None:
    alone, beside = turns(STORIES)
    lengths = [sum(story.about_s for story in scene) for scene in beside]

    assert sorted(story.title for scene in (*alone, *beside) for story in scene) == sorted(
        story.title for story in STORIES
    )
    assert {story.title for scene in alone for story in scene} == {"rolling-restart, each worker restarted"}
    assert lengths == sorted(lengths, reverse=True)
    for scene in beside:
        assert len({story.scene for story in scene}) == 1


@pytest.mark.parametrize("story", [one for one in STORIES if one.overlay], ids=lambda one: one.overlay)
def test_an_overlay_changes_services_and_volumes_that_its_file_has_and_mounts_what_exists(story: Story) -> None:
    base = yaml.safe_load((ROOT / "compose" / f"{story.stack}.yaml").read_text(encoding="utf-8"))
    added = yaml.safe_load((OVERLAYS / f"{story.overlay}.yaml").read_text(encoding="utf-8"))

    assert set(added.get("volumes", {})) <= set(base["volumes"])
    for name, one in added["services"].items():
        assert name in base["services"] or one["image"] == "kvbus"
        for volume in one.get("volumes", []):
            source = volume.split(":")[0]
            assert source in base["volumes"] or source.startswith("$") or (ROOT / "compose" / source).is_file(), source


def test_compose_takes_every_file_with_all_its_profiles_and_finds_grafanas_part_whole() -> None:
    if not has_compose():
        # Not `absent`: .ci/run starts an engine behind these tests, and `make cluster` asks the same of it then.
        pytest.skip("there is no docker compose here; `make cluster` asks it")
    assert config_troubles() == []


def grafanas_part(folder: Path) -> dict[str, Any]:
    """What compose makes of Grafana's part, less what nobody looks at."""
    places = {
        "datasource.yaml": "/etc/grafana/provisioning/datasources/kvbus.yaml",
        "dashboards.yaml": "/etc/grafana/provisioning/dashboards/kvbus.yaml",
        "kvbus.json": "/var/lib/grafana/dashboards/kvbus.json",
    }
    for name in places:
        (folder / name).write_text((ROOT / "compose" / "grafana" / name).read_text(encoding="utf-8"), encoding="utf-8")
    mounts = [{"type": "bind", "source": str(folder / name), "target": target} for name, target in places.items()]
    ports = [{"host_ip": "127.0.0.1", "target": 3000, "published": "3000"}]
    grafana = {"volumes": mounts, "ports": ports, "depends_on": {"prometheus": {}}}
    return {"services": {"prometheus": {}, "grafana": grafana}}


def test_grafanas_part_as_it_must_be_is_no_trouble(tmp_path: Path) -> None:
    assert not list(grafana_troubles(grafanas_part(tmp_path)))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda part, _: part["services"].pop("grafana"), "starts no grafana"),
        (lambda part, _: part["services"].pop("prometheus"), "reads from http://prometheus:9090"),
        (lambda part, _: part["services"]["grafana"].pop("depends_on"), "does not wait for a service of that name"),
        (lambda part, _: part["services"]["grafana"]["ports"][0].pop("host_ip"), "expected one on 127.0.0.1 alone"),
        (lambda part, _: part["services"]["grafana"]["volumes"].pop(0), "nothing is mounted below"),
        (lambda part, _: part["services"]["grafana"]["volumes"].pop(1), "no dashboard is mounted where"),
        (lambda part, _: part["services"]["grafana"]["volumes"].pop(2), "no dashboard is mounted where"),
        (lambda _, folder: (folder / "kvbus.json").unlink(), "is no file"),
    ],
)
def test_whatever_is_wrong_with_grafanas_part_is_told(
    tmp_path: Path, spoil: Callable[[dict[str, Any], Path], object], told: str
) -> None:
    part = grafanas_part(tmp_path)
    spoil(part, tmp_path)

    assert any(told in trouble for trouble in grafana_troubles(part))


def test_the_page_tells_stories_that_are_played_and_all_of_them_ended_clean() -> None:
    text = PAGE.read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    counts = re.findall(r"^`compose/\S+`: .* 0 lost, 0 leaked, 0 wrong; audit (\S+)\.$", text, re.MULTILINE)

    assert sections
    assert [title for title in (story.title for story in STORIES) if title in sections] == sections
    assert counts == ["clean"] * len(sections)


def test_a_story_that_was_not_clean_is_not_on_the_page_and_a_long_trail_is_cut(tmp_path: Path) -> None:
    clean, other = STORIES[0], STORIES[1]
    trail = [f"line {number}" for number in range(LINES_MAX + 10)]
    write_trail(tmp_path, clean, replace(WELL, story=clean.stack, fault=clean.fault, trail=trail))
    write_trail(tmp_path, other, replace(WELL, story=other.stack, fault=other.fault, lost=1))
    text = page(tmp_path)

    assert f"## {clean.title}" in text
    assert f"## {other.title}" not in text
    assert "line 0\n" in text
    assert "… 10 lines …" in text
    assert f"line {LINES_MAX // 2}\n" not in text
    assert trail[-1] in text


def test_ci_plays_some_of_them() -> None:
    assert 3 <= sum(story.quick for story in STORIES) <= 8


@pytest.mark.parametrize(("where", "status"), [({}, 3), ({"CI": "1"}, 1)], ids=["on a laptop", "in CI"])
def test_without_an_engine_it_says_so(tmp_path: Path, where: dict[str, str], status: int) -> None:
    env = {name: value for name, value in os.environ.items() if name != "CI"} | {"PATH": str(tmp_path)} | where
    line = [sys.executable, "-m", "tests.cluster", "--only", "quickstart"]
    ran = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=START_S, check=False)

    assert ran.returncode == status
    assert "SKIPPED, there is no `docker` here" in ran.stderr
