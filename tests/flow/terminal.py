"""A command in a terminal of its own: what it draws, the keys that it is given, and how it leaves the terminal."""

import contextlib
import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.absent import absent
from tests.flow.command_line import COMMAND_S, environment
from tests.waiting import wait_until

COLUMNS, LINES = 100, 30
READ_BYTES = 1 << 16
SHOWS_CURSOR, LEAVES_SCREEN = "\x1b[?25h", "\x1b[?1049l"

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|[()][A-Za-z0-9])")


@dataclass(slots=True)
class Terminal:
    """The end of a terminal at which a person sits."""

    process: "subprocess.Popen[bytes]"
    ours: int
    theirs: int
    modes: list[object]
    drawn: str = ""

    @property
    def text(self) -> str:
        """All that was drawn so far, without what moves the cursor or gives colour."""
        with contextlib.suppress(BlockingIOError, OSError):
            while data := os.read(self.ours, READ_BYTES):
                self.drawn += data.decode(errors="replace")
        return _ESCAPES.sub("", self.drawn)

    def until(self, words: str, deadline_s: float = COMMAND_S) -> None:
        """Wait until some words were drawn."""
        wait_until(lambda: words in self.text, deadline_s, what=f"{words!r} on the screen: {self.text[-1500:]}")

    def until_anew(self, words: str) -> None:
        """Wait until some words are drawn from now on."""
        begin = len(self.text)
        wait_until(lambda: words in self.text[begin:], COMMAND_S, what=f"{words!r} on the screen anew")

    def press(self, keys: str) -> None:
        """Press keys."""
        os.write(self.ours, keys.encode())

    def ended(self) -> int:
        """Wait for the end, reading on meanwhile as a terminal does; return the status."""
        wait_until(lambda: (self.text, self.process.poll())[1] is not None, COMMAND_S, what="the command has ended")
        assert self.text
        return self.process.returncode

    def is_as_before(self) -> bool:
        """Whether the terminal is in the modes in which it was, with its cursor, on its own screen."""
        drawn = self.drawn
        screens = drawn.rfind(LEAVES_SCREEN) > drawn.rfind("\x1b[?1049h")
        cursor = drawn.rfind(SHOWS_CURSOR) > drawn.rfind("\x1b[?25l")
        return screens and cursor and termios.tcgetattr(self.theirs) == self.modes


@contextmanager
def terminal(*arguments: str, state: Path, env: dict[str, str] | None = None) -> Iterator[Terminal]:
    """Run a command of kvbus in a terminal of 100 columns, as its controlling one."""
    setsid = shutil.which("setsid")
    if setsid is None:
        absent("no setsid here: install util-linux")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    os.set_blocking(ours, False)
    modes = termios.tcgetattr(theirs)
    size = {"COLUMNS": str(COLUMNS), "LINES": str(LINES), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [setsid, "--ctty", sys.executable, "-m", "kvbus", *arguments],
        env=environment(state, {**size, **(env or {})}),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    try:
        yield Terminal(process, ours, theirs, modes)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(COMMAND_S)
        os.close(ours)
        os.close(theirs)
