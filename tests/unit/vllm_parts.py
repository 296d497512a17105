"""A small vLLM: its scheduler's rules about blocks, parked loads and held blocks, and a cache that shows wrong bytes.

The scheduler keeps the asserts of the real one, at which the real one dies. Blocks hold what a forward pass wrote or a
load brought; an answer is made of every byte of the prompt's blocks, so a torn, stale or foreign block changes it.
Both sides of the connector are the real ones, and so are mover, desk and pool.
"""

import hashlib
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvbus.engines.desk import Hello, Refusal
from kvbus.engines.link import EngineError
from kvbus.engines.vllm_mover import Mover, Session
from kvbus.engines.vllm_orders import Report
from kvbus.engines.vllm_scheduler import SchedulerSide
from kvbus.engines.vllm_settings import VllmSettings
from kvbus.engines.vllm_worker import WorkerSide
from kvbus.pool.layout import PageLayout
from kvbus.pool.memory import PoolMemory
from kvbus.processes import identity
from tests.unit.engine_parts import DeskCalls, SmallDesk
from tests.waiting import wait_until

BLOCK = 8
LAYOUT = PageLayout("opaque", 1, 1, BLOCK, 32, "uint8", 0, 1, "ab12")
SETTINGS: dict[str, object] = {"socket": "/nowhere.sock"}


def content(ids: Sequence[int]) -> bytes:
    """The KV of the last block of these ids: a function of all of them."""
    digest = hashlib.blake2b(b"".join(token.to_bytes(4, "little") for token in ids)).digest()
    return (digest * 4)[: LAYOUT.page_bytes]


def right_answer(ids: Sequence[int]) -> str:
    """What comes of a prompt whose blocks all hold what they should."""
    whole = len(ids) // BLOCK
    return hashlib.blake2b(b"".join(content(ids[: BLOCK * (row + 1)]) for row in range(whole))).hexdigest()


@dataclass(eq=False, slots=True)
class MiniRequest:
    """A request with the attributes of vLLM's own that the connector reads, and what its scheduler keeps of it."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int = 2
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    kv_transfer_params: dict[str, object] | None = None
    cache_salt: str | None = None
    lora_request: object = None
    mm_features: list[object] = field(default_factory=list)
    skip_reading_prefix_cache: bool = False
    status: str = "waiting"
    blocks: list[int] = field(default_factory=list)
    made: int = 0
    answer: str = ""
    says: dict[str, object] | None = None
    external_tokens: int = 0


class Calls(DeskCalls):
    """The worker's desk without a socket between; it may be lost, as a worker is that dies."""

    def __init__(self, desk: SmallDesk) -> None:
        super().__init__(desk)
        self.closed = threading.Event()
        self.made = 0

    def match(self, ids: Sequence[int], salt: str) -> tuple[int, tuple[int, ...]]:
        self._require()
        return super().match(ids, salt)

    def alloc(self, handle: int, first_block: int, count: int) -> tuple[int, tuple[int, ...]] | str:
        self._require()
        return super().alloc(handle, first_block, count)

    def commit(self, write: int) -> None:
        self._require()
        super().commit(write)

    def abandon(self, write: int) -> None:
        self._require()
        super().abandon(write)

    def release(self, handle: int) -> None:
        self._require()
        super().release(handle)

    def _require(self) -> None:
        self.made += 1
        if self.closed.is_set():
            raise EngineError("the worker is gone")


class Memory:
    """vLLM's blocks, and a copier over them that a test may stop in the middle, or break."""

    def __init__(self, blocks: int) -> None:
        self.blocks = np.zeros((blocks, LAYOUT.page_bytes), np.uint8)
        self.going = threading.Event()
        self.going.set()
        self.copying = threading.Event()
        self.fails = False

    def load(self, pool: PoolMemory, pages: Sequence[int], block_ids: Sequence[int]) -> None:
        self._wait()
        for page, block in zip(pages, block_ids, strict=True):
            self.blocks[block] = pool.page_bytes(page)

    def store(self, pool: PoolMemory, pages: Sequence[int], block_ids: Sequence[int]) -> None:
        self._wait()
        for page, block in zip(pages, block_ids, strict=True):
            pool.page_bytes(page)[:] = self.blocks[block]

    def _wait(self) -> None:
        self.copying.set()
        assert self.going.wait(60)
        if self.fails:
            raise RuntimeError("planted in the copy")


class Now:
    """Look-ups that are answered from the desk at once; `away` and `slow` make them what a worker can be."""

    def __init__(self, desk: SmallDesk) -> None:
        self.desk = desk
        self.away = False
        self.slow = False
        self.asked: list[str] = []
        self.late = 0
        self._answers: dict[str, int] = {}

    def put(self, key: str, ids: tuple[int, ...], salt: str) -> bool:
        self.asked.append(key)
        if not self.away and not self.slow:
            self._answers[key] = self.desk.held(ids, salt)
        return not self.away

    def take(self, key: str) -> int | None:
        return self._answers.get(key)

    def drop(self, key: str) -> None:
        self._answers.pop(key, None)

    def overdue(self, key: str) -> None:
        assert key not in self._answers
        self.late += 1

    def forget(self) -> None:
        if not self.away:
            self.desk.forget()


class MiniVllm:
    """One engine with its connector; `step` is one turn of its loop."""

    def __init__(
        self,
        blocks: int = 32,
        *,
        pages: int = 64,
        desk: SmallDesk | None = None,
        chunk: int = 4096,
        **settings: object,
    ) -> None:
        self.chunk = chunk
        self.desk = desk or SmallDesk(pages)
        layout: dict[str, object] = dict(LAYOUT.to_plain())
        hello = Hello("vllm", "0.32.0", "mini", LAYOUT.model_digest, layout, 1000, 4096, identity())
        assert not isinstance(self.desk.welcome(hello), Refusal)
        self.memory = Memory(blocks)
        self.lookups = Now(self.desk)
        self.time = 0.0
        checked = VllmSettings.from_plain(SETTINGS | settings)
        self.scheduling = SchedulerSide(checked, BLOCK, self.lookups, lambda: self.time)
        self.mover = Mover(self.memory)
        self.calls = Calls(self.desk)
        self.working = WorkerSide(self.mover)
        self.requests: dict[str, MiniRequest] = {}
        self.free = list(range(blocks))
        self._waiting: list[MiniRequest] = []
        self._running: list[MiniRequest] = []
        self._received: set[str] = set()
        self._total = blocks
        self.mover.attach(Session(self.calls, self.desk.pool.memory))
        self._thread = threading.Thread(target=self.mover.run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the mover."""
        self.memory.going.set()
        self.mover.stop()
        self._thread.join(60)

    # The scheduler, as vLLM's does it -------------------------------------------------------------------------------

    def add(self, request: MiniRequest) -> MiniRequest:
        self.requests[request.request_id] = request
        self._waiting.append(request)
        self.scheduling.arrived(request)
        return request

    def abort(self, request: MiniRequest) -> None:
        parked = request.status == "parked" and request.request_id not in self._received
        self._received.discard(request.request_id)
        for queue in (self._waiting, self._running):
            if request in queue:
                queue.remove(request)
        request.status = "finished"
        self._finish(request, delay=parked)

    def preempt(self, request: MiniRequest) -> None:
        self._running.remove(request)
        self._give_back(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = "preempted"
        self._waiting.insert(0, request)

    def step(self) -> None:
        scheduled = self._schedule()
        orders = self.scheduling.orders(scheduled, lambda key: self.requests[key].blocks if key in scheduled else None)
        orders = pickle.loads(pickle.dumps(orders))  # noqa: S301 - our own bytes, a moment ago
        self.working.before_forward(orders)
        for key, tokens in scheduled.items():
            self._forward(self.requests[key], tokens)
        self.working.begin_loads(orders)
        self.working.begin_stores(orders)
        self._update(scheduled, self.working.report() or Report())

    def until(self, holds: Callable[[], object]) -> None:
        """Step until something holds."""

        def holds_now() -> object:
            self.step()
            return holds()

        wait_until(holds_now)

    def run(self, *requests: MiniRequest) -> None:
        """Step until these have finished, and everything is back."""
        self.until(lambda: all(request.status == "finished" for request in requests))

    def settle(self) -> None:
        """Step until nothing is going on, and check that nothing is left behind on either side."""
        self.until(lambda: len(self.free) == self._total and self.scheduling.is_idle)
        assert not self.requests
        assert not self.working.is_busy
        self.desk.check_nothing_held()

    def _schedule(self) -> dict[str, int]:
        scheduled = {request.request_id: self._tokens(request) for request in self._running}
        for request in tuple(self._waiting):
            if request.status == "parked":
                if request.request_id not in self._received:
                    continue
                self._received.discard(request.request_id)
                request.status = "waiting"
                if not request.num_computed_tokens:
                    self._give_back(request)
                self.scheduling.allocated(request, partial(getattr, request, "blocks"), 0)
            external, parks = 0, False
            if not request.num_computed_tokens:
                found, parks = self.scheduling.matched(request, 0)
                if found is None:
                    continue
                external = found
                assert external or not parks
            if not self._allocate(request):
                break
            if external:
                self.scheduling.allocated(request, partial(getattr, request, "blocks"), external)
                request.external_tokens = request.num_computed_tokens = external
            if parks:
                request.status = "parked"
                continue
            self._waiting.remove(request)
            self._running.append(request)
            request.status = "running"
            scheduled[request.request_id] = self._tokens(request)
        return scheduled

    def _tokens(self, request: MiniRequest) -> int:
        """How many of a request's tokens one step computes: at most a chunk of its prompt."""
        return max(1, min(self.chunk, len(request.prompt_token_ids) - request.num_computed_tokens))

    def _allocate(self, request: MiniRequest) -> bool:
        wanted = -(-(len(request.prompt_token_ids) + request.max_tokens) // BLOCK) - len(request.blocks)
        if wanted > len(self.free):
            return False
        request.blocks += [self.free.pop(0) for _ in range(wanted)]
        return True

    def _forward(self, request: MiniRequest, tokens: int) -> None:
        ids, computed = request.prompt_token_ids, request.num_computed_tokens
        for row in range(computed // BLOCK, min(computed + tokens, len(ids)) // BLOCK):
            self.memory.blocks[request.blocks[row]] = np.frombuffer(content(ids[: BLOCK * (row + 1)]), np.uint8)
        if computed + tokens >= len(ids):
            whole = request.blocks[: len(ids) // BLOCK]
            request.answer = hashlib.blake2b(self.memory.blocks[whole].tobytes()).hexdigest()

    def _update(self, scheduled: dict[str, int], report: Report) -> None:
        for request in self._waiting:
            if request.status == "parked":
                for row, block in enumerate(request.blocks):
                    if block in report.failed_blocks and row * BLOCK < request.num_computed_tokens:
                        request.num_computed_tokens = row * BLOCK
                        break
        for key, tokens in scheduled.items():
            request = self.requests[key]
            request.num_computed_tokens += tokens
            request.made += request.num_computed_tokens >= len(request.prompt_token_ids)
            if request.made >= request.max_tokens:
                self._running.remove(request)
                request.status = "finished"
                self._finish(request, delay=False)
        kept = self.scheduling.heard(report)
        for key in kept.received:
            assert key in self.requests, "vLLM dies of an id that it does not know"
            if self.requests[key].status == "parked":
                self._received.add(key)
            else:
                assert self.requests[key].status == "finished"
                self._forget(self.requests[key])
        for key in kept.sent:
            assert key in self.requests, "vLLM dies of an id that it does not know"
            self._forget(self.requests[key])

    def _finish(self, request: MiniRequest, *, delay: bool) -> None:
        held, request.says = self.scheduling.finished(request)
        if not delay and not held:
            self._forget(request)

    def _forget(self, request: MiniRequest) -> None:
        del self.requests[request.request_id]
        self._give_back(request)

    def _give_back(self, request: MiniRequest) -> None:
        assert not set(request.blocks) & set(self.free), "blocks were freed twice"
        self.free += request.blocks
        request.blocks = []


def ids_of(name: str, blocks: int, extra: int = 3) -> list[int]:
    """A prompt that no other name shares."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    return [(seed + 7 * row) % 1000 for row in range(BLOCK * blocks + extra)]


def stored(vllm: MiniVllm, name: str, blocks: int = 5) -> list[int]:
    """A prompt that the pool has."""
    ids = ids_of(name, blocks)
    vllm.run(vllm.add(MiniRequest(f"first {name}", ids)))
    vllm.settle()
    assert vllm.desk.held(tuple(ids), "") == blocks
    return ids
