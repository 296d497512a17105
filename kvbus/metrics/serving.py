"""`GET /metrics` of one worker: a small server on the worker's own loop, bounded in all that a client could stretch.

It answers one request for each connection. Rendering takes some milliseconds, and only while somebody asks.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

from kvbus.errors import ConfigError
from kvbus.metrics.reading import Counted, Reading, Section
from kvbus.metrics.rendering import CONTENT_TYPE, Exposition
from kvbus.metrics.table import BUILD, MEMBER
from kvbus.version import VERSION

PATH = "/metrics"
CONNECTIONS_MAX = 16
"""A few servers of Prometheus, each with one connection for some milliseconds; who comes beyond is closed at once."""
HEAD_LENGTH_MAX_BYTES = 8 << 10
"""Prometheus sends some 300 bytes; other servers stop at this length as well."""
EXCHANGE_S = 5.0
"""For a request to arrive and its answer to leave: half of Prometheus' own patience."""
_READING: Final = ("GET", "HEAD")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WorkerMetrics:
    """What a worker's server tells. It knows nothing of the member until `follow`."""

    instance: str
    member: str
    exchange_s: float = EXCHANGE_S
    _counted: Callable[[], Counted] = dict
    _exposition: Exposition = field(default_factory=Exposition)
    _open: int = 0

    def follow(self, counted: Callable[[], Counted]) -> None:
        """Take the member's counters from here, each time that somebody asks."""
        self._counted = counted

    def rendered(self) -> bytes:
        """Return the metrics as they stand."""
        who = {"instance": self.instance, "member": self.member}
        return self._exposition.render(
            (
                Section(BUILD, (Reading({"one": 1}, {**who, "version": VERSION}),)),
                Section(MEMBER, (Reading(self._counted(), who),)),
            )
        )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection, and close it."""
        self._open += 1
        try:
            if self._open <= CONNECTIONS_MAX:
                async with asyncio.timeout(self.exchange_s):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.debug("a client of the metrics went: %r", error)
        finally:
            self._open -= 1
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        target = rest.partition(" ")[0].partition("?")[0]
        if target != PATH:
            return _answered("404 Not Found", f"only {PATH} is here\n".encode())
        if method not in _READING:
            return _answered("405 Method Not Allowed", b"metrics are read with GET\n", allow=", ".join(_READING))
        body = self.rendered()
        return _answered("200 OK", body, content_type=CONTENT_TYPE, send_body=method == "GET")


@contextlib.asynccontextmanager
async def metrics_served(metrics: WorkerMetrics, host: str, port: int) -> AsyncIterator[str]:
    """Serve a worker's metrics while the block runs; gives the URL. ConfigError where that address cannot be had."""
    try:
        server = await asyncio.start_server(metrics.serve, host, port, limit=HEAD_LENGTH_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"metrics cannot be served at {host} port {port}: {error}") from error
    try:
        bound, at = server.sockets[0].getsockname()[:2]
        yield f"http://[{bound}]:{at}{PATH}" if ":" in bound else f"http://{bound}:{at}{PATH}"
    finally:
        server.close()
        await server.wait_closed()


def _answered(
    status: str, body: bytes, *, content_type: str = "text/plain", allow: str = "", send_body: bool = True
) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-type: {content_type}", f"content-length: {len(body)}", "connection: close"]
    lines += [f"allow: {allow}"] if allow else []
    return "\r\n".join([*lines, "", ""]).encode() + (body if send_body else b"")
