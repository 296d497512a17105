"""`kvbus story`: one transfer's life, from recorded events alone."""

import asyncio
from pathlib import Path

import click

from kvbus.commands.common import EXIT_FAILED, broker_options, connect, console, json_option, print_document
from kvbus.commands.logs import LogReader
from kvbus.commands.recordings import EVENTS_MAX, read_record
from kvbus.commands.rendering import candidate_line, print_story, printable
from kvbus.commands.stories import Story, tell
from kvbus.commands.story_documents import not_found_document, story_document
from kvbus.commands.trails import NotFound
from kvbus.events import Event
from kvbus.topics import Topics


@click.command()
@click.argument("wanted", metavar="ID")
@click.option(
    "--file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Tell it from a recording."
)
@json_option
@broker_options
def story(nats_url: str, token: str, prefix: str, wanted: str, file: Path | None, *, as_json: bool) -> int:
    """Tell one transfer's life on both sides, from recorded events alone.

    ID is a transfer's id, a request's hash, the first characters of either (at least four), or a ticket such as T7@b.
    """
    events = asyncio.run(_events(nats_url, token, prefix)) if file is None else _recorded(file)
    told = tell(events, wanted)
    if as_json:
        print_document(story_document(told) if isinstance(told, Story) else not_found_document(told))
    elif isinstance(told, Story):
        print_story(console(as_json=False), told)
    else:
        _explain(told)
    return 0 if isinstance(told, Story) else EXIT_FAILED


async def _events(nats_url: str, token: str, prefix: str) -> list[Event]:
    bus = await connect(nats_url, token, prefix, name="kvbus-story")
    try:
        return [seen.event async for seen in LogReader(bus, Topics(prefix)).newest(EVENTS_MAX)]
    finally:
        await bus.close()


def _recorded(file: Path) -> list[Event]:
    record = read_record(file)
    for fault in record.faults:
        click.echo(f"kvbus: {file}: {fault}", err=True)
    return list(record.events())


def _explain(not_found: NotFound) -> None:
    click.echo(f"kvbus: no story of {printable(not_found.wanted)!r}: {not_found.reason}", err=True)
    if not_found.candidates:
        click.echo("known transfers, the newest first:", err=True)
    for known in not_found.candidates:
        click.echo(f"  {candidate_line(known)}", err=True)
