"""A plain TCP stream from one container to another, as fast as two loops over one buffer make it.

python - serve PORT BYTES          send so many bytes to whoever connects, once
python - read HOST PORT BYTES      read them, and print the seconds from the first call to the last byte
"""

import contextlib
import socket
import sys
import time

CHUNK_BYTES = 1 << 20
WAIT_S = 30.0


def serve(port: int, length_bytes: int) -> None:
    """Send once."""
    with socket.create_server(("0.0.0.0", port)) as server:  # noqa: S104 - inside a container
        server.settimeout(WAIT_S)
        peer, _ = server.accept()
        with peer:
            chunk = memoryview(bytearray(CHUNK_BYTES))
            left = length_bytes
            while left:
                left -= peer.send(chunk[: min(left, CHUNK_BYTES)])


def read(host: str, port: int, length_bytes: int) -> float:
    """Read all; return how long that took."""
    ends_at = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            peer = socket.create_connection((host, port), timeout=WAIT_S)
            break
        if time.monotonic() > ends_at:
            raise SystemExit("nobody serves")
    with peer:
        memory = memoryview(bytearray(b"\x01") * length_bytes)  # touched before, as the pool is that kvbus reads into
        began, got = time.perf_counter(), 0
        while got < length_bytes:
            count = peer.recv_into(memory[got : got + CHUNK_BYTES])
            if not count:
                raise SystemExit("the stream ended early")
            got += count
        return time.perf_counter() - began


if __name__ == "__main__" and len(sys.argv) > 1:
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.stdout.write(f"{read(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))}\n")
