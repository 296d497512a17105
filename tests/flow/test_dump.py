"""A dump of a running town: it is read by audit and story, and holds neither prompts nor secrets."""

import gzip
import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.commands.dump import write
from kvbus.commands.dumping import Dump
from kvbus.commands.recordings import LOGS_NAME, read_record
from tests.flow.command_line import COMMAND_S, Up, kvbus, up
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

PROMPT = "the secret recipe of the house, which nobody but the cook may know: " * 3
KEPT_BACK = "a-value-that-must-stay-here"


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Up]:
    with up(folder) as one:
        staged = kvbus("stage", "--from", "a", "--to", "b", PROMPT, state=one.state)
        assert staged.returncode == 0, staged.stderr
        yield one


@pytest.fixture(scope="module")
def dumped(running: Up) -> "tuple[Path, subprocess.CompletedProcess[str]]":
    path = running.state / "dump.tar.gz"
    env = {"KVBUS_ENGINE_OPTIONS": KEPT_BACK, "UCX_TLS": "self,sm,tcp"}
    told: list[subprocess.CompletedProcess[str]] = []

    def is_whole() -> bool:
        told.append(kvbus("dump", "-o", str(path), "--json", state=running.state, env=env))
        return told[-1].returncode == 0 and not json.loads(told[-1].stdout)["missing"]

    wait_until(is_whole, COMMAND_S, what="no part was too busy to be dumped")
    return path, told[-1]


def contents(path: Path) -> dict[str, bytes]:
    """The files of an archive, what is compressed in it unpacked."""
    with tarfile.open(path) as archive:
        files = {entry.name.partition("/")[2]: archive.extractfile(entry) for entry in archive}
        read = {name: file.read() for name, file in files.items() if file is not None}
    return read | {name.removesuffix(".gz"): gzip.decompress(data) for name, data in read.items() if name[-3:] == ".gz"}


def test_a_dump_says_what_is_in_it_and_is_for_its_owner_only(
    dumped: "tuple[Path, subprocess.CompletedProcess[str]]",
) -> None:
    path, told = dumped
    assert told.returncode == 0, told.stderr
    document = json.loads(told.stdout)
    assert document["missing"] == {}
    assert path.stat().st_mode & 0o777 == 0o600
    files = contents(path)
    readme = files["README.txt"].decode()
    for name in document["files"]:
        assert f"{name}: " in readme
    host = json.loads(files["host.json"])
    assert host["environment"]["UCX_TLS"] == "self,sm,tcp"
    assert host["environment"]["KVBUS_ENGINE_OPTIONS"] == "(set)"
    assert {one["instance"] for one in json.loads(files["registry.json"])} == {"a", "b"}
    members = json.loads(files["members.json"])
    assert members["b"]["settled"] == 1
    assert members["a/m0"][0]["leases_held"] == 0
    streams = json.loads(files["streams.json"])
    assert streams["KVB_FACTS"]["state"]["messages"] > 0
    assert streams["dst-b"]["config"]["ack_policy"] == "explicit"
    checks = {(one["group"], one["name"]) for one in json.loads(files["doctor.json"])["checks"]}
    assert {("transports", "ucx"), ("broker", "server")} <= checks


def test_a_dump_holds_neither_prompts_nor_secrets(
    running: Up, dumped: "tuple[Path, subprocess.CompletedProcess[str]]"
) -> None:
    path, _ = dumped
    token = json.loads(running.state_file.read_text())["token"]
    assert len(token) > 8
    tokens = b"".join(ord(sign).to_bytes(4, "little") for sign in PROMPT[:32])
    for name, data in contents(path).items():
        for secret in (token.encode(), KEPT_BACK.encode(), PROMPT[:24].encode(), tokens):
            assert secret not in data, name


def test_audit_and_story_read_a_dump_as_it_is(
    running: Up, dumped: "tuple[Path, subprocess.CompletedProcess[str]]"
) -> None:
    path, _ = dumped
    audited = kvbus("audit", str(path), state=running.state)
    assert (audited.returncode, "clean" in audited.stdout) == (0, True), audited.stdout + audited.stderr
    transfer = next(event.body.transfer for event in read_record(path).events() if event.header.k == "transfer_outcome")  # type: ignore[union-attr]
    told = kvbus("story", transfer, "--file", str(path), state=running.state)
    assert told.returncode == 0, told.stderr
    assert "returned exactly once" in told.stdout


def test_a_dump_of_a_short_time_leaves_older_events_out_and_without_a_broker_it_says_what_is_missing(
    running: Up, tmp_path: Path
) -> None:
    path = tmp_path / "short.tar.gz"
    told = kvbus("dump", "-o", str(path), "--since", "0", state=running.state)
    assert told.returncode == 0, told.stderr
    assert not [event for event in read_record(path).events() if event.header.k == "transfer_outcome"]
    alone = kvbus("dump", "-o", str(path), "--nats", "nats://127.0.0.1:1", "--json", state=tmp_path)
    assert alone.returncode == 1
    document = json.loads(alone.stdout)
    assert LOGS_NAME in document["missing"]
    assert "host.json" in contents(path)


def test_an_archive_without_a_recording_is_named_as_none(tmp_path: Path) -> None:
    path = tmp_path / "empty.tar.gz"
    collected = Dump()
    collected.add("host.json", "nothing", {})
    write(path, collected)
    told = kvbus("audit", str(path), state=tmp_path)
    assert told.returncode == 2
    assert "is no recording" in told.stderr
    path.write_bytes(path.read_bytes()[:40])
    assert kvbus("audit", str(path), state=tmp_path).returncode == 2
