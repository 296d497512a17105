"""The dashboard, the alerts and the pages about them name what there is, and promtool takes all of it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbus.metrics import table
from kvbus.metrics.reading import Kind
from scripts import make_metrics
from tests.exposed import promtool

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "compose" / "grafana" / "kvbus.json"
PROMETHEUS = ROOT / "compose" / "prometheus"
OPERATIONS = ROOT / "docs" / "operations.md"
NAME = re.compile(r"\bkvbus_\w+")

KNOWN = {
    name
    for metric in (
        *table.MEMBER, *table.PRESENCE, *table.INFO, *table.GATE, *table.GATEWAY, *table.HTTP, *table.BUILD,
    )
    for name in (
        [f"{metric.name}{part}" for part in ("_bucket", "_sum", "_count")]
        if metric.kind is Kind.HISTOGRAM
        else [metric.name]
    )
}  # fmt: skip
WANTED = {
    "KvbusQuarantineGrowing", "KvbusRetainedLeasesOld", "KvbusDomainStopped", "KvbusHeartbeatSilent",
    "KvbusOutboxFilling",
}  # fmt: skip


def expressions(document: object) -> Iterator[str]:
    """Every query that stands in a document."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key in {"expr", "definition"}:
                yield str(value)
            else:
                yield from expressions(value)
    elif isinstance(document, list):
        for one in document:
            yield from expressions(one)


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((PROMETHEUS / "rules.yml").read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text(encoding="utf-8")))


def test_the_page_of_metrics_says_what_the_table_says() -> None:
    text = (ROOT / make_metrics.PAGE).read_text(encoding="utf-8")
    assert make_metrics.page(text) == text, "run scripts/make_metrics.py"
    with pytest.raises(ValueError, match="0 generated parts"):
        make_metrics.page("# nothing\n")
    shown = set(re.findall(r"^\| `(kvbus_\w+)`", text, re.MULTILINE))
    assert {name.removesuffix("_bucket") for name in KNOWN if not name.endswith(("_sum", "_count"))} == shown


def test_each_name_in_the_dashboard_and_in_the_alerts_is_that_of_a_metric() -> None:
    for what, found in (
        ("the dashboard", list(expressions(dashboard()))),
        ("an alert", [str(rule["expr"]) for rule in rules()]),
    ):
        names = {name for text in found for name in NAME.findall(text)}
        assert len(names) >= 15, f"{what} names {len(names)} metrics"
        assert names - KNOWN == set(), f"{what} names what is not there"


def test_the_dashboard_shows_what_a_person_looks_for_first() -> None:
    shown = " ".join(expressions(dashboard()))
    for name in (
        "kvbus_member_up", "kvbus_transfers_total", "kvbus_transfer_duration_seconds_bucket", "kvbus_pool_pages",
        "kvbus_transferred_bytes_total", "kvbus_leases_held", "kvbus_leases_oldest_age_seconds", "kvbus_outbox_bytes",
        "kvbus_binding_ends_total", "kvbus_requests_refused_total", "kvbus_gateway_http_requests_total",
    ):  # fmt: skip
        assert name in shown, name
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
    for panel in panels:
        assert all((panel["title"], panel["description"], panel["targets"])), panel["title"]


def test_promtool_takes_each_query_of_the_dashboard(tmp_path: Path) -> None:
    found = [one for one in expressions(dashboard()) if not one.startswith("label_values(")]
    recorded = [
        {"record": f"panel:query{place}", "expr": as_prometheus(one)} for place, one in enumerate(sorted(set(found)))
    ]
    path = tmp_path / "dashboard.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}), encoding="utf-8")
    assert f"{len(recorded)} rules found" in promtool("check", "rules", str(path))


def test_promtool_takes_the_alerts_and_the_scrapes() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(PROMETHEUS / "rules.yml"))
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    assert all(job["honor_labels"] for job in config["scrape_configs"])


def test_each_alert_fires_on_what_it_is_for_and_on_nothing_else() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(PROMETHEUS / "rules_test.yml"))
    document = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text(encoding="utf-8"))
    tries = [one["alert_rule_test"][0] for one in document["tests"]]
    tried = {one["alertname"] for one in tries if one["exp_alerts"]}
    assert tried == {rule["alert"] for rule in rules()} >= WANTED


def test_each_alert_leads_to_the_section_of_its_name() -> None:
    headings = re.findall(r"^### (.+)$", OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-"): heading for heading in headings}
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "docs/operations.md"
        assert anchor in anchors, f"{rule['alert']} leads to no section"
        spoken = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", rule["alert"].removeprefix("Kvbus")).lower()
        assert spoken == anchor


def as_prometheus(expression: str) -> str:
    """A query with Grafana's variables filled in."""
    return expression.replace("$__rate_interval", "1m").replace("$instance", ".*")
