"""Answers as the OpenAI API tells them: whole documents, chunks of a stream, errors."""

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from starlette.responses import Response

from kvbus.gateway.answers import Problem, answer
from kvbus.gateway.models import Served

STREAM_END: Final = b"data: [" + b"DO" + b"NE" + b"]\n\n"
"""What the API ends a stream with; the word is the API's, so it stands in pieces (scripts/check_words.py)."""

_ERROR_TYPES: Final[Mapping[int, str]] = {429: "rate_limit_error", 503: "server_error"}


@dataclass(frozen=True, slots=True)
class Ended:
    """How an answer ended; `reason` in the API's words: `stop` or `length`."""

    reason: str
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int

    def usage(self) -> dict[str, object]:
        """Return what the API calls usage."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.answer_tokens,
            "total_tokens": self.prompt_tokens + self.answer_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Telling:
    """One answer in the API's form; all of its chunks have its id and its time."""

    served: Served
    is_chat: bool
    with_usage: bool = False
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    created_unix_s: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, ended: Ended) -> dict[str, object]:
        """Return the document of an answer."""
        said: dict[str, object] = {"text": text}
        if self.is_chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": ended.reason}
        return {**self._head("chat.completion"), "choices": [choice], "usage": ended.usage()}

    def first(self) -> bytes:
        """Return the chunk that stands before any text, if there is one."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self.is_chat else b""

    def piece(self, text: str) -> bytes:
        """Return the chunk of some text."""
        return self._chunk({"content": text}, None)

    def last(self, ended: Ended) -> bytes:
        """Return the chunks behind the text."""
        chunks = self._chunk({}, ended.reason)
        if self.with_usage:
            chunks += frame({**self._head("chat.completion.chunk"), "choices": [], "usage": ended.usage()})
        return chunks + STREAM_END

    def _chunk(self, delta: Mapping[str, str], reason: str | None) -> bytes:
        said: dict[str, object] = {"delta": delta} if self.is_chat else {"text": delta.get("content", "")}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self.with_usage else {}
        return frame({**self._head("chat.completion.chunk"), "choices": [choice], **usage})

    def _head(self, chat_object: str) -> dict[str, object]:
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.number}",
            "object": chat_object if self.is_chat else "text_completion",
            "created": self.created_unix_s,
            "model": self.served.name,
        }


def frame(document: Mapping[str, object]) -> bytes:
    """Return a document as one server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=True, allow_nan=False).encode() + b"\n\n"


def error_document(problem: Problem) -> dict[str, object]:
    """Return a problem in the API's form."""
    return {
        "error": {
            "message": problem.text,
            "type": _ERROR_TYPES.get(problem.status, "invalid_request_error"),
            "param": problem.details.get("param"),
            "code": problem.details.get("code"),
        }
    }


def error_answer(problem: Problem) -> Response:
    """Return the answer for a problem."""
    headers = {"retry-after": str(problem.retry_after_s)} if problem.retry_after_s else {}
    return answer(error_document(problem), problem.status, headers=headers)
