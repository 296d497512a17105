"""Faults that are planted on purpose into the workers or the follower of a row, to see that the table shows them."""

import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

from kvbus import subscriber
from kvbus.bus import NatsBus
from kvbus.bus_jetstream import JetStream
from kvbus.errors import BusError
from kvbus.ledger.admission import AdmissionGate
from kvbus.roles.asking import Asker
from kvbus.subscriber import Subscriber
from kvbus.transport import Delivery, NotStored

_FACTS = "kv.facts."


def _outbox_forgets() -> None:
    """Facts that the broker did not confirm are given up (against the outbox's promise)."""
    bus = cast("Any", NatsBus)
    store = bus.store

    async def stored(self: NatsBus, subject: str, data: bytes, **rest: object) -> object:
        try:
            return await store(self, subject, data, **rest)
        except BusError:
            if subject.startswith(_FACTS):
                return NotStored("full")
            raise

    bus.store = stored


def _ids_anew() -> None:
    """Each try to store an event has a message id of its own, so that the broker knows no repeat."""
    streams = cast("Any", JetStream)
    ask = streams._ask  # noqa: SLF001 - where a try is made

    async def anew(
        self: JetStream, subject: str, data: bytes, headers: Mapping[str, str] | None, wait_s: float
    ) -> object:
        if headers and subject.startswith(_FACTS):
            headers = {**headers, "Nats-Msg-Id": f"{headers['Nats-Msg-Id']}.{secrets.token_hex(4)}"}
        return await ask(self, subject, data, headers, wait_s)

    streams._ask = anew  # noqa: SLF001 - same


def _gaps_stay() -> None:
    """The follower takes what it hears, and never reads the log again."""
    follower = cast("Any", Subscriber)
    hear = follower._hear  # noqa: SLF001 - where a gap is seen

    async def heard(self: Subscriber, log: Any, delivery: Delivery) -> AsyncIterator[object]:  # noqa: ANN401 - its own
        if delivery.sequence > log.last:
            log.last = delivery.sequence - 1
        async for item in hear(self, log, delivery):
            yield item

    async def nothing(_self: Subscriber, _log: object) -> AsyncIterator[object]:
        items: tuple[object, ...] = ()
        for item in items:
            yield item

    follower._hear, follower._read = heard, nothing  # noqa: SLF001 - same


def _repeats_count() -> None:
    """The follower takes an event that the log holds twice as two."""
    log = cast("Any", subscriber)._Log  # noqa: SLF001 - what it remembers of a log
    note = log.note

    def noted(self: Any, delivery: Delivery) -> None:  # noqa: ANN401 - its own
        note(self, delivery)
        self.ids.clear()
        self.recent.clear()

    log.note = noted


def _runs_again() -> None:
    """A request that comes again, as it is redelivered or repeated, is run again (against P22)."""
    cast("Any", AdmissionGate).repeat = lambda *_args, **_rest: None


def _pages_stay() -> None:
    """A reader never says that it has let go, so that its source lends for ever (against P18)."""
    cast("Any", Asker).release = lambda *_args, **_rest: None


IN_WORKERS: Mapping[str, Callable[[], None]] = {
    "outbox-forgets": _outbox_forgets,
    "ids-anew": _ids_anew,
    "runs-again": _runs_again,
    "pages-stay": _pages_stay,
}
IN_FOLLOWER: Mapping[str, Callable[[], None]] = {"gaps-stay": _gaps_stay, "repeats-count": _repeats_count}
PLANTS: Mapping[str, Callable[[], None]] = {**IN_WORKERS, **IN_FOLLOWER}


def sow(name: str) -> None:
    """Plant a fault in this process; none under the empty name."""
    if name:
        PLANTS[name]()
