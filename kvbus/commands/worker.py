"""`kvbus worker`: one member of one instance, in the foreground until it is told to stop."""

import asyncio
import gc
import json
import signal
import tempfile
from pathlib import Path

import click

from kvbus import tracing
from kvbus.bus_assets import WorkLimits
from kvbus.commands.common import Entering, broker_options, entering, json_option, print_document
from kvbus.commands.log_lines import log_option, say, set_up_logging
from kvbus.commands.worker_metrics import serving_metrics
from kvbus.config import ATTACHING, DIGESTS, ENGINES, WorkerSettings, checked_settings, discover
from kvbus.engines.model_cache import default_folder
from kvbus.errors import ConfigError
from kvbus.permissions import Role, User
from kvbus.roles.intake import FETCH_MOST
from kvbus.topics import Topics
from kvbus.worker import run_worker

LOG_LEVELS = ("debug", "info", "warning", "error")
YOUNG_OBJECTS_MAX = 10_000
"""Made before cycles are looked for: a hundred transfers' worth, nearly all of it gone by itself by then. With 700 a
worker spent a tenth of its time in looking."""


def default_run_dir() -> Path:
    """Return where sockets and locks go: short, since a socket's path has at most 107 bytes."""
    import os

    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"kvbus-{os.getuid()}"


def engine_options(engine: str, given: str) -> dict[str, object]:
    """Return an engine's options: those given as JSON, and for transformers the cached model where none is named."""
    import os

    options = json_object("--engine-options", given)
    if engine == "transformers" and "folder" not in options:
        options["folder"] = str(default_folder(os.environ))
    return options


engine_option = click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="toy",
    show_default=True,
    help="What computes; transformers needs the model that `make demo` or scripts/get_model gets.",
)
"""For commands that start workers of their own."""


def json_object(option: str, given: str) -> dict[str, object]:
    """Return the JSON object that an option holds, an empty one where it was not given."""
    try:
        document = json.loads(given) if given else {}
    except ValueError as error:
        raise ConfigError(f"{option} is not JSON: {error}", got=given[:80]) from error
    if not isinstance(document, dict):
        raise ConfigError(f"{option} must be a JSON object", got=type(document).__name__)
    return document


@click.command()
@click.option("--instance", required=True, help="The serving instance's name.")
@click.option("--member", default="m0", show_default=True, help="This process among the instance's hosts.")
@click.option("--members", default="", metavar="A,B", help="All members in order of ranks; none: no other.")
@click.option(
    "--engine",
    type=click.Choice((*ENGINES, *ATTACHING)),
    default="toy",
    show_default=True,
    help="What computes; vllm waits for a vLLM server that attaches, and the others are started here.",
)
@click.option("--engine-options", default="", metavar="JSON", help="Options of the engine, e.g. its model folder.")
@click.option("--pages", default=256, show_default=True, help="Pages in the pool.")
@click.option("--prompt-tokens-max", default=2048, show_default=True, help="Longest prompt to keep room for.")
@click.option("--allow", "source_allow", multiple=True, help="An instance to take KV from; none: all are refused.")
@click.option("--inflight-max", default=4, show_default=True, help="Transfers at a time.")
@click.option("--dedup-ttl", default=300.0, show_default=True, help="Seconds in which a repeat joins.")
@click.option(
    "--transport",
    "--backend",
    "backend",
    type=click.Choice(["auto", "ucx", "memory", "socket", "ucx-py"]),
    default="auto",
    show_default=True,
    help="How pages are read; auto: the cheapest way for each transfer.",
)
@click.option("--transport-costs", default="", metavar="JSON", help="Costs measured here, as bench/ways.py prints.")
@click.option("--socket-address", default="127.0.0.1", show_default=True, help="Where the page server listens.")
@click.option("--socket-port", default=0, show_default=True, help="Its port; 0: any that is free.")
@click.option("--socket-advertise", multiple=True, metavar="IP", help="An address that grants name instead.")
@click.option(
    "--url", "urls", multiple=True, metavar="URL", help="A base URL of this instance, as HTTP clients know it."
)
@click.option("--devices", default="lo", show_default=True, help="Network devices for UCX.")
@click.option("--ucx-tls", default="", envvar="KVBUS_UCX_TLS", metavar="A,B", help="UCX transports; none: tcp,cma.")
@click.option("--rate-limit", default=0, metavar="BYTES_S", help="Upper limit for pulled bytes per second.")
@click.option("--digests", type=click.Choice(DIGESTS), default="off", show_default=True, help="When pages are hashed.")
@click.option("--metrics", default="", metavar="HOST:PORT", help="Serve metrics here: loopback, unless HOST is given.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=None, help="Folder for socket and lock.")
@click.option("--parent-pid", default=0, hidden=True, help="Stop when this process has ended.")
@click.option("--log-level", type=click.Choice(LOG_LEVELS), default="info", show_default=True)
@log_option
@broker_options
@json_option
def worker(nats_url: str, token: str, source_allow: tuple[str, ...], as_json: bool, **options: object) -> None:
    """Run one member of one instance; its engine starts with it, in a process of its own.

    Logs go to stderr. With --json one document on stdout says when it is ready.
    """
    form = str(options.pop("log_form"))
    set_up_logging(str(options.pop("log_level")), form)
    tracing.set_up()
    files = entering(discovered=not nats_url)
    if not nats_url:
        nats_url, found = discover()
        token = token or found
    metrics = str(options.pop("metrics"))
    settings = _settings(nats_url, token, source_allow, options)
    asyncio.run(_run(settings, files, metrics, form, as_json=as_json))


def _settings(nats_url: str, token: str, source_allow: tuple[str, ...], options: dict[str, object]) -> WorkerSettings:
    limits = {
        "inflight_max": options.pop("inflight_max"),
        "dedup_ttl_s": options.pop("dedup_ttl"),
        "source_allow": source_allow,
    }
    engine, members = str(options["engine"]), str(options.pop("members"))
    return checked_settings(
        nats_url=nats_url,
        nats_token=token,
        members=tuple(members.split(",")) if members else (),
        engine_options=engine_options(engine, str(options.pop("engine_options"))),
        transport_costs=json_object("--transport-costs", str(options.pop("transport_costs"))),
        network_devices=options.pop("devices"),
        rate_limit_bytes_s=options.pop("rate_limit"),
        run_dir=options.pop("run_dir") or default_run_dir(),
        limits=limits,
        **options,
    )


async def _run(settings: WorkerSettings, files: Entering, metrics: str, form: str, *, as_json: bool) -> None:
    from kvbus.bus import NatsBus

    def ready(text: str) -> None:
        keep_what_stands()
        if as_json:
            socket = str(settings.socket_path)
            print_document({"ready": True, "instance": settings.instance, "member": settings.member, "socket": socket})
        else:
            say(text, form)

    bus = await NatsBus.connect(
        settings.nats_url,
        name=f"{settings.instance}.{settings.member}",
        token=settings.nats_token or None,
        topics=Topics(settings.prefix),
        # Room beside those that run for as many as are taken at a time: what is too much is told so, and does not wait.
        work=WorkLimits(in_flight_max=settings.limits.inflight_max + FETCH_MOST),
        **files,
    )
    try:
        _check_user(bus.user, settings)
        async with serving_metrics(metrics, settings) as on_made:
            await run_worker(settings, bus, ready, on_made)
    finally:
        # A second Ctrl-C while the connection drains must not leave a trace back.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        await bus.close()


def keep_what_stands() -> None:
    """Look for cycles in what is made from here on alone: modules, pool and parts stay for the process's life.

    A look at all of it held the interpreter for 13 to 32 ms, whichever thread's turn it came to, and the loop with it.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, *gc.get_threshold()[1:])


def _check_user(user: User | None, settings: WorkerSettings) -> None:
    """Say at once that a credential is another's; the broker would say it too, about some subject."""
    if user is None or user.role is Role.OPERATOR:
        return
    if user.role is not Role.INSTANCE or user.name != settings.instance:
        raise ConfigError(f"this credential is that of {user.role} {user.name}: give the one of {settings.instance}")
    if missing := [name for name in settings.ranks if name not in user.members]:
        known = ", ".join(user.members)
        raise ConfigError(f"this credential covers the members {known} of {user.name}, and not {', '.join(missing)}")
