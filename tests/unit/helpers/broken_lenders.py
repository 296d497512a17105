"""Lenders as a third party may write them: each breaks one promise, and says in its docstring which."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from kvbus.ledger.types import Direction, LeaseFailure, LeaseView
from kvbus.testing.cases import LenderCase
from kvbus.testing.ledger_parts import ListedLease, ListedLender
from tests.unit.helpers.contract_makers import listed_case

BOOM = RuntimeError("the vendor's allocator gave up")


class BrokenLender(ListedLender):
    """A lender whose leases are of another kind."""

    kind: type[ListedLease] = ListedLease

    def lend(self, direction: Direction, rows: int = 1, *, first_ordinal: int = 0, granted: bool = True) -> ListedLease:
        lease = super().lend(direction, rows, first_ordinal=first_ordinal, granted=False)
        broken = self.out[lease.lease_id] = self.kind(self, lease.lease_id, direction, self.seen_by(lease._view))
        if granted:
            broken.grant()
        return broken

    def seen_by(self, view: LeaseView) -> LeaseView:
        return view


def lender_of(lease_kind: type[ListedLease]) -> Callable[[], ListedLender]:
    def make() -> ListedLender:
        lender = BrokenLender()
        lender.kind = lease_kind
        return lender

    return make


class AnotherViewEachTime(ListedLease):
    """12: polls give another view object each time."""

    def poll(self) -> LeaseView | None:
        view = super().poll()
        return view._replace() if view is not None else None


class PolledAfterRelease(ListedLease):
    """12: gives its view after it was released."""

    def poll(self) -> LeaseView | None:
        return self._view if self.releases else super().poll()


class ReleasedTwice(ListedLease):
    """15: each release acts."""

    def release(self) -> None:
        super().release()
        if self.releases > 1 and self._viewed:
            self._lender.content.add(bytes([self.releases]) * 16)


class RaisesOnSecondRelease(ListedLease):
    """15: a second release raises."""

    def release(self) -> None:
        if self.releases:
            raise BOOM
        super().release()


class TakesAnyMask(ListedLease):
    """14: takes a mask of any length."""

    def mark_arrived(self, arrived: Sequence[bool]) -> None:
        super().mark_arrived([bool(one) for one in arrived][: self.rows] + [False] * (self.rows - len(arrived)))


class MarkedTwice(ListedLease):
    """14: the second mark counts as well."""

    def mark_arrived(self, arrived: Sequence[bool]) -> None:
        kept, self.marks = self.marks, []
        super().mark_arrived(arrived)
        self.marks = kept + self.marks


class FailsForAWhile(ListedLease):
    """13: a failure goes away."""

    def grant(self) -> None:
        self._failure = None
        super().grant()


class CountsEveryRow(ListedLease):
    """17: what was marked as missing becomes content all the same."""

    def release(self) -> None:
        if self.marks:
            self.marks = [(True,) * self.rows]
        super().release()


class BoundsBackwards(ListedLease):
    """28: bounds that are no range."""

    def bounds(self, arrived: Sequence[bool]) -> tuple[int, int]:
        lo, hi = super().bounds(arrived)
        return hi + 1, lo


class LendsOnePageToAll(BrokenLender):
    """1: lends the same pages again while they are out."""

    def seen_by(self, view: LeaseView) -> LeaseView:
        return view._replace(pages=tuple(range(len(view.pages))))


class LendsUnsealed(BrokenLender):
    """P1: lends for reading what is being written."""

    def seen_by(self, view: LeaseView) -> LeaseView:
        return view._replace(counters=(1,) * len(view.pages))


class NamesAllAlways(ListedLender):
    """R4: names every lease in each answer."""

    def progress(self) -> Sequence[int]:
        super().progress()
        return tuple(self.out)


class ContentTooSoon(ListedLease):
    """25: names are content as soon as their pages may be written."""

    def poll(self) -> LeaseView | None:
        view = super().poll()
        if view is not None and self.direction is Direction.WRITE:
            self._lender.content.update(view.names)
        return view


class ForgetsGenerations(BrokenLender):
    """48: gives a page again that came back, in the same generation."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[int] = set()

    def seen_by(self, view: LeaseView) -> LeaseView:
        used = self.lost | {page for lease in self.out.values() for page in lease._view.pages}
        free = (page for page in range(10_000, 20_000) if page not in used)
        return view._replace(pages=tuple(next(free) for _ in view.pages))

    def take_back(self, lease: ListedLease) -> None:
        super().take_back(lease)
        if lease._viewed and not lease.marks:
            self.lost.update(lease._view.pages)


class RaisesInProgress(ListedLender):
    """R21: its progress raises."""

    def progress(self) -> Sequence[int]:
        raise BOOM


LENDERS: dict[str, tuple[str, Callable[[], ListedLender]]] = {
    "another view each time": ("12", lender_of(AnotherViewEachTime)),
    "polled after release": ("12", lender_of(PolledAfterRelease)),
    "released twice": ("15", lender_of(ReleasedTwice)),
    "raises on second release": ("R21", lender_of(RaisesOnSecondRelease)),
    "takes any mask": ("14", lender_of(TakesAnyMask)),
    "marked twice": ("14", lender_of(MarkedTwice)),
    "fails for a while": ("13", lender_of(FailsForAWhile)),
    "counts every row": ("17", lender_of(CountsEveryRow)),
    "bounds backwards": ("28", lender_of(BoundsBackwards)),
    "lends one page to all": ("1", LendsOnePageToAll),
    "lends unsealed": ("P1", LendsUnsealed),
    "names all always": ("R4", NamesAllAlways),
    "content too soon": ("25", lender_of(ContentTooSoon)),
    "forgets generations": ("48", ForgetsGenerations),
    "raises in progress": ("R21", RaisesInProgress),
}
"""Name → (the statement that its checker names, how to make it)."""


def case_of(make: Callable[[], ListedLender]) -> Callable[[], AbstractContextManager[LenderCase]]:
    @contextlib.contextmanager
    def maker() -> Iterator[LenderCase]:
        with listed_case(make()) as case:
            yield case

    return maker


# ---------------------------------------------------- what only the holder meets: answers that are no answers


class Nonsense(ListedLease):
    """A lease whose methods give what `answers` says instead of what their protocol does."""

    answers: dict[str, object]

    def poll(self) -> LeaseView | None:
        return self.answers.get("poll", super().poll())  # type: ignore[return-value]

    @property
    def failure(self) -> LeaseFailure | None:
        return self.answers.get("failure", super().failure)  # type: ignore[return-value]

    def bounds(self, arrived: Sequence[bool]) -> tuple[int, int]:
        return self.answers.get("bounds", super().bounds(arrived))  # type: ignore[return-value]


class NonsenseLender(BrokenLender):
    """Its leases and its progress answer with something else than their protocols say."""

    kind = Nonsense

    def __init__(self, name: str, answers: dict[str, object]) -> None:
        super().__init__(name)
        self.answers = answers

    def lend(self, direction: Direction, rows: int = 1, *, first_ordinal: int = 0, granted: bool = True) -> ListedLease:
        lease = super().lend(direction, rows, first_ordinal=first_ordinal, granted=granted)
        assert isinstance(lease, Nonsense)
        lease.answers = self.answers
        return lease

    def progress(self) -> Sequence[int]:
        answer = super().progress()
        return self.answers.get("progress", answer)  # type: ignore[return-value]


NONSENSE: tuple[dict[str, object], ...] = (
    {"progress": 5},
    {"progress": [["unhashable"]]},
    {"progress": (99, -1, "x", None)},
    {"poll": "a view"},
    {"poll": LeaseView("pool", 0, 1, (0, 1), (b"a", b"b"), (1,), (1, 1))},
    {"poll": LeaseView("pool", 0, 1, (0,), (b"a",), None, (1,))},  # type: ignore[arg-type]
    {"poll": None, "failure": "no room"},
    {"bounds": None},
    {"bounds": (1, 2, 3)},
    {"bounds": ("lo", "hi")},
)
