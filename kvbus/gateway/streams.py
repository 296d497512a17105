"""Server-sent events as an answer: one client's queue, sent until either side goes."""

import asyncio
from typing import Final, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvbus.gateway.answers import Problem
from kvbus.gateway.feed import CLIENTS_MAX, Client, Feed, frames

QUIET_S = 10.0
"""A comment after this long without news: proxies cut connections that are silent for a minute, mostly."""
SEND_WAIT_S = 20.0
"""A client that takes nothing for this long is dropped: its connection's buffer has been full all the while."""

_HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}


class Crowd(Protocol):
    """Whom a client leaves when its stream has ended."""

    def leave(self, client: Client) -> None:
        """Take a client away; harmless to repeat."""


class EventStream(Response):
    """Sends what a client's queue holds; ends when the client goes, stops reading, or the gateway stops."""

    media_type = "text/event-stream"

    def __init__(
        self, feed: Crowd, client: Client, *, quiet_s: float = QUIET_S, send_wait_s: float = SEND_WAIT_S
    ) -> None:
        super().__init__(None, 200, dict(_HEADERS), self.media_type)
        del self.headers["content-length"]
        self._feed = feed
        self._client = client
        self._quiet_s = quiet_s
        self._send_wait_s = send_wait_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; one for the head alone has it at once."""
        if scope.get("method") == "HEAD":
            self._feed.leave(self._client)
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        gone = asyncio.ensure_future(self._until_gone(receive))
        try:
            async for data in frames(self._client, quiet_s=self._quiet_s):
                async with asyncio.timeout(self._send_wait_s):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            if not gone.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            self._client.dropped = True
        finally:
            gone.cancel()
            self._feed.leave(self._client)

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._client.close(at_once=True)


def require_room(feed: Feed) -> None:
    """Raise Problem 503 where as many clients follow as this gateway serves."""
    if feed.clients >= CLIENTS_MAX:
        raise Problem(503, f"{CLIENTS_MAX} clients follow already", retry_after_s=10)
