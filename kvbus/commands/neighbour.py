"""A process for `kvbus doctor` to try things with: one offers memory, a second one, its sibling, reads it.

Siblings stand to each other as two workers do, so what the kernel allows one of them it allows a worker. Both are
processes of their own, so that a broken library ends them and not the doctor.

`python -m kvbus.commands.neighbour offer` prints one document about what it offers, and serves until stdin closes.
`… read` takes that document from stdin, reads, and prints one about how that went.
"""

import contextlib
import json
import mmap
import os
import resource
import select
import sys
import time

import numpy as np

from kvbus.config import ucx_library
from kvbus.dataplane import ucp
from kvbus.errors import KvbusError

READ_S = 5.0
"""A connection within one host takes milliseconds; on a starved one, a second."""
LENGTH_BYTES = 1 << 16
PATTERN = 0xA5
LOOPBACK = {"NET_DEVICES": "lo"}


class Node:
    """UCX over one page of memory."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        self.library = ucp.load(ucx_library())
        self.context = ucp.Context.open(self.library, LOOPBACK)
        self.worker = ucp.Worker.open(self.context)
        self.memory = self.context.map(self.address, LENGTH_BYTES)

    def about(self) -> dict[str, object]:
        """Return which library this is, and how to reach the memory."""
        return {
            "path": self.library.path,
            "version": ".".join(map(str, self.library.version)),
            "address": self.worker.address().hex(),
            "rkey": self.context.pack_rkey(self.memory).hex(),
            "base": self.address,
        }


def offer() -> None:
    """Offer a memfd and a UCX worker, until stdin closes."""
    fd = os.memfd_create("kvbus-doctor", os.MFD_CLOEXEC)
    os.ftruncate(fd, LENGTH_BYTES)
    memory = mmap.mmap(fd, LENGTH_BYTES)
    memory[:] = bytes([PATTERN]) * LENGTH_BYTES
    about: dict[str, object] = {"pid": os.getpid(), "fd": fd}
    node: Node | None = None
    try:
        node = Node(memory)
        about["ucx"] = node.about()
    except KvbusError as error:
        about["ucx_error"] = str(error)
    _say(about)
    while not select.select([sys.stdin], [], [], 0.0 if node else None)[0]:
        if node is not None and not node.worker.progress() and node.worker.arm():
            select.select([sys.stdin, node.worker.event_fd()], [], [])
    if node is not None:
        node.context.close()


def read() -> None:
    """Read what the sibling offers, out of its memory and by UCX, and say how that went."""
    about = json.loads(sys.stdin.readline())
    result: dict[str, object] = {"memory": _read_memory(int(about["pid"]), int(about["fd"]))}
    if "ucx" in about:
        try:
            result["ucx"] = _read_by_ucx(about["ucx"])
        except KvbusError as error:
            result["ucx"] = {"lanes": [], "problem": str(error)}
    _say(result)


def _read_memory(pid: int, fd: int) -> str:
    """Return why the sibling's memory cannot be read, or ""."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return f"/proc/{pid}/fd: {error.strerror}"
    with contextlib.closing(mmap.mmap(opened, LENGTH_BYTES, prot=mmap.PROT_READ)) as memory:
        os.close(opened)
        return "" if memory[:] == bytes([PATTERN]) * LENGTH_BYTES else "its bytes are not those that were written"


def _read_by_ucx(offered: dict[str, object]) -> dict[str, object]:
    memory = mmap.mmap(-1, LENGTH_BYTES)
    node = Node(memory)
    endpoint = ucp.Endpoint.open(node.worker, bytes.fromhex(str(offered["address"])))
    key = endpoint.unpack_rkey(bytes.fromhex(str(offered["rkey"])))
    request = endpoint.get(node.address, LENGTH_BYTES, int(str(offered["base"])), key, node.memory)
    ends_at = time.monotonic() + READ_S
    while request.status() == ucp.IN_PROGRESS and time.monotonic() < ends_at:
        node.worker.progress()
    status, problem = request.status(), ""
    if status == ucp.IN_PROGRESS:
        problem = f"the sibling did not answer within {READ_S:g} s"
    elif status != ucp.OK:
        problem = request.status_text()
    elif memory[:] != bytes([PATTERN]) * LENGTH_BYTES:
        problem = "the bytes that came are not those that were written"
    lanes = endpoint.lanes() if not endpoint.failed else []
    node.context.close()
    return {"lanes": lanes, "problem": problem}


def _say(document: dict[str, object]) -> None:
    # UCX logs on stdout: the document stands on a line of its own, behind a word that no log line begins with.
    sys.stdout.write(f"\nneighbour {json.dumps(document)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a library that crashes here shall leave no core behind
    {"offer": offer, "read": read}[sys.argv[1]]()
