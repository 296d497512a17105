"""Columns of unsigned integers as little-endian bytes: a thousand facts then cost microseconds to decode."""

import sys
from array import array
from collections.abc import Iterable
from typing import Literal

from kvbus.errors import PeerError

_CODES = {2: "H", 4: "I", 8: "Q"}


def column(values: Iterable[int], width_bytes: Literal[2, 4, 8]) -> bytes:
    """Return unsigned integers as a little-endian column; OverflowError where one does not fit."""
    packed = array(_CODES[width_bytes], values)
    if sys.byteorder == "big":  # pragma: no cover - no big-endian machine runs the tests
        packed.byteswap()
    return packed.tobytes()


def from_column(data: bytes, width_bytes: Literal[2, 4, 8]) -> tuple[int, ...]:
    """Return the integers of a little-endian column; PeerError where its length is no multiple of the width."""
    if len(data) % width_bytes:
        raise PeerError("column length is not a multiple of its width", length_bytes=len(data), width_bytes=width_bytes)
    packed = array(_CODES[width_bytes])
    packed.frombytes(data)
    if sys.byteorder == "big":  # pragma: no cover - no big-endian machine runs the tests
        packed.byteswap()
    return tuple(packed)
