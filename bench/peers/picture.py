"""Draws a benchmark document, read from the standard input, into a PNG file: speed by page size, and processor time.

Runs in the peers' environment, for matplotlib is there.
"""

import json
import sys

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt  # after the backend was chosen

COLOURS = {
    "raw": "#9a9a9a",
    "kvbus": "#1a6faf",
    "kvbus-memory": "#3a86c4",
    "kvbus-ucx": "#5fa3d6",
    "kvbus-socket": "#86bfe6",
    "plain-socket": "#cfcfcf",
    "kvbus-ucx-tcp": "#a9d0ee",
    "nixl": "#76b900",
    "mooncake": "#e08a2e",
}
NAMES = {
    "raw": "process_vm_readv (the limit)",
    "kvbus": "kvbus, whole transfers by the way that its planner takes",
    "kvbus-memory": "kvbus (mapped memory), whole transfers",
    "kvbus-ucx": "kvbus (UCX), whole transfers",
    "kvbus-socket": "kvbus (plain TCP), whole transfers",
    "plain-socket": "a plain TCP socket",
    "kvbus-ucx-tcp": "kvbus (UCX over TCP), whole transfers",
    "nixl": "NIXL READ",
    "mooncake": "Mooncake, TCP",
}
UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"))


def size_text(length_bytes: int) -> str:
    """Return a size in a unit that divides it."""
    return next((f"{length_bytes // unit} {name}" for unit, name in UNITS if length_bytes % unit == 0), "")


def bars(axes: plt.Axes, cases: list[dict], key: str, title: str) -> None:  # type: ignore[type-arg]
    """Draw one group of bars for each case, with a bar for each contestant."""
    names = [name for name in NAMES if any(name in case["results"] for case in cases)]
    width = 0.84 / len(names)
    for number, name in enumerate(names):
        places = [at + (number - (len(names) - 1) / 2) * width for at in range(len(cases))]
        heights = [case["results"].get(name, {}).get(key, 0.0) for case in cases]
        axes.bar(places, heights, width, label=NAMES[name], color=COLOURS[name])
    labels = [f"{size_text(case['page_bytes'])}\n x {case['count']}" for case in cases]
    axes.set_xticks(range(len(cases)), labels, fontsize=9)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)
    axes.set_axisbelow(True)


def main() -> None:
    document = json.load(sys.stdin)
    largest = {case["page_bytes"]: case for case in document["cases"] if not case["contiguous"]}
    cases = list(largest.values())
    figure, (speeds, costs) = plt.subplots(2, 1, figsize=(9.6, 8.2), dpi=110)
    bars(speeds, cases, "gb_s", "GB/s of scattered host pages between two processes of one host (more is better)")
    bars(costs, cases, "cpu_s_per_gib", "processor seconds per GiB, both processes (less is better)")
    handles, names = speeds.get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0.01, 0.025))
    host = document["host"]
    text = (
        f"medians, side by side in one run; page size x pages in one transfer; {host['cores']} shared cores, "
        f"load {host['load_before']:.1f} to {host['load_after']:.1f}"
    )
    figure.text(0.01, 0.008, text, fontsize=8, color="#555555")
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    figure.savefig(sys.argv[1])


if __name__ == "__main__":
    main()
