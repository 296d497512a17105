"""Holes of death: a pid that means another process, a first thread that has gone, an engine that was lost (P6, P8).

In P6 sources watch readers with the worker's own process watch, over a small kernel of the simulation's: pids that come
back, pidfds that become readable once all threads have ended, and start times.
"""

# ruff: noqa: SLF001 - a kernel and its processes are one thing

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from kvbus import processes
from kvbus.parts import ProcessIdentity
from kvbus.processes import ProcessWatch
from kvbus.testing.sim.engine import SimEngine
from kvbus.testing.sim.holes.hole import Hole, Patch, patched
from kvbus.testing.sim.holes.script import Script
from kvbus.testing.sim.loop import Actor, SimLoop
from kvbus.testing.sim.truth import SimProcess, SimWatch, Truth

A, B = 1, 2


class Kernel:
    """What the worker's process watch asks a kernel, answered for simulated processes."""

    zombies_count_as_dead = False

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._open: dict[int, SimProcess] = {}
        self._next_fd = 1_000_000

    def pidfd_open(self, pid: int) -> int:
        """Open a pidfd of whoever has that pid now."""
        process = self._truth._processes.get(pid)
        if process is None or not process.alive:
            raise ProcessLookupError(pid)
        self._next_fd += 1
        self._open[self._next_fd] = process
        return self._next_fd

    def close(self, pidfd: int) -> None:
        """Close a pidfd."""
        del self._open[pidfd]

    def start_ticks(self, pid: int) -> int | None:
        """Return when whoever has that pid was started; a zombie has a start time too."""
        process = self._truth._processes.get(pid)
        return process.identity.start_ticks if process is not None and process.alive else None

    def add_reader(self, loop: SimLoop, pidfd: int, call: Callable[..., object], *args: object) -> None:
        """Call once the pidfd is readable: all threads have ended."""
        actor, process = loop.current, self._open[pidfd]
        process.watchers.append((actor, lambda: call(*args)))

    def leader_exits(self, process: SimProcess, leader: Actor) -> None:
        """End a process's first thread: it shows as a zombie from now on, while its other threads run."""
        self._truth.loop.kill(leader)
        if self.zombies_count_as_dead:
            for actor, on_death in process.watchers:
                self._truth.loop.post(actor, on_death)
            process.watchers.clear()


def _booted(truth: Truth) -> tuple[Kernel, AbstractContextManager[None]]:
    kernel = Kernel(truth)
    changes: Sequence[Patch] = [
        (processes, "os", kernel),
        (processes, "start_ticks", kernel.start_ticks),
        (SimWatch, "watch", ProcessWatch.watch),
        (SimLoop, "add_reader", lambda *args: kernel.add_reader(*args)),  # noqa: PLW0108 - a method takes its loop
        (SimLoop, "remove_reader", lambda _loop, _pidfd: None),
    ]
    return kernel, patched(changes)


async def _reused_pid(s: Script) -> None:
    _, booted = _booted(s.truth)
    with booted:
        await s.up()
        await s.cached("i0", A)
        question = s.gate("lend_requested", "i1")
        s.ask("i1", "i0", A)
        await s.caught(question)
        reader = s.kill("i1")
        stranger = s.truth.start("stranger", pid=reader.process.identity.pid)
        s.say(f"{reader.process.name} is gone, a stranger has its pid, {stranger.identity.pid}; its question arrives")
        question.open()
        await s.pause(1.0)
        s.require(s.lent("i0") == 0, "i0 lends to a process that is gone, and watches a stranger that has its pid")
        await s.restarted("i1")
        await s.rest()


def _opened_without_start_time() -> Sequence[Patch]:
    """Open a pidfd of whoever has the pid, and do not look who that is."""
    module: Any = processes

    def by_pid(other: ProcessIdentity) -> int | None:
        try:
            return int(module.os.pidfd_open(other.pid))
        except ProcessLookupError:
            return None

    return [(processes, "open_pidfd", by_pid)]


async def _leader_exited(s: Script) -> None:
    kernel, booted = _booted(s.truth)
    with booted:
        await s.up()
        await s.cached("i0", A)
        gets = s.stall("i1", "_half")
        s.ask("i1", "i0", A)
        await s.stalled(gets)
        reader = s.member("i1")
        s.say(f"the first thread of {reader.process.name} exits, the one that reads goes on")
        kernel.leader_exits(reader.process, reader.actor)
        await s.pause(10.0)
        s.require(s.lent("i0") == 1, "a zombie with a thread that reads was taken for dead")
        gets.open()
        await s.pause(1.0)
        s.kill("i1")
        await s.restarted("i1")
        await s.rest()


@contextmanager
def _zombies_are_dead() -> Iterator[None]:
    """Take what /proc shows, a zombie, for the end of a process."""
    with patched([(Kernel, "zombies_count_as_dead", True)]):
        yield


# ---------------------------------------------------------------------------------------------------------------- P8


async def _second_engine(s: Script) -> None:
    await s.up()
    s.compute("i0", A)
    await s.until("the engine of i0 writes", lambda: s.is_writing("i0"))
    frozen, engine = s.freeze_engine("i0"), s.parts("i0").engine
    before, engine._run = engine._run, None
    engine.attach()
    s.say("another engine attaches to i0; the frozen one may still write")
    s.compute("i0", B)
    await s.until("the new engine has stored B", lambda: s.held("i0", B) == 8)
    s.loop.resume(frozen)
    await s.pause(1.0)
    s.check()
    s.require(not s.held("i0", A), "what the lost engine wrote became content")
    if before is not None:
        before.end()
    s.say("the lost engine's process has ended, by its pidfd")
    engine._desk.engine_gone()
    await s.rest()


def _attaching_is_proof() -> Sequence[Patch]:
    """Take a new engine for proof that the last one has ended."""
    attach = SimEngine.attach

    def and_take_back(self: SimEngine) -> None:
        self._desk.engine_gone()
        attach(self)

    return [(SimEngine, "attach", and_take_back)]


HOLES = (
    Hole(
        "P8",
        "another engine attaches while the last one may still write",
        "it got other pages: the leased ones stayed out of use until the process had ended",
        _second_engine,
        lambda: patched(_attaching_is_proof()),
        "its pages are being written",
    ),
    Hole(
        "P6",
        "a reader dies, and its pid comes back before its question arrives",
        "the start time told the two apart: nothing was lent to the dead, nobody watched the stranger",
        _reused_pid,
        lambda: patched(_opened_without_start_time()),
        "i0 lends to a process that is gone",
    ),
    Hole(
        "P6",
        "a reader's first thread has exited, another still reads",
        "only a readable pidfd was taken for death: the pages stayed lent until all threads had ended",
        _leader_exited,
        _zombies_are_dead,
        "is said to have ended, and it is being read",
    ),
)
