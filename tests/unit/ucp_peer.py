"""The other process of the UCX tests: a source of pages that also reads, on command, over a control pipe.

Run as `python ucp_peer.py FD SETTINGS`; stdout stays free, for UCX writes its own log there.
"""

import contextlib
import ctypes
import json
import mmap
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvbus.dataplane import ucp

PAGE_BYTES = 65536
PAGES = 512
IDLE_S = 1.0  # only a bound: a command or a UCX event ends the wait
NOTICE_ID = 7
RAISING_ID = 8
PROGRESS_CALLS = 200  # per look at the control pipe


class Pool:
    """Anonymous memory with a known address; page n is filled with a pattern that names n."""

    def __init__(self, *, filled: bool, pages: int = PAGES) -> None:
        self.length_bytes = pages * PAGE_BYTES
        self.memory = mmap.mmap(-1, self.length_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for page in range(pages if filled else 0):
            self.memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = pattern(page)

    def page(self, index: int) -> bytes:
        return self.memory[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]

    def page_address(self, index: int) -> int:
        return self.address + index * PAGE_BYTES


def pattern(page: int) -> bytes:
    return (page.to_bytes(4, "big") + b"kvbus page: ") * (PAGE_BYTES // 16)


class Node:
    """One opened UCX with a mapped pool: what a test needs on either side."""

    def __init__(self, settings: dict[str, str], *, filled: bool, pages: int = PAGES) -> None:
        self.pool = Pool(filled=filled, pages=pages)
        self.context = ucp.Context.open(ucp.load(), settings)
        self.worker = ucp.Worker.open(self.context)
        self.memory = self.context.map(self.pool.address, self.pool.length_bytes)

    def connect(self, exported: dict[str, Any]) -> tuple[ucp.Endpoint, ucp.RemoteKey]:
        endpoint = ucp.Endpoint.open(self.worker, exported["worker"])
        return endpoint, endpoint.unpack_rkey(exported["rkey"])

    def export(self) -> dict[str, Any]:
        return {
            "worker": self.worker.address(),
            "rkey": self.context.pack_rkey(self.memory),
            "base": self.pool.address,
            "pid": os.getpid(),
        }

    def drive(self, *requests: ucp.Request) -> bool:
        """Progress a while; whether all these requests have ended."""
        for _ in range(PROGRESS_CALLS):
            self.worker.progress()
        return all(request.status() != ucp.IN_PROGRESS for request in requests)


class Peer:
    """A handle on the child: commands go over its pipe, and it is gone when the block ends."""

    def __init__(self, process: subprocess.Popen[bytes], control: Connection) -> None:
        self.process = process
        self.control = control

    def ask(self, *command: object) -> Any:  # noqa: ANN401 - as the pipe gives it
        self.control.send(command)
        assert self.control.poll(60), f"the peer gave no answer to {command[0]}"
        return self.control.recv()


@contextlib.contextmanager
def running_peer(settings: dict[str, str] | None = None, env: dict[str, str] | None = None) -> Iterator[Peer]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, str(theirs.fileno()), json.dumps(settings or {})]
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": root, **(env or {})}
    )
    theirs.close()
    with Connection(ours.detach()) as control:
        try:
            yield Peer(process, control)
        finally:
            process.kill()
            process.wait()


def serve(control: Connection, settings: dict[str, str]) -> None:
    node = Node(settings, filled=True)
    messages: list[tuple[bytes, bytes]] = []

    def note(header: bytes, body: bytes) -> None:
        messages.append((header, body))

    def fail(header: bytes, body: bytes) -> None:
        raise RuntimeError(f"no handling of {header!r} {body!r}")

    node.worker.set_am_handler(NOTICE_ID, note)
    node.worker.set_am_handler(RAISING_ID, fail)
    while True:
        node.drive()
        if not control.poll(0):
            if node.worker.arm():  # else there is work to do first
                select.select([control.fileno(), node.worker.event_fd()], [], [], IDLE_S)
            continue
        match control.recv():
            case ("export",):
                control.send(node.export())
            case ("messages",):
                control.send((messages, node.worker.handler_errors_count))
            case ("read", exported):
                control.send(read_all(node, exported))
            case _:
                node.context.close()
                control.send("closed")
                return


def read_all(node: Node, exported: dict[str, Any]) -> tuple[list[str], str]:
    """Read one page of another process; how it was connected, and UCX's description of the protocols."""
    endpoint, rkey = node.connect(exported)
    request = endpoint.get(node.pool.address, PAGE_BYTES, exported["base"], rkey=rkey, memory=node.memory)
    while not node.drive(request):
        pass
    assert request.status() == ucp.OK, request.status_text()
    return endpoint.lanes(), endpoint.description()


if __name__ == "__main__":
    with contextlib.suppress(EOFError):  # the test's process is gone
        serve(Connection(int(sys.argv[1])), json.loads(sys.argv[2]))
