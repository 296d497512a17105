"""What kvbus keeps in the broker, described as data: four streams, two buckets, one consumer per destination.

The dictionaries are what the broker's own JetStream API speaks (durations in nanoseconds), so that what is wanted and
what is found compare field by field. Nothing here talks to a broker.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvbus.events import EVENT_LENGTH_MAX_BYTES, REQUEST_LENGTH_MAX_BYTES
from kvbus.topics import Topics
from kvbus.transport import BUCKET_EPOCH, BUCKET_INSTANCES

Document = dict[str, object]

_SECOND = 1_000_000_000
_HOUR = 3600 * _SECOND
_MIB = 1 << 20
_DOOR = "allow_rollup_hdrs"

INSTANCE_TTL_S = 10
"""An instance refreshes its record every 3 s; three missed refreshes and it is gone."""

KEEP_HOURS_MIN = 1
"""For a dashboard that starts late, and for a term's record, which its coordinator writes again six times in that time
(P14). Memory safety never depends on it."""
KEEP_HOURS_MAX = 24 * 365

BLOCKS_MESSAGES_MAX = 10_000
"""Of each instance: as many batches as vLLM itself keeps for replay. What is older is only missing from an index."""

SIZED_BY_OPERATOR = frozenset({"max_bytes", "max_msgs", "num_replicas", "metadata"})
"""Fields that may differ without being drift: how much disk and how many replicas a deployment affords is not kvbus's
to insist on. All other fields change what a message means."""


@dataclass(frozen=True, slots=True)
class AssetLimits:
    """How much the streams may hold; the broker reserves it when they are created.

    The defaults suit a broker of one's own; `EMBEDDED` suits the one that `kvbus up` starts on a developer's disk.
    """

    transfer_messages_max: int = 10_000
    transfer_bytes_max: int = 256 * _MIB
    facts_bytes_max: int = 1024 * _MIB
    settle_bytes_max: int = 128 * _MIB
    blocks_bytes_max: int = 64 * _MIB
    keep_hours: int = KEEP_HOURS_MIN
    """For how long facts and decisions are kept, where their space allows; an audit reaches as far back."""
    replicas: int = 1


EMBEDDED = AssetLimits(facts_bytes_max=256 * _MIB)


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """How the work queue offers requests to a destination.

    `in_flight_max` is how many requests a destination has in its hands: those that run, and those that
    are being refused. `ack_wait_s`: three missed signs of life at one per 3 s. Nothing bounds how often one is offered:
    each offer says the how-manyth it is, and whoever takes it ends it once that is too many (P23).
    """

    in_flight_max: int = 64
    ack_wait_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Assets:
    """The names and shapes of one deployment's assets; a prefix other than `kv` shows in every name."""

    topics: Topics
    limits: AssetLimits = AssetLimits()

    @property
    def transfer(self) -> str:
        """The name of the work queue's stream."""
        return self._named("KVB_TRANSFER")

    @property
    def facts(self) -> str:
        """The name of the facts stream."""
        return self._named("KVB_FACTS")

    @property
    def settle(self) -> str:
        """The name of the settle log's stream."""
        return self._named("KVB_SETTLE")

    @property
    def blocks(self) -> str:
        """The name of the stream of engines' blocks."""
        return self._named("KVB_BLOCKS")

    def bucket(self, bucket: str) -> str:
        """Return the bucket's name in the broker."""
        return self._named(bucket)

    def history_stream(self, subject_filter: str) -> str:
        """Return the stream that holds a facts, settle or blocks subject; ValueError for any other."""
        for stream, everything in (
            (self.facts, self.topics.facts_filter()),
            (self.settle, self.topics.settle_filter()),
            (self.blocks, self.topics.blocks_filter()),
        ):
            if subject_filter.startswith(everything.removesuffix("*")):
                return stream
        raise ValueError(f"history holds facts, settle and blocks subjects, got {subject_filter!r}")

    def stream_of(self, subject: str) -> str:
        """Return the stream that stores one subject; ValueError for a filter, and for what no stream stores."""
        if not subject.endswith(("*", ">")):
            if subject.startswith(self.topics.transfer_filter().removesuffix("*.*")):
                return self.transfer
            return self.history_stream(subject)
        raise ValueError(f"a stored message has one subject, got the filter {subject!r}")

    def all(self) -> tuple[Document, ...]:
        """Return every stream and bucket; a bucket is a stream by another name."""
        return (*self.streams(), *self.buckets())

    def streams(self) -> tuple[Document, ...]:
        """Return the four streams."""
        limits = self.limits
        transfer: Document = {
            **self._common(self.transfer, self.topics.transfer_filter()),
            "retention": "workqueue",
            "discard": "new",
            "discard_new_per_subject": True,
            "max_msgs_per_subject": 1,  # a repeat of a queued or running request is refused by the broker itself
            "max_msgs": limits.transfer_messages_max,
            "max_bytes": limits.transfer_bytes_max,
            "max_age": 600 * _SECOND,  # a request that no destination took in ten minutes serves nobody
            "max_msg_size": REQUEST_LENGTH_MAX_BYTES,
            "allow_msg_ttl": True,
            "duplicate_window": 120 * _SECOND,  # well beyond any retry of a request
        }
        prefix = self.topics.prefix
        facts = self._log(self.facts, self.topics.facts_filter(), f"{prefix}.facts.>", f"{prefix}.live.facts.>")
        settle = self._log(self.settle, self.topics.settle_filter(), f"{prefix}.settle.>", f"{prefix}.live.settle.>")
        blocks = self._log(self.blocks, self.topics.blocks_filter(), f"{prefix}.blocks.>", f"{prefix}.live.blocks.>")
        return (
            transfer,
            {**facts, "max_bytes": limits.facts_bytes_max},
            {**settle, "max_bytes": limits.settle_bytes_max},
            {
                **blocks,
                "max_bytes": limits.blocks_bytes_max,
                "max_msgs_per_subject": BLOCKS_MESSAGES_MAX,
                "max_age": 0,  # what was said of a block holds until a later message unsays it
            },
        )

    def buckets(self) -> tuple[Document, ...]:
        """Return the instance registry (entries expire with the bucket's one time to live) and the epoch counters.

        Both live on disk: a bucket in memory is gone after a broker restart, settings and all, and nobody could
        register any more. Expiry is late by some 0.2 s there, which does not matter at ten seconds.
        """
        ttl = INSTANCE_TTL_S * _SECOND
        return (
            self._bucket(BUCKET_INSTANCES) | {"storage": "file", "max_age": ttl, "duplicate_window": ttl},
            self._bucket(BUCKET_EPOCH) | {"storage": "file", "duplicate_window": 120 * _SECOND},
        )

    def _named(self, name: str) -> str:
        return name if self.topics.prefix == "kv" else f"{self.topics.prefix}_{name}"

    def _common(self, name: str, subject_filter: str) -> Document:
        return {
            "name": name,
            "subjects": [subject_filter],
            "storage": "file",
            "num_replicas": self.limits.replicas,
            "metadata": {"kvbus.schema": "1"},
        }

    def _log(self, name: str, subject_filter: str, source: str, live: str) -> Document:
        return {
            **self._common(name, subject_filter),
            "retention": "limits",
            "discard": "old",
            "max_msgs_per_subject": -1,
            "max_age": self.limits.keep_hours * _HOUR,
            "max_msg_size": EVENT_LENGTH_MAX_BYTES,
            "compression": "s2",
            "republish": {"src": source, "dest": live},
            "duplicate_window": 600 * _SECOND,  # an outbox may retry through a broker outage of minutes
        }

    def _bucket(self, bucket: str) -> Document:
        name = self.bucket(bucket)
        return {
            "name": f"KV_{name}",
            "subjects": [f"$KV.{name}.>"],
            "retention": "limits",
            "discard": "new",
            "max_msgs_per_subject": 1,
            "max_bytes": 8 * _MIB,  # some thousand instances at about 1 KiB each
            "max_msg_size": EVENT_LENGTH_MAX_BYTES,
            "allow_direct": True,
            _DOOR: False,  # one message with such a header would purge everybody's keys
            "deny_delete": True,
            "num_replicas": self.limits.replicas,
            "metadata": {"kvbus.schema": "1"},
        }


def drift(wanted: Mapping[str, object], found: Mapping[str, object]) -> Iterator[tuple[str, object, object]]:
    """Yield (field, found, expected) for each field that differs; what the broker leaves out is false, zero or none.

    A log may be kept for longer than was asked for: that is an operator's choice, and takes nothing from anybody.
    """
    for name, expected in wanted.items():
        actual = found.get(name)
        if name in SIZED_BY_OPERATOR or actual == expected or (not actual and not expected):
            continue
        if name == "max_age" and _age_of_log(wanted) and _age_of_log(wanted) <= _age_of_log(found):
            continue
        if isinstance(expected, Mapping) and isinstance(actual, Mapping):
            actual = {key: actual.get(key) for key in expected}  # a newer broker adds fields of its own
            if actual == expected:
                continue
        yield name, actual, expected


def amended(wanted: Document, found: Document) -> Document | None:
    """Return an asset's configuration with what may be changed where it stands, None where nothing has to be.

    To make the asset anew would lose what it holds, and neither change drops anything. Older versions of kvbus left a
    door open that none of them used: it is shut. And a log is kept for as long as an operator asks, if that is longer;
    one that is kept for less than kvbus needs was not made by kvbus, and stays.
    """
    changes: Document = {}
    if found.get(_DOOR) and wanted.get(_DOOR) is False:
        changes[_DOOR] = False
    if KEEP_HOURS_MIN * _HOUR <= _age_of_log(found) < _age_of_log(wanted):
        changes["max_age"] = wanted["max_age"]
    return {**found, **changes} if changes else None


def _age_of_log(stream: Mapping[str, object]) -> int:
    """Return for how long the facts or the settle log are kept; 0 of any other stream, and where there is no bound."""
    age = stream.get("max_age") if stream.get("republish") else 0
    return age if isinstance(age, int) else 0


def work_consumer(name: str, subject_filter: str, limits: WorkLimits) -> Document:
    """Return the durable consumer through which one destination takes its requests.

    It has no `backoff`: with one, the broker redelivers after its first step although the work is kept (P19). And it
    has no last delivery: after it the broker would offer the request to nobody, keep its subject taken, and say so once
    to whoever listens at that moment.
    """
    return {
        "durable_name": name,
        "name": name,
        "filter_subject": subject_filter,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": int(limits.ack_wait_s * _SECOND),
        "max_deliver": -1,
        "max_ack_pending": limits.in_flight_max,
    }


def history_consumer(name: str, subject_filter: str, after_sequence: int) -> Document:
    """Return a short-lived consumer that reads a log from after a sequence; it holds nothing and expires by itself."""
    return {
        "name": name,
        "filter_subject": subject_filter,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": after_sequence + 1,
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": 10 * _SECOND,  # several fetches; a reader that died leaves no trace beyond that
    }
