"""A blocking client of a worker's local socket: for commands, demos and tools of this host.

Time to first token is measured here, from sending the request to having the first token, so that cold and staged runs
go the same way.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kvbus.engines import link
from kvbus.engines.base import End, Token
from kvbus.engines.calls import end_of
from kvbus.engines.desk import Where
from kvbus.engines.link import BlockingLink, EngineError, EngineRefusedError, Frame

ANSWER_TIMEOUT_S = 600.0
"""As long as a worker lets its engine take for an answer (`port.GENERATE_BUDGET_S`)."""

CALL_TIMEOUT_S = 20.0
"""Twice a worker's own limit for tokenizing, so that its word comes first."""

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """An answer and how long it took, in seconds from the request to the first token and to the end."""

    end: End
    ttft_s: float
    total_s: float


class LocalClient:
    """One connection to a worker, one request at a time. EngineRefusedError: the request cannot be served as it is;
    EngineError: worker or engine failed. Use it as a context manager, or close it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._link: BlockingLink | None = None
        self._last_id = 0

    def __repr__(self) -> str:
        return f"<LocalClient {self._path} connected={self._link is not None}>"

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def connect(self) -> None:
        """Connect; EngineError if no worker listens there."""
        if self._link is None:
            self._link = BlockingLink.connect(self._path)
            self._ask("hello", role="client")

    def close(self) -> None:
        """Close the connection; may be called again."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def generate(
        self,
        *,
        ids: Sequence[int] | None = None,
        text: str | None = None,
        messages: Messages | None = None,
        max_tokens: int = 24,
        store: bool = True,
        reuse: bool = True,
        salt: str = "",
        on_token: Callable[[Token], None] | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> TimedAnswer:
        """Answer a prompt (exactly one of ids, text, messages), calling on_token with each token as it comes.

        If on_token raises, the answer is cancelled, and its exception comes out of here.
        """
        prompt = _prompt_fields(ids, text, messages)
        started = time.monotonic()
        request_id = self._send("generate", max_tokens=max_tokens, store=store, reuse=reuse, salt=salt, **prompt)
        first_at: float | None = None
        while (frame := self._receive(request_id, started + timeout_s))["op"] == "token":
            first_at = first_at or time.monotonic()
            try:
                if on_token is not None:
                    on_token(Token(link.number(frame, "token"), link.text(frame, "text")))
            except BaseException:
                self._send("cancel", target=request_id)
                raise
        ended = time.monotonic()
        return TimedAnswer(end_of(frame), (first_at or ended) - started, ended - started)

    def tokenize(self, *, text: str | None = None, messages: Messages | None = None) -> tuple[int, ...]:
        """Return the token ids of a text or a chat."""
        return link.column(self._ask("tokenize", **_prompt_fields(None, text, messages)), "ids")

    def held(self, ids: Sequence[int], salt: str = "") -> int:
        """Return how many leading whole blocks of the prompt this instance holds."""
        return link.number(self._ask("held", ids=link.as_column(tuple(ids)), salt=salt), "blocks")

    def evict(self, ids: Sequence[int], salt: str = "") -> int:
        """Drop the prompt's held blocks that nobody uses; return how many."""
        return link.number(self._ask("evict", ids=link.as_column(tuple(ids)), salt=salt), "blocks")

    def forget(self) -> int:
        """Have the names of all content forgotten, since they mean other bytes from now on; return how many."""
        return link.number(self._ask("forget"), "names")

    def where(self, ids: Sequence[int], salt: str = "") -> Where:
        """Return where the held prefix lies in memory: true now, and pinned by nothing."""
        frame = self._ask("where", ids=link.as_column(tuple(ids)), salt=salt)
        return Where(
            pid=link.number(frame, "pid"),
            fd=link.number(frame, "fd"),
            offset=link.number(frame, "offset"),
            stride=link.number(frame, "stride"),
            page_bytes=link.number(frame, "page_bytes"),
            pages=link.column(frame, "pages"),
        )

    def stats(self) -> dict[str, object]:
        """Return the worker's counters by name."""
        return link.mapping(self._ask("stats"), "counters")

    def _ask(self, op: str, **fields: object) -> Frame:
        ends_at = time.monotonic() + CALL_TIMEOUT_S
        return self._receive(self._send(op, **fields), ends_at)

    def _send(self, op: str, **fields: object) -> int:
        if self._link is None:
            raise EngineError("this client is not connected; use it as a context manager")
        self._last_id += 1
        try:
            self._link.send(op, self._last_id, **fields)
        except ValueError as error:
            raise EngineRefusedError("the request is too long", reason=str(error)) from error
        return self._last_id

    def _receive(self, request_id: int, ends_at: float) -> Frame:
        """Return the next frame of a request; those of an earlier one, cancelled, are passed over."""
        while self._link is not None:
            try:
                frame = self._link.receive(max(0.0, ends_at - time.monotonic()))
            except TimeoutError as error:
                raise EngineError("the worker did not answer in time", socket=str(self._path)) from error
            if frame is None:
                break
            if frame["op"] == "error" and frame["id"] in {request_id, 0}:
                kind, text = link.text(frame, "kind"), link.text(frame, "text")
                raise (EngineRefusedError if kind == "refused" else EngineError)(text)
            if frame["id"] == request_id:
                return frame
        raise EngineError("the worker closed the connection", socket=str(self._path))


def _prompt_fields(ids: Sequence[int] | None, text: str | None, messages: Messages | None) -> Frame:
    fields: Frame = {} if ids is None else {"ids": link.as_column(tuple(ids))}
    if text is not None:
        fields["text"] = text
    if messages is not None:
        fields["messages"] = list(messages)
    return fields
