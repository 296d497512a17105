"""The sockets behind vLLM's KV events: a subscription, and replay by request. The only file that imports zmq.

ZeroMQ drops what a slow reader does not take, and says nothing when a publisher dies. So every connection has
ZeroMQ's own heartbeat, whether it stands is read from its monitor, and a replay's answers are read with a bound.
"""

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Self

import zmq
import zmq.asyncio

from kvbus.engines.kv_events import PAYLOAD_MAX_BYTES, Batch
from kvbus.errors import ConfigError, PeerError

PING_MS, SILENT_MS = 2_000, 8_000
"""ZeroMQ's heartbeat: a publisher's host that is gone is noticed within ten seconds, where TCP needs minutes."""
WAITING_MAX = 20_000
"""Batches that wait here to be read: twice what a whole replay holds, so that a publisher drops none of one."""
REPLAY_STEP_S = 5.0
"""Between two batches of a replay: vLLM's publisher looks for requests ten times a second."""

_END = b"\xff" * 8
_log = logging.getLogger(__name__)


class ReplayLostError(PeerError):
    """A replay was not answered, or not to its end."""


class ZmqEvents:
    """One engine's stream; use it as an async context manager, in one task. ConfigError for a wrong address."""

    def __init__(self, endpoint: str, replay: str = "", topic: str = "") -> None:
        self._endpoint = endpoint
        self._replay = replay
        self._topic = topic
        self.counts: Counter[str] = Counter()
        self.connected = False

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        try:
            self._set_up(self._socket)
            self._monitor = self._socket.get_monitor_socket()
            self._socket.setsockopt(zmq.SUBSCRIBE, self._topic.encode())
            self._socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{self._endpoint} is no address of ZeroMQ: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)

    @property
    def has_replay(self) -> bool:
        """Whether batches that were missed can be asked for."""
        return bool(self._replay)

    async def next(self, wait_s: float) -> Batch | None:
        """Return the next live batch; None after a quiet spell. What is no batch is counted and passed over.

        `connected` and `counts` then say what was so when it came: a connection is told before what comes over it.
        """
        now = asyncio.get_running_loop().time
        ends_at = now() + wait_s
        while True:
            frames = await self._received(ends_at - now())
            await self._look()
            if frames is None:
                return None
            if len(frames) == 3 and (batch := _batch(frames[1], frames[2])) is not None:
                return batch
            self.counts["garbage"] += 1
            _log.warning("%s sent %d frames that are no batch of KV events", self._endpoint, len(frames))

    async def replay(self, first: int) -> AsyncIterator[Batch]:
        """Yield what the engine still holds from a sequence on, then end; ReplayLostError where its end did not come.

        Each replay has a socket of its own, so that late answers to one are never taken for those to another.
        """
        socket = self._context.socket(zmq.DEALER)
        try:
            self._set_up(socket)
            socket.connect(self._replay)
            await socket.send_multipart((b"", first.to_bytes(8, "big")))
            while True:
                try:
                    async with asyncio.timeout(REPLAY_STEP_S):
                        frames = await socket.recv_multipart()
                except TimeoutError:
                    raise ReplayLostError(f"{self._replay} did not answer within {REPLAY_STEP_S:g} s") from None
                # An empty frame, in newer versions the topic, then number and payload.
                number, payload = frames[-2:] if len(frames) in {3, 4} else (b"", b"")
                if number == _END:
                    return
                batch = _batch(number, payload)
                if batch is None:
                    raise ReplayLostError(f"{self._replay} answered with what is no batch of KV events")
                yield batch
        finally:
            socket.close(linger=0)

    # ------------------------------------------------------------------------------------------------------- inside

    @staticmethod
    def _set_up(socket: zmq.asyncio.Socket) -> None:
        options = {
            zmq.RCVHWM: WAITING_MAX,
            zmq.LINGER: 0,
            zmq.MAXMSGSIZE: PAYLOAD_MAX_BYTES,
            zmq.HEARTBEAT_IVL: PING_MS,
            zmq.HEARTBEAT_TIMEOUT: SILENT_MS,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 2_000,
        }
        for option, value in options.items():
            socket.setsockopt(option, value)

    async def _received(self, wait_s: float) -> list[bytes] | None:
        """Return what is there, or comes within the wait. It is waited for and then taken, in two steps.

        A wait that takes a message itself, and is cancelled just as it comes, would take it along.
        """
        for wait_ms in (0, max(0, round(wait_s * 1_000))):
            if await self._socket.poll(wait_ms):
                with suppress(zmq.Again):
                    return await self._socket.recv_multipart(zmq.DONTWAIT)
        return None

    async def _look(self) -> None:
        """Read the monitor: a handshake means that there is a publisher, a disconnect that there is none."""
        while await self._monitor.poll(0):
            event = int.from_bytes((await self._monitor.recv_multipart())[0][:2], sys.byteorder)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
                self.counts["connected"] += 1
            elif event in {zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED}:
                self.connected = False


def _batch(sequence: bytes, payload: bytes) -> Batch | None:
    if len(sequence) != 8 or sequence[0] >= 0x80 or not payload:  # a negative one is no batch's, such as its end's
        return None
    return Batch(int.from_bytes(sequence, "big"), payload)
