"""The socket transport beside a plain socket, UCX over TCP and memory: the same scattered pages, in turns, in one run.

Two processes of this host; a loop of its own sends and receives the plain socket's pages, with nothing else in it: no
lease, no generation, no check, and its lists of pages are made beforehand. `plain` takes what has come, `plain-all`
lets the kernel wait for everything that it was given room for (MSG_WAITALL), as a transport cannot that serves several.
Prints the median GB/s of each, and the median of its shares of `plain`, round by round. `--json` prints one document.
"""

import argparse
import json
import socket
import statistics
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

from pairs import EPOCHS, POOL_SLACK, Destination, Lender, in_turns, layout, pool_of, readers, scattered, source, timed

from kvbus.pool.memory import PoolMemory

__all__ = ["TCP_ONLY", "Plain", "layout", "serve_plain", "views_of"]  # the plain socket takes part elsewhere, too

SIZES = {
    "4 KiB": 4 << 10,
    "16 KiB": 16 << 10,
    "64 KiB": 64 << 10,
    "256 KiB": 256 << 10,
    "1 MiB": 1 << 20,
    "2 MiB": 2 << 20,
}
MOVED_BYTES = 128 << 20
VIEWS = 256
TCP_ONLY = {"TLS": "tcp"}
TARGET = 0.9
"""What the socket transport has to reach of the plain socket, at each size."""


# ------------------------------------------------------------------------------------------------------- the source


def lend(pipe: Connection, page_bytes: int) -> None:
    """Lend one pool in all ways, and send its pages over a plain socket, too."""
    count = MOVED_BYTES // page_bytes
    lender = Lender(page_bytes, POOL_SLACK * count)
    listener = socket.create_server(("127.0.0.1", 0))
    views = views_of(lender.memory, sorted(scattered(1, count)))
    threading.Thread(target=serve_plain, args=(listener, views), daemon=True).start()
    pipe.send(listener.getsockname()[1])
    lender.lend(pipe)


def views_of(memory: PoolMemory, pages: list[int]) -> list[memoryview]:
    return [memoryview(memory.page_bytes(page)) for page in pages]


def serve_plain(listener: socket.socket, views: list[memoryview]) -> None:
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=answer_plain, args=(peer, views), daemon=True).start()


def answer_plain(peer: socket.socket, views: list[memoryview]) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while peer.recv(8):
        send_all(peer, views)


def send_all(peer: socket.socket, views: list[memoryview]) -> None:
    at, pending = 0, list[memoryview]()
    while at < len(views) or pending:
        if not pending:
            pending, at = views[at : at + VIEWS], at + VIEWS
        pending = after(pending, peer.sendmsg(pending))


def after(views: list[memoryview], moved: int) -> list[memoryview]:
    for at, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[at + 1 :]]
        moved -= len(view)
    return []


# --------------------------------------------------------------------------------------------------- the destination


class Plain:
    """The plain socket's receiving end."""

    def __init__(self, port: int, views: list[memoryview], *, waits_for_all: bool = False) -> None:
        self.views = views
        self.flags = socket.MSG_WAITALL if waits_for_all else 0
        self.peer = socket.create_connection(("127.0.0.1", port))

    def move(self) -> None:
        """Ask for everything, and receive it."""
        self.peer.sendall(struct.pack("<Q", 1))
        at, pending = 0, list[memoryview]()
        while at < len(self.views) or pending:
            if len(pending) < VIEWS // 2 and at < len(self.views):
                pending, at = pending + self.views[at : at + VIEWS], at + VIEWS
            pending = after(pending, self.peer.recvmsg_into(pending, 0, self.flags)[0])


@contextmanager
def movers(page_bytes: int) -> Iterator[dict[str, partial[float]]]:
    """Yield what moves the same pages, by name; each returns its seconds."""
    count, woken = MOVED_BYTES // page_bytes, threading.Event()
    memory = pool_of(page_bytes, POOL_SLACK * count, EPOCHS[1])
    pages, local = sorted(scattered(1, count)), scattered(2, count)
    with source(lend, page_bytes) as pipe, readers(memory, woken, {"ucx-tcp": TCP_ONLY}) as ways:
        port = pipe.recv()
        destination = Destination(pipe, memory, woken)
        calls = {
            "plain": partial(timed, Plain(port, views_of(memory, local)).move),
            "plain-all": partial(timed, Plain(port, views_of(memory, local), waits_for_all=True).move),
        }
        yield calls | {name: partial(destination.move, reader, pages, local) for name, reader in ways.items()}


def measure(page_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median GB/s of each way, and the median of its shares of the plain socket."""
    with movers(page_bytes) as ways:
        taken = in_turns(ways, rounds)
    return {
        name: {
            "gb_s": MOVED_BYTES / statistics.median(times) / 1e9,
            "share": statistics.median(plain / own for plain, own in zip(taken["plain"], times, strict=True)),
        }
        for name, times in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=lambda text: tuple(map(int, text.split(","))), help="page sizes in bytes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = {label: size for label, size in SIZES.items() if size in (options.sizes or SIZES.values())}
    results = {}
    for label, page_bytes in chosen.items():
        results[label] = measure(page_bytes, options.rounds)
        if not options.json:
            shown = "   ".join(
                f"{name} {one['gb_s']:5.2f} ({one['share']:4.2f})" for name, one in results[label].items()
            )
            print(f"{label:>7}: GB/s (share of plain)   {shown}", flush=True)
    if options.json:
        print(json.dumps(results))
        return
    short = [label for label, ways in results.items() if ways["socket"]["share"] < TARGET]
    print(
        f"the socket is to reach {TARGET} of plain at each size: {'missed at ' + ', '.join(short) if short else 'met'}"
    )


if __name__ == "__main__":
    main()
