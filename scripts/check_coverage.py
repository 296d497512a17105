"""Check line coverage of the parts that must not be wrong unseen: the ledger, the subjects, the events.

Reads the report of `coverage json`. A part with no measured line fails too: a gate over nothing proves
nothing.
"""

import json
import sys
from pathlib import Path

COVERED_PERCENT_MIN = 90.0
PARTS = ("kvbus/ledger/", "kvbus/topics.py", "kvbus/events.py", "kvbus/settling.py")


def main() -> int:
    """Print one line per part; 0 if every part reaches the bound."""
    report = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("coverage.json")
    if not report.is_file():
        print(f"check_coverage: {report} is missing; run `coverage json -o {report}` after the tests")
        return 2
    files = json.loads(report.read_text(encoding="utf-8"))["files"]
    return max(_judge(part, files) for part in PARTS)


def _judge(part: str, files: dict[str, dict[str, dict[str, int]]]) -> int:
    rows = [row["summary"] for path, row in files.items() if path.replace("\\", "/").startswith(part)]
    lines = sum(row["num_statements"] for row in rows)
    covered = sum(row["covered_lines"] for row in rows)
    if not lines:
        print(f"check_coverage: {part}: no line was measured, expected at least one: FAIL")
        return 1
    percent = 100.0 * covered / lines
    verdict = "ok" if percent >= COVERED_PERCENT_MIN else f"FAIL, at least {COVERED_PERCENT_MIN:g} %"
    print(f"check_coverage: {part}: {covered} of {lines} lines, {percent:.1f} %: {verdict}")
    return 0 if percent >= COVERED_PERCENT_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
