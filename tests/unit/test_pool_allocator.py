"""Page states, pins and claims: what may be taken, in which order, and what is a contradiction."""

import pytest

from kvbus.errors import LedgerContradictionError
from kvbus.pool.allocator import PageAllocator, PageState


def cached(pages: PageAllocator, count: int) -> list[int]:
    taken, _ = pages.take(count, for_peer=False)
    pages.cache(taken, for_peer=False)
    return taken


def test_a_fresh_pool_hands_out_neighbouring_pages() -> None:
    pages = PageAllocator(6)
    assert pages.take(4, for_peer=False) == ([0, 1, 2, 3], [])
    assert pages.available == 2


def test_the_least_recently_used_page_goes_first() -> None:
    pages = PageAllocator(3)
    first, second, third = cached(pages, 3)
    pages.pin([first], for_peer=False)
    pages.unpin([first], for_peer=False)
    assert pages.take(2, for_peer=False) == ([second, third], [second, third])
    assert pages.statistics().evictions == 2


def test_a_pinned_page_is_never_taken_nor_evicted() -> None:
    pages = PageAllocator(2)
    held, other = cached(pages, 2)
    pages.pin([held], for_peer=True)
    assert not pages.evict(held)
    assert pages.take(1, for_peer=False) == ([other], [other])
    with pytest.raises(LedgerContradictionError, match="count=1"):
        pages.take(1, for_peer=False)
    assert pages.state(held) is PageState.CACHED
    pages.check()


def test_taking_too_much_changes_nothing() -> None:
    pages = PageAllocator(3)
    cached(pages, 2)
    before = pages.statistics()
    with pytest.raises(LedgerContradictionError):
        pages.take(4, for_peer=True)
    assert pages.statistics() == before
    pages.check()


@pytest.mark.contract("P26")
def test_a_page_is_claimed_once_however_many_peers_read_it() -> None:
    pages = PageAllocator(4)
    first, second = cached(pages, 2)
    for _ in range(3):
        pages.pin([first], for_peer=True)
    pages.pin([second], for_peer=False)
    assert pages.claimed == 1
    assert pages.unclaimed([first, second]) == 1
    (written,), _ = pages.take(1, for_peer=True)
    pages.quarantine([written], for_peer=True)
    assert pages.claimed == 2
    pages.free([written], for_peer=False)
    for _ in range(3):
        pages.unpin([first], for_peer=True)
    assert pages.claimed == 0
    pages.check()


def test_a_quarantined_page_stays_out_of_use_after_its_readers_left() -> None:
    pages = PageAllocator(1)
    (page,) = cached(pages, 1)
    pages.pin([page], for_peer=True)
    pages.quarantine([page], for_peer=False)
    with pytest.raises(LedgerContradictionError, match="pinned page is freed"):
        pages.free([page], for_peer=False)
    pages.unpin([page], for_peer=True)
    assert pages.available == 0
    assert pages.state(page) is PageState.QUARANTINED
    pages.check()


def test_steps_that_lead_nowhere_are_contradictions() -> None:
    pages = PageAllocator(2)
    (page,) = cached(pages, 1)
    for step in (
        lambda: pages.free([page], for_peer=False),
        lambda: pages.cache([page], for_peer=False),
        lambda: pages.free([1], for_peer=False),
        lambda: pages.evict(1),
        lambda: pages.pin([1], for_peer=False),
        lambda: pages.unpin([page], for_peer=False),
    ):
        with pytest.raises(LedgerContradictionError):
            step()
    pages.check()


def test_a_peer_cannot_give_up_what_it_did_not_take_up() -> None:
    pages = PageAllocator(1)
    pages.take(1, for_peer=False)
    with pytest.raises(LedgerContradictionError, match="did not take up"):
        pages.free([0], for_peer=True)


def test_counts_add_up() -> None:
    pages = PageAllocator(8)
    one, _ = cached(pages, 2)
    pages.pin([one], for_peer=True)
    taken, _ = pages.take(3, for_peer=True)
    pages.quarantine([taken[0]], for_peer=True)
    counts = pages.statistics()
    assert (counts.free, counts.writing, counts.cached, counts.quarantined) == (3, 2, 2, 1)
    assert (counts.pinned, counts.idle, counts.claimed) == (1, 1, 4)
    assert counts.free + counts.writing + counts.cached + counts.quarantined == counts.pages
    assert "free=3" in repr(pages)


def test_the_check_finds_a_page_that_is_free_twice_over() -> None:
    pages = PageAllocator(3)
    (page,) = cached(pages, 1)
    pages._free[page] = None
    with pytest.raises(LedgerContradictionError, match="disagree"):
        pages.check()
