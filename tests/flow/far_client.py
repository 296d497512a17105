"""A client of a worker on another of the test's hosts, run there: a worker talks to processes of its own host only.

Run as `python far_client.py SOCKET`, with one JSON question on stdin: {"ids": …, "store": …, "reuse": …}.
"""

import json
import sys
from pathlib import Path

from kvbus.engines.client import LocalClient


def main(socket: str) -> None:
    """Have the worker answer one prompt, and say what came of it."""
    asked = json.load(sys.stdin)
    with LocalClient(Path(socket)) as client:
        answer = client.generate(ids=asked["ids"], max_tokens=8, store=asked["store"], reuse=asked["reuse"])
    json.dump({"tokens": answer.end.tokens, "cached": answer.end.cached_tokens}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
