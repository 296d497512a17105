"""Runs `kvbus` as a person does: a process, its exit status, and what it said."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.flow.town import children, is_alive
from tests.waiting import wait_until

COMMAND_S = 150.0
"""Longer than any command here takes on a busy machine; a command that meets it hangs."""
UP_S = 150.0


def environment(state: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The tests' environment, less what would lead to another kvbus, with a state folder of the test's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVBUS_")}
    return {**kept, "KVBUS_STATE": str(state), "XDG_RUNTIME_DIR": str(state), "COLUMNS": "200", **(extra or {})}


def kvbus(
    *arguments: str, state: Path, env: Mapping[str, str] | None = None, deadline_s: float = COMMAND_S
) -> "subprocess.CompletedProcess[str]":
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kvbus", *arguments],
        env=environment(state, env),
        capture_output=True,
        text=True,
        timeout=deadline_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def descendants(pid: int) -> set[int]:
    """A process's children, theirs, and so on, as they are now."""
    found: set[int] = set()
    todo = children(pid)
    while todo:
        child = todo.pop()
        found.add(child)
        todo += children(child)
    return found


@dataclass(slots=True)
class Up:
    """A running `kvbus up`, its state folder, and all processes that it started."""

    process: "subprocess.Popen[str]"
    state: Path
    document: dict[str, object] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)

    @property
    def state_file(self) -> Path:
        return self.state / "up.json"

    def said(self) -> str:
        """What it wrote to stderr so far."""
        return (self.state / "err").read_text()

    def nothing_left(self) -> bool:
        """Whether every process that it started has ended."""
        return not any(map(is_alive, self.pids))

    def end(self, number: signal.Signals) -> int:
        """Send a signal, and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(COMMAND_S)


def start(state: Path, *arguments: str) -> Up:
    """Start a command that runs until it is told to end; it may not be ready yet."""
    with (state / "err").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvbus", *arguments],
            env=environment(state),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    return Up(process, state)


def start_up(state: Path, *arguments: str) -> Up:
    """Start `kvbus up` with a quick toy."""
    return start(state, "up", "--json", "--engine-options", '{"work_rounds": 1}', *arguments)


@contextmanager
def up(state: Path, *arguments: str) -> Iterator[Up]:
    """A `kvbus up` that is ready; ended by Ctrl-C, if the test has not ended it."""
    running = start_up(state, *arguments)
    try:
        wait_until(lambda: running.state_file.exists() or running.process.poll() is not None, UP_S, what="up is ready")
        assert running.process.poll() is None, running.said()
        running.document = json.loads(running.state_file.read_text())
        running.pids = descendants(running.process.pid)
        yield running
    finally:
        finish(running)


def finish(running: Up) -> None:
    """End what is left of it, whatever happened."""
    if running.process.poll() is None:
        running.process.send_signal(signal.SIGINT)
        ends_at = time.monotonic() + COMMAND_S
        wait_until(lambda: running.process.poll() is not None, ends_at - time.monotonic(), what="up has ended")
    if running.process.stdout is not None:
        running.process.stdout.close()
    for pid in running.pids:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
