"""Waits for answers and for what a consumer delivers: each ends by what comes, by its bound, or by being in vain."""

import asyncio

import pytest

from kvbus.bus_answers import Answers, Pulled, first
from kvbus.errors import BusError

LONG_S = 30.0


def nothing_in_vain() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


async def test_an_answer_reaches_the_one_who_asked_and_nobody_else() -> None:
    answers: Answers[str] = Answers()
    with answers.expected() as (one, hears_one), answers.expected() as (other, hears_other):
        assert one != other
        answers.take(other, "yours")
        assert await first(hears_other, LONG_S, nothing_in_vain()) == "yours"
        assert not hears_one.done()
        answers.take("nobody asked", "x")
        answers.take(other, "a second one is dropped")
        assert hears_other.result() == "yours"
    answers.take(one, "too late, and harmless")


async def test_tokens_cannot_be_told_from_one_another() -> None:
    answers: Answers[str] = Answers()
    tokens = set()
    for _ in range(200):
        with answers.expected() as (token, _waiting):
            tokens.add(token)
    assert len(tokens) == 200
    assert {len(token) for token in tokens} == {16}


async def test_a_wait_ends_at_its_bound_and_leaves_nothing_behind() -> None:
    answers: Answers[str] = Answers()
    in_vain = nothing_in_vain()
    with answers.expected() as (_, waiting), pytest.raises(TimeoutError):
        await first(waiting, 0.0, in_vain)
    assert not in_vain.done()
    assert answers._waiting == {}


async def test_an_answer_that_has_arrived_by_the_bound_is_taken_though_the_timer_comes_first() -> None:
    answers: Answers[str] = Answers()
    loop = asyncio.get_running_loop()
    with answers.expected() as (token, waiting):

        def on_its_way(steps: int) -> None:  # from the socket through a reader, a parser and a queue
            if steps:
                loop.call_soon(on_its_way, steps - 1)
            else:
                answers.take(token, "in time")

        asking = asyncio.ensure_future(first(waiting, 0.0, nothing_in_vain()))
        loop.call_soon(on_its_way, 8)
        assert await asking == "in time"


async def test_a_wait_ends_as_soon_as_it_is_in_vain() -> None:
    answers: Answers[str] = Answers()
    in_vain = nothing_in_vain()
    asyncio.get_running_loop().call_soon(in_vain.set_result, None)
    with answers.expected() as (token, waiting):
        asyncio.get_running_loop().call_later(0.2, answers.take, token, "too late")
        with pytest.raises(TimeoutError):
            await first(waiting, LONG_S, in_vain)


async def test_a_closed_connection_ends_all_waits_with_its_error() -> None:
    answers: Answers[str] = Answers()
    pulled: Pulled[str] = Pulled("inbox")
    gone = BusError("gone")
    with answers.expected() as (_, waiting), answers.expected() as (token, answered):
        answers.take(token, "before")
        pulling = asyncio.ensure_future(pulled.next(LONG_S, nothing_in_vain()))
        asyncio.get_running_loop().call_soon(answers.fail, gone)
        asyncio.get_running_loop().call_soon(pulled.fail, gone)
        with pytest.raises(BusError):
            await first(waiting, LONG_S, nothing_in_vain())
        assert await first(answered, LONG_S, nothing_in_vain()) == "before"
        with pytest.raises(BusError):
            await pulling


async def test_a_wait_that_is_cancelled_can_be_answered_afterwards() -> None:
    answers: Answers[str] = Answers()
    with answers.expected() as (token, waiting):
        asking = asyncio.ensure_future(first(waiting, LONG_S, nothing_in_vain()))
        asyncio.get_running_loop().call_soon(asking.cancel)
        with pytest.raises(asyncio.CancelledError):
            await asking
        answers.take(token, "nobody hears it")


async def test_what_was_delivered_is_taken_in_order_without_waiting() -> None:
    pulled: Pulled[int] = Pulled("inbox")
    for number in range(3):
        pulled.put(number)
    assert [await pulled.next(0.0, nothing_in_vain()) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TimeoutError):
        await pulled.next(0.0, nothing_in_vain())
    asyncio.get_running_loop().call_soon(pulled.put, 3)
    assert await pulled.next(LONG_S, nothing_in_vain()) == 3


async def test_a_pull_that_failed_keeps_what_came_before_it() -> None:
    pulled: Pulled[int] = Pulled("inbox")
    pulled.put(1)
    pulled.fail(BusError("gone"))  # nobody waits, so nobody is told
    assert await pulled.next(0.0, nothing_in_vain()) == 1
