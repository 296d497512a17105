"""Medians, spreads, and ratios within each round; what was asked for beside what was found."""

import statistics
from collections.abc import Sequence
from typing import Any

PAIRS = {
    "accept": "raw accept",
    "fact": "raw fact",
    "held durable": "raw durable",
    "leased durable": "raw durable",
    "held urgent": "raw urgent",
    "leased urgent": "raw urgent",
}
"""Latencies, and what stands beside each."""
DURABLE_RATIO_MAX, RATE_MIN, FACTS_MIN, IDLE_MAX = 2.0, 1_000.0, 1e6, 2.0
"""What was asked for: of the raw client's own hops; transfers a second; facts a second; messages a second."""

Taken = dict[str, list[Any]]


def document(taken: Taken, idle: dict[str, object], cpu: dict[str, float], in_flight: Sequence[int]) -> dict[str, Any]:
    """Return everything that was found."""
    latencies = {name: _latency(taken[name]) for name in sorted({*PAIRS, *PAIRS.values()})}
    ratios = {f"{one} / {other}": _ratio(taken[one], taken[other]) for one, other in PAIRS.items()}
    names = ("held", "leased", "raw")
    rates = {f"{name} {number}": _rate(taken[f"{name} {number}"]) for number in in_flight for name in names}
    rates |= {name: _rate(taken[name]) for name in ("facts per s", "raw facts per s")}
    spent = {f"{name} {number}": _spent(taken[f"cpu {name} {number}"]) for number in in_flight for name in names}
    return {
        "latency_us": latencies,
        "ratio": ratios,
        "per_s": rates,
        "cpu_ms_per_transfer": spent,
        "cpu_us_per_1000_facts": cpu,
        "idle": idle,
        "targets": _targets(ratios, rates, idle, max(in_flight)),
    }


def _latency(rounds: list[list[int]]) -> dict[str, float]:
    medians = [statistics.median(one) / 1e3 for one in rounds]
    everything = sorted(value / 1e3 for one in rounds for value in one)
    last = everything[min(len(everything) - 1, int(0.99 * len(everything)))]
    return {"p50": statistics.median(medians), "p99": last, "spread": max(medians) - min(medians)}


def _ratio(ours: list[list[int]], others: list[list[int]]) -> float:
    pairs = zip(ours, others, strict=True)
    return statistics.median(statistics.median(one) / statistics.median(other) for one, other in pairs)


def _rate(rounds: list[float]) -> dict[str, float]:
    return {"p50": statistics.median(rounds), "best": max(rounds), "spread": max(rounds) - min(rounds)}


def _spent(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {who: statistics.median(one[who] for one in rounds) for who in rounds[0]}


def _targets(ratios: dict[str, float], rates: dict[str, Any], idle: dict[str, Any], most: int) -> list[dict[str, Any]]:
    found = (
        ("held durable p50, of raw hops", ratios["held durable / raw durable"], DURABLE_RATIO_MAX, "<="),
        ("leased durable p50, of raw hops", ratios["leased durable / raw durable"], DURABLE_RATIO_MAX, "<="),
        (f"held transfers/s, {most} in flight", rates[f"held {most}"]["p50"], RATE_MIN, ">="),
        (f"leased transfers/s, {most} in flight", rates[f"leased {most}"]["p50"], RATE_MIN, ">="),
        ("facts/s to a live subscriber", rates["facts per s"]["p50"], FACTS_MIN, ">="),
        ("messages/s of an idle instance", idle["messages_per_s"], IDLE_MAX, "<="),
    )
    return [
        {"what": what, "found": value, "asked": asked, "met": value <= asked if sign == "<=" else value >= asked}
        for what, value, asked, sign in found
    ]


def text(result: dict[str, Any]) -> str:
    """Return the same for people."""
    lines = [f"{'latency, microseconds':34}{'p50':>10}{'p99':>10}{'spread':>10}{'of raw':>9}"]
    for one, other in PAIRS.items():
        for name, ratio in ((one, f"{result['ratio'][f'{one} / {other}']:.2f}"), (other, "")):
            row = result["latency_us"][name]
            lines.append(f"{name:34}{row['p50']:10.0f}{row['p99']:10.0f}{row['spread']:10.0f}{ratio:>9}")
    lines += ["", f"{'a second':34}{'p50':>10}{'best':>10}{'spread':>10}"]
    for name, row in result["per_s"].items():
        lines.append(f"{name:34}{row['p50']:10.0f}{row['best']:10.0f}{row['spread']:10.0f}")
    lines += ["", "processor milliseconds per transfer"]
    for name, row in result["cpu_ms_per_transfer"].items():
        lines.append(f"{name:14}" + "  ".join(f"{who} {value:.2f}" for who, value in row.items() if value >= 0.005))
    cpu = result["cpu_us_per_1000_facts"]
    lines += ["", f"1,000 facts: encode {cpu['encode']:.0f} us, decode {cpu['decode']:.0f} us"]
    idle = result["idle"]
    kinds = ", ".join(f"{kind} {rate:.2f}" for kind, rate in idle["by_kind"].items())
    lines += [f"idle instance: {idle['messages_per_s']:.2f} messages/s ({kinds})"]
    lines += [f"  worker {idle['worker_cpu_percent']:.1f} % of a core, broker {idle['broker_cpu_percent']:.1f} %", ""]
    for one in result["targets"]:
        verdict = "met" if one["met"] else "NOT MET"
        lines.append(f"{one['what']:40}{one['found']:12.2f}  asked {one['asked']:<10g} {verdict}")
    return "\n".join(lines)
