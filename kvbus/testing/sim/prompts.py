"""Prompts of the simulation: documents that share their beginnings, as token ids or as text."""

from functools import lru_cache

from kvbus.names import token_bytes
from kvbus.parts import Prompt

TOKEN_MAX = 50_000
_KEPT_MAX = 4_096
"""Prompts that are kept: some 40 documents, each in 30 lengths, as tokens and as text."""


def text_of(document: int, tokens: int) -> str:
    """Return the words for so many tokens of a document."""
    return f"{document}:{tokens}"


@lru_cache(maxsize=_KEPT_MAX)
def tokens_of(text: str) -> tuple[int, ...]:
    """Return the token ids of such words; a document's tokens are the same however many are taken."""
    document, _, count = text.partition(":")
    first = int(document) * 7_919
    return tuple([(first + at * (31 + at)) % TOKEN_MAX for at in range(int(count))])


@lru_cache(maxsize=_KEPT_MAX)
def prompt_of(document: int, tokens: int, *, as_text: bool) -> Prompt:
    """Return a prompt as a requester sends it."""
    text = text_of(document, tokens)
    if as_text:
        return Prompt(text=text)
    return Prompt(tokens=token_bytes(tokens_of(text)))
