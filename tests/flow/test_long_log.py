"""A member that starts late reads all of its instance's log, however long that is."""

import asyncio
from pathlib import Path

import pytest

from kvbus.events import Header, SettleVoided, TermTaken, TransferOpened, encode
from kvbus.parts import Body
from tests.flow.members import MEMBERS, leader
from tests.flow.town import TOPICS, Town, prompt, town
from tests.waiting import until

pytestmark = pytest.mark.slow

OLD_EPOCH = 5
TRANSFERS = 5_000
"""Ten thousand decisions are ten pages of the log: more than are read between two looks at its beginning."""
CATCH_UP_S = 200.0


# P25
async def test_a_member_that_starts_late_catches_up_on_a_log_of_ten_thousand_decisions(folder: Path) -> None:
    async with town(folder) as pair:
        await write_log(pair)
        await asyncio.gather(
            pair.start_all("a", MEMBERS, backend="memory"), pair.start_all("b", MEMBERS, backend="memory", allow=["a"])
        )
        led = await leader(pair, wait_s=CATCH_UP_S)
        late = "b/m1" if led == "b/m0" else "b/m0"
        assert (await pair.stage(prompt("after a long log", 3))).outcome == "settled"

        pair.workers[late].kill()
        await pair.start_again(late)

        await until(lambda: stand_at_one_place(pair), CATCH_UP_S, what=f"{late} has read the log to its end")
        assert (await pair.stage(prompt("after a restart", 3))).outcome == "settled"
        await pair.at_rest()


async def stand_at_one_place(pair: Town) -> bool:
    counters = [await pair.counters(f"b/{member}") for member in MEMBERS]
    return len({(one["settle_term"], one["settle_n"]) for one in counters}) == 1


async def write_log(pair: Town) -> None:
    """An earlier run of b has decided about many transfers."""
    number = 0

    async def append(body: Body) -> None:
        nonlocal number
        number += 1
        header = Header(k=body.KIND, i="b", m="m0", e=OLD_EPOCH, s=number, t=number)
        await pair.bus.store(TOPICS.settle("b"), encode(header, body), message_id=header.event_id)

    await append(TermTaken(term=1, n=1, previous="", member="m0", epoch=OLD_EPOCH))
    parties = (("m0", OLD_EPOCH, 0, 0), ("m1", OLD_EPOCH, 1, 0))
    for transfer in range(TRANSFERS):
        n = 2 + 2 * transfer
        await append(TransferOpened(transfer=f"t{transfer}", term=1, n=n, previous=f"1.{n - 1}", members=parties))
        await append(SettleVoided(transfer=f"t{transfer}", term=1, n=n + 1, previous=f"1.{n}", reason="late"))
