"""What both ends of every peer share: the pools of the benchmark mapped here, and one JSON line for each question.

A peer runs in an environment of its own, without kvbus. Its source and its sink are two processes, and both map the
very pools that kvbus uses. Transfer libraries write their logs to the standard output, so answers go to a copy of it
and the original leads to the standard error.
"""

import ctypes
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

import numpy as np

PR_SET_PDEATHSIG = 1


class Mapped:
    """A pool of another process, mapped with all of its pages present."""

    def __init__(self, path: str, length_bytes: int) -> None:
        fd = os.open(path, os.O_RDWR)
        self.memory = mmap.mmap(fd, length_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(fd)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.length_bytes = length_bytes


class End(Protocol):
    """One end of a peer, source or sink."""

    def open(self, pool: Mapped) -> dict[str, object]:
        """Register a pool, and return what the other end needs to know."""

    def meet(self, told: dict[str, object]) -> None:
        """Get to know the other end, by what it told."""

    def prepare(self, length_bytes: int, local: list[int], remote: list[int]) -> None:
        """Prepare what may be prepared once for these pages: offsets in both pools, each of so many bytes."""

    def move(self) -> None:
        """Move all of them once."""


def run(make: Callable[[str], End]) -> None:
    """Answer questions until there are no more; the role is this program's argument."""
    end_with_parent()
    answers = protected_stdout()
    end = make(sys.argv[1])
    for line in sys.stdin:
        question = json.loads(line)
        answer = {} if (said := ask(end, question)) is None else said
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def ask(end: End, question: dict[str, object]) -> dict[str, object] | None:
    """Carry out one question."""
    match question:
        case {"do": "open", "path": str(path), "length_bytes": int(length_bytes)}:
            return end.open(Mapped(path, length_bytes))
        case {"do": "meet", "told": dict(told)}:
            return end.meet(told)
        case {"do": "prepare", "length_bytes": int(length_bytes), "local": list(local), "remote": list(remote)}:
            return end.prepare(length_bytes, local, remote)
        case {"do": "move"}:
            began = time.perf_counter()
            end.move()
            return {"seconds": time.perf_counter() - began}
    raise ValueError(f"no such question: {question}")


def end_with_parent() -> None:
    """Let the kernel end this process with its parent: one that stands still would not notice."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def protected_stdout() -> TextIO:
    """Return the standard output, and let everything else that is written to it go to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
