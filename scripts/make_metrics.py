"""Write the generated part of docs/metrics.md from the table of metrics; `--check` only says whether it is stale.

What stands outside of the `<!-- generated -->` marks is prose, and stays.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

# Works from a checkout that is not installed as well.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvbus.metrics import table
from kvbus.metrics.reading import Kind, Metric
from kvbus.roles.spread import bound_text

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs") / "metrics.md"

WHO = ("instance", "member")
GROUPS: Sequence[tuple[str, str, Sequence[Metric], tuple[str, ...]]] = (
    ("Requests", "As the destination answered them.", table.REQUESTS, WHO),
    ("Transfers", "As the destination saw them end.", table.TRANSFERS, WHO),
    ("Leases", "Of the member's holder.", table.LEASES, WHO),
    (
        "Bindings and domains",
        "A binding is one backend in one direction; a domain is a pool with all that depends on it.",
        table.BINDINGS,
        WHO,
    ),
    ("Pool", "", table.POOL, WHO),
    ("Transports", "", table.TRANSPORT, WHO),
    ("Bus", "", table.BUS, WHO),
    ("Rounds and settling", "", table.SETTLING, WHO),
    ("Members, as a gateway sees them", "", table.PRESENCE, WHO),
    ("", "", table.INFO, (*WHO, "engine", "model", "version")),
    ("A gateway itself", "", table.GATE, ("destination",)),
    ("", "", table.GATEWAY, ()),
    ("", "", table.HTTP, ("method", "route", "status")),
    ("The program", "A worker's own has `instance` and `member` as well.", table.BUILD, ("version",)),
)
_PART = re.compile(r"(<!-- generated -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Write the page, or say whether it is stale; 0 if it is as it should be."""
    path = ROOT / PAGE
    before = path.read_text(encoding="utf-8")
    after = page(before)
    if "--check" in sys.argv[1:]:
        stale = before != after
        print(f"make_metrics: {PAGE} is {'stale: run scripts/make_metrics.py' if stale else 'up to date'}")
        return int(stale)
    path.write_text(after, encoding="utf-8")
    print(f"make_metrics: wrote {PAGE}")
    return 0


def page(text: str) -> str:
    """Return the page with its generated part made anew; ValueError where that has no place."""
    made, places = _PART.subn(lambda found: f"{found[1]}{tables()}\n{found[2]}", text)
    if places != 1:
        raise ValueError(f"{PAGE} has {places} generated parts, expected one")
    return made


def tables() -> str:
    """Return the tables: each group of metrics, and then the words of labels."""
    parts = []
    for title, about, metrics, labels in GROUPS:
        lead = "".join(f"{text}\n\n" for text in (f"## {title}" if title else "", about) if text)
        head = "" if not title else "| metric | kind | labels | meaning |\n|---|---|---|---|\n"
        rows = "".join(f"{row(metric, labels)}\n" for metric in metrics)
        parts.append(f"\n{lead}{head}{rows}" if title else rows)
    return "".join(parts) + "\n" + words()


def row(metric: Metric, labels: tuple[str, ...]) -> str:
    """Return one metric's row."""
    named = ", ".join(f"`{label}`" for label in (*labels, *metric.labels))
    about = metric.about
    if metric.kind is Kind.HISTOGRAM:
        about += f" Up to {', '.join(map(bound_text, metric.bounds))}."
    return f"| `{metric.name}` | {metric.kind} | {named} | {about} |"


def words() -> str:
    """Return the words of all labels that have any."""
    rows = [
        f"| `{metric.name}` | `{label}` | {', '.join(f'`{word}`' for word in some)} |"
        for _, _, metrics, _ in GROUPS
        for metric in metrics
        for label, some in metric.words.items()
    ]
    return "## Words of labels\n\n| metric | label | words |\n|---|---|---|\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
