"""Streams, work queue and buckets as users of a bus call them: measured first, then said to JetStream."""

from collections.abc import Mapping, Sequence

from kvbus.bus_jetstream import JetStream
from kvbus.transport import Delivery, Entry, Work


class StreamCalls:
    """One half of `kvbus.transport.Bus`; the bus that inherits it sets the fields and measures messages."""

    _streams: JetStream
    _prefix: str

    def _check(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Raise BusError where a message is too long for its subject."""
        raise NotImplementedError

    async def take_work(self, subject_filter: str, *, consumer: str, most: int, wait_s: float) -> Sequence[Work]:
        """Take up to `most` requests from the work queue; empty when none came within the wait, outages included."""
        return await self._streams.take_work(subject_filter, consumer, most, wait_s)

    async def queued(self, subject_filter: str) -> int:
        """Return how many requests of a filter the work queue holds, waiting and running."""
        return await self._streams.queued(subject_filter)

    async def history(self, subject_filter: str, *, after_sequence: int = 0, most: int = 10_000) -> Sequence[Delivery]:
        """Read stored messages of a facts or settle subject or filter, oldest first, from after a stream sequence.

        Fewer than `most` means that the end was reached; whatever keeps it from knowing that is a BusError.
        """
        return await self._streams.history(subject_filter, after_sequence, most)

    async def last(self, subject: str) -> Delivery | None:
        """Return the newest stored message of one subject; None where there is none any more."""
        return await self._streams.last(subject)

    async def log_end(self, subject_filter: str) -> int:
        """Return the sequence of the newest message that a log's stream ever held; 0 where it held none yet."""
        return await self._streams.log_end(subject_filter)

    async def get(self, bucket: str, key: str) -> Entry | None:
        """Return a bucket's value, or None where there is none (or it expired)."""
        return await self._streams.get(bucket, key)

    async def put(self, bucket: str, key: str, value: bytes) -> None:
        """Store a value whatever stands there; it lives as long as the bucket's time to live says."""
        self._check(f"{self._prefix}.bucket", value)
        await self._streams.put(bucket, key, value)

    async def compare_and_set(self, bucket: str, key: str, value: bytes, *, revision: int) -> int:
        """Store only if the key's revision is still this one (0: does not exist); return its new one, else 0.

        After a BusError it may or may not have been stored: read the key.
        """
        self._check(f"{self._prefix}.bucket", value)
        return await self._streams.compare_and_set(bucket, key, value, revision)

    async def keys(self, bucket: str) -> Sequence[str]:
        """Return the bucket's keys, sorted."""
        return await self._streams.keys(bucket)

    async def ensure_assets(self) -> None:
        """Create missing streams and buckets; ConfigError where an existing one has another shape. Deletes nothing."""
        await self._streams.ensure_assets()
