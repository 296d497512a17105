"""A real causal language model, tiny, through whole workers: prefill on one instance, answer on the other."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.commands.poison import flip_top_exponent_bits
from tests.flow.town import BLOCK, Town, town
from tests.tiny_llama import make_tiny_llama

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

SENTENCE = "The keeper of the lock wrote the level of the water into the book, and lit the lamp. "


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[Town]:
    with tempfile.TemporaryDirectory(prefix="kvflow-") as name:
        folder = make_tiny_llama(Path(name) / "tiny")
        options = {"folder": str(folder)}
        async with town(Path(name)) as running:
            await asyncio.gather(
                running.start("a", engine="transformers", options=options),
                running.start("b", engine="transformers", options=options, allow=["a"]),
            )
            yield running


async def test_a_chat_is_tokenized_by_the_destination_and_answered_from_the_sources_pages(pair: Town) -> None:
    text = SENTENCE * 12
    with pair.workers["b"].client() as client:
        ids = client.tokenize(text=text)
    blocks = len(ids) // BLOCK
    assert blocks >= 5
    cold = await pair.cold("b", ids)

    outcome = await pair.stage(text)

    assert (outcome.outcome, outcome.pages_moved, outcome.prompt_tokens) == ("settled", blocks, len(ids))
    staged = await pair.answer("b", ids)
    assert staged.end.tokens == cold
    assert staged.end.cached_tokens >= (blocks - 1) * BLOCK
    await pair.at_rest()


async def test_a_changed_page_changes_what_the_model_says_and_eviction_makes_it_right_again(pair: Town) -> None:
    with pair.workers["b"].client() as client:
        ids = client.tokenize(text=SENTENCE * 9)
    cold = await pair.cold("b", ids)
    assert (await pair.stage(ids)).outcome == "settled"
    with pair.workers["b"].client() as client:
        where = client.where(ids)
        flip_top_exponent_bits(where, where.pages[1])
        assert client.generate(ids=ids, max_tokens=len(cold), store=False).end.tokens != cold
        assert client.evict(ids) == len(where.pages)
    assert await pair.cold("b", ids) == cold


async def test_a_prefix_that_is_here_already_is_not_moved_again(pair: Town) -> None:
    with pair.workers["b"].client() as client:
        long = client.tokenize(
            text="On another day. " + SENTENCE * 10 + "Then the rain began, and nobody came until the morning. " * 6
        )
        short = long[: 4 * BLOCK]
    assert (await pair.stage(short)).outcome == "settled"
    outcome = await pair.stage(long)
    assert outcome.outcome == "settled"
    assert outcome.pages_held == 4
    assert outcome.pages_moved == len(long) // BLOCK - 4
    await pair.at_rest()


async def test_an_id_outside_the_vocabulary_is_refused_with_the_size_of_the_vocabulary(pair: Town) -> None:
    outcome = await pair.stage([1, 2, 3, 512] * 20)
    assert (outcome.outcome, outcome.failure) == ("failed", "bad_request")
    assert "512" in outcome.reason
    await pair.at_rest()
