"""A simulated engine: tokenizes, prefills and answers as the real ones do over their socket, takes time, and dies.

It asks the member's real desk, each call a message that takes a turn of the loop; it writes pages in two halves, and
checks the bytes of every page that it reads.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from kvbus.engines.base import Prefilled
from kvbus.engines.desk import Matched, Refusal
from kvbus.engines.link import EngineError
from kvbus.errors import PeerError
from kvbus.names import page_names
from kvbus.parts import Prompt
from kvbus.roles.desk import PoolDesk
from kvbus.roles.poolside import PoolSide
from kvbus.testing.sim.loop import Actor
from kvbus.testing.sim.pages import HALF_BYTES, strange, write
from kvbus.testing.sim.prompts import tokens_of
from kvbus.testing.sim.truth import SimProcess, Truth, begin_access, end_access

T = TypeVar("T")
CALL_S = 0.0003
BLOCK_S = 0.004
RESTART_S = 1.0
GIVES_UP = 0.02
"""Chance that an engine fails at a prompt, of which it has written half."""


class SimEngine:
    """One engine process after another, attached to one member; what the member calls its port."""

    def __init__(
        self, truth: Truth, member: Actor, process: SimProcess, pool: PoolSide, desk: PoolDesk, *, seed: str
    ) -> None:
        self._truth = truth
        self._loop = truth.loop
        self._member = member
        self._owner = process
        self._pool = pool
        self._desk = desk
        self._random = random.Random(f"{seed}:engine")
        self._seed = seed
        self._run: _Run | None = None
        self.deaths = self.answers = 0

    def attach(self) -> None:
        """Start an engine process."""
        if self._member.alive and self._run is None:
            self._run = _Run(self._truth, self._owner, self._pool, Actor(f"{self._owner.name}-engine"))

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...] | Refusal:
        """Return a prompt's token ids; EngineError where the engine goes away meanwhile."""
        if prompt.text is None:
            return Refusal("this engine takes tokens and text only")
        text = prompt.text
        return await self._ask(partial(self._tokenized, text))

    async def prefill(self, ids: tuple[int, ...], salt: str, budget_s: float) -> Prefilled | Refusal:
        """Have the engine compute and store a prompt; EngineError where it goes away or takes too long."""
        run = self._attached()
        try:
            async with asyncio.timeout(budget_s):
                prefilled = await self._ask(partial(self._prefilled, run, ids, salt))
        except TimeoutError:
            raise EngineError("the engine did not answer within the budget") from None
        try:
            self._desk.hand_over(prefilled.handle)
        except PeerError as error:
            raise EngineError("the engine was lost just as it had prefilled", reason=str(error)) from error
        return prefilled

    def answer(self, ids: tuple[int, ...], salt: str) -> None:
        """Let the engine answer a prompt by itself: it reads what is cached, and stores what is not."""
        if self._run is not None:
            self._loop.spawn(self._run.actor, self._answered(self._run, ids, salt), "answer")

    def die(self) -> None:
        """Kill the engine process; its member sees the socket close at once, the death proved a little later."""
        run, self._run = self._run, None
        if run is None:
            return
        self.deaths += 1
        run.end()
        if self._member.alive:
            self._truth.trail.note(self._owner.name, "engine dies")
            self._loop.post(self._member, self._gone, delay_s=self._random.random() * 0.3)

    def _gone(self) -> None:
        self._desk.engine_gone()
        self._loop.post(self._member, self.attach, delay_s=self._random.random() * RESTART_S)

    def _attached(self) -> "_Run":
        if self._run is None:
            raise EngineError("no engine is attached to this worker; start one, or wait until it has loaded")
        return self._run

    async def _ask(self, work: Callable[[], Coroutine[object, object, T]]) -> T:
        """Run work in the engine's process, and return what it returns to the member that waits here."""
        run = self._run
        if run is None:
            raise EngineError("no engine is attached to this worker; start one, or wait until it has loaded")
        answer: asyncio.Future[T] = self._loop.create_future()
        run.waiting.append(answer)

        async def carry() -> None:
            value: T | Exception
            try:
                value = await work()
            except EngineError as error:
                value = error
            self._loop.post(self._member, self._answer, answer, value)

        self._loop.spawn(run.actor, carry(), "engine call")
        try:
            return await answer
        except asyncio.CancelledError:
            if not answer.cancelled() and answer.exception() is None:  # it came in the moment of the cancel
                self._give_back(answer.result())
            raise
        finally:
            run.waiting.remove(answer)

    def _answer(self, answer: "asyncio.Future[T]", value: "T | Exception") -> None:
        """Give an answer to whoever waits for it."""
        if answer.done():
            self._give_back(value)
        _settle(answer, value)

    def _give_back(self, value: object) -> None:
        """Release what was prefilled for nobody, as the port does."""
        if isinstance(value, Prefilled):
            with contextlib.suppress(PeerError):  # its engine was lost meanwhile, and its handles with it
                self._desk.release(value.handle)

    # ---------------------------------------------------------------------------------- in the engine's own process

    async def _tokenized(self, text: str) -> tuple[int, ...] | Refusal:
        await asyncio.sleep(self._random.expovariate(1 / CALL_S))
        return tokens_of(text)

    async def _prefilled(self, run: "_Run", ids: tuple[int, ...], salt: str) -> Prefilled:
        """Ask for pages first, compute, store; they stay pinned under the handle that is returned."""
        matched = await self._desk_call(run, lambda: self._desk.match(ids, salt))
        try:
            return await self._filled(run, matched, self._names(ids, salt))
        except EngineError:
            await self._desk_call(run, lambda: self._desk.release(matched.handle))
            raise

    async def _filled(self, run: "_Run", matched: Matched, names: tuple[bytes, ...]) -> Prefilled:
        await run.read(matched.pages, names, self._random.expovariate(1 / CALL_S))
        held = len(matched.pages)
        refused, blocks = "", held
        if held < len(names):
            granted = await self._desk_call(run, lambda: self._desk.alloc(matched.handle, held, len(names) - held))
            if isinstance(granted, Refusal):
                refused = granted.text
            else:
                await self._fill(run, granted.write, granted.pages, names[held:])
                blocks += len(granted.pages)
                refused = "" if blocks == len(names) else f"the pool had room for {blocks} of {len(names)} blocks"
        block = self._pool.layout.block_tokens
        return Prefilled(matched.handle, blocks, (blocks - held) * block, held * block, refused)

    async def _answered(self, run: "_Run", ids: tuple[int, ...], salt: str) -> None:
        try:
            prefilled = await self._prefilled(run, ids, salt)
            await self._desk_call(run, lambda: self._desk.release(prefilled.handle))
        except EngineError:  # the desk refused: too many handles
            return
        self.answers += 1

    async def _fill(self, run: "_Run", write: int, pages: Sequence[int], names: Sequence[bytes]) -> None:
        compute_s = self._random.expovariate(1 / (BLOCK_S * len(pages)))
        await run.write(pages, names, compute_s)
        if self._random.random() < GIVES_UP:
            await self._desk_call(run, lambda: self._desk.abandon(write))
            raise EngineError("the engine gave the prompt up")
        await self._desk_call(run, lambda: self._desk.commit(write))

    async def _desk_call(self, run: "_Run", call: Callable[[], T]) -> T:
        """Send one frame to the desk and await its answer; frames of an engine that was lost are ignored."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def at_the_desk() -> None:
            if self._run is not run:
                return
            value: T | Exception
            try:
                value = call()
            except PeerError as error:
                value = EngineError(str(error))
            _settle(answer, value)  # a frame, which is the next turn of the engine, if that still lives

        self._loop.post(self._member, at_the_desk)
        return await answer

    def _names(self, ids: tuple[int, ...], salt: str) -> tuple[bytes, ...]:
        return page_names(self._pool.layout.namespace(salt), ids, self._pool.layout.block_tokens)


class _Run:
    """One engine process: its actor, what it reads and writes right now, who waits for its answers."""

    def __init__(self, truth: Truth, owner: SimProcess, pool: PoolSide, actor: Actor) -> None:
        self.actor = actor
        self.waiting: list[asyncio.Future[Any]] = []
        self._truth = truth
        self._owner = owner
        self._pool = pool
        self._reading: list[Sequence[int]] = []
        self._writing: list[Sequence[int]] = []

    def end(self) -> None:
        """The process is gone: it touches nothing any more, and answers nobody."""
        self._truth.loop.kill(self.actor)
        for pages in self._reading:
            end_access(self._owner.readers, pages)
        for pages in self._writing:
            end_access(self._owner.writers, pages)
        self._reading.clear()
        self._writing.clear()
        for answer in self.waiting:
            _settle(answer, EngineError("the engine went away"))

    async def read(self, pages: Sequence[int], names: Sequence[bytes], took_s: float) -> None:
        """Read pages whole; they must hold what their names say, at the beginning and at the end."""
        if not pages:
            return
        self._reading.append(pages)
        begin_access(self._owner.readers, pages)
        self._compare(pages, names)
        if took_s:
            await asyncio.sleep(took_s)
            self._compare(pages, names)
        self._reading.remove(pages)
        end_access(self._owner.readers, pages)

    async def write(self, pages: Sequence[int], names: Sequence[bytes], took_s: float) -> None:
        """Fill pages, half before and half after the time that it takes."""
        self._writing.append(pages)
        begin_access(self._owner.writers, pages)
        write(self._pool.memory, pages, 0, names)
        await asyncio.sleep(took_s)
        write(self._pool.memory, pages, HALF_BYTES, names)
        self._writing.remove(pages)
        end_access(self._owner.writers, pages)

    def _compare(self, pages: Sequence[int], names: Sequence[bytes]) -> None:
        for page, name in strange(self._pool.memory, pages, names):
            text = f"the engine reads wrong bytes: p{page} is not what {name.hex()[:8]} says"
            self._truth.trail.violate(self._owner.name, text, f"p{page}")


def _settle(future: "asyncio.Future[T]", value: "T | Exception") -> None:
    """Give an answer to whoever waits for it, if anybody does."""
    if future.done():
        return
    if isinstance(value, Exception):
        future.set_exception(value)
        future.exception()  # it counts as heard: whoever waits may be dead before its turn comes
    else:
        future.set_result(value)
