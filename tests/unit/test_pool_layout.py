"""The layout of pages: shape, fingerprint, namespace, and what of the wire is refused."""

from dataclasses import fields, replace

import numpy as np
import pytest

from kvbus.errors import ConfigError
from kvbus.names import page_names
from kvbus.pool.layout import PageLayout
from tests.unit.pool_parts import TOY

KV = PageLayout(
    kind="kv",
    layers=30,
    kv_heads=3,
    block_tokens=32,
    head_dim=64,
    dtype="float32",
    rank=1,
    ranks=2,
    model_digest="0f" * 32,
)
OTHERS = {
    "kind": "toy",
    "layers": 31,
    "kv_heads": 4,
    "block_tokens": 16,
    "head_dim": 128,
    "dtype": "uint32",  # the same width: only the meaning differs
    "rank": 0,
    "ranks": 3,
    "model_digest": "0e" * 32,
}


def test_a_kv_page_holds_keys_and_values_of_all_layers() -> None:
    assert KV.shape == (30, 2, 3, 32, 64)
    assert KV.element == np.float32
    assert KV.page_bytes == 30 * 2 * 3 * 32 * 64 * 4


def test_pages_are_padded_to_whole_memory_pages() -> None:
    assert TOY.page_bytes == 64
    assert TOY.page_stride == 4096
    assert KV.page_stride % 4096 == 0
    assert 0 <= KV.page_stride - KV.page_bytes < 4096


@pytest.mark.contract("37")
@pytest.mark.parametrize("field", [entry.name for entry in fields(PageLayout)])
def test_every_field_changes_fingerprint_and_names(field: str) -> None:
    other = PageLayout(**{**KV.to_plain(), field: OTHERS[field]})  # type: ignore[arg-type]
    assert other.fingerprint() != KV.fingerprint()
    tokens = range(64)
    assert not set(page_names(other.namespace("s"), tokens, 32)) & set(page_names(KV.namespace("s"), tokens, 32))


@pytest.mark.contract("37")
def test_salt_and_lora_separate_names() -> None:
    assert len({KV.namespace("a"), KV.namespace("b"), KV.namespace("a", "lora"), KV.namespace("", "a")}) == 4


def test_the_fingerprint_is_fixed_for_all_time() -> None:
    # A changed value means that pools of two versions no longer exchange pages: raise the layout version then.
    assert TOY.fingerprint() == "00cfe9166bb104871067424d79975528"


def test_a_layout_survives_the_wire() -> None:
    assert PageLayout.from_plain(KV.to_plain()) == KV


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "mla"),
        ("layers", 0),
        ("layers", True),
        ("layers", "30"),
        ("kv_heads", 1025),
        ("block_tokens", -1),
        ("head_dim", None),
        ("dtype", "complex64"),
        ("dtype", 4),
        ("dtype", ["float32"]),
        ("rank", 2),
        ("rank", -1),
        ("ranks", 65536),
        ("model_digest", "XY"),
        ("model_digest", "abc"),
        ("model_digest", ""),
        ("model_digest", 12),
        ("model_digest", "ab" * 65),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{field}'"):
        PageLayout.from_plain({**KV.to_plain(), field: value})


def test_what_is_no_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="list"):
        PageLayout.from_plain([1])
    with pytest.raises(ConfigError, match="'rank' is missing"):
        PageLayout.from_plain({name: value for name, value in KV.to_plain().items() if name != "rank"})
    with pytest.raises(ConfigError, match="'sinks' is unknown"):
        PageLayout.from_plain({**KV.to_plain(), "sinks": 4})


def test_a_page_beyond_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower block_tokens"):
        replace(KV, layers=1024, kv_heads=1024, head_dim=65536).require_valid()
