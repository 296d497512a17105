"""An engine in its own process takes no page whose bytes are not those of its digest: it computes them."""

import dataclasses
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.engines.client import LocalClient, TimedAnswer
from kvbus.pool.digests import DigestMode, digest_of
from kvbus.pool.memory import PoolMemory
from tests.unit.engine_parts import PROMPT, TOY, Worker, worker_with

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = int(str(TOY["block_tokens"]))
WHOLE = len(PROMPT) // BLOCK


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker() -> AsyncIterator[Worker]:
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        async with worker_with(Path(folder)) as running:
            await running.start_engine()
            memory_of(running).digests.turn_on(DigestMode.ALWAYS)
            yield running


def memory_of(worker: Worker) -> PoolMemory:
    return worker.desk.pool.memory


def ids_of(name: str) -> tuple[int, ...]:
    """A prompt that no other test has."""
    return tuple(f"{name}: {PROMPT}"[: len(PROMPT)].encode())


async def answer(worker: Worker, ids: tuple[int, ...], *, reuse: bool = True, store: bool = True) -> TimedAnswer:
    def ask(client: LocalClient) -> TimedAnswer:
        return client.generate(ids=ids, max_tokens=6, reuse=reuse, store=store)

    return await worker.ask(ask)


async def stored(worker: Worker, ids: tuple[int, ...]) -> tuple[TimedAnswer, list[int]]:
    """Have a prompt stored, and its digests made; return the answer and the pages."""
    told = await answer(worker, ids)
    assert told.end.stored_blocks == WHOLE
    lender, memory = worker.desk.pool, memory_of(worker)
    pages = lender.pages_held(worker.desk._names(ids, ""))
    counters = memory.generations.counters(pages)
    memory.digests.take_over(pages, counters, [digest_of(memory.page_bytes(page)) for page in pages])
    return told, pages


@pytest.mark.parametrize("block", [0, 5, WHOLE - 1])
async def test_a_page_changed_in_memory_is_a_miss_from_there_on_and_the_answer_is_right(
    worker: Worker, block: int
) -> None:
    # contract 37
    # Planted faults that this catches: no comparison in `match`; the page that differs among those that are used.
    ids = ids_of(f"{block:02} changed")
    told, pages = await stored(worker, ids)
    memory_of(worker).page_bytes(pages[block])[100] ^= 0x40
    quarantined = worker.desk.pool.statistics().pages.quarantined

    again = await answer(worker, ids)

    assert again.end.tokens == told.end.tokens
    assert again.end.cached_tokens == block * BLOCK
    assert worker.desk.pool.statistics().pages.quarantined == quarantined + 1
    third = await answer(worker, ids)
    assert third.end.tokens == told.end.tokens
    assert third.end.cached_tokens == WHOLE * BLOCK, "what was computed anew is stored in another page"
    assert pages[block] not in worker.desk.pool.pages_held(worker.desk._names(ids, ""))


async def test_whole_pages_are_used_as_without_digests(worker: Worker) -> None:
    ids = ids_of("whole")
    told, _ = await stored(worker, ids)
    again = await answer(worker, ids)
    assert (again.end.tokens, again.end.cached_tokens) == (told.end.tokens, WHOLE * BLOCK)


async def test_pages_without_digests_are_taken_as_they_are(worker: Worker) -> None:
    ids = ids_of("unknown")
    told = await answer(worker, ids)
    page = worker.desk.pool.pages_held(worker.desk._names(ids, ""))[3]
    memory_of(worker).page_bytes(page)[100] ^= 0x40
    again = await answer(worker, ids)
    assert again.end.cached_tokens == WHOLE * BLOCK
    assert again.end.tokens != told.end.tokens
    assert await worker.ask(lambda client: client.evict(ids)) == WHOLE


async def test_a_prefill_computes_what_was_changed_before_it_is_lent(worker: Worker) -> None:
    ids = ids_of("prefill")
    _, pages = await stored(worker, ids)
    whole = [bytes(memory_of(worker).page_bytes(page)) for page in pages]
    memory_of(worker).page_bytes(pages[2])[0] ^= 1

    prefilled = await worker.port.prefill(ids, "")

    assert prefilled.blocks == WHOLE  # type: ignore[union-attr] # a refusal has none
    worker.desk.release(prefilled.handle)  # type: ignore[union-attr]
    held = worker.desk.pool.pages_held(worker.desk._names(ids, ""))
    assert [bytes(memory_of(worker).page_bytes(page)) for page in held] == whole


async def test_a_match_with_other_digests_than_pages_fails_that_request_alone(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of("forged")
    told, _ = await stored(worker, ids)
    match = worker.desk.match
    monkeypatch.setattr(
        worker.desk,
        "match",
        lambda ids, salt: dataclasses.replace(found := match(ids, salt), digests=found.digests[:-1]),
    )
    with pytest.raises(Exception, match="other digests than pages"):
        await answer(worker, ids)
    monkeypatch.undo()
    assert (await answer(worker, ids)).end.tokens == told.end.tokens
