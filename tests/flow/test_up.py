"""`kvbus up`: it ends clean on Ctrl-C and SIGTERM, and killed it leaves nothing that goes on without it."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbus.commands.up import up as up_command
from tests.flow.command_line import COMMAND_S, Up, finish, kvbus, start, start_up, up
from tests.flow.town import children
from tests.waiting import wait_until

ORPHANS_S = 60.0
"""A worker's own end takes at most some 30 s; the broker's follows."""


@pytest.fixture
def state(folder: Path, tmp_path: Path) -> Path:
    own = folder / tmp_path.name[-12:]
    own.mkdir()
    own.chmod(0o700)
    return own


@pytest.fixture
def running(state: Path) -> Iterator[Up]:
    with up(state) as started:
        yield started


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_of_it_with_status_0(running: Up, number: signal.Signals) -> None:
    assert len(running.pids) >= 5  # the broker, two workers, two engines
    assert running.state_file.stat().st_mode & 0o777 == 0o600

    assert running.end(number) == 0

    assert running.nothing_left()
    assert not running.state_file.exists()
    assert "Traceback" not in running.said()


def test_a_signal_while_it_starts_ends_it_as_clean(state: Path) -> None:
    starting = start_up(state)
    try:
        wait_until(lambda: children(starting.process.pid), COMMAND_S, what="the broker's process is there")
        starting.pids = set(children(starting.process.pid))

        assert starting.end(signal.SIGINT) == 0

        assert starting.nothing_left()
        assert not starting.state_file.exists()
    finally:
        finish(starting)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_told_to_end_ends_what_it_started(state: Path, number: signal.Signals) -> None:
    demo = start(state, "demo", "--engine", "toy")
    try:
        wait_until(lambda: len(children(demo.process.pid)) == 3, COMMAND_S, what="broker and workers are there")
        demo.pids = set(children(demo.process.pid))

        assert demo.end(number) != 0

        wait_until(demo.nothing_left, COMMAND_S, what="nothing is left")
        assert "Traceback" not in demo.said()
    finally:
        finish(demo)


@pytest.mark.slow
def test_killed_it_leaves_nothing_behind(running: Up) -> None:
    running.process.kill()
    running.process.wait(COMMAND_S)

    wait_until(running.nothing_left, ORPHANS_S, what="workers, engines and broker end by themselves")


def test_a_second_one_over_the_same_folder_is_refused_and_the_first_goes_on(running: Up) -> None:
    ran = kvbus("up", state=running.state)

    assert ran.returncode == 2, ran
    assert "another broker runs over this folder" in ran.stderr.replace("\n", " ")
    assert running.process.poll() is None
    assert running.state_file.exists()
    staged = kvbus("stage", "--from", "a", "--to", "b", "--json", "x" * 100, state=running.state)
    assert staged.returncode == 0, staged


def test_it_ends_with_status_1_when_a_worker_dies(running: Up) -> None:
    workers = [pid for pid in children(running.process.pid) if b"worker" in cmdline(pid)]
    assert len(workers) == 2

    os.kill(workers[0], signal.SIGKILL)

    assert running.process.wait(COMMAND_S) == 1
    wait_until(running.nothing_left, COMMAND_S, what="nothing is left")
    assert not running.state_file.exists()


def test_it_ends_with_status_1_when_its_broker_dies(running: Up) -> None:
    broker = int((running.state / "nats" / "run" / "nats-server.pid").read_text())

    os.kill(broker, signal.SIGKILL)

    assert running.process.wait(ORPHANS_S) == 1
    wait_until(running.nothing_left, COMMAND_S, what="nothing is left")
    assert "the broker ended, so everything stops" in running.said().replace("\n", " ")
    assert not running.state_file.exists()


def test_an_instance_that_is_drained_leaves_and_all_else_goes_on(running: Up) -> None:
    for name in ("b", "a"):
        drained = kvbus("drain", name, state=running.state)
        assert drained.returncode == 0, drained

    wait_until(lambda: running.said().count(" has left") == 2, COMMAND_S, what="it is said of both")
    assert kvbus("audit", state=running.state).returncode == 0
    assert running.end(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("names", "words"), [("a,b,a", "'a' is named 2 times"), (" , ", "name at least one"), ("a b", "no blank")]
)
def test_names_that_cannot_be_instances_are_refused_before_anything_starts(names: str, words: str) -> None:
    ran = CliRunner().invoke(up_command, ["--instances", names])

    assert ran.exit_code == 2
    assert words in ran.output
    assert "starting" not in ran.output


def test_its_document_names_the_broker_and_the_sockets_but_no_token(running: Up) -> None:
    assert running.process.stdout is not None
    said = json.loads(running.process.stdout.readline())

    assert said["nats_url"] == running.document["nats_url"]
    assert set(said["sockets"]) == {"a", "b"}
    assert all(Path(path).exists() for path in said["sockets"].values())
    assert "token" not in said
    assert running.document["token"]


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
