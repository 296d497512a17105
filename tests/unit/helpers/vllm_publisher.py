"""A publisher of KV events that speaks as vLLM does, over real sockets, and can be told to lose what it says."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Self

import msgpack
import zmq
import zmq.asyncio

SEEN_S = 60.0


def stored(
    hashes: Sequence[int | bytes],
    tokens: Sequence[int],
    parent: int | bytes | None = None,
    *,
    block_size: int = 4,
    medium: str = "GPU",
    lora: str | None = None,
    extra: list[object] | None = None,
) -> dict[str, object]:
    event: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_size,
        "lora_id": None,
        "medium": medium,
        "lora_name": lora,
    }
    return event if extra is None else event | {"extra_keys": extra}


def removed(*hashes: int | bytes, medium: str = "GPU") -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


CLEARED: dict[str, object] = {"type": "AllBlocksCleared"}


def as_array(event: dict[str, object]) -> list[object]:
    """The same event as older versions write it."""
    return list(event.values())


def payload_of(events: Sequence[object], *, time_s: float, rank: int = 0) -> bytes:
    return bytes(msgpack.packb([time_s, list(events), rank]))


class VllmPublisher:
    """PUB (as XPUB, which is the same and shows its subscribers) and ROUTER, with a buffer of the last batches."""

    def __init__(
        self,
        *,
        replay: bool = True,
        buffer: int = 10_000,
        addresses: tuple[str, str] | None = None,
        with_topic: bool = True,
    ) -> None:
        self.head = (b"",) if with_topic else ()  # versions before 0.32 leave it out
        self.first = addresses or ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        self.has_replay = replay
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self.sequence = 0
        self.answers = True
        self.asked: list[int] = []
        PublisherRuns.count += 1
        self.run = PublisherRuns.count

    async def __aenter__(self) -> Self:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.XPUB)
        self.pub.bind(self.first[0])
        self.router = self.context.socket(zmq.ROUTER)
        if self.has_replay:
            self.router.bind(self.first[1])
        self.serving = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)
        self.context.destroy(linger=0)

    @property
    def addresses(self) -> tuple[str, str]:
        return _bound(self.pub), _bound(self.router)

    async def until_subscribed(self) -> None:
        async with asyncio.timeout(SEEN_S):
            while not (await self.pub.recv()).startswith(b"\x01"):
                pass

    async def publish(self, *events: object, lose: bool = False, payload: bytes = b"") -> int:
        """Publish one batch; `lose`: only replay knows of it."""
        sequence = self.keep(*events, payload=payload)
        if not lose:
            await self.resend(sequence)
        return sequence

    def keep(self, *events: object, payload: bytes = b"") -> int:
        """Number one batch and put it into the buffer."""
        sequence, self.sequence = self.sequence, self.sequence + 1
        self.buffer.append((sequence, payload or payload_of(events, time_s=self.run + sequence / 1_000)))
        return sequence

    async def resend(self, sequence: int) -> None:
        await self.pub.send_multipart((b"", sequence.to_bytes(8, "big"), dict(self.buffer)[sequence]))

    async def _serve(self) -> None:
        while True:
            client, empty, first = await self.router.recv_multipart()
            start = int.from_bytes(first, "big")
            self.asked.append(start)
            if not self.answers:
                continue
            for sequence, payload in tuple(self.buffer):
                if sequence >= start:
                    await self.router.send_multipart((client, empty, *self.head, sequence.to_bytes(8, "big"), payload))
            await self.router.send_multipart((client, empty, *self.head, b"\xff" * 8, b""))


def _bound(socket: zmq.asyncio.Socket) -> str:
    where = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(where, bytes)
    return where.decode().rstrip("\0")


class PublisherRuns:
    """Each run's batches differ from those of every other, as their times do in vLLM."""

    count = 0
