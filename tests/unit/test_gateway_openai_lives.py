"""Answers that do not go as asked: clients that go or take nothing, engines that die, lines that are full."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from kvbus.engines.base import Prefilled
from kvbus.engines.calls import Call, Generation
from kvbus.gateway.answers import Problem
from kvbus.gateway.engines import AT_ENGINE_MAX, WAITING_MAX, Line, LineStatistics
from kvbus.gateway.models import Served
from kvbus.gateway.openai_answers import Answering
from kvbus.gateway.openai_asked import wanted
from kvbus.gateway.openai_text import Cutter, spoken
from kvbus.gateway.openai_told import Ended, Telling
from kvbus.processes import identity
from kvbus.roles.registry import registry_key
from kvbus.transport import BUCKET_INSTANCES
from tests.unit.gateway_parts import stage
from tests.unit.openai_parts import QUICK, room, run_dir_of
from tests.waiting import stand_still, until

SLOW: dict[str, object] = {**QUICK, "work_rounds": 4_000}
"""Some milliseconds a token, so that an answer of thousands does not end by itself while a test looks on."""
LONG = {"model": "b", "prompt": "x" * 16, "max_tokens": 2_000}


async def pieces(answered: httpx.Response) -> AsyncIterator[dict[str, object]]:
    """The chunks of a stream as they come."""
    async for line in answered.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_stops_the_engine_and_nothing_stays_held(tmp_path: Path, *, stream: bool) -> None:
    async with room(tmp_path, SLOW) as here:
        asking = asyncio.ensure_future(here.client.post("/v1/completions", json=LONG | {"stream": stream}))
        await until(lambda: here.worker.port.statistics().calls_in_flight == 1, what="the engine computes")
        asking.cancel()
        await here.at_rest()
        assert here.worker.port.statistics().calls_in_flight == 0
        assert (await here.complete(prompt="y", max_tokens=1))["usage"]["completion_tokens"] == 1


async def test_a_client_that_goes_mid_stream_stops_the_engine(tmp_path: Path) -> None:
    async with room(tmp_path, SLOW) as here:
        async with here.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answered:
            seen = [await anext(chunks) for chunks in [pieces(answered)] for _ in range(3)]
        assert len(seen) == 3
        await here.at_rest()


async def test_a_client_that_goes_while_it_waits_is_forgotten(tmp_path: Path) -> None:
    async with room(tmp_path, SLOW) as here:
        asking = [
            asyncio.ensure_future(here.client.post("/v1/completions", json=LONG)) for _ in range(AT_ENGINE_MAX + 3)
        ]
        await until(lambda: here.line().waiting == 3, what="three wait")
        for one in asking[AT_ENGINE_MAX:]:
            one.cancel()
        await until(lambda: here.line().waiting == 0, what="nobody waits")
        assert here.line().running == AT_ENGINE_MAX
        for one in asking:
            one.cancel()
        await here.at_rest()


async def test_a_prefill_for_a_transfer_waits_for_few_answers_and_not_for_all_that_are_asked(tmp_path: Path) -> None:
    async with room(tmp_path, {**QUICK, "work_rounds": 400}) as here:
        body = {"model": "b", "prompt": "x" * 16, "max_tokens": 200}
        engine = here.worker.processes[0]
        stand_still(engine.pid)  # so that none has been answered before all are asked
        asking = [asyncio.ensure_future(here.client.post("/v1/completions", json=body)) for _ in range(12)]
        await until(lambda: here.line().waiting == 12 - AT_ENGINE_MAX, what="the others wait")
        await until(lambda: here.worker.port.statistics().calls_in_flight == AT_ENGINE_MAX, what="the worker has two")
        prefilling = asyncio.ensure_future(here.worker.port.prefill(tuple(b"y" * 64), ""))
        await until(lambda: here.worker.port.statistics().calls_in_flight == AT_ENGINE_MAX + 1, what="it is behind two")
        engine.send_signal(signal.SIGCONT)
        prefilled = await prefilling
        assert here.line().waiting > 0, "the prefill came behind all answers"
        assert isinstance(prefilled, Prefilled)
        here.worker.desk.release(prefilled.handle)
        assert {answered.status_code for answered in await asyncio.gather(*asking)} == {200}
        await here.at_rest()


async def test_a_client_that_takes_nothing_is_dropped_and_the_engine_freed(tmp_path: Path) -> None:
    async with room(tmp_path, SLOW) as here:
        asked = wanted(LONG | {"stream": True}, is_chat=False)
        taken: list[Message] = []
        never = asyncio.Event()

        async def receive() -> Message:
            await never.wait()
            raise AssertionError("this client says nothing")

        async def send(message: Message) -> None:
            taken.append(message)
            if message["type"] == "http.response.body":
                await never.wait()

        telling = Telling(Served("b", "toy"), is_chat=False)
        answering = Answering(here.stage.parts, asked, telling, send_wait_s=0.05)
        await answering({"type": "http"}, receive, send)
        assert [message["type"] for message in taken] == ["http.response.start", "http.response.body"]
        await here.at_rest()


def hinted(source: str, **more: object) -> dict[str, object]:
    """The field by which a request names a source."""
    return {"kv_transfer_params": {"kvbus": {"source": source, **more}}}


# H37
async def test_a_hint_brings_what_the_source_has_and_where_it_cannot_the_prompt_is_computed(tmp_path: Path) -> None:
    async with room(tmp_path) as here:
        body: dict[str, object] = {"prompt": "A prompt of some blocks. " * 4, "max_tokens": 8}
        plain = (await here.complete(**body))["choices"]
        assert here.stage.b.requests == []
        for params in (hinted("a"), hinted("a", budget_s=2), {"kv_transfer_params": {"another": 1}}, hinted("")):
            assert (await here.complete(**body, **params))["choices"] == plain
        (request,) = here.stage.b.requests  # the second joined it, the others named nobody
        assert (request.source, request.on_miss, request.prompt.text) == ("a", "partial", body["prompt"])

        for source in ("b", "nobody", "http://elsewhere/"):
            assert (await here.complete(**body, **hinted(source)))["choices"] == plain
        here.stage.b.word, here.stage.b.reason = "refused", "it has no room"
        assert (await here.complete(**body, cache_salt="refused", **hinted("a")))["choices"] == plain
        here.stage.b.word, here.stage.b.settles = "accepted", False
        assert (await here.complete(**body, cache_salt="never ends", **hinted("a", budget_s=0.1)))["choices"] == plain
        assert len(here.stage.b.requests) == 3
        stats = await here.stage.stats()
        assert (stats["fired"], stats["transferred"], stats["inflight"]) == (2, 1, 1)
        await here.at_rest()


async def test_an_engine_that_dies_ends_a_stream_with_an_error_and_the_next_engine_serves(tmp_path: Path) -> None:
    async with room(tmp_path, SLOW) as here:
        last: dict[str, object] = {}
        async with here.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answered:
            async for piece in pieces(answered):
                if not last:
                    here.worker.processes[0].send_signal(signal.SIGKILL)
                last = piece
        assert isinstance(last["error"], dict)
        assert last["error"]["type"] == "server_error"
        await until(lambda: here.worker.desk.gone == 1, what="its end is known")
        refused = await here.client.post("/v1/completions", json=LONG)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "no engine is attached" in refused.json()["error"]["message"]
        await here.worker.start_engine(options=SLOW)
        assert (await here.complete(prompt="x", max_tokens=2))["usage"]["completion_tokens"] == 2
        await here.at_rest()


async def test_a_worker_that_goes_fails_what_runs_and_what_is_asked_next(tmp_path: Path) -> None:
    async with room(tmp_path, SLOW) as here:
        asking = asyncio.ensure_future(here.client.post("/v1/completions", json=LONG))
        await until(lambda: here.worker.port.statistics().calls_in_flight == 1, what="the engine computes")
        await here.worker.port.close()
        assert (await asking).status_code == 503
        gone = await here.client.post("/v1/completions", json=LONG)
        assert gone.status_code == 404  # its socket went with it
        assert here.line().running == here.line().waiting == 0


async def test_a_connection_that_breaks_fails_what_runs_and_the_next_one_is_made_anew(tmp_path: Path) -> None:
    async with room(tmp_path, SLOW) as here:
        asking = asyncio.ensure_future(here.client.post("/v1/completions", json=LONG))
        await until(lambda: here.worker.port.statistics().calls_in_flight == 1, what="the engine computes")
        for connection in tuple(here.worker.port._connections):
            connection.hang_up()  # without a last word
        told = await asking
        assert (told.status_code, told.json()["error"]["type"]) == (503, "server_error")
        assert "closed the connection" in told.json()["error"]["message"]
        await until(lambda: here.worker.desk.gone == 1, what="the engine, hung up on as well, has ended")
        assert (here.line().running, here.line().waiting) == (0, 0)
        await here.worker.start_engine(options=SLOW)
        assert (await here.complete(prompt="x", max_tokens=2))["usage"]["completion_tokens"] == 2


async def test_a_worker_that_is_not_the_registered_one_is_asked_nothing(tmp_path: Path) -> None:
    async with room(tmp_path) as here:
        (tmp_path / "other").mkdir()
        run_dir = run_dir_of(here.worker, tmp_path / "other", "b")
        async with stage(run_dir=run_dir) as other:
            record = other.parts.directory.instances["b"]["m0"].record
            elsewhere = record.model_copy(update={"process": identity(os.getppid())})
            await other.bus.put(BUCKET_INSTANCES, registry_key("b", "m0"), other.b.said(elsewhere))
            await other.parts.directory.refresh()
            answered = await other.client.post("/v1/completions", json=LONG)
            assert answered.status_code == 503
            assert "another worker than the registered one" in answered.json()["error"]["message"]
            assert other.parts.engines.statistics()["b"] == LineStatistics(left=1)


async def test_a_full_line_takes_nobody_more_and_moves_on_when_one_leaves() -> None:
    line = Line()
    asking = [asyncio.ensure_future(line.enter()) for _ in range(AT_ENGINE_MAX + WAITING_MAX)]
    await until(lambda: line.statistics().waiting == WAITING_MAX, what="the line is full")
    with pytest.raises(Problem, match="wait for this engine already") as full:
        await line.enter()
    assert (full.value.status, full.value.retry_after_s) == (429, 1)
    line.leave()
    await until(lambda: line.statistics().waiting == WAITING_MAX - 1, what="one moved on")
    assert [one.done() for one in asking[: AT_ENGINE_MAX + 2]] == [True] * (AT_ENGINE_MAX + 1) + [False]
    for one in asking:
        one.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert line.statistics().waiting == 0


async def test_the_engine_is_told_to_stop_once_a_stop_string_is_found() -> None:
    cancelled: list[int] = []
    call = Call(
        7,
        "generate",
        frames_max=9,
        ends_at=asyncio.get_running_loop().time() + 60,
        on_cancel=lambda one: cancelled.append(one.call_id),
        on_unclaimed=lambda _call, _frame: None,
    )
    for text in ("a", "b", "c", "d"):
        call.arrive({"op": "token", "id": 7, "token": 1, "text": text})
    pieces = spoken(Generation(call), ("bc",))
    assert [await anext(pieces)] == ["a"]
    assert cancelled == []
    ending = asyncio.ensure_future(anext(pieces))
    await until(lambda: cancelled == [7], what="the engine is told to stop")
    end = {"tokens": b"", "text": "abcd", "prompt_tokens": 5, "cached_tokens": 4, "stored_blocks": 0}
    call.arrive({"op": "end", "id": 7, "reason": "cancelled", **end})
    assert await ending == Ended("stop", prompt_tokens=5, answer_tokens=3, cached_tokens=4)


WORDS = st.text("abc", min_size=1, max_size=4)


@given(st.lists(st.text("abc", max_size=5)), st.lists(WORDS, max_size=3))
def test_text_is_cut_where_the_first_stop_is_whole_whatever_its_pieces(given: list[str], stops: list[str]) -> None:
    whole = "".join(given)
    ends = [
        (place + len(stop), place) for stop in stops for place in range(len(whole)) if whole.startswith(stop, place)
    ]
    cutter = Cutter(stops)
    said = "".join([*(cutter.push(piece) for piece in given), *cutter.end(whole)])
    assert said == (whole[: min(ends)[1]] if ends else whole)
    assert cutter.is_cut() == bool(ends)


def test_what_tokens_held_back_of_the_text_comes_with_its_end() -> None:
    cutter = Cutter(("xy",))
    assert cutter.push("abx") == "ab"
    assert cutter.end("abx\ufffd") == ["x\ufffd"]
