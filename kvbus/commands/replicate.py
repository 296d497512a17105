"""`kvbus replicate`: bring one prefix, or the hottest ones, of an instance to several others."""

import asyncio

import click

from kvbus.commands.common import EXIT_FAILED, broker_options, connect, console, json_option, print_document
from kvbus.commands.completing import instance_names
from kvbus.commands.members import check_name
from kvbus.commands.moving import Move, Mover, document, lines, progress
from kvbus.errors import ConfigError
from kvbus.prefixes import PREFIXES_MAX, PrefixRow
from kvbus.publisher import Publisher
from kvbus.topics import Topics

NAME_DIGITS_MIN = 8
"""Of a prefix's name, so that one typed by hand is enough and two are not taken for each other."""


@click.command()
@click.argument("name", metavar="[PREFIX]", required=False)
@click.option("--hot", type=click.IntRange(1, PREFIXES_MAX), help="The hottest so many, instead of one by its name.")
@click.option("--from", "source", required=True, shell_complete=instance_names, help="The instance that lends.")
@click.option("--to", "destinations", default="", metavar="NAME,NAME", help="The instances that take.")
@click.option("--patience", "patience_s", default=60.0, show_default=True, help="Seconds for each to be taken.")
@broker_options
@json_option
def replicate(
    name: str | None,
    hot: int | None,
    source: str,
    destinations: str,
    patience_s: float,
    nats_url: str,
    token: str,
    prefix: str,
    *,
    as_json: bool,
) -> int:
    """Bring PREFIX, a name or its first eight digits, or the hottest ones, from one instance to several.

    With neither PREFIX nor --hot it lists the prefixes that the source holds. The source lends to a few at a time,
    whatever their number.

    \b
    Exit status:
      0  they are at all destinations
      1  some are not: the lines say why
      2  it could not begin
    """  # noqa: D301 - click reads the sign itself
    wanted = list(dict.fromkeys(filter(None, (one.strip() for one in destinations.split(",")))))
    lists = name is None and hot is None
    if not lists and (not wanted or source in wanted):
        raise ConfigError(f"--to names the instances that take, and {source!r} is none of them")
    for destination in wanted:
        check_name(destination)
    if name is not None and hot is not None:
        raise click.UsageError("give a PREFIX or --hot, not both")

    async def go() -> int:
        bus = await connect(nats_url, token, prefix, name="kvbus-replicate")
        screen, topics = console(as_json=as_json), Topics(prefix)
        try:
            async with Publisher(bus=bus, topics=topics) as publisher:
                mover = Mover(bus, topics, publisher, source, patience_s)
                rows = chosen(list(await mover.prefixes(hot or PREFIXES_MAX)), name)
                if lists:
                    return _list(rows, source, as_json=as_json)
                moves = [Move(row, destination) for row in rows for destination in wanted]
                with progress(screen, f"{source} → {', '.join(wanted)}", len(moves)) as show:
                    await mover.run(moves, show)
        finally:
            await bus.close()
        if as_json:
            print_document(document(source, mover.moved, 0))
        for line in lines(source, mover.moved, 0):
            screen.print(line, soft_wrap=True, markup=False)
        return EXIT_FAILED if any(one.failure for one in mover.moved) else 0

    return asyncio.run(go())


def chosen(rows: list[PrefixRow], name: str | None) -> list[PrefixRow]:
    """Return the rows that a name stands for: all where none is given; ConfigError unless it stands for one."""
    if name is None:
        return rows
    found = [row for row in rows if row.name.hex().startswith(name.lower())]
    if len(name) < NAME_DIGITS_MIN or len(found) != 1:
        raise ConfigError(
            f"{name!r} stands for {len(found)} of {len(rows)} prefixes: give at least {NAME_DIGITS_MIN} digits of one; "
            "without PREFIX they are listed"
        )
    return found


def _list(rows: list[PrefixRow], source: str, *, as_json: bool) -> int:
    if as_json:
        found = [{"prefix": row.name.hex(), "blocks": row.blocks, "uses": row.uses} for row in rows]
        print_document({"from": source, "prefixes": found})
        return 0
    for row in rows:
        click.echo(f"{row.name.hex()}  {row.blocks} blocks, asked for {row.uses} ×")
    return 0
