"""What a doctor finds: one line each, with what to do next; and how a person, or a program, reads all of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbus.bus_guards import nodes


class Level(StrEnum):
    """How it stands: only WRONG fails a check-up."""

    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.WRONG: "bold red"}
"""Colours; rich leaves them out where nobody sees them."""

RUNNING = ("broker", "workers")
"""The groups about what runs, rather than about the host."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `next_step` says what to do where it is not as it should be."""

    group: str
    name: str
    level: Level
    found: str
    next_step: str = ""

    def document(self) -> dict[str, str]:
        """Return it as a part of the JSON document."""
        return {
            "group": self.group,
            "name": self.name,
            "level": self.level.value,
            "found": self.found,
            "next": self.next_step,
        }


def address_of(url: str) -> str:
    """Return a broker's URL as a screen may show it: without the passwords or tokens that stand in it."""
    return ",".join(map(_address_of, nodes(url)))


def _address_of(url: str) -> str:
    head, mark, rest = url.rpartition("@")
    scheme = head.partition("//")[0] + "//" if "//" in head else ""
    return f"{scheme}{rest}" if mark else url


class Notes:
    """Collects findings of one group."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.findings: list[Finding] = []

    def ok(self, name: str, found: str) -> None:
        """As it should be."""
        self.findings.append(Finding(self.group, name, Level.OK, found))

    def warning(self, name: str, found: str, next_step: str) -> None:
        """Works, but slower or less safely than it could, or is not there yet."""
        self.findings.append(Finding(self.group, name, Level.WARNING, found, next_step))

    def wrong(self, name: str, found: str, next_step: str) -> None:
        """Does not work."""
        self.findings.append(Finding(self.group, name, Level.WRONG, found, next_step))


def is_well(findings: Iterable[Finding]) -> bool:
    """Tell whether nothing is wrong; warnings do not count."""
    return all(finding.level is not Level.WRONG for finding in findings)


def first_step(findings: Sequence[Finding]) -> str:
    """Say what to do first: about what is wrong in the order in which it was found, else about a warning.

    What is wrong with the host is often why something else is. Of warnings, those about what runs come first.
    """
    wrong = [finding for finding in findings if finding.level is Level.WRONG]
    warnings = [finding for finding in findings if finding.level is Level.WARNING]
    warnings.sort(key=lambda finding: finding.group not in RUNNING)
    return next((f"{first.group}, {first.name}: {first.next_step}" for first in (*wrong, *warnings)), "")


def document_of(findings: Sequence[Finding]) -> dict[str, object]:
    """Return all findings as one JSON document."""
    return {
        "ok": is_well(findings),
        "checks": [finding.document() for finding in findings],
        "first": first_step(findings),
    }


def show(findings: Sequence[Finding], screen: Console) -> None:
    """Print the findings by group, aligned, and last what to do first."""
    width = max((len(finding.name) for finding in findings), default=0)
    for group in dict.fromkeys(finding.group for finding in findings):
        screen.print(f"[bold]{escape(group)}[/]")
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(width=2 + max(map(len, Level)), no_wrap=True)
        table.add_column(width=width, no_wrap=True)
        table.add_column(overflow="fold")
        for finding in findings:
            if finding.group == group:
                mark = f"  [{STYLES[finding.level]}]{finding.level.value}[/]"
                table.add_row(mark, escape(finding.name), escape(finding.found))
                if finding.next_step:
                    table.add_row("", "", f"→ {escape(finding.next_step)}")
        screen.print(table)
    screen.print()
    screen.print(_last_line(findings))


def _last_line(findings: Sequence[Finding]) -> str:
    wrong = sum(finding.level is Level.WRONG for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    if not wrong and not warnings:
        return "[green]All is as it should be.[/]"
    counts = f"{wrong} wrong" if wrong else ""
    counts += f"{', ' if wrong and warnings else ''}{warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
    style = STYLES[Level.WRONG if wrong else Level.WARNING]
    return f"[{style}]{counts}.[/] First: {escape(first_step(findings))}"
