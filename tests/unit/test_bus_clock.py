"""How long a request has waited is told by the broker's clock, whatever the clocks of hosts show."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.bus_clock import AGE_CERTAIN_S, BrokerClock
from kvbus.testing.bus import MemoryBus
from kvbus.topics import Topics
from kvbus.transport import Bus, Work
from tests.waiting import until

TOPICS = Topics()
HASH = "5" * 32
AHEAD_S = 1_000_000_000.0


def told(unix_s: int) -> dict[str, object]:
    """An answer of the broker that was written so many seconds after the beginning of 2026, by its clock."""
    return {"ts": f"2026-01-01T00:{unix_s // 60:02d}:{unix_s % 60:02d}.123456789Z"}


BEGIN_S = 1_767_225_600.123456


def test_an_age_is_the_time_on_the_brokers_clock_less_its_stamp() -> None:
    clock = BrokerClock()
    clock.note(told(10), now=500.0)

    assert clock.age_s(BEGIN_S + 4, now=500.0) == pytest.approx(6)
    assert clock.age_s(BEGIN_S + 4, now=507.5) == pytest.approx(13.5)


def test_a_broker_whose_clock_was_set_is_believed_anew() -> None:
    clock = BrokerClock()
    clock.note(told(10), now=500.0)
    clock.note(told(1_810), now=501.0)

    assert clock.age_s(BEGIN_S + 1_805, now=501.0) == pytest.approx(5)
    assert clock.age_s(BEGIN_S + 1_900, now=501.0) == 0.0  # stamped by a broker whose clock is ahead


@pytest.mark.parametrize("answer", [{}, {"ts": None}, {"ts": 7}], ids=str)
def test_nothing_is_held_against_a_message_while_the_clock_is_unknown(answer: dict[str, object]) -> None:
    clock = BrokerClock()
    clock.note(answer, now=1.0)

    assert clock.age_s(0.0, now=AHEAD_S) == 0.0


@pytest.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    """Each of the buses that keep these promises."""
    if request.param == "memory":
        yield MemoryBus()
        return
    async with EmbeddedBroker.started(tmp_path / "broker") as broker:
        made = await NatsBus.connect(broker.url, name="t", token=broker.token, limits=EMBEDDED)
        await made.ensure_assets()
        yield made
        await made.close()


async def take(bus: Bus) -> Work:
    (work,) = await bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=4, wait_s=30)
    return work


async def test_work_says_how_long_it_has_waited(bus: Bus) -> None:
    began = time.monotonic()
    await bus.store(TOPICS.transfer("b", HASH), b"x", message_id="x")
    fresh = await take(bus)
    assert 0 <= fresh.waited_s < time.monotonic() - began + AGE_CERTAIN_S

    await fresh.give_back(AGE_CERTAIN_S + 0.2)
    again: list[Work] = []

    async def offered() -> bool:
        again.extend(await bus.take_work(TOPICS.transfer_filter("b"), consumer="b", most=4, wait_s=1))
        return bool(again)

    await until(offered)
    assert again[0].attempt == 2
    assert AGE_CERTAIN_S < again[0].waited_s < time.monotonic() - began + AGE_CERTAIN_S
    await again[0].finish()
