"""What a JSON value is, in JSON's own words: who asks over HTTP need not know Python's."""

_SHOWN_LENGTH_MAX = 40
"""Characters of a caller's own text in an answer."""


def kind_of(value: object) -> str:
    """Return what a value is, with its article where it takes one."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


def shown(value: object) -> str:
    """Return a text or a number as it was given, shortened; of anything else, what it is."""
    if isinstance(value, str):
        return repr(value[:_SHOWN_LENGTH_MAX])
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)[:_SHOWN_LENGTH_MAX]
    return kind_of(value)
