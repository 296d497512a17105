"""The engine process: `python -m kvbus.engines.process --engine toy --socket PATH --options JSON`.

The main thread computes, one request at a time; a reader thread takes frames (`worker_link`), and a third tokenizes.
Nothing travels over stdout.

The process lives as long as its worker's socket: when that closes, running work is stopped at its next step, and after
EXIT_GRACE_S the process ends in any case. The worker gets its pages back on that end, so it must be certain.
"""

import argparse
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from kvbus.engines import link
from kvbus.engines.base import Description, Engine, EngineSession, Request, StoppedError, Token
from kvbus.engines.link import BlockingLink, EngineError, Frame
from kvbus.engines.worker_link import Job, WorkerLink, complain
from kvbus.errors import ConfigError, KvbusError, PeerError
from kvbus.pool.memory import PoolMemory

CONNECT_BUDGET_S = 10.0
"""How long a worker may need to listen: it starts its engine only after it listens, so this is generous."""

WELCOME_TIMEOUT_S = 60.0
"""The worker makes the pool before it answers: gigabytes of fresh memory take seconds."""

EXIT_GRACE_S = 5.0
"""How long work may go on after the worker's socket closed: a forward pass cannot be stopped in the middle."""

_CONNECT_PAUSE_S = 0.05
_HELLO_ID = 0
_TEXT_MAX = 2_000  # an error text is for a person; models raise whole tensors
EXIT_OK, EXIT_FAILED, EXIT_CONFIG = 0, 1, 2


# ---------------------------------------------------------------------------------------------------------- attaching


def load_engine(name: str, options: Mapping[str, object]) -> Engine:
    """Return the named engine, loaded; each engine's third parties are imported only here."""
    if name == "toy":
        from kvbus.engines.toy import ToyEngine

        return ToyEngine.load(options)
    if name == "transformers":
        from kvbus.engines.transformers import TransformersEngine

        return TransformersEngine.load(options)
    raise ConfigError(f"engine {name!r} is unknown; there are toy, transformers")


def connect(path: Path, budget_s: float = CONNECT_BUDGET_S) -> BlockingLink:
    """Return a link to the worker's socket; EngineError if nobody listens there within the budget."""
    never_set = threading.Event()
    ends_at = time.monotonic() + budget_s
    while True:
        try:
            return BlockingLink.connect(path)
        except EngineError:
            if time.monotonic() >= ends_at:
                raise
            never_set.wait(_CONNECT_PAUSE_S)


def attach(blocking: BlockingLink, about: Description, *, left: bool = False) -> PoolMemory:
    """Say who we are and return the pool that the worker made; EngineError if it refuses, ConfigError for its text.

    `left`: this process was attached before, and touches nothing of what it was given then any more.
    """
    blocking.send(
        "hello",
        _HELLO_ID,
        role="engine",
        engine=about.engine,
        version=about.version,
        model=about.model,
        model_digest=about.model_digest,
        layout=about.layout.to_plain(),
        vocab_size=about.vocab_size,
        tokens_max=about.tokens_max,
        **({"left": True} if left else {}),
    )
    try:
        frame = blocking.receive(WELCOME_TIMEOUT_S)
    except TimeoutError as error:
        raise EngineError("the worker does not answer hello", waited_s=WELCOME_TIMEOUT_S) from error
    if frame is None:
        raise EngineError("the worker closed the link instead of answering hello")
    if frame["op"] != "welcome":
        raise ConfigError(f"the worker did not take this engine: {link.text(frame, 'text', 'no reason given')}")
    if not blocking.descriptors:
        raise EngineError("the worker's welcome came without the pool")
    descriptor = blocking.descriptors.pop()
    try:
        return PoolMemory.attach(descriptor, writable=True, expected=about.layout)
    except BaseException:
        os.close(descriptor)
        raise


# ------------------------------------------------------------------------------------------------------------ serving


class EngineServer:
    """Serves the worker's jobs over one session; each job ends with exactly one `reply`, `end` or `error`."""

    def __init__(self, session: EngineSession, worker: WorkerLink) -> None:
        self._session = session
        self._worker = worker

    def __repr__(self) -> str:
        return f"<EngineServer {self._session!r}>"

    def serve(self, jobs: "queue.Queue[Job | None]") -> None:
        """Serve one queue until the worker closes. Two threads may each serve one."""
        handlers = {"generate": self._generate, "prefill": self._prefill, "tokenize": self._tokenize}
        while (job := jobs.get()) is not None:
            handler = handlers[link.text(job.frame, "op")]
            try:
                self._serve_one(handler, job)
            except EngineError as error:
                if not self._worker.closed.is_set():  # a worker that closed is this process's ordinary end
                    complain(str(error))

    def _serve_one(self, handler: Callable[[Job], None], job: Job) -> None:
        try:
            handler(job)
        except StoppedError:
            self._worker.finish(job, "error", kind="refused", text="cancelled on request")
        except PeerError as error:
            self._worker.finish(job, "error", kind="refused", text=str(error))
        except EngineError as error:  # the worker refused a call or is gone; in the latter case so is the next line
            self._worker.finish(job, "error", kind="failed", text=str(error))
        except Exception as error:  # foreign code: a model may raise anything, and the next prompt may work
            traceback.print_exc()
            self._worker.finish(job, "error", kind="failed", text=f"{type(error).__name__}: {error}"[:_TEXT_MAX])

    def _generate(self, job: Job) -> None:
        frame = job.frame
        request = Request(
            ids=self._ids(frame),
            max_tokens=link.number(frame, "max_tokens"),
            store=link.flag(frame, "store", default=True),
            reuse=link.flag(frame, "reuse", default=True),
            salt=link.text(frame, "salt", ""),
        )

        def emit(token: Token) -> None:
            self._worker.send("token", job, token=token.token, text=token.text)

        end = self._session.generate(request, emit, job.cancelled.is_set)
        self._worker.finish(
            job,
            "end",
            tokens=link.as_column(end.tokens),
            text=end.text,
            prompt_tokens=end.prompt_tokens,
            cached_tokens=end.cached_tokens,
            stored_blocks=end.stored_blocks,
            reason=end.reason,
        )

    def _prefill(self, job: Job) -> None:
        salt = link.text(job.frame, "salt", "")
        prefilled = self._session.prefill(link.column(job.frame, "ids"), salt, job.cancelled.is_set)
        self._worker.finish(job, "reply", **asdict(prefilled))

    def _tokenize(self, job: Job) -> None:
        ids = self._session.tokenize(*text_or_messages(job.frame))
        self._worker.finish(job, "reply", ids=link.as_column(ids))

    def _ids(self, frame: Frame) -> tuple[int, ...]:
        if "ids" in frame:
            return link.column(frame, "ids")
        return tuple(self._session.tokenize(*text_or_messages(frame)))


def text_or_messages(frame: Frame) -> tuple[str | None, list[dict[str, str]] | None]:
    """Return the text or the chat that a job brings."""
    text = link.text(frame, "text") if "text" in frame else None
    if "messages" not in frame:
        return text, None
    messages = frame["messages"]
    if not isinstance(messages, list):
        raise PeerError("frame field messages must be a list", got=type(messages).__name__)
    turns = [message if isinstance(message, dict) else {} for message in messages]
    return text, [{"role": link.text(turn, "role"), "content": link.text(turn, "content")} for turn in turns]


def run(engine: Engine, path: Path) -> None:
    """Attach a loaded engine to the worker at path and serve until the worker's socket closes."""
    about = engine.describe()
    blocking = connect(path)
    pool = attach(blocking, about)
    worker = WorkerLink(blocking, pool)
    server = EngineServer(EngineSession(engine, about, worker, pool), worker)

    def read_and_end() -> None:
        worker.read()
        never_set.wait(EXIT_GRACE_S)
        os._exit(EXIT_FAILED)

    never_set = threading.Event()
    # Daemons: neither may keep the process alive once the main thread has nothing more to do.
    threading.Thread(target=read_and_end, name="reader", daemon=True).start()
    threading.Thread(target=server.serve, args=(worker.tokenizations,), name="tokenizer", daemon=True).start()
    server.serve(worker.answers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one engine until its worker ends; 2 where a setting is wrong, 1 where the engine or its link failed."""
    parser = argparse.ArgumentParser(prog="python -m kvbus.engines.process", description="One kvbus engine process.")
    parser.add_argument("--engine", required=True, help="toy or transformers")
    parser.add_argument("--socket", required=True, type=Path, help="the worker's socket")
    parser.add_argument("--options", default="{}", help="the engine's settings, a JSON object")
    given = parser.parse_args(arguments)
    # Ctrl-C in a shell ends the engine without a traceback; a worker starts it in a session of its own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        run(load_engine(given.engine, _options(given.options)), given.socket)
    except ConfigError as error:
        complain(str(error))
        return EXIT_CONFIG
    except KvbusError as error:
        complain(str(error))
        return EXIT_FAILED
    return EXIT_OK


def _options(raw: str) -> dict[str, object]:
    try:
        options = json.loads(raw)
    except ValueError as error:
        raise ConfigError("--options is not JSON", reason=str(error)) from error
    if not isinstance(options, dict):
        raise ConfigError(f"--options is a {type(options).__name__}, expected a JSON object")
    return options


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Not sys.exit: threads of a model may hold the interpreter back, and the worker waits for this end.
    os._exit(code)
