"""Asking a vLLM server as any HTTP client does: answers with the time to the first token, and its own metrics."""

import http.client
import json
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvbus.errors import BackendError

ANSWER_WAIT_S = 300.0
"""For a single read: a thousand tokens of prefill on a core that is shared with everything else."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer as it streamed in."""

    tokens: tuple[int, ...]
    text: str
    ttft_s: float
    total_s: float


def ask(url: str, model: str, ids: Sequence[int], *, max_tokens: int, salt: str) -> Answered:
    """Return a server's greedy answer to token ids; BackendError with its words where it refuses or breaks off."""
    body = {
        "model": model,
        "prompt": list(ids),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": True,
        "cache_salt": salt,
    }
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=ANSWER_WAIT_S)
    began = time.monotonic()
    tokens: list[int] = []
    words: list[str] = []
    first_s = 0.0
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise BackendError(f"{url} answered {answer.status}: {answer.read(500).decode(errors='replace')}")
        for line in answer:
            data = line.strip().removeprefix(b"data: ")
            if not data.startswith(b"{"):
                continue
            choice = json.loads(data)["choices"][0]
            tokens += choice.get("token_ids") or []
            words.append(choice.get("text") or "")
            first_s = first_s or time.monotonic() - began
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
        raise BackendError(f"{url} broke off its answer: {error!r}") from error
    finally:
        connection.close()
    return Answered(tuple(tokens), "".join(words), first_s, time.monotonic() - began)


def tokenize(url: str, model: str, text: str) -> tuple[int, ...]:
    """Return a server's token ids of a text."""
    document = _fetched(f"{url}/tokenize", json.dumps({"model": model, "prompt": text}).encode())
    return tuple(json.loads(document)["tokens"])


def external_tokens(url: str) -> float:
    """Return how many prompt tokens a server says it took from outside instead of computing them."""
    return metric(_fetched(f"{url}/metrics").decode(), "vllm:external_prefix_cache_hits_total")


def metric(page: str, name: str) -> float:
    """Return the sum of a metric over its labels; 0 where it is not there."""
    found = 0.0
    for line in page.splitlines():
        head, _, value = line.rpartition(" ")
        if head.partition("{")[0] == name:
            found += float(value)
    return found


def _fetched(url: str, data: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - our own URL
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_WAIT_S) as answer:  # noqa: S310
            return bytes(answer.read())
    except OSError as error:
        raise BackendError(f"{url} does not answer: {error}") from error
