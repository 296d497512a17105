"""What was measured, as one document; how it stands against the targets; and both as text for people."""

import statistics
from dataclasses import dataclass, field

from planes.cases import GIB, KIB, MIB, Case, size_text

TARGET_SHARES = {2 * MIB: 0.85, 64 * KIB: 0.60, 16 * KIB: 0.45}
AHEAD_OF_NIXL = {2 * MIB: 1.2, 64 * KIB: 1.0, 16 * KIB: 1.0}
AHEAD_OF_MOONCAKE = 2.0
UCX_TCP_GB_S = 1.5
ONE_PAGE_MS = 2.0
Row = dict[str, float]


@dataclass
class Taken:
    """One contestant's turns at one case."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    def row(self, case: Case) -> Row:
        """Return what these turns come to."""
        ordered = sorted(self.seconds)
        p50 = statistics.median(ordered)
        p99 = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
        moved_gib = case.length_bytes * len(ordered) / GIB
        return {
            "best_ms": ordered[0] * 1e3,
            "p50_ms": p50 * 1e3,
            "p99_ms": p99 * 1e3,
            "gb_s": case.length_bytes / p50 / 1e9,
            "us_per_page": p50 * 1e6 / case.count,
            "cpu_s_per_gib": self.cpu_s / moved_gib,
        }


def case_document(case: Case, taken: dict[str, Taken], way: str) -> dict[str, object]:
    """Return one case: what it moves, how kvbus chose to, and each contestant's row with its share of the limit."""
    rows = {name: one.row(case) for name, one in taken.items()}
    if raw := rows.get("raw"):
        for row in rows.values():
            row["share_of_raw"] = raw["p50_ms"] / row["p50_ms"]
            row["share_of_raw_best"] = raw["best_ms"] / row["best_ms"]
    return {
        "label": case.label,
        "page_bytes": case.page_bytes,
        "count": case.count,
        "contiguous": case.contiguous,
        "way": way,
        "rounds": max(len(one.seconds) for one in taken.values()),
        "results": rows,
    }


def targets(cases: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return each target whose numbers were measured: what it is, what was reached, what is wanted, whether it is."""
    largest = _largest_by_size(cases)
    found: list[dict[str, object]] = []

    def note(what: str, reached: float, wanted: float, *, at_most: bool = False) -> None:
        met = reached <= wanted if at_most else reached >= wanted
        sign = "<=" if at_most else ">="
        found.append({"what": what, "reached": reached, "wanted": f"{sign} {wanted:g}", "met": met})

    for size, share in TARGET_SHARES.items():
        rows = largest.get(size, {})
        if not (kvbus := rows.get("kvbus")):
            continue
        text = size_text(size)
        if "share_of_raw" in kvbus:
            note(f"{text}: share of process_vm_readv", kvbus["share_of_raw"], share)
        if nixl := rows.get("nixl"):
            note(f"{text}: speed, NIXL = 1", nixl["p50_ms"] / kvbus["p50_ms"], AHEAD_OF_NIXL[size])
            note(f"{text}: CPU per GiB, NIXL = 1", kvbus["cpu_s_per_gib"] / nixl["cpu_s_per_gib"], 1.0, at_most=True)
        if mooncake := rows.get("mooncake"):
            note(f"{text}: speed, Mooncake over TCP = 1", mooncake["p50_ms"] / kvbus["p50_ms"], AHEAD_OF_MOONCAKE)
    if by_tcp := largest.get(2 * MIB, {}).get("kvbus-ucx-tcp"):
        note("2 MiB: kvbus over UCX-TCP, GB/s", by_tcp["gb_s"], UCX_TCP_GB_S)
    for case in cases:
        if (case["page_bytes"], case["count"]) == (64 * KIB, 1) and (kvbus := _rows(case).get("kvbus")):
            note("1 page of 64 KiB, lease request to delivered, ms p50", kvbus["p50_ms"], ONE_PAGE_MS, at_most=True)
    return found


def case_text(case: dict[str, object]) -> str:
    """Return one case as a table."""
    chosen = f"; kvbus chose {case['way']}" if case.get("way") else ""
    lines = [
        f"{case['label']}  ({case['rounds']} rounds{chosen})",
        f"  {'':14}   best ms    p50 ms    p99 ms    GB/s  of raw   us/page CPU s/GiB",
    ]
    for name, row in _rows(case).items():
        share = f"{row['share_of_raw']:7.2f}" if "share_of_raw" in row else f"{'':7}"
        lines.append(
            f"  {name:14} {row['best_ms']:9.3f} {row['p50_ms']:9.3f} {row['p99_ms']:9.3f} {row['gb_s']:7.2f} {share} "
            f"{row['us_per_page']:9.2f} {row['cpu_s_per_gib']:9.3f}"
        )
    return "\n".join(lines)


def targets_text(found: list[dict[str, object]]) -> str:
    """Return the targets as a table."""
    lines = ["Targets"]
    for target in found:
        mark = "yes" if target["met"] else "NO"
        lines.append(f"  {target['what']:54} {target['reached']:8.2f}  wanted {target['wanted']:8} {mark}")
    return "\n".join(lines)


def _largest_by_size(cases: list[dict[str, object]]) -> dict[int, dict[str, Row]]:
    """Return the rows of the case with the most pages of each size."""
    found: dict[int, dict[str, Row]] = {}
    for case in cases:  # each size's counts ascend
        if not case["contiguous"]:
            found[int(str(case["page_bytes"]))] = _rows(case)
    return found


def _rows(case: dict[str, object]) -> dict[str, Row]:
    rows = case["results"]
    if not isinstance(rows, dict):
        raise TypeError(f"a case's results are a {type(rows).__name__}")
    return rows
