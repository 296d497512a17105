"""Copies between vLLM's KV memory and pages, and converts; numpy views on both sides, no torch.

A canonical page is [layers, 2, heads, tokens, head_dim]: keys, then values, as every engine reads it. vLLM's CPU
kernels with the `vec` packing keep a block of one layer as [heads, 2, tokens · head_dim] in one run: keys first, and
those transposed to [head_dim, tokens], then values as they are. All layers lie at equal distances in one storage as a
rule, so one block of all layers is one strided view, and copying it takes two operations. numpy copies such views half
again as fast as torch does, and gives up the interpreter meanwhile.

An opaque page is the same bytes as vLLM has them, layer behind layer.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvbus.errors import ConfigError
from kvbus.pool.layout import PageLayout
from kvbus.pool.memory import PoolMemory

Raw = NDArray[np.uint8]
"""One layer's cache as bytes, a view: [blocks, heads, tokens, bytes of a key and a value]."""

Cache = TypeVar("Cache")


def stacked(caches: Sequence[Raw]) -> Raw | None:
    """Return one view [layers, *shape] of caches that lie at equal distances in memory, None if they do not.

    The view reaches from the first into the others: whoever uses it keeps all of them.
    """
    first = caches[0]
    starts = [int(cache.ctypes.data) for cache in caches]
    steps = {after - before for before, after in pairwise(starts)} or {first.nbytes}
    if len(steps) != 1 or min(steps) <= 0:
        return None
    return as_strided(first, (len(caches), *first.shape), (steps.pop(), *first.strides))


def check_caches(caches: Sequence[Raw], layout: PageLayout) -> None:
    """Raise ConfigError unless there is one contiguous cache a layer, [blocks, heads, tokens, bytes]."""
    if len(caches) != layout.layers:
        raise ConfigError(
            f"vLLM has {len(caches)} caches for {layout.layers} layers: layers that share one are not supported"
        )
    token_bytes = layout.page_bytes // (layout.layers * layout.kv_heads * layout.block_tokens)
    expected = (layout.kv_heads, layout.block_tokens, token_bytes)
    if any(cache.shape[1:] != expected or not cache.flags.c_contiguous for cache in caches):
        shapes = sorted({str(cache.shape) for cache in caches})
        raise ConfigError(
            f"vLLM's caches have shapes {', '.join(shapes)} in bytes, and the connector knows contiguous ones, "
            f"(blocks, {', '.join(map(str, expected))}): this backend is not supported"
        )


class CanonicalCopier:
    """Converts between canonical pages and the `vec` packing, in float32."""

    def __init__(self, caches: Sequence[Raw], layout: PageLayout) -> None:
        check_caches(caches, layout)
        self._layout = layout
        self._caches = caches
        whole = stacked(caches)
        self._parts = [_Packed(whole, layout)] if whole is not None else [_Packed(one[None], layout) for one in caches]

    def __repr__(self) -> str:
        return f"<CanonicalCopier layers={self._layout.layers} parts={len(self._parts)}>"

    def load(self, pool: PoolMemory, pages: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy pages into vLLM's blocks."""
        for page, block in zip(pages, block_ids, strict=True):
            for part, there in _pairs(self._parts, pool.page_array(page)):
                np.copyto(part.keys[:, block], there[:, 0])
                np.copyto(part.values[:, block], there[:, 1])

    def store(self, pool: PoolMemory, pages: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy vLLM's blocks into pages."""
        for page, block in zip(pages, block_ids, strict=True):
            for part, there in _pairs(self._parts, pool.page_array(page)):
                np.copyto(there[:, 0], part.keys[:, block])
                np.copyto(there[:, 1], part.values[:, block])


class _Packed:
    """Keys and values of some layers as views in a page's order, [layers, blocks, heads, tokens, head_dim]."""

    def __init__(self, cache: Raw, layout: PageLayout) -> None:
        tokens, head_dim, outer = layout.block_tokens, layout.head_dim, cache.strides[:3]
        shape = (*cache.shape[:3], tokens, head_dim)
        # Each is a view of one element, stretched: numpy has no view of a part of a run in another order.
        key, value = (cache[:, :, :, row : row + 1, :4].view(np.float32) for row in (0, tokens // 2))
        size = key.itemsize
        self.keys = as_strided(key, shape, (*outer, size, size * tokens))
        self.values = as_strided(value, shape, (*outer, size * head_dim, size))


class OpaqueCopier:
    """Copies blocks as they are."""

    def __init__(self, caches: Sequence[Raw], layout: PageLayout) -> None:
        check_caches(caches, layout)
        self._layout = layout
        self._caches = caches
        whole = stacked(caches)
        self._parts = [whole] if whole is not None else [one[None] for one in caches]

    def __repr__(self) -> str:
        return f"<OpaqueCopier layers={self._layout.layers} parts={len(self._parts)}>"

    def load(self, pool: PoolMemory, pages: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy pages into vLLM's blocks."""
        for page, block in zip(pages, block_ids, strict=True):
            for part, there in _pairs(self._parts, self._page(pool, page)):
                np.copyto(part[:, block], there)

    def store(self, pool: PoolMemory, pages: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy vLLM's blocks into pages."""
        for page, block in zip(pages, block_ids, strict=True):
            for part, there in _pairs(self._parts, self._page(pool, page)):
                np.copyto(there, part[:, block])

    def _page(self, pool: PoolMemory, page: int) -> Raw:
        return pool.page_bytes(page).reshape(self._layout.layers, *self._caches[0].shape[1:])


Part = TypeVar("Part")
Page = TypeVar("Page", NDArray[np.generic], Raw)


def _pairs(parts: Sequence[Part], page: Page) -> list[tuple[Part, Page]]:
    """Return each part with its layers of the page: all of them, or one layer each."""
    if len(parts) == 1:
        return [(parts[0], page)]
    return [(part, page[layer : layer + 1]) for layer, part in enumerate(parts)]


def in_layer_order(caches: Mapping[str, Cache]) -> list[Cache]:
    """Return the caches by the number in their layers' names; ConfigError where two have the same one, or none."""
    numbered: dict[int, Cache] = {}
    for name, cache in caches.items():
        numbers = [int(part) for part in name.split(".") if part.isdecimal()]
        if len(numbers) != 1 or numbers[0] in numbered:
            raise ConfigError(f"layer {name!r} has no number of its own: the connector cannot tell the layers' order")
        numbered[numbers[0]] = cache
    return [numbered[number] for number in sorted(numbered)]
