"""Code that is not the ledger's: backends and lenders, called so that a fault of theirs stays theirs (R21).

An exception of a backend stops its binding, an undocumented one of a lender stops that lender's domain, and neither
reaches the worker. What is stopped stays stopped; a binding retires once it retains nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import FactDetail, FailureClass
from kvbus.ledger.types import Containment, Lease, Lender, SubmitMode

T = TypeVar("T")


class Foreign:
    """The bindings and lenders of one holder, with their stopped and isolated states."""

    def __init__(self, bindings: Iterable[Binding], lenders: Iterable[Lender]) -> None:
        self.bindings = {binding.name: binding for binding in bindings}
        self.lenders = {lender.name: lender for lender in lenders}
        self.stopped_lenders: dict[str, str] = {}
        self.details: list[FactDetail] = []
        self._retiring: list[Binding] = []

    def binding_for(self, lease: Lease, mode: SubmitMode) -> Binding:
        """Return the binding of a lease that is being taken; ValueError where lease, mode and holder do not fit."""
        binding = self.bindings.get(mode.binding)
        if binding is None:
            raise ValueError(f"no binding named {mode.binding!r}; there are {sorted(self.bindings)}")
        if not lease.direction == mode.direction == binding.direction:
            directions = f"lease {lease.direction!r}, mode {mode.direction!r}, binding {binding.direction!r}"
            raise ValueError(f"lease, mode and binding must share one direction, got {directions}")
        if lease.lender.name not in self.lenders:
            raise ValueError(f"no lender named {lease.lender.name!r}; there are {sorted(self.lenders)}")
        return binding

    def call(self, binding: Binding, what: str, call: Callable[[], T]) -> T | None:
        """Return what a backend's method returns; None, and the binding stopped, where it raised."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - foreign code, contained to its binding
            self.stop(binding, f"{what} raised {error!r}")
            return None

    def call_lender(self, lender: Lender, what: str, call: Callable[[], T]) -> T | None:
        """Return what a lender's or lease's method returns; None, and the domain stopped, where it raised."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - foreign code, contained to its domain
            self.stop_lender(lender.name, f"{what} raised {error!r}")
            return None

    def bounds(self, lease: Lease, arrived: Sequence[bool]) -> tuple[int, int]:
        """Return a write lease's resume bounds; empty, and the domain stopped, where its lender cannot say."""
        if lease.lender.name in self.stopped_lenders:
            return 0, 0
        return self.call_lender(lease.lender, "bounds", lambda: lease.bounds(arrived)) or (0, 0)

    def stop(self, binding: Binding, text: str) -> None:
        """Accept no submissions on a binding any more; the first reason stands."""
        if binding.stopped is None:
            binding.stopped, binding.stop_text = FailureClass.BINDING_STOPPED, text
            self._retiring.append(binding)
            self.details.append(FactDetail(0, FailureClass.BINDING_STOPPED, f"{binding.name}: {text}"))

    def contradict(self, binding: Binding, ticket: int, text: str) -> None:
        """Count and report that a backend said something that cannot be (contract 44)."""
        binding.contradictions += 1
        self.details.append(FactDetail(ticket, FailureClass.CONTRADICTION, f"{binding.name}: {text}"))

    def isolate(self, binding: Binding, peer: str, text: str) -> None:
        """Submit nothing more to a peer on a binding, and have the backend end what runs with it (R18)."""
        if peer in binding.isolated:
            return
        binding.isolated.add(peer)
        binding.isolations += 1
        self.details.append(FactDetail(0, FailureClass.PEER_LOST, f"{binding.name}: {text}", peer))
        self.call(binding, "isolate", lambda: binding.backend.isolate(peer))

    def contain(self, binding: Binding, peer: str, text: str) -> None:
        """Act on an uncertain submission by the binding's containment level (R14)."""
        if binding.containment is Containment.STOP_BINDING or not peer:
            self.stop(binding, text)
        else:
            self.isolate(binding, peer, text)

    def stop_lender(self, name: str, text: str) -> None:
        """Stop a lender's domain; what it lent is retained from now on."""
        if name not in self.stopped_lenders:
            self.stopped_lenders[name] = text
            self.details.append(FactDetail(0, FailureClass.LENDER_STOPPED, f"{name}: {text}"))

    def retire(self) -> None:
        """Let the memory of stopped bindings go, one by one, once nothing is retained or unreturned (contract 55)."""
        if self._retiring:
            self._retiring = [binding for binding in self._retiring if not self._retired(binding)]

    def _retired(self, binding: Binding) -> bool:
        left = self.call(binding, "shutdown", lambda: binding.backend.shutdown(0.0))
        if left is None or left or binding.open_attempts or binding.unreturned:
            return False
        try:
            binding.backend.release_hold()
        except Exception as error:  # noqa: BLE001 - foreign code: not tried again, the memory stays registered
            text = f"{binding.name}: release_hold raised {error!r}"
            self.details.append(FactDetail(0, FailureClass.BINDING_STOPPED, text))
        else:
            binding.hold_released = True
        return True
