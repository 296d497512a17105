"""A backend of your own, and the check that it keeps the ownership contract: pages come from a store in memory."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Change, Delivered, Direction, LeaseView, Order, SubmissionRejectedError
from kvbus.testing.contracts import BackendCase, check_backend

PAGE_BYTES = 64


class StoreBackend:
    """Fills write leases with pages that a store keeps under their names."""

    def __init__(self, pool: bytearray, store: Mapping[bytes, bytes]) -> None:
        self._pool = pool
        self._store = store
        self._changes: list[Change] = []
        self._isolated: set[str] = set()
        self._is_shut = False

    @property
    def name(self) -> str:
        """A name for facts and texts."""
        return "store"

    def submit(self, order: Order) -> None:
        """Copy what the store has: here and now, so that nothing is under way when this returns."""
        if order.direction is not Direction.WRITE:
            raise SubmissionRejectedError(FailureClass.GRANT_REFUSED, "a store fills write leases only")
        if self._is_shut:
            raise SubmissionRejectedError(FailureClass.SHUTDOWN, "the store is closed")
        if order.peer in self._isolated:
            raise SubmissionRejectedError(FailureClass.PEER_LOST, f"{order.peer} is isolated")
        arrived = []
        for name, page in zip(order.view.names, order.view.pages, strict=True):
            content = self._store.get(name)
            if content is not None:
                self._pool[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = content
            arrived.append(content is not None)
        # The result says what counts. The evidence says that nobody touches the pages any more: true, since the copy
        # above has ended. A backend that goes on in the background lists it only when that has ended.
        result = Delivered(tuple(arrived), PAGE_BYTES * sum(arrived))
        self._changes.append(Change(order.ticket, order.attempt, result, Evidence.COMPLETED))

    def changes(self) -> Sequence[Change]:
        """Return and forget what changed since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def cancel(self, ticket: int, attempt: int) -> None:
        """Nothing is ever under way. Where something is: ask it to stop, and list no evidence for having asked."""

    def isolate(self, peer: str) -> None:
        """Take nothing more for that peer."""
        self._isolated.add(peer)

    def shutdown(self, budget_s: float) -> Sequence[tuple[int, int]]:
        """Take nothing more; return the attempts without evidence, of which there are none."""
        del budget_s
        self._is_shut = True
        return ()

    def release_hold(self) -> None:
        """Nothing is registered."""


@contextmanager
def store_backend() -> Iterator[BackendCase]:
    """Make a fresh backend, and say how to order from it and what the pages of an order hold."""
    pool = bytearray(16 * PAGE_BYTES)
    store = {bytes([ticket]) * 16: bytes([ticket]) * PAGE_BYTES for ticket in range(1, 5)}

    def order(ticket: int, attempt: int, peer: str) -> Order:
        names = (bytes([ticket]) * 16, b"not in the store")
        view = LeaseView("pool", 0, 1, (0, 1), names, (2 * ticket, 2 * ticket + 1), (1, 1))
        return Order(ticket, attempt, view, Direction.WRITE, "hint", peer, None)

    def content(order: Order) -> bytes:
        return b"".join(bytes(pool[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]) for page in order.view.pages)

    yield BackendCase(StoreBackend(pool, store), order, content=content)


if __name__ == "__main__":
    check_backend(store_backend)
    print("the store keeps the contract")
