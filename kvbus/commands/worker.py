"""`kvbus worker`: one member of one instance, in the foreground until it is told to stop."""

import asyncio
import json
import signal
import tempfile
from pathlib import Path

import click

from kvbus.commands.common import broker_options, json_option, print_document, set_up_logging
from kvbus.config import ENGINES, WorkerSettings, checked_settings, discover
from kvbus.engines.model_cache import default_folder
from kvbus.errors import ConfigError
from kvbus.topics import Topics
from kvbus.worker import run_worker

LOG_LEVELS = ("debug", "info", "warning", "error")


def default_run_dir() -> Path:
    """Return where sockets and locks go: short, since a socket's path has at most 107 bytes."""
    import os

    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"kvbus-{os.getuid()}"


def engine_options(engine: str, given: str) -> dict[str, object]:
    """Return an engine's options: those given as JSON, and for transformers the cached model where none is named."""
    import os

    try:
        options = json.loads(given) if given else {}
    except ValueError as error:
        raise ConfigError(f"--engine-options is not JSON: {error}", got=given[:80]) from error
    if not isinstance(options, dict):
        raise ConfigError("--engine-options must be a JSON object", got=type(options).__name__)
    if engine == "transformers" and "folder" not in options:
        options["folder"] = str(default_folder(os.environ))
    return options


@click.command()
@click.option("--instance", required=True, help="The serving instance's name.")
@click.option("--member", default="m0", show_default=True, help="This process among the instance's hosts.")
@click.option("--engine", type=click.Choice(ENGINES), default="toy", show_default=True)
@click.option("--engine-options", default="", metavar="JSON", help="Options of the engine, e.g. its model folder.")
@click.option("--pages", default=256, show_default=True, help="Pages in the pool.")
@click.option("--prompt-tokens-max", default=2048, show_default=True, help="Longest prompt to keep room for.")
@click.option("--allow", "source_allow", multiple=True, help="An instance to take KV from; none: all are refused.")
@click.option("--inflight-max", default=4, show_default=True, help="Transfers at a time.")
@click.option("--dedup-ttl", default=300.0, show_default=True, help="Seconds in which a repeat joins.")
@click.option("--backend", type=click.Choice(["ucx", "memory"]), default="ucx", show_default=True)
@click.option("--devices", default="lo", show_default=True, help="Network devices for UCX.")
@click.option("--rate-limit", default=0, metavar="BYTES_S", help="Upper limit for pulled bytes per second.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=None, help="Folder for socket and lock.")
@click.option("--parent-pid", default=0, hidden=True, help="Stop when this process has ended.")
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
@broker_options
@json_option
def worker(nats_url: str, token: str, source_allow: tuple[str, ...], as_json: bool, **options: object) -> None:
    """Run one member of one instance; its engine starts with it, in a process of its own.

    Logs go to stderr. With --json one document on stdout says when it is ready.
    """
    set_up_logging(str(options.pop("log_level")))
    if not nats_url:
        nats_url, found = discover()
        token = token or found
    settings = _settings(nats_url, token, source_allow, options)
    asyncio.run(_run(settings, as_json=as_json))


def _settings(nats_url: str, token: str, source_allow: tuple[str, ...], options: dict[str, object]) -> WorkerSettings:
    limits = {
        "inflight_max": options.pop("inflight_max"),
        "dedup_ttl_s": options.pop("dedup_ttl"),
        "source_allow": source_allow,
    }
    engine = str(options["engine"])
    return checked_settings(
        nats_url=nats_url,
        nats_token=token,
        engine_options=engine_options(engine, str(options.pop("engine_options"))),
        network_devices=options.pop("devices"),
        rate_limit_bytes_s=options.pop("rate_limit"),
        run_dir=options.pop("run_dir") or default_run_dir(),
        limits=limits,
        **options,
    )


async def _run(settings: WorkerSettings, *, as_json: bool) -> None:
    from kvbus.bus import NatsBus

    def ready(text: str) -> None:
        if as_json:
            socket = str(settings.socket_path)
            print_document({"ready": True, "instance": settings.instance, "member": settings.member, "socket": socket})
        else:
            click.echo(text, err=True)

    bus = await NatsBus.connect(
        settings.nats_url,
        name=f"{settings.instance}.{settings.member}",
        token=settings.nats_token or None,
        topics=Topics(settings.prefix),
    )
    try:
        await run_worker(settings, bus, on_ready=ready)
    finally:
        # A second Ctrl-C while the connection drains must not leave a trace back.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        await bus.close()
