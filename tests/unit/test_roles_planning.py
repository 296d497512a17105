"""What a transfer finds here already is kept for it from planning on, and counts as what is lent to peers does."""

import pytest

from kvbus.events import TransferRequested
from kvbus.ledger.facts import Fact, FailureClass
from kvbus.ledger.transfer import Phase, Transfer
from kvbus.names import request_hash, token_bytes
from kvbus.parts import Prompt
from kvbus.pool.pins import PinSet
from kvbus.roles.running import Running
from kvbus.roles.tokens import Content
from kvbus.testing.bus import MemoryBroker
from tests.unit.pool_parts import fill
from tests.unit.test_roles_leaving import NOW_S, SOURCE, Reader

HELD, WANTED = 4, 5
"""Blocks of each prompt; the pool has 16 pages, and keeps 8 of them for the engine's longest prompt."""


@pytest.fixture
def reader() -> Reader:
    return Reader(MemoryBroker().connect())


def ids_of(number: int, blocks: int, reader: Reader) -> tuple[int, ...]:
    return (number,) * (blocks * reader.pool.layout.block_tokens)


def planned(reader: Reader, number: int, *, blocks: int = WANTED) -> Running:
    """A transfer whose prompt has just got its names; the first four blocks of it are here."""
    ids = ids_of(number, blocks, reader)
    prompt = Prompt(tokens=token_bytes(ids))
    hash_ = request_hash(model="", salt="", source="a", prompt=prompt.canonical())
    asked = TransferRequested(
        request_id=f"r.{number}", request_hash=hash_, requester="r", source="a", destination="b", prompt=prompt
    )
    fill(reader.pool.lender, reader.pool.names(ids[: HELD * reader.pool.layout.block_tokens], ""))
    transfer = Transfer(f"b-{number}", hash_, "a", NOW_S, 30.0)
    running = Running(reader.side, asked, transfer, lambda _one: None, lambda _one: None)
    running.resolved(SOURCE, Content.of_tokens(reader.pool, ids, ""))
    return running


def phase_of(running: Running) -> Phase:
    return running.transfer.phase


# P26, P10
async def test_what_transfers_find_here_leaves_the_engine_its_longest_prompt(reader: Reader) -> None:
    # Planted fault that this catches: pins of planning that do not count; then each of these kept four pages more.
    first = planned(reader, 1)
    assert phase_of(first) is Phase.ASKING
    assert reader.pool.allocator.claimed == WANTED

    for number in (2, 3):
        refused = planned(reader, number).transfer
        assert (refused.outcome, refused.failure) == ("failed", FailureClass.LEASE_REFUSED)
        assert "4 more pages asked for, but 5 of at most 8 are lent" in refused.reason

    longest = reader.pool.names(ids_of(9, 8, reader), "")
    assert len(fill(reader.pool.lender, longest)) == 8
    assert reader.pool.lender.pages_held(first.names) != [], "what is pinned stays"
    first.cancelled(FailureClass.CANCELLED, "cancelled by r")
    for ticket in first.tickets:
        first.on_line(ticket, int(Fact.ACCESS_ENDED | Fact.RETURNED), 0, 0)
    assert phase_of(first) is Phase.ENDED
    assert reader.pool.allocator.claimed == 0
    reader.pool.lender.check()
    await reader.side.asker.close()


async def test_a_prompt_that_is_all_here_settles_although_peers_have_all_that_they_may(reader: Reader) -> None:
    lent = reader.pool.lender
    for number in (1, 2):
        names = reader.pool.names(ids_of(number, HELD, reader), "")
        fill(lent, names)
        assert lent.lend_read(names).failure is None

    whole = planned(reader, 3, blocks=HELD)

    assert whole.transfer.outcome == "settled"
    assert reader.pool.allocator.claimed == 8
    lent.check()


# P26
def test_a_page_that_is_named_twice_is_kept_and_counted_once(reader: Reader) -> None:
    # Planted fault that this catches: two claims of a page, of which letting go takes back one.
    pages = fill(reader.pool.lender, reader.pool.names(ids_of(1, 2, reader), ""))
    kept = reader.pool.kept([*pages, *pages])
    assert isinstance(kept, PinSet)
    assert reader.pool.allocator.claimed == len(pages)
    kept.drop()
    assert reader.pool.allocator.claimed == 0
