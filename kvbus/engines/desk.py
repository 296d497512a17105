"""The worker's side of the counter: what an engine or a client may ask, and the values that answer.

`Desk` is the protocol that the port needs; the worker implements it over its pool. Every method is synchronous,
answers at once and runs on the worker's event loop, so that look-up, pin and generation are one step under the pool's
only owner (P9). A refusal is a value; PeerError means that the caller named something that it does not hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvbus.events import ProcessIdentity


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something expected will not be served; the text is for people and says what to do next."""

    text: str


@dataclass(frozen=True, slots=True)
class Hello:
    """What an engine says of itself when it attaches. `layout` is `PageLayout.to_plain()`, checked by the desk.

    `process` is who connected, as the kernel says; never taken from the engine's own words.
    """

    engine: str
    version: str
    model: str
    model_digest: str
    layout: dict[str, object]
    vocab_size: int
    tokens_max: int
    process: ProcessIdentity


@dataclass(frozen=True, slots=True)
class Welcome:
    """The pool for an engine: its descriptor stays the worker's, a duplicate travels."""

    fd: int
    epoch: int
    pages: int
    block_tokens: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Matched:
    """The longest cached prefix, pinned under the handle: one page per block, from block 0 on, possibly none.

    `digests` are those of the pages, `kvbus.pool.digests.NONE` where a page has none; empty where none has.
    """

    handle: int
    pages: tuple[int, ...]
    digests: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Allocated:
    """Pages to write, generations already odd (P1): block `first_block` into pages[0], and so on.

    They may be fewer than were asked for, at least one; then only that many blocks are stored.
    """

    write: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Where:
    """How a tool finds the held prefix in memory: page p starts at offset + p * stride in /proc/<pid>/fd/<fd>."""

    pid: int
    fd: int
    offset: int
    stride: int
    page_bytes: int
    pages: tuple[int, ...]


class Desk(Protocol):
    """What the worker does for its engine (first eleven) and for clients (the rest, and `forget`).

    A handle or write is the engine's until `hand_over`, `release`, `commit`, `abandon`, `engine_left` or `engine_gone`.
    """

    def welcome(self, hello: Hello) -> Welcome | Refusal:
        """Make or find the pool for that layout; Refusal where this worker cannot serve it."""

    def match(self, ids: tuple[int, ...], salt: str) -> Matched:
        """Pin the longest cached prefix of whole blocks; the handle keeps the ids, also where nothing is cached."""

    def spoiled(self, handle: int, block: int) -> None:
        """Take a matched block's page out of use: the engine found other bytes there than its digest says."""

    def alloc(self, handle: int, first_block: int, count: int) -> Allocated | Refusal:
        """Give pages to write for blocks first_block… of the handle's prompt."""

    def commit(self, write: int) -> None:
        """Seal the pages, name them by the handle's ids, and keep them pinned under the handle (P9)."""

    def abandon(self, write: int) -> None:
        """Take unwritten or half-written pages back; the engine writes them no more."""

    def release(self, handle: int) -> None:
        """Unpin what the handle holds."""

    def forget(self) -> int:
        """Forget the names of all content, since they mean other bytes from now on; return how many those were.

        Nothing is lent by these names from now on; reads that were granted go on (contract 24).
        """

    def hand_over(self, handle: int) -> None:
        """The handle passes from the engine to the worker: `engine_gone` spares it, the worker releases it itself."""

    def engine_left(self) -> None:
        """Abandon and release all that the engine holds: its process says that it touches none of it any more."""

    def engine_gone(self) -> None:
        """Give back all that the engine holds; called once per engine, after its process is proved to have ended."""

    def held(self, ids: tuple[int, ...], salt: str) -> int:
        """Return how many leading whole blocks of the prompt the pool holds."""

    def evict(self, ids: tuple[int, ...], salt: str) -> int:
        """Drop the prompt's held blocks that nobody has lent or pinned; return how many."""

    def where(self, ids: tuple[int, ...], salt: str) -> Where | Refusal:
        """Say where the held prefix lies in memory; nothing is pinned by it."""

    def stats(self) -> Mapping[str, int | float | str]:
        """Return counters by name."""
