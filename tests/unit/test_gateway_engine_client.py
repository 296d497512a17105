"""A gateway's connection to a worker: whatever is at the other end, the client of the gateway is not blamed for it."""

import asyncio
import os
from pathlib import Path

import pytest

from kvbus.engines.link import EngineError
from kvbus.gateway.engine_client import EngineClient


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x05\x00\x00\x00\xc1\xc1\xc1\xc1\xc1"])
async def test_a_greeting_that_makes_no_sense_is_the_workers_fault(tmp_path: Path, said: bytes) -> None:
    gone = asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()
        await reader.read()  # until the other side has closed
        writer.close()
        gone.set()

    path = tmp_path / "socket"
    server = await asyncio.start_unix_server(greet, path)
    async with server:
        with pytest.raises(EngineError, match="what the worker says makes no sense"):
            await EngineClient.connect(path, frozenset({os.getpid()}))
        await gone.wait()
