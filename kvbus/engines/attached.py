"""One engine as its worker sees it while it is attached: the calls in flight to it, and its requests to the desk."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvbus.columns import column
from kvbus.engines import link
from kvbus.engines.calls import Call, check_reply
from kvbus.engines.connection import Connection
from kvbus.engines.desk import Desk, Hello, Refusal
from kvbus.engines.link import EngineError, Frame
from kvbus.errors import PeerError
from kvbus.events import ProcessIdentity

CALLS_MAX = 64
"""What may wait for one engine that computes one request at a time: a minute's worth of short answers."""

_NUMBER_MAX = 2**31 - 1  # beyond any vocabulary or context; keeps products inside 63 bits


@dataclass(frozen=True, slots=True)
class AttachedStatistics:
    """Calls made, those still with the engine, those refused since too many waited."""

    calls: int
    in_flight: int
    refused: int


class AttachedEngine:
    """An attached engine. Its owner feeds it each frame that the engine sends, and says when the engine is lost."""

    def __init__(self, connection: Connection, hello: Hello, desk: Desk, loop: asyncio.AbstractEventLoop) -> None:
        self.hello = hello
        self._connection = connection
        self._desk = desk
        self._loop = loop
        self._calls: dict[int, Call] = {}
        self._next_id = 1
        self._made = 0
        self._refused = 0
        self._lost: EngineError | None = None

    def __repr__(self) -> str:
        return f"<AttachedEngine {self.hello.engine} pid={self.hello.process.pid} calls={len(self._calls)}>"

    def call(self, op: str, budget_s: float, fields: Frame, *, frames_max: int = 1) -> Call | Refusal:
        """Send a request; EngineError if the engine is lost, Refusal where too many wait or it fits no frame."""
        if self._lost is not None:
            raise EngineError(self._lost.message, **self._lost.details)
        if len(self._calls) >= CALLS_MAX:
            self._refused += 1
            return Refusal(f"{CALLS_MAX} calls wait for the engine already; try again when some have ended")
        call = Call(
            self._take_id(),
            op,
            frames_max=frames_max,
            ends_at=self._loop.time() + budget_s,
            on_cancel=self._send_cancel,
            on_unclaimed=self._give_back,
        )
        try:
            self._connection.send(op, call.call_id, **fields)
        except ValueError as error:
            return Refusal(f"the prompt is too long to hand to the engine: {error}")
        self._made += 1
        self._calls[call.call_id] = call
        return call

    def stop(self) -> None:
        """Ask the engine process to end."""
        self._connection.send("stop", self._take_id())

    def lose(self, reason: str) -> None:
        """Fail every call: the engine cannot answer any more. May be called again; the first reason stands."""
        if self._lost is not None:
            return
        self._lost = EngineError(reason, engine=self.hello.engine, pid=self.hello.process.pid)
        for call in self._calls.values():
            call.fail(EngineError(self._lost.message, **self._lost.details))
        self._calls.clear()
        self._connection.hang_up()

    def statistics(self) -> AttachedStatistics:
        """Return the counters as they stand."""
        return AttachedStatistics(calls=self._made, in_flight=len(self._calls), refused=self._refused)

    def handle(self, frame: Frame) -> None:
        """Take one frame from the engine; PeerError where it makes no sense, after which the engine is to be lost.

        Of what a lost engine had still sent only its own word that it touches something no more is taken (contract 45):
        what it asks for nobody would give back, since its process may be known to be dead already.
        """
        op, request_id = link.text(frame, "op"), link.number(frame, "id")
        if self._lost is not None and op not in _GIVES_BACK:
            return
        if op in link.REPLIES:
            self._handle_reply(request_id, frame)
            return
        prepare = _ENGINE_REQUESTS.get(op)
        if prepare is None:
            raise PeerError("an engine may not ask this of a worker", op=op, expected=", ".join(_ENGINE_REQUESTS))
        ask = prepare(self._desk, frame)
        try:
            answer = ask()
        except PeerError as error:
            self._connection.send("error", request_id, kind="refused", text=str(error))
        else:
            self._connection.send("reply", request_id, **answer)

    def _handle_reply(self, request_id: int, frame: Frame) -> None:
        call = self._calls.get(request_id)
        if call is None:
            raise PeerError("the engine answers a call that nobody made", id=request_id, op=frame["op"])
        check_reply(call.op, frame)
        if call.arrive(frame):
            del self._calls[request_id]

    def _send_cancel(self, call: Call) -> None:
        if self._lost is None:
            self._connection.send("cancel", self._take_id(), target=call.call_id)

    def _give_back(self, call: Call, frame: Frame) -> None:
        """Release what a frame brings that nobody awaits any more: a prefilled handle."""
        if call.op == "prefill" and frame["op"] == "reply" and self._lost is None:
            self._desk.release(link.number(frame, "handle"))

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1


def hello_of(frame: Frame, process: ProcessIdentity) -> Hello:
    """Return what an engine says of itself, and the process that the kernel says it is."""
    return Hello(
        engine=link.text(frame, "engine"),
        version=link.text(frame, "version"),
        model=link.text(frame, "model"),
        model_digest=link.text(frame, "model_digest"),
        layout=link.mapping(frame, "layout"),
        vocab_size=link.number(frame, "vocab_size", least=1, most=_NUMBER_MAX),
        tokens_max=link.number(frame, "tokens_max", least=1, most=_NUMBER_MAX),
        process=process,
    )


# Each reads its frame first (PeerError: the engine is broken) and returns the call to the desk (PeerError: refused).
_Ask = Callable[[], dict[str, object]]


def _match(desk: Desk, frame: Frame) -> _Ask:
    ids, salt = link.column(frame, "ids"), link.text(frame, "salt")

    def ask() -> dict[str, object]:
        matched = desk.match(ids, salt)
        answer: dict[str, object] = {"handle": matched.handle, "pages": link.as_column(matched.pages)}
        return answer | ({"digests": column(matched.digests, 8)} if any(matched.digests) else {})

    return ask


def _spoiled(desk: Desk, frame: Frame) -> _Ask:
    handle, block = link.number(frame, "handle"), link.number(frame, "block")

    def ask() -> dict[str, object]:
        desk.spoiled(handle, block)
        return {}

    return ask


def _alloc(desk: Desk, frame: Frame) -> _Ask:
    handle, first, count = link.number(frame, "handle"), link.number(frame, "first_block"), link.number(frame, "count")

    def ask() -> dict[str, object]:
        allocated = desk.alloc(handle, first, count)
        if isinstance(allocated, Refusal):
            return {"refused": allocated.text}
        return {"write": allocated.write, "pages": link.as_column(allocated.pages)}

    return ask


def _giving_back(method: str, field: str) -> Callable[[Desk, Frame], _Ask]:
    def prepare(desk: Desk, frame: Frame) -> _Ask:
        number = link.number(frame, field)

        def ask() -> dict[str, object]:
            {"commit": desk.commit, "abandon": desk.abandon, "release": desk.release}[method](number)
            return {}

        return ask

    return prepare


def _forget(desk: Desk, _frame: Frame) -> _Ask:
    return lambda: {"names": desk.forget()}


_ENGINE_REQUESTS: dict[str, Callable[[Desk, Frame], _Ask]] = {
    "match": _match,
    "spoiled": _spoiled,
    "alloc": _alloc,
    "commit": _giving_back("commit", "write"),
    "abandon": _giving_back("abandon", "write"),
    "release": _giving_back("release", "handle"),
    "forget": _forget,
}
_GIVES_BACK = frozenset({"commit", "abandon", "release"})
