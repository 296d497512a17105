"""Prefixes on the wire: what stands for a prompt's first blocks without any of its tokens.

A page name covers its block and all blocks before it, so the last one names a prefix whole. Only whoever holds the
prefix knows the names before it; an instance that is to take it asks there.
"""

from typing import Annotated

from pydantic import Field

from kvbus.parts import Body, Count, Part, PrefixName, Text

PREFIXES_MAX = 256
"""Prefixes that one answer names; some 15 KB."""
NAMES_LENGTH_MAX_BYTES = 512 << 10
"""Of one prefix: 32,768 blocks, a million tokens."""


class PrefixRow(Part):
    """A prefix that is held: its last page's name, its blocks, and how often it was asked for here."""

    name: PrefixName
    blocks: Count
    uses: Count


class PrefixAsked(Body):
    """A destination asks a source for the page names of a prefix, by the last of them."""

    KIND = "prefix_asked"
    name: PrefixName
    fingerprint: Annotated[str, Field(min_length=1, max_length=64)]


class PrefixAnswered(Body):
    """The names, first block first, and the salt that they stand under; a refusal in words where there are none."""

    KIND = "prefix_answered"
    names: Annotated[bytes, Field(max_length=NAMES_LENGTH_MAX_BYTES)] = b""
    salt: Annotated[str, Field(max_length=200)] = ""
    refusal: Text = ""
