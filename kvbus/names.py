"""Content names: page names, request hashes, epochs.

A page name is the chain hash of the token ids up to and including its block, under a namespace digest that covers
everything whose mismatch could give wrong bytes. Equal names mean interchangeable bytes (contract 37).
"""

import hashlib
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

NAME_LENGTH_BYTES = 16
"""128 bits: with 2**40 pages ever named, the chance of one collision is about 2**-49."""

TOKEN_ID_MAX = 2**32 - 1
"""Token ids travel as u32."""

_COUNTER_BITS = 31
_NONCE_BITS = 32
EPOCH_COUNTER_MAX = (1 << _COUNTER_BITS) - 1


@lru_cache(maxsize=4_096, typed=True)  # one for each layout and salt in use, asked for with every prompt
def namespace_digest(**parts: str | int) -> bytes:
    """Return the digest of a namespace: model digest, dtype, layout, block size, rank slice, LoRA, cache salt…

    Key order does not matter; each key and value is length-framed, so that no two different sets of parts collide.
    """
    digest = hashlib.blake2b(digest_size=NAME_LENGTH_BYTES, person=b"kvbus-space")
    for key in sorted(parts):
        value = parts[key]
        for piece in (key, type(value).__name__, str(value)):
            raw = piece.encode()
            digest.update(len(raw).to_bytes(4, "little"))
            digest.update(raw)
    return digest.digest()


def page_names(namespace: bytes, token_ids: Sequence[int], block_tokens: int) -> tuple[bytes, ...]:
    """Return one name per whole block of the prompt; a partial last block has no name, since it may still grow.

    Raises ValueError where a token id is outside 0…2**32-1 or block_tokens is not positive.
    """
    if block_tokens <= 0:
        raise ValueError(f"block_tokens must be positive, got {block_tokens}")
    try:
        packed = token_bytes(token_ids)
    except OverflowError as error:
        raise ValueError(f"token ids must lie in 0…{TOKEN_ID_MAX}") from error
    stride = 4 * block_tokens
    names: list[bytes] = []
    parent = namespace
    for offset in range(0, len(packed) - stride + 1, stride):
        block = parent + packed[offset : offset + stride]
        parent = hashlib.blake2b(block, digest_size=NAME_LENGTH_BYTES, person=b"kvbus-page").digest()
        names.append(parent)
    return tuple(names)


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Return the ids as little-endian u32 bytes; OverflowError where one does not fit."""
    packed = array("I", token_ids)
    if packed.itemsize != 4:  # pragma: no cover - no supported platform has another size
        raise OverflowError("this platform's unsigned int is not four bytes")
    return _little_endian(packed)


def tokens_from_bytes(packed: bytes) -> tuple[int, ...]:
    """Return the token ids that little-endian u32 bytes hold; ValueError unless the length is a multiple of four."""
    if len(packed) % 4:
        raise ValueError(f"token bytes must be a multiple of 4 long, got {len(packed)}")
    values = array("I")
    values.frombytes(packed)
    return tuple(values if not _big_endian() else _swapped(values))


def names_from_bytes(packed: bytes) -> tuple[bytes, ...]:
    """Return the page names that stand one behind the other; of a length that names cannot have, the last is short."""
    return tuple(packed[at : at + NAME_LENGTH_BYTES] for at in range(0, len(packed), NAME_LENGTH_BYTES))


def request_hash(*, model: str, salt: str, source: str, prompt: bytes) -> str:
    """Return the hash that identifies a transfer request before anybody tokenized it (32 hex characters).

    It covers the model, the cache salt and the source beside the canonical prompt bytes: the same words for another
    model or from another source are another request.
    """
    pieces = (model.encode(), salt.encode(), source.encode(), prompt)
    covered = b"".join([part for piece in pieces for part in (len(piece).to_bytes(8, "little"), piece)])
    return hashlib.blake2b(covered, digest_size=16, person=b"kvbus-request").hexdigest()


def epoch_from(counter: int, nonce: int) -> int:
    """Return an epoch: a counter that grows at each start ‖ a random nonce, compared for equality only (P16).

    The nonce keeps two epochs apart even where the store that counts was rolled back. The result fits 63 bits.
    """
    if not 0 < counter < 1 << _COUNTER_BITS:
        raise ValueError(f"epoch counter must lie in 1…{(1 << _COUNTER_BITS) - 1}, got {counter}")
    if not 0 <= nonce < 1 << _NONCE_BITS:
        raise ValueError(f"epoch nonce must fit {_NONCE_BITS} bits, got {nonce}")
    return counter << _NONCE_BITS | nonce


def epoch_counter(epoch: int) -> int:
    """Return the counter part of an epoch, for people and for compare-and-set; never an order between two epochs."""
    return epoch >> _NONCE_BITS


def epoch_text(epoch: int) -> str:
    """Return an epoch as people see it: counter, dash, four hex digits of the nonce."""
    return f"{epoch_counter(epoch)}-{epoch & 0xFFFF:04x}"


def _big_endian() -> bool:
    return sys.byteorder == "big"


def _swapped(values: "array[int]") -> "array[int]":
    copy = array(values.typecode, values)
    copy.byteswap()
    return copy


def _little_endian(values: "array[int]") -> bytes:
    return (_swapped(values) if _big_endian() else values).tobytes()
