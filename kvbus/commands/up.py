"""`kvbus up`: a broker and two instances on this host, until Ctrl-C."""

import asyncio
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import click
from pydantic import ValidationError

from kvbus.commands.cluster import Cluster, ClusterPlan
from kvbus.commands.common import EXIT_FAILED, console, entering, entering_options, json_option, print_document
from kvbus.commands.gateway import is_installed
from kvbus.commands.log_lines import log_option
from kvbus.commands.worker import engine_option, engine_options
from kvbus.config import DIGESTS, TransferLimits, state_dir, write_state
from kvbus.errors import ConfigError


@click.command()
@engine_option
@click.option("--engine-options", "options", default="", metavar="JSON", help="Options of the engines.")
@click.option("--instances", default="a,b", show_default=True, help="Names, separated by commas.")
@click.option("--pages", default=256, show_default=True, help="Pages in each pool.")
@click.option("--prompt-tokens-max", default=2048, show_default=True, help="Longest prompt to keep room for.")
@click.option(
    "--transport",
    "--backend",
    "backend",
    type=click.Choice(["auto", "ucx", "memory", "socket", "ucx-py"]),
    default="ucx",
    show_default=True,
    help="How pages are read; auto: the cheapest way for each transfer.",
)
@click.option("--rate-limit", default=0, metavar="BYTES_S", help="Upper limit for pulled bytes per second.")
@click.option("--digests", type=click.Choice(DIGESTS), default="off", show_default=True, help="When pages are hashed.")
@click.option("--nats", "nats_url", default="", metavar="URL", help="Use this broker instead of starting one.")
@click.option("--token", default="", envvar="KVBUS_NATS_TOKEN", help="The broker's token.")
@click.option("--port", default=0, help="Port for the broker that is started; 0 takes a free one.")
@click.option("--auth", "guarded", is_flag=True, help="Give that broker users: a credential for each who speaks.")
@click.option("--http/--no-http", default=is_installed, help="Serve HTTP as well; by default where it is installed.")
@click.option("--http-port", default=0, metavar="PORT", help="Its port; 0 takes a free one.")
@click.option(
    "--metrics-port",
    default=0,
    metavar="PORT",
    help="Let each worker serve its metrics as well: the first here, the others at the ports that follow.",
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
    default=300.0,
    show_default=True,
    envvar="KV_TRANSFER_DEDUP_TTL",
    help="Seconds in which a repeat joins.",
)
@log_option
@entering_options
@json_option
def up(as_json: bool, options: str, instances: str, **settings: object) -> int:
    """Start a broker and two instances on this host, and run until Ctrl-C.

    `kvbus watch`, `kvbus stage` and Publisher() find them by themselves.
    """
    if settings["guarded"] and settings["nats_url"]:
        raise click.BadParameter("the broker of --nats has its own users: give --credentials", param_hint="--auth")
    engine = str(settings["engine"])
    plan = ClusterPlan(
        instances=_names(instances),
        engine=engine,
        engine_options=engine_options(engine, options),
        pages=int(str(settings["pages"])),
        prompt_tokens_max=int(str(settings["prompt_tokens_max"])),
        backend=str(settings["backend"]),
        rate_limit_bytes_s=int(str(settings["rate_limit"])),
        digests=str(settings["digests"]),
        nats_url=str(settings["nats_url"]),
        nats_token=str(settings["token"]),
        nats_port=int(str(settings["port"])),
        store_dir=state_dir() / "nats",
        guarded=bool(settings["guarded"]),
        log_form=str(settings["log_form"]),
        limits=_limits(settings),
        metrics_port=int(str(settings["metrics_port"])),
        http_port=int(str(settings["http_port"])) if settings["http"] else None,
        **entering(),
    )
    return asyncio.run(_up(plan, as_json=as_json))


def _names(text: str) -> tuple[str, ...]:
    """Return the names of --instances, each of them once; a blank or a star would make it no source over HTTP."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise click.BadParameter("name at least one, such as a,b", param_hint="--instances")
    for name in names:
        if names.count(name) > 1:
            raise click.BadParameter(f"{name!r} is named {names.count(name)} times", param_hint="--instances")
        if "*" in name or any(ord(sign) <= ord(" ") for sign in name):
            raise click.BadParameter(f"{name!r} may hold no blank and no star", param_hint="--instances")
    return names


def _limits(settings: Mapping[str, object]) -> TransferLimits:
    """Return the limits that workers and gateway share."""
    try:
        return TransferLimits.model_validate(
            {"inflight_max": settings["inflight_max"], "dedup_ttl_s": settings["dedup_ttl"]}
        )
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise ConfigError(
            f"setting {problem['loc'][0]} does not fit: {problem['msg']}", got=problem["input"]
        ) from error


async def _up(plan: ClusterPlan, *, as_json: bool) -> int:
    screen = console(as_json=as_json)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    cluster = Cluster(plan)
    starting = asyncio.ensure_future(cluster.start(lambda text: screen.print(f"[dim]{text} …[/]")))
    stopping = asyncio.ensure_future(stop.wait())
    path: Path | None = None
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return 0
        starting.result()
        state = _state(cluster)
        path = write_state(state)
        if as_json:
            print_document({key: value for key, value in state.items() if key != "token"})
        _explain(cluster, screen.print)
        screen.print(f"[dim]address and token: {path}[/]")
        ended = asyncio.ensure_future(
            cluster.until_part_ends(
                lambda name: screen.print(f"instance {name} has left; all else goes on until Ctrl-C")
            )
        )
        await asyncio.wait({stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            ended.cancel()
            return 0
        cluster.keep_logs = True
        screen.print(f"[red]{ended.result()}[/]")
        return EXIT_FAILED
    finally:
        starting.cancel()
        stopping.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        screen.print("[dim]stopping …[/]")
        await cluster.stop()
        if path is not None:  # one that we did not write belongs to a `kvbus up` that runs on
            path.unlink(missing_ok=True)


def _state(cluster: Cluster) -> dict[str, object]:
    sockets = {name: str(cluster.socket(name)) for name in cluster.plan.instances}
    state: dict[str, object] = {"nats_url": cluster.url, "token": cluster.token, "prefix": cluster.plan.prefix}
    state["sockets"] = sockets
    if cluster.door is not None:
        state["http_url"] = cluster.door.url
    if cluster.credentials:
        state["credentials"] = str(cluster.credentials)
    return state


def _explain(cluster: Cluster, say: Callable[[str], None]) -> None:
    names = cluster.plan.instances
    for name, one in cluster.registered.items():
        size = one.record.pages * one.record.page_bytes / 1e6
        engine = (
            one.record.engine if one.record.model == one.record.engine else f"{one.record.engine} {one.record.model}"
        )
        say(f"instance [bold]{name}[/]: {engine}, {one.record.pages} pages, {size:.0f} MB")
    say(f"broker: {cluster.url}")
    if cluster.plan.metrics_port:
        say(f"metrics: {', '.join(map(cluster.metrics_url, names))}")
    if cluster.door is not None:
        say(f"gateway: {cluster.door.url} (what it offers: {cluster.door.url}/docs)")
        say(f"live page: {cluster.door.url}/")
    if cluster.plan.guarded:
        say(f"credentials: {cluster.keys}")
    if len(names) > 1:
        say("in other shells:")
        say("  kvbus top")
        say(f'  kvbus stage --from {names[0]} --to {names[1]} "…a prompt…"')
    say("Ctrl-C stops everything.")
