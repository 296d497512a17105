"""The toy engine: no model, yet every property of one that staging pages can break.

A token's row is a function of all tokens up to it, and costs real hashing to compute. A page is the rows of one block.
The next token is a function of every byte of every row of the prompt, read from pages where there are any: one torn
or wrong byte changes the answer, and so does a page of another prompt. Tokens are the bytes of the text in UTF-8, and
a few marks for chats.

row(t) = state(t) ‖ expansion of state(t), state(t) = PBKDF2(token(t), salt state(t - 1), work_rounds)
next token = digest of all rows, mapped to a printable character, so that answers are text
"""

import hashlib
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Self

import numpy as np

from kvbus.engines.base import Cancelled, Description, PageArray, StoppedError
from kvbus.errors import ConfigError, PeerError
from kvbus.pool.layout import PageLayout

VERSION = "1"
"""Raised whenever a row's bytes change meaning; it goes into the model digest."""

VOCAB_SIZE = 259
TURN_START, TURN_END, ROLE_END = 256, 257, 258
"""Marks around a chat's turns: <start>role<role end>content<end>. They decode to nothing."""

_ALPHABET = (string.ascii_lowercase + string.ascii_uppercase + string.digits + " .").encode()
_STATE_BYTES = 32
_TOKEN_BYTES = 4
_BYTE_VALUES = 256


@dataclass(frozen=True, slots=True)
class ToyOptions:
    """Settings of a toy engine.

    `work_rounds` per token cost about 0.3 ms, so that 1,000 tokens take about 0.3 s where reading their pages takes
    some milliseconds. 64 KiB pages of 32-token blocks are the smallest that real engines move in numbers. `rank` of
    `ranks`: a toy among several computes rows of its own and answers from them alone, so that one rank's page under
    another's name would show.
    """

    name: str = "toy"
    seed: int = 0
    block_tokens: int = 32
    page_bytes: int = 65536
    work_rounds: int = 800
    tokens_max: int = 8192
    rank: int = 0
    ranks: int = 1

    @classmethod
    def from_plain(cls, raw: Mapping[str, object]) -> "ToyOptions":
        """Return checked options; ConfigError names the first that is wrong."""
        known = {field.name: field.type for field in fields(cls)}
        for name, value in raw.items():
            if name not in known:
                raise ConfigError(f"toy option {name!r} is unknown; there are {', '.join(known)}")
            if type(value) is not known[name]:
                raise ConfigError(f"toy option {name!r} is {type(value).__name__}, expected {known[name]}")
        options = cls(**raw)  # type: ignore[arg-type] # checked above
        options.require_valid()
        return options

    def require_valid(self) -> None:
        """Raise ConfigError naming the first option that is out of range; the layout checks block and page sizes."""
        for name, least in (
            ("block_tokens", 1),
            ("page_bytes", 1),
            ("work_rounds", 1),
            ("tokens_max", 2),
            ("ranks", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"toy option {name} is {getattr(self, name)}, expected at least {least}")
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(f"toy option rank is {self.rank}, expected 0…{self.ranks - 1} of ranks={self.ranks}")
        if self.page_bytes % self.block_tokens or self.page_bytes // self.block_tokens < _STATE_BYTES:
            raise ConfigError(
                f"toy option page_bytes is {self.page_bytes}, expected a multiple of block_tokens={self.block_tokens} "
                f"with at least {_STATE_BYTES} bytes a token"
            )

    @property
    def row_bytes(self) -> int:
        """The bytes of one token in a page."""
        return self.page_bytes // self.block_tokens


class ToyEngine:
    """See the module's head. All methods may be called from any thread; a run belongs to one."""

    def __init__(self, options: ToyOptions) -> None:
        self._options = options
        self._layout_options = options

    def __repr__(self) -> str:
        return f"<ToyEngine {self._options.name} page_bytes={self._options.page_bytes}>"

    @classmethod
    def load(cls, raw: Mapping[str, object]) -> Self:
        """Return an engine for options as they came; ConfigError names what is wrong with them."""
        return cls(ToyOptions.from_plain(raw))

    def describe(self) -> Description:
        """Return what this engine is; digest and layout, which names the rank, cover all that changes a row's bytes."""
        options = self._layout_options
        model = {name: value for name, value in asdict(options).items() if name not in {"rank", "ranks"}}
        digest = hashlib.blake2b(repr((VERSION, model)).encode(), digest_size=32).hexdigest()
        layout = PageLayout(
            kind="toy",
            layers=1,
            kv_heads=1,
            block_tokens=options.block_tokens,
            head_dim=options.row_bytes,
            dtype="uint8",
            rank=options.rank,
            ranks=options.ranks,
            model_digest=digest,
        )
        layout.require_valid()
        return Description("toy", VERSION, options.name, digest, layout, VOCAB_SIZE, options.tokens_max)

    def change_weights(self, seed: int) -> None:
        """Compute other rows from now on, under the names of before: `EngineSession.forget` has to say so first."""
        self._options = replace(self._options, seed=seed)

    def tokenize(self, text: str) -> list[int]:
        """Return the text's bytes in UTF-8."""
        try:
            return list(text.encode())
        except UnicodeEncodeError as error:
            raise PeerError("the text holds half of a surrogate pair; send valid Unicode") from error

    def tokenize_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the turns between their marks, and the start of the assistant's."""
        ids: list[int] = []
        for message in messages:
            ids += [TURN_START, *self.tokenize(message["role"]), ROLE_END, *self.tokenize(message["content"]), TURN_END]
        return [*ids, TURN_START, *self.tokenize("assistant"), ROLE_END]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids that are bytes."""
        return bytes(token for token in ids if token < _BYTE_VALUES).decode(errors="replace")

    def resume(self, ids: Sequence[int], pages: Sequence[PageArray], cancelled: Cancelled) -> "ToyRun":
        """Begin a run behind the tokens of these pages, every byte of which is read now."""
        return ToyRun(self._options, ids, pages, cancelled)


class ToyRun:
    """One prompt: the digest of all rows so far, the last state, and the rows computed here."""

    def __init__(
        self, options: ToyOptions, ids: Sequence[int], pages: Sequence[PageArray], cancelled: Cancelled
    ) -> None:
        self._options = options
        self._cancelled = cancelled
        self._first = len(pages) * options.block_tokens
        self._todo = list(ids[self._first :])
        self._rows = bytearray()
        self._digest = hashlib.blake2b(digest_size=_STATE_BYTES)
        slice_name = f" {options.rank}/{options.ranks}" if options.ranks > 1 else ""
        start = f"toy {VERSION} {options.seed}{slice_name}".encode()
        self._state = hashlib.blake2b(start, digest_size=_STATE_BYTES).digest()
        for page in pages:
            self._digest.update(np.ascontiguousarray(page).data)
        if pages:
            last_row = pages[-1].reshape(options.block_tokens, options.row_bytes)[-1]
            self._state = last_row[:_STATE_BYTES].tobytes()

    def prefill(self) -> None:
        """Compute the rows that are left; StoppedError between two tokens once cancelled."""
        for token in self._todo:
            if self._cancelled():
                raise StoppedError
            self._rows += self._row(token)
        self._todo.clear()

    def next_token(self) -> int | None:
        """Return the token that follows; it is part of the context from then on. A toy never ends by itself."""
        if self._todo:
            self.prefill()
        token = _ALPHABET[int.from_bytes(self._digest.digest()[:8], "little") % len(_ALPHABET)]
        self._todo.append(token)  # computed when, and if, another token is wanted
        return token

    def export(self, first_block: int, pages: Sequence[PageArray]) -> None:
        """Copy computed rows into pages."""
        options = self._options
        offset = first_block * options.block_tokens - self._first
        for position, page in enumerate(pages):
            start = (offset + position * options.block_tokens) * options.row_bytes
            if start < 0 or start + options.page_bytes > len(self._rows):
                raise ValueError(f"block {first_block + position} was not computed by this run")
            block = np.frombuffer(self._rows, dtype=np.uint8, count=options.page_bytes, offset=start)
            np.copyto(page, block.reshape(page.shape))

    def _row(self, token: int) -> bytes:
        options = self._options
        name = token.to_bytes(_TOKEN_BYTES, "little")
        self._state = hashlib.pbkdf2_hmac("sha256", name, self._state, options.work_rounds)
        rest = hashlib.shake_128(self._state).digest(options.row_bytes - _STATE_BYTES)
        row = self._state + rest
        self._digest.update(row)
        return row
