"""Restoring: asks the members that live what they hold, where a log does not say it any more."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence

from kvbus.errors import BusError, PeerError
from kvbus.events import Event, Header, SnapshotAsked, SnapshotTaken, decode, encode
from kvbus.topics import Query, Topics, unescape
from kvbus.transport import BUCKET_INSTANCES, Bus, NoAnswer

ANSWER_S = 5.0
"""A member answers between two rounds, within milliseconds; this long only when overloaded."""
PARTS_MAX = 256
"""Answers of one member: 128 KiB of leases each, 32 MiB, ten times what 4,096 readers and their pages take."""
ASKED_MAX = 64
"""Members asked side by side: facts stand still meanwhile, and those that are silent cost one wait and not one each.
Their answers are held until the last of them has spoken: a few KB for a member, unless thousands read from it."""
ASKER = "follower"
"""What a follower calls itself: nobody sends it anything but the answer."""


async def snapshots(bus: Bus, topics: Topics, counts: Counter[str]) -> AsyncIterator[Event]:
    """Yield the state of each registered member, in parts by ticket; who does not answer is counted and left out."""
    try:
        keys = await bus.keys(BUCKET_INSTANCES)
    except BusError:
        counts["snapshot_missing"] += 1
        return
    members = list(_members(keys, topics))
    for first in range(0, len(members), ASKED_MAX):
        asked = (_parts(bus, counts, *one) for one in members[first : first + ASKED_MAX])
        for parts in await asyncio.gather(*asked):
            for event in parts:
                yield event


def _members(keys: Sequence[str], topics: Topics) -> Iterator[tuple[str, str, str]]:
    """Yield who is registered, and the subject of each."""
    for key in keys:
        try:
            instance, _, member = unescape(key).partition("/")
            subject = topics.query(instance, Query.SNAPSHOT, member) if member else ""
        except (PeerError, ValueError):
            continue  # whoever may write the bucket may write others
        if subject:
            yield subject, instance, member


async def _parts(bus: Bus, counts: Counter[str], subject: str, instance: str, member: str) -> list[Event]:
    """Return what a member answers, whole or as far as it came."""
    parts: list[Event] = []
    after, numbers = 0, itertools.count(1)
    for _ in range(PARTS_MAX):
        asked = SnapshotAsked(after=after)
        data = encode(Header(k=asked.KIND, i=ASKER, s=next(numbers), t=0), asked)
        event = await _answer(bus, subject, data)
        body = event.body if event is not None else None
        ours = event is not None and (event.header.i, event.header.m) == (instance, member)
        if event is None or not ours or not isinstance(body, SnapshotTaken) or (body.more and not body.leases):
            counts["snapshot_missing"] += 1
            break
        counts["snapshots"] += 1
        parts.append(event)
        if not body.more:
            break
        after = body.leases[-1].ticket
    return parts


async def _answer(bus: Bus, subject: str, data: bytes) -> Event | None:
    try:
        answer = await bus.request(subject, data, wait_s=ANSWER_S)
        return None if isinstance(answer, NoAnswer) else decode(answer)
    except (BusError, PeerError):
        return None
