"""Runs in a worker's container, fed on stdin to its Python: the local questions that no command asks.

    python - answer TEXT   the engine's next tokens after a prompt, and how many of its tokens were found in pages
    python - counters      the worker's counters by name
    python - reached NAME LEAST   the same, once one of them has come so far, or after some seconds
    python - moving NAME LEAST    the same as a fact: whether it has come so far, and pages have come in since
    python - clock         the time that this container shows
    python - listening     the TCP ports on which this container listens, without Docker's own name server

One JSON document on stdout. It imports of the image's kvbus no more than the local link, and nothing of the tests: a
story asks often, and the client of commands takes half a second to import.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvbus.engines import link
from kvbus.engines.link import BlockingLink, Frame

REACHED_S = 5.0
"""Then whoever asks decides anew; to ask again and again from outside costs a process each time."""
LOOK_S = 0.02
PAGES_BYTES = 2 * 65_536
"""Two pages of the toy engine: nothing else that comes to a worker is as long."""
ANSWER_S = 100.0
"""A model on a busy processor; below what the story waits for this program."""
TOKENS = 4
"""The first depends on every byte of the prompt's pages; the others on what follows from it."""

LISTEN, NAME_SERVER = "0A", "127.0.0.11"


class Worker:
    """One connection to the worker of this container."""

    def __init__(self) -> None:
        (path,) = Path(os.environ["XDG_RUNTIME_DIR"]).glob("kvbus-*/*.sock")
        self._link = BlockingLink.connect(path)
        self._last_id = 0
        self.ask("hello", role="client")

    def ask(self, op: str, **fields: object) -> Frame:
        """Ask, and return the last frame of the answer; SystemExit where there is none, or an error."""
        self._last_id += 1
        self._link.send(op, self._last_id, **fields)
        ends_at = time.monotonic() + ANSWER_S
        while frame := self._link.receive(max(0.0, ends_at - time.monotonic())):
            if frame["op"] == "error":
                raise SystemExit(f"the worker says: {frame}")
            if frame["id"] == self._last_id and frame["op"] != "token":
                return frame
        raise SystemExit("the worker closed the connection")


def main() -> None:
    """Answer one question."""
    word, *given = sys.argv[1:]
    sys.stdout.write(json.dumps(QUESTIONS[word](*given)) + "\n")


def _answer(text: str) -> dict[str, object]:
    """A prompt that is answered is not stored, so that a later question finds what was moved and nothing else."""
    end = Worker().ask("generate", text=text, max_tokens=TOKENS, store=False, reuse=True, salt="")
    return {"tokens": list(link.column(end, "tokens")), "cached_tokens": link.number(end, "cached_tokens")}


def _counters() -> dict[str, object]:
    return link.mapping(Worker().ask("stats"), "counters")


def _reached(name: str, least: str) -> dict[str, object]:
    worker, counters = Worker(), dict[str, object]()

    def is_there() -> bool:
        counters.update(link.mapping(worker.ask("stats"), "counters"))
        count = counters.get(name, 0)
        return isinstance(count, int) and count >= int(least)

    _looked_for(is_there)
    return counters


def _moving(name: str, least: str) -> dict[str, object]:
    count = _reached(name, least).get(name, 0)
    before = _received_bytes()
    is_asked = isinstance(count, int) and count >= int(least)
    return {"moving": is_asked and _looked_for(lambda: _received_bytes() >= before + PAGES_BYTES)}


def _looked_for(holds: Callable[[], bool]) -> bool:
    """Whether something holds, now or within some seconds."""
    ends_at, never_set = time.monotonic() + REACHED_S, threading.Event()
    while not (found := holds()) and time.monotonic() < ends_at:
        never_set.wait(LOOK_S)
    return found


def _received_bytes() -> int:
    """Return what came in over all of this container's network devices but the loopback, as the kernel counts it."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()[2:]
    devices = (line.split(":") for line in lines)
    return sum(int(counts.split()[0]) for name, counts in devices if name.strip() != "lo")


def _clock() -> dict[str, object]:
    return {"unix_s": time.time()}


def _listening() -> dict[str, object]:
    """Read the kernel's table: addresses are hexadecimal, bytes of IPv4 the other way round."""
    found = []
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        host, port = local.split(":")
        address = ".".join(str(byte) for byte in reversed(bytes.fromhex(host)))
        if state == LISTEN and address != NAME_SERVER:
            found.append({"address": address, "port": int(port, 16)})
    return {"ports": found}


QUESTIONS: dict[str, Callable[..., dict[str, object]]] = {
    "answer": _answer,
    "counters": _counters,
    "reached": _reached,
    "moving": _moving,
    "clock": _clock,
    "listening": _listening,
}


if __name__ == "__main__":
    main()
