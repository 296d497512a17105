# noqa: INP001 - a program of the image
"""Whether what runs in this container answers: a gateway at KVBUS_HEALTH_URL, else each worker on its local socket.

To be connected is no answer: the kernel takes connections for a worker that hangs. So it is greeted, as its clients do,
and has to say something. Standard library only, so that it costs a tenth of a second. Exit status 0: it answers; 1: it
does not, and why.
"""

import os
import socket
import sys
from pathlib import Path

WAIT_S = 2.0
"""Below the timeout of the image's HEALTHCHECK, so that the reason is told."""
HELLO = b"\x83\xa2op\xa5hello\xa2id\x00\xa4role\xa6client"
"""A client's first frame in msgpack: {op: hello, id: 0, role: client}."""
ANSWERS = (b"\xa2op\xa7welcome", b"\xa2op\xa5error")
"""A worker that refuses, for it has too many clients, answers too."""
FRAME_LENGTH_MAX_BYTES = 1 << 20


def trouble() -> str:
    """Return what does not answer, or nothing."""
    url = os.environ.get("KVBUS_HEALTH_URL")
    if url:
        return _http_trouble(url)
    sockets = sorted(Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")).glob("kvbus-*/*.sock"))  # noqa: S108 - as kvbus does
    if not sockets:
        return "no worker listens here"
    return "; ".join(text for path in sockets if (text := _socket_trouble(path)))


def _http_trouble(url: str) -> str:
    import urllib.request  # noqa: PLC0415 - it costs more than all the rest, and workers do not need it

    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the host's proxy does not lead in here
    try:
        with direct.open(url, timeout=WAIT_S):
            return ""
    except (OSError, ValueError) as error:
        return f"{url}: {error}"


def _socket_trouble(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(WAIT_S)
        try:
            client.connect(str(path))
            client.sendall(len(HELLO).to_bytes(4, "little") + HELLO)
            frame = _frame(client)
        except TimeoutError:
            return f"{path}: the worker does not answer within {WAIT_S:g} s"
        except OSError as error:
            return f"{path}: {error}"
    is_one = any(answer in frame for answer in ANSWERS)
    return "" if is_one else f"{path}: this is no answer of a worker: {frame[:80]!r}"


def _frame(client: socket.socket) -> bytes:
    """Return one frame, or what came of it before the other side closed."""
    length = min(int.from_bytes(_exactly(client, 4), "little"), FRAME_LENGTH_MAX_BYTES)
    return _exactly(client, length)


def _exactly(client: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length and (some := client.recv(length - len(data))):
        data += some
    return data


if __name__ == "__main__":
    sys.exit(trouble() or 0)
