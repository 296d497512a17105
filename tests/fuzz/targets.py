"""What reads bytes that others wrote, and which errors its documentation allows. Everything is fed plain bytes.

A target returns the value that it read; whatever else it may raise is a fault. Targets that read text are fed the bytes
as a broker's client would hand them over.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvbus import codec, columns, config, events, grants, names
from kvbus.bus_access import read_credential
from kvbus.commands.auditing import audit
from kvbus.commands.recordings import read_record
from kvbus.dataplane.notices import Notice
from kvbus.dataplane.socket_wire import HEADER_BYTES, Header, challenge_of
from kvbus.engines.link import FrameBuffer
from kvbus.engines.toy import ToyOptions
from kvbus.errors import ConfigError, PeerError
from kvbus.gateway.sources import Allowlist
from kvbus.pool import generations
from kvbus.pool.layout import PageLayout
from kvbus.roles.registry import lookup, next_epoch, registry_key
from kvbus.testing.bus import MemoryBroker
from kvbus.topics import Topics, escape, unescape
from kvbus.transport import BUCKET_EPOCH, BUCKET_INSTANCES
from tests.fuzz import originals

TOPICS = Topics()
DEEP_JSON = b"[" * 50_000
EPOCHS = (str(3 << 32 | 7).encode(), str(2**63 - 1).encode(), b"-1", b"9" * 40, b"1_0", " \u0663".encode())
"""What may stand as an epoch, with what Python reads as a number and nobody wrote."""


@dataclass(frozen=True, slots=True)
class Target:
    """One reader: `allowed` are the errors that its documentation names, `seeds` real inputs to start from."""

    name: str
    read: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...] = ()


def read_event(data: bytes) -> object:
    """Decode an event; one of a known kind goes out again and comes back as the same."""
    event = events.decode(data)
    if not isinstance(event.body, events.UnknownKind):
        again = events.decode(events.encode(event.header, event.body))
        if again.header != event.header or not _same(again.body, event.body):
            raise AssertionError(f"another event came back: {event.header.k}")
    return event


def _same(one: object, other: object) -> bool:
    return repr(one) == repr(other)  # a NaN equals itself here


def read_stored(data: bytes) -> object:
    """Read all that one stored message holds."""
    found = list(events.decode_all(data))
    events.split(data)
    return found


def read_grant(data: bytes) -> object:
    """Unseal a grant that its lender signed, whatever it says, and look for a reason to refuse it."""
    key = originals.lender_key()
    signature = key._signing_key.sign(data).signature
    grant = grants.unseal(data, signature, key.verify_key)
    return grants.refusal(grant, originals.expected())


def read_forged_grant(data: bytes) -> object:
    """Unseal bytes of which nobody knows who signed them."""
    return grants.unseal(data[64:-32], data[:64], data[-32:])


def read_column(data: bytes) -> object:
    """Read bytes as a column of each width."""
    for width in (2, 4, 8):
        if len(data) % width == 0:
            columns.from_column(data, width)
    return columns.from_column(data, 8)


def read_subject(data: bytes) -> object:
    """Parse a subject; what was parsed is built into the same subject again."""
    text = data.decode(errors="replace")
    subject = TOPICS.parse(text)
    tokens = (TOPICS.prefix, subject.family.value, escape(subject.name), subject.last)
    built = ".".join(filter(None, (*tokens, subject.member and escape(subject.member))))
    if built != text:
        raise AssertionError(f"{text!r} was parsed as {subject}")
    return subject


def read_names(data: bytes) -> object:
    """Read token ids, and name their pages."""
    names.names_from_bytes(data)
    ids = names.tokens_from_bytes(data)
    return names.page_names(data[:16], ids, 1 + len(data) % 7), names.epoch_text(len(data))


def read_settings(data: bytes) -> object:
    """Check a worker's settings, whatever a document says they are."""
    return config.checked_settings(**_document(data))


def read_layout(data: bytes) -> object:
    """Read the layout that an engine says it has."""
    return PageLayout.from_plain(_document(data)).fingerprint()


def read_toy_options(data: bytes) -> object:
    """Read the toy engine's options."""
    return ToyOptions.from_plain(_document(data))


def _document(data: bytes) -> dict[str, object]:
    try:
        return codec.unpack(data)
    except PeerError:
        return {data[:20].hex(): data[20:]}


def read_socket_header(data: bytes) -> object:
    """Read a page server's frame: a header of its own length, and a hello behind it."""
    header = Header.decode(data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\x00"))
    return challenge_of(data[HEADER_BYTES:], header.status)


def read_frames(data: bytes) -> object:
    """Cut a stream into an engine's frames, as it comes in pieces."""
    frames, found = FrameBuffer(), 0
    for place in range(0, len(data), 7):
        frames.feed(data[place : place + 7])
        while frames.take() is not None:
            found += 1
    return found


def read_generation(data: bytes) -> object:
    """Read a page's generation record, torn or not."""
    return generations.decode(data[: generations.RECORD_BYTES].ljust(generations.RECORD_BYTES, b"\x00"))


def read_recording(data: bytes) -> object:
    """Read a recording from a file, and audit it whatever is wrong with it."""
    path = scratch() / "recording"
    path.write_bytes(data)
    return audit(read_record(path)).verdict


def read_recorded(data: bytes) -> object:
    """The same for a recording whose frames have the right lengths and checksums, whatever they say."""
    return read_recording(originals.recording_of(data))


def read_key_file(data: bytes) -> object:
    """Read a credential's file."""
    path = scratch() / "credential"
    path.touch(mode=0o600)
    path.write_bytes(data)
    return read_credential(path).key


def read_state_file(data: bytes) -> object:
    """Read what `kvbus up` left."""
    (scratch() / "up.json").write_bytes(data)
    before = os.environ.get("KVBUS_STATE")
    os.environ["KVBUS_STATE"] = str(scratch())
    try:
        return config.discover()
    finally:
        os.environ.pop("KVBUS_STATE")
        if before is not None:
            os.environ["KVBUS_STATE"] = before


def read_allowlist(data: bytes) -> object:
    """Read the gateway's list of sources."""
    return Allowlist.parsed(data.decode(errors="replace"))


def read_registry(data: bytes) -> object:
    """Read a registry in which bytes stand as a record, as an epoch, and as a key."""
    return _loop().run_until_complete(_registry(data))


async def _registry(data: bytes) -> object:
    bus = MemoryBroker().connect()
    for bucket in (BUCKET_INSTANCES, BUCKET_EPOCH):
        await bus.put(bucket, registry_key("a", "m0"), data)
    return await lookup(bus, "a"), await next_epoch(bus, "a", "m0", nonce=lambda _: 1)


def _tokens(data: bytes) -> str:
    return unescape(data.decode(errors="replace"))


def scratch() -> Path:
    """Return a folder for the files that are read; it goes with the process."""
    return Path(_scratch().name)


@cache
def _scratch() -> "tempfile.TemporaryDirectory[str]":
    shared = Path("/dev/shm")  # noqa: S108 - a folder of our own in it: these files are written a million times
    return tempfile.TemporaryDirectory(prefix="kvfuzz-", dir=shared if shared.is_dir() else None)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def targets() -> tuple[Target, ...]:
    """Return all of them; each kind of event is one, since each has a model of its own."""
    return (*_plain_targets(), *_kinds())


def _kinds() -> Iterator[Target]:
    for kind, golden in sorted(originals.golden().items()):
        yield Target(f"event {kind}", read_event, (PeerError,), golden)


def _plain_targets() -> tuple[Target, ...]:
    peer, operator = (PeerError,), (ConfigError,)
    every = tuple(data for golden in originals.golden().values() for data in golden)
    return (
        Target("codec.unpack", codec.unpack, peer, every),
        Target("events.decode_all", read_stored, peer, (originals.batch(), *every)),
        Target("columns", read_column, peer, (bytes(range(64)),)),
        Target("topics.parse", read_subject, peer, originals.subjects()),
        Target("topics.unescape", _tokens, peer, (b"10=2E0=2E0=2E1=3A8000", b"a_-9")),
        Target("grants, signed", read_grant, peer, (originals.grant(),)),
        Target("grants, forged", read_forged_grant, peer, (originals.forged(),)),
        Target("names", read_names, (ValueError,), (bytes(range(64)),)),
        Target("config", read_settings, operator, (originals.settings(),)),
        Target("layout", read_layout, operator, (originals.layout(),)),
        Target("toy options", read_toy_options, operator, (originals.toy_options(),)),
        Target("socket frames", read_socket_header, peer, (originals.hello(),)),
        Target("UCX notices", Notice.decode, peer, (originals.notice(),)),
        Target("engine frames", read_frames, peer, (originals.frames(),)),
        Target("generations", read_generation, (), (bytes(32), b"\x01" * 16 + b"\xfe" * 16)),
        Target("recordings", read_recording, operator, (originals.recording_of(originals.recorded()),)),
        Target("recorded frames", read_recorded, operator, (originals.recorded(),)),
        Target("credentials", read_key_file, operator, (originals.credential(), originals.deep_credential(DEEP_JSON))),
        Target("state file", read_state_file, operator, (originals.state(), DEEP_JSON)),
        Target("gateway allowlist", read_allowlist, operator, (b"a, http://a.example:80,b/m0",)),
        Target("registry", read_registry, (), (*originals.golden()["instance"], *EPOCHS)),
    )
