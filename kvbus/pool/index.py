"""The reuse index: which page holds the content of which name.

A name belongs to at most one page and a page to at most one name. Insertion is if-absent (P9): the first page of a name
stays, since leases may be out on it, and the later one becomes free.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile

from kvbus.errors import LedgerContradictionError


class ReuseIndex:
    """Page name → page of one pool. It states where content is, and says nothing about pins."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, name: object) -> bool:
        return name in self._page_of

    def __repr__(self) -> str:
        return f"<ReuseIndex names={len(self._page_of)}>"

    def insert(self, name: bytes, page: int) -> int:
        """Return the page that holds `name` from now on: the given one, or the one that held it before."""
        if page in self._name_of:
            raise LedgerContradictionError("one page gets two names", page=page)
        holder = self._page_of.setdefault(name, page)
        if holder == page:
            self._name_of[page] = name
        return holder

    def remove(self, page: int) -> bytes:
        """Forget a page and return the name that it had."""
        name = self._name_of.pop(page, None)
        if name is None:
            raise LedgerContradictionError("a page without a name is removed from the index", page=page)
        del self._page_of[name]
        return name

    def match(self, names: Iterable[bytes]) -> list[int | None]:
        """Return, name by name, the page that holds it or None."""
        find = self._page_of.get
        return [find(name) for name in names]

    def longest_prefix(self, names: Sequence[bytes]) -> list[int]:
        """Return the pages of the names up to the first that is not held."""
        try:
            return list(map(self._page_of.__getitem__, names))  # mostly all are; a turn of Python each costs as much
        except KeyError:
            held = takewhile(self._page_of.__contains__, names)
            return list(map(self._page_of.__getitem__, held))

    def pages(self) -> set[int]:
        """Return all pages that have a name; O(names), for checks and tests."""
        return set(self._name_of)

    def check(self) -> None:
        """Raise LedgerContradictionError unless names and pages correspond one to one; O(names)."""
        page_of, name_of = self._page_of, self._name_of  # turned round, of two names on one page only the last is left
        if len(page_of) != len(name_of) or dict(zip(page_of.values(), page_of, strict=True)) != name_of:
            raise LedgerContradictionError("the reuse index is not one to one", names=len(self._page_of))
