"""`kvbus audit`: replay recorded facts and settle decisions, and prove or refute that ownership was kept."""

import asyncio
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from kvbus.commands.auditing import Audit, Verdict
from kvbus.commands.auditing import audit as audited
from kvbus.commands.common import EXIT_FAILED, broker_options, connect, console, json_option, print_document
from kvbus.commands.leases import MEMBER_TICKET, LeaseKey
from kvbus.commands.lifelines import Out
from kvbus.commands.recordings import LogTap, Record, read_record
from kvbus.commands.rendering import printable
from kvbus.commands.rules import Offence
from kvbus.commands.wording import counted, duration
from kvbus.events import Event
from kvbus.topics import Topics
from kvbus.transport import Bus

EXIT_INCOMPLETE = 3
"""Neither proved nor refuted."""
READS_MAX = 5
"""A log that is read while members write it may end between an access end and its return; soon it does not."""
PAUSE_S = 0.5
SHOWN_MAX = 10
DOCUMENTED_MAX = 1_000
"""Offences in a document: a tool reads the first ones; a record that breaks rules that often is broken all over."""

_STYLES = {
    Verdict.CLEAN: "bold green",
    Verdict.CLEAN_SINCE: "bold green",
    Verdict.REFUTED: "bold red",
    Verdict.INCOMPLETE: "bold yellow",
}
_EXITS = {
    Verdict.CLEAN: 0,
    Verdict.CLEAN_SINCE: 0,
    Verdict.REFUTED: EXIT_FAILED,
    Verdict.INCOMPLETE: EXIT_INCOMPLETE,
}


@click.command()
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--since", "since_s", type=float, metavar="SECONDS", help="Judge only what happened in the last so many seconds."
)
@json_option
@broker_options
def audit(nats_url: str, token: str, prefix: str, file: Path | None, since_s: float | None, *, as_json: bool) -> int:
    """Prove or refute, from recorded events alone, that no page was used by two and that each lease came back.

    Reads FILE, a recording, or else all that the broker's logs hold. Exit status 0: clean, or, where the broker has
    dropped the logs' beginning, clean since then; 1: refuted, with the first event that breaks a rule; 3: the record is
    incomplete, which proves nothing.
    """
    if since_s is not None and (file is not None or since_s < 0):
        raise click.BadParameter("give seconds from 0 on, and no FILE", param_hint="--since")
    since_ns = time.time_ns() - int(since_s * 1e9) if since_s is not None else 0
    if file is not None:
        result, source = audited(read_record(file)), str(file)
    else:
        result, source = asyncio.run(_live(nats_url, token, prefix, since_ns)), "the broker's logs"
    if as_json:
        print_document(audit_document(result))
    else:
        print_audit(console(as_json=False), result, source)
    return _EXITS[result.verdict]


async def _live(nats_url: str, token: str, prefix: str, since_ns: int) -> Audit:
    bus = await connect(nats_url, token, prefix, name="kvbus-audit")
    try:
        _, result = await audit_log(bus, Topics(prefix), since_ns=since_ns)
    finally:
        await bus.close()
    return result


async def audit_log(
    bus: Bus, topics: Topics, *, since_ns: int = 0, runs: frozenset[tuple[str, str, int]] | None = None
) -> tuple[Record, Audit]:
    """Audit what the broker holds, or holds since certain runs began; read on while returns are being recorded."""
    tap, whole = LogTap(bus, topics), Record()

    async def read() -> tuple[Record, Audit]:
        await tap.record(whole)
        whole.end_ns = time.time_ns()
        record = whole if runs is None else whole.since(runs)
        return record, audited(record, since_ns=since_ns)

    record, result = await read()
    for _ in range(READS_MAX - 1):
        if not result.pending:
            break
        await asyncio.sleep(PAUSE_S)
        record, result = await read()
    return record, result


# ----------------------------------------------------------------------------------------------------- for people


def print_audit(screen: Console, result: Audit, source: str) -> None:
    """Print the verdict, what it stands on, and what is still out."""
    what = f"{counted(result.events, 'event')} of {counted(result.runs, 'run')} in {source}: "
    what += f"{counted(result.leases, 'lease')}, {result.returned} returned"
    screen.print(Text(printable(what), style="dim"), soft_wrap=True)
    when = f" {_utc(result.since_ns)}, where the logs begin" if result.verdict is Verdict.CLEAN_SINCE else ""
    screen.print(Text(result.verdict.value + when, style=_STYLES[result.verdict]))
    for line in lines(result):
        screen.print(Text(printable(line)), soft_wrap=True)


def lines(result: Audit) -> Iterator[str]:
    """Yield what an audit found, in words: offences, or why it proves nothing, then what is out."""
    for offence in result.offences[:SHOWN_MAX]:
        yield f"  {_where(result, offence.event)} breaks the rule: {offence.rule.value}"
        yield f"    {offence.text}"
        if offence.other_event is not None and offence.other_event is not offence.event:
            yield f"    collides with {_where(result, offence.other_event)}"
    yield from _more(len(result.offences), "offence")
    if result.since_ns and result.verdict is not Verdict.CLEAN_SINCE:
        yield f"  the logs begin at {_utc(result.since_ns)}"
    yield from (f"  began before the logs, and is not proved: {key}" for key in result.before[:SHOWN_MAX])
    yield from _more(len(result.before), "such lease")
    yield from (f"  incomplete: {reason}" for reason in result.reasons[:SHOWN_MAX])
    yield from _more(len(result.reasons), "reason")
    yield from (f"  not proved, as events are missing: {one.text}" for one in result.unproven[:SHOWN_MAX])
    yield from _more(len(result.unproven), "suspicion")
    for read in result.differing[:SHOWN_MAX]:
        yield f"  no fault of ownership, but of bytes: {read.event.header.i}, {_where(result, read.event)}: {read.text}"
    yield from _more(len(result.differing), "such read")
    for out in result.out[:SHOWN_MAX]:
        life = out.life
        pages = f"{life.direction or 'lease'} {counted(len(life.pages), 'page')}"
        yield f"  still out: {life.key}, {pages}, for {duration(result.age_s(out))}: {out.why}"
    yield from _more(len(result.out), "lease")


def _utc(unix_ns: int) -> str:
    return f"{datetime.fromtimestamp(unix_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _more(count: int, noun: str) -> Iterator[str]:
    if count > SHOWN_MAX:
        yield f"  and {counted(count - SHOWN_MAX, f'more {noun}')}"


def _where(result: Audit, event: Event) -> str:
    stored = result.places.get(event.header.event_id)
    where = f", {stored.where} on {stored.subject}" if stored else ""
    return f"event {event.header.event_id} ({event.header.k}{where})"


# --------------------------------------------------------------------------------------------------- for programs


def audit_document(result: Audit) -> dict[str, object]:
    """Return an audit for programs."""
    return {
        "verdict": result.verdict.value,
        "since_unix_s": result.since_ns / 1e9 if result.since_ns else None,
        "before": [_lease(key) for key in result.before[:DOCUMENTED_MAX]],
        "before_count": len(result.before),
        "offence": _offence(result, result.first) if result.first else None,
        "offences": [_offence(result, offence) for offence in result.offences[:DOCUMENTED_MAX]],
        "offences_count": len(result.offences),
        "incomplete": list(result.reasons),
        "unproven": [_offence(result, offence) for offence in result.unproven[:DOCUMENTED_MAX]],
        "unproven_count": len(result.unproven),
        "out": [_out(result, out) for out in result.out],
        "differing": [
            {f"event{name}": value for name, value in _place(result, read.event).items()} | {"text": read.text}
            for read in result.differing[:DOCUMENTED_MAX]
        ],
        "differing_count": len(result.differing),
        "events": result.events,
        "runs": result.runs,
        "leases": result.leases,
        "returned": result.returned,
    }


def _offence(result: Audit, offence: Offence) -> dict[str, object]:
    return {
        "rule": offence.rule.name.lower(),
        "promise": offence.rule.value,
        "text": offence.text,
        "lease": _lease(offence.lease),
        "other_lease": _lease(offence.other),
        **{f"event{name}": value for name, value in _place(result, offence.event).items()},
        **{f"other_event{name}": value for name, value in _place(result, offence.other_event).items()},
    }


def _place(result: Audit, event: Event | None) -> dict[str, object]:
    """An event's id, subject, log and sequence, under the endings of their keys."""
    stored = result.places.get(event.header.event_id) if event else None
    return {
        "": event.header.event_id if event else None,
        "_subject": stored.subject if stored else None,
        "_log": stored.family.value if stored else None,
        "_sequence": stored.sequence if stored else None,
    }


def _lease(key: LeaseKey | None) -> dict[str, object] | None:
    if key is None or key.ticket == MEMBER_TICKET:
        return None
    return {"instance": key.instance, "member": key.member, "epoch": key.epoch, "ticket": key.ticket}


def _out(result: Audit, out: Out) -> dict[str, object]:
    life = out.life
    return {
        "lease": _lease(life.key),
        "transfer": life.transfer,
        "direction": life.direction,
        "pages": list(life.pages),
        "age_s": round(result.age_s(out), 3),
        "since_event": out.since.header.event_id,
        "why": out.why,
    }
