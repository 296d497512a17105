"""Content: what a request's prompt comes to in page names, by the local engine where it is text or messages.

A prefix is known by name only, and only to whoever holds it: its names come from the source, which lends by them. They
are what the source's pages are called there, under a layout that both sides have, so they are their names here too.
"""

import asyncio
from typing import NamedTuple, Protocol, Self

from kvbus.engines.desk import Refusal
from kvbus.errors import KvbusError
from kvbus.events import PrefixAnswered, PrefixAsked, TransferRequested
from kvbus.ledger.facts import FailureClass
from kvbus.ledger.types import LeaseFailure
from kvbus.names import NAME_LENGTH_BYTES, names_from_bytes, tokens_from_bytes
from kvbus.parts import Prompt
from kvbus.prefixes import NAMES_LENGTH_MAX_BYTES
from kvbus.roles.poolside import PoolSide
from kvbus.roles.registry import Registered


class Tokenizer(Protocol):
    """The local engine, as far as a destination needs it."""

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...] | Refusal:
        """Return a prompt's token ids, or why it has none."""


class Namer(Protocol):
    """Who asks a source for the names of a prefix."""

    async def names_of(self, asked: PrefixAsked, source: Registered, *, wait_s: float) -> PrefixAnswered | str:
        """Return the source's answer, or why there is none."""


class Content(NamedTuple):
    """The names of a prompt's whole blocks, the salt that they stand under, and its length.

    `token_ids` are empty where only the names are known: then nobody can compute what is missing.
    """

    names: tuple[bytes, ...]
    salt: str
    tokens: int
    token_ids: tuple[int, ...] = ()

    @classmethod
    def of_tokens(cls, pool: PoolSide, token_ids: tuple[int, ...], salt: str) -> Self:
        """Return the content that these token ids are in a pool's namespace."""
        return cls(pool.names(token_ids, salt), salt, len(token_ids), token_ids)


class Side(Protocol):
    """Who takes pages, as far as their names depend on it."""

    @property
    def instance(self) -> str:
        """Its name."""

    @property
    def pool(self) -> PoolSide:
        """Where they go."""

    @property
    def asker(self) -> Namer:
        """Who asks sources."""

    @property
    def group(self) -> object:
        """The other members of its instance; None where it has no other."""


async def content_of(
    request: TransferRequested, side: Side, tokenizer: Tokenizer, source: Registered, *, wait_s: float
) -> Content | LeaseFailure:
    """Return what a request's prompt comes to, or why it cannot be taken here."""
    if request.prompt.prefix is not None:
        if side.group is not None:  # each rank's pages have names of their own, and the request has one
            text = f"{side.instance} has several members, and a prefix is known by the name of one rank's page"
            return LeaseFailure(FailureClass.BAD_REQUEST, text)
        return await prefix_of(request.prompt.prefix, side.asker, source, side.pool, wait_s=wait_s)
    token_ids = await token_ids_of(request.prompt, tokenizer, wait_s=wait_s)
    if isinstance(token_ids, LeaseFailure):
        return token_ids
    if reason := side.pool.unfit(token_ids, side.instance):
        return LeaseFailure(FailureClass.BAD_REQUEST, reason)
    return Content.of_tokens(side.pool, token_ids, request.salt)


async def token_ids_of(prompt: Prompt, tokenizer: Tokenizer, *, wait_s: float) -> tuple[int, ...] | LeaseFailure:
    """Return a prompt's token ids, or why there are none within the wait."""
    if prompt.tokens is not None:
        return tokens_from_bytes(prompt.tokens)
    try:
        async with asyncio.timeout(wait_s):
            ids = await tokenizer.tokenize(prompt)
    except TimeoutError:
        return LeaseFailure(FailureClass.DEADLINE, "the engine did not tokenize the prompt within the budget")
    except KvbusError as error:  # the engine went away
        return LeaseFailure(FailureClass.ENGINE_LOST, str(error))
    return LeaseFailure(FailureClass.BAD_REQUEST, ids.text) if isinstance(ids, Refusal) else ids


async def prefix_of(
    name: bytes, namer: Namer, source: Registered, pool: PoolSide, *, wait_s: float
) -> Content | LeaseFailure:
    """Return the names of a prefix, as its source tells them, or why it has none that could be taken here."""
    asked = PrefixAsked(name=name, fingerprint=pool.layout.fingerprint())
    answer = await namer.names_of(asked, source, wait_s=wait_s)
    if isinstance(answer, str):
        return LeaseFailure(FailureClass.PEER_LOST, answer)
    if answer.refusal:
        return LeaseFailure(FailureClass.SOURCE_MISSES, answer.refusal)
    names = names_from_bytes(answer.names)
    if not names or names[-1] != name or len(names[-1]) != NAME_LENGTH_BYTES or len(set(names)) != len(names):
        return LeaseFailure(FailureClass.GRANT_REFUSED, f"{source.instance} named other pages than the prefix's")
    if len(names) > pool.lent_cap_pages:
        text = f"the prefix needs {len(names)} pages, at most {pool.lent_cap_pages} are taken for peers"
        return LeaseFailure(FailureClass.BAD_REQUEST, text)
    return Content(names, answer.salt, len(names) * pool.layout.block_tokens)


def names_answered(pool: PoolSide, asked: object, instance: str) -> PrefixAnswered | None:
    """Return, for a destination, the names of a prefix whose beginning is held here; None to any other question."""
    if not isinstance(asked, PrefixAsked):
        return None
    mine = pool.layout.fingerprint()
    if asked.fingerprint != mine:
        return PrefixAnswered(
            refusal=f"layout fingerprints differ: {instance} has {mine}, you have {asked.fingerprint}"
        )
    prefix = pool.prompts.find(asked.name)
    if prefix is None or not pool.lender.pages_held(prefix.names):
        return PrefixAnswered(refusal=f"{instance} holds no prefix of this name any more")
    names = b"".join(prefix.names)
    if len(names) > NAMES_LENGTH_MAX_BYTES:
        most = NAMES_LENGTH_MAX_BYTES // NAME_LENGTH_BYTES
        return PrefixAnswered(refusal=f"the prefix has {len(prefix.names)} blocks, and an answer names at most {most}")
    return PrefixAnswered(names=names, salt=prefix.salt)
