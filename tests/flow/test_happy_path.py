"""The main job, whole: a prompt's KV goes from a to b over real NATS and the real data plane, and b answers from it."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.commands.poison import flip_top_exponent_bits
from kvbus.events import (
    AttemptMade,
    Event,
    FactsSeen,
    LeaseGranted,
    OutcomeFixed,
    SettleDecided,
    TransferOpened,
    from_column,
)
from kvbus.ledger.facts import Fact
from tests.flow.town import BLOCK, PAGE_BYTES, Town, prompt, town
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ucx", "memory"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Town]:
    with tempfile.TemporaryDirectory(prefix="kvflow-") as name:
        async with town(Path(name)) as running:
            await asyncio.gather(
                running.start("a", backend=request.param), running.start("b", backend=request.param, allow=["a"])
            )
            yield running


async def test_staged_pages_give_the_same_tokens_as_computing(pair: Town) -> None:
    ids = prompt("same", 20)
    cold = await pair.cold("b", ids)
    assert await pair.held("b", ids) == 0

    outcome = await pair.stage(ids)

    assert (outcome.outcome, outcome.reason, outcome.failure) == ("settled", "", "")
    assert (outcome.pages_wanted, outcome.pages_held, outcome.pages_moved) == (20, 0, 20)
    assert outcome.length_bytes == 20 * PAGE_BYTES
    assert outcome.prompt_tokens == len(ids)
    assert (outcome.lo, outcome.hi) == (0, 20)
    assert outcome.evidence == ("completed",)
    staged = await pair.answer("b", ids)
    assert staged.end.tokens == cold
    assert staged.end.cached_tokens == 20 * BLOCK
    await pair.at_rest()


async def test_both_sides_report_the_whole_life_of_their_lease(pair: Town) -> None:
    ids = prompt("life", 6)
    outcome = await pair.stage(ids)
    await pair.at_rest()

    lent = await life_of(pair, "a", outcome.transfer, "read")
    taken = await life_of(pair, "b", outcome.transfer, "write")

    assert lent.granted.peer == "b"
    assert taken.granted.peer == "a"
    assert len(from_column(lent.granted.pages, 4)) == len(from_column(taken.granted.pages, 4)) == 6
    assert lent.attempt.binding == "lending"
    assert taken.attempt.binding in {"ucx", "memory"}
    assert (lent.outcome.evidence, taken.outcome.evidence) == ("peer_ack", "completed")
    assert (taken.outcome.result, taken.outcome.arrived, taken.outcome.length_bytes) == ("delivered", 6, 6 * PAGE_BYTES)
    both = Fact.TAKEN | Fact.GRANTED | Fact.SUBMITTED | Fact.DELIVERED | Fact.ACCESS_ENDED | Fact.RETURNED
    assert lent.bits == both | Fact.EVIDENCE_PEER_ACK  # a read lease needs no settle (contract 2)
    assert taken.bits == both | Fact.EVIDENCE_COMPLETED | Fact.SETTLED | Fact.CONSUMED


async def test_the_settle_log_opens_and_decides_each_transfer_once(pair: Town) -> None:
    outcome = await pair.stage(prompt("log", 3))
    decisions: list[object] = []

    async def decided() -> bool:
        log = await pair.events("b", settle=True)
        decisions[:] = [event.body for event in log if getattr(event.body, "transfer", "") == outcome.transfer]
        return len(decisions) >= 2

    await until(decided, what="open and settle are in the log")
    opened, settled = decisions
    assert isinstance(opened, TransferOpened)
    assert isinstance(settled, SettleDecided)
    assert opened.members == settled.members
    assert (settled.lo, settled.hi) == (0, 3)
    await pair.at_rest()


async def test_one_changed_page_changes_the_answer_and_evicting_it_makes_it_right(pair: Town) -> None:
    ids = prompt("poison", 8)
    cold = await pair.cold("b", ids)
    await pair.stage(ids)
    with pair.workers["b"].client() as client:
        where = client.where(ids)
    assert len(where.pages) == 8

    flip_top_exponent_bits(where, where.pages[4])

    assert (await pair.answer("b", ids)).end.tokens != cold
    assert await pair.evict("b", ids) == 8
    assert (await pair.answer("b", ids)).end.tokens == cold
    await pair.at_rest()


async def test_only_what_is_missing_moves(pair: Town) -> None:
    ids = prompt("missing", 10)
    await pair.answer("b", ids[: 4 * BLOCK + 1], store=True)

    outcome = await pair.stage(ids)

    assert (outcome.pages_wanted, outcome.pages_held, outcome.pages_moved) == (10, 4, 6)
    assert outcome.length_bytes == 6 * PAGE_BYTES
    assert (await pair.answer("b", ids)).end.tokens == await pair.cold("b", ids)
    await pair.at_rest()


async def test_a_prompt_that_is_here_whole_moves_nothing(pair: Town) -> None:
    ids = prompt("here", 5)
    await pair.answer("b", ids, store=True)

    outcome = await pair.stage(ids)

    assert (outcome.outcome, outcome.pages_held, outcome.pages_moved) == ("settled", 5, 0)
    assert "here already" in outcome.reason
    await pair.at_rest()


async def test_another_salt_shares_no_page(pair: Town) -> None:
    ids = prompt("salt", 4)
    await pair.stage(ids)

    handle = await pair.ask(ids, salt="tenant two")
    await handle.verdict()
    outcome = await handle.outcome()

    assert outcome is not None
    assert (outcome.outcome, outcome.pages_held, outcome.pages_moved) == ("settled", 0, 4)
    await pair.at_rest()


class Life:
    """The rows and bits of one lease, as its instance reported them."""

    def __init__(self, events: list[Event], transfer: str, direction: str) -> None:
        bodies = [event.body for event in events]
        (self.granted,) = (
            body
            for body in bodies
            if isinstance(body, LeaseGranted) and (body.transfer, body.direction) == (transfer, direction)
        )
        ticket = self.granted.ticket
        (self.attempt,) = (body for body in bodies if isinstance(body, AttemptMade) and body.ticket == ticket)
        (self.outcome,) = (body for body in bodies if isinstance(body, OutcomeFixed) and body.ticket == ticket)
        self.bits = 0
        for body in bodies:
            if isinstance(body, FactsSeen):
                rows = zip(from_column(body.ticket, 8), from_column(body.bits, 4), strict=True)
                for number, bits in rows:
                    self.bits |= bits if number == ticket else 0


async def life_of(pair: Town, name: str, transfer: str, direction: str) -> Life:
    """Wait until an instance's stream holds a lease's return, and return its life."""
    lives: list[Life] = []

    async def returned() -> bool:
        try:
            lives.append(Life(await pair.events(name), transfer, direction))
        except ValueError:  # a row is still on its way; a second one of its kind would stay one too many
            return False
        return bool(lives[-1].bits & Fact.RETURNED)

    await until(returned, what=f"{name} reports the return of its lease")
    return lives[-1]
