"""The transformers engine over the same flow as the toy: a real model whose pages are reused, and change the answer."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbus.engines.alone import session_alone
from kvbus.engines.base import Prefilled, Request, Token
from kvbus.engines.client import LocalClient, TimedAnswer
from kvbus.engines.transformers import TransformersEngine
from kvbus.errors import ConfigError
from tests.tiny_llama import MAX_TOKENS, VOCAB_SIZE, make_tiny_llama
from tests.unit.engine_parts import Worker, worker_with

pytest.importorskip("torch")

TEXT = "the page of the prompt is in the cache and the engine reads the page " * 12
START_DEADLINE_S = 90.0
"""Importing torch alone takes seconds; on a busy machine many."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    async with worker_with(tmp_path) as worker:
        yield worker


def answer(client: LocalClient, ids: tuple[int, ...], *, fresh: bool = False) -> TimedAnswer:
    return client.generate(ids=ids, max_tokens=24, store=not fresh, reuse=not fresh)


def flip_exponents(client: LocalClient, ids: tuple[int, ...]) -> None:
    """Flip the top exponent bit of every float of the first page's second half, the values of the last layer."""
    where = client.where(ids)
    with Path(f"/proc/{where.pid}/fd/{where.fd}").open("r+b", buffering=0) as pool:
        at = where.offset + where.pages[0] * where.stride
        page = bytearray(os.pread(pool.fileno(), where.page_bytes, at))
        for top in range(where.page_bytes // 2 + 3, where.page_bytes, 4):
            page[top] ^= 0x40
        os.pwrite(pool.fileno(), page, at)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_real_model_resumes_from_pages_with_the_same_tokens(worker: Worker, folder: Path) -> None:
    await worker.start_engine("transformers", {"folder": str(folder)}, START_DEADLINE_S)
    assert worker.port.engine is not None
    assert (worker.port.engine.vocab_size, worker.port.engine.tokens_max) == (VOCAB_SIZE, MAX_TOKENS)
    ids = await worker.ask(lambda client: client.tokenize(text=TEXT))
    blocks = len(ids) // 32
    assert 4 < blocks < 60

    cold = await worker.ask(lambda client: answer(client, ids, fresh=True))
    stored = await worker.ask(lambda client: answer(client, ids))
    reused = await worker.ask(lambda client: answer(client, ids))
    assert cold.end.tokens == stored.end.tokens == reused.end.tokens
    assert len(set(cold.end.tokens)) > 4
    assert (stored.end.stored_blocks, stored.end.cached_tokens) == (blocks, 0)
    assert (reused.end.stored_blocks, reused.end.cached_tokens) == (0, blocks * 32)

    await worker.ask(lambda client: flip_exponents(client, ids))
    poisoned = await worker.ask(lambda client: answer(client, ids))
    assert poisoned.end.cached_tokens == blocks * 32
    assert poisoned.end.tokens != cold.end.tokens
    assert await worker.ask(lambda client: client.evict(ids)) == blocks

    prefilled = await worker.port.prefill(ids, "")
    assert isinstance(prefilled, Prefilled)
    assert (prefilled.blocks, prefilled.computed_tokens) == (blocks, blocks * 32)
    worker.desk.release(prefilled.handle)
    after = await worker.ask(lambda client: answer(client, ids))
    assert (after.end.tokens, after.end.cached_tokens) == (cold.end.tokens, blocks * 32)

    # R23: the same model without a worker needs none
    alone = session_alone(TransformersEngine.load({"folder": str(folder)}))
    request = Request(ids, max_tokens=24, store=True, reuse=True, salt="")
    assert alone.generate(request, list[Token]().append, lambda: False).tokens == cold.end.tokens

    chat = [{"role": "user", "content": "what is a page"}]
    assert len((await worker.ask(lambda client: client.generate(messages=chat, max_tokens=4))).end.tokens) > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "'folder' is missing"),
        ({"folder": 3}, "'folder' is int"),
        ({"folder": "x", "dtype": "float16"}, "'dtype' is unknown"),
        ({"folder": "x", "threads": 0}, "threads is 0"),
        ({"folder": "/nowhere"}, "does not exist"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TransformersEngine.load(options)
