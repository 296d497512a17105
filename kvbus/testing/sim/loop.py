"""An event loop whose time is virtual and whose order a seed decides; it knows no I/O and no threads.

Each simulated process is an actor. Inside one actor callbacks run in the order in which they were scheduled, as asyncio
promises; which actor runs next is drawn, since processes know no common order. When nobody is ready, time jumps to the
next timer. An actor that was killed runs nothing any more, whatever it had scheduled: a crash at any step.
"""

import asyncio
import heapq
import random
from asyncio import events, futures
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from kvbus.roles.moments import wake
from kvbus.testing.sim.coroutines import closed, resumed

T = TypeVar("T")

_ACTOR: ContextVar["Actor"] = ContextVar("actor")

_WAKING = frozenset({futures._set_result_unless_cancelled, wake})  # type: ignore[attr-defined] # noqa: SLF001
"""What ends a wait when its time comes: that of `asyncio.sleep`, and that for a `Moment`."""

_Turn = tuple[Callable[..., object], Sequence[object], Context, asyncio.Handle | None]
"""A callback, its arguments and its context; and its handle, where somebody may cancel it."""


class Actor:
    """One simulated process, or one independent device of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.ready: deque[_Turn] = deque()
        self.tasks: dict[int, SimTask[Any]] = {}
        self.context: Context = copy_context()
        self.context.run(_ACTOR.set, self)

    def __repr__(self) -> str:
        return f"<Actor {self.name}{'' if self.alive else ' dead'}>"


class _Fuse(deque[_Turn]):
    """The turns of an actor for which something waits until it has been given so many more; others have a deque."""

    def __init__(self, turns: Iterable[_Turn], left: int, burnt: Callable[[], None]) -> None:
        super().__init__(turns)
        self._left, self._burnt = left, burnt

    def append(self, turn: _Turn) -> None:
        """Give the actor one more turn."""
        super().append(turn)
        self._left -= 1
        if self._left == 0:
            self._burnt()


class SimTask(asyncio.Task[T]):
    """A task that hashes by its number: sets of tasks then have one order in every run."""

    def __init__(
        self, number: int, coro: Coroutine[Any, Any, T], loop: "SimLoop", name: str, context: Context | None
    ) -> None:
        self.number = number  # first: asyncio keeps each task in a set from its own constructor on
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


class SimHandle(asyncio.Handle):
    """A handle without what asyncio asks and keeps for its debug mode: it is made at every step."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: tuple[object, ...], loop: "SimLoop", context: Context
    ) -> None:
        self._context, self._loop, self._callback, self._args = context, loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None

    def cancel(self) -> None:
        """See asyncio; what it would have called is let go."""
        self._cancelled, self._callback, self._args = True, _nothing, ()


class _NoHandle(SimHandle):
    """What callers get who never cancel: one for all, so that a cancel of it would end nothing."""

    __slots__ = ()

    def cancel(self) -> None:
        """Fail: whoever wants to cancel has to get a handle of its own."""
        raise NotImplementedError("this call was made at once, or by a task or a future, which cancel none")


class SimTimer(asyncio.TimerHandle):
    """The same for timers; a cancelled one leaves the heap when its time comes."""

    __slots__ = ()

    def __init__(
        self, when: float, callback: Callable[..., object], args: tuple[object, ...], loop: "SimLoop", context: Context
    ) -> None:
        self._when, self._scheduled = when, True
        self._context, self._loop, self._callback, self._args = context, loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None

    def cancel(self) -> None:
        """See asyncio; what it would have called is let go."""
        self._cancelled, self._callback, self._args = True, _nothing, ()


class SimLoop(asyncio.AbstractEventLoop):
    """Runs one callback a step. `on_fault` hears of exceptions that nobody handled."""

    def __init__(self, seed: str, on_fault: Callable[[Actor, str, BaseException | None], None]) -> None:
        self.step = 0
        self.current = Actor("world")
        self._world = self.current
        self._draw = random.Random(f"{seed}:loop").random
        self._ended = self._task_ended
        self._no_handle = _NoHandle(_nothing, (), self, copy_context())
        self._on_fault = on_fault
        self.now = 0.0
        """What `time()` returns, for those who ask at every step."""
        self.look_step, self.look_s = 0.0, 0.0
        """When to look: from some step on, 0 after this one, and from some time on; at first after each step."""
        self._timers: list[tuple[float, int, SimTimer, Actor | None]] = []
        self._active: list[Actor] = []
        self._sequence = 0
        self._with_tasks: dict[Actor, None] = {}

    # ------------------------------------------------------------------------------------------------- what runs it

    def run(self, look: Callable[[Actor], bool]) -> None:
        """Run step by step until a look says so, or nothing is left that could run."""
        events._set_running_loop(self)  # noqa: SLF001 - what asyncio's own loops do
        active, draw = self._active, self._draw  # this is the innermost loop of every run
        try:
            while True:  # and no condition here: with one, Python 3.11 never specializes this code
                if not active and not self._take_timers():
                    break
                at = int(draw() * len(active))
                actor = active[at]
                ready = actor.ready
                callback, args, context, handle = ready.popleft()
                if not ready:
                    active[at] = active[-1]
                    active.pop()
                if handle is None or not handle._cancelled:  # noqa: SLF001
                    self.step += 1
                    self.current = actor
                    try:
                        context.run(callback, *args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:  # noqa: BLE001 - as asyncio's handles do
                        told = handle or SimHandle(callback, tuple(args), self, context)
                        self._on_fault(actor, f"callback {told!r} let out {error!r}", error)
                if self.step >= self.look_step and look(self.current):
                    break
        finally:
            events._set_running_loop(None)  # noqa: SLF001

    def close(self) -> None:
        """End every actor, so that nothing of a run outlives it."""
        for actor in list(self._with_tasks):
            self.kill(actor)
        self._timers.clear()

    def _take_timers(self) -> bool:
        """Jump to the next timer, and make ready all that are due then; False where nothing can run any more.

        What ends a sleep, or brings something from one actor to another, takes no turn of its own: the turn of whoever
        is woken by it follows, if that one still lives, and nothing that anybody sees could come between the two. One
        that stands still is woken when it goes on, behind all that came for it before.
        """
        timers = self._timers
        while timers and not self._active:
            self.now = now = max(self.now, timers[0][0])
            if now >= self.look_s:
                self.look_step = 0.0
            while timers and timers[0][0] <= now:
                _, _, timer, actor = heapq.heappop(timers)
                if timer._cancelled:  # noqa: SLF001
                    continue
                if actor is None or (timer._callback in _WAKING and not actor.paused):  # noqa: SLF001
                    self._arrived(timer)
                else:
                    self._enqueue(actor, (timer._callback, timer._args, timer._context, timer))  # noqa: SLF001
        return bool(self._active)

    def _arrived(self, timer: "SimTimer") -> None:
        try:
            timer._callback(*timer._args)  # noqa: SLF001
        except Exception as error:  # noqa: BLE001 - as in a turn
            self._on_fault(self._world, f"{timer!r} let out {error!r}", error)

    def _enqueue(self, actor: Actor, turn: _Turn) -> None:
        if not actor.alive:
            return
        if not actor.ready and not actor.paused:
            self._active.append(actor)
        actor.ready.append(turn)

    # ------------------------------------------------------------------------------------------------------- actors

    def kill(self, actor: Actor) -> None:
        """End an actor at once: nothing of it runs any more. Its coroutines are closed outside of the world."""
        if not actor.alive:
            return
        actor.alive = False
        actor.ready.clear()
        if actor in self._active:
            self._active.remove(actor)
        tasks, actor.tasks = list(actor.tasks.values()), {}
        self._with_tasks.pop(actor, None)
        current = asyncio.current_task(self)
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined] # noqa: SLF001 - it dies pending
            if task is not current:
                actor.context.copy().run(closed, task)

    def pause(self, actor: Actor) -> None:
        """Let nothing of an actor run until `resume`: a stopped process, or a machine that swaps."""
        if actor.alive and not actor.paused:
            actor.paused = True
            if actor in self._active:
                self._active.remove(actor)

    def resume(self, actor: Actor) -> None:
        """Let a paused actor go on."""
        if actor.paused:
            actor.paused = False
            if actor.alive and actor.ready:
                self._active.append(actor)

    def spawn(self, actor: Actor, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Start a coroutine as a task of an actor."""
        return self.create_task(work, name=name, context=actor.context.copy())

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run work of the current actor as far as it gets in this turn, mostly to its end; only what waits is a task.

        It is in no task until then: so it may not begin with `asyncio.timeout`.
        """
        try:
            awaited = work.send(None)
        except StopIteration:
            return
        self.spawn(self.current, resumed(work, awaited), name)

    def post(self, actor: Actor, callback: Callable[..., object], *args: object, delay_s: float = 0.0) -> None:
        """Have an actor call something, now or later; it is not taken back."""
        if delay_s > 0:
            self._set_timer(self.now + delay_s, callback, args, actor, actor.context)
        else:
            self._enqueue(actor, (callback, args, actor.context, None))

    def after_turns(self, actor: Actor, turns: int, strike: Callable[[], None]) -> None:
        """Have something called by the world once an actor has been given so many more turns, the last still unrun.

        The world then is one of those that are drawn from: it may come before that turn, or after some more. Never
        where the actor dies before; at once where something waits for this actor already.
        """

        def burnt() -> None:
            actor.ready = deque(actor.ready)
            self._enqueue(self._world, (strike, (), self._world.context, None))

        if turns and not isinstance(actor.ready, _Fuse):
            actor.ready = _Fuse(actor.ready, turns, burnt)
        else:
            strike()

    def arrive(self, delay_s: float, callback: Callable[..., object], *args: object) -> "SimTimer":
        """Have something called later that only wakes an actor, or hands it something: as a wire does, of no actor."""
        return self._set_timer(self.now + delay_s, callback, args, None, self._world.context)

    # ------------------------------------------------------------------------------------- what asyncio asks a loop

    def time(self) -> float:
        """Return virtual seconds."""
        return self.now

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        """See asyncio; the actor is that of the context. What tasks and futures ask for, nobody cancels."""
        if callback is self._ended:  # a book of this loop, not a turn of somebody's
            self._task_ended(*args)  # type: ignore[arg-type]
            return self._no_handle
        if context is None:
            context = copy_context()
            handle = SimHandle(callback, args, self, context)
            self._enqueue(self.current, (callback, args, context, handle))
            return handle
        actor = context.get(_ACTOR, self._world)
        if actor.alive:  # as `_enqueue`, without a call: it is what every step does
            if not actor.ready and not actor.paused:
                self._active.append(actor)
            actor.ready.append((callback, args, context, None))
        return self._no_handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        """See asyncio; there are no threads."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See asyncio."""
        if context is None:
            context = self.current.context if callback in _WAKING else copy_context()  # which waking does not look at
            return self._set_timer(self.now + delay, callback, args, self.current, context)
        return self._set_timer(self.now + delay, callback, args, context.get(_ACTOR, self._world), context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See asyncio; timers of one instant keep their order."""
        if context is None:
            return self._set_timer(when, callback, args, self.current, copy_context())
        return self._set_timer(when, callback, args, context.get(_ACTOR, self._world), context)

    def _set_timer(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[object, ...],
        actor: Actor | None,
        context: Context,
    ) -> "SimTimer":
        handle = SimTimer(when, callback, args, self, context)
        self._sequence += 1
        heapq.heappush(self._timers, (when, self._sequence, handle, actor))
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        """See asyncio."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        """See asyncio; the task belongs to the actor of its context."""
        actor = self.current if context is None else context.get(_ACTOR, self._world)
        self._sequence += 1
        task = SimTask(self._sequence, coro, self, name or str(getattr(coro, "__qualname__", "task")), context)
        if actor.alive:
            actor.tasks[task.number] = task
            self._with_tasks[actor] = None
            task.add_done_callback(self._ended, context=actor.context)
        else:  # made while a dead actor's coroutines are closed
            task._log_destroy_pending = False  # type: ignore[attr-defined] # noqa: SLF001
            coro.close()
        return task

    def _task_ended(self, task: "asyncio.Task[Any]") -> None:
        self.current.tasks.pop(task.number, None)  # type: ignore[attr-defined]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fault(self.current, f"task {task.get_name()} ended with {error!r}", error)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """See asyncio: an exception that a callback let out."""
        error = context.get("exception")
        self._on_fault(self.current, f"{context.get('message')}: {error!r}", error)

    def get_debug(self) -> bool:
        """See asyncio."""
        return False

    def is_running(self) -> bool:
        """See asyncio."""
        return True

    def is_closed(self) -> bool:
        """See asyncio."""
        return False


def _nothing() -> None:
    """What a handle stands for that ends no call: one that was cancelled, or that of nobody."""
