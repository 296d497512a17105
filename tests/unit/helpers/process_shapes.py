"""Processes in the states that decide what counts as dead: run as `python process_shapes.py SHAPE`.

Each says "ready" on stdout, then lives until its standard input closes.
"""

import ctypes
import platform
import sys
import threading

SYS_EXIT_X86, SYS_EXIT_ARM = 60, 93


def say_ready() -> None:
    """Tell the parent that this process has its shape."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def leader_gone() -> None:
    """End the first thread alone: the process is then a zombie in /proc although a thread of it still runs."""
    alive = threading.Thread(target=sys.stdin.buffer.read)
    alive.start()
    say_ready()
    number = SYS_EXIT_ARM if platform.machine() == "aarch64" else SYS_EXIT_X86
    ctypes.CDLL(None).syscall(number, 0)


def plain() -> None:
    """Wait for the end of standard input."""
    say_ready()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    {"plain": plain, "leader_gone": leader_gone}[sys.argv[1]]()
