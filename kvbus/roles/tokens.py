"""Tokens: what a request's prompt is in token ids, by the local engine where it came as text or messages."""

import asyncio
from typing import Protocol

from kvbus.engines.desk import Refusal
from kvbus.errors import KvbusError
from kvbus.ledger.facts import FailureClass
from kvbus.ledger.types import LeaseFailure
from kvbus.names import tokens_from_bytes
from kvbus.parts import Prompt


class Tokenizer(Protocol):
    """The local engine, as far as a destination needs it."""

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...] | Refusal:
        """Return a prompt's token ids, or why it has none."""


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
