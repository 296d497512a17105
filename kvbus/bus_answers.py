"""Who waits for what comes to an inbox: one answer to each question, or whatever a consumer delivers to one pull.

The client's own request makes a task, two timers and two random tokens for each question. Here a question costs one
future and one timer, and a wait that is given up leaves nothing behind that the client could trip over. It knows no
client.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

TURNS = 32
"""Turns of the loop for what has come by the bound: through the client's reader, parser and queue a few for each piece
that is read at once; the longest answers take less than half of them."""

M = TypeVar("M")
T = TypeVar("T")


async def first(waiting: "asyncio.Future[T]", wait_s: float, in_vain: "asyncio.Future[None]") -> T:
    """Await a future that is ours alone; TimeoutError past the bound, or once `in_vain` says that nothing comes.

    A process that was starved past the bound has its answer in the socket and fires its timers first. So what is there
    is read before anybody is said not to have answered.
    """
    loop = asyncio.get_running_loop()

    def give_up(_: object = None) -> None:
        if not waiting.done():
            waiting.set_exception(TimeoutError())

    def over(turns: int) -> None:
        if turns and not waiting.done():
            loop.call_soon(over, turns - 1)
        else:
            give_up()

    timer = loop.call_later(wait_s, over, TURNS)
    in_vain.add_done_callback(give_up)
    try:
        return await waiting
    finally:
        timer.cancel()
        in_vain.remove_done_callback(give_up)


class Answers(Generic[M]):
    """Questions under way, by the token that ends the subject of their answer.

    Tokens are random: whoever is asked one thing must not know where the answer to another is awaited.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Future[M]] = {}

    @contextmanager
    def expected(self) -> Iterator[tuple[str, "asyncio.Future[M]"]]:
        """Yield a token, and what the answer to it will be set in."""
        token, waiting = secrets.token_hex(8), asyncio.get_running_loop().create_future()
        self._waiting[token] = waiting
        try:
            yield token, waiting
        finally:
            del self._waiting[token]
            if not waiting.cancel() and not waiting.cancelled():
                waiting.exception()  # marks it as seen: nobody may have got round to awaiting it

    def take(self, token: str, message: M) -> None:
        """Hand an answer over; one that nobody awaits any more is dropped."""
        waiting = self._waiting.get(token)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def fail(self, error: Exception) -> None:
        """End all waits: no answer can come any more."""
        for waiting in tuple(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(error)


class Pulled(Generic[M]):
    """What a consumer has delivered to one inbox, for one who pulls; there is never more than what was pulled."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._messages: deque[M] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, message: M) -> None:
        """Take one message in."""
        self._messages.append(message)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def next(self, wait_s: float, in_vain: "asyncio.Future[None]") -> M:
        """Return the next message; TimeoutError if none came, or once `in_vain` says that none comes."""
        if not self._messages:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await first(self._waiting, wait_s, in_vain)
            finally:
                self._waiting = None
        return self._messages.popleft()

    def fail(self, error: Exception) -> None:
        """End the wait, if there is one: what was pulled is lost."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
