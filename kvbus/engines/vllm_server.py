"""vLLM's own OpenAI server as the connector asks it: token ids of a text, and answers to prompts of token ids.

The server stands on this host and in front of the very engine that this process computes for. Each call has a deadline
on every single read, so that a server that hangs ends the call and nothing else.
"""

import http.client
import json
import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvbus.engines.link import EngineError
from kvbus.engines.vllm_settings import PARAMS_KEY
from kvbus.errors import PeerError

READ_TIMEOUT_S = 120.0
"""A long prompt on a busy core: some 15,000 tokens at 130 a second. A call's own deadline is its worker's."""

ANSWER_MAX_BYTES = 8 << 20
"""The longest prompt's token ids as text, several times."""

ERROR_MAX_BYTES = 1 << 20
"""An error may quote the whole prompt."""

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.]{0,63}")


@dataclass(frozen=True, slots=True)
class Step:
    """A piece of an answer; `reason` is set with the last."""

    tokens: tuple[int, ...]
    text: str
    reason: str = ""
    cached_tokens: int = 0
    """Those that vLLM did not compute; it says so with the last piece only, if started to give prompt details."""


@dataclass(frozen=True, slots=True)
class Server:
    """`base` is empty where the connector was told of none; every call is then refused in words."""

    base: str
    model: str

    def tokenize(self, text: str | None, messages: Sequence[Mapping[str, str]] | None) -> list[int]:
        """Return the ids of a text with nothing added around it, or of a chat up to where the answer begins."""
        body: dict[str, object] = {"model": self.model, "add_special_tokens": False}
        body |= (
            {"prompt": text} if text is not None else {"messages": list(messages or ()), "add_generation_prompt": True}
        )
        with self._post("/tokenize", body) as response:
            document = _document(response)
        tokens = document.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise EngineError("vLLM's server gave no token ids", path="/tokenize")
        return tokens

    def compute(self, ids: Sequence[int], *, salt: str, mark: str) -> None:
        """Have a prompt computed and stored under a mark; the one token that comes with it is thrown away."""
        body = self._completion(ids, salt=salt, max_tokens=1, ours={"store": True, "mark": mark})
        with self._post("/v1/completions", body) as response:
            _document(response)

    def answer(
        self, ids: Sequence[int], *, salt: str, max_tokens: int, ours: Mapping[str, object]
    ) -> Generator[Step, None, None]:
        """Yield the greedy answer to a prompt as it comes; closing the iterator makes vLLM stop."""
        body = self._completion(ids, salt=salt, max_tokens=max_tokens, ours=ours)
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        with self._post("/v1/completions", body | streamed) as response:
            for line in iter(response.readline, b""):
                if line.startswith(b"data: {"):  # what else there is are empty lines, and the end mark
                    yield _step(line.strip().removeprefix(b"data: "))

    def _completion(
        self, ids: Sequence[int], *, salt: str, max_tokens: int, ours: Mapping[str, object]
    ) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "return_token_ids": True,
            "kv_transfer_params": {PARAMS_KEY: dict(ours)},
        }
        return body | ({"cache_salt": salt} if salt else {})

    @contextmanager
    def _post(self, path: str, body: Mapping[str, object]) -> Iterator[http.client.HTTPResponse]:
        """Yield an answer with status 200; PeerError with the kind of error where the server refuses the request."""
        if not self.base:
            raise PeerError(
                "this vLLM was not told the address of its own server: set server in kv_connector_extra_config"
            )
        url = urlsplit(self.base)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=READ_TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):  # vLLM reads it from there, too
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request("POST", url.path.rstrip("/") + path, json.dumps(body).encode(), headers)
            with connection.getresponse() as response:  # it holds the socket open where it is not read to its end
                if 400 <= response.status < 500:
                    raise PeerError("vLLM's server refused the request", status=response.status, **_kind_of(response))
                if response.status != http.client.OK:
                    raise EngineError("vLLM's server failed", status=response.status, **_kind_of(response))
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise EngineError("vLLM's server cannot be asked", server=self.base, reason=str(error)) from error
        finally:
            connection.close()


def _document(response: http.client.HTTPResponse) -> dict[str, object]:
    raw = response.read(ANSWER_MAX_BYTES)
    try:
        document = json.loads(raw)
    except ValueError as error:
        raise EngineError("vLLM's server answered with something else than JSON", length=len(raw)) from error
    if not isinstance(document, dict):
        raise EngineError("vLLM's server answered with another document than expected", length=len(raw))
    return document


def _kind_of(response: http.client.HTTPResponse) -> dict[str, object]:
    try:
        return _named(json.loads(response.read(ERROR_MAX_BYTES)))
    except ValueError:
        return {}


def _named(document: object) -> dict[str, object]:
    """Return an error's type and the parameter that it names. Its message stays out: it may quote the prompt."""
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict):
        return {}
    told = {name: error.get(name) for name in ("type", "param")}
    return {name: value for name, value in told.items() if isinstance(value, str) and _WORD.fullmatch(value)}


def _step(data: bytes) -> Step:
    """Return what one event of a stream says."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise EngineError("vLLM's server ended the answer", **_named(event))
        if not event.get("choices"):
            details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
            return Step((), "", "", int(details.get("cached_tokens") or 0))
        choice = event["choices"][0]
        tokens = tuple(int(token) for token in choice.get("token_ids") or ())
        reason = choice.get("finish_reason") or ""
        # vLLM hands out the token that ended the answer, where that is the model's own end; other engines do not.
        if reason == "stop" and choice.get("stop_reason") is None:
            tokens = tokens[:-1]
        return Step(tokens, str(choice.get("text") or ""), str(reason))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError("vLLM's server sent an event that makes no sense", length=len(data)) from error
