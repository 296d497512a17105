"""The worker as its engine's threads see it: typed calls out, jobs in.

Three threads share it. The reader sorts what comes: replies to whoever waits, `cancel` to its target, `tokenize` to the
tokenizer thread (short, and never behind a long answer), `generate` and `prefill` to the main thread.
"""

import queue
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbus.columns import from_column
from kvbus.engines import link
from kvbus.engines.link import BlockingLink, EngineError, Frame
from kvbus.errors import KvbusError, PeerError
from kvbus.pool.digests import NONE, digest_of
from kvbus.pool.memory import PoolMemory

CALL_TIMEOUT_S = 10.0
"""A desk answers within milliseconds; a worker that is silent for so long is hung."""

JOBS_MAX = 64
"""As many calls as the worker's port keeps in flight; more mean that it has lost count."""


def complain(text: str) -> None:
    """Tell whoever started the engine; stderr, because stdout may be anybody's."""
    sys.stderr.write(f"kvbus engine: {text}\n")
    sys.stderr.flush()


@dataclass(slots=True)
class Job:
    """One request of the worker's, on its way to the thread that serves it."""

    frame: Frame
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def job_id(self) -> int:
        """The request's id, which its replies repeat."""
        return link.number(self.frame, "id")


class WorkerLink:
    """The worker as the engine's threads see it: typed calls out, jobs in. The reader thread runs `read`.

    With its `pool`, what is matched is compared with the digests that the worker has of it.
    """

    def __init__(self, blocking: BlockingLink, pool: PoolMemory | None = None) -> None:
        self.answers: queue.Queue[Job | None] = queue.Queue(JOBS_MAX + 1)  # and one None at the end
        self.tokenizations: queue.Queue[Job | None] = queue.Queue(JOBS_MAX + 1)
        self.closed = threading.Event()
        self._link = blocking
        self._pool = pool
        self._jobs: dict[int, Job] = {}
        self._next_id = 1  # hello was 0
        # Only the main thread makes calls, one at a time.
        self._call: _Call | None = None

    def __repr__(self) -> str:
        return f"<WorkerLink jobs={len(self._jobs)} closed={self.closed.is_set()}>"

    # Calls out ------------------------------------------------------------------------------------------------------

    def match(self, ids: Sequence[int], salt: str) -> tuple[int, tuple[int, ...]]:
        """Ask the worker to pin the longest cached prefix, as far as it is whole; see `base.WorkerCalls`."""
        reply = self._ask("match", ids=link.as_column(tuple(ids)), salt=salt)
        handle, pages = link.number(reply, "handle"), link.column(reply, "pages")
        whole = self._whole_prefix(pages, reply.get("digests"))
        if whole < len(pages):
            self._ask("spoiled", handle=handle, block=whole)
        return handle, pages[:whole]

    def alloc(self, handle: int, first_block: int, count: int) -> tuple[int, tuple[int, ...]] | str:
        """Ask for pages to write."""
        reply = self._ask("alloc", handle=handle, first_block=first_block, count=count)
        if "refused" in reply:
            return link.text(reply, "refused")
        return link.number(reply, "write"), link.column(reply, "pages")

    def commit(self, write: int) -> None:
        """Hand filled pages back."""
        self._ask("commit", write=write)

    def abandon(self, write: int) -> None:
        """Hand pages back unfilled."""
        self._ask("abandon", write=write)

    def release(self, handle: int) -> None:
        """Let a prefix go."""
        self._ask("release", handle=handle)

    def forget(self) -> int:
        """Have all names forgotten, and return how many those were."""
        return link.number(self._ask("forget"), "names")

    def send(self, op: str, job: Job, **fields: object) -> None:
        """Send one reply to a job."""
        self._link.send(op, job.job_id, **fields)

    def finish(self, job: Job, op: str, **fields: object) -> None:
        """Send the last reply to a job, and forget it."""
        self._jobs.pop(job.job_id, None)
        self.send(op, job, **fields)

    # Frames in ------------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Take frames until the worker closes, or sends what makes no sense; then stop everything."""
        try:
            while (frame := self._link.receive(None)) is not None:
                self._sort(frame)
                if frame["op"] == "stop":
                    break
        except KvbusError as error:
            complain(f"the worker's frames make no sense: {error}")
        finally:
            self._stop()

    def _sort(self, frame: Frame) -> None:
        op, request_id = link.text(frame, "op"), link.number(frame, "id")
        if op in link.REPLIES:
            call = self._call
            if call is not None and call.call_id == request_id:
                call.reply.put(frame)
        elif op == "cancel":
            target = self._jobs.get(link.number(frame, "target"))
            if target is not None:
                target.cancelled.set()
        elif op != "stop":
            self._queue_job(op, Job(frame))

    def _queue_job(self, op: str, job: Job) -> None:
        waiting = {"generate": self.answers, "prefill": self.answers, "tokenize": self.tokenizations}.get(op)
        if waiting is None:
            self.send(
                "error", job, kind="refused", text=f"this engine does not know {op!r}; run the same kvbus version"
            )
        elif len(self._jobs) >= JOBS_MAX:
            self.send("error", job, kind="refused", text=f"{JOBS_MAX} requests wait already; try again later")
        else:
            self._jobs[job.job_id] = job
            waiting.put_nowait(job)

    def _stop(self) -> None:
        self.closed.set()
        for job in tuple(self._jobs.values()):
            job.cancelled.set()
        if self._call is not None:
            self._call.reply.put(None)
        self.answers.put_nowait(None)
        self.tokenizations.put_nowait(None)

    def _whole_prefix(self, pages: tuple[int, ...], column: object) -> int:
        """Return how many of the pages, from the first on, hold the bytes of their digests, where they have any.

        They are compared here, by who is about to read them, and not by the worker: its loop has no time for it, and
        here they are in the processor's caches afterwards. Nothing is asked of pages behind one that differs.
        """
        if self._pool is None or not isinstance(column, bytes):
            return len(pages)
        digests = from_column(column, 8)
        if len(digests) != len(pages):
            raise PeerError("a match has other digests than pages", digests=len(digests), pages=len(pages))
        for block, (page, digest) in enumerate(zip(pages, digests, strict=True)):
            if digest != NONE and digest_of(self._pool.page_bytes(page)) != digest:
                complain(f"page {page} changed after it was sealed: block {block} is computed anew")
                return block
        return len(pages)

    def _ask(self, op: str, **fields: object) -> Frame:
        call = self._call = _Call(self._next_id)
        self._next_id += 1
        # Looked at only now: `_stop` sets it first and wakes the call second, so one of us sees the other.
        if self.closed.is_set():
            raise EngineError("the worker is gone", op=op)
        self._link.send(op, call.call_id, **fields)
        try:
            reply = call.reply.get(timeout=CALL_TIMEOUT_S)
        except queue.Empty as error:
            # Whether it granted anything is unknown now; with this process's end the worker takes everything back.
            self._link.hang_up()
            raise EngineError("the worker does not answer", op=op, waited_s=CALL_TIMEOUT_S) from error
        finally:
            self._call = None
        if reply is None:
            raise EngineError("the worker is gone", op=op)
        if reply["op"] == "error":
            raise EngineError("the worker refused a call", op=op, reason=link.text(reply, "text"))
        return reply


class _Call:
    """One call to the worker; its queue takes at most the reply and the end."""

    def __init__(self, call_id: int) -> None:
        self.call_id = call_id
        self.reply: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
