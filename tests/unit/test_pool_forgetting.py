"""Once all names are forgotten nothing is lent by one of them; who reads goes on, and what comes later counts."""

from kvbus.pool.allocator import PageState
from tests.unit.pool_parts import fill, names_of, small_lender

NAMES = names_of(3)


def test_nothing_is_lent_by_a_forgotten_name() -> None:
    # contract 24
    lender = small_lender()
    fill(lender, NAMES)
    assert lender.forget_names() == 3
    assert lender.held(NAMES) == [False] * 3
    view = lender.lend_read(NAMES).poll()
    assert view is not None
    assert view.pages == ()
    assert lender.lend_read(NAMES, whole=True).failure is not None
    pins = lender.pin_set()
    assert pins.pin(NAMES) == 0
    assert lender.statistics().pages.free == 8
    assert lender.forget_names() == 0
    lender.check()


def test_reads_that_were_granted_go_on_and_free_their_pages_at_their_end() -> None:
    # contract 24, 21; P9, 1
    lender = small_lender()
    pages = fill(lender, NAMES)
    first, second, pins = lender.lend_read(NAMES), lender.lend_read(NAMES[:2]), lender.pin_set()
    pins.pin(NAMES[:1])
    view = first.poll()
    lender.forget_names()
    lender.check()
    assert first.poll() is view
    assert view is not None
    assert lender.memory.generations.counters(pages) == view.counters, "whole and sealed as before"
    fill(lender, names_of(5, prompt=2))
    assert not set(lender.pages_held(names_of(5, prompt=2))) & set(pages)
    for lease, freed in ((first, {pages[2]}), (second, {pages[1], pages[2]})):
        lease.release()
        assert {page for page in pages if lender._allocator.state(page) is PageState.FREE} == freed
        lender.check()
    pins.drop()
    assert lender.statistics().pages.free == 3
    lender.check()


def test_what_was_being_written_when_names_were_forgotten_is_no_content() -> None:
    # contract 24, 17
    lender = small_lender()
    pins = lender.pin_set()
    lease = lender.lend_write(NAMES, range(3), pins=pins)
    assert lease.poll() is not None
    unmarked = lender.lend_write(names_of(1, prompt=2), (0,))
    assert unmarked.poll() is not None
    unmarked.release()
    lender.forget_names()
    assert lease.bounds((True, True, True)) == (0, 0), "nothing of it can be used"
    lease.mark_arrived((True, True, True))
    lease.release()
    unmarked.mark_arrived((True,))
    assert lender.held(NAMES) == [False] * 3
    assert lender.held(names_of(1, prompt=2)) == [False]
    assert len(pins) == 0
    assert lender.statistics().pages.free == 8
    lender.check()


def test_names_that_come_later_count_again() -> None:
    # contract 24
    lender = small_lender()
    fill(lender, NAMES, byte=1)
    old = lender.lend_read(NAMES)
    lender.forget_names()
    pages = fill(lender, NAMES, byte=2)
    view = lender.lend_read(NAMES).poll()
    assert view is not None
    assert view.pages == pages
    assert not set(pages) & set(old.pages)
    assert {int(lender.memory.page_bytes(page)[0]) for page in pages} == {2}
    lender.check()


def test_a_forgotten_page_may_be_quarantined_and_comes_back_by_that_way() -> None:
    # contract 18, 24
    lender = small_lender()
    pages = fill(lender, NAMES[:1])
    lease = lender.lend_read(NAMES[:1])
    lender.forget_names()
    assert lender.quarantine(pages) == 1
    lease.release()
    assert lender.statistics().pages.quarantined == 1
    lender.readmit(pages)
    lender.check()
    assert lender.statistics().pages.free == 8
