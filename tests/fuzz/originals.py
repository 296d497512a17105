"""Real inputs, from which the others are made: golden events, a grant as a lender gives it, files as kvbus writes."""

import json
import struct
import zlib
from functools import cache
from pathlib import Path

from nacl.signing import SigningKey

from kvbus.bus_access import new_credential
from kvbus.codec import pack, unpack
from kvbus.columns import column
from kvbus.dataplane.notices import Notice
from kvbus.dataplane.socket_wire import CHALLENGE_BYTES
from kvbus.dataplane.socket_wire import hello as hello_frame
from kvbus.engines.link import encode_frame
from kvbus.engines.toy import ToyEngine
from kvbus.errors import PeerError
from kvbus.events import EventsBatch, Header, decode, encode
from kvbus.grants import Expected, Grant, LenderKey, MemoryAccess, PoolGeometry, SocketAccess, UcxAccess
from kvbus.parts import ProcessIdentity, ReaderKey
from kvbus.permissions import Role, User
from kvbus.topics import Command, Family, Query, Topics
from tests.fuzz.mutating import packed

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
TOPICS = Topics()
RECORDING_MAGIC = b"kvbus recording\n"
EPOCH = 3 << 32 | 7
FINGERPRINT = "f" * 32
PAGE_BYTES = 1_024
PROCESS = ProcessIdentity(pid=1, start_ticks=2, boot_id="another host's", pid_namespace=3)
READER = ReaderKey(instance="b", member="m0", epoch=EPOCH, transfer="t", attempt=1, rank=0)


@cache
def golden() -> dict[str, tuple[bytes, ...]]:
    """Return the golden events by their kind."""
    found: dict[str, tuple[bytes, ...]] = {}
    for path in sorted(GOLDEN.glob("*.bin")):
        data = path.read_bytes()
        kind = decode(data).header.k
        found[kind] = (*found.get(kind, ()), data)
    return found


def batch() -> bytes:
    """Return a stored message that holds several events."""
    inner = tuple(data for kind in ("facts", "lease_granted", "attempt", "outcome") for data in golden()[kind])
    return encode(Header(k=EventsBatch.KIND, i="b", m="m0", e=EPOCH, s=9, t=9), EventsBatch(events=inner))


@cache
def lender_key() -> LenderKey:
    """Return a key that is the same in each run, so that a seed repeats everything."""
    return LenderKey(SigningKey(b"k" * 32))


def expected() -> Expected:
    """Return what the reader of `grant` asked for."""
    return Expected(READER, "a", EPOCH, FINGERPRINT, PAGE_BYTES, names_asked=4)


def grant() -> bytes:
    """Return a grant over all ways to a pool, not signed yet."""
    whole = Grant(
        lender_instance="a",
        lender_member="m0",
        lender_epoch=EPOCH,
        reader=READER,
        ticket=5,
        rank=0,
        fingerprint=FINGERPRINT,
        nonce=b"n" * 16,
        pool=PoolGeometry(
            base=1 << 40, length_bytes=1 << 20, generations_offset=64, pages_offset=4_096, page_stride=PAGE_BYTES,
            page_bytes=PAGE_BYTES, page_count=64,
        ),
        pages=column((1, 2, 3, 4), 4),
        counters=column((2, 4, 6, 8), 8),
        ucx=UcxAccess(address=b"address", rkey=b"rkey"),
        memory=MemoryAccess(process=PROCESS, fd=5),
        socket=SocketAccess(addresses=("127.0.0.1", "::1"), port=4_000, secret=b"s" * 32),
        digests=column((1, 2, 3, 4), 8),
    )  # fmt: skip
    return pack(whole.model_dump(exclude_none=True))


def forged() -> bytes:
    """Return a signature, a grant, and at its end a verify key: all as they should be."""
    data, key = grant(), lender_key()
    return key._signing_key.sign(data).signature + data + key.verify_key


def subjects() -> tuple[bytes, ...]:
    """Return a subject of each family and verb."""
    hash_ = "0123456789abcdef" * 2
    built = [
        TOPICS.transfer("10.0.0.1:8000", hash_), TOPICS.command("a", Command.LEASE, "m0"), TOPICS.facts("a/ü"),
        TOPICS.query("a", Query.STATS), TOPICS.settle("a"), TOPICS.live_facts("a"), TOPICS.live_settle("a"),
        TOPICS.result("r"), TOPICS.heartbeat("a"), TOPICS.shares("a"), *(f"kv.{family.value}.*" for family in Family),
    ]  # fmt: skip
    return tuple(subject.encode() for subject in built)


def settings() -> bytes:
    """Return a worker's settings with every kind of value in them."""
    return pack({
        "instance": "b", "member": "m0", "members": ["m0", "m1"], "nats_url": "nats://x", "nats_token": "t",
        "engine": "toy", "engine_options": {"seed": 1}, "pages": 8, "backend": "auto", "run_dir": "/tmp/x",  # noqa: S108
        "transport_costs": {"ucx": [1.0, 2.0, 3.0]}, "socket_address": "127.0.0.1", "socket_port": 0,
        "socket_advertise": ["10.0.0.1"], "rate_limit_bytes_s": 0, "digests": "off", "parent_pid": 0,
        "limits": {"inflight_max": 4, "dedup_ttl_s": 1.0, "source_allow": ["a"], "lend_wait_s": 1.0},
    })  # fmt: skip


def layout() -> bytes:
    """Return the toy engine's layout as an engine sends it."""
    return pack(dict(ToyEngine.load({}).describe().layout.to_plain()))


def toy_options() -> bytes:
    """Return some options of the toy engine."""
    return pack({"name": "t", "seed": 1, "block_tokens": 32, "page_bytes": 65_536, "work_rounds": 1, "ranks": 1})


def hello() -> bytes:
    """Return a page server's first frame."""
    return hello_frame(EPOCH, bytes(CHALLENGE_BYTES))


def notice() -> bytes:
    """Return a reader's last word."""
    return Notice(READER, b"n" * 16).encode()


def frames() -> bytes:
    """Return two frames of an engine's connection."""
    return encode_frame("match", 1, {"ids": column((1, 2), 4), "salt": ""}) + encode_frame("held", 2, {"x": [1, "a"]})


def recorded() -> bytes:
    """Return what `recording_of` makes a recording of: a document of its frames."""
    kinds = ("lease_granted", "attempt", "facts", "outcome", "transfer_step", "transfer_outcome")
    frames_: list[object] = [{"format": 1, "after": {"facts": 0, "settle": 0}, "runs": [["b", "m0", EPOCH]]}]
    for number, kind in enumerate(kinds, 1):
        data = golden()[kind][0]
        subject = TOPICS.facts(decode(data).header.i)
        frames_.append({"log": "facts", "sequence": number, "subject": subject, "data": data, "part": 0, "parts": 1})
    return pack({"frames": [*frames_, {"end": {"facts": len(kinds), "settle": 0}, "end_ns": 5}]})


def recording_of(data: bytes) -> bytes:
    """Return a recording whose frames are those of a document, framed as they should be; the bytes where it is none."""
    try:
        listed = unpack(data).get("frames")
    except PeerError:
        return data
    out = RECORDING_MAGIC
    for frame in listed if isinstance(listed, list) else ():
        payload = packed(frame, b"")
        out += struct.pack("<II", len(payload), zlib.crc32(payload)) + payload
    return out


def credential() -> bytes:
    """Return a credential's file; its key is another in each run, and nothing depends on which."""
    return new_credential(User(Role.INSTANCE, "a", ("m0",)), "kv").text().encode()


def deep_credential(document: bytes) -> bytes:
    """Return a credential's file that says in this document whose it is."""
    head, _, seed = credential().partition(b"\n")
    return head.partition(b"{")[0] + document + b"\n" + seed


def state() -> bytes:
    """Return what `kvbus up` leaves."""
    return json.dumps({"nats_url": "nats://127.0.0.1:4222", "token": "t", "pid": 1}).encode()
