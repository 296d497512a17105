"""A worker's port with a toy engine in its own process: the whole way that a prompt goes on one host."""

import asyncio
import os
import random
import signal
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvbus.codec import pack
from kvbus.engines.base import End, Prefilled, Token
from kvbus.engines.calls import Call, Generation
from kvbus.engines.client import LocalClient, TimedAnswer
from kvbus.engines.desk import Refusal
from kvbus.engines.link import BlockingLink, EngineError, EngineRefusedError, Frame
from kvbus.engines.port import EnginePort
from kvbus.engines.toy import ToyEngine
from kvbus.engines.worker_link import WorkerLink
from kvbus.errors import ConfigError
from kvbus.events import Message, Prompt
from kvbus.names import page_names
from tests.unit.engine_parts import PROMPT, TOY, SmallDesk, Worker, answer_of, worker_with
from tests.waiting import until

TEXT = Prompt(text=PROMPT)
IDS = tuple(PROMPT.encode())
BLOCK = 8
WHOLE = len(IDS) // BLOCK
SLOW = TOY | {"work_rounds": 20_000}
"""About 8 ms a token: a 200-token answer takes longer than everything that a test does to it."""
SLOWER = TOY | {"work_rounds": 200_000}
"""A prompt of 200 tokens takes a quarter of a minute, of which nobody waits for the end."""
END_S = 60.0


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    async with worker_with(tmp_path) as worker:
        yield worker


def cold(client: LocalClient) -> TimedAnswer:
    return client.generate(text=PROMPT, store=False, reuse=False)


def warm(client: LocalClient) -> TimedAnswer:
    return client.generate(text=PROMPT)


async def rest_of(generation: Generation) -> list[Token | End | Refusal]:
    return [step async for step in generation]


async def generated(worker: Worker, prompt: Prompt = TEXT, *, store: bool = True, max_tokens: int = 12) -> End:
    tokens, end = await answer_of(worker.port.generate(prompt, max_tokens=max_tokens, store=store))
    assert isinstance(end, End)
    assert tuple(step.token for step in tokens) == end.tokens
    return end


def flip_a_bit(client: LocalClient) -> None:
    """Change one bit of the first page of the prompt, as a tool of this host finds it."""
    where = client.where(IDS)
    with Path(f"/proc/{where.pid}/fd/{where.fd}").open("r+b", buffering=0) as pool:
        at = where.offset + where.pages[0] * where.stride + 100
        byte = os.pread(pool.fileno(), 1, at)[0]
        os.pwrite(pool.fileno(), bytes([byte ^ 0x40]), at)


# ------------------------------------------------------------------------------------------------ answers and pages


async def test_cold_and_reused_answers_have_the_same_tokens(worker: Worker) -> None:
    await worker.start_engine()
    first, second, third = [await worker.ask(ask) for ask in (cold, warm, warm)]
    assert (first.end.cached_tokens, first.end.stored_blocks) == (0, 0)
    assert (second.end.cached_tokens, second.end.stored_blocks) == (0, WHOLE)
    assert (third.end.cached_tokens, third.end.stored_blocks) == (WHOLE * BLOCK, 0)
    assert first.end.tokens == second.end.tokens == third.end.tokens
    assert 0 < third.ttft_s <= third.total_s


async def test_a_poisoned_page_changes_the_answer_and_can_be_evicted(worker: Worker) -> None:
    await worker.start_engine()
    whole = await worker.ask(warm)
    await worker.ask(flip_a_bit)
    poisoned = await worker.ask(warm)
    assert poisoned.end.cached_tokens == WHOLE * BLOCK
    assert poisoned.end.tokens != whole.end.tokens
    assert await worker.ask(lambda client: client.evict(IDS)) == WHOLE
    assert await worker.ask(lambda client: client.held(IDS)) == 0
    assert (await worker.ask(warm)).end.tokens == whole.end.tokens


async def test_clients_ask_about_tokens_and_pages(worker: Worker) -> None:
    await worker.start_engine()
    assert await worker.ask(lambda client: client.tokenize(text="hé")) == (104, 195, 169)
    chat = [{"role": "user", "content": "hi"}]
    ids = await worker.ask(lambda client: client.tokenize(messages=chat))
    answer = await worker.ask(lambda client: client.generate(ids=ids, max_tokens=3))
    again = await worker.ask(lambda client: client.generate(messages=chat, max_tokens=3))
    assert answer.end.tokens == again.end.tokens
    assert await worker.ask(lambda client: client.held(ids)) == len(ids) // BLOCK
    assert await worker.ask(lambda client: client.held(ids, salt="other")) == 0
    assert await worker.ask(lambda client: client.stats()) == {"handles": 0, "writes": 0}
    with pytest.raises(EngineRefusedError, match="nothing of this prompt"):
        await worker.ask(lambda client: client.where(IDS))


async def test_the_port_tokenizes_and_generates_for_its_worker(worker: Worker) -> None:
    await worker.start_engine()
    assert worker.port.engine is not None
    assert worker.port.engine.engine == "toy"
    assert await worker.port.tokenize(TEXT) == IDS
    assert await worker.port.tokenize(Prompt(tokens=b"\x01\0\0\0")) == (1,)
    chat = Prompt(messages=(Message(role="user", content="hi"),))
    ids = await worker.port.tokenize(chat)
    assert tuple(ToyEngine.load(TOY).tokenize_chat([{"role": "user", "content": "hi"}])) == ids
    assert (await generated(worker)).text == (await worker.ask(cold)).end.text[:12]


@pytest.mark.contract("P9")
async def test_a_prefill_returns_its_pages_pinned_and_a_later_answer_uses_them(worker: Worker) -> None:
    await worker.start_engine()
    prefilled = await worker.port.prefill(IDS, "")
    assert isinstance(prefilled, Prefilled)
    assert (prefilled.blocks, prefilled.computed_tokens, prefilled.cached_tokens) == (WHOLE, WHOLE * BLOCK, 0)
    assert worker.desk.pool.statistics().pages.pinned == WHOLE
    assert await worker.ask(lambda client: client.evict(IDS)) == 0
    worker.desk.release(prefilled.handle)
    reused = await worker.ask(warm)
    assert reused.end.cached_tokens == WHOLE * BLOCK
    assert reused.end.tokens == (await worker.ask(cold)).end.tokens


async def test_a_pool_too_small_for_the_prompt_still_answers(tmp_path: Path) -> None:
    async with worker_with(tmp_path, pages=2) as worker:
        await worker.start_engine()
        answer = await worker.ask(warm)
        assert answer.end.stored_blocks == 0
        assert answer.end.tokens == (await worker.ask(cold)).end.tokens
        refused = await worker.port.prefill(IDS, "")
        assert isinstance(refused, Prefilled)
        assert "pages asked for" in refused.refused
        worker.desk.release(refused.handle)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({"ids": []}, "tokens is empty"),
        ({"text": ""}, "text is empty"),
        ({"ids": [1], "text": "both"}, "exactly one"),
        ({}, "exactly one"),
        ({"ids": [65, 300]}, "out of range"),
        ({"ids": [65] * 3000}, "takes at most 2047"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"text": "x" * (1 << 20)}, "too long"),
        ({"text": "x" * ((1 << 20) - 60)}, "takes at most 2047"),
    ],
)
async def test_a_prompt_that_cannot_be_taken_is_refused_clearly(
    worker: Worker, request_: dict[str, object], says: str
) -> None:
    await worker.start_engine()
    with pytest.raises(EngineRefusedError, match=says):
        await worker.ask(lambda client: client.generate(**request_))  # type: ignore[arg-type]
    assert (await generated(worker)).text


async def test_a_refusal_is_a_value_for_the_worker(worker: Worker) -> None:
    await worker.start_engine()
    assert isinstance(await worker.port.prefill((), ""), Refusal)
    tokens, refusal = await answer_of(worker.port.generate(TEXT, max_tokens=0))
    assert (tokens, type(refusal)) == ([], Refusal)
    surrogate = Prompt(tokens=struct.pack("<I", 300))
    assert isinstance((await answer_of(worker.port.generate(surrogate, max_tokens=1)))[1], Refusal)


async def test_two_clients_at_once_both_get_their_own_answers(worker: Worker) -> None:
    await worker.start_engine()
    other = PROMPT[::-1]

    def asking(text: str) -> Callable[[LocalClient], TimedAnswer]:
        return lambda client: client.generate(text=text)

    answers = await asyncio.gather(*[worker.ask(asking(text)) for text in (PROMPT, other) * 2])
    alone = [(await worker.ask(asking(text))).end for text in (PROMPT, other)]
    assert [answer.end.tokens for answer in answers] == [alone[0].tokens, alone[1].tokens] * 2
    assert alone[0].tokens != alone[1].tokens


# --------------------------------------------------------------------------------------------- cancelling and limits


async def test_a_cancelled_answer_ends_at_its_next_token(worker: Worker) -> None:
    await worker.start_engine(options=SLOW)
    seen: list[Token] = []
    with worker.port.generate(Prompt(text="short"), max_tokens=1000) as generation:
        async for step in generation:
            if isinstance(step, Token):
                seen.append(step)
                generation.cancel()
            else:
                assert isinstance(step, End)
                assert step.reason == "cancelled"
                assert len(step.tokens) == len(seen) < 1000


async def test_an_answer_that_nobody_awaits_any_more_is_cancelled(worker: Worker) -> None:
    await worker.start_engine(options=SLOW)
    with worker.port.generate(Prompt(text="short"), max_tokens=1000) as generation:
        assert isinstance(await anext(generation), Token)
        assert worker.port.statistics().calls_in_flight == 1
    await until(lambda: worker.port.statistics().calls_in_flight == 0, what="the engine ends the call")


async def test_a_client_that_goes_away_cancels_its_answer(worker: Worker) -> None:
    await worker.start_engine(options=SLOW)

    class LeaveError(Exception):
        pass

    def leave(_token: Token) -> None:
        raise LeaveError

    with pytest.raises(LeaveError):
        await worker.ask(lambda client: client.generate(text="short", max_tokens=1000, on_token=leave))
    await until(lambda: worker.port.statistics().calls_in_flight == 0, what="the engine ends the call")


async def test_a_client_may_cancel_and_ask_again_on_the_same_connection(worker: Worker) -> None:
    await worker.start_engine(options=SLOW)

    def cancel_then_ask(client: LocalClient) -> TimedAnswer:
        def stop(_token: Token) -> None:
            raise KeyboardInterrupt

        with suppress(KeyboardInterrupt):
            client.generate(text="short", max_tokens=1000, on_token=stop)
        return client.generate(text="short", max_tokens=2)

    assert len((await worker.ask(cancel_then_ask)).end.tokens) == 2


async def test_a_cancel_that_comes_with_its_request_stops_the_engine(worker: Worker) -> None:
    await worker.start_engine(options=SLOW)
    asks = raw(op="generate", id=2, text="short", max_tokens=1000) + raw(op="cancel", id=3, target=2)

    def exchange() -> Frame:
        by_hand = BlockingLink.connect(worker.path)
        with closing(by_hand):
            by_hand._socket.sendall(CLIENT + asks)
            while (frame := next_frame(by_hand))["op"] not in {"end", "error"}:
                pass
            return frame

    ended = await asyncio.to_thread(exchange)
    assert (ended["op"], ended.get("reason")) == ("end", "cancelled")


async def test_tokenizing_does_not_wait_behind_a_long_answer(worker: Worker) -> None:
    await worker.start_engine(options=SLOW)
    with worker.port.generate(Prompt(text="short"), max_tokens=1000) as generation:
        assert isinstance(await anext(generation), Token)
        assert await worker.port.tokenize(TEXT) == IDS
        assert worker.port.statistics().calls_in_flight == 1


async def test_an_answer_beyond_its_budget_fails_and_is_cancelled(worker: Worker) -> None:
    await worker.start_engine(options=SLOW)
    with pytest.raises(EngineError, match="within the time"):
        await answer_of(worker.port.generate(Prompt(text="short"), max_tokens=1000, budget_s=0.2))
    await until(lambda: worker.port.statistics().calls_in_flight == 0, what="the engine ends the call")


@pytest.mark.contract("P9")
async def test_a_prefill_that_nobody_awaits_any_more_leaves_nothing_pinned(worker: Worker) -> None:
    await worker.start_engine()
    with pytest.raises(EngineError, match="within the time"):
        await worker.port.prefill(IDS, "", budget_s=0.0)
    await until(lambda: worker.port.statistics().calls_in_flight == 0, what="the engine ends the call")
    worker.desk.check_nothing_held()


async def test_more_calls_than_may_wait_are_refused(worker: Worker) -> None:
    await worker.start_engine(options=SLOW)
    waiting = [worker.port.generate(Prompt(text="short"), max_tokens=1000) for _ in range(64)]
    _, refused = await answer_of(worker.port.generate(TEXT, max_tokens=1))
    assert refused == Refusal("64 calls wait for the engine already; try again when some have ended")
    for generation in waiting:
        generation.close()
    await until(lambda: worker.port.statistics().calls_in_flight == 0, END_S, "the engine ends them all")


# ------------------------------------------------------------------------------------------- engines come and go


async def test_without_an_engine_calls_fail_and_clients_are_told(worker: Worker) -> None:
    with pytest.raises(EngineError, match="no engine is attached"):
        await worker.port.tokenize(TEXT)
    with pytest.raises(EngineError, match="no engine is attached"):
        await worker.ask(cold)
    with pytest.raises(EngineRefusedError, match="no pool before an engine"):
        await worker.ask(lambda client: client.held(IDS))


async def test_a_killed_engine_fails_what_waits_gives_back_what_it_held_and_may_be_replaced(worker: Worker) -> None:
    process = await worker.start_engine(options=SLOW)
    stored = await generated(worker, Prompt(text="x" * 64), max_tokens=1)
    assert stored.stored_blocks == 8
    with worker.port.generate(Prompt(text="y" * 64), max_tokens=1000) as generation:
        assert isinstance(await anext(generation), Token)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(EngineError, match="process ended"):
            await rest_of(generation)
    await until(lambda: worker.desk.gone == 1, what="the engine's process is known to have ended")
    worker.desk.check_nothing_held()
    assert len(worker.lost) == 1
    assert worker.port.engine is None
    await worker.start_engine(options=SLOW)
    reused = await generated(worker, Prompt(text="x" * 64), max_tokens=1)
    assert (reused.tokens, reused.cached_tokens) == (stored.tokens, 7 * BLOCK)


async def test_a_second_engine_is_refused_while_one_is_attached(
    worker: Worker, capfd: pytest.CaptureFixture[str]
) -> None:
    first = await worker.start_engine()
    second = worker.spawn()
    assert await asyncio.to_thread(second.wait, END_S) == 2
    assert f"an engine (toy, process {first.pid}) is attached; a worker serves one" in capfd.readouterr().err
    assert (await generated(worker)).text


async def test_an_engine_of_another_layout_is_refused(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    process = await worker.start_engine()
    process.kill()
    await until(lambda: worker.desk.gone == 1, what="the engine's process is known to have ended")
    other = worker.spawn(options=TOY | {"seed": 9})
    assert await asyncio.to_thread(other.wait, END_S) == 2
    assert "another layout" in capfd.readouterr().err


async def test_a_worker_that_closes_over_a_busy_engine_learns_of_its_end_later(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    await worker.port.start()
    process = await worker.start_engine(options=TOY | {"work_rounds": 1_000_000_000})  # minutes for one token
    prefill = asyncio.create_task(worker.port.prefill(IDS, ""))
    await until(lambda: worker.desk.pool.statistics().pages.writing == WHOLE, what="the engine fills pages")
    begun = computed_ticks(process.pid)
    await until(lambda: computed_ticks(process.pid) > begun + 20, END_S, "the engine computes its first token")
    assert await worker.port.close(budget_s=0.05) is False
    assert worker.desk.gone == 0
    assert not worker.path.exists()
    with pytest.raises(EngineError, match="the worker closes"):
        await prefill
    process.kill()
    assert await worker.port.close(budget_s=END_S) is True
    assert worker.desk.gone == 1
    worker.desk.check_nothing_held()
    await asyncio.to_thread(process.wait, END_S)


def computed_ticks(pid: int) -> int:
    """How long a process has computed, in hundredths of a second."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[11])


def hello_by_hand(path: Path) -> BlockingLink:
    """Attach as an engine from this process, which lives on whatever happens to the socket."""
    about = ToyEngine.load(TOY).describe()
    by_hand = BlockingLink.connect(path)
    by_hand.send(
        "hello",
        0,
        role="engine",
        engine="toy",
        version="1",
        model="toy",
        model_digest=about.model_digest,
        layout=about.layout.to_plain(),
        vocab_size=about.vocab_size,
        tokens_max=about.tokens_max,
    )
    return by_hand


def next_frame(by_hand: BlockingLink) -> Frame:
    frame = by_hand.receive(END_S)
    assert frame is not None
    return frame


async def test_what_a_lost_engine_had_still_sent_pins_nothing_and_gives_back(tmp_path: Path) -> None:
    """Its process may be known to be dead already: nobody would ever give back what it asks for then (contract 45)."""
    worker, ids = Worker(tmp_path), struct.pack("<16I", *range(16))
    await worker.port.start()
    engine = hello_by_hand(worker.path)
    assert (await asyncio.to_thread(next_frame, engine))["op"] == "welcome"
    engine.send("match", 1, ids=ids, salt="")
    matched = await asyncio.to_thread(next_frame, engine)
    engine.send("alloc", 2, handle=matched["handle"], first_block=0, count=2)
    write = (await asyncio.to_thread(next_frame, engine))["write"]
    # These lie in the socket when the port hangs up: it has had no turn to read them.
    engine.send("match", 3, ids=ids, salt="")
    engine.send("commit", 4, write=write)
    engine.send("release", 5, handle=matched["handle"])
    assert await worker.port.close(budget_s=0.05) is False
    worker.desk.check_nothing_held()
    engine.close()


async def test_the_pages_of_an_engine_that_only_closed_its_socket_stay_its_own(tmp_path: Path) -> None:
    """A closed socket is no evidence: the process may still be writing (P6)."""
    worker = Worker(tmp_path)
    await worker.port.start()
    engine = hello_by_hand(worker.path)
    assert (await asyncio.to_thread(next_frame, engine))["op"] == "welcome"
    engine.send("match", 1, ids=struct.pack("<16I", *range(16)), salt="")
    matched = await asyncio.to_thread(next_frame, engine)
    engine.send("alloc", 2, handle=matched["handle"], first_block=0, count=2)
    assert "write" in await asyncio.to_thread(next_frame, engine)
    engine.close()
    await until(lambda: worker.lost, what="the engine is lost")
    late = hello_by_hand(worker.path)
    answer = await asyncio.to_thread(next_frame, late)
    assert "has closed its socket but still runs" in str(answer["text"])
    late.close()
    assert await worker.port.close(budget_s=0.05) is False
    assert worker.desk.gone == 0
    assert worker.desk.pool.statistics().pages.writing == 2


@pytest.mark.contract("P1")
async def test_pages_that_a_killed_engine_was_still_filling_are_free_and_named_by_nothing(worker: Worker) -> None:
    process = await worker.start_engine(options=SLOWER)
    prefill = asyncio.create_task(worker.port.prefill(IDS, ""))
    await until(lambda: worker.desk.pool.statistics().pages.writing == WHOLE, what="the engine fills pages")
    process.send_signal(signal.SIGKILL)
    with pytest.raises(EngineError, match="process ended"):
        await prefill
    await until(lambda: worker.desk.gone == 1, what="the engine's process is known to have ended")
    worker.desk.check_nothing_held()
    pages = worker.desk.pool.statistics().pages
    assert (pages.free, pages.cached) == (64, 0)


@pytest.mark.contract("P9")
async def test_a_prefill_that_comes_too_late_for_its_caller_is_released(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    await worker.port.start()
    engine = hello_by_hand(worker.path)
    await asyncio.to_thread(next_frame, engine)
    waiting = asyncio.create_task(worker.port.prefill(IDS, "", budget_s=0.05))
    asked = await asyncio.to_thread(next_frame, engine)
    engine.send("match", 1, ids=asked["ids"], salt="")
    frames = [await asyncio.to_thread(next_frame, engine) for _ in range(2)]  # in either order: the time is short
    with pytest.raises(EngineError, match="within the time"):
        await waiting
    (cancel,) = (frame for frame in frames if frame["op"] == "cancel")
    (matched,) = (frame for frame in frames if frame["op"] != "cancel")
    assert cancel["target"] == asked["id"]
    assert worker.desk.stats()["handles"] == 1
    late: Frame = {"handle": matched["handle"], "blocks": 0, "computed_tokens": 0, "cached_tokens": 0, "refused": ""}
    engine.send("reply", int(str(asked["id"])), **late)
    await until(lambda: worker.desk.stats()["handles"] == 0, what="the handle is released")
    engine.close()
    await worker.port.close(budget_s=0.05)


@pytest.mark.contract("P9")
async def test_a_prefill_that_came_just_as_its_caller_left_is_given_back() -> None:
    unclaimed: list[Frame] = []
    call = Call(
        1,
        "prefill",
        frames_max=1,
        ends_at=0.0,
        on_cancel=lambda _call: pytest.fail("a call that is over is not cancelled"),
        on_unclaimed=lambda _call, frame: unclaimed.append(frame),
    )
    assert call.arrive({"op": "reply", "id": 1, "handle": 5})
    call.leave()
    call.leave()
    assert [frame["handle"] for frame in unclaimed] == [5]


async def test_an_engine_ends_when_its_worker_says_stop(tmp_path: Path) -> None:
    async with worker_with(tmp_path) as worker:
        process = await worker.start_engine(options=SLOW)
        with worker.port.generate(Prompt(text="x" * 200), max_tokens=1000):
            assert worker.port.statistics().calls_in_flight == 1
    assert await asyncio.to_thread(process.wait, END_S) == 0


async def test_an_engine_ends_when_its_workers_socket_closes(worker: Worker) -> None:
    process = await worker.start_engine(options=SLOWER)
    prefill = asyncio.create_task(worker.port.prefill(IDS, ""))
    await until(lambda: worker.desk.pool.statistics().pages.writing == WHOLE, what="the engine fills pages")
    for connection in worker.port._connections:
        connection.hang_up()
    with pytest.raises(EngineError):
        await prefill
    assert await asyncio.to_thread(process.wait, END_S) == 0
    await until(lambda: worker.desk.gone == 1, what="the engine's process is known to have ended")
    await worker.start_engine(options=SLOWER)


@pytest.mark.slow
async def test_an_engine_that_cannot_stop_computing_ends_all_the_same(worker: Worker) -> None:
    process = await worker.start_engine(options=TOY | {"work_rounds": 1_000_000_000})  # minutes for one token
    prefill = asyncio.create_task(worker.port.prefill(IDS, ""))
    await until(lambda: worker.desk.pool.statistics().pages.writing == WHOLE, what="the engine fills pages")
    begun = computed_ticks(process.pid)
    await until(lambda: computed_ticks(process.pid) > begun + 20, END_S, "the engine computes its first token")
    for connection in worker.port._connections:
        connection.hang_up()
    with pytest.raises(EngineError):
        await prefill
    assert await asyncio.to_thread(process.wait, END_S) == 1
    await until(lambda: worker.desk.gone == 1, what="the engine's process is known to have ended")


# ------------------------------------------------------------------------------------------------ peers that misbehave


async def talk(path: Path, *sent: bytes) -> list[Frame]:
    """Send raw bytes and return the frames that come back until the worker closes."""

    def exchange() -> list[Frame]:
        by_hand = BlockingLink.connect(path)
        with closing(by_hand):
            for data in sent:
                by_hand._socket.sendall(data)
            frames: list[Frame] = []
            while (frame := by_hand.receive(END_S)) is not None:
                frames.append(frame)
            return frames

    return await asyncio.to_thread(exchange)


def raw(**fields: object) -> bytes:
    body = pack(fields)
    return struct.pack("<I", len(body)) + body


CLIENT = raw(op="hello", id=1, role="client")


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ([b"GET / HTTP/1.1\r\n\r\n"], "frame length"),
        ([raw(op="generate", id=1)], "first frame must be hello"),
        ([raw(op="hello", id=1)], "role must be a string"),
        ([raw(op="hello", id=1, role="spy")], "role is unknown"),
        ([raw(op="hello", id=1, role="engine", engine="toy")], "version must be a string"),
        ([CLIENT, raw(op="alloc", id=2, handle=1, first_block=0, count=1)], "may not ask this"),
        ([CLIENT, raw(op="held", id=2, ids="text")], "ids must be u32"),
        ([CLIENT, raw(op="cancel", id=2)], "target must be an integer"),
        ([CLIENT, b"\x05\0\0\0\xc1\xc1\xc1\xc1\xc1"], "msgpack"),
    ],
)
async def test_frames_that_make_no_sense_close_that_connection_only(
    worker: Worker, sent: list[bytes], says: str
) -> None:
    await worker.start_engine()
    *_, last = await talk(worker.path, *sent)
    assert (last["op"], last["kind"]) == ("error", "broken")
    assert says in str(last["text"])
    assert worker.port.statistics().broken == 1
    assert (await generated(worker)).text


async def test_no_bytes_of_any_kind_end_the_worker(worker: Worker) -> None:
    await worker.start_engine()
    seeded = random.Random(18)

    def send_nonsense() -> None:
        for _ in range(60):
            good = bytearray(CLIENT + raw(op="generate", id=2, text="a prompt", max_tokens=2) + raw(op="stats", id=3))
            for _ in range(seeded.randint(1, 6)):
                good[seeded.randrange(len(good))] = seeded.randrange(256)
            by_hand = BlockingLink.connect(worker.path)
            with closing(by_hand), suppress(OSError):  # the worker may hang up before all was sent
                by_hand._socket.sendall(good[: seeded.randint(1, len(good))])

    await asyncio.to_thread(send_nonsense)
    await until(lambda: worker.port.statistics().connections == 1, what="all but the engine's connection are closed")
    assert (await generated(worker)).text


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"op": "held", "id": 1, "ids": b""}, "may not ask this"),
        ({"op": "match", "id": 1, "ids": b"abc", "salt": ""}, "ids must be u32"),
        ({"op": "reply", "id": 99}, "nobody made"),
    ],
)
async def test_an_engine_whose_frames_make_no_sense_is_lost(
    tmp_path: Path, fields: dict[str, object], says: str
) -> None:
    worker = Worker(tmp_path)
    await worker.port.start()
    engine = hello_by_hand(worker.path)
    await asyncio.to_thread(next_frame, engine)
    waiting = asyncio.create_task(worker.port.prefill(IDS, ""))
    assert (await asyncio.to_thread(next_frame, engine))["op"] == "prefill"
    engine._socket.sendall(raw(**fields))
    with pytest.raises(EngineError, match="broke the protocol"):
        await waiting
    assert says in worker.lost[0]
    engine.close()
    await worker.port.close(budget_s=0.05)


async def test_a_desk_that_knows_no_such_handle_refuses_and_the_engine_stays(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    await worker.port.start()
    engine = hello_by_hand(worker.path)
    await asyncio.to_thread(next_frame, engine)
    engine.send("release", 1, handle=77)
    answer = await asyncio.to_thread(next_frame, engine)
    assert (answer["id"], answer["kind"]) == (1, "refused")
    assert worker.port.engine is not None
    engine.close()
    await worker.port.close(budget_s=0.05)


async def test_a_client_with_too_many_requests_is_refused_more(worker: Worker) -> None:
    await worker.start_engine(options=SLOW)
    asks = [raw(op="generate", id=number, text="short", max_tokens=900) for number in range(2, 19)]

    def exchange() -> Frame:
        by_hand = BlockingLink.connect(worker.path)
        with closing(by_hand):
            by_hand._socket.sendall(CLIENT + b"".join(asks))
            while (frame := next_frame(by_hand))["op"] != "error":
                pass
            return frame

    refused = await asyncio.to_thread(exchange)
    assert (refused["id"], refused["kind"]) == (18, "refused")
    await until(lambda: worker.port.statistics().calls_in_flight == 0, END_S, "the engine ends them all")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can pretend to be another user")
async def test_another_user_is_refused_even_where_the_socket_is_open_to_all(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.path.parent.chmod(0o711)
    worker.path.chmod(0o666)
    monkeypatch.chdir(worker.path.parent)
    foreign = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    os.seteuid(65534)
    try:
        foreign.connect(worker.path.name)
    finally:
        os.seteuid(0)
    link = BlockingLink(foreign)
    refused = await asyncio.to_thread(next_frame, link)
    link.close()
    assert refused["kind"] == "broken"
    assert "own user" in str(refused["text"])


# ------------------------------------------------------------------------------------------------------- the socket


def port_at(path: Path) -> EnginePort:
    return EnginePort(path, SmallDesk(), lambda _hello: None, lambda _reason: None)


async def test_socket_and_folder_are_for_the_worker_alone(worker: Worker) -> None:
    assert worker.path.parent.stat().st_mode & 0o777 == 0o700
    assert worker.path.stat().st_mode & 0o777 == 0o600


async def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="must belong to this user alone"):
        await port_at(folder / "engine.sock").start()


async def test_a_second_worker_on_the_same_socket_is_refused(worker: Worker) -> None:
    with pytest.raises(ConfigError, match="a worker listens on this socket already"):
        await port_at(worker.path).start()
    await worker.start_engine()
    assert (await generated(worker)).text


async def test_the_socket_of_a_worker_that_died_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "kvbus" / "engine.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(os.fspath(path))
    port = port_at(path)
    await port.start()
    assert await port.close()
    assert not path.exists()


async def test_representations_and_counters_are_for_people(worker: Worker) -> None:
    await worker.start_engine()
    assert repr(worker.port).startswith(f"<EnginePort {worker.path} engine=<AttachedEngine toy pid=")
    counts = worker.port.statistics()
    assert (counts.attached, counts.lost, counts.broken, counts.calls_in_flight) == (1, 0, 0, 0)


async def test_a_client_has_all_names_forgotten(worker: Worker) -> None:
    # contract 24
    await worker.start_engine()
    whole = await worker.ask(warm)
    assert await worker.ask(lambda client: client.forget()) == WHOLE
    assert await worker.ask(lambda client: client.held(IDS)) == 0
    again = await worker.ask(warm)
    assert (again.end.cached_tokens, again.end.stored_blocks) == (0, WHOLE)
    assert again.end.tokens == whole.end.tokens


async def test_an_engine_has_all_names_forgotten(tmp_path: Path) -> None:
    # contract 24
    worker = Worker(tmp_path)
    await worker.port.start()
    engine = hello_by_hand(worker.path)
    assert (await asyncio.to_thread(next_frame, engine))["op"] == "welcome"
    names = page_names(worker.desk.pool.memory.layout.namespace(""), IDS[: 2 * BLOCK], BLOCK)
    lease = worker.desk.pool.lend_write(names, range(2), for_peer=False)
    assert lease.poll() is not None
    lease.mark_arrived((True, True))
    lease.release()
    link = WorkerLink(engine)
    reader = threading.Thread(target=link.read)
    reader.start()
    assert await asyncio.to_thread(link.forget) == 2
    assert worker.desk.held(IDS, "") == 0
    engine.hang_up()
    await asyncio.to_thread(reader.join, END_S)
    engine.close()
    assert await worker.port.close(budget_s=0.05) is False  # this very process is the engine, and lives on
