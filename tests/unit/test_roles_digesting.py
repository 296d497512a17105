"""Digests at the source and at the engine's counter: made before a grant leaves, and what a spoiled page comes to."""

import asyncio
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvbus.errors import PeerError
from kvbus.ledger.facts import FailureClass
from kvbus.ledger.types import Delivered
from kvbus.pool.allocator import PageState
from kvbus.pool.digests import NONE, DigestMode, digest_of
from kvbus.roles import digesting
from kvbus.roles.counting import digest_counters
from kvbus.roles.digesting import Digester, keep_granted
from kvbus.testing.bus import MemoryBus
from tests.unit.pool_parts import fill, names_of, small_lender
from tests.unit.test_roles_desk import IDS, LONGEST, PAGES, Counter
from tests.unit.test_roles_source import Lender, Reader
from tests.waiting import until


@pytest.fixture
async def lender() -> AsyncIterator[Lender]:
    """A source that makes digests when it lends."""
    bus = MemoryBus()
    lender = Lender(bus)
    lender.pool.memory.digests.turn_on(DigestMode.GRANT)
    for number, page in enumerate(lender.fill(byte=0xA1)):
        lender.pool.memory.page_bytes(page)[0] = number  # no two are the same
    yield lender
    lender.pool.lender.check()
    lender.holder.check()
    await lender.source.close()
    await bus.close()


@pytest.fixture
def on_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages here are small; as if they were many, too."""
    monkeypatch.setattr(digesting, "AT_ONCE_BYTES", 0)


class Gate:
    """Holds the thread that makes digests until a test lets it go on."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def digest_of(self, content: NDArray[np.uint8]) -> int:
        self.began.set()
        assert self.may_end.wait(60)
        return digest_of(content)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, on_the_thread: None) -> Gate:
    gate = Gate()
    monkeypatch.setattr(digesting, "digest_of", gate.digest_of)
    return gate


def hashed(lender: Lender, pages: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(digest_of(lender.pool.memory.page_bytes(page)) for page in pages)


async def test_a_grant_holds_the_digests_of_its_pages_under_its_signature(lender: Lender) -> None:
    grant = await lender.grant()
    assert grant.page_digests() == hashed(lender, grant.page_indexes())
    await lender.grant("t2")
    assert lender.pool.memory.digests.made == 4, "once for each page"


async def test_a_source_whose_digests_are_off_grants_none(lender: Lender) -> None:
    lender.pool.memory.digests.mode = DigestMode.OFF
    assert (await lender.grant()).digests is None


async def test_a_reader_delivers_no_page_that_was_changed_after_its_digest_was_made(lender: Lender) -> None:
    # P2
    reader = Reader()
    reader.memory.digests.turn_on(DigestMode.GRANT)
    grant = await lender.grant()
    lender.pool.memory.page_bytes(grant.page_indexes()[2])[5] ^= 1
    result = reader.read(grant).result
    assert isinstance(result, Delivered)
    assert (result.arrived, result.failure) == ((True, True, False, True), FailureClass.PAGE_DIFFERS)


@pytest.mark.usefixtures("on_the_thread")
async def test_many_pages_are_hashed_beside_the_loop_and_pinned_meanwhile(lender: Lender) -> None:
    # P9
    assert (await lender.ask()).status == "computing"
    statistics = lender.pool.lender.statistics()
    assert (statistics.reads, statistics.pin_sets) == (0, 1)
    assert lender.pool.lender.evict(lender.names()) == 0, "what is hashed for a grant stays where it is"
    await until(lambda: lender.pool.lender.statistics().pin_sets == 0)
    grant = await lender.grant()
    assert grant.page_digests() == hashed(lender, grant.page_indexes())
    assert lender.pool.lender.statistics().reads == 1
    assert await lender.release()


@pytest.mark.usefixtures("on_the_thread")
async def test_a_question_waits_for_digests_as_it_waits_for_a_prefill(lender: Lender) -> None:
    grant = await lender.grant(wait_s=2.0)
    assert len(grant.page_digests()) == 4


# P26
async def test_pages_that_are_hashed_for_peers_leave_the_engine_its_longest_prompt(lender: Lender, gate: Gate) -> None:
    # Planted fault that this catches: pins that do not count, so that questions fill the pool before any is lent to.
    prompts = {"t1": lender.names(), "t2": lender.names(token=2), "t3": lender.names(token=3)}
    lender.fill(byte=0xB2, token=2)
    lender.fill(byte=0xC3, token=3)
    for transfer in ("t1", "t2"):
        assert (await lender.ask(transfer, names=prompts[transfer])).status == "computing"

    refused = await lender.ask("t3", names=prompts["t3"])

    assert (refused.status, refused.failure) == ("refused", FailureClass.LEASE_REFUSED.name.lower())
    assert "4 more pages asked for, but 8 of at most 8 are lent" in refused.reason
    assert len(lender.fill(8, byte=0xE9, token=9)) == 8, "the longest prompt"
    gate.may_end.set()
    await until(lambda: lender.pool.lender.statistics().pin_sets == 0)
    for transfer in ("t1", "t2"):
        await lender.grant(transfer, names=prompts[transfer])
    assert lender.pool.allocator.claimed == 8, "a lease takes up what was pinned for it, and no more"
    for transfer in ("t1", "t2"):
        assert await lender.release(transfer)
    assert lender.pool.allocator.claimed == 0


async def test_a_reader_that_leaves_while_digests_are_made_is_lent_nothing(lender: Lender, gate: Gate) -> None:
    # contract 42
    assert (await lender.ask()).status == "computing"
    await until(gate.began.is_set)
    assert await lender.release()
    gate.may_end.set()
    await until(lambda: lender.pool.lender.statistics().pin_sets == 0)
    assert lender.pool.lender.statistics().reads == 0
    assert (await lender.ask()).failure == FailureClass.CANCELLED.name.lower()


@pytest.mark.usefixtures("on_the_thread")
async def test_pages_stored_anew_while_digests_are_made_are_not_lent_without_them(lender: Lender) -> None:
    # Planted fault that this catches: a grant that leaves its digests out where one is missing.
    assert (await lender.ask()).status == "computing"
    lender.pool.lender.forget_names()
    again = lender.fill(byte=0xB2)
    grant = await lender.grant(wait_s=2.0)
    assert grant.page_indexes() == again
    assert grant.page_digests() == hashed(lender, again)
    assert await lender.release()


async def test_no_grant_is_made_of_pages_without_digests() -> None:
    lender = small_lender()
    lender.memory.digests.turn_on(DigestMode.GRANT)
    fill(lender, names_of(3))
    view = lender.lend_read(names_of(3)).poll()
    assert view is not None
    digester = Digester(lender.memory)
    with pytest.raises(ValueError, match="3 of its pages were stored anew"):
        digester.column(view)
    assert digester.ready(view.pages)
    assert digester.column(view) == lender.memory.digests.of(view.pages)


async def test_pages_are_hashed_when_they_are_sealed_where_all_are_to_have_digests() -> None:
    lender = small_lender(pages=8)
    memory, digests = lender.memory, lender.memory.digests
    digests.turn_on(DigestMode.ALWAYS)
    digester = Digester(memory)
    first = fill(lender, names_of(3))
    second = fill(lender, names_of(2, prompt=2), byte=2)
    assert digests.missing(first + second) == list(first + second)
    await until(lambda: not digests.missing(first + second))
    assert digests.of(first + second) == tuple(digest_of(memory.page_bytes(page)) for page in first + second)
    assert digests.made == 5
    assert "made=5" in repr(digester)
    await digester.close()


async def test_however_many_pages_are_sealed_the_loop_hashes_few_of_them_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Planted fault that this catches: pages taken a slice at a time, each of which may be hashed at once.
    by: list[threading.Thread] = []

    def noted(content: NDArray[np.uint8]) -> int:
        by.append(threading.current_thread())
        return digest_of(content)

    monkeypatch.setattr(digesting, "digest_of", noted)
    lender = small_lender(pages=8)
    for bound in ("AT_ONCE_BYTES", "SLICE_BYTES"):
        monkeypatch.setattr(digesting, bound, 2 * lender.memory.layout.page_bytes)
    lender.memory.digests.turn_on(DigestMode.ALWAYS)
    digester = Digester(lender.memory)
    pages = fill(lender, names_of(7))
    await until(lambda: not lender.memory.digests.missing(pages))
    assert len(by) == 7
    assert threading.main_thread() not in by
    fill(lender, names_of(1, prompt=2), byte=2)
    await until(lambda: len(by) == 8)
    assert by[-1] is threading.main_thread(), "a few cost less here than the thread"
    await digester.close()


async def test_a_page_that_is_evicted_and_written_while_it_is_hashed_gets_no_digest(gate: Gate) -> None:
    # P1
    lender = small_lender(pages=2)
    lender.memory.digests.turn_on(DigestMode.ALWAYS)
    digester = Digester(lender.memory)
    pages = fill(lender, names_of(2))
    made = asyncio.ensure_future(digester.make(pages))
    await until(gate.began.is_set)
    lender.evict(names_of(2))
    again = lender.lend_write(names_of(2, prompt=2), (0, 1))
    gate.may_end.set()
    await made
    again.release()
    assert lender.memory.digests.of(pages) == (NONE, NONE)
    assert lender.memory.digests.made == 0
    await digester.close()


async def test_an_arrived_page_keeps_the_digest_that_came_with_it_and_lends_it_on(lender: Lender) -> None:
    grant = await lender.grant()
    here = small_lender(pages=4)
    here.memory.digests.turn_on(DigestMode.GRANT)
    lease = here.lend_write(lender.names(), range(4))
    view = lease.poll()
    assert view is not None
    keep_granted(here.memory, view, grant)
    assert here.memory.digests.of(view.pages) == (NONE,) * 4, "nothing has arrived"
    lease.mark_arrived((True, True, False, True))
    lease.release()
    mine = here.memory.digests.of(view.pages)
    assert mine[:2] + mine[3:] == grant.page_digests()[:2] + grant.page_digests()[3:]
    assert mine[2] == NONE
    assert here.memory.digests.made == 0
    assert await lender.release()


def test_the_counters_say_what_was_found() -> None:
    memory = small_lender().memory
    memory.digests.note_differing(2)
    memory.digests.spoiled, memory.digests.made = 3, 4
    memory.digests.reported, memory.digests.rewritten, memory.digests.dropped = 5, 6, 7
    assert digest_counters(memory.digests) == {
        "pages_differ": 2,
        "pages_spoiled": 3,
        "pages_reported": 5,
        "pages_rewritten": 6,
        "pages_dropped": 7,
        "digests_made": 4,
    }


# ------------------------------------------------------------------------------------------------ the engine's counter


@pytest.fixture
def counter() -> Counter:
    counter = Counter()
    counter.pool.memory.digests.turn_on(DigestMode.ALWAYS)
    return counter


def make_digests(counter: Counter, pages: tuple[int, ...]) -> None:
    memory = counter.pool.memory
    made = [digest_of(memory.page_bytes(page)) for page in pages]
    memory.digests.take_over(pages, memory.generations.counters(pages), made)


def test_a_match_says_which_digests_its_pages_have(counter: Counter) -> None:
    pages = counter.stores(IDS)
    make_digests(counter, pages[:2])
    matched = counter.desk.match(IDS, "")
    assert matched.digests == (*counter.pool.memory.digests.of(pages[:2]), *(NONE,) * (LONGEST - 2))
    counter.desk.release(matched.handle)


def test_a_spoiled_page_is_found_no_more_and_its_block_is_stored_in_another_one(counter: Counter) -> None:
    # contract 37
    # Planted faults that this catches: the page stays in the index; the page is free again.
    pages = counter.stores(IDS)
    matched = counter.desk.match(IDS, "")
    counter.desk.spoiled(matched.handle, 3)
    counter.desk.spoiled(matched.handle, 3)  # said twice
    assert counter.pool.memory.digests.spoiled == 1
    assert counter.pool.allocator.state(pages[3]) is PageState.QUARANTINED
    assert counter.desk.held(IDS, "") == 3
    counter.check()
    counter.desk.release(matched.handle)
    assert counter.pool.allocator.state(pages[3]) is PageState.QUARANTINED
    assert pages[3] not in counter.stores(IDS, first=3)
    assert counter.desk.held(IDS, "") == LONGEST
    assert counter.pool.allocator.statistics().quarantined == 1
    counter.check()


def test_only_a_matched_block_can_be_called_spoiled(counter: Counter) -> None:
    counter.stores(IDS)
    matched = counter.desk.match(IDS, "")
    with pytest.raises(PeerError, match="no page of this block"):
        counter.desk.spoiled(matched.handle, LONGEST)
    with pytest.raises(PeerError, match="no such handle"):
        counter.desk.spoiled(matched.handle + 1, 0)
    assert counter.pool.allocator.statistics().quarantined == 0
    counter.desk.release(matched.handle)


def test_a_peer_that_reads_a_spoiled_page_goes_on_and_it_is_lent_to_nobody_else(counter: Counter) -> None:
    counter.stores(IDS)
    names = counter.pool.names(IDS, "")
    lease = counter.pool.lender.lend_read(names)
    view = lease.poll()
    assert view is not None
    matched = counter.desk.match(IDS, "")
    counter.desk.spoiled(matched.handle, 0)
    assert counter.pool.memory.generations.counters(view.pages) == view.counters
    assert counter.pool.lender.pages_held(names) == []
    counter.check()
    counter.desk.release(matched.handle)
    lease.release()
    assert counter.pool.allocator.statistics().free == PAGES - LONGEST
    counter.check()
