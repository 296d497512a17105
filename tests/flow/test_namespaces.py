"""Two hosts with a wire between them that loses and delays packets: whole workers, over UCX's TCP and over sockets.

The workers share neither memory nor /proc, so nothing but the wire carries pages. One packet in fifty is lost in
either direction, and each takes 2 ms: TCP works hard, and everything above it must not notice.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvbus.commands.audit import audit_log, lines
from kvbus.commands.auditing import Verdict
from kvbus.commands.stories import Story, tell
from tests.flow.hosts import FarTown, arguments_of, far_town, two_hosts
from tests.flow.town import BLOCK, PAGE_BYTES, TOPICS, prompt
from tests.waiting import until, wait_until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
LOSS = 0.02
DELAY_MS = 2.0
BLOCKS = 16
RATE_BYTES_S = 200_000
"""16 pages take more than five seconds: time to cut the wire in the middle."""
BUDGET_S = 100.0


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ucx", "socket"])
async def far(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[tuple[FarTown, str]]:
    """Instance a on one host, b on the other, each of which takes from the other; b reads slowly."""
    own = folder / f"far-{request.param}"
    own.mkdir()
    with two_hosts(delay_ms=DELAY_MS, seed=7) as hosts:
        async with far_town(own, hosts) as town:
            backend = str(request.param)
            await asyncio.gather(
                town.start_again("a", arguments_of("a", hosts.a, backend=backend, allow=["b"])),
                town.start_again(
                    "b", arguments_of("b", hosts.b, backend=backend, allow=["a"], rate_limit=RATE_BYTES_S)
                ),
            )
            town.wire.lose(LOSS)
            yield town, backend


async def story_of(town: FarTown, transfer: str) -> Story:
    """A transfer's story, as the facts of both and their settle logs tell it."""
    told = [await town.events(name, settle=settle) for name in "ab" for settle in (False, True)]
    story = tell([event for events in told for event in events], transfer)
    assert isinstance(story, Story)
    return story


async def test_pages_come_whole_over_a_wire_that_loses_and_delays(far: tuple[FarTown, str]) -> None:  # P2, P4
    town, backend = far
    carried, lost = town.wire.counts()
    for source, destination in (("a", "b"), ("b", "a")):
        ids = prompt(f"{backend} from {source}", BLOCKS)
        outcome = await town.stage(ids, source=source, destination=destination, budget_s=BUDGET_S)
        assert (outcome.outcome, outcome.pages_moved, outcome.length_bytes) == ("settled", BLOCKS, BLOCKS * PAGE_BYTES)
        told = await town.told(destination, ids)
        assert told.cached == BLOCKS * BLOCK
        assert told.tokens == (await town.told(source, ids, reuse=False)).tokens
        text = " ".join(entry.line.text for entry in (await story_of(town, outcome.transfer)).entries)
        assert f"by {backend}" in text
        assert "cma" not in text.partition("moved over")[2]
    counts = town.wire.counts()
    assert counts[0] - carried > 2 * BLOCKS * PAGE_BYTES // 1500, "the pages went over the wire"
    assert counts[1] - lost > 10, "the wire lost some of them"
    for name in "ab":
        counters = await town.counters(name)
        assert (counters["pages_differ"], counters["pages_spoiled"], counters["pages_reported"]) == (0, 0, 0)
    await town.at_rest()


async def test_many_transfers_at_a_time_both_ways_lose_nothing(far: tuple[FarTown, str]) -> None:
    town, backend = far
    asked = [
        (prompt(f"{backend} {source} {number}", 3), source, destination)
        for number in range(2)
        for source, destination in (("a", "b"), ("b", "a"))
    ]
    outcomes = await asyncio.gather(
        *(town.stage(ids, source=source, destination=there, budget_s=BUDGET_S) for ids, source, there in asked)
    )
    assert [outcome.outcome for outcome in outcomes] == ["settled"] * len(asked)
    for ids, _, there in asked:
        assert (await town.told(there, ids)).tokens == (await town.told(there, ids, reuse=False)).tokens
    await town.at_rest()


async def test_a_cancel_over_a_wire_that_was_cut_midway_ends_with_evidence_and_later_the_pages_come(
    far: tuple[FarTown, str],
) -> None:  # P4, P7, contract 39, 41
    town, backend = far
    ids = prompt(f"{backend} cut", BLOCKS)
    await town.told("a", ids, store=True)
    bytes_before = (await town.counters("b"))[f"{backend}_bytes"]
    handle = await town.ask(ids, on_miss="fail", budget_s=BUDGET_S)
    transfer = (await handle.verdict(BUDGET_S)).transfer
    await town.step("b", handle.request_hash, "moving")
    packets = town.wire.counts()[0]
    wait_until(lambda: town.wire.counts()[0] > packets + 100, what="pages are on their way")
    town.wire.lose(1.0)
    await town.publisher.cancel(handle.request_hash, "b")
    outcome = await handle.outcome(BUDGET_S)
    assert outcome is not None
    assert outcome.outcome in {"cancelled", "partial"}, outcome
    assert outcome.pages_moved < BLOCKS
    assert set(outcome.evidence) <= {"endpoint_destroyed", "completed"}
    assert outcome.evidence
    await town.at_rest()  # what a lent comes back by b's word over the bus, which the wire does not carry

    async def is_told_whole() -> bool:
        return (await story_of(town, transfer)).complete

    await until(is_told_whole, what="the story is whole")
    town.wire.lose(LOSS)
    again = await town.stage(ids, on_miss="fail", budget_s=BUDGET_S)
    assert (again.outcome, again.hi) == ("settled", BLOCKS)
    assert (await town.told("b", ids)).tokens == (await town.told("a", ids, reuse=False)).tokens
    assert (await town.counters("b"))[f"{backend}_bytes"] >= bytes_before + again.length_bytes


async def test_afterwards_the_audit_is_clean(far: tuple[FarTown, str]) -> None:
    town, _ = far

    async def is_clean() -> bool:
        _, audited = await audit_log(town.bus, TOPICS)
        told[:] = list(lines(audited))
        return audited.verdict is Verdict.CLEAN

    told: list[str] = []
    await until(is_clean, what=f"a clean audit: {told}")


@pytest.mark.asyncio(loop_scope="function")
async def test_no_namespace_and_no_device_is_left_behind() -> None:
    before = _left()
    with two_hosts(delay_ms=0, seed=1) as hosts:
        assert len(_left()) == len(before) + 2
        assert hosts.a.namespace in " ".join(_left())
    assert _left() == before


def _left() -> list[str]:
    return sorted(path.name for path in Path("/run/netns").glob("kvbus-*"))
