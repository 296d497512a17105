"""The peers of the benchmark, as subprocesses in an environment of their own, and why one of them is not there."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
SCRIPTS = ROOT / "bench" / "peers"
INSTALL = "run `make bench-peers` to install the peers"


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A peer: its name, its script, the module that has to be there, and what that needs beside pip."""

    name: str
    script: str
    module: str
    needs: str = ""

    def missing(self) -> str:
        """Return why it cannot run here, or ""."""
        if not PYTHON.exists():
            return f"{self.name} is left out: {PYTHON.parents[1].name} is not there; {INSTALL}"
        tried = subprocess.run([PYTHON, "-c", f"import {self.module}"], capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return ""
        last = (tried.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        hint = self.needs if self.needs and "cannot open shared object" in last else INSTALL
        return f"{self.name} is left out: {last}; {hint}"


PEERS = (
    PeerKind("nixl", "nixl_peer.py", "nixl_cu12._api"),
    PeerKind(
        "mooncake",
        "mooncake_peer.py",
        "mooncake.engine",
        "it needs a system library: on Debian and Ubuntu, apt-get install libibverbs1",
    ),
)


class PeerError(Exception):
    """A peer ended, or said something that is no answer."""


class PeerProcess:
    """One end of a peer."""

    def __init__(self, kind: PeerKind, role: str) -> None:
        self.name = f"{kind.name} {role}"
        self.process = subprocess.Popen(
            [PYTHON, SCRIPTS / kind.script, role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.pid = self.process.pid

    def ask(self, **question: object) -> dict[str, object]:
        """Ask one question and return the answer; PeerError where there is none."""
        questions, answers = _open(self.process.stdin), _open(self.process.stdout)
        questions.write(json.dumps(question) + "\n")
        questions.flush()
        line = answers.readline()
        if not line:
            raise PeerError(f"{self.name} ended at {question['do']!r}; run it by hand: {sys.argv[0]} --help says how")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise PeerError(f"{self.name} answered {line!r}")
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


class PeerPair:
    """Source and sink of a peer, both with the pools of the benchmark mapped."""

    def __init__(self, kind: PeerKind, source_path: str, source_bytes: int, local_path: str, local_bytes: int) -> None:
        self.source, self.sink = PeerProcess(kind, "source"), PeerProcess(kind, "sink")
        told = self.source.ask(do="open", path=source_path, length_bytes=source_bytes)
        self.sink.ask(do="open", path=local_path, length_bytes=local_bytes)
        self.sink.ask(do="meet", told=told)

    def pids(self) -> tuple[int, int]:
        """Return its processes: sink and source."""
        return self.sink.pid, self.source.pid

    def prepare(self, length_bytes: int, local: list[int], remote: list[int]) -> None:
        """Prepare for these pages."""
        self.sink.ask(do="prepare", length_bytes=length_bytes, local=local, remote=remote)

    def move(self) -> float:
        """Move them once; return the seconds, as the sink measured them."""
        return float(str(self.sink.ask(do="move")["seconds"]))

    def close(self) -> None:
        """End both."""
        self.sink.close()
        self.source.close()


def _open(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise PeerError("the peer has no such stream")
    return stream
