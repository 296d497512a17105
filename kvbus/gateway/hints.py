"""A hint with a request: which instance has its prompt's KV. What that one has is brought first; else it is computed.

A hint is never a reason to fail: a source that may not be named, is away, is busy or has nothing, and a transfer that
takes too long, cost the wait and nothing more. How much came is told by the answer's `cached_tokens`.
"""

import asyncio
import logging
from dataclasses import dataclass

from kvbus.gateway.answers import Problem
from kvbus.gateway.asked import Asked, Given
from kvbus.gateway.transfers import Transfers
from kvbus.names import tokens_from_bytes
from kvbus.parts import Prompt

BUDGET_S = 5.0
"""Where a hint names none: a prompt whose pages take longer than this to come was nearly always computed sooner."""
BUDGET_MAX_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hint:
    """Where pages may be, and how long to wait for them."""

    source: str
    budget_s: float = BUDGET_S


async def follow(hint: Hint, transfers: Transfers, instance: str, prompt: Prompt, salt: str) -> None:
    """Bring what the source has of a prompt, at most for the hint's budget; nothing comes of it where that fails."""
    asked = Asked(
        hint.source, _given(prompt), destination=instance, salt=salt, on_miss="partial", budget_s=hint.budget_s
    )
    try:
        async with asyncio.timeout(hint.budget_s):
            answered = await transfers.ask(asked, instance)
            if answered.status != "skipped_busy":
                await transfers.until_ended(transfers.find(answered.request_hash, instance), hint.budget_s)
    except TimeoutError:
        log.info("a hint's pages did not come to %s within %g s", instance, hint.budget_s)
    except Problem as problem:
        log.info("a hint brought nothing to %s: %s", instance, problem.text)


def _given(prompt: Prompt) -> Given:
    if prompt.text is not None:
        return prompt.text
    if prompt.tokens is not None:
        return list(tokens_from_bytes(prompt.tokens))
    return [{"role": turn.role, "content": turn.content} for turn in prompt.messages or ()]
