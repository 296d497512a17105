"""Changing a page behind everybody's back, to see that it is noticed: for demos and tests, on one's own processes."""

import os

import numpy as np

from kvbus.engines.desk import Where
from kvbus.errors import BackendError

TOP_EXPONENT_BIT = np.uint32(1 << 30)
SIGN_BIT = np.uint32(1 << 31)


def flip_top_exponent_bits(where: Where, page: int) -> None:
    """Flip the top exponent bit of every float32 in the second half of a page: the values of its upper layers.

    A random low byte often changes nothing that a person would see; this turns ordinary values into enormous ones. For
    pages of plain bytes it is one flipped bit in every fourth byte. BackendError where the pool cannot be opened.
    """
    _flip(where, page, TOP_EXPONENT_BIT)


def flip_sign_bits(where: Where, page: int) -> None:
    """Flip the signs of the second half of a page: other values, but none that is infinite or no number.

    For an engine that goes on: what it computes of enormous values is no number, and an engine that multiplies what
    lies behind a sequence's end by zero takes that for another prompt's. BackendError as above.
    """
    _flip(where, page, SIGN_BIT)


def _flip(where: Where, page: int, mask: np.uint32) -> None:
    path = f"/proc/{where.pid}/fd/{where.fd}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise BackendError(f"the pool at {path} cannot be opened for writing: {error}") from error
    try:
        offset = where.offset + page * where.stride
        words = np.frombuffer(os.pread(descriptor, where.page_bytes, offset), dtype=np.uint32).copy()
        words[len(words) // 2 :] ^= mask
        os.pwrite(descriptor, words.tobytes(), offset)
    finally:
        os.close(descriptor)
