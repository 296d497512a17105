"""What an engine's own prefix cache holds, on the wire: for routers, which send a prompt where its prefix is.

Token ids never travel here. A block goes by the engine's own hash of it, and by a name that a router can compute from
a prompt's token ids (`prompt_names`) without knowing how the engine hashes.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvbus.names import NAME_LENGTH_BYTES, namespace_digest, page_names
from kvbus.parts import Body, Count, Part, Seconds, Text

BLOCKS_MAX = 2_000
"""Blocks of one change, and of all changes of one message: at 66 bytes each, half of what a message may hold."""

BlockHash = Annotated[bytes, Field(min_length=1, max_length=64)]


class BlockChange(Part):
    """Blocks that were stored or removed, or that the whole cache is empty, or not known any more (`cleared`).

    `names` are as many as `hashes` where blocks are stored; an empty one is a block that a router cannot name, such as
    one with an image or a cache salt in it. `parent` is the hash of the block before the first; empty where a prompt
    begins.
    """

    change: Literal["stored", "removed", "cleared"]
    hashes: tuple[BlockHash, ...] = Field(default=(), strict=False, max_length=BLOCKS_MAX)
    names: tuple[bytes, ...] = Field(default=(), strict=False, max_length=BLOCKS_MAX)
    parent: Annotated[bytes, Field(max_length=64)] = b""
    block_tokens: Count = 0
    medium: Annotated[str, Field(max_length=32)] = ""
    group: Count = 0
    lora: Annotated[str, Field(max_length=200)] = ""
    reason: Text = ""

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        if self.names and len(self.names) != len(self.hashes):
            raise ValueError(f"{len(self.names)} names for {len(self.hashes)} blocks")
        if any(len(name) not in {0, NAME_LENGTH_BYTES} for name in self.names):
            raise ValueError(f"a block's name has {NAME_LENGTH_BYTES} bytes or none")
        return self


class BlocksChanged(Body):
    """What changed in the cache of an engine, in order. A new epoch in the header begins with `cleared`.

    `engine_sequence` is the engine's own number of the batch, for people; gaps show in the header's sequence.
    """

    KIND = "blocks"
    engine_sequence: Count = 0
    rank: Count = 0
    changes: tuple[BlockChange, ...] = Field(strict=False, max_length=BLOCKS_MAX)


class BlocksUnseen(Body):
    """An alarm: the engine's own stream is dead, so nothing that was said of its blocks is known to hold any more."""

    KIND = "blocks_unseen"
    reason: Text
    silent_s: Seconds = 0.0


def prompt_names(tokens: Sequence[int], block_tokens: int, *, model: str = "", lora: str = "") -> tuple[bytes, ...]:
    """Return the names of a prompt's whole blocks, as a bridge that was given the same model says them."""
    return page_names(root_of(model=model, lora=lora), tokens, block_tokens)


def root_of(*, model: str, lora: str) -> bytes:
    """Return what the first block's name is chained to."""
    return namespace_digest(use="blocks", model=model, lora=lora)
