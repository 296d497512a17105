"""Answers on their way to a client: whole or as a stream, and given up when the client goes or takes nothing."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvbus.gateway.answers import Problem, answer
from kvbus.gateway.hints import follow
from kvbus.gateway.openai_asked import Wanted
from kvbus.gateway.openai_text import spoken
from kvbus.gateway.openai_told import Ended, Telling, error_answer, error_document, frame
from kvbus.gateway.parts import Parts

SEND_WAIT_S = 20.0
"""A client that takes nothing for this long is dropped: its connection's buffer has been full all the while."""

_HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}


class Answering(Response):
    """Has an engine answer and tells the client. Once the client has gone, the engine is told to stop."""

    def __init__(self, parts: Parts, wanted: Wanted, telling: Telling, *, send_wait_s: float = SEND_WAIT_S) -> None:
        super().__init__(None, 200, dict(_HEADERS), "text/event-stream")
        del self.headers["content-length"]
        self._parts = parts
        self._wanted = wanted
        self._telling = telling
        self._send_wait_s = send_wait_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        tell = self._stream if self._wanted.stream else self._whole
        telling = asyncio.ensure_future(tell(scope, receive, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({telling, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            telling.cancel()
            await asyncio.gather(gone, telling, return_exceptions=True)
        if not telling.cancelled():
            telling.result()

    @asynccontextmanager
    async def _spoken(self) -> AsyncIterator[AsyncGenerator[str | Ended, None]]:
        wanted, instance, parts = self._wanted, self._telling.served.instance, self._parts
        if wanted.hint is not None:
            await follow(wanted.hint, parts.transfers, instance, wanted.prompt, wanted.salt)
        async with (
            parts.engines.answer(instance, wanted.prompt, max_tokens=wanted.max_tokens, salt=wanted.salt) as generation,
            aclosing(spoken(generation, wanted.stops)) as pieces,
        ):
            yield pieces

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            told = answer(await self._document())
        except Problem as problem:
            told = error_answer(problem)
        await told(scope, receive, send)

    async def _document(self) -> dict[str, object]:
        text: list[str] = []
        async with self._spoken() as pieces:
            async for piece in pieces:
                if isinstance(piece, Ended):
                    return self._telling.whole("".join(text), piece)
                text.append(piece)
        raise Problem(503, "the engine's answer has no end", retry_after_s=1)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell pieces as they come; a client that takes none is left."""
        try:
            async with aclosing(self._chunks()) as chunks:
                first = await anext(chunks)  # nothing is sent before it: a refusal still has a status of its own
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._send(send, first)
                async for chunk in chunks:
                    await self._send(send, chunk)
        except Problem as problem:
            await error_answer(problem)(scope, receive, send)
        except TimeoutError:
            return
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield what is sent; a problem behind the first piece is a last chunk."""
        head, is_open = self._telling.first(), False
        try:
            async with self._spoken() as pieces:
                async for piece in pieces:
                    told = self._telling.last(piece) if isinstance(piece, Ended) else self._telling.piece(piece)
                    yield told if is_open else head + told
                    is_open = True
        except Problem as problem:
            if not is_open:
                raise
            yield frame(error_document(problem))

    async def _send(self, send: Send, data: bytes) -> None:
        async with asyncio.timeout(self._send_wait_s):
            await send({"type": "http.response.body", "body": data, "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
