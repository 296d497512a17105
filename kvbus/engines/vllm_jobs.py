"""What the kvbus worker asks of its engine, answered by vLLM: token ids, prompts to compute for a reader, and answers.

vLLM batches, so a few jobs run side by side, each on a thread that mostly waits for vLLM's own server. Calls for pages
are the mover's; a prompt that was computed on request comes from it under the mark that its request bore.
"""

import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field

from kvbus.engines import link
from kvbus.engines.base import Description, Prefilled, StoppedError
from kvbus.engines.link import EngineError
from kvbus.engines.process import text_or_messages
from kvbus.engines.vllm_mover import Kept, Mover, Session
from kvbus.engines.vllm_server import Server, Step
from kvbus.engines.worker_link import CALL_TIMEOUT_S, Job, WorkerLink, complain
from kvbus.errors import PeerError

ANSWERING_THREADS = 4
"""As many transfers as a destination runs at a time by default, so as many prompts are computed for readers."""

STORED_WAIT_S = 10.0
"""A marked prompt is copied out within milliseconds of its answer; behind a full queue of others it takes longer."""

CUT_WAIT_S = 1.0
"""Whoever cut an answer waits for its end only, and its prompt was being copied out before its first token came."""

ANEW = "the kvbus worker that asked is gone, and another one is there"

_TEXT_MAX = 2_000


class Jobs:
    """Serves workers' jobs; one for a process."""

    def __init__(self, about: Description, server: Server, mover: Mover) -> None:
        self._about = about
        self._server = server
        self._mover = mover
        self._block_tokens = about.layout.block_tokens

    def __repr__(self) -> str:
        return f"<Jobs {self._server.base or 'without a server'}>"

    def serve(self, worker: WorkerLink) -> None:
        """Begin to serve a worker; the threads end with it."""
        queues = [worker.tokenizations, *[worker.answers] * ANSWERING_THREADS]
        for jobs in queues:
            threading.Thread(target=self._serve, args=(worker, jobs), name="kvbus-jobs", daemon=True).start()

    def _serve(self, worker: WorkerLink, jobs: "queue.Queue[Job | None]") -> None:
        handlers: dict[str, Callable[[WorkerLink, Job], None]] = {
            "generate": self._generate,
            "prefill": self._prefill,
            "tokenize": self._tokenize,
        }
        while (job := jobs.get()) is not None:
            try:
                self._serve_one(worker, handlers[link.text(job.frame, "op")], job)
            except EngineError as error:
                if not worker.closed.is_set():
                    complain(str(error))
        # The one end that was put is for all threads of this queue.
        jobs.put(None)

    def _serve_one(self, worker: WorkerLink, handler: Callable[[WorkerLink, Job], None], job: Job) -> None:
        finish = worker.finish
        try:
            handler(worker, job)
        except StoppedError:
            finish(job, "error", kind="refused", text="cancelled on request")
        except PeerError as error:
            finish(job, "error", kind="refused", text=str(error)[:_TEXT_MAX])
        except EngineError as error:
            finish(job, "error", kind="failed", text=str(error)[:_TEXT_MAX])
        except Exception as error:  # a fault of ours; the next job may work
            finish(job, "error", kind="failed", text=f"{type(error).__name__}: {error}"[:_TEXT_MAX])

    def _tokenize(self, worker: WorkerLink, job: Job) -> None:
        ids = self._server.tokenize(*text_or_messages(job.frame))
        self._check(ids)
        worker.finish(job, "reply", ids=link.as_column(ids))

    def _prefill(self, worker: WorkerLink, job: Job) -> None:
        ids, salt = link.column(job.frame, "ids"), link.text(job.frame, "salt", "")
        self._check(ids)
        whole = ids[: len(ids) // self._block_tokens * self._block_tokens]
        blocks = len(whole) // self._block_tokens
        prefilled = self._held(worker, ids, salt, blocks) or self._computed(worker, whole, salt, job)
        if job.cancelled.is_set():
            self._mover.let_go(worker, prefilled.handle)
            raise StoppedError
        worker.finish(job, "reply", **asdict(prefilled))

    def _held(self, worker: WorkerLink, ids: tuple[int, ...], salt: str, blocks: int) -> Prefilled | None:
        """Return the prompt pinned as it is, if the pool has all of it."""

        def match(session: Session) -> Prefilled | None:
            if session.calls is not worker:
                raise EngineError(ANEW)
            handle, pages = session.calls.match(ids, salt)
            if len(pages) >= blocks:
                return Prefilled(handle, len(pages), 0, len(pages) * self._block_tokens)
            session.calls.release(handle)
            return None

        def undo(session: Session, prefilled: Prefilled | None) -> None:
            if prefilled is not None:
                session.calls.release(prefilled.handle)

        return self._mover.call(match, CALL_TIMEOUT_S, undo)

    def _computed(self, worker: WorkerLink, whole: tuple[int, ...], salt: str, job: Job) -> Prefilled:
        """Have the server compute a prompt, and return it pinned as the mover stored it."""
        if job.cancelled.is_set():
            raise StoppedError
        with self._mark() as (mark, waiting):
            self._server.compute(whole, salt=salt, mark=mark)
            kept = _kept(waiting, _Told())
        if kept is None:
            raise EngineError("vLLM computed the prompt, and its pages were not stored in time", waited_s=STORED_WAIT_S)
        if kept.session.calls is not worker:  # a handle means something to the worker that gave it, and to no other
            self._mover.give_back(kept)
            raise EngineError(ANEW)
        block, held = self._block_tokens, kept.held_before
        return Prefilled(kept.handle, kept.blocks, (kept.blocks - held) * block, held * block, kept.refused)

    @contextmanager
    def _mark(self) -> "Iterator[tuple[str, queue.SimpleQueue[Kept]]]":
        """Yield a mark for one request, and where what is stored under it comes."""
        mark = secrets.token_hex(16)
        waiting = self._mover.expect(mark)
        try:
            yield mark, waiting
        finally:
            self._mover.expect_no_more(mark, waiting)

    def _generate(self, worker: WorkerLink, job: Job) -> None:
        frame = job.frame
        ids = link.column(frame, "ids") if "ids" in frame else tuple(self._server.tokenize(*text_or_messages(frame)))
        self._check(ids)
        reuse, salt = link.flag(frame, "reuse", default=True), link.text(frame, "salt", "")
        store = link.flag(frame, "store", default=True) and reuse and len(ids) >= self._block_tokens
        # vLLM's own prefix cache cannot be left out of one request, so a salt that nobody else has stands for that.
        salt = salt if reuse else f"unshared-{secrets.token_hex(16)}"
        most = min(link.number(frame, "max_tokens", least=1), self._about.tokens_max - len(ids))
        told = _Told()
        with self._mark() as (mark, waiting):
            ours = {"store": store, "reuse": reuse, "mark": mark}
            with closing(self._server.answer(ids, salt=salt, max_tokens=most, ours=ours)) as steps:
                self._tell(worker, job, steps, told)
            kept = _kept(waiting, told) if store else None
            if kept is not None:
                self._mover.give_back(kept)
        worker.finish(
            job,
            "end",
            tokens=link.as_column(told.tokens),
            text="".join(told.texts),
            prompt_tokens=len(ids),
            cached_tokens=told.cached_tokens if kept is None else kept.cached_tokens,
            stored_blocks=0 if kept is None else kept.blocks - kept.held_before,
            reason=told.reason or "stop",
        )

    def _tell(self, worker: WorkerLink, job: Job, steps: Iterator[Step], told: "_Told") -> None:
        """Send an answer's tokens one by one as they come; a step's text goes with the last of them."""
        for step in steps:
            if job.cancelled.is_set():
                told.reason = "cancelled"
                return
            for row, token in enumerate(step.tokens, 1):
                text = step.text if row == len(step.tokens) else ""
                worker.send("token", job, token=token, text=text)
            told.tokens += step.tokens
            told.texts.append(step.text)
            told.reason = step.reason or told.reason
            told.cached_tokens = step.cached_tokens or told.cached_tokens

    def _check(self, ids: "list[int] | tuple[int, ...]") -> None:
        """Raise PeerError where vLLM would not take the prompt."""
        about = self._about
        if not ids:
            raise PeerError("the prompt has no tokens; send at least one")
        if len(ids) >= about.tokens_max:
            raise PeerError(
                f"the prompt has {len(ids)} tokens, {about.model} takes at most {about.tokens_max - 1}; shorten it"
            )
        if max(ids) >= about.vocab_size:
            raise PeerError(f"token id {max(ids)} is out of range: {about.model} has {about.vocab_size} tokens")


@dataclass(slots=True)
class _Told:
    """What was sent of one answer."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reason: str = ""
    cached_tokens: int = 0


def _kept(waiting: "queue.SimpleQueue[Kept]", told: _Told) -> Kept | None:
    """Return what was stored under a mark; an answer that was cut before its first token may store nothing at all."""
    is_cut = told.reason == "cancelled"
    if is_cut and not told.tokens:
        return None
    try:
        return waiting.get(timeout=CUT_WAIT_S if is_cut else STORED_WAIT_S)
    except queue.Empty:
        return None
