"""`kvbus vllm -- ARGS`: a kvbus worker and a vLLM server that uses it, started together and ended together."""

import asyncio
import os
import shlex
import signal
import sys
from pathlib import Path

import click

from kvbus.bus_guards import shown as shown_url
from kvbus.commands.common import EXIT_FAILED, broker_options, entering, json_option, print_document
from kvbus.commands.vllm_launch import Server, ServerPlan, find_vllm, option_of
from kvbus.commands.worker import default_run_dir
from kvbus.config import DIGESTS, discover, socket_path
from kvbus.errors import ConfigError
from kvbus.topics import escape

SOCKET_WAIT_S = 30.0
"""A worker listens within a second, once the broker has answered it."""
WORKER_STOP_S = 30.0
"""A worker's own shutdown is bounded by its parts' budgets; then it is killed."""
LOOK_S = 0.05


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--instance", default="a", show_default=True, help="The serving instance's name.")
@click.option("--member", default="m0", show_default=True, help="This process among the instance's hosts.")
@click.option("--python", default=sys.executable, help="The interpreter that has vLLM and kvbus; else this one.")
@click.option(
    "--store",
    type=click.Choice(["every", "asked", "none"]),
    default="every",
    show_default=True,
    help="Whose KV goes into the pool: all prompts', those that ask for it, or none but what transfers need.",
)
@click.option("--pages", default=256, show_default=True, help="Pages in the pool: one for each block of tokens.")
@click.option("--prompt-tokens-max", default=2048, show_default=True, help="Longest prompt to keep room for.")
@click.option("--allow", multiple=True, metavar="NAME", help="An instance to take KV from; none: all are refused.")
@click.option("--digests", type=click.Choice(DIGESTS), default="off", show_default=True, help="When pages are hashed.")
@click.option("--transport", default="auto", show_default=True, help="How pages are read; see `kvbus worker`.")
@click.option("--run-dir", type=click.Path(path_type=Path), default=None, help="Folder for socket and lock.")
@click.option("--any-version", is_flag=True, help="Run with a vLLM that the connector was not tested with.")
@click.option("--show", is_flag=True, help="Print the two commands, and run nothing.")
@broker_options
@json_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="-- VLLM-ARGS...")
def vllm(
    nats_url: str, token: str, python: str, any_version: bool, show: bool, as_json: bool, **options: object
) -> int:
    """Run a kvbus worker and a vLLM server that keeps its KV in the worker's pool, until either ends.

    What follows -- goes to vLLM's OpenAI server as it stands; --kv-transfer-config is written here, and --block-size 32
    added where none is given. Both commands are printed. The worker is started first and ended last.
    """
    found = find_vllm(python, any_version=any_version)
    files = entering(discovered=not nats_url)
    if not nats_url:
        nats_url, discovered = discover()
        token = token or discovered
    run_dir = Path(str(options["run_dir"] or default_run_dir()))
    instance, member = str(options["instance"]), str(options["member"])
    plan = ServerPlan(
        python=python,
        socket=socket_path(run_dir, instance, member),
        arguments=tuple(map(str, _words(options["arguments"]))),
        store=str(options["store"]),
        any_version=any_version,
    )
    if not option_of(plan.arguments, "--model") and not (plan.arguments and plan.arguments[0][:1] != "-"):
        raise ConfigError("vLLM is given no model: kvbus vllm ... -- --model FOLDER")
    environment = {**os.environ, "KVBUS_NATS_TOKEN": token}
    worker = [sys.executable, "-m", "kvbus", "worker", "--engine", "vllm", "--instance", escape(instance)]
    worker += ["--member", member, "--nats", nats_url, "--prefix", str(options["prefix"]), "--run-dir", str(run_dir)]
    worker += ["--pages", str(options["pages"]), "--prompt-tokens-max", str(options["prompt_tokens_max"])]
    worker += ["--digests", str(options["digests"]), "--transport", str(options["transport"]), "--url", plan.url]
    worker += [part for name in _words(options["allow"]) for part in ("--allow", str(name))]
    if files["credentials"]:
        environment["KVBUS_NATS_CREDENTIALS"] = str(files["credentials"])
    if files["tls"]:
        tls = {"--tls-ca": files["tls"].ca, "--tls-cert": files["tls"].cert, "--tls-key": files["tls"].key}
        worker += [part for name, file in tls.items() if file for part in (name, str(file))]
    told = shlex.join(worker).replace(nats_url, shown_url(nats_url))
    click.echo(f"worker: {told}", err=True)
    click.echo(f"{found.distribution} {found.version}: {plan.shown()}", err=True)
    if as_json:
        print_document({"worker": told, "server": plan.shown()})
    if show:
        return 0
    return asyncio.run(_run(worker, environment, plan))


def _words(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else ()


async def _run(command: list[str], environment: dict[str, str], plan: ServerPlan) -> int:
    """Start the worker, then vLLM; when either ends, or we are told to, end vLLM, then the worker."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    command = [*command, "--parent-pid", str(os.getpid())]
    worker = await asyncio.create_subprocess_exec(
        *command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    server = Server(plan)
    try:
        if not await _listens(plan.socket, worker, stop):
            return 0 if stop.is_set() else _status(await worker.wait())
        await server.start()
        return await _until_one_ends(worker, server, stop)
    finally:
        await server.stop()
        await _end(worker)


async def _listens(socket: Path, worker: asyncio.subprocess.Process, stop: asyncio.Event) -> bool:
    """Wait until the worker's socket is there; False where it ended, or we were told to stop."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + SOCKET_WAIT_S
    while loop.time() < ends_at:
        if worker.returncode is not None or stop.is_set():
            return False
        if await asyncio.to_thread(socket.exists):
            return True
        await asyncio.sleep(LOOK_S)
    raise ConfigError(f"the worker did not listen on {socket} within {SOCKET_WAIT_S:g} s; its log stands above")


async def _until_one_ends(worker: asyncio.subprocess.Process, server: Server, stop: asyncio.Event) -> int:
    if server.process is None:
        raise ConfigError("vLLM was not started")
    told, of_worker, of_server = (
        loop_task for loop_task in map(asyncio.ensure_future, (stop.wait(), worker.wait(), server.process.wait()))
    )
    try:
        await asyncio.wait({told, of_worker, of_server}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (told, of_worker, of_server):
            task.cancel()
    if stop.is_set():
        return 0
    who, status = ("vLLM", server.process.returncode) if worker.returncode is None else ("worker", worker.returncode)
    click.echo(f"kvbus: {who} ended with status {status}, so both end", err=True)
    return _status(status)


def _status(status: int | None) -> int:
    """A part that ended by itself, even well, has ended what was to run until somebody stops it."""
    return status if status is not None and status > 0 else EXIT_FAILED


async def _end(worker: asyncio.subprocess.Process) -> None:
    if worker.returncode is None:
        worker.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(WORKER_STOP_S):
            await worker.wait()
    except TimeoutError:
        worker.kill()
        await worker.wait()
