"""Runs in a worker's container, fed on stdin to its Python: the local questions that no command asks.

    python - answer TEXT   the engine's next tokens after a prompt, and how many of its tokens were found in pages
    python - counters      the worker's counters by name

One JSON document on stdout. It imports the kvbus of the image, and nothing of the tests.
"""

import json
import os
import sys
from pathlib import Path

from kvbus.engines.client import LocalClient

TOKENS = 4
"""The first depends on every byte of the prompt's pages; the others on what follows from it."""


def main() -> None:
    """Answer one question."""
    (path,) = Path(os.environ["XDG_RUNTIME_DIR"]).glob("kvbus-*/*.sock")
    with LocalClient(path) as client:
        if sys.argv[1] == "counters":
            document: dict[str, object] = client.stats()
        else:
            end = client.generate(text=sys.argv[2], max_tokens=TOKENS, store=False).end
            document = {"tokens": list(end.tokens), "cached_tokens": end.cached_tokens}
    sys.stdout.write(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
