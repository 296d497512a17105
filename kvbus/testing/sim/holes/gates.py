"""Gates: where a script holds what is under way. One that is not armed lets everything through."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from kvbus.errors import PeerError
from kvbus.events import Event, decode, decode_all
from kvbus.testing.sim.broker import Listener, SimBroker, Waiting
from kvbus.testing.sim.bus import SimBus
from kvbus.testing.sim.loop import Actor, SimLoop
from kvbus.testing.sim.plane import SimReader
from kvbus.testing.sim.settings import Rates
from kvbus.testing.sim.trail import Trail
from kvbus.topics import Family
from kvbus.transport import Delivery, NotStored, Stored

Mode = Literal["hold", "drop", "double"]
ACK = "ack"
"""The kind under which a gate sees that a request is taken off the queue."""


@dataclass(slots=True, eq=False)
class Gate:
    """Holds what matches, up to `most` messages; `double`: one copy goes on.

    With a receiver, the name of a process, it stands before that one and holds what is published; else it stands before
    the broker, and holds questions and answers.
    """

    kind: str
    sender: str
    mode: Mode
    most: int
    receiver: str = ""
    held: list[Callable[[], object]] = field(default_factory=list)
    seen: int = 0
    armed: bool = True

    def matches(self, kind: str, sender: str) -> bool:
        """Whether a message meets this gate."""
        return self.armed and kind == self.kind and not self.receiver and self.sender in {"", sender}

    def take(self, go_on: Callable[[], object]) -> None:
        """Take one message; the last one disarms the gate."""
        self.seen += 1
        self.armed = self.seen < self.most
        if self.mode != "drop":
            self.held.append(go_on)
        if self.mode == "double":
            go_on()

    def open(self) -> None:
        """Let everything go on, and hold nothing more."""
        self.armed = False
        held, self.held = self.held, []
        for go_on in held:
            go_on()


class GatedBroker(SimBroker):
    """The simulated broker, with gates before it, and a note in the trail for each question and answer."""

    def __init__(self, loop: SimLoop, seed: str, rates: Rates, trail: Trail) -> None:
        super().__init__(loop, seed, rates, trail)
        self.gates: list[Gate] = []
        self.decisions: list[Event] = []

    def send(self, delivery: Delivery, answer: Callable[[bytes], None] | None = None) -> int:
        """See `SimBroker`; the sender of a held message does not notice."""
        event = _event(delivery.data)
        send = super().send
        if event is None or answer is None:
            return send(delivery, answer)
        to, reply = delivery.subject, answer

        def answered(said: bytes) -> None:
            self._pass(_event(said), "its asker", lambda: reply(said))

        gate = self._gate(event)
        if gate is None:
            self._note(event, to, "")
            return send(delivery, answered)
        self._note(event, to, gate.mode)
        gate.take(lambda: send(delivery, answered))
        return 1

    def store(self, subject: str, data: bytes, *rest: Any, **more: Any) -> Stored | NotStored:  # noqa: ANN401 - handed on
        """See `SimBroker`; decisions are kept, for the scripts."""
        stored = super().store(subject, data, *rest, **more)
        if isinstance(stored, Stored) and not stored.duplicate and self.topics.parse(subject).family is Family.SETTLE:
            self.decisions += [event for event in decode_all(data) if isinstance(event, Event)]
        return stored

    def forget_last(self, instance: str) -> None:
        """Lose the newest decision of an instance, as a broker does whose power failed before it was on disk."""
        kept = self._log.kept[self.topics.settle(instance)]
        kept.messages.pop()
        self.trail.note("world", f"the broker loses its power, and the last decision of {instance}")
        self.life += 1

    def remove(self, waiting: Waiting) -> bool:
        """See `SimBroker`; False where it is held, and the request so still there."""
        gate = next((gate for gate in self.gates if gate.matches(ACK, "")), None)
        if gate is None:
            return super().remove(waiting)
        self.trail.note("script", f"an ack of request {waiting.sequence} is held")
        remove = super().remove
        gate.take(lambda: remove(waiting))
        return False

    def _arrive(self, listener: Listener, delivery: Delivery, answer: Callable[[bytes], None] | None) -> None:
        go_on, receiver = super()._arrive, _owner(listener)
        for gate in self.gates if answer is None else ():
            event = _event(delivery.data) if gate.armed and gate.receiver == receiver else None
            if event is not None and event.header.k == gate.kind:
                self._note(event, receiver, gate.mode)
                gate.take(lambda: go_on(listener, delivery, answer))
                return
        go_on(listener, delivery, answer)

    def _pass(self, event: Event | None, to: str, go_on: Callable[[], object]) -> None:
        gate = self._gate(event) if event is not None else None
        if event is not None:
            self._note(event, to, gate.mode if gate else "")
        if gate is None:
            go_on()
        else:
            gate.take(go_on)

    def _gate(self, event: Event) -> Gate | None:
        kind, sender = event.header.k, event.header.i
        return next((gate for gate in self.gates if gate.matches(kind, sender)), None)

    def _note(self, event: Event, to: str, mode: str) -> None:
        what = {"hold": " : held", "drop": " : lost", "double": " : and a copy is held"}.get(mode, "")
        self.trail.note("bus", f"{event.header.i} sends {event.header.k} to {to}{what}")


def _owner(listener: Listener) -> str:
    bus = getattr(listener, "_bus", None)
    return bus.actor.name if isinstance(bus, SimBus) else ""


def _event(data: bytes) -> Event | None:
    try:
        return decode(data)
    except PeerError:
        return None


class PlaneGate:
    """Holds steps of one reader's gets: `_half` and `_land` touch bytes, `_verify` reads generations, `_closed` ends.

    A get that stands before its first half has its second half still before it.
    """

    def __init__(self, loop: SimLoop, device: Actor, reader: SimReader, steps: tuple[str, ...]) -> None:
        self.held: list[Callable[[], object]] = []
        self._loop = loop
        self._device = device
        self._reader = reader
        self._steps = frozenset((*steps, "_land") if "_half" in steps else steps)
        reader.gate = self._meets

    def open(self) -> None:
        """Let the gets go on."""
        self._reader.gate = None
        held, self.held = self.held, []
        for go_on in held:
            go_on()

    def pass_others(self) -> None:
        """Hold nothing more, and keep what is held."""
        self._reader.gate = None

    def _meets(self, call: Callable[..., None], args: tuple[object, ...]) -> bool:
        if call.__name__ not in self._steps:
            return False
        self.held.append(lambda: self._loop.post(self._device, call, *args))
        return True
