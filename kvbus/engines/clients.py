"""What a worker does for local clients: commands, demos and tools that speak to its socket beside the engine.

A client asks for answers and token ids, which are relayed to the engine, and about the pool's content, which the desk
answers. Each client has few requests in flight, and a client that goes away cancels them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from pydantic import ValidationError

from kvbus.engines import link
from kvbus.engines.base import Token
from kvbus.engines.calls import Generation
from kvbus.engines.connection import Connection
from kvbus.engines.desk import Desk, Refusal, Where
from kvbus.engines.link import EngineError, Frame
from kvbus.errors import PeerError
from kvbus.events import Prompt

CLIENT_REQUESTS_MAX = 16
"""A client is one person or one script; the engine itself takes four times as many in all."""


_Work = Callable[[int, Frame, Prompt], Awaitable[None]]


class Engines(Protocol):
    """What the port offers to its clients' handlers."""

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...] | Refusal:
        """Return the prompt's token ids."""

    def generate(self, prompt: Prompt, *, max_tokens: int, store: bool, reuse: bool, salt: str) -> Generation:
        """Begin an answer."""


class ClientSession:
    """One connected client. `run` serves it until it closes, or raises PeerError if its frames make no sense."""

    def __init__(self, connection: Connection, engines: Engines, desk: Desk) -> None:
        self._connection = connection
        self._engines = engines
        self._desk = desk
        self._running: dict[int, asyncio.Task[None]] = {}
        self._answers: dict[int, Generation] = {}
        self._cancelled: set[int] = set()
        """Requests that run and were cancelled; some before their task had begun its answer."""

    def __repr__(self) -> str:
        return f"<ClientSession running={len(self._running)}>"

    async def run(self) -> None:
        """Serve requests as they come; what still runs at the end is cancelled."""
        try:
            while (frame := await self._connection.receive()) is not None:
                self._handle(frame)
        finally:
            running = tuple(self._running.values())
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _handle(self, frame: Frame) -> None:
        op, request_id = link.text(frame, "op"), link.number(frame, "id")
        if op == "cancel":
            self._cancel(link.number(frame, "target"))
        elif op in {"generate", "tokenize"}:
            self._start(op, request_id, frame)
        elif op in {"held", "evict", "where", "stats", "forget"}:
            self._ask_desk(op, request_id, frame)
        else:
            raise PeerError(
                "a client may not ask this of a worker",
                op=op,
                expected="generate, tokenize, cancel, held, evict, where, stats, forget",
            )

    def _cancel(self, request_id: int) -> None:
        if request_id not in self._running:
            return
        self._cancelled.add(request_id)
        if (answer := self._answers.get(request_id)) is not None:
            answer.cancel()

    def _start(self, op: str, request_id: int, frame: Frame) -> None:
        if request_id in self._running:
            raise PeerError("a client's request ids must differ", id=request_id)
        if len(self._running) >= CLIENT_REQUESTS_MAX:
            self._refuse(request_id, f"{CLIENT_REQUESTS_MAX} requests of this client run already; await some first")
            return
        prompt = _prompt(frame)
        if isinstance(prompt, Refusal):
            self._refuse(request_id, prompt.text)
            return
        work = self._generate if op == "generate" else self._tokenize
        task = asyncio.create_task(self._guarded(work, request_id, frame, prompt))
        self._running[request_id] = task
        task.add_done_callback(lambda _: self._over(request_id))

    def _over(self, request_id: int) -> None:
        self._running.pop(request_id, None)
        self._cancelled.discard(request_id)

    async def _guarded(self, work: _Work, request_id: int, frame: Frame, prompt: Prompt) -> None:
        try:
            await work(request_id, frame, prompt)
        except EngineError as error:
            self._connection.send("error", request_id, kind="failed", text=str(error))
        except PeerError as error:
            self._refuse(request_id, str(error))

    async def _generate(self, request_id: int, frame: Frame, prompt: Prompt) -> None:
        with self._engines.generate(
            prompt,
            max_tokens=link.number(frame, "max_tokens", least=1),
            store=link.flag(frame, "store", default=True),
            reuse=link.flag(frame, "reuse", default=True),
            salt=link.text(frame, "salt", ""),
        ) as answer:
            self._answers[request_id] = answer
            if request_id in self._cancelled:  # both frames lay in the socket: the cancel was read before this began
                answer.cancel()
            try:
                async for step in answer:
                    if isinstance(step, Token):
                        self._connection.send("token", request_id, token=step.token, text=step.text)
                    elif isinstance(step, Refusal):
                        self._refuse(request_id, step.text)
                    else:
                        self._connection.send(
                            "end",
                            request_id,
                            tokens=link.as_column(step.tokens),
                            text=step.text,
                            prompt_tokens=step.prompt_tokens,
                            cached_tokens=step.cached_tokens,
                            stored_blocks=step.stored_blocks,
                            reason=step.reason,
                        )
            finally:
                del self._answers[request_id]

    async def _tokenize(self, request_id: int, _frame: Frame, prompt: Prompt) -> None:
        ids = await self._engines.tokenize(prompt)
        if isinstance(ids, Refusal):
            self._refuse(request_id, ids.text)
        else:
            self._connection.send("reply", request_id, ids=link.as_column(ids))

    def _ask_desk(self, op: str, request_id: int, frame: Frame) -> None:
        ids, salt = ((), "") if op in {"stats", "forget"} else (link.column(frame, "ids"), link.text(frame, "salt", ""))
        try:
            if op == "stats":
                self._connection.send("reply", request_id, counters=dict(self._desk.stats()))
                return
            if op == "forget":
                self._connection.send("reply", request_id, names=self._desk.forget())
                return
            asks: dict[str, Callable[[tuple[int, ...], str], int | Where | Refusal]] = {
                "held": self._desk.held,
                "evict": self._desk.evict,
                "where": self._desk.where,
            }
            answer = asks[op](ids, salt)
        except PeerError as error:  # the frame was sound; the desk cannot serve it as it stands
            answer = Refusal(str(error))
        if isinstance(answer, Refusal):
            self._refuse(request_id, answer.text)
        elif isinstance(answer, Where):
            self._connection.send(
                "reply",
                request_id,
                pid=answer.pid,
                fd=answer.fd,
                offset=answer.offset,
                stride=answer.stride,
                page_bytes=answer.page_bytes,
                pages=link.as_column(answer.pages),
            )
        else:
            self._connection.send("reply", request_id, blocks=answer)

    def _refuse(self, request_id: int, text: str) -> None:
        self._connection.send("error", request_id, kind="refused", text=text)


def _prompt(frame: Frame) -> Prompt | Refusal:
    given = {
        "tokens": frame.get("ids"),
        "text": frame.get("text"),
        "messages": frame.get("messages"),
    }
    try:
        return Prompt.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return Refusal(f"the prompt is not valid: {where + ': ' if where else ''}{first['msg']}")
