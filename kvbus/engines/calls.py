"""Calls from a worker to its engine: one caller each, a deadline, a bounded number of frames, and a value at the end.

A caller that goes away leaves its call behind until the engine has ended it: the engine is busy with it that long, and
what it then brings (a prefilled handle) has to be given back.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvbus.engines import link
from kvbus.engines.base import End, Prefilled, Token
from kvbus.engines.desk import Refusal
from kvbus.engines.link import EngineError, Frame
from kvbus.errors import PeerError
from kvbus.events import Prompt


class Call:
    """One call in flight. Exactly one caller awaits it, and says `leave` when it no longer does."""

    def __init__(
        self,
        call_id: int,
        op: str,
        *,
        frames_max: int,
        ends_at: float,
        on_cancel: Callable[["Call"], None],
        on_unclaimed: Callable[["Call", Frame], None],
    ) -> None:
        self.call_id = call_id
        self.op = op
        self.is_left = False
        self._on_cancel = on_cancel
        self._on_unclaimed = on_unclaimed
        self._ends_at = ends_at
        self._frames_left = frames_max
        # At most frames_max frames and one error.
        self._arrived: asyncio.Queue[Frame | EngineError] = asyncio.Queue()
        self._is_over = False

    def __repr__(self) -> str:
        return f"<Call {self.call_id} {self.op} over={self._is_over} left={self.is_left}>"

    async def next(self) -> Frame:
        """Return the next frame; EngineError if the engine is lost, reports a fault of its own, or is too slow."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(max(0.0, self._ends_at - loop.time())):
                arrived = await self._arrived.get()
        except TimeoutError as error:
            raise EngineError("the engine did not answer within the time given", op=self.op) from error
        if isinstance(arrived, EngineError):
            raise arrived
        if arrived["op"] == "error" and link.text(arrived, "kind") != "refused":
            raise EngineError("the engine failed", op=self.op, reason=link.text(arrived, "text"))
        return arrived

    def cancel(self) -> None:
        """Ask the engine to stop; whatever it has comes as the last frame."""
        if not self._is_over:
            self._on_cancel(self)

    def leave(self) -> None:
        """Stop awaiting. What the engine still does for this call is cancelled, what it holds is given back."""
        if self.is_left:
            return
        self.is_left = True
        self.cancel()
        while not self._arrived.empty():
            frame = self._arrived.get_nowait()
            if isinstance(frame, dict):
                self._on_unclaimed(self, frame)

    def arrive(self, frame: Frame) -> bool:
        """Take one frame from the engine, and tell whether it was the last; PeerError if there are too many."""
        self._is_over = frame["op"] != "token"
        self._frames_left -= 1
        if self._frames_left < 0:
            raise PeerError("the engine answers more than it was asked for", op=self.op)
        if self.is_left:
            self._on_unclaimed(self, frame)
        else:
            self._arrived.put_nowait(frame)
        return self._is_over

    def fail(self, error: EngineError) -> None:
        """End the call with an error."""
        self._is_over = True
        if not self.is_left:
            self._arrived.put_nowait(error)


async def only_frame(call: Call | Refusal) -> Frame | Refusal:
    """Return the one frame that answers a call, or its refusal."""
    if isinstance(call, Refusal):
        return call
    try:
        frame = await call.next()
    finally:
        call.leave()
    return Refusal(link.text(frame, "text")) if frame["op"] == "error" else frame


class Generation:
    """An answer as it comes: `async for step in generation` gives Tokens, then one End or Refusal.

    Use it as `with port.generate(…) as generation:`, so that leaving early cancels what the engine still computes.
    """

    def __init__(self, call: Call | Refusal) -> None:
        self._call = call
        self._is_over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token | End | Refusal:
        if self._is_over:
            raise StopAsyncIteration
        if isinstance(self._call, Refusal):
            self._is_over = True
            return self._call
        try:
            frame = await self._call.next()
        except BaseException:
            self._is_over = True
            self._call.leave()
            raise
        if frame["op"] == "token":
            return Token(link.number(frame, "token"), link.text(frame, "text"))
        self._is_over = True
        return Refusal(link.text(frame, "text")) if frame["op"] == "error" else end_of(frame)

    def cancel(self) -> None:
        """Ask the engine to stop at its next token; an End with reason "cancelled" follows."""
        if isinstance(self._call, Call):
            self._call.cancel()

    def close(self) -> None:
        """Cancel and await no more."""
        self._is_over = True
        if isinstance(self._call, Call):
            self._call.leave()


def check_reply(op: str, frame: Frame) -> None:
    """Raise PeerError unless a frame is one that may answer op, with all that its caller will read."""
    if frame["op"] == "error":
        link.text(frame, "kind")
        link.text(frame, "text")
    elif op == "generate" and frame["op"] == "token":
        link.number(frame, "token")
        link.text(frame, "text")
    elif op == "generate" and frame["op"] == "end":
        end_of(frame)
    elif op == "prefill" and frame["op"] == "reply":
        prefilled_of(frame)
    elif op == "tokenize" and frame["op"] == "reply":
        link.column(frame, "ids")
    else:
        raise PeerError("the engine gives no answer to what it was asked", asked=op, got=frame["op"])


def end_of(frame: Frame) -> End:
    """Return the end of an answer that a frame holds."""
    return End(
        tokens=link.column(frame, "tokens"),
        text=link.text(frame, "text"),
        prompt_tokens=link.number(frame, "prompt_tokens"),
        cached_tokens=link.number(frame, "cached_tokens"),
        stored_blocks=link.number(frame, "stored_blocks"),
        reason=link.text(frame, "reason"),
    )


def prefilled_of(frame: Frame) -> Prefilled:
    """Return what a reply to `prefill` holds."""
    return Prefilled(
        handle=link.number(frame, "handle"),
        blocks=link.number(frame, "blocks"),
        computed_tokens=link.number(frame, "computed_tokens"),
        cached_tokens=link.number(frame, "cached_tokens"),
        refused=link.text(frame, "refused"),
    )


def prompt_fields(prompt: Prompt) -> Frame:
    """Return the fields that carry a prompt to the engine."""
    if prompt.tokens is not None:
        return {"ids": prompt.tokens}
    if prompt.text is not None:
        return {"text": prompt.text}
    return {"messages": [{"role": turn.role, "content": turn.content} for turn in prompt.messages or ()]}
