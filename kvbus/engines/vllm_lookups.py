"""Look-ups of the scheduler's side: how many blocks of a prompt the kvbus worker has, asked by a thread of its own.

vLLM's scheduler asks on the thread that steps the engine, so nothing here ever makes it wait: a question is put, and
its answer is there at a later call or it is not. A worker that is away, or late, costs nothing: then there is no cache.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvbus.engines.client import LocalClient
from kvbus.engines.link import EngineError, EngineRefusedError
from kvbus.engines.worker_link import complain

QUESTIONS_MAX = 256
"""Requests that wait for their first schedule; what is more is computed without a look-up."""

BACKOFF_S = (0.5, 10.0)
"""First and longest pause before the worker's socket is tried again."""


@dataclass(frozen=True, slots=True)
class _Question:
    key: str
    ids: tuple[int, ...]
    salt: str


class Lookups:
    """Questions by key. `put`, `take` and `drop` are the scheduler thread's, and return at once."""

    def __init__(self, path: Path, connect: Callable[[Path], LocalClient] = LocalClient) -> None:
        self._path = path
        self._connect = connect
        self._questions: queue.Queue[_Question | None] = queue.Queue(QUESTIONS_MAX)
        self._answers: dict[str, int] = {}
        self._open: set[str] = set()
        self._lock = threading.Lock()
        self._again: _Question | None = None  # the thread's own, as is _forgets_heard
        self._forgets_asked = 0
        self._forgets_heard = 0
        self._is_near = False
        self._is_late = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Lookups {self._path} near={self._is_near} late={self._is_late} open={len(self._open)}>"

    @property
    def is_near(self) -> bool:
        """Whether a worker answers: connected, and not behind with an earlier question."""
        return self._is_near and not self._is_late

    def start(self) -> None:
        """Begin to ask."""
        self._thread = threading.Thread(target=self._run, name="kvbus-lookups", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask no more; the thread ends by itself, or with the process."""
        self._stopping.set()
        try:
            self._questions.put_nowait(None)
        except queue.Full:
            return  # it looks at _stopping behind each question

    def put(self, key: str, ids: tuple[int, ...], salt: str) -> bool:
        """Put a question; False where nobody would answer it now."""
        if not self.is_near:
            return False
        with self._lock:
            self._open.add(key)
        try:
            self._questions.put_nowait(_Question(key, ids, salt))
        except queue.Full:
            self.drop(key)
            return False
        return True

    def take(self, key: str) -> int | None:
        """Return how many blocks there are, or None while the answer is not here yet."""
        return self._answers.get(key)

    def drop(self, key: str) -> None:
        """Forget a question and its answer."""
        with self._lock:
            self._open.discard(key)
            self._answers.pop(key, None)

    def overdue(self, key: str) -> None:
        """Somebody waited for this answer as long as may be: ask nothing more until the worker speaks again."""
        with self._lock:
            # One that was answered just now would never be spoken of again.
            self._is_late = self._is_late or (key in self._open and key not in self._answers)

    def forget(self) -> None:
        """Have the worker forget all names: now, or before anything else once one is there. The scheduler thread's."""
        self._forgets_asked += 1
        with suppress(queue.Full):  # else the thread comes to it behind the question that it is at
            self._questions.put_nowait(_Question("", (), ""))

    def _run(self) -> None:
        pause_s, longest_s = BACKOFF_S
        while not self._stopping.is_set():
            again = self._take_again()
            try:
                with self._connect(self._path) as client:
                    self._is_near, pause_s = True, BACKOFF_S[0]
                    self._serve(client, again)
            except EngineError:
                pass  # away: that is no fault, and the worker's side says so once
            except Exception as error:  # a fault of ours must not end look-ups for good
                complain(f"a look-up failed: {type(error).__name__}: {error}")
            self._is_near = self._is_late = False
            if self._again is not None:
                continue  # the worker may have started anew since we connected: ask once more, at once
            if again is not None:
                self._answer(again.key, 0)
            self._answer_rest()
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _take_again(self) -> _Question | None:
        again, self._again = self._again, None
        return again

    def _serve(self, client: LocalClient, again: _Question | None) -> None:
        self._tell(client)
        if again is not None:
            self._ask(client, again)
        while not self._stopping.is_set():
            question = self._questions.get()
            if question is None:
                return
            try:
                self._tell(client)
                self._ask(client, question)
            except EngineError:
                self._again = question
                raise

    def _tell(self, client: LocalClient) -> None:
        """Have the worker forget, as often as was asked up to now."""
        if self._forgets_heard < (asked := self._forgets_asked):
            with suppress(EngineRefusedError):  # without an engine there is no pool, and nothing to forget
                client.forget()
            self._forgets_heard = asked

    def _ask(self, client: LocalClient, question: _Question) -> None:
        """Ask a question that somebody still waits for."""
        if question.key in self._open:
            try:
                held = client.held(question.ids, question.salt)
            except EngineRefusedError:  # no engine has attached yet, so there is no pool
                held = 0
            self._answer(question.key, held)
        with self._lock:
            self._is_late = False

    def _answer(self, key: str, blocks: int) -> None:
        with self._lock:
            if key in self._open:
                self._answers.setdefault(key, blocks)

    def _answer_rest(self) -> None:
        """Nobody is there any more: what was put is answered with nothing."""
        while True:
            try:
                question = self._questions.get_nowait()
            except queue.Empty:
                return
            if question is not None:
                self._answer(question.key, 0)
