# noqa: INP001 - a program of the stories
"""A slow wire: hands on what comes on a port to another address, both ways, each byte after a delay.

python relay.py PORT TO_HOST TO_PORT DELAY_S
"""

import asyncio
import contextlib
import sys

CHUNK_BYTES = 1 << 18
CHUNKS_MAX = 64
"""On the wire at a time, 16 MB each way: then a sender waits."""


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Hand on what is read, each part after the delay, however much follows it meanwhile."""
    loop = asyncio.get_running_loop()
    wire: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_MAX)

    async def feed() -> None:
        data = b"first"
        while data:
            data = await reader.read(CHUNK_BYTES)
            await wire.put((loop.time() + delay_s, data))

    feeding = asyncio.create_task(feed())
    try:
        while True:
            due, data = await wire.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                break
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # that end has gone; the other one is told by what follows
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()


async def main(port: int, host: str, to_port: int, delay_s: float) -> None:
    """Relay until the end."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, to_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, far_writer, delay_s), pump(far_reader, writer, delay_s))

    server = await asyncio.start_server(connected, "0.0.0.0", port)  # noqa: S104 - inside a network of a story
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
