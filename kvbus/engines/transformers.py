"""The transformers engine: a real causal language model whose KV goes to pages and comes back from them.

The numerics are those of `transformers_model.CausalModel`; here they meet the flow of `base`. One thread computes: two
instances share a host, and two spinning pools of threads on the same cores are many times slower than one thread each.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

import numpy as np
from numpy.typing import NDArray

from kvbus.engines.base import Cancelled, Description, PageArray, StoppedError
from kvbus.errors import ConfigError
from kvbus.pool.layout import PageLayout

if TYPE_CHECKING:
    from kvbus.engines.transformers_model import CausalModel

BLOCK_TOKENS = 32
"""What vLLM's CPU backend needs; page names match across engines only where block sizes do."""


@dataclass(frozen=True, slots=True)
class TransformersOptions:
    """Settings of a transformers engine: `folder` holds the model, `name` is what people call it."""

    folder: str
    name: str = ""
    block_tokens: int = BLOCK_TOKENS
    threads: int = 1

    @classmethod
    def from_plain(cls, raw: Mapping[str, object]) -> "TransformersOptions":
        """Return checked options; ConfigError names the first that is wrong."""
        kinds: dict[str, type] = {"folder": str, "name": str, "block_tokens": int, "threads": int}
        for name, value in raw.items():
            if name not in kinds:
                raise ConfigError(f"transformers option {name!r} is unknown; there are {', '.join(kinds)}")
            if type(value) is not kinds[name]:
                raise ConfigError(
                    f"transformers option {name!r} is {type(value).__name__}, expected {kinds[name].__name__}"
                )
        if not raw.get("folder"):
            raise ConfigError("transformers option 'folder' is missing: name a model folder, or run scripts/get_model")
        options = cls(**raw)  # type: ignore[arg-type] # checked above
        for name in ("block_tokens", "threads"):
            if getattr(options, name) < 1:
                raise ConfigError(f"transformers option {name} is {getattr(options, name)}, expected at least 1")
        return options


class TransformersEngine:
    """A loaded model behind the engine protocol. The tokenizer is guarded: it is not safe for two threads at once."""

    def __init__(self, options: TransformersOptions, model: "CausalModel") -> None:
        self._options = options
        self._model = model
        self._tokenizing = threading.Lock()

    def __repr__(self) -> str:
        return f"<TransformersEngine {self._model!r}>"

    @classmethod
    def load(cls, raw: Mapping[str, object]) -> Self:
        """Load the model that the options name (seconds); ConfigError says what is wrong with them or with it."""
        options = TransformersOptions.from_plain(raw)
        try:
            from kvbus.engines.transformers_model import CausalModel
        except ImportError as error:
            raise ConfigError(
                "the transformers engine needs torch and transformers: pip install 'kvbus[transformers]'",
                missing=error.name or str(error),
            ) from error
        return cls(options, CausalModel.load(Path(options.folder), options.threads))

    def describe(self) -> Description:
        """Return what this engine is; the digest is over the model's configuration and weights."""
        numbers = self._model.numbers
        digest = self._model.digest()
        layout = PageLayout(
            kind="kv",
            layers=numbers.layers,
            kv_heads=numbers.kv_heads,
            block_tokens=self._options.block_tokens,
            head_dim=numbers.head_dim,
            dtype=numbers.dtype,
            rank=0,
            ranks=1,
            model_digest=digest,
        )
        name = self._options.name or Path(self._options.folder).name
        return Description(
            "transformers", version("transformers"), name, digest, layout, numbers.vocab_size, numbers.max_tokens
        )

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, with nothing added around it."""
        with self._tokenizing:
            return self._model.encode(text)

    def tokenize_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a chat under the model's own template."""
        with self._tokenizing:
            return self._model.encode_chat(messages)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        with self._tokenizing:
            return self._model.decode(ids)

    def resume(self, ids: Sequence[int], pages: Sequence[PageArray], cancelled: Cancelled) -> "TransformersRun":
        """Copy the pages into a cache of the model's own, and begin behind them."""
        return TransformersRun(self._model, ids, pages, self._options.block_tokens, cancelled)


class TransformersRun:
    """One prompt's cache. A prefill is one forward pass, so cancelling takes effect after it."""

    def __init__(
        self,
        model: "CausalModel",
        ids: Sequence[int],
        pages: Sequence[PageArray],
        block_tokens: int,
        cancelled: Cancelled,
    ) -> None:
        self._model = model
        self._ids = ids
        self._block_tokens = block_tokens
        self._cancelled = cancelled
        self._cached_tokens = len(pages) * block_tokens
        self._cache = model.import_pages(_floats(pages))
        self._answer: Iterator[int] | None = None

    def prefill(self) -> None:
        """Compute what the pages did not hold."""
        self._model.prefill(self._ids, self._cache, start=self._cached_tokens)
        if self._cancelled():
            raise StoppedError

    def next_token(self) -> int | None:
        """Return the next greedy token; None behind the model's end of sequence or its last position."""
        if self._answer is None:
            room = self._model.numbers.max_tokens
            self._answer = self._model.generate(self._ids, self._cache, self._cached_tokens, room)
        return next(self._answer, None)

    def export(self, first_block: int, pages: Sequence[PageArray]) -> None:
        """Copy blocks of the cache into pages."""
        self._model.export_pages(self._cache, first_block, len(pages), self._block_tokens, _floats(pages))


def _floats(pages: Sequence[PageArray]) -> Sequence[NDArray[np.float32]]:
    """The layout says float32, and the model checks it again page by page."""
    return cast("Sequence[NDArray[np.float32]]", pages)
