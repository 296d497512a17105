"""What the headers of compose files promise, where nothing goes wrong but what the file itself is about."""

import json
import shutil
from functools import partial
from typing import Any

from tests.cluster.actors import Actors, prompt
from tests.cluster.stack import MODELS, UP_S, Document
from tests.cluster.story import BLOCKS, SLOW_BLOCKS
from tests.tiny_llama import make_tiny_llama

TRAFFIC_S = 90.0
"""Until steady traffic is seen; the workers have to be healthy first."""
ASKED_LEAST = 50
"""Of rolling-restart.yaml: the restarts of three workers last far longer than that takes."""
LOADED_S = 120.0
"""A tiny model is loaded within seconds; to import torch takes most of it."""
FAILURES_TOLD = 5
"""Of steady traffic: many say the same."""
SLOWEST_BLOCKS = 60
"""3.9 MB at the 0.3 MB/s of slow-peer.yaml: 13 s, in which a busy machine asks for one quick transfer too."""
_STRANGER = """
from pathlib import Path
from kvbus.bus_access import new_credential
from kvbus.permissions import User
path = Path("/tmp/stranger.cred")
path.touch(0o600)
path.write_text(new_credential(User("operator", "stranger"), "kv").text())
"""
INTRUDERS = {
    "a stranger with a key of its own": (
        f"python -c '{_STRANGER}'; kvbus audit --credentials /tmp/stranger.cred 2>&1",
        "refused these credentials",
    ),
    "somebody without a key": ("env -u KVBUS_NATS_CREDENTIALS kvbus audit 2>&1", "refused these credentials"),
    "somebody who speaks in the clear": (
        "env -u KVBUS_NATS_CREDENTIALS -u KVBUS_NATS_TLS_CA kvbus audit --nats nats://nats:4222 2>&1",
        "certificate",
    ),
}
"""Lines of shell in a container that reaches the broker, each with what it is refused with."""
UCX_PORTS = 2
"""UCX listens once where a worker lends, and once where it reads."""
MODEL = "smollm2-135m-instruct"
"""The name under which the image looks for a model; the story puts a tiny one there."""


def quickstart(actors: Actors) -> None:
    """What the file's header promises."""
    actors.stack.compose("up", "--detach", "--no-build", "--wait", wait_s=UP_S)  # all of them pass their checks
    actors.until_counted("b", "transfers_settled", 1, TRAFFIC_S)
    actors.row.check(actors.stack.fetch("gateway", 8080, "/ready")["ready"], "the gateway says that it is not ready")
    actors.row.check(actors.stack.page("gateway", 8080, "/"), "the gateway has no page")
    _end_of_traffic(actors, "traffic")
    for source, destination in (("a", "b"), ("b", "a")):
        text = prompt(BLOCKS)
        actors.transfer(source, destination, text)
        actors.compare(destination, text, from_pages=True)
    _took_sockets(actors, ["a", "b"])
    doctor = actors.stack.kvbus_apart("doctor")
    actors.row.check(doctor["ok"], f"doctor in a container: {doctor['first']}")


def worker_restarts(actors: Actors) -> None:
    """The destination is killed and comes back empty under its name; what was asked for meanwhile waits for it."""
    actors.until_healthy(["a", "b"])
    text = prompt(BLOCKS)
    actors.transfer("a", "b", text)
    actors.stack.kill("b")
    later = prompt(BLOCKS)
    asked = actors.ask("a", "b", later)
    actors.stack.fault("start", "b")
    actors.await_end(asked)
    actors.until_healthy(["b"])
    actors.compare("b", later, from_pages=True)
    actors.compare("b", text, from_pages=False)


def slow_peer(actors: Actors) -> None:
    """While one instance reads slowly, transfers to another one begin and end."""
    actors.until_healthy(["a", "b", "slow"])
    slow, before = prompt(SLOWEST_BLOCKS), actors.orders("slow")
    asked = actors.ask("a", "slow", slow)
    actors.until_moving("slow", before)
    meanwhile = 0
    for _ in range(3):
        text = prompt(4)
        actors.transfer("a", "b", text)
        meanwhile += actors.counter("slow", "transfers_running")
        actors.compare("b", text, from_pages=True)
    actors.row.check(meanwhile, "the slow transfer ended before the first quick one")
    actors.row.notes.append(f"{meanwhile} of 3 quick transfers began and ended while the slow one ran")
    actors.await_end(asked)
    actors.compare("slow", slow, from_pages=True)


def rolling_restart(actors: Actors) -> None:
    """Three workers are restarted one after the other under 20 requests a second: none fails."""
    workers = ["a", "b", "c"]
    actors.until_healthy(workers)
    actors.until_counted("b", "transfers_settled", 20, TRAFFIC_S)
    for service in workers:
        actors.stack.fault("restart", service)
        actors.until_healthy([service])
    told = _end_of_traffic(actors, "traffic")
    actors.row.check(told["asked"] >= ASKED_LEAST, f"only {told['asked']} requests were asked for")
    actors.row.check(not told["skipped"], f"{told['skipped']} requests were not asked for: too many were running")
    rate = told["asked"] / told["took_s"]
    actors.row.notes.append(f"{told['asked']} requests, {rate:.1f} a second, {told['repeats']} tries beyond the first")


def drain(actors: Actors) -> None:
    """One of three instances finishes what runs, takes nothing new, and leaves in order; the others go on."""
    actors.until_healthy(["a", "b", "c"])
    running, before = prompt(SLOW_BLOCKS), actors.orders("b")
    asked = actors.ask("a", "b", running)
    actors.until_moving("b", before)
    for words in (("drain", "b", "--stay"), ("drain", "b")):
        draining = actors.stack.start_kvbus(*words)
        said, told = draining.communicate(timeout=TRAFFIC_S)
        actors.row.check(draining.returncode == 0, f"{words} ended with {draining.returncode}: {said} {told}")
        if "--stay" in words:
            actors.await_end(asked)
            actors.refuse("a", "b", prompt(4), "draining")
    actors.until(lambda: actors.stack.health("b") == "exited", TRAFFIC_S, "b has left")
    status = actors.stack.inspect("b")["State"]["ExitCode"]
    actors.row.check(status == 0, f"b left with status {status}")
    for source, destination in (("a", "c"), ("c", "a")):
        text = prompt(BLOCKS)
        actors.transfer(source, destination, text)
        actors.compare(destination, text, from_pages=True)


def auth(actors: Actors) -> None:
    """Transfers settle with the rights of each, others' rights are refused, and workers listen for UCX alone."""
    actors.until_healthy(["a", "b"])
    for source, destination in (("a", "b"), ("b", "a")):
        text = prompt(BLOCKS)
        actors.transfer(source, destination, text)
        actors.compare(destination, text, from_pages=True)
    checked = actors.stack.kvbus("auth", "check")
    actors.row.check(checked.get("ok"), f"auth check: {checked}")
    for who, (line, refusal) in INTRUDERS.items():
        said = actors.stack.tool("sh", "-c", f"{line}; echo status $?")
        turned_away = refusal in said.lower() and not said.rstrip().endswith("status 0")
        actors.row.check(turned_away, f"{who} was not turned away by the broker: {said}")
    for service in ("a", "b"):
        ports = actors.stack.ask(service, "listening")["ports"]
        address = actors.stack.address(service)
        actors.row.check(len(ports) <= UCX_PORTS, f"{service} listens on {ports}, expected UCX's alone")
        inner = [one for one in ports if one["address"].startswith("127.")]
        actors.row.check(not inner, f"{service} listens on {inner}, where no peer comes")
        actors.row.notes.append(f"{service} listens on {[one['port'] for one in ports]} of {address}")


def cluster(actors: Actors) -> None:
    """The whole deployment: both requesters' transfers settle, and Prometheus hears all that it should."""
    actors.until_healthy(["a", "b", "c", "d", "gateway"])
    for service in ("a", "b", "c", "d"):
        actors.until_counted(service, "transfers_settled", 3, TRAFFIC_S)
    actors.until(lambda: _targets(actors) == {"up"}, TRAFFIC_S, "Prometheus reaches all its targets")
    actors.until(lambda: _rules(actors) and not _of_health(actors, "unknown"), TRAFFIC_S, "each rule was evaluated")
    bad = _of_health(actors, "err")
    actors.row.check(not bad, f"Prometheus cannot evaluate {bad}")
    actors.until(lambda: not _alarmed(actors), TRAFFIC_S, "no alert is pending where nothing is wrong")
    for service in ("requester-1", "requester-2"):
        _end_of_traffic(actors, service)
    text = prompt(BLOCKS)
    actors.transfer("a", "d", text)
    actors.compare("d", text, from_pages=True)
    _took_sockets(actors, ["a", "b", "c", "d"])


def _took_sockets(actors: Actors, services: list[str]) -> None:
    """Check that these workers read by the way that the file's header names; the planner may try another one beside."""
    for service in services:
        counters = actors.stack.ask(service, "counters")
        taken = {name: n for name, n in counters.items() if name.startswith("ways_by_") and n}
        actors.row.check("ways_by_socket" in taken, f"{service} read by {taken}, and by no plain socket")


def _rules(actors: Actors) -> list[Document]:
    groups = actors.stack.fetch("prometheus", 9090, "/api/v1/rules")["data"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _of_health(actors: Actors, health: str) -> list[str]:
    return [str(rule["name"]) for rule in _rules(actors) if rule["health"] == health]


def _alarmed(actors: Actors) -> list[str]:
    return [str(rule["name"]) for rule in _rules(actors) if rule.get("state", "inactive") != "inactive"]


def _targets(actors: Actors) -> set[str]:
    told = actors.stack.fetch("prometheus", 9090, "/api/v1/targets")["data"]["activeTargets"]
    return {one["health"] for one in told}


def transformers(actors: Actors) -> None:
    """A real model, made tiny here: pages move, and the answer is the one that was computed without them."""
    actors.until_healthy(["a", "b"])
    text = "The quick brown fox jumps over the lazy dog, and the dog does not care. " * 12
    for service in ("a", "b"):  # a worker listens before its engine has loaded the model
        actors.until(partial(actors.stack.ask, service, "answer", "Hello"), LOADED_S, f"{service} has its model")
    alone = actors.stack.ask("a", "answer", text)
    actors.transfer("a", "b", text)
    moved = actors.stack.ask("b", "answer", text)
    actors.row.answers += 1
    actors.row.wrong += moved["tokens"] != alone["tokens"]
    actors.row.check(moved["cached_tokens"], "b answered without a page, although its transfer had settled")


def make_model() -> None:
    """Put a tiny model where the story looks for it."""
    shutil.rmtree(MODELS, ignore_errors=True)
    for file in make_tiny_llama(MODELS / MODEL).iterdir():
        file.chmod(0o644)  # the image's user is another one than ours


def count_traffic(actors: Actors, service: str) -> dict[str, Any]:
    """Tell steady traffic to stop, and count what it did."""
    actors.stack.fault("stop", service)
    told: dict[str, Any] = json.loads(actors.stack.said(service).strip().splitlines()[-1])
    actors.row.transfers += told["asked"]
    actors.row.settled += told["settled"]
    actors.row.lost += told["asked"] - told["settled"]
    actors.row.problems += told["failures"][:FAILURES_TOLD]
    return told


def _end_of_traffic(actors: Actors, service: str) -> dict[str, Any]:
    """Tell steady traffic to stop, and count what it did; compare answers for some of what settled."""
    told = count_traffic(actors, service)
    from_pages = 0
    for destination, text in told["sample"]:  # some may have run again since, with an empty pool
        from_pages += actors.compare(destination, text, from_pages=False) > 0
    actors.row.check(from_pages, "no answer that was compared came from pages")
    return told
