"""A plain TCP stream of pages from one container to another, as fast as two loops make it.

python - serve PORT PAGES PAGE_BYTES        send so many pages to whoever connects, once
python - read HOST PORT PAGES PAGE_BYTES    read them, and print the seconds from the first call to the last byte

Each page lies in memory of its own on both sides, touched before, as in the pools that kvbus moves it between: a
stream out of one buffer, and into one, stays in a processor's cache, and is no way to move KV.
"""

import contextlib
import mmap
import socket
import sys
import time

WAIT_S = 30.0


def pages(count: int, page_bytes: int) -> list[memoryview]:
    """Return memory that is there already, page by page."""
    memory, touched = memoryview(mmap.mmap(-1, count * page_bytes)), b"\x01" * page_bytes
    found = [memory[start : start + page_bytes] for start in range(0, len(memory), page_bytes)]
    for page in found:
        page[:] = touched
    return found


def serve(port: int, count: int, page_bytes: int) -> None:
    """Send once."""
    sent = pages(count, page_bytes)
    with socket.create_server(("0.0.0.0", port)) as server:  # noqa: S104 - inside a container
        server.settimeout(WAIT_S)
        peer, _ = server.accept()
        with peer:
            for page in sent:
                peer.sendall(page)


def read(host: str, port: int, count: int, page_bytes: int) -> float:
    """Read all; return how long that took."""
    ends_at = time.monotonic() + WAIT_S
    wanted = pages(count, page_bytes)
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            peer = socket.create_connection((host, port), timeout=WAIT_S)
            break
        if time.monotonic() > ends_at:
            raise SystemExit("nobody serves")
    with peer:
        began = time.perf_counter()
        for page in wanted:
            got = 0
            while got < page_bytes:
                some = peer.recv_into(page[got:])
                if not some:
                    raise SystemExit("the stream ended early")
                got += some
        return time.perf_counter() - began


if __name__ == "__main__" and len(sys.argv) > 1:
    if sys.argv[1] == "serve":
        serve(*map(int, sys.argv[2:]))
    else:
        sys.stdout.write(f"{read(sys.argv[2], *map(int, sys.argv[3:]))}\n")
