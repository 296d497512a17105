"""`make demo-vllm`: two unchanged vLLM servers, one prompt, and its KV moved from one to the other over the bus.

`python -m kvbus.commands.demo_vllm --python .venv-vllm/bin/python`. Exit status 0 if all that the table says holds.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import click
from rich.console import Console

from kvbus.commands.cluster import Cluster, ClusterPlan
from kvbus.commands.common import EXIT_FAILED, console, json_option, print_document, run
from kvbus.commands.demo_vllm_result import VllmShown, vllm_table
from kvbus.commands.demo_vllm_steps import DESTINATION, SOURCE, Steps, Town
from kvbus.commands.vllm_launch import Server, ServerPlan, find_vllm
from kvbus.commands.working import working
from kvbus.engines.model_cache import default_folder
from kvbus.errors import ConfigError

READY_WAIT_S = 600.0
"""Two servers that start at once take two minutes on two quiet cores; five times that, for a machine that is not."""
PAGES = 224
"""Five times the prompt under as many salts: each is 31 blocks of 1.5 MB, so a pool is 330 MB."""
MODEL = "smollm2"
KV_BYTES = 256 << 20
"""182 blocks of 32 tokens: without a bound, each server takes most of the machine's memory."""


@click.command()
@click.option("--python", default=sys.executable, help="The interpreter that has vLLM and kvbus.")
@click.option("--model-folder", type=click.Path(path_type=Path), default=None, help="A model; else SmolLM2's cache.")
@click.option("--any-version", is_flag=True, help="Run with a vLLM that the connector was not tested with.")
@click.option("--transport", default="ucx", show_default=True, help="How pages are read; see `kvbus worker`.")
@json_option
def demo_vllm(python: str, model_folder: Path | None, transport: str, any_version: bool, as_json: bool) -> int:
    """Show two vLLM servers that take each other's KV: cold, staged, poisoned, and with one of them killed."""
    found = find_vllm(python, any_version=any_version)
    folder = model_folder or default_folder(os.environ)
    if not (folder / "config.json").exists():
        raise ConfigError(f"there is no model in {folder}: run scripts/get_model")
    plan = ClusterPlan(
        instances=(SOURCE, DESTINATION),
        engine="vllm",
        engine_options={},
        pages=PAGES,
        backend=transport,
        digests="always",
        ready_wait_s=READY_WAIT_S,
    )
    shown = VllmShown(f"{found.distribution} {found.version}")
    return asyncio.run(_demo(plan, shown, python, folder, as_json=as_json))


async def _demo(plan: ClusterPlan, shown: VllmShown, python: str, folder: Path, *, as_json: bool) -> int:
    screen = console(as_json=as_json)
    this = asyncio.current_task()
    if this is not None:  # told to end, it ends what it started, as it does on Ctrl-C
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    cluster = Cluster(plan)
    servers = {name: _server(cluster, name, core, python, folder) for core, name in enumerate(plan.instances)}
    began = time.monotonic()
    async with _started(cluster, servers, screen):
        shown.start_s = time.monotonic() - began
        await Steps(Town(cluster, servers, MODEL), shown, screen).play()
    screen.print(vllm_table(shown))
    for fault in shown.faults:
        screen.print(f"[red]does not hold: {fault}[/]")
    if as_json:
        print_document(shown.document())
    return EXIT_FAILED if shown.faults else 0


def _server(cluster: Cluster, name: str, core: int, python: str, folder: Path) -> Server:
    arguments = ["--model", str(folder), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(_port())]
    arguments += ["--dtype", "float32", "--block-size", "32", "--kv-cache-memory-bytes", str(KV_BYTES)]
    arguments += ["--enforce-eager", "--max-model-len", "2048"]
    cores = os.cpu_count() or 1
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": str(core % cores),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    plan = ServerPlan(python, cluster.socket(name), arguments, store="asked", environment=environment)
    return Server(plan, cluster.run_dir / f"{name}.vllm.log")


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@asynccontextmanager
async def _started(cluster: Cluster, servers: dict[str, Server], screen: Console) -> AsyncIterator[None]:
    """Start workers and servers at once, and end all of them, whatever happens: servers first, the broker last."""
    try:
        with working(screen, "starting a broker, two workers and two vLLM servers") as say:
            for name, server in servers.items():
                screen.print(f"[dim]{name}: {server.plan.shown()}[/]", soft_wrap=True)
            starting = [asyncio.ensure_future(cluster.start(say))]
            starting += [asyncio.ensure_future(_serve(cluster, name, one, say)) for name, one in servers.items()]
            try:
                await asyncio.gather(*starting)
            except BaseException:
                cluster.keep_logs = True
                screen.print(f"logs: {cluster.run_dir}")
                raise
            finally:
                for task in starting:
                    task.cancel()
                await asyncio.gather(*starting, return_exceptions=True)
        yield
    except ConfigError:
        cluster.keep_logs = True
        raise
    finally:
        with working(screen, "stopping"):
            await asyncio.gather(*(server.stop() for server in servers.values()))
            await cluster.stop()


async def _serve(cluster: Cluster, name: str, server: Server, say: Callable[[str], None]) -> None:
    """Start a server once its worker listens, and wait until it answers."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + READY_WAIT_S
    while not await asyncio.to_thread(cluster.socket(name).exists):
        if loop.time() > ends_at:
            raise ConfigError(f"the worker of {name} does not listen")
        await asyncio.sleep(0.1)
    await server.start()
    await server.until_ready(READY_WAIT_S, say)


if __name__ == "__main__":
    sys.exit(run(demo_vllm))
