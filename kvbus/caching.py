"""Questions about a member's cache, on the wire: what is held, and what shall be kept, let go or forgotten.

Each member answers for its own pages, so an instance is asked member by member.
"""

from typing import Annotated, Literal

from pydantic import Field

from kvbus.parts import Body, Count, Part, Prompt, Seconds, Text
from kvbus.prefixes import PREFIXES_MAX, PrefixRow

PINS_MAX = 256
"""Pins of one member; they are for system prompts and the like, and an answer names them all in some 30 KB."""

PinName = Annotated[str, Field(min_length=1, max_length=64)]
Salt = Annotated[str, Field(max_length=200)]


class PinRow(Part):
    """One prompt that is kept from eviction, by the name that whoever asked for it gave, and its blocks."""

    pin: PinName
    blocks: Count
    held_s: Seconds


class CacheAsked(Body):
    """What is in the cache; with a prompt, how much of that is. `prefixes`: at most so many of the hottest, by name."""

    KIND = "cache_asked"
    prompt: Prompt | None = None
    salt: Salt = ""
    prefixes: Annotated[int, Field(ge=0, le=PREFIXES_MAX)] | None = None


class CacheAnswered(Body):
    """The pages of one member by state, its pins, and how many whole blocks of the prompt it holds."""

    KIND = "cache_answered"
    pages: Count
    pages_free: Count
    pages_cached: Count
    pages_lent: Count
    pages_quarantined: Count
    pins: tuple[PinRow, ...] = Field(default=(), strict=False)
    blocks_wanted: Count = 0
    blocks_held: Count = 0
    refusal: Text = ""
    prefixes: Annotated[tuple[PrefixRow, ...], Field(strict=False, max_length=PREFIXES_MAX)] | None = None


class CacheChangeAsked(Body):
    """Keep a prompt's blocks, let a pin go, drop a prompt's blocks that nobody holds, or forget all names at once.

    `forget` is for when the same names will stand for other content, as after a change of the model's weights.
    """

    KIND = "cache_change_asked"
    action: Literal["pin", "unpin", "evict", "forget"]
    pin: Annotated[str, Field(max_length=64)] = ""
    prompt: Prompt | None = None
    salt: Salt = ""


class CacheChanged(Body):
    """How many blocks were kept, let go, dropped or forgotten; a refusal in words, and then nothing has changed.

    `pin_is_new` tells whether no pin of that name was there before; a member of an earlier version does not say.
    """

    KIND = "cache_changed"
    blocks: Count = 0
    refusal: Text = ""
    pin_is_new: bool | None = None


class NamesForgotten(Body):
    """All names were forgotten: what was brought before this may be brought again."""

    KIND = "names_forgotten"
    names: Count
