"""The instance registry: who lives, under which epoch, with which key; and this member's own record and heartbeat.

A record that is gone means only that nobody refreshed it: it frees nothing. It is looked at to decide whom to ask.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from kvbus.errors import BusError, PeerError
from kvbus.events import HeartbeatSeen, InstanceRecord, decode, encode
from kvbus.names import epoch_counter, epoch_from
from kvbus.roles.recorder import Recorder
from kvbus.topics import Topics, escape, unescape
from kvbus.transport import BUCKET_EPOCH, BUCKET_INSTANCES, Bus

REFRESH_S = 3.0
"""The registry forgets a record after 10 s: three refreshes, so that one lost one is no news."""
HEARTBEAT_S = 1.0
EPOCH_TRIES_MAX = 16
"""Starts of one member that race for the next epoch; each try loses only to another start."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Registered:
    """One member's record, and the epoch under which it speaks."""

    instance: str
    member: str
    epoch: int
    record: InstanceRecord


def registry_key(instance: str, member: str) -> str:
    """Return a member's key in the buckets."""
    return escape(f"{instance}/{member}")


async def next_epoch(bus: Bus, instance: str, member: str) -> int:
    """Take the next epoch by compare-and-set: counter + 1 with a fresh nonce (P16); BusError if others keep winning."""
    key = registry_key(instance, member)
    for _ in range(EPOCH_TRIES_MAX):
        entry = await bus.get(BUCKET_EPOCH, key)
        counter = epoch_counter(_stored_epoch(entry.value)) if entry else 0
        epoch = epoch_from(counter + 1, secrets.randbits(32))
        revision = entry.revision if entry else 0
        if await bus.compare_and_set(BUCKET_EPOCH, key, str(epoch).encode(), revision=revision):
            return epoch
    raise BusError(
        f"no epoch for {instance}.{member}: {EPOCH_TRIES_MAX} other starts of it won the race; start only one"
    )


def _stored_epoch(value: bytes) -> int:
    try:
        epoch = int(value)
    except ValueError:
        return 0
    return epoch if epoch_counter(epoch) > 0 else 0


async def lookup(bus: Bus, instance: str) -> list[Registered]:
    """Return the members of an instance that are registered now; records that cannot be read are left out."""
    head = escape(f"{instance}/")
    found: list[Registered] = []
    for key in await bus.keys(BUCKET_INSTANCES):
        if not key.startswith(head) or not _is_ours(key):
            continue
        entry = await bus.get(BUCKET_INSTANCES, key)
        if entry is None:
            continue
        try:
            event = decode(entry.value)
        except PeerError as error:
            log.warning("registry record %s is unreadable: %s", key, error)
            continue
        if isinstance(event.body, InstanceRecord) and event.header.i == instance:
            found.append(Registered(instance, event.header.m, event.header.e, event.body))
    return found


def _is_ours(key: str) -> bool:
    """Return whether a key has the form of ours; whoever may write the bucket may write others."""
    try:
        unescape(key)
    except PeerError:
        return False
    return True


class Presence:
    """Keeps this member's record fresh, and says each second that it lives."""

    def __init__(
        self,
        *,
        bus: Bus,
        topics: Topics,
        recorder: Recorder,
        instance: str,
        member: str,
        record: InstanceRecord,
        load: Callable[[], HeartbeatSeen],
    ) -> None:
        self._bus = bus
        self._recorder = recorder
        self._subject = topics.heartbeat(instance)
        self._key = registry_key(instance, member)
        self._record = record
        self._load = load

    async def register(self) -> None:
        """Write the record once; BusError where the broker does not take it."""
        header = self._recorder.header(InstanceRecord.KIND)
        await self._bus.put(BUCKET_INSTANCES, self._key, encode(header, self._record))

    async def run(self) -> None:
        """Refresh and beat until cancelled; a broker that is away costs beats, nothing else."""
        loop = asyncio.get_running_loop()
        refresh_at = loop.time() + REFRESH_S
        while True:
            try:
                load = self._load()
                await self._bus.publish(self._subject, encode(self._recorder.header(load.KIND), load))
                if loop.time() >= refresh_at:
                    await self.register()
                    refresh_at = loop.time() + REFRESH_S
            except BusError as error:
                log.info("heartbeat not sent: %s", error)
            await asyncio.sleep(HEARTBEAT_S)
