"""A requester that keeps no rule: it speaks the broker's bare protocol, so that no client's guard is in the way."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvbus.broker import EmbeddedBroker


@dataclass(frozen=True, slots=True)
class RawDoor:
    """One connection over which any bytes may be sent to any subject."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        """Send, and return when the broker has taken it."""
        words = " ".join(word for word in ("PUB", subject, reply, str(len(data))) if word)
        self.writer.write(words.encode() + b"\r\n" + data + b"\r\nPING\r\n")
        await self.writer.drain()
        while True:
            line = await asyncio.wait_for(self.reader.readuntil(b"\r\n"), 60)
            if line == b"PONG\r\n":
                return
            if line == b"PING\r\n":
                self.writer.write(b"PONG\r\n")
            elif line.startswith(b"-ERR"):
                raise AssertionError(f"the broker refuses: {line!r}")


@asynccontextmanager
async def raw_door(broker: EmbeddedBroker) -> AsyncIterator[RawDoor]:
    """Connect for the length of a `with` block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
    hello = {"auth_token": broker.token, "verbose": False, "pedantic": False, "name": "raw", "lang": "raw"}
    try:
        await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)
        writer.write(f"CONNECT {json.dumps(hello)}\r\n".encode())
        yield RawDoor(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()
