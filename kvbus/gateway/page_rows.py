"""The picture as the page hears of it: rows by key, and what changed since the last time."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields

from kvbus.names import epoch_text
from kvbus.picture.rows import Shown

ROWS_MAX = 60
"""Rows of each table that the page shows: two screens of a large one, and a few milliseconds to draw."""

Row = Mapping[str, object]
Rows = dict[str, dict[str, object]]
"""Rows of one table by key, as JSON has them."""
TABLES = ("members", "transfers", "leases", "out_of_use", "isolated", "ended")


@dataclass(slots=True)
class Tables:
    """What clients hold: each table's rows, as they were told last."""

    shown: dict[str, dict[str, Hashable]] = field(default_factory=lambda: {name: {} for name in TABLES})

    def whole(self) -> dict[str, Rows]:
        """Return all rows."""
        return {name: {key: row_document(row) for key, row in rows.items()} for name, rows in self.shown.items()}

    def change(self, shown: Shown) -> tuple[dict[str, Rows], dict[str, list[str]]]:
        """Take a new picture; return the rows that are new or other than before, and the keys that are gone."""
        changed: dict[str, Rows] = {}
        gone: dict[str, list[str]] = {}
        for name, rows in keyed(shown).items():
            before = self.shown[name]
            if new := {key: row_document(row) for key, row in rows.items() if before.get(key) != row}:
                changed[name] = new
            if missing := [key for key in before if key not in rows]:
                gone[name] = missing
            self.shown[name] = rows
        return changed, gone


def keyed(shown: Shown) -> dict[str, dict[str, Hashable]]:
    """Return a picture's rows by table and key."""
    return {
        "members": {f"{row.instance}/{row.member}": row for row in shown.members},
        "transfers": {row.transfer: row for row in shown.transfers},
        "leases": {f"{row.instance}/{row.member}/{row.epoch}/{row.ticket}": row for row in shown.leases},
        "out_of_use": {f"{row.instance}/{row.member}/{row.ticket}": row for row in shown.out_of_use},
        "isolated": {f"{row.instance}/{row.member}/{row.peer}": row for row in shown.isolated},
        "ended": {row.transfer: row for row in shown.ended},
    }


def head_document(shown: Shown) -> dict[str, object]:
    """Return the counts that stand over the tables."""
    totals = shown.totals
    return {
        "transfers_count": shown.transfers_count,
        "leases_count": shown.leases_count,
        "leases_local": shown.leases_local,
        "out_of_use_pages": shown.out_of_use_pages,
        "outcomes": dict(totals.outcomes),
        "ended": totals.ended,
        "pages_moved": totals.pages_moved,
        "length_bytes": totals.length_bytes,
        "lost": shown.lost,
    }


def row_document(row: Hashable) -> dict[str, object]:
    """Return a row as JSON: times in unix milliseconds, and epochs as people see them, since both exceed a double."""
    document: dict[str, object] = {}
    for one in fields(row):  # type: ignore[arg-type] # rows are frozen dataclasses, which are hashable
        value = getattr(row, one.name)
        if one.name.endswith("_ns"):
            document[f"{one.name.removesuffix('_ns')}_ms"] = round(value / 1e6, 1)
        elif one.name == "epoch":
            document["epoch"] = epoch_text(value) if value else ""
        else:
            document[one.name] = value
    return document
