"""Guards around a broker's client: sizes, counters, so many tasks and no more. They know no client.

Each guard answers a fault that was reproduced in the client in use: one message over the broker's limit closes the
connection for good, a callback that raises leaves a dead connection that claims to live, and one error callback comes
per dropped message.
"""

import asyncio
import logging
import random
import re
import ssl
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import urlsplit

from kvbus.errors import BusError, ConfigError
from kvbus.events import EVENT_LENGTH_MAX_BYTES, REQUEST_LENGTH_MAX_BYTES

SUBJECT_LENGTH_MAX_BYTES = 1024
"""A subject over 4 KiB closes the client; ours are at most about 170 bytes, the broker's own inboxes and acks 300."""

CONNECT_BUDGET_S = 5.0
"""Several attempts of at most 2 s; within ten seconds a person is told that there is no broker."""

SERVER_FLOOR = (2, 11)
"""Older servers accept per-message lifetimes and stream settings that kvbus needs, and silently ignore them."""

_COMPLAINT_EVERY_S = 5.0
"""One log line per kind of fault in this time: readable, and a storm of 10,000 faults stays one line."""

_KEY = re.compile(r"[A-Za-z0-9_=-]{1,200}")
_JITTER = random.SystemRandom()  # not seeded: processes that lost one broker must not come back in step


def check_version(found: tuple[int, int], where: str) -> None:
    """Raise ConfigError where the server is older than the floor."""
    if found < SERVER_FLOOR:
        raise ConfigError(
            "nats-server is too old: upgrade it, or let kvbus start its own (pip install 'kvbus[server]')",
            broker=where,
            found="{}.{}".format(*found),
            expected=">= {}.{}".format(*SERVER_FLOOR),
        )


def is_of_tls(error: BaseException) -> bool:
    """Return whether two sides did not agree on TLS."""
    return isinstance(error, ssl.SSLError) or "ssl" in str(error)


def unreachable(where: str, error: BaseException, *, credentials: bool) -> BusError:
    """Return what to tell a person whose broker does not answer, or refused the credentials."""
    if credentials:
        return refused(where, error)
    if is_of_tls(error):
        return BusError(
            "no TLS with this broker: give the authority that signed its certificate with --tls-ca, and --tls-cert "
            "and --tls-key where it asks for yours; none of them where it speaks without TLS",
            broker=where,
            reason=str(error),
        )
    return BusError(
        "no broker answers: start one with `kvbus up`, or give the address of yours with --nats URL",
        broker=where,
        tried=f"connecting for {CONNECT_BUDGET_S:g} s",
        reason=repr(error),
    )


def refused(where: str, error: BaseException) -> BusError:
    """Return what to tell a person whose broker does not know who this is, or does not any more."""
    return BusError(
        "the broker refused these credentials: give the token, user or --credentials that it knows",
        broker=where,
        reason=str(error),
    )


def check_message(subject: str, data: bytes, headers: Mapping[str, str] | None, *, limit_bytes: int) -> None:
    """Raise BusError where a message would break a limit; headers count, as they do for the broker."""
    subject_bytes = len(subject.encode())
    if not 0 < subject_bytes <= SUBJECT_LENGTH_MAX_BYTES:
        raise BusError(
            "subject has an impossible length",
            subject=subject[:80],
            length_bytes=subject_bytes,
            length_max_bytes=SUBJECT_LENGTH_MAX_BYTES,
        )
    length_bytes = len(data) + headers_length(headers)
    if length_bytes > limit_bytes:
        raise BusError(
            "message is too long for its subject; send less in one message",
            subject=subject,
            length_bytes=length_bytes,
            length_max_bytes=limit_bytes,
        )


def headers_length(headers: Mapping[str, str] | None) -> int:
    """Return how many bytes headers take on the wire: a version line, `name: value` lines, an empty line."""
    if not headers:
        return 0
    return len("NATS/1.0\r\n\r\n") + sum(
        len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items()
    )


def store_headers(message_id: str, after: int | None) -> dict[str, str]:
    """Return the headers of a message for a stream: its id, and the sequence that must be the last on its subject."""
    fence = {} if after is None else {"Nats-Expected-Last-Subject-Sequence": str(after)}
    return {"Nats-Msg-Id": message_id, **fence}


def limit_for(subject: str, prefix: str) -> int:
    """Return the largest message for a subject: prompts travel on transfer and command subjects and in answers."""
    family = subject.removeprefix(f"{prefix}.").partition(".")[0] if subject.startswith(f"{prefix}.") else "answer"
    return REQUEST_LENGTH_MAX_BYTES if family in {"transfer", "cmd", "query", "answer"} else EVENT_LENGTH_MAX_BYTES


def check_key(key: str) -> None:
    """Raise ValueError where a bucket key is not an escaped name: the broker's keys forbid `:`, `%` and spaces."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"bucket key must be an escaped name (kvbus.topics.escape), got {key[:80]!r}")


def number(text: str | None) -> int:
    """Return what a broker's header counts, 0 where it is missing or no number."""
    return int(text) if text and text.isascii() and text.isdigit() else 0


def jittered(low_s: float, high_s: float) -> float:
    """Return a delay between two bounds."""
    return _JITTER.uniform(low_s, high_s)


def nodes(url: str) -> list[str]:
    """Return the nodes that a URL names, with commas between them, each of them a whole URL."""
    return [one.strip() for one in url.split(",") if one.strip()] or [url]


def shown(url: str) -> str:
    """Return a URL without its password or token, for people and logs."""
    return ",".join(map(_shown, nodes(url)))


def _shown(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}" if host else url


class Crew:
    """Tasks side by side, so many and no more: who brings one more waits until one has ended."""

    def __init__(self, places: int) -> None:
        self._places = asyncio.Semaphore(places)
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for a place, then start; `work` must keep what it raises to itself."""
        await self._places.acquire()
        task = asyncio.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def end(self, wait_s: float) -> None:
        """Give those under way so long to end, then cancel them."""
        if self._tasks and wait_s > 0:
            await asyncio.wait(self._tasks, timeout=wait_s)
        for task in tuple(self._tasks):
            task.cancel()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._places.release()


class Tally:
    """Counters by name, and a log that says each kind of fault at most once in five seconds.

    Names come from code, never from a message, so the table stays as small as the list of things that can go wrong.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: Counter[str] = Counter()
        self._logged: dict[str, tuple[float, int]] = {}

    def count(self, what: str) -> None:
        """Count one occurrence."""
        self._counts[what] += 1

    def complain(self, what: str, error: object) -> None:
        """Count one occurrence and, not more often than every five seconds, log it with the number since."""
        self._counts[what] += 1
        now = time.monotonic()
        last_at, last_count = self._logged.get(what, (-_COMPLAINT_EVERY_S, 0))
        if now - last_at >= _COMPLAINT_EVERY_S:
            self._logged[what] = (now, self._counts[what])
            self._log.warning("%s (%d new): %s", what, self._counts[what] - last_count, str(error)[:500])

    def counters(self) -> dict[str, int]:
        """Return a copy of all counters."""
        return dict(self._counts)
