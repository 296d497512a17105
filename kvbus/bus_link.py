"""One connection to a broker, kept alive: a client that was closed for good is replaced by a new one.

The client reconnects by itself after an ordinary loss. Some errors on a live connection (authorization expired, a
message over the broker's limit) close it for good although it was told to reconnect without end; then, and when it has
stayed away for long, the link builds a new client. While one lives, the bus looks each second what there is to mend.
The link knows no client's library: whoever makes it brings the function that opens one, subscriptions included.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from kvbus.bus_calls import Calls
from kvbus.bus_guards import Tally, jittered
from kvbus.errors import BusError, KvbusError

RETRY_MIN_S, RETRY_MAX_S = 0.2, 2.0
"""Back within a second of the broker's return, and a thousand clients spread over two seconds."""

_LOOK_EVERY_S = 1.0
"""The client's own word that it closed can get lost (its close may raise before the callback), so the link looks."""

_AWAY_MAX_S = 30.0
"""About fifteen reconnect attempts; a client that has not managed by then may be stuck, and a new one costs nothing."""

_CLOSE_S = 7.0
"""Five seconds of drain, the client's own bound, and two to say goodbye."""


class Client(Protocol):
    """What the link needs of a client."""

    @property
    def is_connected(self) -> bool:
        """Whether a message could be sent now."""

    @property
    def is_closed(self) -> bool:
        """Whether it has ended and will not come back."""

    async def drain(self) -> None:
        """Let queued messages be handled, flush, close."""

    async def close(self) -> None:
        """Disconnect at once."""


C = TypeVar("C", bound=Client)


class Link(Generic[C]):
    """Holds the current client and replaces it where needed; its `on_…` methods never raise and never wait."""

    def __init__(
        self,
        where: str,
        tally: Tally,
        open_client: Callable[[], Awaitable[C]],
        mend: Callable[[], Awaitable[None]],
    ) -> None:
        self.where = where
        self.closing = False
        self.calls = Calls()
        self._tally = tally
        self._open_client = open_client
        self._mend = mend
        self._client: C | None = None
        self._lost = asyncio.Event()
        self._away_since: float | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the first client; what `open_client` raises passes through."""
        self._client = await self._open_client()
        self._keeper = asyncio.create_task(self._keep(), name=f"kvbus bus link {self.where}")

    @property
    def connected(self) -> bool:
        """Whether a message could be sent now."""
        return self._client is not None and self._client.is_connected and not self.closing

    @property
    def client(self) -> C:
        """The live client; BusError at once while there is none, since what a client buffers then may be lost."""
        if self._client is None or not self.connected:
            state = "the bus is closed" if self.closing else "no connection to the broker; retrying in the background"
            raise BusError(state, broker=self.where)
        return self._client

    async def on_error(self, error: Exception) -> None:
        """Count and log what the client reports."""
        self._tally.complain(f"client_{type(error).__name__}", error)

    async def on_disconnected(self) -> None:
        """Count a loss of the connection."""
        if self._client is not None and not self.closing:
            self._tally.complain("disconnected", f"lost the broker at {self.where}, reconnecting")

    async def on_reconnected(self) -> None:
        """Count a return of the connection."""
        self._tally.count("reconnected")

    async def on_closed(self) -> None:
        """Wake the keeper: this client will not come back."""
        self._lost.set()

    async def close(self) -> None:
        """Let queued messages be handled, flush, disconnect; bounded, repeatable."""
        self.closing = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait({self._keeper}, timeout=_CLOSE_S)
            self._keeper = None
        client, self._client = self._client, None
        if client is not None:
            await self.retire(client, drain=True)

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._lost.wait()
            self._lost.clear()
            if self._is_lost():
                await self._replace()
            elif self.connected:
                await self._mend()

    def _is_lost(self) -> bool:
        if self._client is None or self._client.is_closed:
            return True
        if self._client.is_connected:
            self._away_since = None
            return False
        now = asyncio.get_running_loop().time()
        if self._away_since is None:
            self._away_since = now
        return now - self._away_since > _AWAY_MAX_S

    async def _replace(self) -> None:
        old, self._client = self._client, None
        if old is not None:
            await self.retire(old, drain=False)
        while self._client is None:
            try:
                self._client = await self._open_client()
            except KvbusError as error:
                self._tally.complain("rebuild_failed", error)
                await asyncio.sleep(jittered(RETRY_MIN_S, RETRY_MAX_S))
        self._away_since = None
        self._tally.complain("rebuilt", f"the client of {self.where} was closed for good; a new one took its place")

    async def retire(self, client: C, *, drain: bool) -> None:
        """End a client, bounded, whatever it says."""
        try:
            if drain and client.is_connected:
                await self.calls.within(client.drain(), _CLOSE_S)
        except Exception as error:  # noqa: BLE001 - the client is foreign code; below it is closed whatever it says
            self._tally.complain("drain_failed", error)
        try:
            if not client.is_closed:
                await self.calls.within(client.close(), _CLOSE_S)
        except Exception as error:  # noqa: BLE001 - same
            self._tally.complain("close_failed", error)


class RunningSubscription:
    """A subscription that lives until it is closed, whichever client it runs on."""

    def __init__(self, drop: Callable[[], Awaitable[None]]) -> None:
        self._drop = drop

    async def close(self) -> None:
        """Stop hearing; repeatable."""
        await self._drop()
