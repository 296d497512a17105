"""The simulated bus keeps the promises of a settle log, and loses what a broker without its store loses."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import copy_context
from dataclasses import dataclass

import pytest

from kvbus.testing.sim.broker import SimBroker
from kvbus.testing.sim.bus import SimBus
from kvbus.testing.sim.loop import Actor, SimLoop
from kvbus.testing.sim.settings import CALM
from kvbus.testing.sim.trail import Trail
from kvbus.topics import Topics
from kvbus.transport import Bus, Delivery, NoAnswer, NotStored, Stored
from tests.unit.helpers.log_promises import LOG, LOG_PROMISES, check_that_a_trimmed_log_starts_anew

AGE_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """Two connections of one process to one broker where nothing goes wrong by itself."""

    broker: SimBroker
    one: SimBus
    other: SimBus


def simulated(script: Callable[[Place], Coroutine[object, object, None]]) -> None:
    """Run a script to its end in virtual time; what it raises is raised here."""
    loop = SimLoop("bus", lambda _actor, _text, _error: None)  # type: ignore[abstract] # no I/O here
    broker = SimBroker(loop, "bus", CALM, Trail(loop))
    actor = Actor("tester")
    task = loop.spawn(actor, script(Place(broker, SimBus(broker, actor), SimBus(broker, actor))), "script")
    loop.run(lambda _actor: task.done())
    assert task.done(), "the script waits for what never comes"
    loop.close()
    task.result()


@pytest.mark.parametrize("check", LOG_PROMISES, ids=lambda check: check.__name__)
def test_a_simulated_settle_log_keeps_its_promises(check: Callable[[Bus, Bus], Awaitable[None]]) -> None:
    async def script(place: Place) -> None:
        await check(place.one, place.other)

    simulated(script)


def test_a_simulated_log_forgets_what_is_too_old() -> None:
    # P14
    async def script(place: Place) -> None:
        place.broker.log_age_max_s = AGE_MAX_S

        async def trim() -> None:
            await asyncio.sleep(AGE_MAX_S)  # noqa: TID251 - virtual

        await check_that_a_trimmed_log_starts_anew(place.one, place.other, trim)

    simulated(script)


@pytest.mark.parametrize("keep_store", [True, False])
def test_a_restarted_broker_has_its_log_only_if_it_has_its_store(*, keep_store: bool) -> None:
    async def script(place: Place) -> None:
        await place.one.store(LOG, b"1", message_id="1", after=0)
        place.broker.stop(keep_store=keep_store)
        place.broker.start()
        kept = [Delivery(LOG, b"1", 1)] if keep_store else []
        assert await place.one.history(LOG) == kept
        assert await place.one.last(LOG) == (kept[0] if kept else None)
        behind = await place.other.store(LOG, b"2", message_id="2", after=0)
        assert behind == (NotStored("moved") if keep_store else Stored(1, duplicate=False))

    simulated(script)


@pytest.mark.parametrize("wrong", [Topics().live_facts("a"), Topics().live_settle(), "kv.hb.*"])
def test_what_would_never_be_heard_cannot_be_listened_to(wrong: str) -> None:
    async def script(place: Place) -> None:
        async def hear(_delivery: Delivery) -> None:
            raise AssertionError

        with pytest.raises(ValueError, match="knows no filters"):
            await place.one.subscribe(wrong, hear)

    simulated(script)


@pytest.mark.parametrize("subject", [Topics().facts("a"), Topics().transfer("a", "0" * 32)])
def test_only_settle_logs_are_kept_and_fenced(subject: str) -> None:
    async def script(place: Place) -> None:
        assert isinstance(await place.one.store(subject, b"", message_id="1"), Stored)
        for call in (place.one.last(subject), place.one.history(subject)):
            with pytest.raises(ValueError, match="settle subjects only"):
                await call
        with pytest.raises(ValueError, match="settle subjects only"):
            await place.one.store(subject, b"", message_id="2", after=0)

    simulated(script)


def test_a_call_can_be_cancelled_unless_nobody_may_and_then_the_cancel_fails() -> None:
    ran: list[str] = []

    async def script(_place: Place) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(ran.append, "cancelled").cancel()
        loop.call_later(0.1, ran.append, "cancelled later").cancel()
        stands = loop.call_soon(ran.append, "stands", context=copy_context())
        with pytest.raises(NotImplementedError, match="cancel none"):
            stands.cancel()
        await asyncio.sleep(0.2)  # noqa: TID251 - virtual

    simulated(script)
    assert ran == ["stands"]


def test_what_begins_at_once_takes_a_task_only_where_it_waits() -> None:
    ran: list[str] = []

    async def script(_place: Place) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)

        async def work(name: str, wait_s: float) -> None:
            ran.append(f"{name} begins")
            if wait_s:
                await asyncio.sleep(wait_s)  # noqa: TID251 - virtual
            ran.append(f"{name} ends")

        loop.begin(work("short", 0.0), "short")
        loop.begin(work("long", 0.1), "long")
        ran.append(f"{len(loop.current.tasks)} tasks")
        await asyncio.sleep(0.2)  # noqa: TID251 - virtual

    simulated(script)
    assert ran == ["short begins", "short ends", "long begins", "2 tasks", "long ends"]


def test_what_strikes_after_some_turns_comes_between_two_that_follow_each_other() -> None:
    ran: list[int] = []

    async def script(place: Place) -> None:
        loop, victim = place.broker.loop, Actor("victim")
        began_at = loop.time()

        def turn(number: int) -> None:
            ran.append(number)
            loop.post(victim, turn, number + 1)

        loop.after_turns(victim, 3, lambda: loop.kill(victim))
        loop.post(victim, turn, 0)
        await until_dead(victim)
        assert loop.time() == began_at, "it never rested, and died all the same"

    async def until_dead(victim: Actor) -> None:
        for _ in range(10_000):
            if not victim.alive:
                return
            await asyncio.sleep(0)  # noqa: TID251 - virtual

    simulated(script)
    assert ran == list(range(len(ran)))
    assert 2 <= len(ran) < 1_000


def test_work_that_began_at_once_hears_of_what_failed_while_it_waits() -> None:
    heard: list[str] = []

    async def script(_place: Place) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        fails: asyncio.Future[None] = loop.create_future()

        async def work() -> None:
            try:
                await fails
            except ValueError as error:
                heard.append(str(error))
            await asyncio.sleep(0.1)  # noqa: TID251 - virtual
            heard.append("and goes on")

        loop.begin(work(), "work")
        fails.set_exception(ValueError("it failed"))
        await asyncio.sleep(0.2)  # noqa: TID251 - virtual

    simulated(script)
    assert heard == ["it failed", "and goes on"]


def test_a_process_that_stood_still_past_its_wait_finds_the_answer_that_came_meanwhile() -> None:
    # P18
    answers: list[bytes | NoAnswer] = []

    async def script(place: Place) -> None:
        loop, sleeper = place.broker.loop, Actor("sleeper")
        asker = SimBus(place.broker, sleeper)

        async def answer(_delivery: Delivery) -> bytes:
            await asyncio.sleep(2.0)  # noqa: TID251 - virtual
            return b"late, and yet there"

        async def ask() -> None:
            answers.append(await asker.request("question", b"", wait_s=1.0))

        await place.one.respond("question", answer)
        loop.spawn(sleeper, ask(), "ask")
        await asyncio.sleep(0.5)  # noqa: TID251 - virtual
        loop.pause(sleeper)
        await asyncio.sleep(5.0)  # noqa: TID251 - virtual
        assert not answers
        loop.resume(sleeper)
        await asyncio.sleep(0.1)  # noqa: TID251 - virtual

    simulated(script)
    assert answers == [b"late, and yet there"]


def test_messages_of_one_subscription_are_handled_one_by_one_each_in_a_turn_of_its_own() -> None:
    heard: list[tuple[int, int]] = []

    async def script(place: Place) -> None:
        busy: list[bytes] = []

        async def hear(delivery: Delivery) -> None:
            assert not busy, "two messages are handled at once"
            busy.append(delivery.data)
            heard.append((int(delivery.data), place.broker.loop.step))
            await asyncio.sleep(0.0 if delivery.data == b"3" else 0.01)  # noqa: TID251 - virtual
            busy.clear()

        subscription = await place.one.subscribe("one", hear)
        for number in range(5):
            await place.other.publish("one", b"%d" % number)
        await asyncio.sleep(5.0)  # noqa: TID251 - virtual
        await place.other.publish("one", b"5")
        await asyncio.sleep(5.0)  # noqa: TID251 - virtual
        assert place.one.in_hand == 0
        await subscription.close()
        await asyncio.sleep(0.1)  # noqa: TID251 - virtual
        assert [task.get_name() for task in place.broker.loop.current.tasks.values()] == ["script"]

    simulated(script)
    assert sorted(number for number, _ in heard) == [0, 1, 2, 3, 4, 5]
    assert len({step for _, step in heard}) == len(heard)
