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
    TransferRequested,
    TransferStep,
    column,
    decode,
    encode,
)
from kvbus.handles import LOST, UNASKED, Verdict
from kvbus.parts import Body, Prompt
from kvbus.patience import NO_SUCH_STREAM, ask_until, ended
from kvbus.publisher import Publisher, TransferHandle
from kvbus.testing.bus import MemoryBroker, MemoryBus
from kvbus.topics import Topics
from kvbus.transport import NotStored, Stored
from tests.waiting import until

HASH = "9f3c" + "0" * 28
TRANSFER = "b-00000007-1"
TOPICS = Topics()
REQUEST = TransferRequested(
    request_id="r.1", request_hash=HASH, requester="r", source="a", destination="b", prompt=Prompt(text="x")
)


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


# ------------------------------------------------------------------------------- what the destination says, and when


async def said_to(*verdicts: Verdict | None, wait_s: float = 30.0) -> tuple[Verdict, int, list[str]]:
    """What comes of a request that is answered so, one try after the other; None: it may be queued or not, at first."""
    left, notes, loop = list(verdicts), list[str](), asyncio.get_running_loop()

    async def ask() -> TransferHandle:
        handle, verdict = TransferHandle(REQUEST), left.pop(0)
        if verdict is None:
            handle.hear_unsure()
            later = left.pop(0)
            assert later
            loop.call_soon(handle.hear_verdict, later)
        else:
            handle.hear_verdict(verdict)
        return handle

    handle = await ask_until(ask, wait_s)
    handle, verdict, _ = await ended(ask, handle, wait_s=wait_s, outcome_s=0.1, say=notes.append)
    assert await handle.verdict(0) == verdict, "the handle is that of the last try"
    return verdict, len(verdicts) - len(left), notes


ELECTING = Verdict("refused", "bus_unavailable: the registry did not answer")
CHOOSING = Verdict("refused", "not_leading: m1 does not lead b now; ask again")
TAKEN = Verdict("accepted", transfer=TRANSFER)


async def test_a_request_is_put_again_while_an_election_is_why_it_was_refused() -> None:
    verdict, tries, notes = await said_to(ELECTING, CHOOSING, TAKEN)
    assert (verdict, tries) == (TAKEN, 3)
    assert notes == [f"refused: {ELECTING.reason}", f"refused: {CHOOSING.reason}"]


@pytest.mark.parametrize(
    "final",
    [
        Verdict("refused", "source 'a' is not among those that 'b' allows (--allow a)"),
        Verdict("refused", "no instance 'a' is registered: is its worker running?"),
        Verdict("refused", "draining: b takes nothing new; ask another instance"),
        Verdict("refused", LOST),  # it may be queued all the same: no later word may hide that
        Verdict("skipped_busy", "bus_unavailable: 4 transfers are running"),
        TAKEN,
    ],
)
async def test_any_other_word_of_the_destination_is_the_answer(final: Verdict) -> None:
    assert await said_to(ELECTING, final) == (final, 2, [f"refused: {ELECTING.reason}"])


async def test_a_try_of_which_nobody_knows_whether_it_is_queued_is_waited_for() -> None:
    verdict, _, _ = await said_to(ELECTING, None, TAKEN)
    assert verdict == TAKEN


async def test_a_refusal_that_comes_while_the_outcome_is_waited_for_is_heard() -> None:
    first, second = TransferHandle(REQUEST), TransferHandle(REQUEST)
    first.hear_unsure()  # so its verdict is not waited for
    second.hear_verdict(TAKEN)
    second.hear_outcome(outcome("settled"))

    async def ask() -> TransferHandle:
        return second

    asyncio.get_running_loop().call_later(0.05, first.hear_verdict, ELECTING)
    handle, verdict, told = await ended(ask, first, wait_s=30, outcome_s=30)
    assert (handle, verdict, told) == (second, TAKEN, outcome("settled"))


async def test_an_election_that_outlasts_the_wait_leaves_its_last_refusal() -> None:
    verdict, tries, notes = await said_to(*[ELECTING] * 20, wait_s=1.5)
    assert verdict == ELECTING
    assert 1 < tries == len(notes) + 1 < 20


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
