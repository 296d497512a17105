"""What an engine must be able to do, and the one flow against the worker that all engines share.

An `Engine` holds numerics only. `EngineSession` asks the worker for cached pages, has the engine resume from them,
sends tokens, and stores what was computed:

    match → resume from pinned pages → first token leaves → alloc → fill → commit → release → further tokens

The first token leaves before anything is stored: storing costs round trips and a copy of the whole prompt, and neither
P1 (a page is readable only between commit and the next alloc) nor P9 (pages stay pinned while they are read) asks that
a token wait for it. Only whole blocks of the prompt are stored, never of the answer; the last prompt token is always
computed, since pages alone give no next token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvbus.errors import PeerError
from kvbus.pool.layout import PageLayout

PageArray = NDArray[np.generic]
"""One page in the layout's element type and shape: a view of the pool, valid while its handle or write is held."""

Cancelled = Callable[[], bool]

_HELD_BACK_TOKENS_MAX = 4
# The longest character in UTF-8 has four bytes, and no token has less than one.
_UNFINISHED = "\ufffd"  # what tokenizers decode the bytes of an unfinished character to


class StoppedError(Exception):
    """The computation was cancelled on request, or the worker is gone; nothing went wrong."""


@dataclass(frozen=True, slots=True)
class Description:
    """What an engine is. `tokens_max` bounds prompt plus answer; token ids lie below `vocab_size`."""

    engine: str
    version: str
    model: str
    model_digest: str
    layout: PageLayout
    vocab_size: int
    tokens_max: int


class Run(Protocol):
    """One prompt in the making: it owns its tokens' KV, so pages may be released once `resume` has returned."""

    def prefill(self) -> None:
        """Compute all tokens of the prompt that are not there yet, without an output token."""

    def next_token(self) -> int | None:
        """Return the next token of the answer, computing the prompt first; None once the model has ended it."""

    def export(self, first_block: int, pages: Sequence[PageArray]) -> None:
        """Write computed whole blocks of the prompt into pages: block first_block into pages[0], and so on."""


class Engine(Protocol):
    """A model's numerics. One thread computes; `tokenize`, `tokenize_chat` and `decode` may be called from a second."""

    def describe(self) -> Description:
        """Return what this engine is; the same each time."""

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a plain text."""

    def tokenize_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a chat, up to where the answer begins."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""

    def resume(self, ids: Sequence[int], pages: Sequence[PageArray], cancelled: Cancelled) -> Run:
        """Begin a run whose first blocks come from pages, taken as they are; at least one id lies behind them.

        The pages are read here, copied or used up, and never again. The engine asks `cancelled` as often as it can
        between steps, and raises StoppedError once it says so.
        """


class Pool(Protocol):
    """The pages that engine and worker share; `kvbus.pool.memory.PoolMemory` is one."""

    def page_array(self, page: int) -> PageArray:
        """Return a view of one page."""


class WorkerCalls(Protocol):
    """The worker as its engine sees it; each call returns within a bound or raises EngineError.

    These are all that an engine's loop ever asks: `match` when it admits a prompt, the others once it has the first
    token, and nothing at a step. Without a worker `alone.NoWorker` answers them, at no cost (R23).
    """

    def match(self, ids: Sequence[int], salt: str) -> tuple[int, tuple[int, ...]]:
        """Return (handle, pages of the longest cached prefix)."""

    def alloc(self, handle: int, first_block: int, count: int) -> tuple[int, tuple[int, ...]] | str:
        """Return (write, pages to fill), or the text of a refusal."""

    def commit(self, write: int) -> None:
        """Hand filled pages back; they are content from now on."""

    def abandon(self, write: int) -> None:
        """Hand pages back unfilled."""

    def release(self, handle: int) -> None:
        """Let the prefix go."""

    def forget(self) -> int:
        """Have the names of all content forgotten, since they mean other bytes from now on; return how many."""


@dataclass(frozen=True, slots=True)
class Request:
    """One `generate`, with its prompt as token ids."""

    ids: tuple[int, ...]
    max_tokens: int
    store: bool
    reuse: bool
    salt: str


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer, and the text that it completes (empty inside a character of several tokens)."""

    token: int
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """A whole answer. `reason`: "length", "stop" (the model ended it) or "cancelled".

    `text` may hold a last unfinished character that no token's text held.
    """

    tokens: tuple[int, ...]
    text: str
    prompt_tokens: int
    cached_tokens: int
    stored_blocks: int
    reason: str


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt's first `blocks` blocks stand in the pool, pinned under `handle`.

    `refused` says why they are fewer than the prompt's whole blocks, if they are.
    """

    handle: int
    blocks: int
    computed_tokens: int
    cached_tokens: int
    refused: str = ""


class EngineSession:
    """One engine attached to one worker: the flow of this module's head, for one request at a time."""

    def __init__(self, engine: Engine, description: Description, worker: WorkerCalls, pool: Pool) -> None:
        self._engine = engine
        self._description = description
        self._worker = worker
        self._pool = pool
        self._block_tokens = description.layout.block_tokens

    def __repr__(self) -> str:
        return f"<EngineSession {self._description.engine} {self._description.model}>"

    def tokenize(self, text: str | None, messages: Sequence[Mapping[str, str]] | None) -> list[int]:
        """Return the ids of a text or a chat; PeerError unless exactly one is given, and it makes a valid prompt."""
        if (text is None) == (messages is None):
            raise PeerError("give exactly one of text and messages to tokenize")
        ids = self._engine.tokenize(text) if text is not None else self._engine.tokenize_chat(messages or ())
        self.check_prompt(ids)
        return ids

    def generate(self, request: Request, emit: Callable[[Token], None], cancelled: Cancelled) -> End:
        """Answer a prompt, calling `emit` with each token as soon as it is known.

        A pool that is too small or refuses costs only the storing. Once cancelled, the answer ends at the next token
        with what it has. PeerError for a prompt that this engine cannot take.
        """
        self.check_prompt(request.ids)
        if request.max_tokens < 1:
            raise PeerError("max_tokens must be at least 1", got=request.max_tokens)
        prefix = self._match(request.ids, request.salt) if request.reuse or request.store else None
        usable = self._usable_blocks(request, prefix)
        tokens: list[int] = []
        stored = 0
        try:
            run = self._resume(request.ids, prefix.pages[:usable] if prefix else (), cancelled)
            steps = self._steps(run, request, cancelled)
            for token in steps:
                tokens.append(token.token)
                emit(token)
                if prefix and len(tokens) == 1:
                    stored = self._store(run, request.ids, prefix) if request.store else 0
                    prefix.release()
            reason = "length" if len(tokens) == self._room(request) else "stop"
        except StoppedError:
            reason = "cancelled"
        finally:
            if prefix:
                prefix.release()
        cached = usable * self._block_tokens
        return End(tuple(tokens), self._engine.decode(tokens), len(request.ids), cached, stored, reason)

    def prefill(self, ids: tuple[int, ...], salt: str, cancelled: Cancelled) -> Prefilled:
        """Compute and store the prompt's whole blocks without an output token; the pages stay pinned under a handle.

        Pages are asked for first: with a full pool nothing is computed in vain. StoppedError if cancelled, with
        everything given back.
        """
        self.check_prompt(ids)
        prefix = self._match(ids, salt)
        block = self._block_tokens
        held, whole = len(prefix.pages), len(ids) // block
        refused = ""
        try:
            blocks = held
            if held < whole:
                granted = self._worker.alloc(prefix.handle, held, whole - held)
                if isinstance(granted, str):
                    refused = granted
                else:
                    blocks += self._fill(ids, prefix, granted, cancelled)
                    refused = "" if blocks == whole else f"the pool had room for {blocks} of {whole} blocks"
        except BaseException:
            prefix.release()
            raise
        return Prefilled(prefix.handle, blocks, (blocks - held) * block, held * block, refused)

    def forget(self) -> int:
        """Say that the weights have changed: what was stored is found by nobody any more, and what follows counts.

        Call it between two requests, on the thread that computes, before anything is computed under the new weights.
        """
        return self._worker.forget()

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raise PeerError where this engine cannot take the prompt."""
        about = self._description
        if not ids:
            raise PeerError("the prompt has no tokens; send at least one")
        # One place stays for the answer's first token.
        if len(ids) >= about.tokens_max:
            raise PeerError(
                f"the prompt has {len(ids)} tokens, {about.model} takes at most {about.tokens_max - 1}; shorten it"
            )
        if min(ids) < 0 or max(ids) >= about.vocab_size:
            raise PeerError(
                f"a token id is out of range: the prompt's lie in {min(ids)}…{max(ids)}, those of {about.model} in "
                f"0…{about.vocab_size - 1}; tokenize with this model's tokenizer"
            )

    def _match(self, ids: tuple[int, ...], salt: str) -> "_Prefix":
        handle, pages = self._worker.match(ids, salt)
        return _Prefix(self._worker, handle, pages)

    def _usable_blocks(self, request: Request, prefix: "_Prefix | None") -> int:
        if prefix is None or not request.reuse:
            return 0
        return min(len(prefix.pages), (len(request.ids) - 1) // self._block_tokens)

    def _room(self, request: Request) -> int:
        return min(request.max_tokens, self._description.tokens_max - len(request.ids))

    def _resume(self, ids: tuple[int, ...], pages: Sequence[int], cancelled: Cancelled) -> Run:
        if cancelled():
            raise StoppedError
        return self._engine.resume(ids, [self._pool.page_array(page) for page in pages], cancelled)

    def _steps(self, run: Run, request: Request, cancelled: Cancelled) -> Iterator[Token]:
        texts = TextStream(self._engine.decode)
        for _ in range(self._room(request)):
            if cancelled():
                raise StoppedError
            token = run.next_token()
            if token is None:
                return
            yield Token(token, texts.push(token))

    def _store(self, run: Run, ids: tuple[int, ...], prefix: "_Prefix") -> int:
        """Store the whole blocks that the pool lacks and return how many; 0 where it has no room."""
        first = len(prefix.pages)
        count = len(ids) // self._block_tokens - first
        granted = self._worker.alloc(prefix.handle, first, count) if count > 0 else ""
        if isinstance(granted, str):
            return 0
        write, pages = granted
        with self._writing(write):
            run.export(first, [self._pool.page_array(page) for page in pages])
        return len(pages)

    def _fill(
        self, ids: tuple[int, ...], prefix: "_Prefix", granted: tuple[int, tuple[int, ...]], cancelled: Cancelled
    ) -> int:
        """Compute the blocks behind the prefix that pages were granted for, store them, and return how many."""
        write, pages = granted
        first = len(prefix.pages)
        with self._writing(write):
            run = self._resume(ids[: (first + len(pages)) * self._block_tokens], prefix.pages, cancelled)
            run.prefill()
            run.export(first, [self._pool.page_array(page) for page in pages])
        return len(pages)

    @contextmanager
    def _writing(self, write: int) -> Iterator[None]:
        """Commit a write if its body filled the pages whole, otherwise abandon it."""
        try:
            yield
        except BaseException:
            self._worker.abandon(write)
            raise
        self._worker.commit(write)


class _Prefix:
    """A pinned prefix: what `match` gave. It may be released again; only the first time counts."""

    def __init__(self, worker: WorkerCalls, handle: int, pages: tuple[int, ...]) -> None:
        self.handle = handle
        self.pages = pages
        self._worker = worker
        self._is_held = True

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._worker.release(self.handle)


class TextStream:
    """Turns tokens into text as they come, holding back what is not yet a whole character."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        # Tokens before _context are out of play; those up to _sent are context, since a token's text may depend on
        # the one before it (leading spaces); the rest is held back.
        self._context = 0
        self._sent = 0

    def push(self, token: int) -> str:
        """Return the text that this token completes, possibly none."""
        self._ids.append(token)
        whole = self._decode(self._ids[self._context :])
        held_back = len(self._ids) - self._sent
        if whole.endswith(_UNFINISHED) and held_back < _HELD_BACK_TOKENS_MAX:
            return ""
        known = self._decode(self._ids[self._context : self._sent])
        self._context, self._sent = self._sent, len(self._ids)
        return whole[len(known) :]
