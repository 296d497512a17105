"""The backend of leases that the local engine holds: it fills or reads pages itself and says when it has stopped.

No bytes move here. An attempt is open from the moment at which the engine gets the pages until it says `commit`,
`abandon` or `release` over its socket (that same operation completed), or until its process is proved dead.
"""

from collections.abc import Sequence

from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Change, Delivered, Failed, Order, Result, SubmissionRejectedError


class LocalBackend:
    """Keeps the engine's open attempts; single-threaded, on the worker's loop."""

    def __init__(self, *, name: str) -> None:
        self._name = name
        self._open: dict[int, Order] = {}
        self._is_shut = False
        self._changes: list[Change] = []

    @property
    def name(self) -> str:
        """The binding's name."""
        return self._name

    def submit(self, order: Order) -> None:
        """Note that the engine is about to get these pages."""
        if self._is_shut:
            raise SubmissionRejectedError(FailureClass.SHUTDOWN, "this worker is stopping")
        self._open[order.ticket] = order

    def changes(self) -> Sequence[Change]:
        """Return what the engine has said since the last call."""
        if not self._changes:  # asked in each pass of each round
            return ()
        changes, self._changes = self._changes, []
        return changes

    def completed(self, ticket: int, *, whole: bool, page_bytes: int) -> None:
        """The engine says that it touches the lease's pages no more; `whole`: it filled or read all of them."""
        order = self._open.pop(ticket, None)
        if order is not None:
            rows = len(order.view.pages)
            result: Result = Delivered((whole,) * rows, page_bytes * rows if whole else 0)
            self._changes.append(Change(ticket, order.attempt, result, Evidence.COMPLETED))

    def engine_died(self) -> None:
        """The engine's process has ended, proved by its pidfd: what it held can be touched by nobody any more."""
        for ticket, order in self._open.items():
            result = Failed(FailureClass.ENGINE_LOST, "the engine's process has ended")
            self._changes.append(Change(ticket, order.attempt, result, Evidence.PROCESS_DEAD))
        self._open.clear()

    def cancel(self, ticket: int, attempt: int) -> None:
        """Do nothing: the engine ends by itself, or its process does."""

    def isolate(self, peer: str) -> None:
        """Do nothing: there is no peer but the engine."""

    def shutdown(self, budget_s: float) -> Sequence[tuple[int, int]]:
        """Take nothing new; return the attempts that the engine has not ended."""
        self._is_shut = True
        del budget_s
        return [(ticket, order.attempt) for ticket, order in self._open.items()]

    def release_hold(self) -> None:
        """Nothing is registered here."""
