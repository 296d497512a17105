"""What a source does with a reader's word that pages came with other bytes than their digests: it is no evidence."""

from collections.abc import AsyncIterator, Sequence

import pytest

from kvbus.columns import column
from kvbus.events import Event, LeaseReleased, ReleaseConfirmed, TransferStep, decode
from kvbus.grants import Grant
from kvbus.parts import PagesFound
from kvbus.pool.allocator import PageState
from kvbus.pool.digests import DigestMode
from kvbus.roles import doubts
from kvbus.testing.bus import MemoryBus
from tests.unit.test_roles_source import Lender, key_of, nonce_of

HASH = "ab" * 16


@pytest.fixture
async def lender() -> AsyncIterator[Lender]:
    """A source that makes digests when it lends, with four blocks of one prompt."""
    bus = MemoryBus()
    lender = Lender(bus)
    lender.pool.memory.digests.turn_on(DigestMode.GRANT)
    for number, page in enumerate(lender.fill(byte=0xA1)):
        lender.pool.memory.page_bytes(page)[0] = number
    yield lender
    lender.pool.lender.check()
    lender.holder.check()
    await lender.source.close()
    await bus.close()


def found_in(grant: Grant, rows: Sequence[int], *, changed: int = 0) -> PagesFound:
    pages, digests = grant.page_indexes(), grant.page_digests()
    return PagesFound(
        request_hash=HASH,
        pages=column((pages[row] for row in rows), 4),
        digests=column((digests[row] for row in rows), 8),
        changed=changed,
    )


async def let_go(lender: Lender, found: PagesFound | None, transfer: str = "t1", nonce: bytes | None = None) -> bool:
    said = LeaseReleased(key=key_of(transfer), nonce=nonce or nonce_of(transfer), found=found)
    answer = await lender.said(said)
    assert isinstance(answer, ReleaseConfirmed)
    return answer.known


def story_of(lender: Lender) -> list[str]:
    events: list[Event] = [decode(data) for data, _, _ in lender.source._recorder._facts.queue]
    return [event.body.text for event in events if isinstance(event.body, TransferStep)]


def held(lender: Lender) -> list[bool]:
    return lender.pool.lender.held(lender.names())


async def test_a_reported_page_leaves_the_index_with_its_lease_and_the_lease_ends_as_any_other(lender: Lender) -> None:
    grant = await lender.grant()
    page = grant.page_indexes()[2]
    assert await let_go(lender, found_in(grant, (2,)))
    assert held(lender) == [True, True, False, True]
    assert lender.pool.allocator.state(page) is PageState.FREE, "its bytes are right here: the page is as good as any"
    digests = lender.pool.memory.digests
    assert (digests.reported, digests.dropped, digests.spoiled) == (1, 1, 0)
    assert story_of(lender) == [f"b/m0 found 1 pages with other bytes than their digests: {page}"]
    assert [row.evidence for row in lender.sink.outcomes] == ["peer_ack"]


async def test_a_page_stays_for_as_long_as_anybody_has_it(lender: Lender) -> None:  # contract 24, P9
    # Planted fault that this catches: `Doubts.drop` that does not ask for pins; the lender then contradicts itself.
    first, second = await lender.grant("t1"), await lender.grant("t2")
    pins = lender.pool.lender.pin_set(for_peer=False)
    pins.pin(lender.names())
    await let_go(lender, found_in(first, (1,)), "t1")
    lender.source.tick()
    assert held(lender) == [True] * 4
    assert (await lender.grant("t3")).page_indexes() == second.page_indexes(), "it is lent as before"
    await let_go(lender, None, "t2")
    await let_go(lender, None, "t3")
    lender.source.tick()
    assert held(lender) == [True] * 4, "the engine has it"
    pins.drop()
    lender.source.tick()
    assert held(lender) == [True, False, True, True]


async def test_a_fenced_reader_may_still_read_so_its_page_stays(lender: Lender) -> None:  # P5
    first = await lender.grant("t1")
    await lender.grant("t2", epoch=key_of("t2").epoch + 1)
    assert lender.fence(key_of("t2").epoch + 1).tickets
    await let_go(lender, found_in(first, (0,)), "t1")
    assert lender.pool.allocator.is_bound(first.page_indexes()[0])
    lender.source.tick()
    assert held(lender) == [True] * 4
    lender.source.reader_died("b", "m0", key_of("t2").epoch + 1)
    lender.source.tick()
    assert held(lender) == [False, True, True, True]


async def test_a_page_that_is_wrong_here_too_stays_out_of_use(lender: Lender) -> None:
    grant = await lender.grant()
    page = grant.page_indexes()[3]
    lender.pool.memory.page_bytes(page)[5] ^= 1
    await let_go(lender, found_in(grant, (3,)))
    assert lender.pool.allocator.state(page) is PageState.QUARANTINED
    assert lender.pool.memory.digests.spoiled == 1
    assert held(lender) == [True, True, True, False]


async def test_a_report_is_taken_once_however_often_it_comes(lender: Lender) -> None:  # P18
    grant = await lender.grant()
    for _ in range(3):
        await let_go(lender, found_in(grant, (1,), changed=2))
    digests = lender.pool.memory.digests
    assert (digests.reported, digests.rewritten) == (1, 2)
    assert len(story_of(lender)) == 1
    assert story_of(lender)[0].endswith("2 pages rewritten while it read them")


async def test_a_report_after_the_word_in_band_is_heard_as_well(lender: Lender) -> None:  # P4
    grant = await lender.grant()
    assert lender.source.released(key_of("t1"), nonce_of("t1"))
    await let_go(lender, found_in(grant, (1,)))
    assert held(lender) == [True, False, True, True]


async def test_nobody_drops_pages_without_their_nonce_or_without_their_digests(lender: Lender) -> None:
    # Planted fault that this catches: `Doubts._is_about` that believes the page's number alone.
    grant = await lender.grant()
    assert not await let_go(lender, found_in(grant, (0, 1)), nonce=b"x" * 16)
    made_up = PagesFound(request_hash=HASH, pages=column((0, 1, 2, 3, 99), 4), digests=column((1, 2, 3, 0, 5), 8))
    await let_go(lender, made_up)
    assert held(lender) == [True] * 4
    assert lender.pool.memory.digests.reported == 0
    assert story_of(lender) == ["b/m0 found 5 pages that hold something else by now"]


async def test_a_report_about_content_that_has_gone_meanwhile_changes_nothing(lender: Lender) -> None:  # contract 48
    first = await lender.grant("t1")
    await lender.grant("t2")  # keeps it until then
    await let_go(lender, found_in(first, (1,)), "t1")
    lender.pool.lender.forget_names()
    await let_go(lender, None, "t2")
    pages = lender.fill(byte=0xB2)
    lender.source.tick()
    assert held(lender) == [True] * 4, f"other content stands in {pages} now"
    assert lender.pool.memory.digests.dropped == 0


async def test_many_reported_pages_are_dropped_a_few_at_a_time(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    grant = await lender.grant()
    monkeypatch.setattr(lender.source._doubts, "_at_once", 1)
    await let_go(lender, found_in(grant, (0, 1, 2)))
    counts = [held(lender).count(False)]
    for _ in range(3):
        lender.source.tick()
        counts.append(held(lender).count(False))
    assert counts == [1, 2, 3, 3]
    assert "Doubts pages=0" in repr(lender.source._doubts)


async def test_reports_are_remembered_within_a_bound(lender: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts, "REPORTS_KNOWN_MAX", 2)
    for number in range(4):
        grant = await lender.grant(f"t{number}", names=lender.names(1))
        await let_go(lender, PagesFound(request_hash=HASH, changed=1), f"t{number}")
        assert grant.page_digests()
    assert len(lender.source._doubts._known) == 2
    assert lender.pool.memory.digests.rewritten == 4
