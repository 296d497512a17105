"""Workers of two minor versions beside each other: as members of one instance, and as source and destination.

The later one is this version, and adds to everything that it says fields that nobody else knows.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.flow.members import MEMBERS, assert_audit_is_clean, leader
from tests.flow.town import Town, prompt, town
from tests.flow.wire_tap import tapped
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

LATER = Path(__file__).with_name("later_version.py")


@pytest_asyncio.fixture(loop_scope="module")
async def empty(tmp_path: Path) -> AsyncIterator[Town]:
    async with town(tmp_path) as running:
        yield running


async def test_members_of_two_minor_versions_agree_on_a_transfer_from_a_later_source(empty: Town) -> None:
    empty.programs |= {"b/m1": LATER, "a/m0": LATER}
    said: list[bytes] = []
    async with tapped(empty.broker, lambda _subject, _reply, data: said.append(data)):
        for name in "ab":
            await empty.start_all(name, MEMBERS, allow=["a"] if name == "b" else [], backend="memory")
        await leader(empty)
        for number in range(2):
            ids = prompt(f"two versions {number}", 3)
            outcome = await empty.stage(ids)
            assert (outcome.outcome, outcome.pages_moved) == ("settled", 3)
    assert any(b"from_a_later_version" in data for data in said)
    await empty.at_rest()
    await assert_audit_is_clean(empty)


async def restart(running: Town, name: str) -> None:
    """Restart one instance, as what its program is now."""
    running.workers[name].signal(signal.SIGTERM)
    await until(lambda: not running.workers[name].alive, 60, what=f"{name} has ended")
    await running.start_again(name)


async def test_a_rolling_upgrade_by_one_minor_version_fails_no_request_in_either_direction(empty: Town) -> None:
    starts = (empty.start(one, backend="memory", allow=[other]) for one, other in ("ab", "ba"))
    await asyncio.gather(*starts)
    number = 0

    async def ask_both_ways() -> None:
        nonlocal number
        for source, destination in ("ab", "ba"):
            number += 1
            ids = prompt(f"upgrade {number}", 2)
            staged = await empty.publisher.stage(source=source, destination=destination, prompt=ids)
            assert staged.settled, staged
            assert (await empty.answer(destination, ids)).end.tokens == await empty.cold(source, ids)

    await ask_both_ways()
    for name in "ab":
        empty.programs[name] = LATER
        other = "b" if name == "a" else "a"
        ids = prompt(f"while {name} is restarted", 2)
        asking = empty.publisher.stage(source=other, destination=name, prompt=ids)
        _, staged = await asyncio.gather(restart(empty, name), asking)
        assert staged.settled, staged
        await ask_both_ways()
    await empty.at_rest()
    await assert_audit_is_clean(empty)
