"""Counts what HTTP requests came to, by route, method and class of status: words of the code, never of a client."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ELSEWHERE: Final = "other"
"""Stands for paths and methods that no door has."""
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
TRANSFER_ROUTE: Final = "/v1/kv_transfer"
REFUSALS: Final[Mapping[int, str]] = {
    400: "bad_request",
    403: "source",
    404: "unknown_instance",
    408: "slow_body",
    413: "too_long",
    500: "fault",
    503: "unavailable",
}
"""What a status means where a transfer was asked for."""
_FAULT: Final = 500


class RequestCounts:
    """How many requests each route answered with which status; one entry for each that ever occurred."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()

    def add(self, method: str, route: str, status: int) -> None:
        """Count one answer."""
        self._counts[method, route, status] += 1

    def by_class(self) -> Iterator[tuple[dict[str, str], int]]:
        """Yield the labels and the number of requests of each route, method and class of status."""
        classes: Counter[tuple[str, str, str]] = Counter()
        for (method, route, code), count in self._counts.items():
            classes[method, route, f"{code // 100}xx"] += count
        for (method, route, status), count in sorted(classes.items()):
            yield {"method": method, "route": route, "status": status}, count

    def refused(self) -> dict[str, int | float | str]:
        """Return how many requests for a transfer were not taken on, by reason."""
        refused: dict[str, int | float | str] = {}
        for status, word in REFUSALS.items():
            refused[f"refused_{word}"] = self._counts["POST", TRANSFER_ROUTE, status]
        return refused


class Metering:
    """Counts the answers of an application. A stream counts once it begins, and what breaks before that as a fault.

    `routes` are the paths of the handlers. One handler serves a path and the same below each instance: one route.
    """

    def __init__(self, app: ASGIApp, *, counts: RequestCounts, routes: Mapping[object, str]) -> None:
        self._app = app
        self._counts = counts
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and note what was answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._note(scope, int(message["status"]))
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            if not begun:
                self._note(scope, _FAULT)
            raise

    def _note(self, scope: Scope, status: int) -> None:
        method = str(scope["method"])
        route = self._routes.get(scope.get("endpoint"), ELSEWHERE)
        self._counts.add(method if method in METHODS else ELSEWHERE, route, status)
