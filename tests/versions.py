"""Messages as another version of the wire would send them."""

from kvbus.codec import pack, unpack

LATER_MAJOR = 2


def later_minor(data: bytes) -> bytes:
    """The same event from a later minor version: a field that nobody here knows in each map that is a model."""
    return pack(_grown(unpack(data)))


def unknown_kind(data: bytes) -> bytes:
    """An event of a kind that a later minor version has added, from the same speaker."""
    return pack({**unpack(data), "k": "from_the_future", "b": {"anything": [1, {"deep": None}]}})


def later_major(data: bytes) -> bytes:
    """The same event from a later major version, which may mean anything by it."""
    return pack({**unpack(data), "v": LATER_MAJOR})


def _grown(fields: dict[str, object]) -> dict[str, object]:
    # The counters of a `stats` event are named freely: any more of them would be known ones.
    grown = {name: value if name == "counters" else _any(value) for name, value in fields.items()}
    return {**grown, "added_later": [b"\x00", {"deep": [None, 1.5]}]}


def _any(value: object) -> object:
    if isinstance(value, dict):
        return _grown(value)
    return [_any(item) for item in value] if isinstance(value, list) else value
