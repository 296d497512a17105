"""`kvbus migrate`: bring the prefixes that one instance holds to another, the hottest first."""

import asyncio

import click

from kvbus.commands.common import EXIT_FAILED, broker_options, connect, console, json_option, print_document
from kvbus.commands.completing import instance_names
from kvbus.commands.members import check_name
from kvbus.commands.moving import Move, Mover, document, lines, progress
from kvbus.errors import ConfigError
from kvbus.prefixes import PREFIXES_MAX
from kvbus.publisher import Publisher
from kvbus.topics import Topics


@click.command()
@click.option("--from", "source", required=True, shell_complete=instance_names, help="The instance that lends.")
@click.option("--to", "destination", required=True, shell_complete=instance_names, help="The instance that takes.")
@click.option(
    "--prefixes", default=PREFIXES_MAX, show_default=True, type=click.IntRange(1, PREFIXES_MAX), help="At most so many."
)
@click.option("--evict", is_flag=True, help="Drop each at the source that the destination holds, once all settled.")
@click.option("--patience", "patience_s", default=60.0, show_default=True, help="Seconds for each to be taken.")
@broker_options
@json_option
def migrate(
    source: str,
    destination: str,
    prefixes: int,
    patience_s: float,
    nats_url: str,
    token: str,
    prefix: str,
    *,
    evict: bool,
    as_json: bool,
) -> int:
    """Bring the prefixes that an instance holds to another, those most often asked for first.

    Their prompts do not travel: each is named by its last page. Nothing is dropped at the source without --evict. With
    it, all stay where one has failed; one that its destination does not hold any more, as where its pool is too small
    for all of them, stays too, and counts as failed; and a prefix that was not chosen (--prefixes) loses the beginning
    that it shares with one that was dropped.

    \b
    Exit status:
      0  all of them are there, or there was nothing to move
      1  some are not, or are not any more: the lines say why
      2  it could not begin
    """  # noqa: D301 - click reads the sign itself
    if source == destination:
        raise ConfigError(f"--from and --to are both {source!r}")
    check_name(destination)

    async def go() -> int:
        bus = await connect(nats_url, token, prefix, name="kvbus-migrate")
        screen, topics = console(as_json=as_json), Topics(prefix)
        try:
            async with Publisher(bus=bus, topics=topics) as publisher:
                mover = Mover(bus, topics, publisher, source, patience_s)
                moves = [Move(row, destination) for row in await mover.prefixes(prefixes)]
                with progress(screen, f"{source} → {destination}", len(moves)) as show:
                    await mover.run(moves, show)
                evicted = await mover.evict() if evict else 0
        finally:
            await bus.close()
        if as_json:
            print_document(document(source, mover.moved, evicted))
        for line in lines(source, mover.moved, evicted) if moves else (f"{source} holds no prefix that it can name",):
            screen.print(line, soft_wrap=True, markup=False)
        return EXIT_FAILED if any(one.failure for one in mover.moved) else 0

    return asyncio.run(go())
