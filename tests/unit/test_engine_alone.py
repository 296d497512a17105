"""An engine without a worker pays three calls a prompt and nothing else; an idle worker costs it nothing at a step."""

import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType

import pytest

from kvbus.engines import base
from kvbus.engines.alone import REFUSAL, NoWorker, session_alone
from kvbus.engines.base import End, EngineSession, Request, Token
from kvbus.engines.link import BlockingLink
from kvbus.engines.toy import ToyEngine
from kvbus.engines.worker_link import WorkerLink
from kvbus.errors import PeerError
from tests.unit.engine_parts import PROMPT, TOY

IDS = tuple(PROMPT.encode())


def answer(session: EngineSession, ids: tuple[int, ...] = IDS, *, tokens: int, kept: bool) -> End:
    said: list[Token] = []
    end = session.generate(Request(ids, tokens, kept, kept, ""), said.append, lambda: False)
    assert tuple(token.token for token in said) == end.tokens
    return end


def entered_by(run: Callable[[], object]) -> Counter[tuple[str, str]]:
    """Count the Python functions that a call enters, by module and qualified name."""
    entered: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            entered[frame.f_globals["__name__"], frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return entered


def asked_of(run: Callable[[], object], module: str) -> dict[str, int]:
    return {name: times for (of, name), times in entered_by(run).items() if of == module}


def test_an_engine_without_a_worker_answers_as_the_bare_engine_does() -> None:
    engine = ToyEngine.load(TOY)
    run = engine.resume(IDS, (), lambda: False)
    bare = tuple(run.next_token() for _ in range(20))
    end = answer(session_alone(engine), tokens=20, kept=True)
    assert end.tokens == bare
    assert (end.cached_tokens, end.stored_blocks, end.reason) == (0, 0, "length")


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("length", [16, 160])
def test_without_a_worker_a_prompt_costs_three_calls_however_long_it_and_its_answer_are(
    tokens: int, length: int
) -> None:
    # R23
    session = session_alone(ToyEngine.load(TOY))
    calls = asked_of(lambda: answer(session, IDS[:length], tokens=tokens, kept=True), NoWorker.__module__)
    assert calls == {"NoWorker.match": 1, "NoWorker.alloc": 1, "NoWorker.release": 1}
    assert asked_of(lambda: answer(session, IDS[:length], tokens=tokens, kept=False), NoWorker.__module__) == {}


def test_each_of_the_three_calls_enters_nothing_else() -> None:
    # R23
    nobody = NoWorker()
    for name, call in {
        "match": lambda: nobody.match(IDS, ""),
        "alloc": lambda: nobody.alloc(0, 0, 9),
        "release": lambda: nobody.release(0),
    }.items():
        assert asked_of(call, NoWorker.__module__) == {f"NoWorker.{name}": 1}
        assert {of for of, _ in entered_by(call)} == {NoWorker.__module__, __name__}


def test_the_null_worker_answers_all_that_an_engine_can_ask() -> None:
    # R23: nothing of the interface was forgotten, and nothing beside it is there
    asked = {name for name in vars(base.WorkerCalls) | vars(base.Pool) if not name.startswith("_")}
    assert asked == {name for name in vars(NoWorker) if not name.startswith("_")}


def test_the_null_worker_gives_out_nothing_that_could_come_back() -> None:
    nobody = NoWorker()
    assert nobody.match(IDS, "") == (0, ())
    assert nobody.alloc(0, 0, 9) == REFUSAL
    assert nobody.forget() == 0
    for call in (nobody.commit, nobody.abandon, nobody.page_array):
        with pytest.raises(PeerError, match="there is no worker"):
            call(1)


def test_without_a_worker_a_prefill_computes_nothing_in_vain() -> None:
    prefilled = session_alone(ToyEngine.load(TOY)).prefill(IDS, "", lambda: False)
    assert (prefilled.blocks, prefilled.computed_tokens, prefilled.refused) == (0, 0, REFUSAL)


def test_without_a_worker_nothing_is_started_opened_or_loaded() -> None:
    # R23: the interpreter's own audit sees every thread, socket, file, process and mapping
    script = f"""
import os, sys
from kvbus.engines.alone import session_alone
from kvbus.engines.base import Request
from kvbus.engines.toy import ToyEngine

session = session_alone(ToyEngine.load({TOY!r}))
loaded = {{"socket", "asyncio", "selectors", "queue", "nats", "msgpack", "torch", "kvbus.bus", "kvbus.engines.link"}}
events, answers = [], []
armed = False
sys.addaudithook(lambda name, arguments: events.append(name) if armed else None)
def held():
    return os.listdir("/proc/self/fd"), os.listdir("/proc/self/task")

before = held()
armed = True
for reuse in (True, False):
    answers.append(session.generate(Request(tuple(range(100)), 20, True, reuse, ""), lambda token: None, lambda: False))
session.prefill(tuple(range(100)), "", lambda: False)
armed = False
print(events, held() == before, sorted(loaded & set(sys.modules)), len(answers[1].tokens))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=150)
    assert result.stdout.strip() == "[] True [] 20"


def test_an_idle_worker_is_told_nothing_and_wakes_nobody_while_its_engine_answers() -> None:
    # R23: attached, and neither reuse nor storing is asked for
    ours, theirs = socket.socketpair()
    engine = ToyEngine.load(TOY)
    worker = WorkerLink(BlockingLink(theirs))
    reader = threading.Thread(target=worker.read)
    reader.start()
    session = EngineSession(engine, engine.describe(), worker, NoWorker())
    assert asked_of(lambda: answer(session, tokens=40, kept=False), WorkerLink.__module__) == {}
    ours.settimeout(0)
    with pytest.raises(BlockingIOError):
        ours.recv(1)
    assert (worker.answers.qsize(), worker.tokenizations.qsize()) == (0, 0)
    ours.close()
    reader.join(60)
    assert worker.closed.is_set()
    theirs.close()
