"""Code that is not the ledger's: backends and lenders, called so that a fault of theirs stays theirs (R21).

An exception of a backend stops its binding, an undocumented one of a lender stops that lender's domain, and neither
reaches the worker. An answer that is none (a list that cannot be read, a result of another kind) counts as an exception
would. What is stopped stays stopped; a binding retires once it retains nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvbus.ledger.binding import Binding
from kvbus.ledger.facts import Evidence, FactDetail, FailureClass
from kvbus.ledger.types import (
    Cancelled,
    Change,
    Containment,
    Delivered,
    Failed,
    Lease,
    LeaseFailure,
    LeaseView,
    Lender,
    SubmitMode,
)

T = TypeVar("T")


class Foreign:
    """The bindings and lenders of one holder, with their stopped and isolated states."""

    def __init__(self, bindings: Iterable[Binding], lenders: Iterable[Lender]) -> None:
        self.bindings = {binding.name: binding for binding in bindings}
        self.lenders = {lender.name: lender for lender in lenders}
        self.stopped_lenders: dict[str, str] = {}
        self.just_stopped: list[str] = []
        """Of those lenders, whose leases are still to be contained."""
        self.details: list[FactDetail] = []
        self.retiring: list[Binding] = []
        """Stopped bindings that still have their memory."""

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

    def hear(self, bindings: Iterable[Binding], tell: Callable[[Binding, Change], None]) -> None:
        """Ask each backend once, and tell what it lists, as far as it can be understood, before the next is asked.

        At a word that cannot be understood, its binding stops; one that has let its memory go is not asked.
        """
        for binding in bindings:
            if binding.hold_released:
                continue
            try:
                said = binding.backend.changes() or None
            except Exception as error:  # noqa: BLE001 - foreign code, contained to its binding
                self.stop(binding, f"changes raised {error!r}")
                continue
            if said is not None:  # mostly there is nothing, and the question is asked in each pass of each round
                for change in self._understood(binding, said):
                    tell(binding, change)

    def _understood(self, binding: Binding, said: Iterable[Change]) -> list[Change]:
        understood: list[Change] = []
        try:
            for change in said:
                if fault := fault_of(change):
                    self.contradict(binding, 0, fault)
                    self.stop(binding, fault)
                else:
                    understood.append(change)
        except Exception as error:  # noqa: BLE001 - foreign code, contained to its binding
            self.stop(binding, f"changes raised {error!r}")
        return understood

    def progress(self, lender: Lender) -> Sequence[int]:
        """Let a lender advance and return the leases that it names; the domain stopped where it names anything else."""
        try:
            said = tuple(lender.progress() or ())
        except Exception as error:  # noqa: BLE001 - foreign code, contained to its domain
            self.stop_lender(lender.name, f"progress raised {error!r}")
            return ()
        if said and not set(map(type, said)) <= _INT:
            self._no_answer(lender, "progress", said)
            return ()
        return said

    def poll(self, lease: Lease) -> LeaseView | LeaseFailure | None:
        """Return a lease's view, or why there is none; None while it waits, or with the domain stopped."""
        try:
            view: object = lease.poll()
        except Exception as error:  # noqa: BLE001 - foreign code, contained to its domain
            self.stop_lender(lease.lender.name, f"poll raised {error!r}")
            return None
        if view is None:
            return self._failure(lease)
        if isinstance(view, LeaseView) and _is_whole(view):
            return view
        self._no_answer(lease.lender, "poll", view)
        return None

    def _failure(self, lease: Lease) -> LeaseFailure | None:
        failure: object = self.call_lender(lease.lender, "failure", lambda: lease.failure)
        if failure is None or isinstance(failure, LeaseFailure):
            return failure
        self._no_answer(lease.lender, "failure", failure)
        return None

    def bounds(self, lease: Lease, arrived: Sequence[bool]) -> tuple[int, int]:
        """Return a write lease's resume bounds; empty, and the domain stopped, where its lender cannot say."""
        if self.stopped_lenders and lease.lender.name in self.stopped_lenders:
            return 0, 0
        try:
            said: object = lease.bounds(arrived)
        except Exception as error:  # noqa: BLE001 - foreign code, contained to its domain
            self.stop_lender(lease.lender.name, f"bounds raised {error!r}")
            return 0, 0
        if type(said) is tuple and len(said) == 2 and type(said[0]) is type(said[1]) is int:
            return said
        self._no_answer(lease.lender, "bounds", said)
        return 0, 0

    def _no_answer(self, lender: Lender, what: str, said: object) -> None:
        """Stop the domain of a lender whose answer is none, as if it had raised."""
        self.stop_lender(lender.name, f"{what} answered {said!r}")

    def stop(self, binding: Binding, text: str) -> None:
        """Accept no submissions on a binding any more; the first reason stands."""
        if binding.stopped is None:
            binding.stopped, binding.stop_text = FailureClass.BINDING_STOPPED, text
            self.retiring.append(binding)
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
            self.just_stopped.append(name)
            self.details.append(FactDetail(0, FailureClass.LENDER_STOPPED, f"{name}: {text}"))

    def retire(self) -> None:
        """Let the memory of stopped bindings go, one by one, once nothing is retained or unreturned (contract 55)."""
        self.retiring = [binding for binding in self.retiring if not self._retired(binding)]

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


_INT, _BOOL, _TUPLE = {int}, {bool}, {tuple}


def fault_of(change: object) -> str:
    """Return why something that a backend listed is no change that could mean anything; empty if it is one.

    What foreign code declares of its values proves nothing. A mask's types are compared as a set, since it has a row
    for each page.
    """
    if type(change) is not Change or type(change.ticket) is not int or type(change.attempt) is not int:
        return f"lists {change!r}, expected a Change that names ticket and attempt"
    result: object = change.result
    if isinstance(result, Delivered):
        good = _is_mask(result.arrived, result.length_bytes) and type(result.failure) is FailureClass
    elif isinstance(result, Failed):
        good = type(result.failure) is FailureClass
    else:
        good = result is None or (isinstance(result, Cancelled) and _is_mask(result.arrived, result.length_bytes))
    if not good:
        return f"gave T{change.ticket} a result that is none: {result!r}"
    evidence: object = change.evidence
    if evidence is not None and type(evidence) is not Evidence:
        return f"gave T{change.ticket} evidence that is none: {evidence!r}"
    return ""


def _is_mask(mask: object, length_bytes: object) -> bool:
    return type(mask) is tuple and set(map(type, mask)) <= _BOOL and type(length_bytes) is int


def _is_whole(view: LeaseView) -> bool:
    """Tell whether the columns of a view are columns, and of one length."""
    columns = (view.pages, view.counters, view.names, view.ordinals)
    return set(map(type, columns)) == _TUPLE and len(set(map(len, columns))) == 1
