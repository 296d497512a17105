"""The vLLM connector where things go wrong or change: weights, full queues, calls that are left, silent workers."""

import asyncio
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvbus.commands.vllm_launch import ServerPlan
from kvbus.engines.base import Description
from kvbus.engines.client import LocalClient
from kvbus.engines.link import BlockingLink, EngineError, as_column
from kvbus.engines.process import attach
from kvbus.engines.vllm_jobs import Jobs
from kvbus.engines.vllm_link import WorkerAttachment
from kvbus.engines.vllm_lookups import Lookups
from kvbus.engines.vllm_mover import ORDERS_MAX, Mover, Session
from kvbus.engines.vllm_orders import Load, Store
from kvbus.engines.vllm_server import Server, Step
from kvbus.engines.worker_link import Job, WorkerLink
from kvbus.errors import ConfigError
from tests.unit.engine_parts import ROOT, Worker, worker_with
from tests.unit.vllm_parts import BLOCK, LAYOUT, Calls, Memory, MiniRequest, MiniVllm, ids_of, right_answer, stored
from tests.waiting import until, wait_until

ABOUT = Description("vllm", "0.32.0", "mini", LAYOUT.model_digest, LAYOUT, 1000, 4096)


@pytest.fixture
def mini() -> Iterator[MiniVllm]:
    vllm = MiniVllm()
    yield vllm
    vllm.close()


def order(name: str, ids: list[int], blocks: int) -> Store:
    return Store(name, as_column(ids[: BLOCK * blocks]), "", tuple(range(blocks)))


def standing_still(vllm: MiniVllm, name: str = "stands still") -> None:
    """Have the mover stand in the middle of a copy, until `vllm.memory.going` is set."""
    vllm.memory.going.clear()
    vllm.memory.copying.clear()
    vllm.mover.store(order(name, ids_of(name, 2), 2))
    assert vllm.memory.copying.wait(60)


def fill(vllm: MiniVllm) -> None:
    """Fill the mover's queue with loads of nothing."""
    while not vllm.mover.counts["turned_away"]:
        vllm.mover.load(Load("nothing", b"", "", 0, ()))


def go_on(vllm: MiniVllm) -> None:
    vllm.memory.going.set()
    wait_until(lambda: len(vllm.mover.take_ended()) == 0 and vllm.mover.is_quiet)


# Other weights -------------------------------------------------------------------------------------------------------


def test_an_idle_engine_forgets_without_a_step_and_asks_for_one_that_tells_the_mover(mini: MiniVllm) -> None:
    # contract 24
    ids = stored(mini, "idle")
    mini.scheduling.forget()
    assert mini.desk.held(tuple(ids), "") == 0, "no step was made"
    wanted = [mini.scheduling.wants_step]
    mini.step()
    wanted.append(mini.scheduling.wants_step)
    assert wanted == [True, False]
    mini.settle()


class Later(LocalClient):
    """A client that finds nobody at first."""

    is_there = threading.Event()

    def connect(self) -> None:
        if not self.is_there.is_set():
            raise EngineError("nobody listens yet")
        super().connect()


async def test_the_look_ups_thread_tells_the_worker_to_forget_and_one_that_was_away_once_it_is_there() -> None:
    # contract 24
    ids = tuple(b"a prompt of some length, which makes a few whole blocks")
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        async with worker_with(Path(folder)) as worker:
            await worker.start_engine()
            await worker.ask(lambda client: client.generate(ids=ids, max_tokens=1))
            early, lookups = Lookups(worker.path, Later), Lookups(worker.path)
            assert worker.desk.held(ids, "")
            lookups.start()
            await until(lambda: lookups.is_near)
            lookups.forget()
            await until(lambda: worker.desk.held(ids, "") == 0)
            await worker.ask(lambda client: client.generate(ids=ids, max_tokens=1))
            early.forget()
            early.start()
            await until(early._questions.empty)
            assert worker.desk.held(ids, "")
            Later.is_there.set()
            await until(lambda: worker.desk.held(ids, "") == 0)
            early.stop()
            lookups.stop()


def test_a_prompt_that_was_half_computed_with_other_weights_is_not_stored() -> None:
    vllm = MiniVllm(chunk=11)
    ids = ids_of("half", 5)
    request = vllm.add(MiniRequest("request", ids))
    vllm.step()
    assert 0 < request.num_computed_tokens < len(ids)
    vllm.scheduling.forget()
    vllm.run(request)
    vllm.settle()
    assert vllm.desk.held(tuple(ids), "") == 0
    vllm.close()


def test_a_prompt_that_was_loaded_with_other_weights_is_not_stored(mini: MiniVllm) -> None:
    ids = stored(mini, "loaded", 3)[: 3 * BLOCK] + ids_of("behind it", 3)
    mini.memory.going.clear()
    request = mini.add(MiniRequest("request", ids))
    mini.step()
    assert request.status == "parked"
    mini.scheduling.forget()
    mini.memory.going.set()
    mini.run(request)
    mini.settle()
    assert mini.desk.held(tuple(ids), "") == 0


def test_what_was_found_before_the_weights_changed_is_not_loaded_and_the_prompt_is_stored_anew(mini: MiniVllm) -> None:
    ids = stored(mini, "found")
    request = mini.add(MiniRequest("request", ids))
    mini.scheduling.forget()
    mini.run(request)
    assert (request.external_tokens, mini.scheduling.counts["loads"]) == (0, 0)
    mini.settle()
    assert mini.desk.held(tuple(ids), "") == 5


def test_a_forget_that_finds_the_queue_full_takes_what_was_put_before_it_and_nothing_that_comes_later(
    mini: MiniVllm,
) -> None:
    before, after = ids_of("before", 3), ids_of("after", 3)
    standing_still(mini)
    mini.mover.store(order("before", before, 3))
    fill(mini)
    mini.mover.forget()
    go_on(mini)
    assert mini.desk.held(tuple(before), "") == 0
    mini.mover.store(order("after", after, 3))
    go_on(mini)
    assert mini.desk.held(tuple(after), "") == 3
    mini.desk.check_nothing_held()


def test_a_second_forget_while_the_first_is_told_is_told_too(mini: MiniVllm) -> None:
    told: list[int] = []
    tell = mini.calls.forget

    def forget() -> int:
        told.append(len(told))
        if len(told) == 1:
            mini.mover.forget()
        return tell()

    mini.calls.forget = forget  # type: ignore[method-assign]
    mini.mover.forget()
    go_on(mini)
    assert told == [0, 1]


def test_a_worker_that_comes_back_forgets_before_it_is_asked_for_anything_that_was_put_later(mini: MiniVllm) -> None:
    ids, later = stored(mini, "away"), ids_of("later", 3)
    mini.mover.detach()
    mini.mover.forget()
    go_on(mini)
    assert mini.desk.held(tuple(ids), "") == 5
    order_of_calls: list[str] = []

    class Noting(Calls):
        def match(self, ids: Sequence[int], salt: str) -> tuple[int, tuple[int, ...]]:
            order_of_calls.append("match")
            return super().match(ids, salt)

        def forget(self) -> int:
            order_of_calls.append("forget")
            return super().forget()

    # The order comes between the session and whatever `attach` puts behind it.
    mini.mover.session = Session(Noting(mini.desk), mini.desk.pool.memory)
    mini.mover.store(order("later", later, 3))
    go_on(mini)
    assert order_of_calls == ["forget", "match"]
    assert (mini.desk.held(tuple(ids), ""), mini.desk.held(tuple(later), "")) == (0, 3)


# Stores whose requests end -------------------------------------------------------------------------------------------


def test_a_store_whose_request_is_preempted_and_aborted_at_once_counts_no_more(mini: MiniVllm) -> None:
    ids, other = ids_of("victim", 5), ids_of("other", 5)
    mini.memory.going.clear()
    victim = mini.add(MiniRequest("victim", ids, max_tokens=10))
    mini.step()
    assert mini.memory.copying.wait(60)
    mini.free.clear()
    mini.preempt(victim)
    mini.abort(victim)
    usurper = mini.add(MiniRequest("usurper", other, max_tokens=1))
    mini.step()
    assert set(usurper.blocks) | set(mini.free) >= set(range(5)), "nothing of the victim's is held"
    mini.memory.going.set()
    mini.free += range(7, 32)
    mini.run(usurper)
    assert usurper.answer == right_answer(other)
    mini.settle()
    assert mini.desk.held(tuple(ids), "") == 0
    assert mini.scheduling.counts["voided"] == 1


def test_a_store_that_was_turned_away_is_remembered_nowhere(mini: MiniVllm) -> None:
    standing_still(mini)
    fill(mini)
    mini.mover.store(order("turned away", ids_of("turned away", 2), 2))
    assert not mini.mover._counts("turned away")
    go_on(mini)


# Calls and handles ---------------------------------------------------------------------------------------------------


def test_a_call_that_was_left_before_it_began_is_not_made(mini: MiniVllm) -> None:
    made: list[Session] = []
    standing_still(mini)
    with pytest.raises(EngineError, match="did not get to this call in time"):
        mini.mover.call(made.append, 0.01, lambda *_: None)
    go_on(mini)
    assert not made
    mini.desk.check_nothing_held()


def test_a_call_that_was_left_under_way_gives_back_what_it_then_gets(mini: MiniVllm) -> None:
    # R4
    ids, going = stored(mini, "pinned"), threading.Event()

    def match(session: Session) -> int:
        assert going.wait(60)
        return session.calls.match(ids, "")[0]

    with pytest.raises(EngineError, match="did not get to this call in time"):
        mini.mover.call(match, 0.01, lambda session, handle: session.calls.release(handle))
    going.set()
    go_on(mini)
    mini.desk.check_nothing_held()


def test_a_handle_is_released_where_no_order_has_room_any_more(mini: MiniVllm) -> None:
    # R4
    ids = stored(mini, "released")
    handle = mini.mover.call(lambda now: now.calls.match(ids, "")[0], 10, lambda *_: None)
    standing_still(mini)
    fill(mini)
    mini.mover.let_go(mini.calls, handle)
    go_on(mini)
    mini.desk.check_nothing_held()


@dataclass(frozen=True, slots=True)
class CutShort(Server):
    """A server whose prompt is stored as vLLM's would be, and whose reader goes away behind the first token."""

    mover: Mover
    job: Job

    def answer(
        self, ids: Sequence[int], *, salt: str, max_tokens: int, ours: Mapping[str, object]
    ) -> Generator[Step, None, None]:
        blocks = len(ids) // BLOCK
        store = Store("cut", as_column(list(ids[: BLOCK * blocks])), salt, tuple(range(blocks)), str(ours["mark"]))
        self.mover.store(replace(store, cached_tokens=2 * BLOCK))
        yield Step((max_tokens,), "a")
        self.job.cancelled.set()
        yield Step((max_tokens,), "stop")


def test_an_answer_that_is_cut_says_how_much_of_its_prompt_was_cached(mini: MiniVllm) -> None:
    ids = ids_of("cut", 4)
    ours, theirs = socket.socketpair()
    with closing(BlockingLink(ours)), closing(BlockingLink(theirs)) as worker:
        job = Job({"op": "generate", "id": 7, "ids": as_column(ids), "max_tokens": 3})
        jobs = Jobs(ABOUT, CutShort("http://nowhere", "mini", mini.mover, job), mini.mover)
        jobs._generate(WorkerLink(BlockingLink(ours)), job)
        first, end = worker.receive(60), worker.receive(60)
    assert first is not None
    assert end is not None
    assert (first["op"], end["op"], end["reason"], end["cached_tokens"]) == ("token", "end", "cancelled", 2 * BLOCK)
    go_on(mini)
    mini.desk.check_nothing_held()


def test_a_store_says_how_much_of_its_prompt_was_there_before_its_first_step() -> None:
    vllm = MiniVllm(chunk=11)
    ids = stored(vllm, "partly", 3)[: 3 * BLOCK] + ids_of("behind it", 3)
    said: list[int] = []
    put = vllm.mover.store

    def store(store: Store) -> None:
        said.append(store.cached_tokens)
        put(store)

    vllm.mover.store = store  # type: ignore[method-assign]
    vllm.run(vllm.add(MiniRequest("request", ids)))
    assert said == [3 * BLOCK]
    vllm.settle()
    vllm.close()


def test_the_command_has_vllm_tell_how_much_was_cached_unless_that_is_refused() -> None:
    flag = "--enable-prompt-tokens-details"
    for given, expected in (((), [flag]), ((flag,), [flag]), ((flag.replace("--", "--no-"),), [])):
        command = ServerPlan("python", Path("/s"), ("--model", "m", *given)).command()
        assert [word for word in command if word == flag] == expected


# Workers that are silent, and that start anew ------------------------------------------------------------------------


@asynccontextmanager
async def listening() -> AsyncIterator[Worker]:
    """A worker whose engine is this very process, which does not end with it."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        worker = Worker(Path(folder))
        await worker.port.start()
        try:
            yield worker
        finally:
            await worker.port.close(budget_s=0.01)


def test_a_session_is_left_only_once_the_copy_under_way_in_it_has_returned(mini: MiniVllm) -> None:
    # P8, R4
    standing_still(mini)
    mini.mover.detach()
    assert not mini.mover.has_left
    mini.mover.attach(Session(mini.calls, mini.desk.pool.memory))
    assert not mini.mover.has_left, "a new session says nothing of the old one"
    mini.memory.going.set()
    wait_until(lambda: mini.mover.has_left)


async def test_the_same_process_is_taken_again_once_it_says_that_it_has_left_and_gets_nothing_it_still_held() -> None:
    # P6, P8, R4
    async with listening() as worker:
        first = BlockingLink.connect(worker.path)
        pool = await asyncio.to_thread(attach, first, ABOUT)
        link = WorkerLink(first, pool)
        threading.Thread(target=link.read, daemon=True).start()
        ids = ids_of("held", 3)
        handle, _ = await asyncio.to_thread(link.match, ids, "")
        granted = await asyncio.to_thread(link.alloc, handle, 0, 3)
        assert not isinstance(granted, str)
        first.hang_up()
        await until(lambda: len(worker.lost) == 1)
        await until(link.closed.is_set)
        first.close()

        with closing(BlockingLink.connect(worker.path)) as silent, pytest.raises(ConfigError, match="but still runs"):
            await asyncio.to_thread(attach, silent, ABOUT)
        assert worker.desk.stats() == {"handles": 1, "writes": 1}, "nothing comes back without evidence"
        claims = (
            "import sys; from pathlib import Path; from kvbus.engines.process import attach; "
            "from kvbus.engines.link import BlockingLink; from tests.unit.test_vllm_faults import ABOUT; "
            "attach(BlockingLink.connect(Path(sys.argv[1])), ABOUT, left=True)"
        )
        other = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", claims, str(worker.path)], cwd=ROOT, capture_output=True, text=True
        )
        assert "but still runs" in other.stderr, "what one process has left is no other's to say"
        assert worker.desk.left == 0

        with closing(BlockingLink.connect(worker.path)) as again:
            await asyncio.to_thread(attach, again, ABOUT, left=True)
            assert (worker.desk.left, worker.desk.gone, len(worker.attached)) == (1, 0, 2)
            worker.desk.check_nothing_held()
            with closing(BlockingLink.connect(worker.path)) as third, pytest.raises(ConfigError, match="is attached"):
                await asyncio.to_thread(attach, third, ABOUT, left=True)
        await until(lambda: len(worker.lost) == 2)


async def test_an_engine_that_hung_up_attaches_again_and_only_once_its_copy_has_returned() -> None:
    # P8, R4
    async with listening() as worker:
        memory = Memory(8)
        mover = Mover(memory)
        attachment = WorkerAttachment(worker.path, ABOUT, mover, lambda _: None)
        attachment.start()
        await until(lambda: mover.session is not None)
        memory.going.clear()
        mover.store(order("under way", ids_of("under way", 2), 2))
        await until(memory.copying.is_set)
        assert attachment._blocking is not None
        attachment._blocking.hang_up()
        await until(lambda: worker.port.statistics().refused > 0, 20)
        assert len(worker.attached) == 1, "its copy still writes pages of the session before"
        memory.going.set()
        await until(lambda: len(worker.attached) == 2 and mover.session is not None, 20)
        worker.desk.check_nothing_held()
        attachment.stop()


async def test_another_engine_of_the_same_process_is_taken_once_the_copy_of_the_one_before_has_returned() -> None:
    # P6, P8, R4
    async with listening() as worker:
        memory = Memory(8)
        first, second = Mover(memory), Mover(Memory(8))
        ending = WorkerAttachment(worker.path, ABOUT, first, lambda _: None)
        ending.start()
        await until(lambda: first.session is not None)
        memory.going.clear()
        first.store(order("under way", ids_of("under way", 2), 2))
        await until(memory.copying.is_set)
        ending.stop()
        beginning = WorkerAttachment(worker.path, ABOUT, second, lambda _: None)
        beginning.start()
        await until(
            lambda: worker.port.statistics().refused > 2, what="each try is refused while that copy is under way"
        )
        assert len(worker.attached) == 1, "the copy of the one before still writes pages of its session"
        memory.going.set()
        await until(lambda: len(worker.attached) == 2 and second.session is not None)
        worker.desk.check_nothing_held()
        beginning.stop()


class Anew(LocalClient):
    """A client of a worker that starts anew behind its back: the first connections are to one that is gone."""

    connected = 0
    gone = 1

    def connect(self) -> None:
        """Connect to nobody."""
        type(self).connected += 1

    def held(self, ids: Sequence[int], salt: str = "") -> int:
        if type(self).connected <= self.gone:
            raise EngineError("the worker closed the connection")
        return len(ids) + len(salt)


@pytest.mark.parametrize(("gone", "answer", "connected"), [(1, 3, 2), (2, 0, 2)])
def test_a_look_up_that_meets_an_old_socket_is_asked_once_more_at_once_and_not_a_third_time(
    gone: int, answer: int, connected: int
) -> None:
    class Restarted(Anew):
        pass

    Restarted.gone, Restarted.connected = gone, 0
    lookups = Lookups(Path("/nowhere.sock"), Restarted)
    lookups.start()
    wait_until(lambda: lookups.put("one", (1, 2, 3), ""))
    wait_until(lambda: lookups.take("one") is not None)
    assert (lookups.take("one"), Restarted.connected) == (answer, connected)
    lookups.stop()


def test_the_bound_of_the_queue_is_what_these_tests_fill() -> None:
    vllm = MiniVllm()
    standing_still(vllm)
    fill(vllm)
    assert vllm.mover._orders.qsize() == ORDERS_MAX
    go_on(vllm)
    vllm.close()
