"""`kvbus stage`, `kvbus demo` and the script in docs/, as a person runs them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow.command_line import COMMAND_S, Up, environment, kvbus, up
from tests.flow.town import as_text, prompt

DEMO_KEYS = {
    "engine", "model", "prompt_tokens", "pages", "bytes", "ttft_cold_s", "ttft_staged_s", "speedup",
    "tokens_identical", "poison_detected", "transfer_s", "facts", "ok",
}  # fmt: skip
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Up]:
    folder.chmod(0o700)
    with up(folder) as started:
        yield started
        assert started.process.poll() is None


def stage(
    running: Up, *arguments: str, source: str = "a", destination: str = "b"
) -> "subprocess.CompletedProcess[str]":
    return kvbus("stage", "--from", source, "--to", destination, *arguments, state=running.state)


def test_stage_ends_with_one_line_and_status_0(running: Up) -> None:
    ran = stage(running, as_text(prompt("line", 3)))

    assert ran.returncode == 0, ran
    line = ran.stdout.strip().splitlines()[-1]
    assert line.startswith("settled")
    assert "3 of 3 missing pages, 0.2 MB in " in line
    assert "kvbus story b-" in line


def test_stage_gives_one_document(running: Up) -> None:
    ran = stage(running, "--json", as_text(prompt("document", 3)))

    assert ran.returncode == 0, ran
    document = json.loads(ran.stdout)
    assert set(document) == {"request_hash", "verdict", "reason", "transfer", "outcome"}
    assert document["verdict"] == "accepted"
    assert document["outcome"]["outcome"] == "settled"
    assert document["outcome"]["pages_moved"] == 3
    assert document["outcome"]["transfer"] == document["transfer"]


def test_stage_of_the_same_prompt_again_is_deduped_and_still_a_success(running: Up) -> None:
    text = as_text(prompt("twice", 2))
    first = json.loads(stage(running, "--json", text).stdout)

    ran = stage(running, "--json", text)

    assert ran.returncode == 0, ran
    again = json.loads(ran.stdout)
    assert again["verdict"] == "deduped"
    assert again["outcome"] == first["outcome"]


def test_stage_that_fails_ends_with_status_1_and_says_why(running: Up) -> None:
    ran = stage(running, "--json", "--on-miss", "fail", as_text(prompt("fails", 2)))

    assert ran.returncode == 1, ran
    assert json.loads(ran.stdout)["outcome"]["failure"] == "source_misses"
    assert "a holds 0 of the 2 blocks" in ran.stderr.replace("\n", " ")


def test_stage_from_a_source_that_is_not_allowed_ends_with_status_1(running: Up) -> None:
    ran = stage(running, "--json", "some text", source="stranger")

    assert ran.returncode == 1, ran
    document = json.loads(ran.stdout)
    assert (document["verdict"], document["outcome"]) == ("refused", None)
    assert "stranger" in document["reason"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give exactly one prompt"),
        (["text", "--file", "x"], "give exactly one prompt"),
        ([""], "prompt is empty"),
        (["--file", "/no/such/file"], "cannot be read"),
        (["--file", "{folder}/cut.txt"], "it is no UTF-8 text from byte 2 on"),
        (["--tokens", "{folder}/torn.json"], "cannot be read"),
        (["--tokens", "{folder}/map.json"], "must hold a JSON list"),
        (["--tokens", "{folder}/range.json"], "prompt token 1 must lie in"),
        (["text", "--budget", "0"], "budget_s"),
    ],
)
def test_stage_of_what_is_no_prompt_ends_with_status_2(
    running: Up, tmp_path: Path, arguments: list[str], words: str
) -> None:
    (tmp_path / "cut.txt").write_bytes("ab…".encode()[:-1])
    (tmp_path / "torn.json").write_text("[1, 2")
    (tmp_path / "map.json").write_text("{}")
    (tmp_path / "range.json").write_text("[1, -1]")

    ran = stage(running, *(part.format(folder=tmp_path) for part in arguments))

    assert ran.returncode == 2, ran
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr


def test_stage_to_oneself_ends_with_status_2(running: Up) -> None:
    ran = stage(running, "text", source="b")

    assert ran.returncode == 2, ran
    assert "not its own source" in ran.stderr


def test_stage_takes_a_prompt_from_files(running: Up, tmp_path: Path) -> None:
    ids = prompt("files", 2)
    (tmp_path / "text").write_text(as_text(ids))
    (tmp_path / "ids.json").write_text(json.dumps(prompt("other file", 2)))
    (tmp_path / "chat.json").write_text(json.dumps([{"role": "user", "content": as_text(prompt("chat", 2))}]))

    for arguments in (["--file", "text"], ["--tokens", "ids.json"], ["--messages", "chat.json"]):
        ran = stage(running, "--json", arguments[0], str(tmp_path / arguments[1]))
        assert ran.returncode == 0, ran
        assert json.loads(ran.stdout)["outcome"]["pages_moved"] == 2


def test_the_script_in_the_docs_is_accepted_and_settles(running: Up) -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "request_transfer.py")],
        env=environment(running.state, {"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )

    assert ran.returncode == 0, ran
    assert "accepted" in ran.stdout
    assert "settled" in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ucx", "memory"])
def test_the_toy_demo_holds(tmp_path: Path, backend: str) -> None:
    ran = kvbus("demo", "--engine", "toy", "--json", "--backend", backend, state=tmp_path)

    assert ran.returncode == 0, ran
    document = json.loads(ran.stdout)
    assert set(document) == DEMO_KEYS
    assert document["ok"] is True
    assert document["tokens_identical"] is True
    assert document["poison_detected"] is True
    assert document["engine"] == "toy"
    assert document["pages"] == document["prompt_tokens"] // 32
    assert document["bytes"] == document["pages"] * 65536
    assert document["speedup"] == pytest.approx(document["ttft_cold_s"] / document["ttft_staged_s"])
    kinds = {fact["kind"] for fact in document["facts"]}
    assert {"lease_granted", "attempt", "outcome", "facts", "open", "settle", "transfer_outcome"} <= kinds
    assert {fact["instance"] for fact in document["facts"]} == {"a", "b"}
