"""Subscriptions that outlive their client: what is dropped stays dropped, whatever is going on beside it."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvbus.bus_access import Denials, DeniedError
from kvbus.bus_routes import Routes
from kvbus.errors import BusError
from tests.waiting import until

SUBJECT = "kv.hb.a"


@dataclass(eq=False)
class OneSubscription:
    closed: bool = False

    async def unsubscribe(self) -> None:
        if self.closed:
            raise BusError("it was closed before")
        self.closed = True


@dataclass
class SlowClient:
    """A client of a broker that denies each subscription; how long it takes over each step is for a test to say."""

    denials: Denials
    made: list[OneSubscription] = field(default_factory=list)
    asked: int = 0
    flushing: int = 0
    may_subscribe: asyncio.Event = field(default_factory=asyncio.Event)
    may_flush: asyncio.Event = field(default_factory=asyncio.Event)

    async def subscribe(self, _subject: str, **_limits: object) -> OneSubscription:
        self.asked += 1
        await self.may_subscribe.wait()
        self.made.append(OneSubscription())
        return self.made[-1]

    async def flush(self) -> None:
        self.denials.heard(Exception(f'permissions violation for subscription to "{SUBJECT}"'))
        self.flushing += 1
        await self.may_flush.wait()


async def made(call: Awaitable[Any]) -> Any:  # noqa: ANN401 - whatever it returns
    return await call


async def ignore(_message: object) -> None:
    """Nothing comes."""


async def test_what_is_denied_while_it_is_asked_for_again_is_taken_off_once_and_left_nowhere() -> None:
    denials = Denials()
    client = SlowClient(denials)
    routes = Routes[object](made, denials, lambda: client, lambda: True)
    client.may_subscribe.set()
    adding = asyncio.ensure_future(routes.add(SUBJECT, ignore))
    await until(lambda: client.flushing == 1)
    routes.note_denied("subscription", SUBJECT)
    client.may_subscribe.clear()
    mending = asyncio.ensure_future(routes.mend())
    await until(lambda: client.asked == 2)
    client.may_flush.set()
    with pytest.raises(DeniedError):
        await adding
    client.may_subscribe.set()
    await mending
    assert [one.closed for one in client.made] == [True, True]
    assert routes.routes == []
