"""`kvbus init`: create the streams and buckets that kvbus needs on a broker; deletes nothing."""

import asyncio

import click

from kvbus.commands.common import broker_options, connect


@click.command()
@broker_options
def init(nats_url: str, token: str, prefix: str) -> None:
    """Create the streams and buckets on a broker, once, before the first worker.

    Existing ones are compared with what kvbus needs; a difference is an error that names it. Nothing is deleted.
    """
    asyncio.run(_init(nats_url, token, prefix))
    click.echo("streams and buckets are in place")


async def _init(nats_url: str, token: str, prefix: str) -> None:
    bus = await connect(nats_url, token, prefix, name="kvbus-init")
    try:
        await bus.ensure_assets()
    finally:
        await bus.close()
