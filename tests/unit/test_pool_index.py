"""The reuse index: one page for a name, one name for a page, and the first one stays."""

import pytest

from kvbus.errors import LedgerContradictionError
from kvbus.pool.index import ReuseIndex
from tests.unit.pool_parts import names_of

A, B, C, D = names_of(4)


@pytest.mark.contract("P9")
def test_insertion_is_if_absent() -> None:
    index = ReuseIndex()
    assert index.insert(A, 3) == 3
    assert index.insert(A, 5) == 3
    assert index.pages() == {3}
    assert A in index
    assert len(index) == 1
    index.check()


def test_one_page_has_one_name() -> None:
    index = ReuseIndex()
    index.insert(A, 3)
    with pytest.raises(LedgerContradictionError, match="two names"):
        index.insert(B, 3)


def test_the_longest_prefix_ends_at_the_first_gap() -> None:
    index = ReuseIndex()
    for page, name in enumerate((A, B, D)):
        index.insert(name, page)
    assert index.longest_prefix([A, B, C, D]) == [0, 1]
    assert index.longest_prefix([C, D]) == []
    assert index.match([A, B, C, D]) == [0, 1, None, 2]


def test_a_removed_page_is_found_no_more() -> None:
    index = ReuseIndex()
    index.insert(A, 3)
    assert index.remove(3) == A
    assert index.match([A]) == [None]
    with pytest.raises(LedgerContradictionError, match="without a name"):
        index.remove(3)
    assert repr(index) == "<ReuseIndex names=0>"


def test_the_check_finds_an_index_that_is_not_one_to_one() -> None:
    index = ReuseIndex()
    index.insert(A, 3)
    index._page_of[B] = 3
    with pytest.raises(LedgerContradictionError, match="one to one"):
        index.check()
    index._name_of[3] = B  # the later name alone is known of the page
    with pytest.raises(LedgerContradictionError, match="one to one"):
        index.check()
