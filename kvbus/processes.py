"""Processes of this host, told apart such that one's death can be proved: by pidfd, never by a pid that is gone.

A pid is reused, and a process whose first thread has exited shows as a zombie while another thread still runs. A pidfd
stands for one process for ever, and becomes readable only when all of its threads have ended; so a readable pidfd
that was opened while the peer was connected is the only proof of death that counts as evidence.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvbus.events import ProcessIdentity

WATCHES_MAX = 512
"""One open file each: half of the usual soft limit of 1,024, so that sockets and pools keep the other half."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")


def identity(pid: int | None = None) -> ProcessIdentity:
    """Return who this process is (or another one of this pid namespace); ProcessLookupError if there is none.

    Start time is in clock ticks since boot, which no second process with that pid can share.
    """
    chosen = os.getpid() if pid is None else pid
    ticks = start_ticks(chosen)
    if ticks is None:
        raise ProcessLookupError(f"no process has pid {chosen}")
    boot_id, pid_namespace = _host()
    return ProcessIdentity(pid=chosen, start_ticks=ticks, boot_id=boot_id, pid_namespace=pid_namespace)


def same_host(other: ProcessIdentity) -> bool:
    """Tell whether that pid means the same process here: same boot of the same kernel, same pid namespace."""
    return (other.boot_id, other.pid_namespace) == _host()


def network_namespace() -> int:
    """Return the number of this process's network namespace: unique on a host, as long as the namespace lives."""
    return _NETWORK_NAMESPACE.stat().st_ino


def same_loopback(other: ProcessIdentity, network: int | None) -> bool:
    """Tell whether our loopback is that process's; where its network namespace is not known, whether its host is."""
    if network is None:
        return same_host(other)
    return (other.boot_id, network) == (_host()[0], network_namespace())


def start_ticks(pid: int) -> int | None:
    """Return when that process started, in clock ticks since boot; None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in brackets and may itself hold brackets and spaces: count fields after the last one.
    return int(stat.rpartition(b")")[2].split()[19])


def open_pidfd(other: ProcessIdentity) -> int | None:
    """Return a pidfd of exactly that process, for the caller to close; None if it is gone or not of this host.

    The start time is read again after opening: from then on the descriptor cannot come to mean another process.
    """
    if not same_host(other):
        return None
    try:
        pidfd = os.pidfd_open(other.pid)
    except (ProcessLookupError, ValueError):
        return None
    if start_ticks(other.pid) != other.start_ticks:
        os.close(pidfd)
        return None
    return pidfd


@dataclass(slots=True)
class _Watch:
    pidfd: int
    on_death: list[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class WatchStatistics:
    """How many processes are watched, and how many deaths were seen."""

    watched: int
    deaths: int
    refused: int


class ProcessWatch:
    """Calls back, on the event loop, once a watched process has ended with all its threads.

    Not seeing a process is no news: only a readable pidfd is. At most `watches_max` processes; each costs one file
    descriptor.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, watches_max: int = WATCHES_MAX) -> None:
        self._loop = loop
        self._watches_max = watches_max
        self._watches: dict[ProcessIdentity, _Watch] = {}
        self._deaths = 0
        self._refused = 0

    def __repr__(self) -> str:
        return f"<ProcessWatch watched={len(self._watches)} deaths={self._deaths}>"

    def watch(self, other: ProcessIdentity, on_death: Callable[[], object]) -> bool:
        """Call `on_death` once when that process has ended; False if its death cannot be proved from here.

        That is so if it runs on another host, has already gone (nobody held a pidfd while it lived), or the bound is
        reached. A second watch of the same process adds its callback.
        """
        known = self._watches.get(other)
        if known is not None:
            known.on_death.append(on_death)
            return True
        pidfd = open_pidfd(other) if len(self._watches) < self._watches_max else None
        if pidfd is None:
            self._refused += 1
            return False
        self._watches[other] = _Watch(pidfd, [on_death])
        self._loop.add_reader(pidfd, self._ended, other)
        return True

    def forget(self, other: ProcessIdentity) -> None:
        """Stop watching that process, with all its callbacks; harmless if it is not watched."""
        watch = self._watches.pop(other, None)
        if watch is not None:
            self._loop.remove_reader(watch.pidfd)
            os.close(watch.pidfd)

    def close(self) -> None:
        """Stop watching everything; may be called again."""
        for other in tuple(self._watches):
            self.forget(other)

    def statistics(self) -> WatchStatistics:
        """Return the counters as they stand."""
        return WatchStatistics(watched=len(self._watches), deaths=self._deaths, refused=self._refused)

    def _ended(self, other: ProcessIdentity) -> None:
        callbacks = self._watches[other].on_death
        self.forget(other)
        self._deaths += 1
        for on_death in callbacks:
            on_death()


@lru_cache(maxsize=1)
def _host() -> tuple[str, int]:
    """Neither changes while a process lives: a pid namespace is fixed at its start."""
    return _BOOT_ID.read_text(encoding="ascii").strip(), _PID_NAMESPACE.stat().st_ino
