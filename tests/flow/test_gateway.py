"""HTTP in front of real workers: `kvbus up` with its gateway, used as `curl` would use it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvbus.engines.client import LocalClient
from kvbus.events import InstanceRecord
from kvbus.gateway.directory import Directory
from kvbus.gateway.sources import source_of
from tests.flow.command_line import COMMAND_S, Up, descendants, environment, kvbus, up
from tests.flow.town import BLOCK, FAST, as_text, prompt, town
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Up]:
    folder.chmod(0o700)
    with up(folder, "--transport", "memory") as started:
        yield started
        assert started.process.poll() is None


@pytest.fixture
def b(running: Up) -> Iterator[httpx.Client]:
    """A client of instance b's own base URL."""
    with httpx.Client(base_url=f"{running.document['http_url']}/instances/b", timeout=60) as client:
        yield client


def ask(client: httpx.Client, **body: object) -> dict[str, Any]:
    answered = client.post("/v1/kv_transfer", json={"source": "a", **body})
    assert answered.status_code == 202, answered.text
    return dict(answered.json())


def ended(client: httpx.Client, request_hash: str) -> dict[str, Any]:
    """How a transfer ended; it is asked again where it runs longer than one question waits."""
    told: list[dict[str, Any]] = []

    def has_ended() -> bool:
        answered = client.get(f"/v1/kv_transfer/{request_hash}", params={"wait_s": 30})
        assert answered.status_code == 200, answered.text
        told.append(dict(answered.json()))
        return told[-1]["status"] not in {"asking", "queued", "running"}

    wait_until(has_ended, COMMAND_S, what="the transfer has ended")
    return told[-1]


def cached_pages(client: httpx.Client) -> int:
    """Pages in the cache of the instance's first member; a member that is too busy to answer is asked again."""
    answers: list[httpx.Response] = []

    def answered() -> bool:
        answers.append(client.get("/v1/kv_cache"))
        if answers[-1].status_code == 200:
            return True
        assert answers[-1].status_code == 503, answers[-1].text
        assert "does not answer" in answers[-1].json()["error"], answers[-1].text
        return False

    wait_until(answered, COMMAND_S, what="the members answer about their caches")
    return int(answers[-1].json()["members"]["m0"]["pages_cached"])


# H13, H14, H16, H29, H34
def test_a_transfer_by_http_settles_and_the_counters_add_up(b: httpx.Client) -> None:
    before = b.get("/v1/kv_transfer/stats").json()
    said = ask(b, prompt=prompt("settles", 3, extra=5))
    told = ended(b, said["request_hash"])

    assert (said["status"], told["status"]) == ("accepted", "transferred")
    assert told["pages"] == {"wanted": 3, "held": 0, "moved": 3}
    assert told["prompt_tokens"] == 3 * BLOCK + 5
    assert told["bytes"] == 3 * 65536
    assert told["evidence"] == ["completed"]
    assert told["timings"]["total_s"] > 0
    after = b.get("/v1/kv_transfer/stats").json()
    assert after["fired"] == before["fired"] + 1
    assert after["fired"] == after["transferred"] + after["failed"] + after["inflight"]
    assert ask(b, prompt=prompt("settles", 3, extra=5))["status"] == "deduped"


# H14
def test_text_and_messages_are_tokenized_where_they_arrive(b: httpx.Client) -> None:
    text = as_text(prompt("text", 2))
    assert ended(b, ask(b, prompt=text)["request_hash"])["pages"]["wanted"] == 2
    messages = [{"role": "user", "content": text}]
    assert ended(b, ask(b, messages=messages)["request_hash"])["status"] == "transferred"


# H32, H36
def test_what_the_source_lacks_fails_that_request_alone_and_says_so(b: httpx.Client) -> None:
    ids = prompt("missing", 2)
    told = ended(b, ask(b, prompt=ids, on_miss="fail")["request_hash"])
    assert (told["status"], told["failure"]) == ("failed", "source_misses")
    assert "a holds 0 of the 2 blocks" in told["reason"]

    assert ended(b, ask(b, prompt=ids)["request_hash"])["status"] == "transferred"  # H17: at once, and with prefill


# H28, H33
def test_a_pull_of_what_the_source_has_needs_no_prefill_and_takes_a_prefix(running: Up, b: httpx.Client) -> None:
    ids, longer = prompt("prefix", 4), [*prompt("prefix", 4)[: 2 * BLOCK], *prompt("other end", 2)]
    sockets = running.document["sockets"]
    assert isinstance(sockets, dict)
    with LocalClient(Path(sockets["a"])) as a, LocalClient(Path(sockets["b"])) as local:
        said = a.generate(ids=ids[: 2 * BLOCK], max_tokens=1, store=True)
        assert said.end.cached_tokens == 0
        told = ended(b, ask(b, prompt=longer, on_miss="partial")["request_hash"])
        assert (told["status"], told["pages"]) == ("transferred", {"wanted": 4, "held": 0, "moved": 2})

        a.generate(ids=ids, max_tokens=1, store=True)
        told = ended(b, ask(b, prompt=ids, on_miss="fail")["request_hash"])
        assert (told["status"], told["pages"]) == ("transferred", {"wanted": 4, "held": 2, "moved": 2})

        cold = a.generate(ids=ids, max_tokens=8, store=False, reuse=False).end
        staged = local.generate(ids=ids, max_tokens=8, store=False).end
        assert staged.cached_tokens == 4 * BLOCK
        assert staged.tokens == cold.tokens


# H15
def test_a_prompt_that_the_destination_cannot_take_fails_with_its_words(b: httpx.Client) -> None:
    told = ended(b, ask(b, prompt=[97] * 4_000)["request_hash"])
    assert (told["status"], told["failure"]) == ("failed", "bad_request")
    assert "the prompt has 4000 tokens" in told["reason"]


def test_a_cancel_by_http_stops_a_transfer_or_comes_too_late(b: httpx.Client) -> None:
    said = ask(b, prompt=prompt("cancelled", 40))
    answered = b.delete(f"/v1/kv_transfer/{said['request_hash']}")
    assert answered.status_code in {202, 409}
    told = ended(b, said["request_hash"])
    assert told["status"] in {"cancelled", "transferred"}
    stats = b.get("/v1/kv_transfer/stats").json()
    assert stats["fired"] == stats["transferred"] + stats["failed"] + stats["inflight"]


def test_a_transfer_of_the_command_line_is_seen_over_http_and_joined_by_it(running: Up, b: httpx.Client) -> None:
    text = as_text(prompt("from the command line", 2))
    staged = json.loads(kvbus("stage", "--from", "a", "--to", "b", "--json", text, state=running.state).stdout)
    wait_until(lambda: b.get(f"/v1/kv_transfer/{staged['request_hash']}").status_code == 200, COMMAND_S)
    assert ended(b, staged["request_hash"])["transfer"] == staged["transfer"]
    said = ask(b, prompt=text)
    assert (said["status"], said["request_hash"]) == ("deduped", staged["request_hash"])


def test_a_client_that_follows_hears_of_a_transfer_step_by_step(running: Up, b: httpx.Client) -> None:
    with httpx.stream("GET", f"{running.document['http_url']}/v1/kv_transfer/events", timeout=60) as following:
        lines = following.iter_lines()
        assert next(lines) == ": kvbus"
        said = ask(b, prompt=prompt("followed", 2))
        steps: list[str] = []
        for line in lines:
            told = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if told.get("request_hash") == said["request_hash"]:
                steps.append(str(told.get("step", told.get("outcome"))))
                if steps[-1] == "settled":
                    break
    assert [step for step in steps if step in {"accepted", "moving", "settled"}] == ["accepted", "moving", "settled"]


def test_it_says_that_it_is_ready_and_describes_itself(running: Up) -> None:
    url = str(running.document["http_url"])
    assert httpx.get(f"{url}/ready", timeout=60).json() == {"ready": True, "missing": []}
    assert httpx.get(f"{url}/health", timeout=60).json()["status"] == "ok"
    assert httpx.get(f"{url}/openapi.json", timeout=60).json()["openapi"] == "3.1.0"
    assert httpx.get(f"{url}/docs", timeout=60).status_code == 200


def test_up_without_http_starts_no_gateway(folder: Path) -> None:
    state = folder / "plain"
    state.mkdir(mode=0o700)
    with up(state, "--no-http") as plain:
        assert "http_url" not in plain.document
        assert not any(b"gateway" in command_of(pid) for pid in descendants(plain.process.pid))


def test_with_users_at_the_broker_the_gateway_enters_as_a_requester_and_serves_all_the_same(folder: Path) -> None:
    state = folder / "guarded"
    state.mkdir(mode=0o700)
    with (
        up(state, "--auth", "--transport", "memory") as guarded,
        httpx.Client(base_url=f"{guarded.document['http_url']}/instances/b", timeout=60) as client,
    ):
        told = ended(client, ask(client, prompt=prompt("guarded", 2))["request_hash"])
        assert told["status"] == "transferred"
        assert cached_pages(client) == 2
        story = httpx.get(f"{guarded.document['http_url']}/v1/transfers/{told['transfer']}/story", timeout=60).json()
        assert story["note"] == ""  # it would say that decisions are missing
        assert "settle" in {event["kind"] for event in story["events"]}


def test_a_gateway_that_dies_ends_up_and_says_so(folder: Path) -> None:
    state = folder / "dies"
    state.mkdir(mode=0o700)
    with up(state) as one:
        (gateway,) = [pid for pid in descendants(one.process.pid) if b"gateway" in command_of(pid)]
        os.kill(gateway, signal.SIGKILL)
        assert one.process.wait(COMMAND_S) == 1
        wait_until(one.nothing_left, COMMAND_S, what="nothing is left")
    assert "the gateway was killed by signal 9" in one.said()


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (("--source-allow", "10.0.0.0/8"), {}, "KV_TRANSFER_SOURCE_ALLOW holds an address or a network"),
        ((), {"KV_TRANSFER_SOURCE_ALLOW": "http://u@h"}, "KV_TRANSFER_SOURCE_ALLOW holds an entry that is no source"),
        (("--inflight-max", "-1"), {}, "setting inflight_max does not fit"),
        ((), {"KV_TRANSFER_MAX_INFLIGHT": "many"}, "'many' is not a valid integer"),
        ((), {"KV_TRANSFER_DEDUP_TTL": "-5"}, "setting dedup_ttl_s does not fit"),
        (("--host", "192.0.2.1"), {}, "the gateway cannot listen at 192.0.2.1"),
        (("--nats", "nats://127.0.0.1:1"), {}, "127.0.0.1:1"),
    ],
)
def test_a_gateway_that_cannot_start_says_why_with_status_2(
    running: Up, arguments: tuple[str, ...], env: dict[str, str], words: str
) -> None:
    ran = kvbus("gateway", *arguments, state=running.state, env=env)
    assert ran.returncode == 2, ran
    assert words in ran.stderr.replace("\n", " ")
    assert "Traceback" not in ran.stderr


@contextmanager
def gateway(state: Path, *arguments: str, env: dict[str, str]) -> Iterator[str]:
    """A `kvbus gateway` of its own; gives its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvbus", "gateway", "--json", *arguments],
        env=environment(state, env),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield str(json.loads(process.stdout.readline())["url"])
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(COMMAND_S) == 0
        process.stdout.close()


# H23
async def test_a_worker_that_names_its_url_is_a_source_by_that_url(folder: Path) -> None:
    state = folder / "urls"
    state.mkdir(mode=0o700)
    async with town(state) as two:
        await two.start_again("a", ["--instance", "a", "--engine-options", json.dumps(FAST), "--url", "http://h:8000/"])
        await two.start("b", allow=["a"], backend="memory")
        record = two.registered["a"].record
        assert isinstance(record, InstanceRecord)
        assert record.urls == ("http://h:8000/",)
        directory = Directory(two.bus)
        await directory.refresh()
        assert directory.names_of(source_of("http://H:8000")) == {"a"}

        entering = {"KVBUS_NATS_URL": two.broker.url, "KVBUS_NATS_TOKEN": two.broker.token}
        arguments = ("--instance", "b", "--source-allow", "http://h:8000")
        with gateway(state, *arguments, env=entering) as url:
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                body = {"source": "http://h:8000", "prompt": prompt("by url", 2)}
                said = (await client.post("/v1/kv_transfer", json=body)).json()
                told = await client.get(f"/v1/kv_transfer/{said['request_hash']}", params={"wait_s": 30})
                assert told.json()["status"] == "transferred", told.text
                assert told.json()["source"] == "a"
        await two.at_rest()


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
