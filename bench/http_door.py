"""What the HTTP door costs: POST /v1/kv_transfer beside a bare Starlette route that reads the same body, in turns.

`kvbus up` with toy engines runs on this host, and beside it a process with uvicorn and one bare route, set up as the
gateway's is. This process asks, over connections that stay open, one contestant at a time in short turns, so that a
noisy neighbour disturbs all of them. (It is not called http.py: beside other benchmarks that would hide Python's own.)

`accepted`: the gateway reads the body, hashes the prompt, admits it, stores the request at the broker, and answers 202
once the destination has taken it on. The destination holds these prompts, so nothing is computed or moved.
`refused`: a source that is not allowed; all of the door and nothing of the bus. `bare`: JSON, the same fields, 202.

Prints medians over the rounds: the time to an answer of one client that asks one after the other, requests a second of
many clients at once, and the ratio of each to `bare` within a round. `--json` prints one document.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from typing import Any, Self
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from kvbus.gateway.serving import listen

PATH = "/v1/kv_transfer"
PROMPTS = 64
PROMPT = "The keeper of the lock wrote the level of the water into the book. " * 15
"""About a thousand characters, and as many tokens of the toy's."""
CLIENTS = 16
START_S = 120.0
KINDS = ("bare", "accepted", "refused")
STATUS = {"bare": 202, "accepted": 202, "refused": 403}


async def bare(request: Request) -> JSONResponse:
    """Read what the gateway reads, and take it on."""
    try:
        body = json.loads(await request.body())
    except ValueError:
        return JSONResponse({"error": "body is not JSON"}, 400)
    if not isinstance(body, dict) or not isinstance(body.get("source"), str) or not isinstance(body.get("prompt"), str):
        return JSONResponse({"error": "source and prompt must be strings"}, 400)
    return JSONResponse({"status": "accepted", "request_hash": "0" * 32}, 202)


def serve_bare() -> None:
    """Serve the bare route until told to end; the first line on stdout is its port."""
    config = uvicorn.Config(
        Starlette(routes=[Route(PATH, bare, methods=["POST"])]),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
    )
    listening = listen("127.0.0.1", 0)  # the gateway's: without its TCP_NODELAY answers wait 40 ms
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(config).run(sockets=[listening])


@contextlib.contextmanager
def running(command: list[str], state: str) -> Iterator[str]:
    """Run a command, give the first line that it prints, and end it."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "KVBUS_STATE": state, "XDG_RUNTIME_DIR": state, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None  # noqa: S101 - it was asked for
        line = process.stdout.readline()
        if not line:
            sys.exit(f"{command[1:4]} did not start")
        yield line
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(START_S)


class Client:
    """One connection that stays open; it asks one after the other, and reads only what it has to."""

    def __init__(self, url: str) -> None:
        self._at = urlsplit(url)

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._at.hostname, self._at.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def post(self, body: bytes) -> tuple[int, bytes]:
        """Return status and body of an answer."""
        head = f"POST {self._at.path} HTTP/1.1\r\nhost: {self._at.netloc}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        told = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(told.split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(told[9:12]), await self._reader.readexactly(length)


class Bench:
    """The contestants, and what was taken of them, round by round."""

    def __init__(self, gateway: str, bare_url: str) -> None:
        self.urls = {"bare": bare_url, "accepted": f"{gateway}/instances/b{PATH}", "refused": f"{gateway}{PATH}"}
        self.latencies_us: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._numbers = count()

    def body(self, kind: str) -> bytes:
        """Return the body of the next request."""
        prompt = f"{next(self._numbers) % PROMPTS} {PROMPT}"
        return json.dumps({"source": "nobody" if kind == "refused" else "a", "prompt": prompt}).encode()

    async def ask(self, client: Client, kind: str) -> None:
        """Ask once, and see that the answer is the one that is measured."""
        status, body = await client.post(self.body(kind))
        word = json.loads(body).get("status")
        if status != STATUS[kind] or (status == 202 and word != "accepted"):
            sys.exit(f"{kind}: {status} {body.decode()[:300]}")

    async def latency(self, kind: str, asks: int) -> None:
        """Ask one after the other."""
        taken = []
        async with Client(self.urls[kind]) as client:
            for _ in range(asks):
                began = time.perf_counter()
                await self.ask(client, kind)
                taken.append((time.perf_counter() - began) * 1e6)
        self.latencies_us[kind].append(statistics.median(taken))

    async def rate(self, kind: str, asks: int) -> None:
        """Ask over many connections at once."""
        left = iter(range(asks))

        async def one_after_the_other() -> None:
            async with Client(self.urls[kind]) as client:
                for _ in left:
                    await self.ask(client, kind)

        began = time.perf_counter()
        await asyncio.gather(*(one_after_the_other() for _ in range(CLIENTS)))
        self.rates[kind].append(asks / (time.perf_counter() - began))

    async def warm(self) -> None:
        """Bring every prompt to the destination, one by one, so that later requests find it there."""
        async with Client(self.urls["accepted"]) as client:
            for _ in range(PROMPTS):
                _, body = await client.post(self.body("accepted"))
                await self.ended(json.loads(body)["request_hash"])

    async def ended(self, request_hash: str) -> None:
        """Wait until a transfer has ended."""
        at = urlsplit(self.urls["accepted"])
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        head = f"GET {at.path}/{request_hash}?wait_s=30 HTTP/1.1\r\nhost: {at.netloc}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode())
        told = await reader.read()
        writer.close()
        if b'"transferred"' not in told:
            sys.exit(f"a prompt did not arrive: {told.decode()[-300:]}")

    def document(self) -> dict[str, Any]:
        """Return everything that was found."""
        found: dict[str, Any] = {}
        for kind in KINDS:
            found[kind] = {
                "p50_us": statistics.median(self.latencies_us[kind]),
                "p50_us_spread": max(self.latencies_us[kind]) - min(self.latencies_us[kind]),
                "per_s": statistics.median(self.rates[kind]),
                "per_s_spread": max(self.rates[kind]) - min(self.rates[kind]),
                "p50_ratio": _ratio(self.latencies_us[kind], self.latencies_us["bare"]),
                "per_s_ratio": _ratio(self.rates[kind], self.rates["bare"]),
            }
        return found


def _ratio(ours: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, others, strict=True))


async def measure(rounds: int, asks: int) -> dict[str, Any]:
    """Run all rounds; return the document."""
    with tempfile.TemporaryDirectory(prefix="kvhttp-") as state:
        up = [sys.executable, "-m", "kvbus", "up", "--json", "--transport", "memory", "--pages", str(PROMPTS * 40)]
        up += ["--engine-options", '{"work_rounds": 1, "page_bytes": 1024}']
        # Repeats are new requests once the first has ended; more at a time than are ever asked.
        up += ["--dedup-ttl", "0", "--inflight-max", "1000"]
        own = [sys.executable, __file__, "--serve-bare"]
        with running(up, state) as told, running(own, state) as port:
            bench = Bench(json.loads(told)["http_url"], f"http://127.0.0.1:{int(port)}{PATH}")
            await bench.warm()
            for number in range(rounds + 1):
                for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
                    await bench.latency(kind, asks)
                    await bench.rate(kind, 2 * asks)
                if number == 0:  # it warms
                    for taken in (bench.latencies_us, bench.rates):
                        for values in taken.values():
                            values.clear()
    return {"rounds": rounds, "clients": CLIENTS, "body_bytes": len(bench.body("accepted")), **bench.document()}


def text(found: dict[str, Any]) -> str:
    """Return a table for people."""
    lines = [f"POST {PATH}, {found['body_bytes']} bytes, {found['rounds']} rounds in turns, {found['clients']} clients"]
    lines.append(f"{'':10}{'p50, one client':>20}{'of bare':>10}{'requests/s':>14}{'of bare':>10}")
    for kind in KINDS:
        one = found[kind]
        line = f"{kind:10}{one['p50_us']:>17.0f} µs{one['p50_ratio']:>10.2f}"
        lines.append(f"{line}{one['per_s']:>14.0f}{one['per_s_ratio']:>10.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--asks", type=int, default=100, help="requests of one turn, one after the other")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve-bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_bare:
        serve_bare()
        return
    load = os.getloadavg()[0]
    found = asyncio.run(measure(options.rounds, options.asks)) | {"load_before": load}
    print(json.dumps(found) if options.json else text(found))


if __name__ == "__main__":
    main()
