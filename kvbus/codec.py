"""msgpack both ways; the only file that imports it, so that its settings stand once.

Everything that crosses a process boundary as a message (bus events, grants, frames to an engine) is one msgpack map.
Decoding is bounded and strict: no extension types, string keys only, and any malformed input is a PeerError.
"""

from collections import defaultdict
from collections.abc import Callable

import msgpack

from kvbus.errors import PeerError

# 1 MiB is the broker's default max_payload; nothing larger can arrive over the bus, and local frames keep to it too.
MESSAGE_LENGTH_MAX_BYTES = 1 << 20

_STRINGS = frozenset({str})
_FOREIGN = frozenset({msgpack.Timestamp})

Plain = Callable[[object], object]
"""A function of a module, since packers are kept for each."""

_SHORT_MAP, _SHORT_MAP_MAX = 0x80, 15
"""A map of so few pairs begins with one byte: this, and how many they are."""

_FREE: defaultdict[Plain | None, list[msgpack.Packer]] = defaultdict(list)
"""Packers that nobody uses now. Each has a buffer of 256 KiB, which grows to its longest message, and packs one at a
time."""
_FREE_MAX = 4
"""Of one kind: a message within another, in two threads; more that packed at once are let go."""


def pack(document: dict[str, object], plain: Plain | None = None) -> bytes:
    """Return the msgpack bytes of one map; `plain` says what stands for a value that msgpack does not know."""
    free = _FREE[plain]
    try:
        packer = free.pop()
    except IndexError:
        packer = msgpack.Packer(default=plain, use_bin_type=True)
    packed: bytes = packer.pack(document)
    if len(free) < _FREE_MAX:  # where it has raised, it is not used again
        free.append(packer)
    return packed


def packer(plain: Plain | None = None) -> Callable[[object], bytes]:
    """Return what packs as `pack` does, with a buffer of its own: for whoever packs much, and in one thread."""
    packs: Callable[[object], bytes] = msgpack.Packer(default=plain, use_bin_type=True).pack
    return packs


def begun_map(document: dict[str, object], more: int) -> bytes:
    """Return how the bytes of a map begin that holds these pairs, and then `more`; fewer than 16 in all.

    The others follow as a packed map of their own, without its first byte, which only counts them.
    """
    pairs = len(document) + more
    if pairs > _SHORT_MAP_MAX:
        raise ValueError(f"a short map holds at most {_SHORT_MAP_MAX} pairs, got {pairs}")
    return bytes((_SHORT_MAP | pairs,)) + pack(document)[1:]


def unpack(data: bytes | memoryview, *, length_max_bytes: int = MESSAGE_LENGTH_MAX_BYTES) -> dict[str, object]:
    """Return the map that the bytes hold; PeerError if they are too long, malformed, or not a map with string keys."""
    document = unpack_any(data, length_max_bytes=length_max_bytes)
    if not isinstance(document, dict):
        raise PeerError("message must be a msgpack map", got=type(document).__name__)
    return document


def unpack_any(data: bytes | memoryview, *, length_max_bytes: int = MESSAGE_LENGTH_MAX_BYTES) -> object:
    """Return what the bytes hold, for formats of others that are no map; else as strict as `unpack`."""
    if len(data) > length_max_bytes:
        raise PeerError("message is too long", length_bytes=len(data), length_max_bytes=length_max_bytes)
    try:
        document: object = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            object_hook=_plain_map,
            list_hook=_plain_list,
        )
    except PeerError:
        raise
    except (ValueError, TypeError, RecursionError) as error:  # msgpack's own errors all derive from ValueError
        raise PeerError("message is not valid msgpack", reason=str(error)[:200]) from error
    return document


def _plain_map(values: dict[object, object]) -> dict[object, object]:
    if not _STRINGS.issuperset(map(type, values)):  # of each message, so without a turn of Python for each key
        got = next(key for key in values if not isinstance(key, str))
        raise PeerError("message keys must be strings", got=type(got).__name__)
    if not _FOREIGN.isdisjoint(map(type, values.values())):
        raise _timestamp_refused()
    return values


def _plain_list(values: list[object]) -> list[object]:
    if not _FOREIGN.isdisjoint(map(type, values)):
        raise _timestamp_refused()
    return values


def _timestamp_refused() -> PeerError:
    # msgpack makes its one predefined extension into an object without asking the hook for extensions.
    return PeerError("message holds a msgpack timestamp, expected plain values")


def _refuse_extension(code: int, data: bytes) -> object:
    raise PeerError("message holds a msgpack extension, expected plain values", code=code, length_bytes=len(data))
