"""A process that stands where vLLM's worker process would: the connector's own attachment and mover, without vLLM.

`python -m tests.flow.vllm_stand_in SOCKET BLOCK_TOKENS`. Each line on stdin is a JSON list, `["store", ids]`,
`["load", ids]` or `["look", ids]`, and is answered by one line. Blocks are filled from the ids themselves. With
`served` behind, it has a server of its own that says what vLLM's would: token ids that are a text's bytes, prompts that
are computed and stored under their mark, and answers that are the prompt's first tokens.
"""

import http.server
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvbus.engines.base import Description
from kvbus.engines.link import as_column
from kvbus.engines.vllm_jobs import Jobs
from kvbus.engines.vllm_link import WorkerAttachment
from kvbus.engines.vllm_lookups import Lookups
from kvbus.engines.vllm_mover import Mover
from kvbus.engines.vllm_orders import Load, Store
from kvbus.engines.vllm_server import Server
from kvbus.engines.vllm_worker import Loaded, Stored
from kvbus.pool.layout import PageLayout
from kvbus.pool.memory import PoolMemory
from tests.waiting import wait_until

BLOCKS = 64


class Blocks:
    """Memory where vLLM's would be."""

    def __init__(self, layout: PageLayout) -> None:
        self.memory = np.zeros((BLOCKS, layout.page_bytes), np.uint8)

    def load(self, pool: PoolMemory, pages: Sequence[int], block_ids: Sequence[int]) -> None:
        for page, block in zip(pages, block_ids, strict=True):
            self.memory[block] = pool.page_bytes(page)

    def store(self, pool: PoolMemory, pages: Sequence[int], block_ids: Sequence[int]) -> None:
        for page, block in zip(pages, block_ids, strict=True):
            pool.page_bytes(page)[:] = self.memory[block]


def fill(blocks: Blocks, ids: Sequence[int], block_tokens: int) -> tuple[bytes, tuple[int, ...]]:
    """Fill the blocks of a prompt from its ids; return the column of its whole blocks, and the blocks."""
    count = len(ids) // block_tokens
    blocks.memory[:count] = np.array([ids[row * block_tokens] % 251 for row in range(count)], np.uint8)[:, None]
    return as_column(list(ids[: count * block_tokens])), tuple(range(count))


def serve(blocks: Blocks, mover: Mover, block_tokens: int) -> str:
    """Begin to serve what stands where vLLM's own server would, and return its base URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                answer = json.dumps({"tokens": list(body["prompt"].encode())}).encode()
            elif body.get("stream"):
                events = [{"token_ids": [token], "text": "-"} for token in body["prompt"][: body["max_tokens"]]]
                events[-1] |= {"finish_reason": "length"}
                lines = [b"data: " + json.dumps({"choices": [event]}).encode() for event in events]
                answer = b"\n\n".join([*lines, b""])
            else:
                answer = b"{}"
            ours = body.get("kv_transfer_params", {}).get("kvbus", {})
            if ours.get("store"):
                column, where = fill(blocks, body["prompt"], block_tokens)
                mover.store(Store("served", column, body.get("cache_salt", ""), where, ours["mark"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def main() -> None:
    """Serve stdin until it ends."""
    socket, block_tokens = Path(sys.argv[1]), int(sys.argv[2])
    layout = PageLayout("kv", 2, 1, block_tokens, 32, "float32", 0, 1, "ab12")
    about = Description("vllm", "0.32.0", "tiny", "ab12", layout, 512, 2048)
    blocks = Blocks(layout)
    mover = Mover(blocks)
    base = serve(blocks, mover, block_tokens) if sys.argv[3:] == ["served"] else ""
    WorkerAttachment(socket, about, mover, Jobs(about, Server(base, "tiny"), mover).serve).start()
    lookups = Lookups(socket)
    lookups.start()
    for line in sys.stdin:
        what, ids = json.loads(line)
        column, where = fill(blocks, ids, block_tokens)
        if what == "look":
            answer = look(lookups, tuple(ids))
        elif what == "store":
            mover.store(Store("request", column, "", where))
            answer = ended(mover)
        else:
            blocks.memory[:] = 0
            mover.load(Load("request", column, "", 0, where))
            answer = [ended(mover), [int(blocks.memory[row].min()) for row in where]]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def look(lookups: Lookups, ids: tuple[int, ...]) -> object:
    """How many blocks there are; "nobody" where nobody can be asked."""
    if not lookups.put("request", ids, ""):
        return "nobody"
    wait_until(lambda: lookups.take("request") is not None)
    answer = lookups.take("request")
    lookups.drop("request")
    return answer


def ended(mover: Mover) -> object:
    """What became of an order: the blocks that did not come, or that a store has ended."""
    found: list[Loaded | Stored] = []

    def has_ended() -> bool:
        found.extend(mover.take_ended())
        return bool(found)

    wait_until(has_ended)
    (one,) = found
    return list(one.failed) if isinstance(one, Loaded) else "stored"


if __name__ == "__main__":
    main()
