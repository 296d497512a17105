"""The model side of the transformers engine: tokens in, logits out, and KV to pages and back.

A page is float32 [layers, 2, kv_heads, block_tokens, head_dim]: keys, then values, of one block of tokens in
every layer. That is the order of transformers' own cache, cut at the blocks, so a page means the same in
every process that loads the same model. Attention reads the bytes of a page as they come: a wrong page is not
noticed here, it changes the answer. torch and transformers are imported with this module, and only this
engine imports it.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging as transformers_logging

from kvbus.engines.model_files import GET_MODEL_HINT, folder_digest, model_parts
from kvbus.engines.rope import require_known_rope
from kvbus.errors import ConfigError, PeerError

Float32Array = npt.NDArray[np.float32]
Pages = Float32Array | Sequence[Float32Array]
"""One array [pages, layers, 2, kv_heads, block_tokens, head_dim], or one each for pages that lie apart."""

# transformers' own types change with its releases; kvbus touches only what all of them have.
Foreign: TypeAlias = Any

DTYPE = "float32"


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """The numbers that a page layout and the limits of a prompt are made of."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    vocab_size: int
    max_tokens: int

    def page_shape(self, block_tokens: int) -> tuple[int, int, int, int, int]:
        """Return the shape of one page."""
        return (self.layers, 2, self.kv_heads, block_tokens, self.head_dim)


@dataclass(frozen=True, slots=True)
class ForwardSpelling:
    """How one transformers release and model spell the arguments that kvbus passes to forward."""

    cache_argument: str
    keeps_logits: bool

    @classmethod
    def of(cls, forward: Callable[..., object]) -> "ForwardSpelling":
        """Read the spelling from a signature: `cache` from transformers 5.24 on, `past_key_values` before."""
        parameters = inspect.signature(forward).parameters
        # The new name first: releases that know both warn about the old one.
        for name in ("cache", "past_key_values"):
            if name in parameters:
                return cls(name, "logits_to_keep" in parameters)
        raise ConfigError(
            "this model's forward takes neither cache nor past_key_values, so its KV cannot be moved; "
            "use a causal model of transformers 5.x",
            parameters=sorted(parameters),
        )

    def arguments(self, cache: DynamicCache) -> dict[str, object]:
        """Return the keyword arguments of one forward pass that fills the cache."""
        last_only = {"logits_to_keep": 1} if self.keeps_logits else {}
        return {self.cache_argument: cache, "use_cache": True, **last_only}


class CausalModel:
    """A causal language model on the CPU whose KV can be written to pages and resumed from them.

    It is for one thread at a time. A cache belongs to its caller and grows in place, so after a prefill, or
    the first token of `generate`, the caller may export what it holds.
    """

    def __init__(
        self,
        folder: Path,
        model: Foreign,
        tokenizer: Foreign,
        numbers: ModelNumbers,
        spelling: ForwardSpelling,
    ) -> None:
        self.folder = folder
        self.numbers = numbers
        self._model = model
        self._tokenizer = tokenizer
        self._spelling = spelling

    def __repr__(self) -> str:
        """Name the folder and what decides the size of a page."""
        n = self.numbers
        page = f"layers={n.layers} kv_heads={n.kv_heads} head_dim={n.head_dim}"
        return f"<CausalModel {self.folder.name} {page}>"

    @classmethod
    def load(cls, folder: Path, threads: int = 1) -> "CausalModel":
        """Load a model folder in float32, with torch limited to so many threads in this whole process.

        One thread is the default because several engines share a host, and two spinning pools on the same
        cores are many times slower than one thread each. float32 because a CPU without bfloat16 units is
        several times slower in it. ConfigError names what is missing or broken in the folder.
        """
        model_parts(folder)
        _limit_threads(threads)
        try:
            model = _loaded(folder)
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except ConfigError:
            raise
        except Exception as error:  # foreign code: what it raises on a damaged file is not documented
            raise ConfigError(
                f"model folder {folder} cannot be loaded: {type(error).__name__}: {error}; {GET_MODEL_HINT}"
            ) from error
        spelling = ForwardSpelling.of(model.forward)
        return cls(folder, model, tokenizer, _measured_numbers(model, spelling), spelling)

    def digest(self) -> str:
        """Return the hex digest of config and weights; see `model_files.folder_digest`."""
        return folder_digest(self.folder)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a plain text, with nothing added around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a chat, up to where the assistant's answer begins.

        PeerError if the model has no chat template, or the template refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise PeerError(f"model {self.folder.name} has no chat template; send text or token ids instead")
        turns = [dict(message) for message in messages]
        try:
            ids = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # foreign code: a template is a program from the model's folder
            reason = f"{type(error).__name__}: {error}"
            raise PeerError(f"the chat template refused the messages: {reason}") from error
        return [int(token) for token in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        eos = self._model.generation_config.eos_token_id
        if eos is None:
            return frozenset()
        return frozenset(eos if isinstance(eos, list) else [eos])

    def new_cache(self) -> DynamicCache:
        """Return an empty cache for one sequence."""
        return DynamicCache(config=self._model.config)

    def cached_tokens(self, cache: DynamicCache) -> int:
        """Return how many tokens a cache holds."""
        return int(cache.get_seq_length())

    def prefill(self, ids: Sequence[int], cache: DynamicCache, *, start: int) -> Float32Array:
        """Compute ids[start:] behind the start tokens that the cache holds; return the next token's logits.

        A long prompt may be given in slices of growing length, each starting where the last one ended. At
        least one token must be left to compute: the cache alone gives no logits.
        """
        self.check_prompt(ids)
        held = self.cached_tokens(cache)
        if held != start:
            raise ValueError(f"start is {start}, but the cache holds {held} tokens; they must be the same")
        if start >= len(ids):
            raise ValueError(f"all {len(ids)} tokens are cached; keep at least one to compute (see `trim`)")
        return self._forward(ids[start:], cache)

    def decode_step(self, token: int, cache: DynamicCache) -> Float32Array:
        """Append one token to the cache and return the next one's logits, [vocab_size]."""
        if self.cached_tokens(cache) >= self.numbers.max_tokens:
            raise ValueError(f"the cache is full: the model has {self.numbers.max_tokens} positions")
        return self._forward([token], cache)

    def generate(
        self,
        ids: Sequence[int],
        cache: DynamicCache | None,
        cached_tokens: int,
        max_tokens: int,
        *,
        stop_at_eos: bool = True,
    ) -> Iterator[int]:
        """Yield the greedy continuation of a prompt, computing only what the cache does not hold.

        The cache's first cached_tokens tokens must be those of the prompt; what it holds beyond them is
        dropped, and so is its last token if the whole prompt is cached, because one must be computed to have
        logits. An end-of-sequence token is yielded, and ends the answer if stop_at_eos. The answer also ends
        at the model's last position. Arguments are checked now; the first token costs the prefill.
        """
        self.check_prompt(ids)
        cache = self.new_cache() if cache is None else cache
        held = self.cached_tokens(cache)
        if not 0 <= cached_tokens <= held:
            raise ValueError(f"cached_tokens is {cached_tokens}, but the cache holds {held} tokens")
        start = self.trim(cache, min(cached_tokens, len(ids) - 1))
        # The last token of an answer is never fed back, so it needs no position.
        budget = min(max_tokens, self.numbers.max_tokens - len(ids) + 1)
        return self._continue(ids, cache, start, budget, self.eos_ids if stop_at_eos else frozenset())

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Refuse a prompt that the model cannot take: PeerError, for a prompt comes from a requester."""
        if not ids:
            raise PeerError("the prompt has no tokens; send at least one")
        if len(ids) > self.numbers.max_tokens:
            limit = self.numbers.max_tokens
            raise PeerError(f"the prompt has {len(ids)} tokens; the model takes at most {limit}")
        if min(ids) < 0 or max(ids) >= self.numbers.vocab_size:
            raise PeerError(
                f"a token id is out of range: the prompt's go from {min(ids)} to {max(ids)}, "
                f"the model's from 0 to {self.numbers.vocab_size - 1}"
            )

    def trim(self, cache: DynamicCache, tokens: int) -> int:
        """Drop what a cache holds beyond so many tokens, and return that number."""
        surplus = self.cached_tokens(cache) - tokens
        if surplus > 0:
            # Only the negative form means the same in every release: so many tokens fewer.
            cache.crop(-surplus)
        return tokens

    @torch.inference_mode()
    def export_pages(self, cache: DynamicCache, first_page: int, n_pages: int, block_tokens: int, out: Pages) -> None:
        """Copy whole blocks of a cache into pages: block first_page into out[0], and so on.

        Only whole blocks: a partial last one would change its bytes under its name later. out is written in
        place, one large copy a layer if it is one array, one more a page if its pages lie apart.
        """
        first, last = first_page * block_tokens, (first_page + n_pages) * block_tokens
        held = self.cached_tokens(cache)
        if first_page < 0 or n_pages < 1 or last > held:
            raise ValueError(
                f"pages {first_page} to {first_page + n_pages - 1} are tokens {first} to {last - 1}; "
                f"the cache holds {held}, and only whole pages are exported"
            )
        self._check_pages(out, n_pages, block_tokens)
        shape = self.numbers.page_shape(block_tokens)
        gathered = out if isinstance(out, np.ndarray) else np.empty((n_pages, *shape), np.float32)
        target = torch.from_numpy(gathered)
        for layer, states in enumerate(_states(cache)):
            for slot, kv in enumerate(states):
                blocks = kv[0, :, first:last].reshape(-1, n_pages, block_tokens, shape[-1])
                target[:, layer, slot].copy_(blocks.transpose(0, 1))
        if gathered is not out:
            for page, whole in zip(out, gathered, strict=True):
                np.copyto(page, whole)

    @torch.inference_mode()
    def import_pages(self, pages: Pages) -> DynamicCache:
        """Return a cache that holds the tokens of these pages, in their order, from the first token on.

        The pages are copied: they may be released as soon as this returns.
        """
        if len(pages) == 0:
            return self.new_cache()
        n_pages, block_tokens = len(pages), pages[0].shape[-2]
        self._check_pages(pages, n_pages, block_tokens, written=False)
        layers, _, heads, _, width = self.numbers.page_shape(block_tokens)
        gathered = np.empty((layers, 2, heads, n_pages, block_tokens, width), np.float32)
        for i, page in enumerate(pages):
            gathered[:, :, :, i] = page
        states = torch.from_numpy(gathered).reshape(layers, 2, 1, heads, n_pages * block_tokens, width)
        cache = self.new_cache()
        for layer in range(layers):
            cache.update(states[layer, 0], states[layer, 1], layer)
        return cache

    def _check_pages(self, pages: Pages, n_pages: int, block_tokens: int, *, written: bool = True) -> None:
        expected = self.numbers.page_shape(block_tokens)
        if len(pages) != n_pages:
            raise ValueError(f"{len(pages)} pages were given for {n_pages} blocks")
        for i, page in enumerate(pages):
            if page.shape != expected or page.dtype != np.float32:
                raise ValueError(f"page {i} is {page.dtype} {page.shape}, expected {DTYPE} {expected}")
            if written and not page.flags.writeable:
                raise ValueError(f"page {i} is read-only, so nothing can be exported to it")

    def _continue(
        self, ids: Sequence[int], cache: DynamicCache, start: int, budget: int, ends: frozenset[int]
    ) -> Iterator[int]:
        if budget < 1:
            return
        logits = self.prefill(ids, cache, start=start)
        for position in range(budget):
            token = int(np.argmax(logits))
            yield token
            if token in ends or position == budget - 1:
                return
            logits = self.decode_step(token, cache)

    @torch.inference_mode()
    def _forward(self, ids: Sequence[int], cache: DynamicCache) -> Float32Array:
        tokens = torch.tensor([list(ids)], dtype=torch.int64)
        answer = self._model(input_ids=tokens, **self._spelling.arguments(cache))
        logits: Float32Array = answer.logits[0, -1].numpy()
        return logits


def _limit_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != threads:
        # torch refuses once it has run in parallel; no loss, for eager inference does not use this pool.
        with contextlib.suppress(RuntimeError):
            torch.set_num_interop_threads(threads)


def _loaded(folder: Path) -> Foreign:
    logging: Foreign = transformers_logging
    factory: Foreign = AutoModelForCausalLM
    logging.disable_progress_bar()
    model, found = factory.from_pretrained(folder, dtype=torch.float32, local_files_only=True, output_loading_info=True)
    # transformers only warns, and fills what it lacks with random numbers.
    if lacking := sorted(found["missing_keys"]):
        raise ConfigError(f"the weights in {folder} lack {len(lacking)} tensors; {GET_MODEL_HINT}", first=lacking[0])
    return model.eval()


def _states(cache: Foreign) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each layer's keys and values, [1, kv_heads, tokens, head_dim], where a layer has them."""
    layers = [layer for layer in cache.layers if isinstance(getattr(layer, "keys", None), torch.Tensor)]
    return [(layer.keys, layer.values) for layer in layers]


@torch.inference_mode()
def _measured_numbers(model: Foreign, spelling: ForwardSpelling) -> ModelNumbers:
    """Run one token and read what the cache really holds: configs name heads and widths in too many ways.

    ConfigError where the model's KV cannot be moved.
    """
    require_known_rope(model.config)
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([[0]]), **spelling.arguments(cache))
    states = _states(cache)
    shapes = {tuple(kv.shape) for layer in states for kv in layer}
    sliding = any(getattr(layer, "is_sliding", False) for layer in cache.layers)
    if len(states) != len(cache.layers) or len(shapes) != 1 or sliding:
        raise ConfigError(
            "this model's cache cannot be cut into pages: kvbus needs full attention, and keys and values of "
            "one shape in every layer; use another model",
            shapes=sorted(shapes),
            layers=sorted({type(layer).__name__ for layer in cache.layers}),
        )
    _, kv_heads, _, head_dim = shapes.pop()
    limit = int(model.config.max_position_embeddings)
    return ModelNumbers(len(states), kv_heads, head_dim, DTYPE, int(model.config.vocab_size), limit)
