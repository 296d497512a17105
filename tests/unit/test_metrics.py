"""Metrics as words: what a table reads from counters, how values are spread, and that nothing stands there in vain."""

import math
import subprocess
import sys

import pytest

from kvbus.metrics import table
from kvbus.metrics.reading import FOUND_MAX, Kind, Metric, Reading, Section
from kvbus.metrics.rendering import Exposition
from kvbus.roles.spread import SECONDS, Spread
from kvbus.version import VERSION
from tests.exposed import Exposed, well_named

WHO = {"instance": "b", "member": "m0"}
ALL = (
    *table.MEMBER, *table.PRESENCE, *table.INFO, *table.GATE, *table.GATEWAY, *table.HTTP, *table.BUILD,
)  # fmt: skip


def exposed(counted: dict[str, int | float | str], metrics: tuple[Metric, ...] = table.MEMBER) -> Exposed:
    return Exposed(Exposition().render([Section(metrics, [Reading(counted, WHO)])]).decode())


def test_bindings_and_domains_are_found_in_what_was_counted() -> None:
    told = exposed(
        {
            "memory_submissions": 3, "memory_stopped": 0, "memory_ended_completed": 2, "memory_bytes": 7,
            "engine-read_submissions": 1, "engine-read_stopped": 1, "pool0_stopped": 1, "transfers_bytes": 9,
        }
    )  # fmt: skip
    assert told.labels("kvbus_binding_submissions_total", "binding") == {"memory", "engine-read"}
    assert told.value("kvbus_binding_ends_total", binding="memory", evidence="completed") == 2
    assert told.value("kvbus_binding_ends_total", binding="memory", evidence="fenced") == 0
    assert told.value("kvbus_binding_stopped", binding="engine-read") == 1
    assert {one.labels["domain"]: one.value for one in told.of("kvbus_domain_stopped")} == {"pool0": 1}
    assert {one.labels["binding"] for one in told.of("kvbus_binding_bytes_total")} == {"memory"}


def test_an_answer_with_ten_thousand_names_of_its_own_makes_no_more_series_than_a_worker_may_have() -> None:
    hostile: dict[str, int | float | str] = {
        f"{place}-x{sign}": 1 for place in range(10_000) for sign in ("_submissions", "_stopped", "_ended_completed")
    }
    hostile |= {f"d{place}_stopped": 1 for place in range(10_000)}
    hostile |= {f"transfers_failed_reason{place}": 1 for place in range(10_000)}
    hostile |= {'"} evil 1\n_submissions': 1, f"{'x' * 100}_submissions": 1, "transfers_bytes": "many"}
    hostile |= {"leases_held": math.nan, "pages": math.inf, "leases_taken": True}
    told = exposed(hostile)
    assert len(told.labels("kvbus_binding_submissions_total", "binding")) == FOUND_MAX
    assert len(told.labels("kvbus_domain_stopped", "domain")) == FOUND_MAX
    assert told.labels("kvbus_transfer_failures_total", "reason") == set(table.REASONS)
    assert not {"kvbus_leases_held", "kvbus_pool_size_pages", "kvbus_transferred_bytes_total"} & told.names
    assert len(told.samples) < 1_000
    well_named(told)


def test_who_has_counted_nothing_yet_tells_nothing() -> None:
    assert not [name for name in exposed({}).names if name.startswith("kvbus_")]


def test_a_spread_counts_by_the_first_bound_that_is_not_exceeded() -> None:
    spread = Spread("transfers_settled_s", SECONDS)
    for value in (0.001, 0.0011, 0.3, 61.0, 0.3):
        spread.add(value)
    told = exposed(spread.counters())
    name = "kvbus_transfer_duration_seconds"
    so_far = {one.labels["le"]: one.value for one in told.of(f"{name}_bucket")}
    assert (so_far["0.001"], so_far["0.0025"], so_far["0.25"], so_far["0.5"]) == (1, 2, 2, 4)
    assert (so_far["60"], so_far["+Inf"], told.value(f"{name}_count")) == (4, 5, 5)
    assert told.value(f"{name}_sum") == pytest.approx(61.6021)
    assert len(so_far) == len(SECONDS) + 1
    well_named(told)


def test_each_metric_has_a_name_of_its_own_and_says_its_unit() -> None:
    names = [metric.name for metric in ALL]
    assert len(set(names)) == len(names)
    for metric in ALL:
        assert (metric.name.endswith("_total")) is (metric.kind is Kind.COUNTER), metric.name
        if metric.counter.endswith("_s") or metric.counter.endswith("_bytes"):
            assert "seconds" in metric.name or "bytes" in metric.name, metric.name


def test_promtool_has_nothing_to_say_of_any_name() -> None:
    # Every metric that there is, with a value.
    counted: dict[str, int | float | str] = {"memory_submissions": 1, "memory_stopped": 0, "pool0_stopped": 0}
    for metric in ALL:
        for bound in metric.bounds:
            counted |= Spread(metric.counter, metric.bounds).counters() if bound else {}
        words = {label: (metric.words.get(label) or ({"binding": "memory", "domain": "pool0"}[label],))[0]
                 for label in metric.labels}  # fmt: skip
        counted.setdefault(metric.counter.format(**words), 1)
    sections = [Section(metrics, [Reading(counted, WHO)]) for metrics in (ALL,)]
    told = Exposed(Exposition().render(sections).decode())
    assert told.names >= {metric.name for metric in ALL}
    well_named(told)


# R23
def test_who_does_not_ask_for_metrics_does_not_import_them() -> None:
    code = (
        "import sys, threading\n"
        "import kvbus.commands.worker, kvbus.worker, kvbus.gateway.serving, kvbus.commands.up\n"
        "found = [name for name in sys.modules if name.startswith('prometheus_client')]\n"
        "found += [name for name in sys.modules if name in ('kvbus.metrics.serving', 'kvbus.metrics.rendering')]\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "sys.exit(f'imported: {found}' if found else 0)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_process_says_what_it_costs_beside() -> None:
    told = Exposed(Exposition().render([Section(table.BUILD, [Reading({"one": 1}, {"version": VERSION})])]).decode())
    assert told.value("process_resident_memory_bytes") > 1e6
    assert told.value("kvbus_build_info", version=VERSION) == 1
