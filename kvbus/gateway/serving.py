"""A gateway's life: its parts made once, served by uvicorn until it is told to stop, and ended in order."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn

from kvbus.errors import ConfigError
from kvbus.gateway.answers import Bodies
from kvbus.gateway.app import application
from kvbus.gateway.caches import Caches
from kvbus.gateway.directory import Directory
from kvbus.gateway.engines import Engines
from kvbus.gateway.feed import Feed
from kvbus.gateway.page_feed import PageFeed
from kvbus.gateway.parts import Parts
from kvbus.gateway.settings import GatewaySettings
from kvbus.gateway.story_reader import Stories
from kvbus.gateway.transfer_doors import TransferTeller
from kvbus.gateway.transfers import Transfers
from kvbus.publisher import Publisher
from kvbus.topics import Topics
from kvbus.transport import Bus

CONNECTIONS_MAX = 2_048
"""Four times what a busy front end keeps open; beyond it uvicorn answers 503 by itself."""
STOP_WAIT_S = 5.0
"""Requests that run when the gateway stops may end for this long, as other parts of a shutdown may."""
KEEP_ALIVE_S = 30.0


@contextlib.asynccontextmanager
async def running(settings: GatewaySettings, bus: Bus, topics: Topics) -> AsyncIterator[Parts]:
    """Make the parts of a gateway over a bus that stays open, and run them while the block does."""
    async with Publisher(bus=bus, topics=topics) as publisher:
        directory = Directory(bus)
        transfers = Transfers(
            settings=settings, directory=directory, publisher=publisher, clock=time.monotonic, wall_s=time.time
        )
        feed = Feed(bus, topics)
        feed.follow(transfers)
        feed.follow(TransferTeller())
        caches = Caches(bus=bus, topics=topics, directory=directory, publisher=publisher)
        engines = Engines(directory, settings.run_dir)
        page = PageFeed(bus=bus, topics=topics, feed=feed)
        feed.follow(page)
        stories = Stories(bus=bus, topics=topics, span=page.picture.span)
        parts = Parts(
            settings, bus, topics, publisher, directory, feed, transfers, caches, Bodies(), engines, page, stories
        )
        await directory.refresh()
        for work in (directory.run(), feed.run(), page.run()):
            parts.lives.begin(work)
        try:
            yield parts
        finally:
            feed.close()
            page.close()
            await engines.close()
            await transfers.close()
            await parts.lives.end()


@contextlib.asynccontextmanager
async def served(parts: Parts) -> AsyncIterator[str]:
    """Serve a gateway's parts while the block runs; gives the base URL."""
    listening = listen(parts.settings.host, parts.settings.port)
    url = base_url(listening)
    parts.directory.serve_at(url)
    server = Server(
        uvicorn.Config(
            application(parts),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=round(KEEP_ALIVE_S),
            timeout_graceful_shutdown=round(STOP_WAIT_S),
        )
    )
    task = parts.lives.begin(server.serve(sockets=[listening]))
    try:
        yield url
    finally:
        server.should_exit = True
        parts.feed.close()
        parts.page.close()
        await task
        listening.close()


async def run_gateway(
    settings: GatewaySettings, bus: Bus, topics: Topics, *, stop: asyncio.Event, on_ready: Callable[[str], None]
) -> None:
    """Serve until `stop` is set, or a part fails, which raises; `on_ready` hears the base URL."""
    async with running(settings, bus, topics) as parts, served(parts) as url:
        on_ready(url)
        await parts.lives.last_until(stop)


class Server(uvicorn.Server):
    """uvicorn, which leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; ConfigError where that address cannot be had.

    Connections inherit its TCP_NODELAY: an answer's head and body are two writes, and without it the second waits 40 ms
    for the client's delayed acknowledgement of the first.
    """
    try:
        listening = socket.create_server((host, port), family=_family(host), backlog=CONNECTIONS_MAX)
    except OSError as error:
        raise ConfigError(f"the gateway cannot listen at {host} port {port}: {error}") from error
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def base_url(listening: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
