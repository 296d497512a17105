"""`kvbus gateway`: the HTTP door over a running broker, until it is told to stop."""

import asyncio
import signal
from importlib.util import find_spec
from pathlib import Path

import click

from kvbus import tracing
from kvbus.commands.common import broker_options, connect, json_option, print_document
from kvbus.commands.log_lines import log_option, say, set_up_logging
from kvbus.commands.worker import default_run_dir
from kvbus.errors import ConfigError
from kvbus.processes import ProcessWatch, identity
from kvbus.topics import Topics

LOG_LEVELS = ("debug", "info", "warning", "error")


def is_installed() -> bool:
    """Whether what the gateway needs beside kvbus is here."""
    return all(find_spec(name) is not None for name in ("starlette", "uvicorn"))


@click.command()
@click.option("--instance", "instances", multiple=True, metavar="NAME", help="Serve this one; none: all registered.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", default=0, show_default=True, help="Its port; 0: any that is free.")
@click.option(
    "--source-allow",
    default="",
    envvar="KV_TRANSFER_SOURCE_ALLOW",
    metavar="A,URL",
    help="Instances or base URLs to take KV from; none: all are refused.",
)
@click.option(
    "--inflight-max",
    default=4,
    show_default=True,
    envvar="KV_TRANSFER_MAX_INFLIGHT",
    help="Transfers at a time into one instance.",
)
@click.option(
    "--dedup-ttl",
    "dedup_ttl_s",
    default=300.0,
    show_default=True,
    envvar="KV_TRANSFER_DEDUP_TTL",
    help="Seconds in which a repeat joins.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    default=None,
    help="Where workers of this host have their sockets, for /v1/completions; else their own default.",
)
@click.option("--parent-pid", default=0, hidden=True, help="Stop when this process has ended.")
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
@log_option
@broker_options
@json_option
def gateway(nats_url: str, token: str, prefix: str, as_json: bool, **options: object) -> None:
    """Serve HTTP for the instances of a broker: transfers, their outcomes and counters, health, OpenAPI.

    Each instance has a base URL of its own below /instances/NAME. With --json one document on stdout says when it is
    ready. Logs go to stderr.
    """
    if not is_installed():
        raise ConfigError("the gateway needs more than kvbus itself: pip install 'kvbus[gateway]'")
    set_up_logging(str(options.pop("log_level")), str(options["log_form"]))
    tracing.set_up()
    asyncio.run(_run(nats_url, token, prefix, options, as_json=as_json))


async def _run(nats_url: str, token: str, prefix: str, options: dict[str, object], *, as_json: bool) -> None:
    from kvbus.gateway.serving import run_gateway
    from kvbus.gateway.settings import checked_gateway_settings

    parent_pid, form = int(str(options.pop("parent_pid"))), str(options.pop("log_form"))
    options["run_dir"] = options["run_dir"] or default_run_dir()
    settings = checked_gateway_settings(**options)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def ready(url: str) -> None:
        if as_json:
            print_document({"ready": True, "url": url})
        else:
            say(f"gateway: {url} (a live page; what else it offers: {url}/docs)", form)

    _watch_parent(parent_pid, stop)
    bus = await connect(nats_url, token, prefix, name="kvbus-gateway")
    try:
        await run_gateway(settings, bus, Topics(prefix), stop=stop, on_ready=ready)
    finally:
        await bus.close()


def _watch_parent(pid: int, stop: asyncio.Event) -> None:
    """Stop once whoever started this gateway has ended, so that a killed `kvbus up` leaves nothing behind."""
    if pid:
        try:
            watched = ProcessWatch(asyncio.get_running_loop()).watch(identity(pid), stop.set)
        except ProcessLookupError:
            watched = False
        if not watched:
            stop.set()
