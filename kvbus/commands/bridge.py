"""`kvbus bridge vllm-events`: an engine's own KV events, onto the bus, for routers."""

import asyncio
import secrets
import signal
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from kvbus.commands.common import EXIT_FAILED, broker_options, connect, json_option, print_document
from kvbus.commands.log_lines import set_up_logging
from kvbus.commands.worker import LOG_LEVELS
from kvbus.errors import ConfigError
from kvbus.names import EPOCH_COUNTER_MAX, epoch_from
from kvbus.roles.block_bridge import BlockBridge, BridgeSettings
from kvbus.topics import Topics

if TYPE_CHECKING:
    from kvbus.engines.zmq_events import ZmqEvents

FAREWELL_S = 5.0
"""For telling routers that the bridge stops; without a broker they do not hear it."""


@click.group()
def bridge() -> None:
    """Bring what an engine says of its own onto the bus."""


@bridge.command("vllm-events", short_help="Tell which blocks a vLLM server's own cache takes up and drops.")
@click.option("--endpoint", default="tcp://127.0.0.1:5557", show_default=True, help="Where vLLM publishes.")
@click.option("--replay", default="", metavar="ADDRESS", help="vLLM's replay endpoint; without it no gap is repaired.")
@click.option("--topic", default="", help="The topic that vLLM was given.")
@click.option("--instance", required=True, help="Whose blocks they are.")
@click.option("--member", default="dp0", show_default=True, help="Which of its streams; one bridge for each.")
@click.option("--model", default="", help="Part of the blocks' names; a router has to give the same.")
@click.option("--start-wait", "start_wait_s", default=300.0, show_default=True, help="Seconds for the first sign.")
@click.option("--dead-after", "dead_after_s", default=30.0, show_default=True, help="Silent seconds until the alarm.")
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
@broker_options
@json_option
def vllm_events(
    endpoint: str, replay: str, topic: str, nats_url: str, token: str, prefix: str, as_json: bool, **options: object
) -> int:
    """Publish which blocks a vLLM server's prefix cache takes up and drops, on kv.blocks.INSTANCE; no token ids.

    vLLM has to be started with --kv-events-config. Gaps are repaired from its replay endpoint; where that is not
    possible, routers are told that nothing is known. A vLLM that started anew is noticed. Once it gives no sign of life
    there is an alarm on the bus, and status 1. With --json one document on stdout at the end.
    """
    if find_spec("zmq") is None:
        raise ConfigError("vLLM's KV events come over ZeroMQ: pip install 'kvbus[vllm-events]'")
    from kvbus.engines.zmq_events import ZmqEvents

    set_up_logging(str(options.pop("log_level")))
    settings = BridgeSettings(**options)  # type: ignore[arg-type]
    return asyncio.run(_run(ZmqEvents(endpoint, replay, topic), settings, nats_url, token, prefix, as_json=as_json))


async def _run(
    stream: "ZmqEvents", settings: BridgeSettings, nats_url: str, token: str, prefix: str, *, as_json: bool
) -> int:
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: this.cancel() if this else None)
    async with stream:
        bus = await connect(nats_url, token, prefix, name=f"{settings.instance}.{settings.member}")
        working = BlockBridge(stream, bus, Topics(prefix), settings, next_epoch=_next_epoch)
        try:
            reason = await working.run()
        except asyncio.CancelledError:
            reason = ""
            await _farewell(working)
        finally:
            await bus.close()
    counts = {**working.counts, "garbage": working.counts["garbage"] + stream.counts["garbage"]}
    if as_json:
        print_document({"alarm": reason, "counts": counts})
    if reason:
        click.echo(f"kvbus: {reason}; routers were told that its blocks are unknown", err=True)
    return EXIT_FAILED if reason else 0


async def _farewell(working: BlockBridge) -> None:
    try:
        async with asyncio.timeout(FAREWELL_S):
            await working.give_up("the bridge was told to stop")
    except TimeoutError:
        click.echo("kvbus: the broker is away, so routers were not told that this bridge stopped", err=True)


def _next_epoch() -> int:
    """The clock's seconds for people, and a nonce: epochs are compared for equality only."""
    return epoch_from(max(1, int(time.time()) % EPOCH_COUNTER_MAX), secrets.randbits(32))
