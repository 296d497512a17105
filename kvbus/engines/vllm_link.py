"""The way to the kvbus worker: attaches as its engine, again and again, and serves what it asks of this engine.

A kvbus worker may start later than vLLM, and start anew: each attachment is a session with a pool of its own, and when
its socket closes the session is over. vLLM does not notice any of it, but for caches that are not there. A worker that
lives on takes the same process again once that says that its movers are back from every copy of the sessions before: a
process may end one vLLM and begin another.
"""

import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from kvbus.engines.base import Description
from kvbus.engines.link import BlockingLink
from kvbus.engines.process import attach
from kvbus.engines.vllm_lookups import BACKOFF_S
from kvbus.engines.vllm_mover import Mover, Session
from kvbus.engines.worker_link import WorkerLink, complain
from kvbus.errors import KvbusError

ServeJobs = Callable[[WorkerLink], None]
"""Begins to serve a worker's jobs, on threads of its own, until the worker is gone."""

_said_hello: dict[Path, "weakref.WeakSet[Mover]"] = {}
# By a worker's path: for whom this process has said hello there. A mover that nobody has any more has no thread either.
_saying = threading.Lock()


class WorkerAttachment:
    """Keeps one engine attached to whichever worker listens on a path."""

    def __init__(self, path: Path, about: Description, mover: Mover, serve_jobs: ServeJobs) -> None:
        self._path = path
        self._about = about
        self._mover = mover
        self._serve_jobs = serve_jobs
        self._stopping = threading.Event()
        self._blocking: BlockingLink | None = None
        self._said = ""

    def __repr__(self) -> str:
        return f"<WorkerAttachment {self._path} said={self._said!r}>"

    def start(self) -> None:
        """Begin to attach, and begin to move; both threads end with the process at the latest."""
        threading.Thread(target=self._mover.run, name="kvbus-mover", daemon=True).start()
        threading.Thread(target=self._run, name="kvbus-link", daemon=True).start()

    def stop(self) -> None:
        """Attach no more, and let go of the worker."""
        self._stopping.set()
        self._mover.stop()
        if self._blocking is not None:
            self._blocking.hang_up()

    def _run(self) -> None:
        pause_s, longest_s = BACKOFF_S
        while not self._stopping.is_set():
            try:
                if self._serve_one():
                    pause_s = BACKOFF_S[0]
            except KvbusError as error:
                self._say(f"without a kvbus worker for now: {error}")
            except Exception as error:  # a fault of ours must not end attaching for good
                self._say(f"attaching failed: {type(error).__name__}: {error}")
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _serve_one(self) -> bool:
        """Attach, and serve until the worker closes; True once it was attached."""
        blocking = self._blocking = BlockingLink.connect(self._path)
        try:
            pool = attach(blocking, self._about, left=_has_left(self._path, self._mover))
            worker = WorkerLink(blocking, pool)
            self._say(f"attached to the kvbus worker at {self._path}, {pool.page_count} pages")
            self._mover.attach(Session(worker, pool))
            try:
                self._serve_jobs(worker)
                worker.read()
            finally:
                self._mover.detach()
            if not self._stopping.is_set():
                self._say("the kvbus worker is gone; waiting for it to come back")
            return True
        finally:
            self._blocking = None
            blocking.close()

    def _say(self, text: str) -> None:
        """Say something once: a worker that is away for an hour is one line."""
        if text != self._said:
            self._said = text
            complain(f"vllm process {os.getpid()}: {text}")


def _has_left(path: Path, mover: Mover) -> bool:
    """Note that this process says hello for a mover, and tell whether it said so before and touches nothing any more.

    A worker that was silent for long still counts it as its engine, and believes nobody else that this is over.
    """
    with _saying:
        left = path in _said_hello and all(one.is_out for one in _said_hello[path])
        _said_hello.setdefault(path, weakref.WeakSet()).add(mover)
    return left
