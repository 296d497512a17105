"""What can be wrong at the start: each ends with status 2 and one sentence that says what to do."""

import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import pytest_asyncio

from tests.flow.command_line import kvbus
from tests.flow.town import Town, town

NO_BROKER_S = 100.0
"""The promise is ten seconds, of which connecting takes five; four interpreters that start at once on two busy cores
take the rest several times over, so this only tells waiting from hanging."""


@pytest.fixture
def state(folder: Path, tmp_path: Path) -> Path:
    """A state folder with a short path, of this test's own."""
    own = folder / tmp_path.name[-12:]
    own.mkdir()
    own.chmod(0o700)
    return own


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nobody listens: bound, so that nobody else gets it, and closed to all."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def told(ran: "subprocess.CompletedProcess[str]", *words: str) -> None:
    """The command could not run, and said why in one sentence, without a traceback."""
    assert ran.returncode == 2, ran
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""
    for word in words:
        assert word in ran.stderr


# ------------------------------------------------------------------------------------------------------------- broker


@pytest.mark.slow
def test_a_broker_that_does_not_answer_is_named_in_time(state: Path, closed_port: int) -> None:
    url = f"nats://127.0.0.1:{closed_port}"
    commands = (["worker", "--instance", "a"], ["stage", "--from", "a", "--to", "b", "text"], ["up"], ["demo"])

    def run(command: list[str]) -> "subprocess.CompletedProcess[str]":
        return kvbus(*command, "--nats", url, state=state, deadline_s=NO_BROKER_S)

    with ThreadPoolExecutor(len(commands)) as pool:  # each of them mostly waits
        ended = list(pool.map(run, commands))

    for ran in ended:
        assert ran.returncode == 2, ran
        assert "Traceback" not in ran.stderr
        for word in ("no broker answers", url, "connecting for 5 s", "kvbus up", "--nats URL"):
            assert word in ran.stderr.replace("\n", " ")


def test_a_command_with_no_broker_named_and_none_running_says_where_it_looked(state: Path) -> None:
    ran = kvbus("stage", "--from", "a", "--to", "b", "text", state=state)

    told(ran, "no running kvbus found at", str(state / "up.json"), "kvbus up", "--nats URL")


def test_a_state_file_that_is_torn_is_named(state: Path) -> None:
    (state / "up.json").write_text('{"nats_u')

    told(kvbus("stage", "--from", "a", "--to", "b", "text", state=state), str(state / "up.json"), "unreadable")


def test_no_nats_server_binary(state: Path) -> None:
    ran = kvbus("up", state=state, env={"KVBUS_NATS_SERVER": str(state / "no-such-program")})

    assert ran.returncode == 2, ran
    assert "KVBUS_NATS_SERVER does not name a program that can be run" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (state / "up.json").exists()


def test_a_nats_server_that_is_none(state: Path) -> None:
    program = state / "nats-server"
    program.write_text("#!/bin/sh\necho nonsense >&2\nexit 3\n")
    program.chmod(0o755)

    ran = kvbus("up", state=state, env={"KVBUS_NATS_SERVER": str(program)})

    assert ran.returncode == 2, ran
    assert "nats-server" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_port_that_is_taken(state: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        ran = kvbus("up", "--port", str(port), state=state)

    assert ran.returncode == 2, ran
    assert "port is taken" in ran.stderr
    assert str(port) in ran.stderr
    assert "Traceback" not in ran.stderr


# ------------------------------------------------------------------------------------------------------------ workers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place(folder: Path) -> AsyncIterator[Town]:
    """A broker, and one worker of instance a."""
    async with town(folder / "town") as running:
        await running.start("a")
        yield running


def worker(place: Town, state: Path, *arguments: str, instance: str = "x") -> "subprocess.CompletedProcess[str]":
    """Start a worker that cannot start, in the place's run folder."""
    broker = place.broker
    return kvbus(
        *("worker", "--instance", instance, "--nats", broker.url, "--run-dir", str(place.folder / "run"), *arguments),
        state=state,
        env={"KVBUS_NATS_TOKEN": broker.token},
    )


def test_a_second_worker_of_the_same_name(place: Town, state: Path) -> None:
    ran = worker(place, state, instance="a")

    told(ran, "a worker of a/m0 is running already", str(place.workers["a"].pid), "--member")


def test_a_second_worker_of_the_same_name_with_a_run_folder_of_its_own(place: Town, state: Path) -> None:
    # Two of one name on one broker would answer for each other: each with its own key, epoch and pool.
    ran = worker(place, state, "--run-dir", str(state / "own"), instance="a")

    told(ran, "a worker of a/m0 is running already", str(place.workers["a"].pid), "--member")


def test_a_pool_that_is_too_small_for_its_longest_prompt(place: Town, state: Path) -> None:
    ran = worker(place, state, "--pages", "64")

    assert ran.returncode == 2, ran
    assert "pool too small: 64 pages" in ran.stderr
    assert "--pages" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pages", "1"], ["setting pages"]),
        (["--allow", "x"], ["source_allow", "not its own source"]),
        (["--engine", "no-such"], ["no-such", "toy"]),
        (["--engine-options", "{"], ["--engine-options is not JSON"]),
        (["--engine-options", "[1]"], ["--engine-options must be a JSON object"]),
        (["--rate-limit", "-1"], ["setting rate_limit_bytes_s"]),
        (["--inflight-max", "-1"], ["inflight_max"]),
        (["--prefix", "k.v"], ["prefix", "k.v"]),
        (["--member", ""], ["setting member"]),
        (["--member", "m2", "--members", "m0,m1"], ["members are m0, m1", "'m2' is none of them"]),
        (["--members", "m0,m1,m1"], ["setting members", "m1 stands there twice"]),
        (["--members", "m0,"], ["setting members"]),
        (["--members", "m0,m1", "--engine", "transformers"], ["the transformers engine has one rank"]),
        (["--log-level", "loud"], ["loud"]),
    ],
    ids=lambda part: " ".join(part)[:30],
)
def test_a_setting_that_does_not_fit_is_named(place: Town, state: Path, arguments: list[str], words: list[str]) -> None:
    told(worker(place, state, *arguments), *words)


def test_an_engine_option_that_does_not_fit_is_named_and_nothing_is_left(place: Town, state: Path) -> None:
    run = place.folder / "run"
    for options, words in (
        ('{"speed": 1}', "toy option 'speed' is unknown"),
        ('{"work_rounds": "many"}', "toy option 'work_rounds' is str, expected"),
        ('{"page_bytes": 100}', "toy option page_bytes is 100"),
    ):
        ran = worker(place, state, "--engine-options", options)  # the lock of the one before is free again

        assert ran.returncode == 2, ran
        assert words in ran.stderr
        assert "Traceback" not in ran.stderr
        assert not list(run.glob("x.*.sock"))


def test_an_engine_of_another_rank_than_its_member_is_named(place: Town, state: Path) -> None:
    for options, arguments, words in (
        ('{"rank": 1, "ranks": 2}', (), ("rank 1 of 2", "x/m0 serves rank 0 of 1")),
        ('{"rank": 0}', ("--member", "m1", "--members", "m0,m1"), ("rank 0 of 2", "x/m1 serves rank 1 of 2", "m0, m1")),
    ):
        ran = worker(place, state, "--engine-options", options, *arguments)

        assert ran.returncode == 2, ran
        assert all(word in ran.stderr.replace("\n", " ") for word in words), ran.stderr
        assert "Traceback" not in ran.stderr


def test_an_engine_option_that_does_not_fit_is_named_by_up_too(state: Path) -> None:
    ran = kvbus("up", "--engine-options", '{"speed": 1}', state=state)

    assert ran.returncode == 2, ran
    assert "toy option 'speed' is unknown" in ran.stderr.replace("\n", " ")
    assert not (state / "up.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True], ids=["missing", "broken"])
def test_a_model_folder_that_is_none_is_named(place: Town, state: Path, *, broken: bool) -> None:
    pytest.importorskip("transformers")
    model = state / "model"
    if broken:
        model.mkdir()
        (model / "config.json").write_text('{"model_type": "lla')
        (model / "model.safetensors").write_bytes(b"not a tensor")

    ran = worker(place, state, "--engine", "transformers", "--engine-options", f'{{"folder": "{model}"}}')

    assert ran.returncode == 2, ran
    assert str(model) in ran.stderr
    assert "Traceback" not in ran.stderr


def test_wrong_credentials_are_named(place: Town, state: Path) -> None:
    ran = kvbus("worker", "--instance", "x", "--nats", place.broker.url, "--token", "wrong", state=state)

    assert ran.returncode == 2, ran
    assert "refused these credentials" in ran.stderr
    assert place.broker.token not in ran.stderr
