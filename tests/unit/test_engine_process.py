"""The engine process from inside: foreign code that fails, frames that make no sense, and settings."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvbus.engines import worker_link
from kvbus.engines.base import EngineSession
from kvbus.engines.link import BlockingLink, EngineError, Frame
from kvbus.engines.process import EngineServer, connect, load_engine
from kvbus.engines.toy import ToyEngine
from kvbus.engines.worker_link import WorkerLink
from kvbus.errors import ConfigError
from kvbus.pool.memory import PoolMemory
from tests.unit.engine_parts import EPOCH, ROOT, TOY
from tests.waiting import wait_until


class FailingToy(ToyEngine):
    """A model that raises whatever a model may raise, on one prompt."""

    def tokenize(self, text: str) -> list[int]:
        if text == "fail":
            raise RuntimeError("planted in the model")
        return super().tokenize(text)


class Served:
    """An engine's threads on one end of a socket pair; the test is the worker on the other."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.worker = BlockingLink(ours)
        engine = FailingToy.load(TOY)
        about = engine.describe()
        self.pool = PoolMemory.create(about.layout, 4, EPOCH)
        self.link = WorkerLink(BlockingLink(theirs))
        server = EngineServer(EngineSession(engine, about, self.link, self.pool), self.link)
        self.threads = [
            threading.Thread(target=self.link.read),
            threading.Thread(target=server.serve, args=(self.link.answers,)),
            threading.Thread(target=server.serve, args=(self.link.tokenizations,)),
        ]
        for thread in self.threads:
            thread.start()

    def next(self) -> Frame:
        frame = self.worker.receive(60)
        assert frame is not None
        return frame

    def close(self) -> None:
        self.worker.close()
        for thread in self.threads:
            thread.join(60)
        self.link._link.close()
        self.pool.close()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()
    assert not any(thread.is_alive() for thread in served.threads)


def said(frame: Frame) -> tuple[object, object, str]:
    return frame["op"], frame.get("kind"), str(frame.get("text", ""))


def test_a_model_that_raises_fails_that_request_only(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    served.worker.send("tokenize", 1, text="fail")
    assert said(served.next()) == ("error", "failed", "RuntimeError: planted in the model")
    assert "planted in the model" in capfd.readouterr().err
    served.worker.send("tokenize", 2, text="works")
    assert served.next()["ids"] == bytes(byte for letter in b"works" for byte in (letter, 0, 0, 0))


def test_requests_that_the_engine_does_not_know_or_understand_are_refused(served: Served) -> None:
    for sent, says in (
        ({"op": "paint"}, "does not know 'paint'"),
        ({"op": "tokenize", "messages": "hi"}, "messages must be a list"),
        ({"op": "tokenize", "messages": ["hi"]}, "role must be a string"),
        ({"op": "tokenize", "text": "x" * 3000}, "takes at most 2047"),
        ({"op": "generate", "text": "x"}, "max_tokens must be an integer"),
        ({"op": "prefill"}, "ids must be u32"),
    ):
        fields = dict(sent)
        served.worker.send(str(fields.pop("op")), 5, **fields)
        op, kind, text = said(served.next())
        assert (op, kind) == ("error", "refused")
        assert says in text


def test_a_worker_that_refuses_a_call_fails_the_answer(served: Served) -> None:
    served.worker.send("generate", 1, text="a prompt", max_tokens=1)
    match = served.next()
    assert match["op"] == "match"
    served.worker.send("error", int(str(match["id"])), kind="refused", text="too many open handles")
    op, kind, text = said(served.next())
    assert (op, kind) == ("error", "failed")
    assert "too many open handles" in text


def test_a_worker_that_does_not_answer_in_time_is_left(
    served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_link, "CALL_TIMEOUT_S", 0.05)
    served.worker.send("generate", 1, text="a prompt", max_tokens=1)
    assert served.next()["op"] == "match"
    wait_until(served.link.closed.is_set, what="the engine leaves")


def test_a_cancelled_request_that_has_not_begun_ends_at_once(served: Served) -> None:
    served.worker.send("generate", 1, text="first", max_tokens=1)
    match = served.next()
    served.worker.send("generate", 2, text="second", max_tokens=5, store=False, reuse=False)
    served.worker.send("cancel", 3, target=2)
    served.worker.send("cancel", 4, target=99)
    served.worker.send("error", int(str(match["id"])), kind="refused", text="no")
    assert served.next()["id"] == 1
    end = served.next()
    assert (end["op"], end["id"], end["reason"]) == ("end", 2, "cancelled")


def test_a_worker_whose_frames_make_no_sense_ends_the_engine(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    served.worker._socket.sendall(b"HTTP/1.1 400 Bad Request\r\n")
    wait_until(served.link.closed.is_set, what="the engine ends")
    wait_until(lambda: not any(thread.is_alive() for thread in served.threads), what="its threads end")
    assert "make no sense" in capfd.readouterr().err


def test_more_requests_than_may_wait_are_refused(served: Served) -> None:
    for number in range(worker_link.JOBS_MAX + 1):
        served.worker.send("generate", number, text="a prompt", max_tokens=1)
    frames = [served.next(), served.next()]
    assert [frame["op"] for frame in frames if frame["op"] != "match"] == ["error"]
    refused = next(frame for frame in frames if frame["op"] == "error")
    assert (refused["id"], refused["kind"]) == (worker_link.JOBS_MAX, "refused")


def test_nobody_listening_is_said_after_the_budget(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no worker listens on"):
        connect(tmp_path / "none.sock", budget_s=0.1)


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(ConfigError, match="there are toy, transformers"):
        load_engine("gpt", {})


def engine_process(tmp_path: Path, arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvbus.engines.process", "--socket", str(tmp_path / "none.sock"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--engine", "gpt"], "'gpt' is unknown"),
        (["--engine", "toy", "--options", '{"pages": 1}'], "'pages' is unknown"),
        (["--engine", "toy", "--options", "{"], "not JSON"),
        (["--engine", "toy", "--options", "[]"], "is a list"),
        (["--engine", "transformers"], "'folder' is missing"),
    ],
)
def test_wrong_settings_end_the_process_with_their_name(tmp_path: Path, arguments: list[str], says: str) -> None:
    ended = engine_process(tmp_path, arguments)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert not ended.stdout


def test_ctrl_c_ends_an_engine_that_waits_for_its_worker_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvbus.engines.process", "--engine", "toy", "--socket", str(tmp_path / "no.sock")]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        status = Path(f"/proc/{process.pid}/status")

        def default_sigint() -> bool:
            lines = dict(line.split(":", 1) for line in status.read_text(encoding="ascii").splitlines())
            caught = int(lines["SigCgt"], 16) >> (signal.SIGINT - 1) & 1
            return "python" in lines["Name"] and not caught and "numpy" in Path(f"/proc/{process.pid}/maps").read_text()

        wait_until(default_sigint, what="the engine has set up its signals")
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=150)
    assert process.returncode == -signal.SIGINT
    assert b"Traceback" not in complaints
