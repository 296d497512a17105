"""`kvbus worker --metrics HOST:PORT`: what serves them, made only where it was asked for."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec

import click

from kvbus.config import WorkerSettings
from kvbus.errors import ConfigError
from kvbus.worker import Worker


@asynccontextmanager
async def serving_metrics(address: str, settings: WorkerSettings) -> AsyncIterator[Callable[[Worker], None] | None]:
    """Serve a worker's metrics while the block runs, if there is an address; gives who has to hear of the worker.

    Without an address nothing is imported, and nothing listens (R23).
    """
    if not address:
        yield None
        return
    host, port = split_address(address)
    if find_spec("prometheus_client") is None:
        raise ConfigError("--metrics needs more than kvbus itself: pip install 'kvbus[metrics]'")
    from kvbus.metrics.serving import WorkerMetrics, metrics_served

    metrics = WorkerMetrics(settings.instance, settings.member)
    async with metrics_served(metrics, host, port) as url:
        click.echo(f"metrics: {url}", err=True)
        yield lambda worker: metrics.follow(worker.counters)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port; an address without a host is one of the loopback."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ConfigError("--metrics must be HOST:PORT, :PORT or PORT", got=address[:80])
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)
