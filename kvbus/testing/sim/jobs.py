"""Runs batches in processes of their own, and hands their results back in order: nobody sees how many there are.

What a world holds is one process's business, so a batch goes to a process as settings and comes back as a result. The
first batch that breaks a promise is the last whose result is handed back: those before it are waited for, those after
it are ended.
"""

import gc
import logging
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from kvbus.errors import KvbusError
from kvbus.testing.sim.settings import SimSettings
from kvbus.testing.sim.world import SimResult, World

AHEAD_MAX = 8
"""Batches for each process that may be handed out before the oldest has ended: results that wait are bounded by it."""

_GC_THRESHOLDS = (50_000, 20, 100)
"""Objects, and younger looks, between two looks: a world lives in some 100 MB, whatever they are."""

Run = Callable[[SimSettings], SimResult]


class BatchLostError(KvbusError):
    """A batch has no result: its process died, or the simulator itself failed in it."""


def run_world(settings: SimSettings) -> SimResult:
    """Run one batch here."""
    return World(settings).run()


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def results(batches: Sequence[SimSettings], jobs: int, run: Run = run_world) -> Generator[SimResult, None, None]:
    """Yield the batches' results in order, up to the first that broke a promise; close it to end early.

    With one job, or one batch, everything runs here. BatchLostError where a process dies or a batch raises.
    """
    jobs = min(jobs, len(batches))
    if jobs > 1:
        yield from _Crew(batches, jobs, run).results()
        return
    for settings in batches:
        result = run(settings)
        yield result
        if result.violation is not None:
            return


@dataclass(frozen=True, slots=True)
class _Raised:
    """A batch that raised, in words."""

    error: str
    where: str


@dataclass(slots=True)
class _Process:
    process: BaseProcess
    pipe: "Connection[SimSettings, SimResult | _Raised]"
    number: int = -1
    """The batch that it runs; below 0 when it runs none."""


class _Crew:
    """The processes of one run."""

    def __init__(self, batches: Sequence[SimSettings], jobs: int, run: Run) -> None:
        self._batches = batches
        self._run = run
        self._jobs = jobs
        self._next = 0
        self._end = len(batches)
        self._waiting: dict[int, SimResult] = {}

    def results(self) -> Generator[SimResult, None, None]:
        """Yield the results in order; no process outlives this."""
        crew: list[_Process] = []
        try:
            crew.extend(self._start() for _ in range(self._jobs))
            for number in range(len(self._batches)):
                while number not in self._waiting:
                    self._hand_out(crew, number)
                    self._take(crew)
                result = self._waiting.pop(number)
                yield result
                if result.violation is not None:
                    return
        finally:
            for one in crew:
                one.process.terminate()
                one.pipe.close()
                one.process.join()

    def _start(self) -> _Process:
        # Spawned, not forked: a batch then starts from nothing but its settings, whatever this process has imported.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self._run), daemon=True)
        process.start()
        theirs.close()
        return _Process(process, ours)

    def _hand_out(self, crew: Sequence[_Process], oldest: int) -> None:
        for one in crew:
            if one.number < 0 and self._next < min(self._end, oldest + AHEAD_MAX * self._jobs):
                one.number, self._next = self._next, self._next + 1
                try:
                    one.pipe.send(self._batches[one.number])
                except OSError:  # it died while it had nothing to do
                    raise self._lost(one) from None

    def _take(self, crew: Sequence[_Process]) -> None:
        """Wait for results; a process that dies closes its pipe, so this wait ends with every process."""
        at_work = {one.pipe: one for one in crew if one.number >= 0}
        for pipe in wait(list(at_work)):
            one = at_work[pipe]  # type: ignore[index] # it waits for pipes only
            try:
                said = one.pipe.recv()
            except (EOFError, OSError):
                raise self._lost(one) from None
            if isinstance(said, _Raised):
                raise self._error(one.number, f"raised {said.error}", said.where)
            self._waiting[one.number] = said
            if said.violation is not None:
                self._end = min(self._end, one.number)  # nothing after it counts any more
            one.number = -1

    def _lost(self, one: _Process) -> BatchLostError:
        one.process.join()
        code = one.process.exitcode or 0
        how = f"ended by signal {-code}" if code < 0 else f"ended with status {code}"
        return self._error(one.number, f"{how} before it had a result; fewer --jobs need less memory")

    def _error(self, number: int, what: str, where: str = "") -> BatchLostError:
        batch = self._batches[number]
        size = f"--transfers {batch.transfers} --instances {batch.instances} --ranks {batch.ranks}"
        alone = f"--seed {batch.seed} {size} --jobs 1"
        text = f"the process of batch {number + 1} of {len(self._batches)} {what}; run it alone: kvbus sim {alone}"
        return BatchLostError(f"{text}\n{where}" if where else text)


def _collect_seldom() -> None:
    """Look for cycles seldom: worlds make few, and the usual thresholds cost a twentieth of a run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def _work(pipe: "Connection[SimResult | _Raised, SimSettings]", run: Run) -> None:
    """Run batches as they come, until the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends this process
    logging.getLogger("kvbus").setLevel(logging.CRITICAL)  # refusals and retries, thousands of them, on purpose
    _collect_seldom()
    while True:
        try:
            settings = pipe.recv()
        except EOFError:
            return
        try:
            said: SimResult | _Raised = run(settings)
        except Exception as error:  # noqa: BLE001 - whatever the simulated parts let out: the parent tells it
            said = _Raised(repr(error), traceback.format_exc())
        pipe.send(said)
