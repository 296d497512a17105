"""The raw client's own way through the same hops: nats-py as its guide has it, messages of the same lengths, no kvbus.

Durable: (1) the requester stores a request in a work queue and awaits the ack, and the destination pulls it; (2) the
destination asks the source and awaits the answer; (3) it stores one fact and awaits the ack; (4) it sends the result to
the requester, and takes the request off the queue. Urgent: request-reply to the destination, (2), and the result.
Nothing is encoded, checked, remembered or recorded: less than any control plane would have to do.
"""

import asyncio
import time
from multiprocessing.connection import Connection

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import RePublish, RetentionPolicy, StreamConfig

REQUEST, LEASE, GRANT, FACT, RESULT = 500, 500, 700, 300, 300
"""Lengths in bytes, about those of kvbus's own messages for a prompt of 35 tokens."""
NUMBER_BYTES = 8
FETCH_MOST = 64


async def make_streams(client: Client) -> None:
    """Make a work queue and a log like kvbus's own, without limits that refuse."""
    streams = client.jetstream()
    queue = StreamConfig(name="RAW_QUEUE", subjects=["raw.queue.*"], retention=RetentionPolicy.WORK_QUEUE)
    log = StreamConfig(
        name="RAW_FACTS", subjects=["raw.facts.*"], republish=RePublish("raw.facts.>", "raw.live.facts.>")
    )
    await streams.add_stream(queue)
    await streams.add_stream(log)


def run_source(url: str, ready: Connection) -> None:
    """Answer questions until this process is ended."""
    asyncio.run(_source(url, ready))


async def _source(url: str, ready: Connection) -> None:
    client = await nats.connect(url)

    async def answer(message: Msg) -> None:
        await message.respond(message.data[:NUMBER_BYTES].ljust(GRANT))

    await client.subscribe("raw.cmd.source", cb=answer)
    await client.flush()
    ready.send("ready")
    await asyncio.Event().wait()


def run_destination(url: str, ready: Connection) -> None:
    """Serve requests until this process is ended."""
    asyncio.run(_destination(url, ready))


async def _destination(url: str, ready: Connection) -> None:
    client = await nats.connect(url)
    streams = client.jetstream()
    tasks: set[asyncio.Task[None]] = set()

    async def durable(message: Msg) -> None:
        number = message.data[:NUMBER_BYTES]
        await client.request("raw.cmd.source", number.ljust(LEASE), timeout=5)
        await streams.publish("raw.facts.b", number.ljust(FACT))
        await client.publish("raw.result", number.ljust(RESULT))
        await message.ack_sync()

    async def urgent(message: Msg) -> None:
        number = message.data[:NUMBER_BYTES]
        await message.respond(number)
        await client.request("raw.cmd.source", number.ljust(LEASE), timeout=5)
        await client.publish("raw.result", number.ljust(RESULT))

    def begin(message: Msg) -> None:
        task = asyncio.ensure_future(urgent(message) if message.subject == "raw.cmd.destination" else durable(message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def on_urgent(message: Msg) -> None:
        begin(message)

    queue = await streams.pull_subscribe("raw.queue.b", durable="raw-destination")
    await client.subscribe("raw.cmd.destination", cb=on_urgent)
    await client.flush()
    ready.send("ready")
    while True:
        try:
            for message in await queue.fetch(FETCH_MOST, timeout=1):
                begin(message)
        except TimeoutError:  # also of asyncio, which its own derives from
            continue


class RawRequester:
    """The requester's side: sends, and hears results."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._streams = client.jetstream()
        self._waiting: dict[bytes, asyncio.Future[int]] = {}
        self._number = 0
        self.accepted_ns: list[int] = []

    async def start(self) -> None:
        """Listen for results."""
        await self._client.subscribe("raw.result", cb=self._hear)
        await self._client.flush()

    async def _hear(self, message: Msg) -> None:
        waiting = self._waiting.pop(message.data[:NUMBER_BYTES], None)
        if waiting is not None:
            waiting.set_result(time.perf_counter_ns())

    async def durable(self) -> int:
        """Send one request the durable way; return the nanoseconds until its result."""
        number, waiting = self._next()
        began = time.perf_counter_ns()
        await self._streams.publish("raw.queue.b", number.ljust(REQUEST))
        self.accepted_ns.append(time.perf_counter_ns() - began)
        return await waiting - began

    async def urgent(self) -> int:
        """Send one request the urgent way; return the nanoseconds until its result."""
        number, waiting = self._next()
        began = time.perf_counter_ns()
        await self._client.request("raw.cmd.destination", number.ljust(REQUEST), timeout=5)
        return await waiting - began

    def _next(self) -> tuple[bytes, "asyncio.Future[int]"]:
        self._number += 1
        number = self._number.to_bytes(NUMBER_BYTES, "little")
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        return number, waiting
