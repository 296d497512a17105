"""A wire between two network namespaces: takes IP packets off one end, and puts them on the other, later or never.

Run as root: `python link.py NAMESPACE DEVICE NAMESPACE DEVICE DELAY_MS SEED`. Each device is a tun interface that is
there already. A line `loss SHARE` on stdin sets which share of the packets is lost from then on (1 cuts the wire); a
line `count` is answered with how many were carried and lost so far. It ends when stdin does.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN_NO_PI = 0x1001
PACKET_BYTES_MAX = 65536
QUEUE_MAX = 10_000
"""Packets on the wire: beyond that they are lost, as in any queue; at 1,500 bytes some 15 MB."""


def open_end(namespace: str, device: str) -> int:
    """Attach to a tun device of a namespace; packets are whole here, with their checksums."""
    libc = ctypes.CDLL(None, use_errno=True)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    if libc.setns(there, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    os.close(there)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN_NO_PI))
    return end


class Wire:
    """Two ends, and what is under way between them."""

    def __init__(self, ends: tuple[int, int], delay_s: float, seed: int) -> None:
        self._other = {ends[0]: ends[1], ends[1]: ends[0]}
        self._delay_s = delay_s
        self._draw = random.Random(seed)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self.loss = 0.0
        self.carried = self.lost = 0

    def wait_s(self, now: float) -> float:
        """How long nothing has to be delivered."""
        return max(0.0, self._under_way[0][0] - now) if self._under_way else 1.0

    def take(self, end: int, now: float) -> None:
        """Take what waits at one end."""
        while True:
            try:
                packet = os.read(end, PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            if self._draw.random() < self.loss or len(self._under_way) >= QUEUE_MAX:
                self.lost += 1
                continue
            self.carried += 1
            heapq.heappush(self._under_way, (now + self._delay_s, self.carried, self._other[end], packet))

    def deliver(self, now: float) -> None:
        """Put down what is due; an end that takes no more loses it."""
        while self._under_way and self._under_way[0][0] <= now:
            *_, end, packet = heapq.heappop(self._under_way)
            try:
                os.write(end, packet)
            except OSError:
                self.lost += 1


def say(line: str) -> None:
    """Answer whoever drives this program."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(first: tuple[str, str], second: tuple[str, str], delay_ms: str, seed: str) -> None:
    """Carry packets until stdin ends."""
    ends = open_end(*first), open_end(*second)
    wire = Wire(ends, float(delay_ms) / 1000, int(seed))
    say("ready")
    while True:
        readable, _, _ = select.select([*ends, sys.stdin], [], [], wire.wait_s(time.monotonic()))
        now = time.monotonic()
        for end in ends:
            if end in readable:
                wire.take(end, now)
        wire.deliver(now)
        if sys.stdin in readable:
            words = sys.stdin.readline().split()
            if not words:
                return
            if words[0] == "loss":
                wire.loss = float(words[1])
            say(f"{wire.carried} {wire.lost}")


if __name__ == "__main__":
    a_namespace, a_device, b_namespace, b_device, delay, number = sys.argv[1:]
    main((a_namespace, a_device), (b_namespace, b_device), delay, number)
