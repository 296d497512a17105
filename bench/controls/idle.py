"""What an instance costs that has nothing to do: the messages that it sends and gets, counted at the broker."""

import asyncio
import time
from collections import Counter

import nats
from controls.town import Town
from nats.aio.msg import Msg

SETTLE_S = 5.0
"""After its start: from its second refresh in the registry on it knows where its record stands."""


async def idle(town: Town, worker: str, seconds: float) -> dict[str, object]:
    """Listen to everything on the broker; nobody but the one worker may be connected and speaking."""
    counts: Counter[str] = Counter()

    async def hear(message: Msg) -> None:
        counts[_kind(message.subject)] += 1

    listener = await nats.connect(town.url)
    await asyncio.sleep(SETTLE_S)
    await listener.subscribe(">", cb=hear)
    await listener.flush()
    before, began = town.cpu(), time.monotonic()
    await asyncio.sleep(seconds)
    took, after = time.monotonic() - began, town.cpu()
    await listener.close()
    return {
        "messages_per_s": sum(counts.values()) / took,
        "worker_cpu_percent": 100 * (after[worker] - before[worker]) / took,
        "broker_cpu_percent": 100 * (after["broker"] - before["broker"]) / took,
        "by_kind": {kind: count / took for kind, count in sorted(counts.items())},
    }


def _kind(subject: str) -> str:
    if subject.startswith("_INBOX."):
        return "answers"
    if subject.startswith("$JS.API."):
        return ".".join(subject.split(".")[2:5])
    return ".".join(subject.split(".")[:2])
