"""The wire, version 1: an envelope and the events that it carries, as pydantic models over msgpack.

A message is one map: `v` major version, `k` kind, `i` instance, `m` member, `e` epoch, `s` sequence, `t` unix time in
nanoseconds, `c` cause (the id of the event that led here), `b` body. Rules for readers: unknown fields are ignored, an
unknown kind is skipped and counted, an unknown major version is refused, anything malformed is a PeerError. Columns are
little-endian bytes, so that a thousand facts cost microseconds rather than milliseconds to decode.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, cast

from pydantic import Field, ValidationError

from kvbus.blocks import BlocksChanged, BlocksUnseen
from kvbus.caching import CacheAnswered, CacheAsked, CacheChangeAsked, CacheChanged, NamesForgotten
from kvbus.codec import pack, unpack
from kvbus.columns import column, from_column
from kvbus.draining import DrainAnswered, DrainAsked, MemberState
from kvbus.errors import PeerError
from kvbus.parts import (
    REQUEST_LENGTH_MAX_BYTES,
    Body,
    Count,
    Epoch,
    Message,
    Name,
    Nonce,
    OnMiss,
    PagesFound,
    Part,
    ProcessIdentity,
    Prompt,
    ReaderKey,
    RequestHash,
    Seconds,
    Text,
    TracedBody,
    Url,
    VerdictWord,
)
from kvbus.prefixes import PrefixAnswered, PrefixAsked
from kvbus.reporting import (
    BATCH_EVENTS_MAX,
    AttemptMade,
    EventsBatch,
    FactsSeen,
    LeaseGranted,
    OutcomeFixed,
)
from kvbus.settling import (
    CancelDecided,
    MadeVisible,
    PlanAnswered,
    PlanAsked,
    SettleDecided,
    SettleVoided,
    SharesReported,
    TermTaken,
    TransferOpened,
)
from kvbus.snapshots import SnapshotAsked, SnapshotTaken

__all__ = [
    "BATCH_EVENTS_MAX",
    "REQUEST_LENGTH_MAX_BYTES",
    "AttemptMade",
    "BlocksChanged",
    "BlocksUnseen",
    "CacheAnswered",
    "CacheAsked",
    "CacheChangeAsked",
    "CacheChanged",
    "CancelDecided",
    "DrainAnswered",
    "DrainAsked",
    "EventsBatch",
    "FactsSeen",
    "LeaseGranted",
    "MadeVisible",
    "Message",
    "NamesForgotten",
    "OutcomeFixed",
    "PlanAnswered",
    "PlanAsked",
    "PrefixAnswered",
    "PrefixAsked",
    "ProcessIdentity",
    "Prompt",
    "ReaderKey",
    "SettleDecided",
    "SettleVoided",
    "SharesReported",
    "SnapshotAsked",
    "SnapshotTaken",
    "TermTaken",
    "TransferOpened",
    "column",
    "from_column",
]  # offered here as well

VERSION = 1
EVENT_LENGTH_MAX_BYTES = 256 << 10
"""Facts, settle decisions, results and heartbeats; the broker's limit for their streams."""


class Header(Part):
    """Who says it, when, and what it followed from; `m` and `e` are empty and 0 where a requester speaks."""

    v: Literal[1] = 1
    k: Annotated[str, Field(min_length=1, max_length=32)]
    i: Name
    m: Annotated[str, Field(max_length=64)] = ""
    e: Annotated[int, Field(ge=0, lt=2**63)] = 0
    s: Count
    t: Count
    c: Annotated[str, Field(max_length=200)] = ""

    @property
    def event_id(self) -> str:
        """The id that makes a repeat recognizable, here and in the broker: instance.member.epoch.sequence."""
        return f"{self.i}.{self.m}.{self.e}.{self.s}"


class TransferRequested(TracedBody):
    """A requester asks `destination` to take the KV of a prompt from `source`, ahead of traffic."""

    KIND = "transfer_requested"
    request_id: Annotated[str, Field(min_length=1, max_length=200)]
    request_hash: RequestHash
    requester: Name
    source: Name
    destination: Name
    prompt: Prompt
    model: Annotated[str, Field(max_length=200)] = ""
    salt: Annotated[str, Field(max_length=200)] = ""
    on_miss: OnMiss = "prefill"
    budget_s: Annotated[float, Field(gt=0, le=3_600, allow_inf_nan=False)] = 30.0
    queue_limit_s: Annotated[float, Field(gt=0, le=3_600, allow_inf_nan=False)] = 60.0


class TransferCancelRequested(Body):
    """A requester asks that a queued or running transfer stop; what was delivered whole is kept."""

    KIND = "transfer_cancel_requested"
    request_hash: RequestHash


class TransferVerdict(Body):
    """The destination's answer to a request; `transfer` names the running or finished one it joined, if any."""

    KIND = "transfer_verdict"
    request_id: Annotated[str, Field(min_length=1, max_length=200)]
    request_hash: RequestHash
    verdict: VerdictWord
    reason: Text = ""
    transfer: Annotated[str, Field(max_length=200)] = ""


class TransferOutcome(Body):
    """How a transfer ended. Goes to every requester that asked, and onto the facts stream.

    `settled`: all whole blocks of the prompt are on the destination. `partial`: a usable prefix is. `failed` and
    `cancelled`: see `failure` and `reason`; pages that arrived whole before that stay and are counted.
    Block counts: `pages_wanted` whole blocks in the prompt, `pages_held` already there, `pages_moved` delivered now.
    """

    KIND = "transfer_outcome"
    transfer: Annotated[str, Field(min_length=1, max_length=200)]
    request_hash: RequestHash
    source: Name
    destination: Name
    outcome: Literal["settled", "partial", "failed", "cancelled"]
    failure: Annotated[str, Field(max_length=64)] = ""
    reason: Text = ""
    evidence: tuple[str, ...] = Field(default=(), strict=False)
    prompt_tokens: Count = 0
    pages_wanted: Count = 0
    pages_held: Count = 0
    pages_moved: Count = 0
    length_bytes: Count = 0
    lo: Count = 0
    hi: Count = 0
    queue_s: Seconds = 0.0
    grant_s: Seconds = 0.0
    move_s: Seconds = 0.0
    total_s: Seconds = 0.0


class TransferStep(Body):
    """One step in a transfer's life, for whoever follows it; never a basis for a decision."""

    KIND = "transfer_step"
    transfer: Annotated[str, Field(min_length=1, max_length=200)]
    request_hash: RequestHash
    step: Annotated[str, Field(min_length=1, max_length=32)]
    text: Text = ""


# ------------------------------------------------------------------------------------------------ lending, by request


class LendRequested(TracedBody):
    """A destination asks a source to lend pages by name. `tokens` travel so that a source may prefill on a miss.

    `network`: the reader's network namespace, which tells whether a loopback address leads from there to its source.
    Any run of the source but `source_epoch` refuses. `nonce`, the reader's secret, ends the lease, seen grant or not.
    """

    KIND = "lend_requested"
    key: ReaderKey
    nonce: Nonce
    fingerprint: Annotated[str, Field(min_length=1, max_length=64)]
    names: bytes
    first_block: Count
    tokens: bytes = b""
    salt: Annotated[str, Field(max_length=200)] = ""
    on_miss: OnMiss
    budget_s: Annotated[float, Field(gt=0, le=3_600, allow_inf_nan=False)]
    wait_s: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
    process: ProcessIdentity
    source_epoch: Epoch | None = None
    transports: tuple[str, ...] = Field(strict=False)
    network: Count | None = None


class LendAnswered(Body):
    """What the source says: the signed grant, "ask again" while it computes, or why it will not lend."""

    KIND = "lend_answered"
    status: Literal["granted", "computing", "refused"]
    grant: bytes = b""
    signature: bytes = b""
    failure: Annotated[str, Field(max_length=64)] = ""
    reason: Text = ""


class LeaseReleased(Body):
    """The reader's word that its access has ended for good and that it will not try again; repeated until confirmed."""

    KIND = "lease_released"
    key: ReaderKey
    nonce: Nonce
    found: PagesFound | None = None


class ReleaseConfirmed(Body):
    """The lender has taken note; the reader may forget the key."""

    KIND = "release_confirmed"
    known: bool


# --------------------------------------------------------------------------------------------- instances and queries


class InstanceRecord(Body):
    """What an instance says of itself in the registry; refreshed while it lives, gone by the bucket's time to live."""

    KIND = "instance"
    verify_key: Annotated[bytes, Field(max_length=32)]
    fingerprint: Annotated[str, Field(max_length=64)]
    model: Annotated[str, Field(max_length=200)]
    engine: Annotated[str, Field(max_length=64)]
    block_tokens: Count
    ranks: Annotated[int, Field(ge=1, lt=2**16)]
    page_bytes: Count
    pages: Count
    process: ProcessIdentity
    transports: tuple[str, ...] = Field(strict=False)
    version: Annotated[str, Field(max_length=32)]
    urls: Annotated[tuple[Url, ...], Field(max_length=8, strict=False)] | None = None
    state: MemberState | None = None


class HeartbeatSeen(Body):
    """Each second: load, the last fact sequence, and the settle head as term and number; the epoch is in the header.

    A lost last fact or decision leaves no gap to see, so the heads are said again and again (P25).
    """

    KIND = "heartbeat"
    transfers_running: Count
    leases_held: Count
    pages_free: Count
    pages_cached: Count
    pages_lent: Count
    facts_sequence: Count
    settle_n: Count
    settle_term: Count = 0
    state: MemberState | None = None


class StatsAsked(Body):
    """A question for counters."""

    KIND = "stats_asked"


class StatsAnswered(Body):
    """Counters by name; the names are those of `statistics()` of the parts that keep them."""

    KIND = "stats"
    counters: dict[str, int | float | str]


EventBody = (
    TransferRequested | TransferCancelRequested | TransferVerdict | TransferOutcome | TransferStep
    | FactsSeen | LeaseGranted | AttemptMade | OutcomeFixed | EventsBatch
    | TermTaken | TransferOpened | SettleDecided | MadeVisible | SettleVoided | CancelDecided
    | SharesReported | PlanAsked | PlanAnswered
    | LendRequested | LendAnswered | LeaseReleased | ReleaseConfirmed
    | InstanceRecord | HeartbeatSeen | StatsAsked | StatsAnswered | SnapshotAsked | SnapshotTaken
    | CacheAsked | CacheAnswered | CacheChangeAsked | CacheChanged | NamesForgotten
    | BlocksChanged | BlocksUnseen
    | DrainAsked | DrainAnswered | PrefixAsked | PrefixAnswered
)  # fmt: skip

KINDS: dict[str, type[Body]] = {body.KIND: body for body in EventBody.__args__}


class UnknownKind(Part):
    """A well-formed message of a kind that this version does not know: to be skipped and counted."""

    kind: str


@dataclass(frozen=True, slots=True)
class Event:
    """One decoded message; header and body were checked, each by its own model."""

    header: Header
    body: EventBody | UnknownKind


def encode(header: Header, body: Body) -> bytes:
    """Return the bytes of one event; ValueError where header and body disagree on the kind."""
    if header.k != body.KIND:
        raise ValueError(f"header says kind {header.k!r}, body is {body.KIND!r}")
    return pack({**header.__dict__, "b": fields_of(body)}, fields_of)


def fields_of(part: object) -> dict[str, object]:
    """Return what a part's own dump would hold, at a third of its price: a model was checked when it was made."""
    if not isinstance(part, Part):
        raise TypeError(f"{type(part).__name__} has no place in an event")
    return {name: value for name, value in part.__dict__.items() if value is not None}


def split(data: bytes) -> tuple[bytes, ...]:
    """Return the events that one stored message holds, each as its own bytes, not looked at yet; PeerError as `decode`.

    A batch within a batch is no event: `decode` would return it, and its reader refuses it.
    """
    body = decode(data).body
    return body.events if isinstance(body, EventsBatch) else (data,)


def decode_all(data: bytes, *, length_max_bytes: int = REQUEST_LENGTH_MAX_BYTES) -> Iterator[Event | PeerError]:
    """Yield what one stored message holds: its event, or those of its batch; what is wrong with one spoils no other."""
    try:
        event = decode(data, length_max_bytes=length_max_bytes)
    except PeerError as error:
        yield error
        return
    if not isinstance(event.body, EventsBatch):
        yield event
        return
    for inner in event.body.events:
        try:
            event = decode(inner)
        except PeerError as error:
            yield error
        else:
            yield PeerError("a batch holds a batch") if isinstance(event.body, EventsBatch) else event


def decode(data: bytes, *, length_max_bytes: int = REQUEST_LENGTH_MAX_BYTES) -> Event:
    """Return the event that the bytes hold; PeerError names what is wrong with them."""
    document = unpack(data, length_max_bytes=length_max_bytes)
    version = document.get("v")
    if type(version) is not int or version != VERSION:
        got = version if isinstance(version, int) else type(version).__name__  # a nested value may have no short repr
        raise PeerError("event has an unknown major version", got=got, expected=VERSION)
    body_document = document.pop("b", None)
    try:
        header = Header.__pydantic_validator__.validate_python(document)  # as `model_validate`, a quarter cheaper
        if not isinstance(body_document, dict):
            raise PeerError("event body must be a map", got=type(body_document).__name__, kind=header.k)
        kind = KINDS.get(header.k)
        if kind is None:
            return Event(header, UnknownKind(kind=header.k))
        return Event(header, cast("EventBody", kind.__pydantic_validator__.validate_python(body_document)))
    except ValidationError as error:
        raise PeerError("event does not fit its kind", problem=_first_problem(error)) from error


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, problem['loc'])) or 'event'}: {problem['msg']}"[:300]
