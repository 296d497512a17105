"""A child process with bare members in it, and the parent's handle on it: calls over a pipe, signals, its end."""

import asyncio
import contextlib
import inspect
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from bench.chaos_data import plants
from bench.chaos_data.member import TICK_S, Member
from bench.chaos_data.records import Described, MemberSettings
from kvbus.errors import BackendError
from tests.waiting import stand_still

ANSWER_S = 60.0
"""A start, or a gigabyte filled, on a starved machine; a hang takes for ever."""
JOIN_S = 10.0
LOOK_S = 0.002
"""Between two looks at something that is awaited: short against any transfer here."""


class FaultError(AssertionError):
    """What a fault was to show did not come about."""


# ----------------------------------------------------------------------------------------------------- in the child


def live(pipe: Connection, settings: Sequence[MemberSettings], plant: str) -> None:
    """Run members until the pipe closes or this process is killed."""
    os.environ["UCX_LOG_LEVEL"] = "fatal"  # peers die here on purpose: what it says of that is no news
    logging.disable(logging.WARNING)
    plants.sow(plant)
    asyncio.run(_serve(pipe, settings))


async def _serve(pipe: Connection, settings: Sequence[MemberSettings]) -> None:
    loop = asyncio.get_running_loop()
    members = [Member(one, loop) for one in settings]
    tasks = [loop.create_task(member.recorder.run()) for member in members]
    tasks.append(loop.create_task(_tick(members)))
    readable, ended = asyncio.Event(), False
    loop.add_reader(pipe.fileno(), readable.set)
    pipe.send([member.describe() for member in members])
    while not ended:
        await readable.wait()
        readable.clear()
        while not ended and pipe.poll():
            try:
                number, verb, arguments = pipe.recv()
            except EOFError:  # the parent has ended
                ended = True
                continue
            pipe.send(await _answer(members, number, verb, arguments))
    for task in tasks:
        task.cancel()


async def _answer(members: Sequence[Member], number: int, verb: str, arguments: tuple[Any, ...]) -> tuple[bool, object]:
    try:
        if verb == "flush":
            return True, all([await member.recorder.flush(ANSWER_S) for member in members])
        if verb == "fork":
            return True, _fork(members[number])
        answer = getattr(members[number], verb)(*arguments)
        return True, await answer if inspect.isawaitable(answer) else answer
    except Exception as error:  # noqa: BLE001 - it is the parent's to judge
        return False, repr(error)


async def _tick(members: Sequence[Member]) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        for member in members:
            member.round()


def _fork(member: Member) -> tuple[int, bool]:
    """Fork, as a careless library would; return the child, which keeps every socket, and whether UCX refused it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # nothing but system calls from here on: other threads' locks may be held for ever
        refused = b"1"
        if member.plane.ucx is not None:
            try:
                member.plane.ucx.worker.progress()
                refused = b"0"
            except BackendError:
                pass
        os.write(writing, refused)
        signal.pause()
        os._exit(0)
    os.close(writing)
    try:
        return child, os.read(reading, 1) == b"1"
    finally:
        os.close(reading)


# ---------------------------------------------------------------------------------------------------- in the parent


def wait_for(found: Any, wait_s: float, what: str) -> Any:  # noqa: ANN401 - whatever is found
    """Return what a function finds, once it finds something; FaultError where that takes too long."""
    never_set, ends_at = threading.Event(), time.monotonic() + wait_s
    while not (answer := found()):
        if time.monotonic() > ends_at:
            raise FaultError(f"waited {wait_s:g} s, and it never held: {what}")
        never_set.wait(LOOK_S)
    return answer


class House:
    """The parent's handle on one child."""

    def __init__(self, settings: Sequence[MemberSettings], plant: str) -> None:
        # Forked from a server that has imported all and opened nothing: a fork of this process would share sockets.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=live, args=(theirs, list(settings), plant), daemon=True)
        self.process.start()
        theirs.close()
        self.was_killed = False
        self.was_lost = False
        """Whether it has ended by itself."""
        self.settings = list(settings)
        self._described: list[Described] = []

    @property
    def described(self) -> list[Described]:
        """What its members tell of themselves; the first look waits for them."""
        if not self._described:
            if not self._pipe.poll(ANSWER_S):
                raise FaultError("a member did not start")
            try:
                self._described = self._pipe.recv()
            except EOFError as error:
                raise FaultError(self._lost("at its start")) from error
        return self._described

    def ask(self, verb: str, *arguments: object, member: int = 0) -> Any:  # noqa: ANN401 - as the pipe gives it
        """Call a method of a member."""
        _ = self.described
        try:
            self._pipe.send((member, verb, arguments))
            if not self._pipe.poll(ANSWER_S):
                raise FaultError(f"{self.settings[member].instance} did not answer {verb}")
            is_well, answer = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise FaultError(self._lost(f"before it answered {verb}")) from error
        if not is_well:
            raise FaultError(f"{self.settings[member].instance}: {verb} raised {answer}")
        return answer

    def _lost(self, when: str) -> str:
        """Note that it ended by itself, and say so."""
        self.was_lost = True
        self.process.join(JOIN_S)
        return f"{self.settings[0].instance} has ended by itself, {when}: exit status {self.process.exitcode}"

    def kill(self) -> float:
        """End it as a power cut would; return when that was."""
        self.was_killed = True
        at = time.monotonic()
        self.process.kill()
        self.process.join(JOIN_S)
        return at

    def stop(self) -> float:
        """Let it stand still, as a frozen machine does; return when that was."""
        stand_still(self.described[0].process.pid)
        return time.monotonic()

    def go_on(self) -> None:
        """Let it go on."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.described[0].process.pid, signal.SIGCONT)

    def end(self) -> int:
        """End it, whatever state it is in; return 1 where it had ended by itself before, that is, aborted."""
        aborted = int(not self.was_killed and (self.was_lost or self.process.exitcode is not None))
        if self.process.is_alive():
            self.process.kill()
        self.process.join(JOIN_S)
        self._pipe.close()
        return aborted


@contextlib.contextmanager
def killed_at_the_end(pid: int) -> Iterator[None]:
    """End a process of a fault's own making, by its id."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
