"""Who is registered now, kept here so that a request asks nobody: instances by name, and by their base URLs.

A record that is gone means only that nobody refreshed it. It is looked at to decide whom a source stands for.
"""

import asyncio
import logging
from collections.abc import Mapping

from kvbus.errors import BusError, PeerError
from kvbus.events import InstanceRecord, decode
from kvbus.gateway.sources import BaseUrl, InstanceName, Source, source_of
from kvbus.roles.registry import Registered, registry_key
from kvbus.transport import BUCKET_INSTANCES, Bus

REFRESH_S = 2.0
"""Members refresh their records every three seconds, and the registry forgets them after ten."""
LOOK_AGAIN_S = 0.5

log = logging.getLogger(__name__)


class Directory:
    """A copy of the registry, read again every two seconds. `run` keeps it; `refresh` reads it once."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._members: dict[str, dict[str, Registered]] = {}
        self._by_url: dict[BaseUrl, set[str]] = {}
        self._own_base: BaseUrl | None = None
        self._looked_at = float("-inf")
        self.fresh = False
        """Whether the last look at the registry succeeded."""

    def serve_at(self, url: str) -> None:
        """Take note of this gateway's own base URL: below it each instance has one."""
        source = source_of(url)
        self._own_base = source if isinstance(source, BaseUrl) else None

    @property
    def instances(self) -> Mapping[str, Mapping[str, Registered]]:
        """Every registered instance with its members by name."""
        return self._members

    def names_of(self, source: Source) -> frozenset[str]:
        """Return the instances that a source stands for: one, or none, or several that claim the same URL."""
        if isinstance(source, InstanceName):
            return frozenset({source.name} & self._members.keys())
        own = self._own_name(source)
        return frozenset(self._by_url.get(source, set()) | ({own} & self._members.keys()))

    async def refresh(self) -> None:
        """Read the registry once; where the broker is away, what was known stays."""
        try:
            members = await self._read()
        except BusError as error:
            self.fresh = False
            log.info("registry not read: %s", error)
            return
        self._members, self.fresh = members, True
        self._by_url = _by_url(members)

    async def look_again(self) -> None:
        """Read the registry for somebody who misses a name; at most twice a second, whoever asks how often."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= LOOK_AGAIN_S:
            self._looked_at = now
            await self.refresh()

    async def run(self) -> None:
        """Keep the copy until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_S)

    async def _read(self) -> dict[str, dict[str, Registered]]:
        members: dict[str, dict[str, Registered]] = {}
        for key in await self._bus.keys(BUCKET_INSTANCES):
            entry = await self._bus.get(BUCKET_INSTANCES, key)
            one = _registered(key, entry.value) if entry else None
            if one is not None:
                members.setdefault(one.instance, {})[one.member] = one
        return members

    def _own_name(self, url: BaseUrl) -> str:
        base = self._own_base
        if base is None or (url.scheme, url.host, url.port) != (base.scheme, base.host, base.port):
            return ""
        head, _, name = url.path.rpartition("/")
        return name if head == f"{base.path}/instances" else ""


def _registered(key: str, value: bytes) -> Registered | None:
    """Return the record under a key; None unless it is readable and stands under its own name."""
    try:
        event = decode(value)
    except PeerError as error:
        log.warning("registry record %s is unreadable: %s", key[:80], error)
        return None
    header = event.header
    if not isinstance(event.body, InstanceRecord) or not header.m or registry_key(header.i, header.m) != key:
        return None
    return Registered(header.i, header.m, header.e, event.body)


def _by_url(members: Mapping[str, Mapping[str, Registered]]) -> dict[BaseUrl, set[str]]:
    found: dict[BaseUrl, set[str]] = {}
    for instance, some in members.items():
        for one in some.values():
            for text in one.record.urls or ():
                try:
                    url = source_of(text)
                except ValueError as error:
                    log.warning("instance %s names a URL that is none: %s", instance, error)
                    continue
                if isinstance(url, BaseUrl):
                    found.setdefault(url, set()).add(instance)
    return found
