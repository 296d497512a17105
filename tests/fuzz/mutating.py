"""Makes inputs out of real ones: bytes flipped, cut and spliced, documents with leaves, keys and shapes changed."""

import random
from collections.abc import Callable, Iterator

from kvbus.codec import pack, unpack
from kvbus.errors import PeerError

LENGTH_MAX = 4_096
"""Of an input that is grown: enough for every field's bound but the longest texts, which have golden inputs."""
ODD: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1.5, 1e308, 1e400,
    float("nan"), float("inf"), float("-inf"), "", "a", "\x00", "é" * 40, "x" * 65, "x" * 2_001, "\ud800", "=41", "..",
    "*", ">", "kv.facts.a", b"", b"\x00", b"\xff" * 16, b"x" * 33, [], {}, [[]], [{}], {"": 0}, [[], {}, None, 1, "a"],
    [["a", "m0", []]], [["a", "m0", "x"]], [["a", "m0", float("inf")]], "1" * 5_000, 10**400,
)  # fmt: skip
"""Values of every plain kind, at and beyond the edges that decoders have."""
HEADS = b"\xc0\xc1\xc4\xc6\xc7\xc9\xca\xcb\xcf\xd3\xd4\xd8\xd9\xdb\xdc\xdd\xde\xdf\x80\x8f\x90\x9f\xa0\xbf\xff"
"""First bytes of msgpack's kinds, those that announce lengths among them."""

Mutate = Callable[[bytes, random.Random], bytes]


def inputs(seeds: tuple[bytes, ...], rng: random.Random) -> Iterator[bytes]:
    """Yield inputs without end: mostly changed real ones, of each seed in turn, and some that are noise."""
    ways: tuple[Mutate, ...] = (changed_tree, changed_tree, changed_tree, changed_bytes, changed_bytes, noise)
    while True:
        for seed in seeds or (b"",):
            data = seed
            for _ in range(rng.choice((1, 1, 1, 2, 4))):
                data = rng.choice(ways)(data, rng)
            yield data


def noise(_: bytes, rng: random.Random) -> bytes:
    """Return bytes that have nothing to do with a real input."""
    return rng.randbytes(rng.choice((0, 1, 2, 3, 8, 24, 32, 33, 64, 200)))


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with one change in them."""
    out = bytearray(data)
    place = rng.randrange(len(out) + 1)
    match rng.randrange(7):
        case 0 if out:
            out[place % len(out)] ^= 1 << rng.randrange(8)
        case 1 if out:
            out[place % len(out)] = rng.choice(HEADS)
        case 2:
            del out[place : place + rng.choice((1, 1, 4, len(out)))]
        case 3:
            out[place:place] = rng.randbytes(rng.choice((1, 2, 4, 8)))
        case 4:
            out[place:place] = out[: LENGTH_MAX - min(LENGTH_MAX, len(out))]
        case 5:
            out[place:place] = bytes((rng.choice(HEADS),)) * rng.choice((1, 4, 64, 1_100))
        case _:
            out = out[:place]
    return bytes(out)


def changed_tree(data: bytes, rng: random.Random) -> bytes:
    """Return a document of the same kind with one value, key or shape changed; changed bytes where there is none."""
    try:
        document = unpack(data)
    except PeerError:
        return changed_bytes(data, rng)
    return packed(_changed(document, rng), data)


def packed(document: object, otherwise: bytes) -> bytes:
    """Return a document's bytes; those of the input that it came from where msgpack cannot say it."""
    try:
        return pack(document)  # type: ignore[arg-type] # a decoder has to take what is no map, too
    except (ValueError, TypeError, OverflowError, RecursionError):
        return otherwise


def _changed(value: object, rng: random.Random) -> object:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        out = dict(value)
        key = rng.choice(list(out))
        match rng.randrange(8):
            case 0:
                del out[key]
            case 1:
                out[rng.choice(("z", "b", "v", "k", "", "x" * 70))] = rng.choice(ODD)
            case 2:
                out[rng.choice(list(out))] = out[key]
            case _:
                out[key] = _changed(out[key], rng)
        return out
    if isinstance(value, list) and value and rng.random() < 0.8:
        items = list(value)
        place = rng.randrange(len(items))
        match rng.randrange(5):
            case 0:
                del items[place]
            case 1:
                items.insert(place, rng.choice(ODD))
            case 2:
                items += items
            case _:
                items[place] = _changed(items[place], rng)
        return items
    return _near(value, rng) if rng.random() < 0.5 else rng.choice(ODD)


def _near(value: object, rng: random.Random) -> object:
    """Return a value of the same kind, one step away or at the edge."""
    match value:
        case bool():
            return not value
        case int():
            return rng.choice((value + 1, value - 1, -value, value << 1, value << 40))
        case float():
            return rng.choice((-value, value * 1e9, int(value) if abs(value) < 1e9 else 0))
        case str():
            return rng.choice((value + "x", value[:-1], value * 40, value.upper(), value.encode()))
        case bytes():
            return rng.choice((value + b"x", value[:-1], value * 3, bytes(reversed(value)), value.hex()))
        case _:
            return rng.choice(ODD)
