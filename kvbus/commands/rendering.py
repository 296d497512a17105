"""How events and stories look: coloured lines for people; and events as documents for programs."""

import unicodedata
from collections.abc import Mapping
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbus.commands.leases import fact_lines, readable_column
from kvbus.commands.stories import Lane, Story
from kvbus.commands.trails import Known
from kvbus.commands.wording import Line, Tone
from kvbus.events import Event, FactsSeen, LeaseGranted
from kvbus.ledger.facts import fact_names
from kvbus.topics import Family

STYLES: Mapping[Tone, str] = {
    Tone.STEP: "",
    Tone.LEASE: "cyan",
    Tone.BYTES: "blue",
    Tone.SETTLE: "magenta",
    Tone.RETURN: "green",
    Tone.GOOD: "bold green",
    Tone.WARNING: "yellow",
    Tone.BAD: "red",
}
INSTANCE_STYLES = ("bold yellow", "bold cyan", "bold magenta", "bold green", "bold blue")
INSTANCE_WIDTH_MAX = 16
LANE_WIDTH_MAX = 10


class LinePrinter:
    """Prints one line for each thing that happened; remembers only how wide and in which colour instances are shown."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._width = 1
        self._styles: dict[str, str] = {}

    def show(self, event: Event, line: Line) -> None:
        """Print a line: local time, instance, what."""
        header = event.header
        self._width = max(self._width, min(len(header.i), INSTANCE_WIDTH_MAX))
        head = Text.assemble((f"{clock_time(header.t)} ", "dim"))
        instance = printable(header.i)[:INSTANCE_WIDTH_MAX]
        head.append(f"{instance:<{self._width}}  ", style=self._instance_style(header.i))
        self.say(head, _told(event, line))

    def notice(self, text: str, style: str = "dim") -> None:
        """Print a line of the command's own."""
        self.say(Text.assemble(("· ", style)), Text(printable(text), style=style))

    def say(self, head: Text, told: Text) -> None:
        """Print on one line where it fits or where no person looks; else wrap it beside its head."""
        if not self._console.is_terminal or head.cell_len + told.cell_len <= self._console.width:
            self._console.print(head + told, soft_wrap=True)
            return
        grid = Table.grid()
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(head, told)
        self._console.print(grid)

    def _instance_style(self, instance: str) -> str:
        if len(self._styles) > 1_000:  # instances come and go for as long as somebody watches
            self._styles.clear()
        return self._styles.setdefault(instance, INSTANCE_STYLES[len(self._styles) % len(INSTANCE_STYLES)])


def print_story(console: Console, story: Story) -> None:
    """Print a story: who and what, a line for each event with a mark in its lane, and the paragraph that sums it up."""
    title = Text.assemble(("Transfer ", "bold"), (printable(story.transfer), "bold"))
    if not story.transfer:
        title = Text(f"Lease {story.leases[0].life.key if story.leases else ''}", style="bold")
    if story.source and story.destination:
        title.append(f"   {printable(story.source)} → {printable(story.destination)}")
    title.append(f"   {datetime.fromtimestamp(story.began_ns / 1e9).astimezone():%Y-%m-%d %H:%M:%S}", style="dim")
    console.print(title)
    if story.request_hash:
        request = f"request {printable(story.request_id or 'without a recorded id')}, hash {story.request_hash}"
        console.print(Text(request, style="dim"))
    if story.note:
        console.print(Text(printable(story.note), style="yellow"))
    console.print()
    console.print(_story_table(story))
    console.print()
    console.print(Text("complete", style="green") if story.complete else Text("incomplete", style="bold yellow"))
    for text in story.missing:
        console.print(Text(f"  missing: {printable(text)}", style="yellow"))
    for text in story.contradictions:
        console.print(Text(f"  contradiction: {printable(text)}", style="bold red"))
    console.print()
    console.print(Text(printable(story.summary)))


def _story_table(story: Story) -> Table:
    names = {
        Lane.REQUESTER: "requester",
        Lane.DESTINATION: story.destination or (story.leases[0].life.key.instance if story.leases else "member"),
        Lane.SOURCE: story.source or "source",
        Lane.DATA_PLANE: "data plane",
    }
    used = {entry.lane for entry in story.entries}
    lanes = [lane for lane in Lane if lane in used or story.transfer]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("ms", justify="right", style="dim", no_wrap=True)
    for lane in lanes:
        name = printable(names[lane])
        table.add_column(name if len(name) <= LANE_WIDTH_MAX else f"{name[: LANE_WIDTH_MAX - 1]}…", justify="center")
    table.add_column("", overflow="fold")
    for entry in story.entries:
        marks = [Text("●", style=STYLES[entry.line.tone]) if entry.lane is lane else Text("│", "dim") for lane in lanes]
        table.add_row(f"{entry.after_ns / 1e6:,.1f}", *marks, _told(entry.event, entry.line, with_transfer=False))
    return table


def _told(event: Event, line: Line, *, with_transfer: bool = True) -> Text:
    style = "dim" if line.is_local else STYLES[line.tone]
    about = line.subject
    if line.subject == "transfer":
        about = f"transfer {line.transfer}" if with_transfer else ""
    elif line.transfer and line.lease is None and with_transfer:
        about = f"{line.subject} {line.transfer}"
    told = Text(style=style)
    if about:
        told.append(printable(about), style="" if line.is_local else "bold")
        told.append("  " if line.subject == "transfer" else " " if line.lease is not None else ": ")
    told.append(printable(line.text))
    introduces = isinstance(event.body, LeaseGranted) or line.tone is Tone.BAD
    if line.lease is not None and line.transfer and with_transfer and introduces:
        told.append(f"  ({printable(line.transfer)})", style="dim")
    return told


def printable(text: str) -> str:
    """Return text that others sent so that it can only be read: no control character reaches the terminal."""
    return "".join(" " if unicodedata.category(sign) in {"Cc", "Cf", "Zl", "Zp"} else sign for sign in text)


def clock_time(time_ns: int) -> str:
    """Return a unix time as local time of day, with milliseconds."""
    return f"{datetime.fromtimestamp(time_ns / 1e9).astimezone():%H:%M:%S}.{time_ns // 1_000_000 % 1_000:03d}"


# ------------------------------------------------------------------------------------------------------- documents


def event_document(event: Event, family: Family | None = None, sequence: int = 0) -> dict[str, object]:
    """Return an event for programs: bytes as hex, columns as lists, the names of fact bits beside their numbers."""
    header, body = event.header, event.body
    document: dict[str, object] = {
        "id": header.event_id,
        "kind": header.k,
        "instance": header.i,
        "member": header.m,
        "epoch": header.e,
        "sequence": header.s,
        "time_ns": header.t,
        "cause": header.c,
        "body": _plain(body.model_dump()),
    }
    if isinstance(body, FactsSeen):
        columns = [list(column) for column in zip(*fact_lines(body), strict=True)] or [[], [], [], [], []]
        named = dict(zip(("ticket", "rank", "bits", "lo", "hi"), columns, strict=True))
        names = [fact_names(bits) for bits in named["bits"]]
        details = _plain([row.model_dump() for row in body.details])
        document["body"] = {"n": body.n, **named, "facts": names, "details": details}
    elif isinstance(body, LeaseGranted):
        pages, counters = readable_column(body.pages, wide=False), readable_column(body.counters, wide=True)
        document["body"] = {**body.model_dump(), "pages": list(pages), "counters": list(counters)}
    if family is not None:
        document |= {"log": family.value, "log_sequence": sequence}
    return document


def candidate_line(known: Known) -> str:
    """Return one line about a transfer that may have been meant."""
    about = f"request {known.request_hash}, " if known.request_hash else ""
    return f"{printable(known.transfer)}  ({about}{clock_time(known.first_ns)}, {known.outcome or 'no outcome yet'})"


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
