"""Copies between vLLM's packing and pages, element by element against the packing written out as loops."""

import numpy as np
import pytest

from kvbus.engines.vllm_pages import CanonicalCopier, OpaqueCopier, Raw, in_layer_order, stacked
from kvbus.errors import ConfigError
from kvbus.pool.layout import PageLayout
from kvbus.pool.memory import PoolMemory

LAYERS, HEADS, TOKENS, HEAD_DIM, BLOCKS = 3, 2, 8, 16, 7
CANONICAL = PageLayout("kv", LAYERS, HEADS, TOKENS, HEAD_DIM, "float32", 0, 1, "ab")
OPAQUE = PageLayout("opaque", LAYERS, HEADS, TOKENS, 2 * HEAD_DIM, "float32", 0, 1, "ab")
PAGES, TAKEN = [4, 0, 2], [6, 1, 3]
EPOCH = 1 << 32 | 1


def caches(*, together: bool) -> list[Raw]:
    """One cache a layer, at equal distances or not, every element different."""
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, 2 * HEAD_DIM)
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape).view(np.uint8)
    if together:
        return list(whole)
    apart = np.zeros((2 * LAYERS, *whole.shape[1:]), np.uint8)
    places = [0, 1, 4]
    apart[places] = whole
    return [apart[place] for place in places]


def key(cache: Raw, block: int, head: int, token: int, column: int) -> float:
    """Keys come first, and transposed."""
    return float(cache[block, head].reshape(-1).view(np.float32)[column * TOKENS + token])


def value(cache: Raw, block: int, head: int, token: int, column: int) -> float:
    """Values come behind them, as they are."""
    return float(cache[block, head].reshape(-1).view(np.float32)[TOKENS * HEAD_DIM + token * HEAD_DIM + column])


@pytest.mark.parametrize("together", [True, False], ids=["equal distances", "other distances"])
def test_a_stored_page_holds_every_key_and_value_where_the_layout_says(*, together: bool) -> None:
    layers = caches(together=together)
    assert (stacked(layers) is not None) is together
    pool = PoolMemory.create(CANONICAL, 5, EPOCH)
    CanonicalCopier(layers, CANONICAL).store(pool, PAGES, TAKEN)
    for page, block in zip(PAGES, TAKEN, strict=True):
        there = pool.page_array(page)
        for layer, head, token, column in np.ndindex(LAYERS, HEADS, TOKENS, HEAD_DIM):
            assert there[layer, 0, head, token, column] == key(layers[layer], block, head, token, column)
            assert there[layer, 1, head, token, column] == value(layers[layer], block, head, token, column)


@pytest.mark.parametrize("together", [True, False], ids=["equal distances", "other distances"])
@pytest.mark.parametrize(("form", "layout"), [(CanonicalCopier, CANONICAL), (OpaqueCopier, OPAQUE)])
def test_what_was_stored_is_loaded_into_other_blocks_and_nothing_beside_them_is_touched(
    form: type[CanonicalCopier] | type[OpaqueCopier], layout: PageLayout, *, together: bool
) -> None:
    layers = caches(together=together)
    before = [layer.copy() for layer in layers]
    pool = PoolMemory.create(layout, 5, EPOCH)
    copier = form(layers, layout)
    copier.store(pool, PAGES, TAKEN)
    elsewhere = [0, 2, 5]
    copier.load(pool, PAGES, elsewhere)
    for layer, old in zip(layers, before, strict=True):
        for block, origin in zip(elsewhere, TAKEN, strict=True):
            assert (layer[block] == old[origin]).all()
        rest = [block for block in range(BLOCKS) if block not in elsewhere]
        assert (layer[rest] == old[rest]).all()


def test_caches_of_another_shape_are_refused_with_their_shapes() -> None:
    flat = [np.zeros((2, HEADS, TOKENS, HEAD_DIM), np.uint8)] * LAYERS
    for wrong in (flat, [cache.swapaxes(0, 1) for cache in caches(together=True)]):
        with pytest.raises(ConfigError, match=r"have shapes \("):
            CanonicalCopier(wrong, CANONICAL)
    with pytest.raises(ConfigError, match="2 caches for 3 layers"):
        CanonicalCopier(caches(together=True)[:2], CANONICAL)


def test_layers_stand_in_the_order_of_their_numbers_and_names_without_one_are_refused() -> None:
    one, two = "one", "two"
    assert in_layer_order({"model.layers.10.attn": two, "model.layers.9.attn": one}) == [one, two]
    for names in (["model.attn"], ["a.1.b.2"], ["a.1.x", "b.1.y"]):
        with pytest.raises(ConfigError, match="has no number of its own"):
            in_layer_order(dict.fromkeys(names, one))
