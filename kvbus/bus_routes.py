"""Subscriptions that outlive the client they run on: heard again by each new client, asked for again where denied.

Knows no client's library; messages are whatever the client hands over.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kvbus.bus_access import Denials, DeniedError, denied
from kvbus.bus_link import RunningSubscription
from kvbus.errors import BusError
from kvbus.transport import Subscription

M = TypeVar("M")

QUEUED_MAX, QUEUED_MAX_BYTES = 8_192, 64 << 20
"""Beyond it a slow handler's messages drop, counted."""


class Active(Protocol):
    """A subscription of one client."""

    async def unsubscribe(self) -> None:
        """Stop hearing."""


class Client(Protocol):
    """What routes need of a client."""

    @property
    def subscribe(self) -> Callable[..., Awaitable[Active]]:
        """Subscribe to a subject or filter."""

    @property
    def flush(self) -> Callable[[], Awaitable[None]]:
        """Wait until the server has taken what was sent so far."""


class Calls(Protocol):
    """How a call of the client is made: bounded, and with its errors as ours."""

    async def __call__(self, call: Awaitable[Any]) -> Any:  # noqa: ANN401 - whatever the client returns
        """Make it."""


@dataclass(slots=True, eq=False)
class _Route(Generic[M]):
    subject: str
    on_message: Callable[[M], Awaitable[None]]
    active: Active | None = None
    deaf: bool = False  # denied by the broker


class Routes(Generic[M]):
    """All subscriptions of a bus. `client` returns the live one (BusError: there is none), `connected` says it."""

    def __init__(
        self, call: Calls, denials: Denials, client: Callable[[], Client], connected: Callable[[], bool]
    ) -> None:
        self._call = call
        self._denials = denials
        self._client = client
        self._connected = connected
        self.routes: list[_Route[M]] = []

    async def add(self, subject: str, on_message: Callable[[M], Awaitable[None]]) -> Subscription:
        """Subscribe, now and for each later client; DeniedError where the broker will not have it."""
        route = _Route(subject, on_message)
        self.routes.append(route)  # first: a client that is replaced meanwhile takes the route along
        try:
            await self._attach(self._client(), route)
        except DeniedError:
            await self._drop(route)  # the client would ask for it again at each reconnect
            raise
        except BaseException:
            self.routes.remove(route)
            raise
        return RunningSubscription(lambda: self._drop(route))

    async def attach_all(self, client: Client) -> None:
        """Let a new client hear everything."""
        for route in tuple(self.routes):
            with suppress(DeniedError):  # a right that was taken away; the others still stand
                await self._attach(client, route)

    def note_denied(self, kind: str, subject: str) -> None:
        """Take note of a denial, also of one that was heard until now: rights change while we are connected."""
        for route in self.routes:
            route.deaf |= (kind, subject) == ("subscription", route.subject.lower())

    async def mend(self) -> None:
        """Ask again for what was denied: a right that comes back must not wait for the next reconnect."""
        for route in [route for route in self.routes if route.deaf]:
            with suppress(BusError):
                await self._detach(route)
                await self._attach(self._client(), route)

    async def _attach(self, client: Client, route: _Route[M]) -> None:
        subscribing = client.subscribe(
            route.subject,
            cb=route.on_message,
            pending_msgs_limit=QUEUED_MAX,
            pending_bytes_limit=QUEUED_MAX_BYTES,
        )
        with self._denials.of("subscription", route.subject) as refused:
            route.deaf = False
            route.active = await self._call(subscribing)
            if route not in self.routes:  # it was dropped meanwhile
                await self._detach(route)
                return
            await self._call(client.flush())  # until then the server may not know of it
            if refused.done():
                raise denied("subscription", route.subject)

    async def _drop(self, route: _Route[M]) -> None:
        if route in self.routes:
            self.routes.remove(route)
        await self._detach(route)

    async def _detach(self, route: _Route[M]) -> None:
        """Let the client forget it; once, by whoever comes first: it may be asked for again as it is dropped."""
        active, route.active = route.active, None
        if active is not None and self._connected():
            await self._call(active.unsubscribe())
