"""Answers as JSON, problems as values that an answer is made of, and request bodies within a bound."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvbus.gateway.kinds import kind_of

BODY_LENGTH_MAX_BYTES = 2 << 20
"""A request on the bus holds at most 196,608 token ids; as JSON, with six digits and a comma each, 1.4 MB."""
BODIES_LENGTH_MAX_BYTES = 64 << 20
"""All bodies that are being read together: thirty-two of the longest, or thousands of usual ones."""
BODY_WAIT_S = 30.0
"""The longest body at 70 kB/s; who sends more slowly holds memory that others want."""


class Problem(Exception):  # noqa: N818 - an answer that is not 2xx, rather than an error of ours
    """A request ends here, with this status and a sentence for people."""

    def __init__(self, status: int, text: str, *, retry_after_s: int = 0, **details: object) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.retry_after_s = retry_after_s
        self.details = details


def answer(document: Mapping[str, object], status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON answer; text that is no Unicode is escaped, so that every answer can be sent."""
    body = json.dumps(document, ensure_ascii=True, allow_nan=False).encode()
    return Response(body, status, dict(headers or {}), media_type="application/json")


def problem_answer(_request: Request, error: Exception) -> Response:
    """Return the answer for a problem."""
    if not isinstance(error, Problem):
        raise TypeError(f"{type(error).__name__} is no problem of a request") from error
    headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s else {}
    return answer({"error": error.text, **error.details}, error.status, headers=headers)


def http_error_answer(_request: Request, error: Exception) -> Response:
    """Return the answer where no route fits: 404 and 405."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    text = f"{error.detail}: /docs lists what there is" if isinstance(error, HTTPException) else "internal error"
    return answer({"error": text}, status, headers=headers)


def internal_error_answer(_request: Request, _error: Exception) -> Response:
    """Return the answer for a fault of ours; its cause stands in the log."""
    return answer({"error": "internal error: the gateway's log says more"}, 500)


class Bodies:
    """Reads request bodies: each within a bound of length and time, all together within a bound of memory."""

    def __init__(
        self, *, each_max_bytes: int = BODY_LENGTH_MAX_BYTES, all_max_bytes: int = BODIES_LENGTH_MAX_BYTES
    ) -> None:
        self._each_max_bytes = each_max_bytes
        self._all_max_bytes = all_max_bytes
        self.held_bytes = 0

    async def json_object(self, request: Request) -> dict[str, object]:
        """Return the JSON object that a body holds; Problem 400, 408, 413 or 503 where it does not."""
        async with self._read(request) as data:
            if not data:
                raise Problem(400, "body is empty: send a JSON object")
            try:
                document = json.loads(data)
            except RecursionError as error:
                raise Problem(400, "body is nested too deeply") from error
            except ValueError as error:
                raise Problem(400, f"body is not JSON: {str(error)[:200]}") from error
            if not isinstance(document, dict):
                raise Problem(400, f"body must be a JSON object, got {kind_of(document)}")
            return document

    @asynccontextmanager
    async def _read(self, request: Request) -> AsyncIterator[bytes]:
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_WAIT_S):
                async for chunk in request.stream():
                    self._take(len(chunk), len(data))
                    data += chunk
            yield bytes(data)
        except TimeoutError as error:
            raise Problem(408, f"body did not arrive within {BODY_WAIT_S:g} s") from error
        except ClientDisconnect as error:
            raise Problem(400, "the client went away before its body had arrived") from error
        finally:
            self.held_bytes -= len(data)

    def _take(self, fresh: int, before: int) -> None:
        """Make room for what came; Problem where there is none, and then nothing was taken."""
        if before + fresh > self._each_max_bytes:
            raise Problem(413, f"body is longer than {self._each_max_bytes} bytes")
        if self.held_bytes + fresh > self._all_max_bytes:
            raise Problem(503, "too many long bodies at once: try again", retry_after_s=1)
        self.held_bytes += fresh
