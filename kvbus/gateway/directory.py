"""Who is registered now, kept here so that a request asks nobody: instances by name, and by their base URLs.

A record that is gone means only that nobody refreshed it. It is looked at to decide whom a source stands for.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping

from kvbus.errors import BusError, PeerError
from kvbus.events import InstanceRecord, decode
from kvbus.gateway.answers import Problem
from kvbus.gateway.sources import BaseUrl, InstanceName, Source, source_of
from kvbus.roles.registry import Registered
from kvbus.topics import unescape
from kvbus.transport import BUCKET_INSTANCES, Bus

REFRESH_S = 2.0
"""Members refresh their records every three seconds, and the registry forgets them after ten."""
LOOK_MAX_S = 10.0
"""A look that takes longer tells of records that the registry has forgotten by then."""
REST_SHARE = 4
"""Between two looks lies four times what the last one took: who asks for names that nobody has costs a fifth."""
KEEP_S = 3_600.0
"""For how long a name is known that is registered no more, as on the roll of the metrics."""
KNOWN_MAX = 10_000
"""Names known at a time; whoever may write the registry may invent them. The one gone longest is forgotten first."""

log = logging.getLogger(__name__)


class Directory:
    """A copy of the registry, read again every two seconds. `run` keeps it; `refresh` reads it now."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._members: dict[str, dict[str, Registered]] = {}
        self._by_url: dict[BaseUrl, set[str]] = {}
        self._known: OrderedDict[str, float] = OrderedDict()
        self._own_base: BaseUrl | None = None
        self._look: asyncio.Task[None] | None = None
        self._looks_begun = 0
        self._looks_ended = 0
        self._rests_until = float("-inf")
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

    def knows(self, instance: str) -> bool:
        """Whether an instance is registered, or was within the last hour."""
        return instance in self._known

    def names_of(self, source: Source) -> frozenset[str]:
        """Return the instances that a source stands for: one, or none, or several that claim the same URL."""
        if isinstance(source, InstanceName):
            return frozenset({source.name} & self._members.keys())
        own = self._own_name(source)
        return frozenset(self._by_url.get(source, set()) | ({own} & self._members.keys()))

    def require_fresh(self) -> None:
        """Raise Problem 503 where the registry could not be read: then nobody can say who is not there."""
        if not self.fresh:
            raise Problem(503, "the registry of instances cannot be read now", retry_after_s=1)

    async def refresh(self) -> None:
        """Return once the registry was read after this call; where that fails, what was known stays.

        Whoever asks meanwhile shares one look, so looks never overtake each other; one that had begun before is not
        enough. A caller that goes away ends it for nobody.
        """
        wanted = self._looks_begun + 1
        while self._looks_ended < wanted:
            if self._look is None or self._look.done():
                self._look = asyncio.get_running_loop().create_task(self._look_once())
            await asyncio.shield(self._look)

    async def run(self) -> None:
        """Keep the copy until cancelled."""
        try:
            while True:
                await self.refresh()
                await asyncio.sleep(REFRESH_S)
        finally:
            if self._look is not None:
                self._look.cancel()

    async def _look_once(self) -> None:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._rests_until - clock())
        began_at = clock()
        self._looks_begun += 1
        try:
            async with asyncio.timeout(LOOK_MAX_S):
                members = await self._read()
        except (BusError, TimeoutError) as error:
            self.fresh = False
            log.info("registry not read: %s", str(error) or f"it took more than {LOOK_MAX_S:g} s")
        else:
            self._members, self.fresh = members, True
            self._by_url = _by_url(members)
            self._note(clock())
        self._looks_ended = self._looks_begun
        self._rests_until = clock() + min(REFRESH_S, REST_SHARE * (clock() - began_at))

    async def _read(self) -> dict[str, dict[str, Registered]]:
        members: dict[str, dict[str, Registered]] = {}
        for key in await self._bus.keys(BUCKET_INSTANCES):
            one = await self._registered(key)
            if one is not None:
                members.setdefault(one.instance, {})[one.member] = one
        return members

    async def _registered(self, key: str) -> Registered | None:
        """Return the record under a key; None unless it is readable and stands under its own name.

        Whoever may write the bucket may write anything: no key and no record ends the look.
        """
        try:
            named = unescape(key)
            entry = await self._bus.get(BUCKET_INSTANCES, key)
            event = decode(entry.value) if entry else None
        except PeerError as error:
            log.warning("registry record %s is unreadable: %s", key[:80], error)
            return None
        if event is None or not isinstance(event.body, InstanceRecord):
            return None
        header = event.header
        if not header.m or named != f"{header.i}/{header.m}":
            return None
        return Registered(header.i, header.m, header.e, event.body)

    def _note(self, now: float) -> None:
        """Remember who is registered, and forget who has not been for long."""
        for name in self._members:
            self._known[name] = now
            self._known.move_to_end(name)
        while self._known and (len(self._known) > KNOWN_MAX or now - next(iter(self._known.values())) > KEEP_S):
            self._known.popitem(last=False)

    def _own_name(self, url: BaseUrl) -> str:
        base = self._own_base
        if base is None or (url.scheme, url.host, url.port) != (base.scheme, base.host, base.port):
            return ""
        head, _, name = url.path.rpartition("/")
        return name if head == f"{base.path}/instances" else ""


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
