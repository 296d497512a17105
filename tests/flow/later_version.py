"""`kvbus` as a later minor version would run: everything that it says has fields that this version does not know."""

from collections.abc import Callable

from kvbus import codec

_pack = codec.pack


def pack(document: dict[str, object], plain: Callable[[object], object] | None = None) -> bytes:
    """Pack an event with one more field in its envelope, and one more in its body; all else as it is."""
    body = document.get("b")
    if isinstance(body, dict):
        document = {**document, "b": {**body, "from_a_later_version": {"since": "1.1"}}, "w": 11}
    return _pack(document, plain)


codec.pack = pack  # before anything else has taken it

if __name__ == "__main__":
    from kvbus.cli import main

    main()
