"""Trace context at the HTTP door: a caller's `traceparent` is taken in, and what is asked for it carries it on."""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvbus import tracing
from kvbus.traceparent import checked_traceparent

SERVER_ERROR = 500


class Traced:
    """One span for each request, below that of its caller; a header that is no traceparent is as good as none.

    Its name says the method alone: a path holds names and hashes, of which there is no end. `routes` are the paths of
    the handlers as they were written.
    """

    def __init__(self, app: ASGIApp, *, routes: Mapping[object, str]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on within its span."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parent = checked_traceparent(Request(scope).headers.get("traceparent"))
        about = {"http.request.method": str(scope["method"]), "url.path": str(scope["path"])}
        span = tracing.begin(f"HTTP {scope['method']}", parent, about, kind="server")
        failure = "no answer"

        async def send_noted(message: Message) -> None:
            nonlocal failure
            if message["type"] == "http.response.start":
                status = int(message["status"])
                route = self._routes.get(scope.get("endpoint"), "")
                told: dict[str, int | str] = {"http.response.status_code": status, "http.route": route}
                span.note(**told)
                failure = f"status {status}" if status >= SERVER_ERROR else ""
            await send(message)

        try:
            with tracing.within(span.traceparent):
                await self._app(scope, receive, send_noted if span.is_recorded else send)
        finally:
            span.end(failure)
