"""`kvbus stage`: how far a transfer is, what is asked again, and the statuses that scripts tell from."""

import asyncio
import io
import time
from collections.abc import AsyncIterator

import pytest
from rich.console import Console

from kvbus.bus_access import DeniedError
from kvbus.commands.following import STAGES, Followed, newest, progress_bar
from kvbus.commands.stage import exit_status
from kvbus.errors import BusError
from kvbus.events import (
    Event,
    Header,
    LeaseGranted,
    OutcomeFixed,
    TransferOutcome,
    TransferStep,
    column,
    decode,
    encode,
)
from kvbus.handles import LOST, UNASKED, Verdict
from kvbus.parts import Body
from kvbus.patience import NO_SUCH_STREAM, ask_until
from kvbus.publisher import Publisher, TransferHandle
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Topics
from kvbus.transport import NotStored, Stored
from tests.waiting import until

HASH = "9f3c" + "0" * 28
TRANSFER = "b-00000007-1"
TOPICS = Topics()


def event(body: Body, *, instance: str = "b", member: str = "m0", at_ns: int = 5, number: int = 1) -> Event:
    return decode(encode(Header(k=body.KIND, i=instance, m=member, e=7, s=number, t=at_ns), body))


def step(name: str, *, request_hash: str = HASH) -> TransferStep:
    return TransferStep(transfer=TRANSFER, request_hash=request_hash, step=name)


def leased(pages: int, ticket: int = 3) -> LeaseGranted:
    return LeaseGranted(
        ticket=ticket,
        transfer=TRANSFER,
        rank=0,
        direction="write",
        lender="pool",
        peer="a",
        pages=column(range(pages), 4),
        counters=column(range(pages), 8),
    )


def arrived(pages: int, length_bytes: int, ticket: int = 3) -> OutcomeFixed:
    return OutcomeFixed(
        ticket=ticket,
        attempt=1,
        result="delivered",
        arrived=pages,
        length_bytes=length_bytes,
        evidence="completed",
    )


def outcome(word: str) -> TransferOutcome:
    told = {"transfer": TRANSFER, "request_hash": HASH, "source": "a", "destination": "b", "outcome": word}
    return TransferOutcome.model_validate(told)


# ------------------------------------------------------------------------------------------------------- how far it is


def test_a_transfer_is_followed_by_its_steps_pages_and_bytes() -> None:
    seen = Followed("b", HASH)
    assert (seen.step, seen.reached, seen.amount) == ("queued", None, "")

    assert seen.hear(event(step("leased")))
    assert seen.hear(event(leased(31)))
    assert (seen.reached, seen.amount) == (STAGES.index("leased") + 1, "0/31 pages")

    assert seen.hear(event(arrived(12, 800_000)))
    assert (seen.pages_moved, seen.length_bytes, seen.amount) == (12, 800_000, "12/31 pages, 800.0 kB")


def test_pages_of_all_members_are_added_up() -> None:
    seen = Followed("b", HASH)
    seen.hear(event(step("leased")))
    for member in ("m0", "m1"):
        seen.hear(event(leased(10), member=member))
        seen.hear(event(arrived(10, 100), member=member))
    assert seen.amount == "20/20 pages, 200 B"


def test_what_is_about_another_transfer_or_from_before_changes_nothing() -> None:
    seen = Followed("b", HASH, since_ns=5)
    strange = [
        event(step("moving", request_hash="0" * 32)),
        event(step("moving"), instance="a"),
        event(step("moving"), at_ns=4),
        event(leased(3)),  # no step has named the transfer yet
        event(arrived(3, 3)),
    ]
    assert not any(map(seen.hear, strange))
    assert seen == Followed("b", HASH, since_ns=5)


@pytest.fixture
async def memory() -> AsyncIterator[MemoryBus]:
    bus = MemoryBus(MemoryBroker())
    yield bus
    await bus.close()


async def test_the_bar_shows_pages_and_bytes_as_the_facts_tell_them_and_leaves_no_line_behind(
    memory: MemoryBus,
) -> None:
    numbers = iter(range(1, 99))

    async def tell(body: Body) -> None:
        one = event(body, at_ns=time.time_ns(), number=next(numbers))
        await memory.store(TOPICS.facts("b"), encode(one.header, body), message_id=one.header.event_id)

    await tell(step("moved"))  # of an earlier transfer: passed over
    output = io.StringIO()
    screen = Console(file=output, force_terminal=True, width=120)
    followed = Followed("b", HASH, time.time_ns(), await newest(memory, TOPICS))
    assert followed.after == 1
    async with progress_bar(memory, TOPICS, followed, screen):
        for body in (step("leased"), leased(31), step("moving"), arrived(31, 2_031_616)):
            await tell(body)
        await until(lambda: "31/31 pages, 2.0 MB" in output.getvalue())
    assert "moved" not in output.getvalue()
    assert output.getvalue().endswith("\x1b[2K"), "the bar is wiped"
    assert "\x1b[?25h" in output.getvalue(), "the cursor is shown again"


async def test_an_instance_that_has_said_nothing_yet_is_followed_from_the_end_of_what_others_said(
    memory: MemoryBus,
) -> None:
    assert await newest(memory, TOPICS) == 0
    for number in range(3):
        one = event(step("moved"), instance="another", number=number)
        await memory.store(TOPICS.facts("another"), encode(one.header, step("moved")), message_id=f"{number}")
    assert await newest(memory, TOPICS) == 3
    memory.cut()
    assert await newest(memory, TOPICS) == 0


async def test_there_is_no_bar_where_nobody_looks(memory: MemoryBus) -> None:
    output = io.StringIO()
    async with progress_bar(memory, TOPICS, Followed("b", HASH), Console(file=output)):
        pass
    assert not output.getvalue()


# ---------------------------------------------------------------------------------------------------- asking again


class Electing(MemoryBus):
    """A bus to a cluster that has no leader for so many questions; it is connected all the while."""

    def __init__(self, broker: MemoryBroker, losses: int) -> None:
        super().__init__(broker)
        self.losses = losses
        self.heard: list[str] = []

    async def store(
        self, subject: str, data: bytes, *, message_id: str, wait_s: float = 5.0, after: int | None = None
    ) -> Stored | NotStored:
        self.heard.append(subject)
        if len(self.heard) <= self.losses:
            raise BusError("the broker did not confirm in time; store again with the same id", subject=subject)
        return await super().store(subject, data, message_id=message_id, wait_s=wait_s, after=after)


async def asked(bus: MemoryBus, wait_s: float, said: list[str]) -> TransferHandle:
    async with Publisher(bus=bus, topics=TOPICS) as publisher:
        return await ask_until(
            lambda: publisher.transfer(source="a", destination="b", prompt="text"), wait_s, said.append
        )


async def test_a_request_is_put_again_while_a_leader_is_elected() -> None:
    bus, said = Electing(MemoryBroker(), losses=2), list[str]()

    handle = await asked(bus, 30, said)

    assert len(bus.heard) == 3
    assert handle.request_hash in bus.heard[-1]
    assert len(said) == 2
    assert await bus.queued(TOPICS.transfer_filter("b")) == 1
    await bus.close()


async def test_it_is_put_again_for_as_long_as_the_budget_and_no_longer() -> None:
    bus = Electing(MemoryBroker(), losses=10**6)
    with pytest.raises(BusError, match="did not confirm"):
        await asked(bus, 2.4, [])
    assert len(bus.heard) >= 2
    await bus.close()


async def test_a_lost_connection_is_waited_for_and_the_request_then_put() -> None:
    broker, said = MemoryBroker(), list[str]()
    bus = MemoryBus(broker)
    async with Publisher(bus=bus, topics=TOPICS) as publisher:
        bus.cut()
        asking = asyncio.ensure_future(
            ask_until(lambda: publisher.transfer(source="a", destination="b", prompt="text"), 30, said.append)
        )
        await until(lambda: said)
        assert said[0] == UNASKED
        bus.restore()
        handle = await asking
    assert (await handle.verdict(0)).verdict == "queued"
    await bus.close()


@pytest.mark.parametrize(
    "error", [DeniedError("no rights"), BusError("JetStream refused", code=NO_SUCH_STREAM)], ids=["denied", "no stream"]
)
async def test_what_no_further_try_can_mend_is_said_at_once(error: BusError) -> None:
    tries = 0

    async def ask() -> TransferHandle:
        nonlocal tries
        tries += 1
        raise error

    with pytest.raises(BusError) as raised:
        await ask_until(ask, 30, lambda _: None)
    assert raised.value is error
    assert tries == 1


# --------------------------------------------------------------------------------------------------------- statuses


@pytest.mark.parametrize(
    ("verdict", "ended", "status"),
    [
        (Verdict("accepted"), "settled", 0),
        (Verdict("deduped"), "partial", 0),
        (Verdict("accepted"), "failed", 1),
        (Verdict("accepted"), "cancelled", 1),
        (Verdict("refused", "not allowed"), None, 1),
        (Verdict("refused", UNASKED), None, 2),
        (Verdict("refused", LOST), None, 3),
        (Verdict("queued"), None, 3),
        (Verdict("accepted"), None, 3),
        (Verdict("skipped_busy", "full"), None, 4),
    ],
)
def test_a_script_can_tell_how_it_ended_from_the_status(verdict: Verdict, ended: str | None, status: int) -> None:
    assert exit_status(verdict, outcome(ended) if ended else None) == status
