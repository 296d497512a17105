"""What the bytes of a page mean, and the fingerprint that keeps two meanings apart (contract 37).

Two pools may exchange bytes only where their fingerprints are equal, and page names are made under a namespace that
contains the fingerprint: another layout, model, dtype or rank slice misses, and never hits wrongly.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import prod
from typing import Final

import numpy as np
from numpy.typing import DTypeLike

from kvbus.errors import ConfigError
from kvbus.names import namespace_digest

STRIDE_UNIT_BYTES: Final = 4096
"""Pages start on the host's memory page, so that a lent page shares none with its neighbour and copies are aligned."""

PAGE_MAX_BYTES: Final = 1 << 32
"""4 GiB: far beyond any model's page (80 layers × 2 × 8 heads × 32 tokens × 128 × 4 bytes are 21 MB)."""

_LAYOUT_VERSION: Final = 1
# Raised whenever `shape` or the byte order of elements changes meaning: pools of two versions then never mix.

_LIMITS: Final[Mapping[str, tuple[int, int]]] = {
    # Each upper bound is several times the largest model known; together they keep every product inside 63 bits.
    "layers": (1, 1024),
    "kv_heads": (1, 1024),
    "block_tokens": (1, 4096),
    "head_dim": (1, 65536),
    "ranks": (1, 65535),  # ranks travel as u16
    "rank": (0, 65534),
}
_KINDS: Final = ("kv", "toy", "opaque")
_DIGEST_MAX_CHARACTERS: Final = 128
# 512 bits in hex: the longest digest that hashlib offers.

_ELEMENTS: Final[Mapping[str, DTypeLike]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,  # numpy has no bfloat16: the view shows the raw bits
    "float8_e4m3fn": np.uint8,  # raw bits, as above
    "float8_e5m2": np.uint8,
    "int8": np.int8,
    "uint8": np.uint8,
    "uint32": np.uint32,
}


@dataclass(frozen=True)  # without slots: what follows from the fields is asked for with every transfer, and kept
class PageLayout:
    """The layout of one rank's pages: one block of tokens, all layers.

    `kv_heads` are the heads of this rank, not of the model. `rank` of `ranks` says which slice it is. `model_digest` is
    lower-case hex over the weights and whatever else changes the values. Values are not checked when stored: call
    `require_valid` (pools and `from_plain` do).
    """

    kind: str
    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: str
    rank: int
    ranks: int
    model_digest: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a page: (layers, 2, heads, tokens, head_dim) with keys before values; "toy" has no such pair.

        Of an "opaque" page only the size is meant: how its engine packs it is part of the model's digest.
        """
        if self.kind == "kv":
            return (self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)
        return (self.layers, self.kv_heads, self.block_tokens, self.head_dim)

    @property
    def element(self) -> np.dtype[np.generic]:
        """The numpy type of one element; for types that numpy lacks, an unsigned integer of the same width."""
        return np.dtype(_ELEMENTS[self.dtype])

    @cached_property
    def page_bytes(self) -> int:
        """The bytes of content in one page."""
        return prod(self.shape) * self.element.itemsize

    @property
    def page_stride(self) -> int:
        """The distance between two pages of a pool in bytes: `page_bytes`, padded to whole memory pages."""
        return -(-self.page_bytes // STRIDE_UNIT_BYTES) * STRIDE_UNIT_BYTES

    def fingerprint(self) -> str:
        """Return 32 hex characters over everything whose mismatch could give wrong bytes."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16, person=b"kvbus-layout")
        for key, value in (("version", _LAYOUT_VERSION), ("order", "little"), *asdict(self).items()):
            piece = f"{key}={value}".encode()
            digest.update(len(piece).to_bytes(4, "little"))
            digest.update(piece)
        return digest.hexdigest()

    def namespace(self, salt: str, lora: str = "") -> bytes:
        """Return the namespace under which this layout's pages are named, for one cache salt and one LoRA."""
        return namespace_digest(fingerprint=self.fingerprint(), salt=salt, lora=lora)

    def to_plain(self) -> dict[str, str | int]:
        """Return the layout as a plain dict of str and int, ready for the wire."""
        return asdict(self)

    @classmethod
    def from_plain(cls, raw: object) -> "PageLayout":
        """Return the layout that a plain dict describes; ConfigError naming the first field that is wrong.

        A field that this version does not know is refused too: it may change what the bytes mean.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f"layout is a {type(raw).__name__}, expected a map of fields: send what to_plain gives")
        known = [entry.name for entry in fields(cls)]
        for key in raw:
            if key not in known:
                raise ConfigError(f"layout field {key!r} is unknown here: run the same kvbus version on both sides")
        for name in known:
            if name not in raw:
                raise ConfigError(f"layout field {name!r} is missing: send what to_plain gives")
        layout = cls(**{name: raw[name] for name in known})
        layout.require_valid()
        return layout

    def require_valid(self) -> None:
        """Raise ConfigError naming the first field that is wrong; does nothing for a valid layout."""
        for name, (lowest, highest) in _LIMITS.items():
            value: object = getattr(self, name)
            if type(value) is not int or not lowest <= value <= highest:
                raise _fault(name, value, f"a whole number in {lowest}…{highest}")
        if self.rank >= self.ranks:
            raise _fault("rank", self.rank, f"less than ranks={self.ranks}")
        if self.kind not in _KINDS:
            raise _fault("kind", self.kind, f"one of {', '.join(_KINDS)}")
        if self.dtype not in tuple(_ELEMENTS):
            raise _fault("dtype", self.dtype, f"one of {', '.join(_ELEMENTS)}")
        if not _is_digest(self.model_digest):
            raise _fault("model_digest", self.model_digest, "2…128 lower-case hex digits, an even number of them")
        if self.page_bytes > PAGE_MAX_BYTES:
            raise ConfigError(
                f"a page of shape {self.shape} in {self.dtype} takes {self.page_bytes} bytes, expected at most "
                f"{PAGE_MAX_BYTES}: lower block_tokens"
            )


def _is_digest(value: object) -> bool:
    if not isinstance(value, str) or not 2 <= len(value) <= _DIGEST_MAX_CHARACTERS or len(value) % 2:
        return False
    return set(value) <= set("0123456789abcdef")


def _fault(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(
        f"layout field {name!r} is {type(value).__name__} {str(value)[:40]!r}, expected {expected}: "
        "correct what the engine reports of its cache"
    )
