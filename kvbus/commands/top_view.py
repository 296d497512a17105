"""The cluster's picture as lines of text: never wider or taller than the screen, and readable without colour.

Whatever is shown of a kind is bounded by the height; its heading says how many there are in all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from kvbus import names
from kvbus.commands.rendering import clock_time, printable
from kvbus.commands.wording import counted, size
from kvbus.picture.rows import EndedRow, IsolatedRow, LeaseRow, MemberRow, OutOfUseRow, Shown, TransferRow

WIDTH_MIN, HEIGHT_MIN = 40, 10
"""Below this there is nothing to lay out: what does not fit is cut."""
SELECTED = ">"
KEYS = "q quits · ↑ ↓ choose a transfer · enter opens its story"
SILENT_NS = 3_000_000_000
"""A member's heart beats each second; after three it is marked."""


@dataclass(frozen=True, slots=True)
class Look:
    """What there is to say beside the picture: when it is looked at, and since when it is not current any more."""

    now_ns: int
    broker: str = ""
    stale_ns: int = 0
    """Since when nothing is heard; 0: it is current."""
    why_stale: str = ""
    selected: str = ""
    footer: str = KEYS


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its heading, its width in cells, and on which side it is flush. Width 0: the rest."""

    title: str
    width: int
    right: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """One kind of rows: a heading that counts all of them, the columns, and for each row its cells and style."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[tuple[str, ...], str], ...]
    style: str = "bold"


def screen(shown: Shown, look: Look, *, width: int, height: int) -> list[Text]:
    """Return the lines of a screen."""
    width, height = max(width, WIDTH_MIN), max(height, HEIGHT_MIN)
    head = [_line(Text(text, style=style), width) for text, style in _head(shown, look)]
    sections = sections_of(shown, look)
    fixed = len(head) + 1 + sum(1 + bool(one.rows) for one in sections)  # with the footer
    parts = shares([len(one.rows) for one in sections], height - fixed)
    lines = list(head)
    for one, rows in zip(sections, parts, strict=True):
        lines += _section(replace(one, rows=one.rows[:rows]), width)
    lines = lines[: height - 1]
    lines += [Text()] * (height - 1 - len(lines))
    return [*lines, _line(Text(look.footer, style="dim"), width)]


def page(shown: Shown, look: Look, *, width: int) -> list[Text]:
    """Return the lines of a picture that is printed once, with all the rows that it has."""
    lines = [_line(Text(text, style=style), width) for text, style in _head(shown, look)]
    for one in sections_of(shown, look):
        lines += [Text(), *_section(one, width)]
    return lines


def sections_of(shown: Shown, look: Look) -> list[Section]:
    """Return all kinds of rows, in the order in which a person looks for trouble."""
    return [
        _members(shown.members, look),
        _transfers(shown, look),
        _leases(shown, look),
        _out_of_use(shown, look),
        _isolated(shown.isolated, look),
        _ended(shown, look),
    ]


def shares(wanted: Sequence[int], room: int) -> list[int]:
    """Return how many rows each kind may show: all get one after the other while there is room."""
    parts = [0] * len(wanted)
    while room > 0 and any(part < want for part, want in zip(parts, wanted, strict=True)):
        for place, want in enumerate(wanted):
            if room > 0 and parts[place] < want:
                parts[place] += 1
                room -= 1
    return parts


def age(elapsed_ns: int) -> str:
    """Return an age in at most six signs; clocks of several hosts differ, so one may lie before its beginning."""
    seconds = max(0, elapsed_ns) / 1e9
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if minutes < 1:
        return f"{int(seconds)} s"
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h" if hours < 48 else f"{hours // 24} d"


def took(seconds: float) -> str:
    """Return how long a transfer took in at most seven signs, rounded and not cut off."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 600 else age(round(seconds * 1e9))


def epoch_text(epoch: int) -> str:
    """Return an epoch as the live page shows it; a mark where it is not known."""
    return names.epoch_text(epoch) if epoch else "?"


# ----------------------------------------------------------------------------------------------------------- sections


def _head(shown: Shown, look: Look) -> list[tuple[str, str]]:
    totals = shown.totals
    moved = f"{counted(totals.pages_moved, 'page')}, {size(totals.length_bytes)} moved" if totals.ended else ""
    parts = ["kvbus top", look.broker, clock_time(look.now_ns)[:8], moved]
    lines = [(" · ".join(part for part in parts if part), "bold")]
    if look.stale_ns:
        since = f"{clock_time(look.stale_ns)[:8]} ({age(look.now_ns - look.stale_ns)} ago)"
        lines.append((f"STALE since {since}: {look.why_stale}", "bold reverse red"))
    if shown.lost:
        lines.append(
            (f"the log lost events {counted(shown.lost, 'time')}; the members told their state anew", "yellow")
        )
    return lines


def _members(rows: Sequence[MemberRow], look: Look) -> Section:
    columns = (
        Column("member", 13), Column("epoch", 7), Column("engine", 9), Column("pages", 6, right=True),
        Column("free", 6, right=True), Column("cached", 6, right=True), Column("lent", 5, right=True),
        Column("quar.", 5, right=True), Column("leases", 6, right=True), Column("heard", 0),
    )  # fmt: skip

    def cells(row: MemberRow) -> tuple[str, ...]:
        counts = (row.pages, row.pages_free, row.pages_cached, row.pages_lent, row.pages_quarantined, row.leases_held)
        heard = age(look.now_ns - row.heard_ns) if row.heard_ns else "never"
        if row.state:  # in the eight signs that a narrow terminal has left
            heard = f"{heard}, {row.state}" if is_silent(row) else row.state
        return (
            f"{row.instance}/{row.member}", epoch_text(row.epoch), row.engine,
            *("–" if count is None else str(count) for count in counts), heard if row.registered else f"GONE, {heard}",
        )  # fmt: skip

    def style(row: MemberRow) -> str:
        if not row.registered:
            return "red"
        return "yellow" if is_silent(row) or row.state else ""

    def is_silent(row: MemberRow) -> bool:
        return row.heard_ns > 0 and look.now_ns - row.heard_ns > SILENT_NS

    return Section(
        f"instances: {counted(len(rows), 'member')}", columns, tuple((cells(row), style(row)) for row in rows)
    )


def _transfers(shown: Shown, look: Look) -> Section:
    columns = (
        Column("", 1), Column("transfer", 18), Column("from → to", 15), Column("step", 12),
        Column("pages", 9, right=True), Column("age", 6, right=True), Column("", 0),
    )  # fmt: skip

    def cells(row: TransferRow) -> tuple[str, ...]:
        pages = f"{row.pages_moved}/{row.pages_asked}" if row.pages_asked else ""
        return (
            _mark(row.transfer, look), row.transfer, f"{row.source or '?'} → {row.destination}", row.step,
            pages, age(look.now_ns - row.began_ns), row.text,
        )  # fmt: skip

    title = f"transfers in flight: {shown.transfers_count}"
    return Section(title, columns, tuple((cells(row), _chosen(row.transfer, look, "cyan")) for row in shown.transfers))


def _leases(shown: Shown, look: Look) -> Section:
    columns = (
        Column("member", 13), Column("ticket", 7), Column("", 5), Column("peer", 10), Column("pages", 5, right=True),
        Column("stage", 13), Column("age", 8, right=True), Column("transfer", 0),
    )  # fmt: skip

    def cells(row: LeaseRow) -> tuple[str, ...]:
        since = age(look.now_ns - row.since_ns)
        return (
            f"{row.instance}/{row.member}", f"T{row.ticket}", row.direction or "?", row.peer, str(row.pages),
            row.stage, since if row.since_known else f"> {since}", row.transfer,
        )  # fmt: skip

    title = f"leases held: {shown.leases_count} for transfers, {shown.leases_local} of the engines' own"
    return Section(title, columns, tuple((cells(row), "") for row in shown.leases))


def _out_of_use(shown: Shown, look: Look) -> Section:
    columns = (Column("member", 13), Column("pages", 5, right=True), Column("since", 7, right=True), Column("why", 0))

    def cells(row: OutOfUseRow) -> tuple[str, ...]:
        why = f"T{row.ticket}: {row.why}" if row.ticket else row.why
        since = age(look.now_ns - row.since_ns) if row.since_ns else "?"
        return f"{row.instance}/{row.member}", str(row.pages), since, why

    title = f"quarantine: {counted(shown.out_of_use_pages, 'page')} out of use"
    rows = tuple((cells(row), "yellow") for row in shown.out_of_use)
    return Section(title, columns, rows, "bold yellow" if rows else "bold")


def _isolated(isolated: Sequence[IsolatedRow], look: Look) -> Section:
    columns = (Column("member", 13), Column("peer", 13), Column("since", 7, right=True), Column("why", 0))

    def cells(row: IsolatedRow) -> tuple[str, ...]:
        why = f"{row.why} (it runs anew)" if row.runs_anew else row.why
        return f"{row.instance}/{row.member}", row.peer, age(look.now_ns - row.since_ns), why

    rows = tuple((cells(row), "yellow") for row in isolated)
    return Section(f"isolated peers: {len(rows)}", columns, rows, "bold yellow" if rows else "bold")


def _ended(shown: Shown, look: Look) -> Section:
    columns = (
        Column("", 1), Column("transfer", 18), Column("from → to", 13), Column("outcome", 9),
        Column("pages", 7, right=True), Column("bytes", 8, right=True), Column("took", 7, right=True), Column("", 0),
    )  # fmt: skip

    def cells(row: EndedRow) -> tuple[str, ...]:
        why = f"{row.failure}: {row.reason}" if row.failure and row.reason else row.failure or row.reason
        return (
            _mark(row.transfer, look), row.transfer, f"{row.source} → {row.destination}", row.outcome,
            f"{row.pages_moved}/{row.pages_wanted - row.pages_held}", size(row.length_bytes),
            took(row.total_s), why,
        )  # fmt: skip

    def style(row: EndedRow) -> str:
        return _chosen(row.transfer, look, "green" if row.outcome == "settled" else "red")

    counts = ", ".join(f"{number} {word}" for word, number in sorted(shown.totals.outcomes.items()))
    title = f"outcomes, the newest first: {counts or 'none yet'}"
    return Section(title, columns, tuple((cells(row), style(row)) for row in shown.ended))


def _mark(transfer: str, look: Look) -> str:
    return SELECTED if transfer == look.selected else ""


def _chosen(transfer: str, look: Look, style: str) -> str:
    return f"{style} reverse" if transfer == look.selected else style


# -------------------------------------------------------------------------------------------------------------- lines


def _section(section: Section, width: int) -> list[Text]:
    lines = [_line(Text(section.title, style=section.style), width)]
    if section.rows:
        lines.append(_row([column.title for column in section.columns], section.columns, width, "dim"))
    return lines + [_row(cells, section.columns, width, style) for cells, style in section.rows]


def _row(cells: Sequence[str], columns: Sequence[Column], width: int, style: str) -> Text:
    parts, used = list[str](), 0
    for cell, column in zip(cells, columns, strict=True):
        room = column.width or max(0, width - used)
        parts.append(_fitted(printable(cell), room, right=column.right))
        used += room + 1
    return _line(Text(" ".join(parts).rstrip(), style=style), width)


def _fitted(text: str, width: int, *, right: bool) -> str:
    """Return a text of exactly so many cells; what is cut off ends with an ellipsis."""
    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + "…" if width else ""
    return " " * (width - cell_len(text)) + text if right else set_cell_size(text, width)


def _line(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line
