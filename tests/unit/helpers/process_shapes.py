"""Processes in the states that decide what counts as dead: run as `python process_shapes.py SHAPE`.

Each says "ready" on stdout, then lives until its standard input closes.
"""

import ctypes
import sys
import threading

SYS_EXIT_X86, SYS_EXIT_ARM = 60, 93


def leader_gone() -> None:
    """End the first thread alone: the process is then a zombie in /proc although a thread of it still runs."""
    alive = threading.Thread(target=sys.stdin.buffer.read)
    alive.start()
    print("ready", flush=True)
    number = SYS_EXIT_ARM if "aarch64" in sys.version or "aarch64" in sys.implementation._multiarch else SYS_EXIT_X86
    ctypes.CDLL(None).syscall(number, 0)


def plain() -> None:
    """Wait for the end of standard input."""
    print("ready", flush=True)
    sys.stdin.buffer.read()


if __name__ == "__main__":
    {"plain": plain, "leader_gone": leader_gone}[sys.argv[1]]()
