"""The files of compose/ say what they show, stand on base images only, and ask kvbus for nothing that it lacks."""

import asyncio
import http.server
import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from kvbus.cli import kvbus
from kvbus.engines.link import encode_frame
from kvbus.engines.port import EnginePort
from tests.unit.engine_parts import SmallDesk
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"
FILES = sorted(COMPOSE.glob("*.yaml"))
OURS = {"kvbus", "kvbus-transformers"}
"""What the targets of the Dockerfile are called."""
BASES = {"python:3.11-slim-bookworm", "nats:2.12-alpine", "prom/prometheus:v3.5.0", "grafana/grafana:12.1.0"}
TOLD = {
    *("auth", "broker-failover", "cluster", "drain", "members", "partition", "quickstart"),
    *("rolling-restart", "slow-peer", "transformers"),
}
TARGETS = ("kvbus", "transformers")
HEALTH_S = 60.0

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def services(path: Path) -> dict[str, dict[str, Any]]:
    """The services of a file, with its anchors resolved."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["services"]
    return found


def header(path: Path) -> str:
    """The comment at a file's top."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(place for place, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])


def parse(words: list[str]) -> None:
    """Have click parse a command line of kvbus as it would, and run nothing."""
    name, *arguments = words
    command = kvbus.get_command(click.Context(kvbus), name)
    assert command is not None, f"kvbus has no command {name}"
    command.make_context(name, list(arguments))


def told_in_header(path: Path) -> list[list[str]]:
    """Every command line of kvbus that a header tells people to run in a container."""
    text = header(path).replace("\\\n#", " ")
    return [
        shlex.split(found)
        for found in re.findall(r"run --rm (?:--detach )?(?:kvbus|stage) (.+?)(?:`|$)", text, re.MULTILINE)
    ]


def test_there_is_a_file_for_each_story_that_is_told() -> None:
    assert {path.stem for path in FILES} == TOLD


@every_file
def test_it_names_only_our_image_and_the_base_images(path: Path) -> None:
    assert {one["image"] for one in services(path).values()} <= BASES | OURS


@every_file
def test_its_header_says_what_it_shows_how_to_run_it_and_what_to_look_at(path: Path) -> None:
    text = header(path)

    assert "# What it shows: " in text
    assert "# What to look at:" in text
    assert f"docker compose -f compose/{path.name} up" in text
    assert f"docker compose -f compose/{path.name} down --volumes" in text


@every_file
def test_every_command_that_it_runs_is_one_that_kvbus_has_with_these_options(path: Path) -> None:
    ours = [one for one in services(path).values() if one["image"] in OURS]
    lines = [one["command"] for one in ours if "command" in one and "entrypoint" not in one]

    assert len(lines) >= 3
    for words in lines:
        parse(words)


@every_file
def test_every_command_that_its_header_tells_is_one_that_kvbus_has(path: Path) -> None:
    lines = told_in_header(path)

    assert any(words[0] == "stage" for words in lines)
    assert any(words[0] == "audit" for words in lines)
    for words in lines:
        parse(words)


@every_file
def test_what_stays_up_can_be_waited_for(path: Path) -> None:
    """`up --wait` fails where a check is switched off, but for what others await the end of."""
    found = services(path)
    awaited = {
        name
        for one in found.values()
        for name, how in (one["depends_on"] if isinstance(one.get("depends_on"), dict) else {}).items()
        if how["condition"] == "service_completed_successfully"
    }
    unchecked = {
        name
        for name, one in found.items()
        if one.get("healthcheck", {}).get("disable") and "tools" not in one.get("profiles", [])
    }

    assert unchecked <= awaited


@every_file
def test_it_publishes_ports_on_loopback_only(path: Path) -> None:
    for name, one in services(path).items():
        for port in one.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port}"


@every_file
def test_its_files_beside_it_exist_and_its_image_is_built_once_from_the_host_network(path: Path) -> None:
    built = [one["build"] for one in services(path).values() if "build" in one]

    assert [(one["network"], one["target"] in TARGETS) for one in built] == [("host", True)]
    assert (path.parent / built[0]["context"] / built[0]["dockerfile"]).is_file()
    for one in services(path).values():
        for volume in one.get("volumes", []):
            source = volume.split(":")[0]  # a name, a path beside the file, or a variable that stands for either
            assert not source.startswith(".") or (path.parent / source).is_file(), source


def test_a_command_that_kvbus_lacks_is_noticed() -> None:
    with pytest.raises(AssertionError, match="no command sing"):
        parse(["sing"])
    with pytest.raises(click.NoSuchOption):
        parse(["worker", "--instance", "a", "--sing"])


def stage_of(text: str, name: str) -> str:
    """One stage of a Dockerfile, without its comments."""
    stage = text[text.index(f" AS {name}\n") :].split("\nFROM ", maxsplit=1)[0]
    return re.sub(r"^#.*\n?", "", stage, flags=re.MULTILINE)


def test_the_image_stands_on_a_base_image_runs_as_a_user_without_rights_and_checks_its_health() -> None:
    text = (COMPOSE / "Dockerfile").read_text(encoding="utf-8")
    stages = {found[1]: found[0] for found in re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)}

    assert stages == {
        **dict.fromkeys(("base", "lists", "wanted"), "python:3.11-slim-bookworm"),
        **dict.fromkeys(("build", "torch"), "wanted"),
        **dict.fromkeys(TARGETS, "base"),
    }
    for name in TARGETS:
        assert re.findall(r"^USER (\S+)", stage_of(text, name), re.MULTILINE)[-1] == "kvbus"
    assert re.search(r"^HEALTHCHECK .*CMD", stage_of(text, "base"), re.MULTILINE)
    assert "PIP_CONSTRAINT=/src/constraints.txt" in stage_of(text, "wanted")
    assert {name for name in stages if "pip" in stage_of(text, name)} == {"wanted", "build", "torch"}
    assert "transformers" not in re.sub(r"^#.*$", "", text, flags=re.MULTILINE).split(" AS kvbus\n")[0]


def test_a_change_of_kvbus_itself_makes_no_layer_anew_in_which_something_is_fetched() -> None:
    text = (COMPOSE / "Dockerfile").read_text(encoding="utf-8")
    build = stage_of(text, "build")

    assert not any("COPY kvbus" in stage_of(text, name) for name in ("base", "lists", "wanted", "torch"))
    assert build.rindex(" install --quiet --target /opt/build ") < build.index("COPY kvbus")
    assert "--no-deps --no-build-isolation" in build[build.index("COPY kvbus") :]
    for name, below in zip(TARGETS, ("wanted", "torch"), strict=True):
        assert re.findall(r"^COPY --from=(\S+)", stage_of(text, name), re.MULTILINE) == [below, "build"]


def test_what_the_image_copies_is_there_and_is_let_through_to_the_builder() -> None:
    text = (COMPOSE / "Dockerfile").read_text(encoding="utf-8")
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for name in line.split()}

    assert copied
    assert copied <= let_through
    for name in copied:
        assert (ROOT / name).exists(), name


class TestHealthCheck:
    def check(self, folder: Path, url: str = "") -> "subprocess.CompletedProcess[str]":
        env = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "KVBUS_HEALTH_URL": url}
        line = [sys.executable, str(COMPOSE / "health.py")]
        return subprocess.run(line, env=env, capture_output=True, text=True, timeout=HEALTH_S, check=False)

    def test_it_speaks_as_clients_do(self) -> None:
        spec = importlib.util.spec_from_file_location("health", COMPOSE / "health.py")
        assert spec is not None
        assert spec.loader is not None
        health = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(health)

        assert encode_frame("hello", 0, {"role": "client"}) == len(health.HELLO).to_bytes(4, "little") + health.HELLO
        welcome, refusal = encode_frame("welcome", 0, {}), encode_frame("error", 0, {"kind": "refused", "text": "full"})
        assert [word in frame for word, frame in zip(health.ANSWERS, (welcome, refusal), strict=True)] == [True, True]

    async def test_a_worker_that_answers_is_well(self) -> None:
        with tempfile.TemporaryDirectory() as name:  # a socket's path is short
            folder = Path(name)
            assert "no worker listens here" in self.check(folder).stderr
            port = EnginePort(folder / "kvbus-7" / "a.m0.sock", SmallDesk(), lambda _hello: None, lambda _reason: None)
            await port.start()

            async def is_well() -> bool:
                ran = await asyncio.to_thread(self.check, folder)
                return (ran.returncode, ran.stderr) == (0, "")

            try:
                await until(is_well, HEALTH_S, what="it answers")
                assert port.statistics().broken == 0
            finally:
                await port.close()

    def test_a_worker_that_hangs_speaks_another_language_or_has_ended_is_not_well(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            path = folder / "kvbus-7" / "a.m0.sock"
            path.parent.mkdir()
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path))
                server.listen()  # the kernel takes connections, and nobody reads
                hangs = self.check(folder)
                server.accept()[0].close()  # that one is over
                thread = threading.Thread(target=answer_once, args=(server, encode_frame("token", 0, {"ids": b""})))
                thread.start()
                odd = self.check(folder)
                thread.join()
            ended = self.check(folder)

        assert [ran.returncode for ran in (hangs, odd, ended)] == [1, 1, 1]
        assert "does not answer within 2 s" in hangs.stderr
        assert "no answer of a worker" in odd.stderr
        assert str(path) in ended.stderr

    @pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1)])
    def test_a_gateway_is_well_while_it_says_so(self, tmp_path: Path, status: int, expected: int) -> None:
        with gateway_that_says(status) as url:
            assert self.check(tmp_path, url).returncode == expected


def answer_once(server: socket.socket, frame: bytes) -> None:
    """Answer the next connection with these bytes, whatever it says."""
    connection, _ = server.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(frame)


@contextmanager
def gateway_that_says(status: int) -> Iterator[str]:
    class Door(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_words: object) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Door) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/ready"
        finally:
            server.shutdown()
            thread.join()
