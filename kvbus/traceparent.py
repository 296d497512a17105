"""W3C trace context as it travels: one `traceparent`, which a request takes from its caller to both sides.

Whatever does not fit is nobody's trace: it is dropped where it enters, and fails no request.
"""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

LENGTH_MAX = 256
"""A version-00 traceparent has 55 signs; a later version may append fields, of which nothing is kept."""

_PATTERN = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_UNKNOWN_VERSION = "ff"


def checked_traceparent(value: object) -> str | None:
    """Return a traceparent in the words of version 00; None for what is none."""
    if not isinstance(value, str) or len(value) > LENGTH_MAX:
        return None
    found = _PATTERN.fullmatch(value.strip())
    if found is None:
        return None
    version, trace, parent, flags, more = found.groups()
    if version == _UNKNOWN_VERSION or (version == "00" and more is not None):
        return None
    if not trace.strip("0") or not parent.strip("0"):
        return None
    return f"00-{trace}-{parent}-{flags}"


TraceParent = Annotated[
    Annotated[str, Field(pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")] | None,
    BeforeValidator(checked_traceparent),
]
"""A field for it; absent where nobody traces. What does not fit is taken as absent."""
