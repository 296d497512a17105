"""Digests of pages: whose bytes they are of, and when they are of nothing."""

import numpy as np
import pytest

from kvbus.config import DIGESTS
from kvbus.pool.digests import NONE, DigestMode, PageDigests, digest_of
from kvbus.pool.lender import PoolLender
from kvbus.pool.memory import PoolMemory
from tests.unit.pool_parts import EPOCH, TOY, fill, names_of, small_lender


def digesting_lender(mode: DigestMode = DigestMode.GRANT, pages: int = 8) -> tuple[PoolLender, PageDigests]:
    lender = small_lender(pages)
    lender.memory.digests.turn_on(mode)
    return lender, lender.memory.digests


def made_of(memory: PoolMemory, pages: tuple[int, ...]) -> list[int]:
    return [digest_of(memory.page_bytes(page)) for page in pages]


def test_every_flipped_bit_of_a_page_changes_its_digest() -> None:
    page = np.arange(64, dtype=np.uint8)
    whole = digest_of(page)
    for at in range(8 * len(page)):
        page[at // 8] ^= 1 << at % 8
        assert digest_of(page) not in {whole, NONE}
        page[at // 8] ^= 1 << at % 8
    assert digest_of(page) == whole


def test_a_digest_is_of_one_content_and_is_nothing_once_the_page_is_written_anew() -> None:
    lender, digests = digesting_lender()
    pages = fill(lender, names_of(2))
    counters = lender.memory.generations.counters(pages)
    assert digests.of(pages) == (NONE, NONE)
    digests.take_over(pages, counters, made_of(lender.memory, pages))
    assert digests.of(pages) == tuple(made_of(lender.memory, pages))
    lender.evict(names_of(2))
    assert digests.missing(pages) == []
    again = fill(lender, names_of(2, prompt=2), byte=9)
    assert set(again) == set(pages)
    assert digests.of(pages) == (NONE, NONE)
    assert digests.missing(pages) == list(pages)


def test_a_digest_made_of_a_page_that_was_written_meanwhile_is_not_kept() -> None:
    # P1: hashing takes time, and the page may be another's by its end
    lender, digests = digesting_lender()
    pages = fill(lender, names_of(1))
    counters, made = lender.memory.generations.counters(pages), made_of(lender.memory, pages)
    lender.evict(names_of(1))
    lease = lender.lend_write(names_of(1, prompt=2), (0,))
    digests.take_over(pages, counters, made)
    digests.take_over(pages, lender.memory.generations.counters(pages), made)  # nor of one that is being written
    lease.release()
    assert digests.of(pages) == (NONE,)
    assert digests.made == 0


def test_a_digest_kept_ahead_counts_only_once_its_page_is_sealed() -> None:
    lender, digests = digesting_lender()
    lease = lender.lend_write(names_of(2), (0, 1))
    view = lease.poll()
    assert view is not None
    digests.keep(view.pages, [counter + 1 for counter in view.counters], (11, 12))
    assert digests.of(view.pages) == (NONE, NONE)
    lease.mark_arrived((True, False))
    lease.release()
    assert digests.of(view.pages) == (11, NONE)
    others = lender.lend_write(names_of(8, prompt=3)[:7], range(7))
    others.poll()
    others.mark_arrived([True] * 7)
    others.release()
    assert NONE in digests.of(view.pages)
    assert 12 not in digests.of(view.pages), "the row that did not arrive has had another content since"


def test_a_page_that_was_never_written_has_no_digest() -> None:
    _, digests = digesting_lender()
    digests.keep((0, 1), (0, 2), (5, 5))
    assert digests.of((0, 1)) == (NONE, NONE)


def test_without_being_turned_on_nothing_is_kept() -> None:
    lender, digests = digesting_lender(DigestMode.OFF)
    pages = fill(lender, names_of(1))
    digests.keep(pages, lender.memory.generations.counters(pages), (7,))
    assert digests.of(pages) == (NONE,)
    assert "off" in repr(digests)


@pytest.mark.parametrize(("mode", "heard"), [(DigestMode.ALWAYS, 2), (DigestMode.GRANT, 0)])
def test_who_makes_digests_hears_of_sealed_pages_where_all_are_wanted(mode: DigestMode, heard: int) -> None:
    lender, digests = digesting_lender(mode)
    calls: list[int] = []
    digests.follow_sealing(lambda: calls.append(1))
    first, second = fill(lender, names_of(2)), fill(lender, names_of(3, prompt=2), byte=2)
    assert len(calls) == heard
    assert set(digests.take_unmade()) == (set(first + second) if heard else set())
    assert digests.take_unmade() == []


def test_pages_that_came_with_digests_need_none_made() -> None:
    lender, digests = digesting_lender(DigestMode.ALWAYS)
    digests.follow_sealing(lambda: pytest.fail("nothing is to be made"))
    lease = lender.lend_write(names_of(1), (0,))
    view = lease.poll()
    assert view is not None
    digests.keep(view.pages, [view.counters[0] + 1], (11,))
    lease.mark_arrived((True,))
    lease.release()
    assert digests.take_unmade() == []


def test_the_setting_offers_the_modes_that_there_are() -> None:
    assert tuple(DigestMode) == DIGESTS


def test_pages_that_differ_are_counted() -> None:
    digests = PoolMemory.create(TOY, 2, EPOCH).digests
    digests.note_differing(2)
    digests.note_differing(1)
    assert digests.differing == 3
