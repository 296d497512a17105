"""The bus as its users see it: a small protocol, so that publisher, subscriber and worker know no broker's client.

`kvbus.bus.NatsBus` is the product; `kvbus.testing.bus.MemoryBus` keeps the same promises inside one process.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message as it came: raw bytes; `sequence` and `last_on_subject` are 0 outside streams.

    For a live repeat of a stored message, `sequence` is the stream's and `last_on_subject` the sequence of the message
    before it on the same subject, which shows a gap.
    """

    subject: str
    data: bytes
    sequence: int = 0
    last_on_subject: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """The broker's word that a message is in its stream."""

    sequence: int
    duplicate: bool


@dataclass(frozen=True, slots=True)
class NotStored:
    """The stream would not take it.

    `pending`: that subject already holds a request. `full`: a limit is reached. `moved`: the last message on that
    subject is another than the one that was named.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """A request that nobody answered: `nobody_listens` (known at once) or `late` (the wait ended)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A value in a bucket, with the revision that a compare-and-set names."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class BusHealth:
    """What the connection is doing, for refusing early and for doctors."""

    connected: bool
    server: str
    counters: dict[str, int] = field(default_factory=dict)


class Subscription(Protocol):
    """A running subscription; closing it twice is harmless."""

    async def close(self) -> None:
        """Stop hearing; queued messages are dropped."""


class Work(Protocol):
    """One message taken from the work queue; exactly one of `finish` and `give_back` ends it."""

    @property
    def delivery(self) -> Delivery:
        """The message as it came."""

    @property
    def attempt(self) -> int:
        """1 for the first delivery."""

    @property
    def waited_s(self) -> float:
        """How long ago the broker stored the message when it was taken, by the broker's own clock; 0: not known."""

    async def keep(self) -> None:
        """Tell the broker that this is still being worked on, confirmed; it expects that within its ack wait."""

    async def finish(self) -> None:
        """Take the message off the queue for good."""

    async def give_back(self, delay_s: float) -> None:
        """Let the queue offer the message again after a delay."""


Handler = Callable[[Delivery], Awaitable[None]]
Responder = Callable[[Delivery], Awaitable[bytes]]


class Bus(Protocol):
    """What kvbus needs of a message bus. Every wait is bounded; every refusal that is ordinary is a value."""

    async def publish(self, subject: str, data: bytes) -> None:
        """Send at most once; BusError while there is no connection or where the message is too long."""

    async def store(
        self, subject: str, data: bytes, *, message_id: str, wait_s: float = 5.0, after: int | None = None
    ) -> Stored | NotStored:
        """Send into the subject's stream and await the ack; repeats of a message id are stored once.

        With `after`, store only if the last message on this subject has that stream sequence (0: there is none, or it
        was trimmed), else `NotStored("moved")`. A repeat with the same id and the same `after` is a duplicate, and its
        sequence the first one's, even where others have followed since. It orders writers; it does not say who they are
        (P13), and it forgets with the stream (P14).
        """

    async def request(self, subject: str, data: bytes, *, wait_s: float) -> bytes | NoAnswer:
        """Ask and await one answer."""

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """Hear a subject or filter; active at the server when this returns. Handlers run one at a time, in order."""

    async def respond(self, subject: str, responder: Responder) -> Subscription:
        """Answer requests on a subject; several may run at once, bounded. A responder that raises answers nothing."""

    async def take_work(self, subject_filter: str, *, consumer: str, most: int, wait_s: float) -> Sequence[Work]:
        """Take up to `most` requests from the work queue; empty when none came within the wait."""

    async def queued(self, subject_filter: str) -> int:
        """Return how many requests of a filter the work queue holds, waiting and running."""

    async def history(self, subject_filter: str, *, after_sequence: int = 0, most: int = 10_000) -> Sequence[Delivery]:
        """Read stored messages of a facts or settle subject or filter, oldest first, from after a stream sequence."""

    async def last(self, subject: str) -> Delivery | None:
        """Return the newest stored message of one facts or settle subject; None where there is none any more."""

    async def log_end(self, subject_filter: str) -> int:
        """Return the stream sequence of the newest message that a log of facts or decisions ever held; 0: none yet.

        It is the stream's, whatever subject of it is named, and stays when the message itself has gone.
        """

    async def get(self, bucket: str, key: str) -> Entry | None:
        """Return a bucket's value for a key, or None."""

    async def put(self, bucket: str, key: str, value: bytes) -> None:
        """Store a value, whatever was there."""

    async def compare_and_set(self, bucket: str, key: str, value: bytes, *, revision: int) -> int:
        """Store only if the key's revision is still this one (0: does not exist); return its new one, else 0."""

    async def keys(self, bucket: str) -> Sequence[str]:
        """Return the keys that a bucket holds now."""

    async def ensure_assets(self) -> None:
        """Create missing streams and buckets; ConfigError where an existing one has another shape. Deletes nothing."""

    def health(self) -> BusHealth:
        """Return what the connection is doing now."""

    async def close(self) -> None:
        """Flush, stop subscriptions, disconnect; bounded, repeatable."""


BUCKET_INSTANCES = "kvbus_instances"
BUCKET_EPOCH = "kvbus_epoch"
