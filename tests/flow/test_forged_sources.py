"""A source that lies: whatever part of its grant is wrong, the reader refuses it before it reads one byte."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.events import LendAnswered, StatsAnswered, TransferOutcome, column
from kvbus.grants import Grant, LenderKey, MemoryAccess, PoolGeometry
from kvbus.parts import Body
from kvbus.processes import identity
from tests.flow.fake_source import FAKE, PAGES, FakeSource, fake_source
from tests.flow.town import Town, prompt, town
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKS = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader(folder: Path) -> AsyncIterator[Town]:
    async with town(folder) as running:
        await running.start("b", allow=[FAKE], backend="memory")
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def fake(reader: Town) -> AsyncIterator[FakeSource]:
    async with fake_source(reader) as played:
        await played.register()
        yield played


async def test_the_honest_fake_is_read(reader: Town, fake: FakeSource) -> None:
    ids = prompt("honest fake", BLOCKS)

    outcome = await reader.stage(ids, source=FAKE)

    assert (outcome.outcome, outcome.pages_moved) == ("settled", BLOCKS)
    assert (await reader.answer("b", ids)).end.tokens == await reader.cold("b", ids)
    assert len(fake.released) == 1
    await reader.at_rest()


def pool(**changed: int) -> Callable[[Grant], Grant]:
    return lambda grant: grant.model_copy(update={"pool": grant.pool.model_copy(update=changed)})


def changed(**fields: object) -> Callable[[Grant], Grant]:
    return lambda grant: grant.model_copy(update=fields)


def reader_key(**fields: object) -> Callable[[Grant], Grant]:
    return lambda grant: grant.model_copy(update={"reader": grant.reader.model_copy(update=fields)})


def with_counter(counter: int) -> Callable[[Grant], Grant]:
    def forge(grant: Grant) -> Grant:
        return grant.model_copy(update={"counters": column([counter, *grant.page_counters()[1:]], 8)})

    return forge


def last_page_over_the_end(grant: Grant) -> Grant:
    """The last page starts inside the pool and ends outside it."""
    geometry = grant.pool
    moved = geometry.model_copy(update={"pages_offset": geometry.pages_offset + geometry.page_stride})
    return grant.model_copy(update={"pool": moved})


FORGERIES: dict[str, tuple[Callable[[Grant], Grant], str]] = {
    "another reader": (reader_key(instance="c"), "another reader"),
    "another member": (reader_key(member="m1"), "another reader"),
    "an earlier epoch of the reader": (reader_key(epoch=1), "another reader"),
    "another transfer": (reader_key(transfer="t-0"), "another reader"),
    "another attempt": (reader_key(attempt=2), "another reader"),
    "another lender": (changed(lender_instance="a"), "the grant is from 'a'"),
    "another epoch of the lender": (changed(lender_epoch=7), "another epoch of its lender"),
    "another fingerprint": (changed(fingerprint="f00d"), "layout fingerprint is f00d"),
    "another rank": (changed(rank=1), "for rank 1"),
    "another nonce": (changed(nonce=b"x" * 16), "another nonce"),
    "a page outside the pool": (changed(pages=column([0, 1, 2, PAGES], 4)), "lies outside the pool"),
    "one page twice": (changed(pages=column([0, 1, 2, 0], 4)), "granted twice"),
    "more pages than asked": (
        changed(pages=column(range(5), 4), counters=column([2] * 5, 8)),
        "5 pages granted, 4 asked",
    ),
    "no pages": (changed(pages=b"", counters=b""), "0 pages granted"),
    "a torn column": (changed(pages=b"\x00" * 7), "multiple of its width"),
    "fewer generations than pages": (changed(counters=column([2] * 3, 8)), "4 pages but 3 generations"),
    "an odd generation": (with_counter(3), "not sealed"),
    "a page never written": (with_counter(0), "not sealed"),
    "longer pages": (pool(page_bytes=131072), "pages are 131072 bytes"),
    "overlapping pages": (pool(page_stride=65535), "shorter than a page"),
    "pages over the end": (last_page_over_the_end, "do not fit the pool"),
    "more pages than fit": (pool(page_count=PAGES + 1), "fit"),
    "a table among the pages": (pool(generations_offset=1 << 20), "overlaps the pages"),
    "a range that wraps": (pool(base=(1 << 63) - 4096), "wraps"),
    "no way to reach it": (changed(memory=None), "offers no access by memory"),
}


@pytest.mark.parametrize("name", FORGERIES)
async def test_a_forged_grant_is_refused_before_any_byte_moves(reader: Town, fake: FakeSource, name: str) -> None:
    fake.forge, words = FORGERIES[name]

    outcome = await refused(reader, fake, name)

    assert words in outcome.reason


def other_key(fake: FakeSource) -> Callable[[LendAnswered], Body]:
    key = LenderKey.generate()

    def answer(said: LendAnswered) -> Body:
        return said.model_copy(update={"signature": key._signing_key.sign(said.grant).signature})

    return answer


def altered(_fake: FakeSource) -> Callable[[LendAnswered], Body]:
    return lambda said: said.model_copy(update={"grant": said.grant[:-1] + bytes([said.grant[-1] ^ 1])})


def unsigned(_fake: FakeSource) -> Callable[[LendAnswered], Body]:
    return lambda said: said.model_copy(update={"signature": b""})


def nonsense(fake: FakeSource) -> Callable[[LendAnswered], Body]:
    def answer(said: LendAnswered) -> Body:
        data, signature = fake.sign(b"\xc1 this is no grant")
        return said.model_copy(update={"grant": data, "signature": signature})

    return answer


def too_long(fake: FakeSource) -> Callable[[LendAnswered], Body]:
    def answer(said: LendAnswered) -> Body:
        data, signature = fake.sign(said.grant + b"\x00" * (200 << 10))
        return said.model_copy(update={"grant": data, "signature": signature})

    return answer


def another_kind(_fake: FakeSource) -> Callable[[LendAnswered], Body]:
    return lambda _said: StatsAnswered(counters={})


@pytest.mark.parametrize("lie", [other_key, altered, unsigned, nonsense, too_long, another_kind])
async def test_an_answer_that_its_lender_did_not_sign_is_refused(
    reader: Town, fake: FakeSource, lie: Callable[[FakeSource], Callable[[LendAnswered], Body]]
) -> None:
    fake.answer = lie(fake)

    await refused(reader, fake, lie.__name__)


async def test_a_registry_record_with_a_key_that_is_none_leads_to_a_refusal(reader: Town, fake: FakeSource) -> None:
    await fake.register(verify_key=b"short")

    await refused(reader, fake, "short key", register=False)


async def test_unreadable_answers_are_asked_again_until_the_deadline(reader: Town, fake: FakeSource) -> None:
    fake.answer = lambda _said: b"\xc1"

    outcome = await reader.stage(prompt("unreadable", BLOCKS), source=FAKE, budget_s=4.0)

    assert (outcome.outcome, outcome.failure, outcome.pages_moved) == ("failed", "deadline", 0)
    assert len(fake.questions) > 1
    assert len({question.key for question in fake.questions}) == 1
    await until(lambda: fake.released, what="the key is closed")
    await reader.at_rest()


@pytest.mark.parametrize(
    ("longer_bytes", "descriptor"),
    [(0, "stdin"), (1 << 20, "pool")],
    ids=["a descriptor that is no pool", "a pool that is longer than its memory"],
)
async def test_memory_that_is_not_what_the_grant_says_delivers_nothing(
    reader: Town, fake: FakeSource, longer_bytes: int, descriptor: str
) -> None:
    def forge(grant: Grant) -> Grant:
        fd = 0 if descriptor == "stdin" else fake.memory.fd
        length_bytes = grant.pool.length_bytes + longer_bytes
        larger: PoolGeometry = grant.pool.model_copy(update={"length_bytes": length_bytes})
        return grant.model_copy(update={"memory": MemoryAccess(process=identity(), fd=fd), "pool": larger})

    fake.forge = forge
    ids = prompt(f"other memory {descriptor}", BLOCKS)

    outcome = await reader.stage(ids, source=FAKE)

    assert outcome.outcome == "failed"
    assert (outcome.pages_moved, outcome.length_bytes) == (0, 0)
    assert await reader.held("b", ids) == 0
    await reader.at_rest()


@pytest.mark.contract("P2")
async def test_pages_that_change_after_the_grant_are_not_delivered(reader: Town, fake: FakeSource) -> None:
    def forge(grant: Grant) -> Grant:
        fake.memory.generations.raise_pages(grant.page_indexes()[2:3])  # the writer has begun anew
        return grant

    fake.forge = forge
    ids = prompt("changes", BLOCKS)

    outcome = await reader.stage(ids, source=FAKE)

    assert (outcome.outcome, outcome.failure) == ("failed", "page_changed")
    assert await reader.held("b", ids) == 2  # what stood before the changed page is whole
    assert (await reader.answer("b", ids)).end.tokens == await reader.cold("b", ids)
    await reader.at_rest()


async def refused(reader: Town, fake: FakeSource, name: str, *, register: bool = True) -> TransferOutcome:
    """Stage from the fake, and see that its grant was refused and nothing was read."""
    if register:
        await fake.register()
    ids = prompt(f"forged {name}", BLOCKS)
    before = await reader.stats("b")

    outcome = await reader.stage(ids, source=FAKE)

    assert (outcome.outcome, outcome.failure) == ("failed", "grant_refused"), outcome
    assert (outcome.pages_moved, outcome.length_bytes) == (0, 0)
    assert outcome.evidence == ("never_submitted",)
    assert len(fake.questions) == 1
    assert (await reader.stats("b"))["memory_submissions"] == before["memory_submissions"]
    assert await reader.held("b", ids) == 0
    await until(lambda: fake.released, what="the reader says that it will not read")
    assert fake.released[0].key == fake.questions[0].key
    await reader.at_rest()
    return outcome
