"""A tap on a real broker: every message that anybody sends, with the subject on which its answer is awaited."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

from kvbus.broker import EmbeddedBroker

Hear = Callable[[str, str, bytes], None]


@contextlib.asynccontextmanager
async def tapped(broker: EmbeddedBroker, hear: Hear) -> AsyncIterator[None]:
    """Hand each message's subject, reply subject and bytes to `hear`, for the length of a `with` block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
    hello = {"auth_token": broker.token, "verbose": False, "pedantic": False, "name": "tap", "lang": "raw"}
    writer.write(f"CONNECT {json.dumps(hello)}\r\nSUB > 1\r\nPING\r\n".encode())
    listening = asyncio.Event()
    task = asyncio.create_task(_read(reader, writer, hear, listening))
    try:
        async with asyncio.timeout(60):
            await listening.wait()
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        writer.close()
        await writer.wait_closed()


async def _read(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hear: Hear, listening: asyncio.Event
) -> None:
    while line := await reader.readline():
        word, *rest = line.decode().split()
        if word == "MSG":  # a client that did not ask for headers is sent none
            subject, length = rest[0], int(rest[-1])
            data = (await reader.readexactly(length + 2))[:-2]
            hear(subject, rest[2] if len(rest) == 4 else "", data)
        elif word == "PING":
            writer.write(b"PONG\r\n")
        elif word == "PONG":
            listening.set()
        elif word == "-ERR":
            raise AssertionError(f"the broker refuses: {line!r}")
