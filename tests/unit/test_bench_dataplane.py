"""The data plane's benchmark: it runs with real parts, what it prints is well-formed, and who is missing is named."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "bench"
SIZES, COUNTS = (4096, 65536), (1, 8)
ROW_KEYS = {"best_ms", "share_of_raw_best", "p50_ms", "p99_ms", "gb_s", "us_per_page", "cpu_s_per_gib", "share_of_raw"}


def bench_module(name: str) -> ModuleType:
    """A module of the benchmark, which is no package."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / "planes" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    sys.path.insert(0, str(BENCH))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCH))
    return module


def listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@pytest.fixture(scope="module")
def document() -> Any:  # noqa: ANN401 - as JSON gives it
    """What a tiny run says: the limit and kvbus, by its own choice, over UCX and over a socket, with real pages."""
    command = [sys.executable, str(BENCH / "dataplane.py"), "--json", "--budget", "0.1"]
    command += ["--only", "raw,kvbus,kvbus-ucx,kvbus-socket", "--sizes", listed(SIZES), "--counts", listed(COUNTS)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.slow
def test_a_tiny_run_measures_every_case_for_every_contestant(document: Any) -> None:  # noqa: ANN401
    cases = [(case["page_bytes"], case["count"]) for case in document["cases"]]
    assert cases == [(size, count) for size in SIZES for count in COUNTS]
    for case in document["cases"]:
        assert set(case["results"]) == {"raw", "kvbus", "kvbus-ucx", "kvbus-socket"}
        assert case["rounds"] >= 5
        for row in case["results"].values():
            assert set(row) == ROW_KEYS
            assert all(value > 0 for value in row.values())
        assert case["results"]["raw"]["share_of_raw"] == 1.0


@pytest.mark.slow
def test_a_document_says_where_it_was_made_and_how_the_targets_stand(document: Any) -> None:  # noqa: ANN401
    assert document["benchmark"] == "dataplane"
    assert set(document["host"]) == {"cores", "kernel", "python", "load_before", "load_after"}
    assert document["ucx_lanes"]["kvbus-ucx"]
    whats = [target["what"] for target in document["targets"]]
    assert whats == ["64 KiB: share of process_vm_readv", "1 page of 64 KiB, lease request to delivered, ms p50"]
    for target in document["targets"]:
        assert target["met"] in {True, False}


LATE_KEYS = {"ticks", "p50_ms", "p99_ms", "max_ms", "worst_ms", "held_ms", "over", "cores", "source_p99_ms"}


@pytest.mark.slow
def test_a_tiny_run_tells_how_late_the_loop_is_beside_each_way_and_beside_other_processes() -> None:
    command = [
        sys.executable,
        str(BENCH / "loop_lag.py"),
        "--json",
        "--rounds",
        "1",
        "--sizes",
        "65536",
        "--pages",
        "8",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert ran.returncode == 0, ran.stderr
    (case,) = json.loads(ran.stdout)["cases"]
    rows = case["rows"]
    ways = {"kvbus-memory", "kvbus-ucx", "kvbus-ucx-tcp", "kvbus-socket"}
    beside = {f"{loop}, beside {count}" for loop in ("idle", "busy") for count in (1, 2)}
    assert set(rows) == {"idle"} | beside | ways
    for name, row in rows.items():
        assert set(row) >= LATE_KEYS
        assert row["ticks"] > 0
        assert row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
        assert (row["transfers"] > 0) == (name in ways)
        assert ("worst_ms_more" in row) == (name in ways)


async def test_what_holds_the_loop_shows_as_a_late_tick_and_as_the_loops_own_time() -> None:
    heartbeat = bench_module("heartbeat").Heartbeat()
    heartbeat.start()
    ends_at = time.thread_time() + 0.03
    while time.thread_time() < ends_at:
        pass
    beats = heartbeat.stop()
    assert beats.late[-1] >= 0.028
    assert beats.held[-1] >= 0.03


def test_a_table_holds_a_line_for_each_contestant_and_no_target_is_met_by_what_was_not_measured() -> None:
    cases, report = bench_module("cases"), bench_module("report")
    case = cases.Case(2 << 20, 64)
    taken = {"raw": report.Taken([0.02, 0.03, 0.04], 0.09), "kvbus": report.Taken([0.05, 0.04, 0.06], 0.15)}
    made = report.case_document(case, taken, "memory")
    assert made["results"]["kvbus"]["share_of_raw"] == pytest.approx(0.6)
    assert made["results"]["kvbus"]["cpu_s_per_gib"] == pytest.approx(0.15 / 3 * 8)
    assert [line.split()[0] for line in report.case_text(made).splitlines()[2:]] == ["raw", "kvbus"]
    (target,) = report.targets([made])
    assert (target["met"], target["wanted"]) == (False, ">= 0.85")


def test_a_peer_that_is_not_installed_is_left_out_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = bench_module("peers")
    monkeypatch.setattr(peers, "PYTHON", tmp_path / ".venv-peers" / "bin" / "python")
    assert peers.PEERS[0].missing() == (
        "nixl is left out: .venv-peers is not there; run `make bench-peers` to install the peers"
    )
    monkeypatch.setattr(peers, "PYTHON", Path(sys.executable))  # an environment without them
    for kind in peers.PEERS:
        assert kind.missing().startswith(f"{kind.name} is left out: ModuleNotFoundError")


def test_scattered_pages_are_scattered_and_fit_their_pools() -> None:
    cases = bench_module("cases")
    for group in cases.grid(cases.PAGE_SIZES, cases.COUNTS, cases.MOVED_BYTES_MAX):
        pages = cases.pool_pages(group)
        order = cases.source_order(pages, contiguous=False)
        assert sorted(order) == list(range(pages))
        for case in group:
            assert case.length_bytes <= cases.MOVED_BYTES_MAX
            local = cases.local_pages(pages, case.count, contiguous=False)
            assert len(set(local)) == case.count
            assert max(local) < pages
            neighbours = sum(
                there + 1 == next_there and here + 1 == next_here
                for here, next_here, there, next_there in zip(local, local[1:], order, order[1:], strict=False)
            )
            assert neighbours <= case.count / 50
