"""What every bus promises of a settle log: order by fence, the newest message, live repeats, and what trimming leaves.

The same calls go to a real broker, to the one in memory, and to the simulated one on its own loop.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvbus.topics import Topics
from kvbus.transport import Bus, Delivery, NotStored, Stored
from tests.waiting import until

TOPICS = Topics()
LOG, OTHER_LOG = TOPICS.settle("a"), TOPICS.settle("b")

Trim = Callable[[], Awaitable[None]]
"""Takes from both logs all that is stored, as their age would."""


async def check_that_a_fence_lets_only_the_next_message_in(bus: Bus, other: Bus) -> None:
    """P13: the fence is the subject's last sequence, and who names another one stores nothing."""
    assert await bus.store(LOG, b"1", message_id="1", after=0) == Stored(1, duplicate=False)
    assert await other.store(LOG, b"2", message_id="2", after=0) == NotStored("moved")
    assert await other.store(LOG, b"2", message_id="2", after=7) == NotStored("moved")
    assert await other.store(LOG, b"2", message_id="2", after=1) == Stored(2, duplicate=False)
    assert await other.store(OTHER_LOG, b"x", message_id="x", after=0) == Stored(3, duplicate=False)
    assert await bus.store(LOG, b"3", message_id="3", after=3) == NotStored("moved"), "the sequence of another subject"
    assert await bus.store(LOG, b"3", message_id="3", after=2) == Stored(4, duplicate=False)
    assert [one.data for one in await bus.history(LOG)] == [b"1", b"2", b"3"]


async def check_that_a_repeat_is_a_duplicate_and_no_refusal(bus: Bus, other: Bus) -> None:
    """Whoever lost an ack asks again with the same id and fence, and must learn that the log moved by its own word."""
    await bus.store(LOG, b"1", message_id="1", after=0)
    assert await bus.store(LOG, b"1", message_id="1", after=0) == Stored(1, duplicate=True)
    await other.store(LOG, b"2", message_id="2", after=1)
    assert await bus.store(LOG, b"1", message_id="1", after=0) == Stored(1, duplicate=True)
    assert await other.store(LOG, b"2", message_id="2", after=1) == Stored(2, duplicate=True)
    assert await bus.store(LOG, b"1", message_id="1") == Stored(1, duplicate=True)
    assert await bus.store(LOG, b"9", message_id="9", after=1) == NotStored("moved")
    assert [one.data for one in await bus.history(LOG)] == [b"1", b"2"]


async def check_that_of_eight_writers_one_wins(bus: Bus, other: Bus) -> None:
    """Both connections race for each place in the log."""
    last = 0
    for round_ in range(5):
        racing = [(bus, other)[n % 2].store(LOG, b"%d" % n, message_id=f"{round_}.{n}", after=last) for n in range(8)]
        answers = await asyncio.gather(*racing)
        (won,) = [n for n, answer in enumerate(answers) if isinstance(answer, Stored)]
        assert answers.count(NotStored("moved")) == 7
        newest = await other.last(LOG)
        assert newest is not None
        assert newest.data == b"%d" % won
        last = newest.sequence
    assert len(await bus.history(LOG)) == 5


async def check_that_the_newest_message_of_a_log_is_found(bus: Bus, other: Bus) -> None:
    """`last` knows subjects, not filters."""
    assert await bus.last(LOG) is None
    await bus.store(LOG, b"1", message_id="1")
    await bus.store(OTHER_LOG, b"", message_id="2")
    assert await other.last(LOG) == Delivery(LOG, b"1", 1)
    assert await other.last(OTHER_LOG) == Delivery(OTHER_LOG, b"", 2)
    await bus.store(LOG, b"3", message_id="3")
    assert await other.last(LOG) == Delivery(LOG, b"3", 3)
    for wrong in (TOPICS.settle_filter(), TOPICS.heartbeat("a")):
        with pytest.raises(ValueError, match=r"subject"):
            await bus.last(wrong)


async def check_that_the_end_of_a_log_is_known(bus: Bus, other: Bus) -> None:
    """`log_end` is the stream's, whoever's subject is named; for what is no log there is none."""
    assert await bus.log_end(TOPICS.settle_filter()) == 0
    for number in (1, 2, 3):
        await bus.store(LOG, b"%d" % number, message_id=f"{number}")
    for subject in (TOPICS.settle_filter(), LOG, OTHER_LOG):
        assert await other.log_end(subject) == 3
    with pytest.raises(ValueError, match=r"subject"):
        await bus.log_end(TOPICS.heartbeat("a"))


async def check_that_decisions_are_repeated_live(bus: Bus, other: Bus) -> None:
    """With their sequence, and that of the one before on their subject."""
    heard: list[Delivery] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(delivery)

    await other.subscribe(TOPICS.live_settle("a"), hear)
    for number, log in enumerate((LOG, OTHER_LOG, LOG)):
        await bus.store(log, b"%d" % number, message_id=f"{number}")
    await bus.store(LOG, b"2", message_id="2")
    await bus.store(LOG, b"end", message_id="end")
    await until(lambda: len(heard) >= 3 and any(one.data == b"end" for one in heard))
    live = TOPICS.live_settle("a")
    in_order = sorted(heard, key=lambda one: one.sequence)  # the simulated bus delays some, as several connections do
    assert in_order == [Delivery(live, b"0", 1, 0), Delivery(live, b"2", 3, 1), Delivery(live, b"end", 4, 3)]
    assert [one.sequence for one in await bus.history(LOG, after_sequence=1)] == [3, 4]
    assert [one.data for one in await bus.history(TOPICS.settle_filter(), most=2)] == [b"0", b"1"]


async def check_that_a_trimmed_log_starts_anew(bus: Bus, other: Bus, trim: Trim) -> None:
    """P14: what a fence stood on can go. Then its owner is refused, and whoever believes in an empty log is let in."""
    heard: list[Delivery] = []

    async def hear(delivery: Delivery) -> None:
        heard.append(delivery)

    await bus.store(LOG, b"term", message_id="1", after=0)
    await trim()
    assert await bus.last(LOG) is None
    assert await bus.history(LOG) == []
    assert await bus.log_end(LOG) == 1
    await bus.subscribe(TOPICS.live_settle("a"), hear)
    assert await bus.store(LOG, b"owner", message_id="2", after=1) == NotStored("moved")
    assert await other.store(LOG, b"zombie", message_id="3", after=0) == Stored(2, duplicate=False)
    await until(lambda: heard == [Delivery(TOPICS.live_settle("a"), b"zombie", 2, 0)])


LOG_PROMISES = (
    check_that_a_fence_lets_only_the_next_message_in,
    check_that_a_repeat_is_a_duplicate_and_no_refusal,
    check_that_of_eight_writers_one_wins,
    check_that_the_newest_message_of_a_log_is_found,
    check_that_the_end_of_a_log_is_known,
    check_that_decisions_are_repeated_live,
)
