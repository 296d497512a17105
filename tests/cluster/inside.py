"""Runs in a worker's container, fed on stdin to its Python: the local questions that no command asks.

    python - answer TEXT   the engine's next tokens after a prompt, and how many of its tokens were found in pages
    python - counters      the worker's counters by name
    python - clock         the time that this container shows
    python - listening     the TCP ports on which this container listens, without Docker's own name server

One JSON document on stdout. It imports the kvbus of the image, and nothing of the tests.
"""

import json
import os
import sys
import time
from pathlib import Path

from kvbus.engines.client import LocalClient

TOKENS = 4
"""The first depends on every byte of the prompt's pages; the others on what follows from it."""

LISTEN, NAME_SERVER = "0A", "127.0.0.11"


def main() -> None:
    """Answer one question."""
    answer = HERE[sys.argv[1]]() if sys.argv[1] in HERE else _asked_of_the_worker()
    sys.stdout.write(json.dumps(answer) + "\n")


def _asked_of_the_worker() -> dict[str, object]:
    (path,) = Path(os.environ["XDG_RUNTIME_DIR"]).glob("kvbus-*/*.sock")
    with LocalClient(path) as client:
        if sys.argv[1] == "counters":
            return client.stats()
        end = client.generate(text=sys.argv[2], max_tokens=TOKENS, store=False).end
        return {"tokens": list(end.tokens), "cached_tokens": end.cached_tokens}


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


HERE = {"clock": _clock, "listening": _listening}


if __name__ == "__main__":
    main()
