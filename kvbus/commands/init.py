"""`kvbus init`: create the streams and buckets that kvbus needs on a broker; deletes nothing."""

import asyncio

import click

from kvbus.bus_assets import KEEP_HOURS_MAX, KEEP_HOURS_MIN, AssetLimits
from kvbus.commands.common import broker_options, connect, json_option, print_document


@click.command()
@click.option("--facts-mib", default=1024, show_default=True, help="Space for facts, which the broker reserves.")
@click.option(
    "--keep-hours",
    type=click.IntRange(KEEP_HOURS_MIN, KEEP_HOURS_MAX),
    default=KEEP_HOURS_MIN,
    show_default=True,
    help="For how long facts and decisions are kept, where their space allows.",
)
@click.option(
    "--replicas",
    type=click.Choice(["1", "3"]),
    default="1",
    show_default=True,
    help="Brokers that keep each log; 3 needs a cluster of three.",
)
@broker_options
@json_option
def init(nats_url: str, token: str, prefix: str, facts_mib: int, keep_hours: int, replicas: str, as_json: bool) -> None:
    """Create the streams and buckets on a broker, once, before the first worker.

    Existing ones are compared with what kvbus needs; a difference is an error that names it. Their sizes and replicas
    are an operator's choice and stay as they are. Logs that were kept for less than --keep-hours are kept so long from
    now on. Nothing is deleted.
    """
    limits = AssetLimits(facts_bytes_max=facts_mib << 20, keep_hours=keep_hours, replicas=int(replicas))
    asyncio.run(_init(nats_url, token, prefix, limits))
    if as_json:
        print_document({"ok": True, "replicas": int(replicas), "facts_mib": facts_mib, "keep_hours": keep_hours})
    else:
        click.echo("streams and buckets are in place")


async def _init(nats_url: str, token: str, prefix: str, limits: AssetLimits) -> None:
    bus = await connect(nats_url, token, prefix, name="kvbus-init", limits=limits)
    try:
        await bus.ensure_assets()
    finally:
        await bus.close()
