"""A process's identity, and the only proof of its death that counts."""

import asyncio
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus.processes import ProcessWatch, identity, open_pidfd, same_host, start_ticks
from tests.waiting import until, wait_until

SHAPES = Path(__file__).parent / "helpers" / "process_shapes.py"


@contextlib.contextmanager
def child(shape: str = "plain") -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, str(SHAPES), shape], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def readable(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def test_a_process_names_itself_and_stays_the_same() -> None:
    me = identity()
    assert me == identity()
    assert me.pid == os.getpid()
    assert same_host(me)


def test_a_start_time_tells_two_processes_apart() -> None:
    with child() as one:
        assert identity(one.pid) != identity()
        assert start_ticks(one.pid) == identity(one.pid).start_ticks
        gone = one.pid
    assert start_ticks(gone) is None
    with pytest.raises(ProcessLookupError, match=str(gone)):
        identity(gone)


@pytest.mark.parametrize("change", [{"boot_id": "another"}, {"pid_namespace": 1}])
def test_a_pid_of_another_host_is_never_opened(change: dict[str, object]) -> None:
    stranger = identity().model_copy(update=change)
    assert not same_host(stranger)
    assert open_pidfd(stranger) is None


def test_a_reused_pid_is_not_mistaken_for_the_process_that_had_it() -> None:  # P6
    with child() as process:
        now = identity(process.pid)
        before = now.model_copy(update={"start_ticks": now.start_ticks - 1})
        assert open_pidfd(before) is None


def test_no_pidfd_is_left_open_when_a_pid_was_reused() -> None:
    with child() as process:
        before = identity(process.pid).model_copy(update={"start_ticks": 0})
        gc.collect()  # what other tests left must not be closed in between
        open_files = len(list(Path("/proc/self/fd").iterdir()))
        assert open_pidfd(before) is None
        assert len(list(Path("/proc/self/fd").iterdir())) == open_files


def test_a_zombie_whose_thread_still_runs_is_not_dead() -> None:  # P6
    with child("leader_gone") as process:

        def is_zombie() -> bool:
            return b") Z " in Path(f"/proc/{process.pid}/stat").read_bytes()

        wait_until(is_zombie)
        pidfd = open_pidfd(identity(process.pid))
        assert pidfd is not None
        assert not readable(pidfd)
        assert process.stdin is not None
        process.stdin.close()
        wait_until(lambda: readable(pidfd))
        os.close(pidfd)


async def test_a_watch_tells_of_a_death_once() -> None:  # P6
    deaths: list[str] = []
    watch = ProcessWatch(asyncio.get_running_loop())
    with child() as process:
        assert watch.watch(identity(process.pid), lambda: deaths.append("first"))
        assert watch.watch(identity(process.pid), lambda: deaths.append("second"))
        process.send_signal(signal.SIGKILL)
        await until(lambda: deaths)
    assert deaths == ["first", "second"]
    assert watch.statistics().watched == 0
    assert watch.statistics().deaths == 1
    watch.close()


async def test_a_frozen_process_is_not_dead() -> None:
    deaths: list[str] = []
    watch = ProcessWatch(asyncio.get_running_loop())
    with child() as frozen, child() as dying:
        assert watch.watch(identity(frozen.pid), lambda: deaths.append("frozen"))
        assert watch.watch(identity(dying.pid), lambda: deaths.append("dying"))
        frozen.send_signal(signal.SIGSTOP)
        dying.kill()
        await until(lambda: deaths)
        assert deaths == ["dying"]
        watch.close()


async def test_what_is_gone_or_elsewhere_cannot_be_watched() -> None:
    watch = ProcessWatch(asyncio.get_running_loop())
    with child() as process:
        gone = identity(process.pid)
    assert not watch.watch(gone, lambda: None)
    assert not watch.watch(identity().model_copy(update={"pid_namespace": 1}), lambda: None)
    assert watch.statistics().refused == 2


async def test_a_watch_keeps_to_its_bound_and_forgets() -> None:
    deaths: list[str] = []
    watch = ProcessWatch(asyncio.get_running_loop(), watches_max=1)
    with child() as one, child() as two:
        assert watch.watch(identity(one.pid), lambda: deaths.append("one"))
        assert not watch.watch(identity(two.pid), lambda: deaths.append("two"))
        watch.forget(identity(one.pid))
        watch.forget(identity(one.pid))
        assert watch.watch(identity(two.pid), lambda: deaths.append("two"))
        assert "watched=1" in repr(watch)
        one.kill()
        two.kill()
        await until(lambda: deaths)
    assert deaths == ["two"]
    watch.close()
    watch.close()
