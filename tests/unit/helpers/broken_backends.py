"""Backends as a third party may write them: each breaks one promise, and says in its docstring which."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Change, Delivered, Failed, Order, SubmissionRejectedError
from kvbus.testing.cases import BackendCase
from kvbus.testing.ledger_parts import ManualBackend
from tests.unit.helpers.contract_makers import order_of

BOOM = RuntimeError("the vendor's library gave up")


class Vendor(ManualBackend):
    """A backend whose work a test lets end by `serve`."""

    def serve(self, ticket: int) -> None:
        """End an order as this vendor does."""
        self.deliver(ticket)


class Raises(Vendor):
    """R21: one of its methods raises."""

    def __init__(self, method: str) -> None:
        super().__init__(f"raises in {method}")
        self.faults.plant(method, BOOM)


class AnswersForStrangers(Vendor):
    """44: answers for a ticket and for an attempt that it was never asked about."""

    def serve(self, ticket: int) -> None:
        mask = (True,) * len(self.orders[ticket].view.pages)
        self.tell(Change(ticket + 40, 1, Delivered(mask, 1), Evidence.COMPLETED))
        self.tell(Change(ticket, 7, Delivered(mask, 1), Evidence.COMPLETED))


class ContradictsItself(Vendor):
    """44: says that the bytes are whole, then that they are not, then that access has ended."""

    def serve(self, ticket: int) -> None:
        self.deliver(ticket, evidence=None)
        self.fail(ticket)
        self.end(ticket)


class NeverAnswers(Vendor):
    """41: takes an order and is silent."""

    def serve(self, ticket: int) -> None:
        """Say nothing."""


class GivesNoEvidence(Vendor):
    """41: tells the result and believes that this says something about memory."""

    def serve(self, ticket: int) -> None:
        self.deliver(ticket, evidence=None)


class MiscountsRows(Vendor):
    """31: its mask has a row too many."""

    def serve(self, ticket: int) -> None:
        self.deliver(ticket, (True,) * (len(self.orders[ticket].view.pages) + 1))


class NeverForgets(Vendor):
    """29: lists again what it has listed."""

    def changes(self) -> Sequence[Change]:
        told = tuple(super().changes())
        self._changes = list(told)
        return told


class TakesCancelForEvidence(Vendor):
    """40: reports access end because it was asked to stop."""

    def cancel(self, ticket: int, attempt: int) -> None:
        super().cancel(ticket, attempt)
        if (ticket, attempt) in self.open:
            self.answer(ticket, Failed(FailureClass.CANCELLED, "cancelled"), Evidence.COMPLETED)


class RejectsAndGoesOn(Vendor):
    """32: says that nothing escaped, and reports of the attempt afterwards."""

    def submit(self, order: Order) -> None:
        super().submit(order)
        self.serve(order.ticket)
        raise SubmissionRejectedError(FailureClass.TRANSPORT, "not now")


class ForgetsWhatIsOpen(Vendor):
    """54: its shutdown names nothing, whatever is still without evidence."""

    def shutdown(self, budget_s: float) -> Sequence[tuple[int, int]]:
        super().shutdown(budget_s)
        return ()


class NeverSubmittedButArrived(Vendor):
    """43: rows arrived of an attempt that it says was never submitted."""

    def serve(self, ticket: int) -> None:
        self.deliver(ticket, evidence=Evidence.NEVER_SUBMITTED)


class TakesWorkWhenShut(Vendor):
    """54: goes on taking orders after its shutdown."""

    def submit(self, order: Order) -> None:
        self._is_shut = False
        super().submit(order)


class TalksNonsense(Vendor):
    """29: lists things that are no changes."""

    def __init__(self, nonsense: object) -> None:
        super().__init__(f"lists {nonsense!r}")
        self._nonsense = nonsense

    def serve(self, ticket: int) -> None:
        nonsense = self._nonsense
        if isinstance(nonsense, Change):
            nonsense = Change(ticket, 1, nonsense.result, nonsense.evidence, nonsense.text)
        self._changes.append(nonsense)  # type: ignore[arg-type]


class ListsNothingIterable(Vendor):
    """29: its list of changes is no list."""

    def changes(self) -> Sequence[Change]:
        return 5  # type: ignore[return-value]


class BreaksOffMidway(Vendor):
    """R21: its list raises while it is read."""

    def changes(self) -> Sequence[Change]:
        def some() -> Iterator[Change]:
            yield from super(BreaksOffMidway, self).changes()
            raise BOOM

        return some()  # type: ignore[return-value]


class Blocks(Vendor):
    """29: one call does not return until the test ends."""

    def __init__(self) -> None:
        super().__init__("blocks")
        self.let_go = threading.Event()

    def changes(self) -> Sequence[Change]:
        self.let_go.wait(60.0)
        return super().changes()


NONSENSE: tuple[object, ...] = (
    None,
    "delivered",
    Change(1, 1, "delivered", Evidence.COMPLETED),  # type: ignore[arg-type]
    Change(1, 1, Delivered(None, 0), Evidence.COMPLETED),  # type: ignore[arg-type]
    Change(1, 1, Delivered((True, True), 0), "completed"),  # type: ignore[arg-type]
    Change(1, 1, Failed(None, "?"), Evidence.COMPLETED),  # type: ignore[arg-type]
)

BROKEN: dict[str, tuple[str, Callable[[], Vendor]]] = {
    **{
        f"raises in {method}": ("R21", lambda method=method: Raises(method))  # type: ignore[misc]
        for method in ("submit", "changes", "cancel", "isolate", "shutdown", "release_hold")
    },
    **{f"lists {one!r}": ("", lambda one=one: TalksNonsense(one)) for one in NONSENSE},  # type: ignore[misc]
    "answers for strangers": ("44", AnswersForStrangers),
    "contradicts itself": ("44", ContradictsItself),
    "never answers": ("41", NeverAnswers),
    "gives no evidence": ("41", GivesNoEvidence),
    "miscounts rows": ("31", MiscountsRows),
    "never forgets": ("29", NeverForgets),
    "takes a cancel for evidence": ("40", TakesCancelForEvidence),
    "rejects and goes on": ("32", RejectsAndGoesOn),
    "forgets what is open": ("54", ForgetsWhatIsOpen),
    "never submitted but arrived": ("43", NeverSubmittedButArrived),
    "takes work when shut": ("54", TakesWorkWhenShut),
    "lists no list": ("R21", ListsNothingIterable),
    "breaks off midway": ("R21", BreaksOffMidway),
}
"""Name → (the statement that its checker names; "" where several fit, how to make it)."""


def case_of(make: Callable[[], Vendor]) -> Callable[[], AbstractContextManager[BackendCase]]:
    """A maker of cases over a broken backend; it waits briefly, since what is missing never comes."""

    @contextlib.contextmanager
    def maker() -> Iterator[BackendCase]:
        backend = make()
        yield BackendCase(
            backend,
            order_of,
            end=lambda order: backend.serve(order.ticket),
            isolates=False,
            deadline_s=0.05,
        )

    return maker
