"""The worker's local socket: where its engine attaches, and where clients of this host ask.

One engine at a time. When its socket closes every call in flight fails at once, but what it held comes back only when
its process is proved to have ended (a pidfd that was opened while it was connected): a process that has closed its
socket may still be writing pages. Until then no other engine is taken. The same process may come back, if its hello
says that it has left: that it touches nothing of what it held any more. That is its own word about its own accesses,
as each `abandon` and `release` is, and it stands for those that could not be sent.

The socket's folder is for the worker's user alone (0700) and so is the socket (0600); who connects is checked again by
the kernel's word. A peer whose frames make no sense gets an error and is closed; the worker goes on.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from kvbus.engines import link
from kvbus.engines.attached import AttachedEngine, hello_of
from kvbus.engines.base import Prefilled
from kvbus.engines.calls import Generation, only_frame, prefilled_of, prompt_fields
from kvbus.engines.clients import ClientSession
from kvbus.engines.connection import Connection, refuse_foreign
from kvbus.engines.desk import Desk, Hello, Refusal
from kvbus.engines.link import EngineError, Frame
from kvbus.engines.listening import listen
from kvbus.errors import ConfigError, PeerError
from kvbus.events import Prompt
from kvbus.processes import ProcessWatch, identity

CONNECTIONS_MAX = 64
"""One engine and the tools of one person; each costs a descriptor of the usual 1,024."""

HELLO_TIMEOUT_S = 5.0
"""A peer says hello at once after it connects; this is generous even on a host that swaps."""

TOKENIZE_BUDGET_S = 10.0
"""The longest request, 768 KiB of text, takes about a second; the rest is waiting for a busy processor."""

PREFILL_BUDGET_S = 30.0
"""A transfer's default budget: nobody waits for a prefill any longer."""

GENERATE_BUDGET_S = 600.0
"""2,048 tokens at the 7 a second of a small model on one core, twice over."""

CLOSE_BUDGET_S = 6.0
"""An engine ends at most five seconds after its socket closed (`process.EXIT_GRACE_S`)."""

_ACCEPT_PAUSE_S = 0.1  # after a failed accept: no descriptors are left, and some may be closed soon


@dataclass(frozen=True, slots=True)
class PortStatistics:
    """Connections open now; engines attached and lost, peers refused or broken, since the start."""

    connections: int
    attached: int
    lost: int
    refused: int
    broken: int
    calls_in_flight: int


class EnginePort:
    """See the module's head. `on_engine` is called when an engine has attached, `on_engine_lost` when it cannot answer
    any more; the desk's `engine_gone` follows when its process has ended. All run on the loop and must not block.
    """

    def __init__(
        self, path: Path, desk: Desk, on_engine: Callable[[Hello], None], on_engine_lost: Callable[[str], None]
    ) -> None:
        self._path = path
        self._desk = desk
        self._on_engine = on_engine
        self._on_engine_lost = on_engine_lost
        self._listener: socket.socket | None = None
        self._watch: ProcessWatch | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[Connection] = set()
        self._engine: AttachedEngine | None = None
        # An engine that cannot answer any more but whose process has not ended; at most one of the two is set.
        self._leaving: Hello | None = None
        self._vacant = asyncio.Event()
        self._vacant.set()
        self._is_closing = False
        self._counts = {"attached": 0, "lost": 0, "refused": 0, "broken": 0}

    def __repr__(self) -> str:
        return f"<EnginePort {self._path} engine={self._engine!r} connections={len(self._connections)}>"

    @property
    def engine(self) -> Hello | None:
        """What the attached engine said of itself; None while there is none."""
        return None if self._engine is None else self._engine.hello

    async def start(self) -> None:
        """Listen; ConfigError where the folder is open to others, the path is too long, or a worker listens there."""
        loop = asyncio.get_running_loop()
        self._watch = ProcessWatch(loop)
        self._listener = listen(self._path)
        self._spawn(self._accept(loop, self._listener))

    async def close(self, budget_s: float = CLOSE_BUDGET_S) -> bool:
        """Stop listening, ask the engine to end, and close all; False if its process still lived after the budget.

        What it held then stays held, and its process stays watched: end it (it is the worker's child), and call this
        again to wait for the desk's `engine_gone`.
        """
        self._is_closing = True
        if self._engine is not None:
            self._engine.stop()
            self._lose(self._engine, "the worker closes")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(budget_s):
                await self._vacant.wait()
        for connection in tuple(self._connections):
            connection.hang_up()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
        if self._watch is not None and self._vacant.is_set():
            self._watch.close()
        return self._vacant.is_set()

    async def tokenize(self, prompt: Prompt, budget_s: float = TOKENIZE_BUDGET_S) -> tuple[int, ...] | Refusal:
        """Return the prompt's token ids; EngineError if no engine answers within the budget."""
        if prompt.tokens is not None:
            return link.column({"op": "tokenize", "tokens": prompt.tokens}, "tokens")
        call = self._attached().call("tokenize", budget_s, prompt_fields(prompt))
        frame = await only_frame(call)
        return frame if isinstance(frame, Refusal) else link.column(frame, "ids")

    async def prefill(self, ids: tuple[int, ...], salt: str, budget_s: float = PREFILL_BUDGET_S) -> Prefilled | Refusal:
        """Have the engine compute the prompt's whole blocks without output.

        They stay pinned under the handle that is returned, which now belongs to the caller: `desk.release` it after
        the pages were lent. EngineError if no engine answers within the budget; nothing is left pinned then.
        """
        call = self._attached().call("prefill", budget_s, {"ids": link.as_column(ids), "salt": salt})
        frame = await only_frame(call)
        if isinstance(frame, Refusal):
            return frame
        prefilled = prefilled_of(frame)
        try:
            self._desk.hand_over(prefilled.handle)
        except PeerError as error:
            raise EngineError("the engine was lost just as it had prefilled", reason=str(error)) from error
        return prefilled

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        store: bool = True,
        reuse: bool = True,
        salt: str = "",
        budget_s: float = GENERATE_BUDGET_S,
    ) -> Generation:
        """Begin an answer; EngineError now, or from the Generation, if no engine gives it within the budget."""
        engine = self._attached()
        # An engine never gives more tokens than its model has positions.
        frames_max = min(max_tokens, engine.hello.tokens_max) + 1
        fields: Frame = {"max_tokens": max_tokens, "store": store, "reuse": reuse, "salt": salt}
        return Generation(engine.call("generate", budget_s, prompt_fields(prompt) | fields, frames_max=frames_max))

    def statistics(self) -> PortStatistics:
        """Return the counters as they stand."""
        in_flight = 0 if self._engine is None else self._engine.statistics().in_flight
        return PortStatistics(connections=len(self._connections), calls_in_flight=in_flight, **self._counts)

    def _attached(self) -> AttachedEngine:
        if self._engine is None:
            raise EngineError("no engine is attached to this worker; start one, or wait until it has loaded")
        return self._engine

    # Connections ----------------------------------------------------------------------------------------------------

    async def _accept(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            accepted.setblocking(False)  # noqa: FBT003 - the socket's own signature
            connection = Connection(loop, accepted)
            if len(self._connections) >= CONNECTIONS_MAX:
                connection.send("error", 0, kind="refused", text=f"{CONNECTIONS_MAX} connections are open already")
                await connection.close()
                self._counts["refused"] += 1
                continue
            self._connections.add(connection)
            self._spawn(self._serve(connection))

    async def _serve(self, connection: Connection) -> None:
        try:
            await self._introduce(connection)
        except PeerError as error:
            self._counts["broken"] += 1
            connection.send("error", 0, kind="broken", text=str(error))
        finally:
            self._connections.discard(connection)
            await connection.close()

    async def _introduce(self, connection: Connection) -> None:
        pid = refuse_foreign(connection)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await connection.receive()
        except TimeoutError:
            raise PeerError("no hello came", waited_s=HELLO_TIMEOUT_S) from None
        if hello is None:
            return
        if hello["op"] != "hello":
            raise PeerError("the first frame must be hello", got=hello["op"])
        role = link.text(hello, "role")
        if role == "client":
            connection.send("welcome", link.number(hello, "id"))
            await ClientSession(connection, self, self._desk).run()
        elif role == "engine":
            await self._attach(connection, hello, pid)
        else:
            raise PeerError("frame field role is unknown", got=role[:40], expected="engine, client")

    # The engine -----------------------------------------------------------------------------------------------------

    async def _attach(self, connection: Connection, frame: Frame, pid: int) -> None:
        hello_id = link.number(frame, "id")
        engine = self._welcome(connection, frame, pid)
        if isinstance(engine, Refusal):
            self._counts["refused"] += 1
            connection.send("error", hello_id, kind="refused", text=engine.text)
            return
        reason = "the engine closed its socket, or its process ended"
        try:
            self._on_engine(engine.hello)
            while (received := await connection.receive()) is not None:
                engine.handle(received)
        except PeerError as error:
            reason = f"the engine broke the protocol: {error}"
            connection.send("error", 0, kind="broken", text=str(error))
            raise
        finally:
            self._lose(engine, reason)

    def _welcome(self, connection: Connection, frame: Frame, pid: int) -> AttachedEngine | Refusal:
        """Take an engine in, if there is none; from here on its process is watched."""
        try:
            process = identity(pid)
        except ProcessLookupError:
            return Refusal("the engine's process has ended already")
        hello = hello_of(frame, process)
        if self._is_closing:
            return Refusal("the worker is closing")
        assert self._watch is not None  # noqa: S101 - start() made it before anything could connect
        present = self._leaving if self._engine is None else self._engine.hello
        if present is not None and present is self._leaving and _has_left(present, hello, frame):
            self._watch.forget(process)
            self._leaving = present = None
            self._desk.engine_left()
            self._vacant.set()
        if present is not None:
            state = "is attached" if self._engine is not None else "has closed its socket but still runs"
            return Refusal(
                f"an engine ({present.engine}, process {present.process.pid}) {state}; a worker serves one: end it"
            )
        # Watched first, asked second: it is still connected after its pidfd was opened, so that is its pidfd (P6).
        if not self._watch.watch(process, self._engine_process_ended) or not connection.is_connected():
            self._watch.forget(process)
            return Refusal("the engine's process has ended already")
        try:
            welcome = self._desk.welcome(hello)
        except (ConfigError, PeerError) as error:
            welcome = Refusal(str(error))
        if isinstance(welcome, Refusal):
            self._watch.forget(process)
            return welcome
        engine = AttachedEngine(connection, hello, self._desk, asyncio.get_running_loop())
        self._engine = engine
        self._vacant.clear()
        self._counts["attached"] += 1
        connection.send_with_descriptor(
            welcome.fd,
            "welcome",
            link.number(frame, "id"),
            epoch=welcome.epoch,
            pages=welcome.pages,
            block_tokens=welcome.block_tokens,
            fingerprint=welcome.fingerprint,
        )
        return engine

    def _lose(self, engine: AttachedEngine, reason: str) -> None:
        if self._engine is not engine:
            return
        self._engine = None
        self._leaving = engine.hello
        self._counts["lost"] += 1
        engine.lose(reason)
        self._on_engine_lost(reason)

    def _engine_process_ended(self) -> None:
        if self._engine is not None:
            self._lose(self._engine, "the engine's process ended")
        if self._leaving is not None:
            self._leaving = None
            self._desk.engine_gone()
            self._vacant.set()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Not a peer's fault, those are handled: ours, or the desk's. Whoever runs the loop decides.
            task.get_loop().call_exception_handler({"message": "kvbus engine port", "exception": error, "task": task})


def _has_left(leaving: Hello, hello: Hello, frame: Frame) -> bool:
    """Tell whether a hello ends the session before: it says so, and the kernel says that it is the same process."""
    return link.flag(frame, "left", default=False) and leaving.process == hello.process
