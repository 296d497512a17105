"""How a request ended in an earlier run is found in the facts: of ten minutes, however long the log is."""

from collections.abc import Sequence

import pytest

from kvbus.errors import BusError
from kvbus.events import EventsBatch, Header, TransferOutcome, TransferStep, encode
from kvbus.parts import Body
from kvbus.roles.admitting import HANDED_BACK
from kvbus.roles.past import QUEUED_MAX_S, SKEW_S, Past
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Topics
from kvbus.transport import Delivery

TOPICS = Topics()
SUBJECT = TOPICS.facts("b")
NOW_S = 1_000_000.0
LONG = 6_000
"""Facts in the log, one a second."""


class Counted(MemoryBus):
    """A connection that counts what is read through it."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.calls = self.messages = 0

    async def history(self, subject_filter: str, *, after_sequence: int = 0, most: int = 10_000) -> Sequence[Delivery]:
        found = await super().history(subject_filter, after_sequence=after_sequence, most=most)
        self.calls, self.messages = self.calls + 1, self.messages + len(found)
        return found


def said(body: Body, at_s: float, cause: str = "") -> bytes:
    return encode(Header(k=body.KIND, i="b", m="m0", e=1, s=1, t=int(at_s * 1e9), c=cause), body)


def outcome(transfer: str) -> TransferOutcome:
    return TransferOutcome(transfer=transfer, request_hash="0" * 32, source="a", destination="b", outcome="settled")


async def long_log() -> Counted:
    """A log of one fact a second until now, with an outcome after each hundred."""
    bus = Counted(MemoryBroker())
    for number in range(1, LONG + 1):
        body: Body = TransferStep(transfer="t", request_hash="0" * 32, step="x", text=f"{number}")
        cause = ""
        if number % 100 == 0:
            body, cause = outcome(f"t-{number}"), f"r.{number}"
        await bus.store(SUBJECT, said(body, NOW_S - LONG + number, cause), message_id=f"{number}")
    return bus


async def test_the_end_of_a_request_is_found_without_reading_what_is_older_than_the_queue_keeps() -> None:
    bus = await long_log()
    past = Past(bus, TOPICS, "b", lambda: NOW_S)
    assert await past.outcome("r.5900") == outcome("t-5900")
    assert await past.outcome("r.5500") == outcome("t-5500")
    assert await past.outcome("r.5901") is None
    window = int(QUEUED_MAX_S + SKEW_S)
    assert bus.messages < window + 1_000 + 100  # the window, one page before it, and the places that were looked at
    assert bus.calls < 60


async def test_what_is_told_later_is_read_when_it_is_asked_for() -> None:
    bus = await long_log()
    past = Past(bus, TOPICS, "b", lambda: NOW_S)
    assert await past.outcome("r.new") is None
    before = bus.messages
    inner = said(outcome("t-new"), NOW_S, "r.new")
    batch = EventsBatch(events=(inner, inner))
    await bus.store(SUBJECT, said(batch, NOW_S), message_id="new")
    await bus.store(SUBJECT, b"\xff", message_id="broken")
    assert await past.outcome("r.new") == outcome("t-new")
    assert bus.messages == before + 3  # and the last one read before, to see that it is the same log


# P22
@pytest.mark.parametrize("grown", [1, LONG, LONG + 10])
async def test_a_log_that_was_lost_and_grew_again_is_read_from_its_beginning(grown: int) -> None:
    bus = await long_log()
    past = Past(bus, TOPICS, "b", lambda: NOW_S)
    assert await past.outcome("r.mine") is None
    bus.broker = MemoryBroker()  # it came back without its store
    for number in range(1, grown):
        step = TransferStep(transfer="t", request_hash="0" * 32, step=HANDED_BACK, text=f"{number}")
        await bus.store(SUBJECT, said(step, NOW_S, "r.other"), message_id=f"new {number}")
    assert await past.outcome("r.mine") is None
    await bus.store(SUBJECT, said(outcome("t-mine"), NOW_S, "r.mine"), message_id="mine")
    assert await past.outcome("r.mine") == outcome("t-mine")
    assert await past.outcome("r.5900") == outcome("t-5900")  # what was known stays true
    assert past.handed_back("r.other") == grown - 1


@pytest.mark.parametrize("facts", [0, 1, 5])
async def test_a_short_log_is_read_from_its_beginning(facts: int) -> None:
    bus = MemoryBus()
    for number in range(facts):
        await bus.store(SUBJECT, said(outcome(f"t{number}"), NOW_S - 1, f"r{number}"), message_id=f"{number}")
    past = Past(bus, TOPICS, "b", lambda: NOW_S)
    for number in range(facts):
        assert await past.outcome(f"r{number}") == outcome(f"t{number}")
    assert await past.outcome("r") is None


async def test_a_log_that_holds_only_what_is_older_tells_nothing_and_costs_little() -> None:
    bus = await long_log()
    past = Past(bus, TOPICS, "b", lambda: NOW_S + 10_000)
    assert await past.outcome("r.4000") is None
    assert bus.messages < 1_100


async def test_while_the_broker_is_away_nobody_can_tell() -> None:
    bus = await long_log()
    past = Past(bus, TOPICS, "b", lambda: NOW_S)
    bus.cut()
    with pytest.raises(BusError):
        await past.outcome("r.5900")
    bus.restore()
    assert await past.outcome("r.5900") == outcome("t-5900")


# P22, P23
async def test_offers_that_were_handed_back_are_counted_by_request_and_are_no_end_of_it() -> None:
    bus = Counted(MemoryBroker())
    step = TransferStep(transfer="t-1", request_hash="0" * 32, step=HANDED_BACK, text="b is shutting down")
    for number, cause in enumerate(("r.1", "r.2", "r.1")):
        await bus.store(SUBJECT, said(step, NOW_S, cause), message_id=f"step {number}")
        await bus.store(SUBJECT, said(outcome("t-1"), NOW_S), message_id=f"outcome {number}")  # of nobody's request
    past = Past(bus, TOPICS, "b", lambda: NOW_S)
    assert await past.outcome("r.1") is None
    assert [past.handed_back(name) for name in ("r.1", "r.2", "r.3")] == [2, 1, 0]
