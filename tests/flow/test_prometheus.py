"""`kvbus up` under a real Prometheus: each panel of the dashboard has data, each rule is evaluated, no alert fires."""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from kvbus.testing.cluster import free_ports
from tests.absent import absent
from tests.exposed import Exposed, well_named
from tests.flow.command_line import Up, up
from tests.flow.town import prompt
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "compose" / "grafana" / "kvbus.json"
RULES = ROOT / "compose" / "prometheus" / "rules.yml"
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server, asked over its own API."""

    client: httpx.Client

    def query(self, expression: str) -> list[float]:
        """The values of an instant query."""
        answered = self.client.get("/api/v1/query", params={"query": expression}).json()
        assert answered["status"] == "success", (expression, answered)
        return [float(one["value"][1]) for one in answered["data"]["result"]]

    def rules(self) -> list[dict[str, Any]]:
        groups = self.client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[tuple[Up, int]]:
    """A guarded `kvbus up`, in which the gateway has no more than a requester's rights; and its first metrics' port."""
    folder.chmod(0o700)
    first = next(port for port in free_ports(40) if is_free(port + 1))
    with up(folder, "--auth", "--transport", "memory", "--metrics-port", str(first)) as started:
        yield started, first


def is_free(port: int) -> bool:
    """Whether nobody listens there now."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0


@contextmanager
def prometheus(folder: Path, gateway: str) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        absent("prometheus is missing: apt-get install prometheus")
    job = {
        "job_name": "kvbus",
        "honor_labels": True,
        "static_configs": [{"targets": [urlsplit(gateway).netloc]}],
    }
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [job],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [program, f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}",
             f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"],
            stdout=log, stderr=log, cwd=folder,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:

            def is_ready() -> bool:
                assert process.poll() is None, (folder / "prometheus.log").read_text()
                try:
                    return client.get("/-/ready").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(is_ready, WAIT_S, what="prometheus is ready")
            yield Prometheus(client)
    finally:
        process.terminate()
        process.wait(30)


def queries() -> dict[str, list[str]]:
    """What each panel of the dashboard asks, with Grafana's variables filled in."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        panel["title"]: [
            one["expr"].replace("$__rate_interval", "30s").replace("$instance", ".*") for one in panel["targets"]
        ]
        for panel in panels
        if panel["type"] != "row"
    }


# R24
def test_each_panel_has_data_and_no_alert_fires_while_transfers_run(running: tuple[Up, int], tmp_path: Path) -> None:
    url = str(running[0].document["http_url"])
    with prometheus(tmp_path, url) as server, httpx.Client(base_url=url, timeout=60) as client:

        def moved() -> bool:
            """One more transfer, and whether Prometheus has seen one happen."""
            place = len(asked)
            body = {"source": "a", "destination": "b", "prompt": prompt(f"panel {place}", 4)}
            answered = client.post("/v1/kv_transfer", json=body)
            assert answered.status_code == 202, answered.text
            asked.append(answered.json()["request_hash"])
            client.get(f"/instances/b/v1/kv_transfer/{asked[-1]}", params={"wait_s": 30})
            return sum(server.query("rate(kvbus_transfer_duration_seconds_count[30s])")) > 0

        asked: list[str] = []
        wait_until(moved, WAIT_S, what="Prometheus sees transfers")
        wait_until(lambda: all(rule["health"] == "ok" for rule in server.rules()), WAIT_S, what="rules are evaluated")

        # A scrape or a member may be too slow for one second, and answers in the next.
        wait_until(lambda: server.query('up{job="kvbus"}') == [1], WAIT_S, what="the gateway is scraped")
        wait_until(lambda: server.query("count(kvbus_member_up == 1)") == [2], WAIT_S, what="both members answer")
        for title, asks in queries().items():
            for one in asks:
                wait_until(partial(server.query, one), WAIT_S, what=f"panel {title!r} has data for {one}")
        moved()  # what is shown below is of the last thirty seconds
        (median,) = server.query(queries()["Time of a transfer"][0])
        assert 0 < median < 60
        (bytes_s,) = [value for value in server.query(queries()["Bytes per second"][0]) if value]
        assert bytes_s > 0
        assert len(server.rules()) == 16
        assert [rule["name"] for rule in server.rules() if rule["state"] == "firing"] == []
        wait_until(lambda: not pending(server.rules()), WAIT_S, what="no alert is about to fire")


def pending(rules: list[dict[str, Any]]) -> list[str]:
    """The alerts that are not at rest; one that a single late answer has woken goes to sleep with the next one."""
    return [rule["name"] for rule in rules if rule["state"] != "inactive"]


def test_workers_of_up_serve_their_own_metrics_where_that_was_asked_for(running: tuple[Up, int]) -> None:
    started, first = running
    for place, name in enumerate(("a", "b")):
        told = Exposed(httpx.get(f"http://127.0.0.1:{first + place}/metrics", timeout=20).text)
        assert told.value("kvbus_bus_connected", instance=name, member="m0") == 1
        well_named(told)
        assert f"http://127.0.0.1:{first + place}/metrics" in started.said()
