"""One connection to a worker's local socket on an event loop: answers of its engine, several at a time.

What the worker keeps of a call to its engine is kept here of a call to the worker: a `Call` that one caller awaits, and
that lives on, unclaimed, until its last frame has come.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

from kvbus.engines import link
from kvbus.engines.calls import Call, Generation, check_reply, prompt_fields
from kvbus.engines.connection import Connection
from kvbus.engines.link import EngineError, Frame, check_path
from kvbus.engines.port import GENERATE_BUDGET_S
from kvbus.errors import PeerError
from kvbus.parts import Prompt

CONNECT_WAIT_S = 5.0
"""As long as the worker itself waits for a hello; it answers one within milliseconds."""
ANSWER_WAIT_S = GENERATE_BUDGET_S + 20.0
"""The worker's own bound and some more, so that its word comes first."""
_HELLO_ID = 0


class EngineClient:
    """A connection that is open. Whoever made it closes it; `is_lost` once the worker closed it."""

    def __init__(self, path: Path, connection: Connection) -> None:
        self._path = path
        self._connection = connection
        self._calls: dict[int, tuple[Call, Callable[[], None]]] = {}
        self._last_id = _HELLO_ID
        self._receiving = asyncio.ensure_future(self._receive())
        self.is_lost = False

    def __repr__(self) -> str:
        return f"<EngineClient {self._path} calls={len(self._calls)} lost={self.is_lost}>"

    @classmethod
    async def connect(cls, path: Path, pids: frozenset[int]) -> "EngineClient":
        """Connect to the worker that listens there; EngineError unless it is a process of these."""
        connection = await _connected(path)
        try:
            refusal = await _introduced(connection, pids)
        except PeerError as error:
            refusal = f"what the worker says makes no sense: {error}"
        except BaseException:
            await connection.close()
            raise
        if refusal:
            await connection.close()
            raise EngineError(refusal, socket=str(path))
        return cls(path, connection)

    def generate(self, prompt: Prompt, *, max_tokens: int, salt: str, on_over: Callable[[], None]) -> Generation:
        """Begin an answer; PeerError where it fits no frame. `on_over` is called once, after its last frame has come.

        That may be long after the caller has left: an engine stops at its next step only.
        """
        self._last_id += 1
        call = Call(
            self._last_id,
            "generate",
            frames_max=max_tokens + 1,
            ends_at=asyncio.get_running_loop().time() + ANSWER_WAIT_S,
            on_cancel=self._cancel,
            on_unclaimed=lambda _call, _frame: None,
        )
        if self.is_lost:
            raise EngineError("the worker closed the connection", socket=str(self._path))
        try:
            self._connection.send("generate", call.call_id, max_tokens=max_tokens, salt=salt, **prompt_fields(prompt))
        except ValueError as error:
            raise PeerError(f"the prompt is too long: {error}") from error
        self._calls[call.call_id] = (call, on_over)
        return Generation(call)

    async def close(self) -> None:
        """Close; the worker cancels what still runs for this client."""
        self._connection.hang_up()
        await self._receiving

    def _cancel(self, call: Call) -> None:
        self._last_id += 1
        self._connection.send("cancel", self._last_id, target=call.call_id)

    async def _receive(self) -> None:
        reason = "the worker closed the connection"
        try:
            while (frame := await self._connection.receive()) is not None:
                self._take(frame)
        except PeerError as error:
            reason = f"what the worker says makes no sense: {error}"
        finally:
            self.is_lost = True
            for call, on_over in self._calls.values():
                call.fail(EngineError(reason, socket=str(self._path)))
                on_over()
            self._calls.clear()
            await self._connection.close()

    def _take(self, frame: Frame) -> None:
        request_id = link.number(frame, "id")
        if request_id not in self._calls:
            text = link.text(frame, "text", "")
            raise PeerError("the worker answers what nobody asked", id=request_id, op=frame["op"], text=text)
        call, on_over = self._calls[request_id]
        check_reply(call.op, frame)
        if call.arrive(frame):
            del self._calls[request_id]
            on_over()


async def _introduced(connection: Connection, pids: frozenset[int]) -> str:
    """Say who we are; return why that leads nowhere, or nothing."""
    pid, _ = connection.peer()
    if pid not in pids:
        return f"another worker than the registered one listens there: process {pid}"
    connection.send("hello", _HELLO_ID, role="client")
    try:
        async with asyncio.timeout(CONNECT_WAIT_S):
            frame = await connection.receive()
    except TimeoutError:
        return f"the worker does not answer within {CONNECT_WAIT_S:g} s"
    if frame is None or frame["op"] != "welcome":
        said = link.text(frame, "text", "nothing") if frame else "nothing"
        return f"the worker does not take this client; it says: {said}"
    return ""


async def _connected(path: Path) -> Connection:
    loop = asyncio.get_running_loop()
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        await loop.sock_connect(connected, os.fspath(check_path(path)))
    except OSError as error:
        connected.close()
        raise EngineError("no worker listens there", socket=str(path), reason=error.strerror or str(error)) from error
    except BaseException:
        connected.close()
        raise
    return Connection(loop, connected)
