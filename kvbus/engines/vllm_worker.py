"""The worker's side of the vLLM connector: hands each step's orders to the mover, and says once what has ended.

All calls come on the thread that runs vLLM's model; none of them waits. Copying is the mover's, on a thread of its own:
into blocks that vLLM keeps until it hears that the load has ended, and out of blocks that it keeps while their request
runs, or is held.
"""

from dataclasses import dataclass, field
from typing import Protocol

from kvbus.engines.vllm_orders import NO_ORDERS, Load, Orders, Report, Store


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load has ended, and touches its blocks no more; `failed` are those that did not come."""

    request_id: str
    failed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """A store has ended, and reads its blocks no more."""

    request_id: str


class Copying(Protocol):
    """The mover, as this side needs it."""

    def load(self, load: Load) -> None:
        """Begin a load; it ends in `take_ended`, whatever happens."""

    def store(self, store: Store) -> None:
        """Begin a store; it ends in `take_ended`, whatever happens."""

    def void(self, request_id: str) -> None:
        """Let nothing count of a store that has not ended: its blocks are about to be written."""

    def forget(self) -> None:
        """Have all names forgotten before anything that begins later."""

    def take_ended(self) -> list[Loaded | Stored]:
        """Return what has ended since the last call."""


@dataclass(slots=True)
class WorkerSide:
    """See the module's head. A request's id stands in `_storing` from its store's order until that has ended."""

    mover: Copying
    _orders: Orders = NO_ORDERS
    _storing: set[str] = field(default_factory=set)
    _held: set[str] = field(default_factory=set)
    _over: set[str] = field(default_factory=set)

    @property
    def is_busy(self) -> bool:
        """Whether a store or a held request's end is still awaited here."""
        return bool(self._storing or self._held or self._over)

    def before_forward(self, orders: Orders) -> None:
        """Blocks change hands with this step: void what is copied out of them before they are written."""
        for request_id in orders.voided:
            self.mover.void(request_id)

    def begin_loads(self, orders: Orders) -> None:
        """Begin this step's loads."""
        if orders.forget:
            self.mover.forget()
        for load in orders.loads:
            self.mover.load(load)

    def begin_stores(self, orders: Orders) -> None:
        """Begin this step's stores: the forward pass has filled their blocks. And note whose blocks are held."""
        for store in orders.stores:
            self._storing.add(store.request_id)
            self.mover.store(store)
        for request_id in orders.held:
            # One whose copy ended meanwhile is let go with this very step.
            (self._held if request_id in self._storing else self._over).add(request_id)

    def report(self) -> Report | None:
        """Return what has ended since the last report, None where nothing has."""
        ended = self.mover.take_ended()
        if not ended and not self._over:
            return None
        report = Report(sent=self._over)
        self._over = set()
        for one in ended:
            if isinstance(one, Loaded):
                report.received.add(one.request_id)
                report.failed_blocks.update(one.failed)
                continue
            self._storing.discard(one.request_id)
            if one.request_id in self._held:
                self._held.discard(one.request_id)
                report.sent.add(one.request_id)
            else:
                report.stored.add(one.request_id)
        return report
