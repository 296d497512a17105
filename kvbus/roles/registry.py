"""The instance registry: who lives, under which epoch, with which key; and this member's own record and heartbeat.

A record that is gone means only that nobody refreshed it: it frees nothing. It is looked at to decide whom to ask.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from kvbus.errors import BusError, ConfigError, PeerError
from kvbus.events import Event, Header, HeartbeatSeen, InstanceRecord, decode
from kvbus.names import EPOCH_COUNTER_MAX, epoch_counter, epoch_from
from kvbus.parts import ProcessIdentity
from kvbus.processes import same_host, start_ticks
from kvbus.roles.recorder import Recorder
from kvbus.topics import Topics, escape, unescape
from kvbus.transport import BUCKET_EPOCH, BUCKET_INSTANCES, Bus, Entry

REFRESH_S = 3.0
"""The registry forgets a record after 10 s: three refreshes, so that one lost one is no news."""
HEARTBEAT_S = 1.0
ALONE_CHECKS = 4
"""Looks at a record of another host, one refresh apart: longer than it lives without one."""
REMEMBERED_S = 0.25
"""Far less than a worker takes to start again, so that nobody is asked under the epoch before."""
REMEMBERED_MAX = 1_024
"""Sources whose records are remembered; a destination takes from the few that its allowlist names."""
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


async def next_epoch(bus: Bus, instance: str, member: str, *, nonce: Callable[[int], int] = secrets.randbits) -> int:
    """Take the next epoch by compare-and-set: counter + 1 with a fresh nonce (P16); BusError if others keep winning."""
    key = registry_key(instance, member)
    for _ in range(EPOCH_TRIES_MAX):
        entry = await bus.get(BUCKET_EPOCH, key)
        counter = epoch_counter(_stored_epoch(entry.value)) if entry else 0
        epoch = epoch_from(counter + 1, nonce(32))
        revision = entry.revision if entry else 0
        if await bus.compare_and_set(BUCKET_EPOCH, key, str(epoch).encode(), revision=revision):
            return epoch
    raise BusError(
        f"no epoch for {instance}.{member}: {EPOCH_TRIES_MAX} other starts of it won the race; start only one"
    )


async def require_alone(bus: Bus, instance: str, member: str) -> None:
    """Raise ConfigError where a worker of this member lives already: two of one name would answer for each other.

    On this host its process tells. Elsewhere its record does: it is gone within its time to live, or is refreshed.
    """
    found = await _own_record(bus, instance, member)
    if found is None:
        return
    revision, process = found[0].revision, found[1].body_process
    if same_host(process):
        if start_ticks(process.pid) == process.start_ticks:
            raise ConfigError(_not_alone(instance, member, f"process {process.pid} of this host"))
        return
    for _ in range(ALONE_CHECKS):
        await asyncio.sleep(REFRESH_S)
        found = await _own_record(bus, instance, member)
        if found is None:
            return
        if found[0].revision != revision:
            raise ConfigError(_not_alone(instance, member, f"process {process.pid} of another host"))


def _not_alone(instance: str, member: str, who: str) -> str:
    return (
        f"a worker of {instance}/{member} is running already ({who}): stop it, or give another --instance or --member"
    )


@dataclass(frozen=True, slots=True)
class _Own:
    """A member's record as the registry holds it."""

    epoch: int
    body_process: ProcessIdentity


async def _own_record(bus: Bus, instance: str, member: str) -> tuple[Entry, _Own] | None:
    entry = await bus.get(BUCKET_INSTANCES, registry_key(instance, member))
    if entry is None:
        return None
    try:
        event = decode(entry.value)
    except PeerError:
        return None
    return (entry, _Own(event.header.e, event.body.process)) if isinstance(event.body, InstanceRecord) else None


def _stored_epoch(value: bytes) -> int:
    try:
        epoch = int(value)
    except ValueError:
        return 0
    return epoch if 0 < epoch_counter(epoch) < EPOCH_COUNTER_MAX else 0  # whoever may write there may write others


READ_ONCE_MAX_BYTES = 8 << 10
"""Of a record that is kept as it was read; those of members have less than one KiB, so 64 of them bound the memory."""


@lru_cache(maxsize=64)  # each destination asks again and again, and a record is written anew each three seconds
def _read(record: bytes) -> Event:
    return decode(record)


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
            event = _read(entry.value) if len(entry.value) <= READ_ONCE_MAX_BYTES else decode(entry.value)
        except PeerError as error:
            log.warning("registry record %s is unreadable: %s", key, error)
            continue
        if isinstance(event.body, InstanceRecord) and _stands_under(key, event.header, instance):
            found.append(Registered(instance, event.header.m, event.header.e, event.body))
    return found


def _stands_under(key: str, header: Header, instance: str) -> bool:
    """Return whether a record stands under its own name: its member is asked on a subject made of that name."""
    return header.i == instance and header.m != "" and unescape(key) == f"{instance}/{header.m}"


async def registered(bus: Bus, instance: str, fingerprint: str) -> Registered | str:
    """Return the member of an instance whose pages have this layout, so those of one rank; any, where none has.

    A sentence where nobody is registered, or the registry cannot be asked; and where the one with this layout may be
    the one that is missing: another rank would refuse for good what passes as soon as that one is back.
    """
    try:
        members = await lookup(bus, instance)
    except BusError as error:
        return f"bus_unavailable: {error}"
    if not members:
        return f"no instance {instance!r} is registered: is its worker running?"
    found = next((one for one in members if one.record.fingerprint == fingerprint), None)
    ranks = members[0].record.ranks
    if found is None and len(members) < ranks:
        return f"no instance {instance!r} with pages of this rank: {len(members)} of its {ranks} members are registered"
    return found or members[0]


class Sources:
    """Whom to ask for an instance's pages: the registry's word, which many who ask at the same time share.

    A record lives ten seconds after its instance, so one that was read a quarter of a second ago is as good as a new
    one, unless whoever was asked by it turned out to be gone: then it is to be forgotten.
    """

    def __init__(self, bus: Bus, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._clock = clock
        self._known: dict[tuple[str, str], tuple[Registered, float]] = {}
        self._asking: dict[tuple[str, str], asyncio.Future[Registered | str]] = {}

    async def find(self, instance: str, fingerprint: str) -> Registered | str:
        """Return what `registered` says, or has just said."""
        key = instance, fingerprint
        known = self._known.get(key)
        if known is not None and self._clock() - known[1] < REMEMBERED_S:
            return known[0]
        while (asking := self._asking.get(key)) is not None:
            await asyncio.wait({asking})
            if not asking.cancelled():
                return asking.result()
        return await self._ask(key)

    def forget(self, instance: str) -> None:
        """Ask the registry anew before this instance is asked again."""
        for key in [key for key in self._known if key[0] == instance]:
            del self._known[key]

    async def _ask(self, key: tuple[str, str]) -> Registered | str:
        asked_at = self._clock()
        asking = self._asking[key] = asyncio.get_running_loop().create_future()
        try:
            found = await registered(self._bus, *key)
            asking.set_result(found)
        finally:  # where this one is cancelled, one of those who wait for its answer asks instead
            asking.cancel()
            del self._asking[key]
        if isinstance(found, Registered):
            if len(self._known) >= REMEMBERED_MAX:
                self._known.clear()
            self._known[key] = found, asked_at
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
        self._instance = instance
        self._member = member
        self._record = record
        self._load = load
        self._revision = 0
        self.state = ""
        """What is told of this member beside its load: empty while it takes part."""

    async def register(self) -> None:
        """Write the record once; BusError where the broker does not take it."""
        await self._bus.put(BUCKET_INSTANCES, self._key, self._encoded())

    async def refresh(self) -> None:
        """Write the record over our last one; where that does not stand any more, see first whose stands there."""
        if self._revision:
            self._revision = await self._replace(self._revision)
        if not self._revision:
            found = await self.require_own_name()
            self._revision = await self._replace(found[0].revision if found else 0)

    async def _replace(self, revision: int) -> int:
        return await self._bus.compare_and_set(BUCKET_INSTANCES, self._key, self._encoded(), revision=revision)

    async def tell(self) -> None:
        """Say now what is said each second, and write the record anew."""
        await self._beat()
        await self.refresh()

    async def _beat(self) -> None:
        await self._bus.publish(self._subject, self._recorder.encoded(self._load(), **self._told))

    @property
    def _told(self) -> dict[str, str]:
        return {"state": self.state} if self.state else {}

    def _encoded(self) -> bytes:
        return self._recorder.encoded(self._record, **self._told)

    async def require_own_name(self) -> tuple[Entry, _Own] | None:
        """Raise ConfigError where a later start of this member has registered: it answers from now on, not we.

        Return the record that stands under our name, None where there is none.
        """
        found = await _own_record(self._bus, self._instance, self._member)
        if found is not None and epoch_counter(found[1].epoch) > epoch_counter(self._recorder.epoch):
            who = f"process {found[1].body_process.pid}"
            raise ConfigError(f"another worker of {self._instance}/{self._member} was started ({who}): this one stops")
        return found

    async def run(self) -> None:
        """Refresh and beat until cancelled; a broker that is away costs beats, nothing else."""
        loop = asyncio.get_running_loop()
        refresh_at = loop.time() + REFRESH_S
        while True:
            try:
                await self._beat()
                if loop.time() >= refresh_at:
                    await self.refresh()
                    refresh_at = loop.time() + REFRESH_S
            except BusError as error:
                log.info("heartbeat not sent: %s", error)
                refresh_at = loop.time()  # the record ages meanwhile: at the first chance it is written anew
            await asyncio.sleep(HEARTBEAT_S)
