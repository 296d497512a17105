"""What kvbus asks of the broker's JetStream, in the broker's own words; knows no client, only how to ask and to fetch.

JetStream is an API over request-reply: JSON to `$JS.API.…`, messages to the subjects of streams, one word to the reply
subject of a taken message. Saying it directly keeps away from the parts of the client that lose messages in silence
(ordered consumers, key watches, asynchronous publishes), and lets an ack outlive the connection it came by.
"""

import asyncio
import base64
import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from kvbus.bus_assets import Assets, Document, WorkLimits, amended, drift, history_consumer, work_consumer
from kvbus.bus_clock import AGE_CERTAIN_S, BrokerClock
from kvbus.bus_guards import Tally, check_key, store_headers
from kvbus.errors import BusError, ConfigError
from kvbus.transport import Delivery, Entry, NotStored, Stored, Work

CALL_S = 5.0
"""A round trip to a living broker takes milliseconds; this long only while a cluster elects a leader."""
FETCH_S = 2.0
"""One try of a store, or of a pull that reads history."""
PULL_S = 6.0
"""A pull for work ends with its connection, but does not notice that a cluster has another leader."""

_TRIES_S = (0.5, 1.0, CALL_S - 1.5)  # a busy broker has time for the last one; a new leader is found by the others
_AGE_ASK_S = 1.0  # the broker's time, with requests in hand whose own time runs
_PAUSE_S = 0.2  # between tries while the broker is away: as soon as the quickest reconnect
_REST_S = 0.005  # what is there comes within a round trip; where the in-flight cap forbids it, nothing comes
_HISTORY_BATCH = 128  # of at most 256 KiB each: 32 MiB, far below the client's limit, past which it drops in silence

# The broker's error codes.
_NO_MESSAGE, _NO_STREAM, _REFUSED_BY_STREAM = 10037, 10059, 10077
_WRONG_LAST_SEQUENCE = frozenset({10071, 10164})
_NO_ROOM = frozenset({10023, 10028, 10047})


@dataclass(frozen=True, slots=True)
class Fetched:
    """A message that a consumer delivered; `reply` is where its ack goes, `pending` what the consumer still holds.

    `stored_unix_s` is the broker's own stamp.
    """

    delivery: Delivery
    attempt: int
    consumer_sequence: int
    pending: int
    reply: str
    stored_unix_s: float = 0.0


class Door(Protocol):
    """The way to the broker. All raise BusError at once while there is no connection."""

    @property
    def closing(self) -> bool:
        """Whether the bus has ended."""

    async def ask(self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, wait_s: float) -> bytes:
        """Ask; TimeoutError if no answer comes, BusError where nobody could give one."""

    async def tell(self, subject: str, data: bytes) -> None:
        """Send without an answer."""

    async def fetch(self, stream: str, consumer: str, *, most: int, wait_s: float) -> Sequence[Fetched]:
        """Take what a consumer has; TimeoutError if nothing came, BusError where the consumer is gone."""

    async def leave(self, stream: str, consumer: str) -> None:
        """Stop listening for what a consumer delivers."""


class RefusedError(BusError):
    """JetStream refused; `code` is its own error code."""

    def __init__(self, asked: str, error: Mapping[str, object]) -> None:
        self.code = error.get("err_code")
        self.reason = str(error.get("description"))
        super().__init__("JetStream refused", asked=asked, reason=self.reason, code=self.code)


class JetStream:
    """Streams, work queue, history and buckets of one deployment."""

    def __init__(self, door: Door, assets: Assets, work: WorkLimits, tally: Tally) -> None:
        self._door = door
        self._assets = assets
        self._work = work
        self._tally = tally
        self._consumers_made: set[str] = set()
        self._taking: dict[str, asyncio.Lock] = {}
        self._clock = BrokerClock()

    async def store(
        self, subject: str, data: bytes, message_id: str, wait_s: float, after: int | None
    ) -> Stored | NotStored:
        """Store and await the ack; asks again with the same id while the wait lasts."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + wait_s
        headers = store_headers(message_id, after)
        while (left_s := ends_at - loop.time()) > 0:
            try:
                answer = await self._ask(subject, data, headers, min(left_s, FETCH_S))
            except TimeoutError:
                self._tally.count("store_ack_late")
                continue
            except RefusedError as error:
                if error.code == _REFUSED_BY_STREAM:
                    return NotStored("pending" if "per subject" in error.reason else "full")
                if error.code in _WRONG_LAST_SEQUENCE and after is not None:
                    return await self._own(subject, message_id, after) or NotStored("moved")
                raise
            return Stored(cast("int", answer["seq"]), bool(answer.get("duplicate")))
        raise BusError("the broker did not confirm in time; store again with the same id", subject=subject)

    async def _own(self, subject: str, message_id: str, after: int) -> Stored | None:
        """Return where our own message stands, if it is the one that followed.

        Asked again after a lost ack, a broker with several replicas says "duplicate", one with a single replica that
        the subject has moved: by our own message, which is no refusal.
        """
        message = await self._message(self._assets.stream_of(subject), {"seq": after + 1, "next_by_subj": subject})
        if message is None or _message_id(message) != message_id:
            return None
        return Stored(cast("int", message["seq"]), duplicate=True)

    # ------------------------------------------------------------------------------------------------ work queue

    async def take_work(self, subject_filter: str, consumer: str, most: int, wait_s: float) -> Sequence[Work]:
        """Take requests; empty when none came within the wait, outages included."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + wait_s
        # One fetch at a time per consumer: two on one inbox would read each other's status messages.
        async with self._taking.setdefault(consumer, asyncio.Lock()):
            while (left_s := ends_at - loop.time()) > 0 and not self._door.closing:
                try:
                    await self._ensure_consumer(subject_filter, consumer)
                    fetched = await self._fetch_work(consumer, most, min(left_s, PULL_S))
                    return await self._aged(fetched, subject_filter, consumer)
                except TimeoutError:
                    continue
                except BusError as error:
                    # Disconnected, or the consumer is gone with a store that lost its state: make it anew.
                    self._tally.complain("take_work_failed", error)
                    self._consumers_made.discard(consumer)
                    await asyncio.sleep(min(left_s, _PAUSE_S))
        return []

    async def queued(self, subject_filter: str) -> int:
        """Count what the stream holds; it lists up to 100,000 subjects at once, ten times what it may hold."""
        answer = await self._api(f"STREAM.INFO.{self._assets.transfer}", {"subjects_filter": subject_filter})
        return sum((cast("dict[str, dict[str, int] | None]", answer["state"]).get("subjects") or {}).values())

    async def _fetch_work(self, consumer: str, most: int, wait_s: float) -> Sequence[Fetched]:
        """Wait for one message, then take the others that are there: a pull for many waits until it has many."""
        stream = self._assets.transfer
        fetched = list(await self._door.fetch(stream, consumer, most=1, wait_s=wait_s))
        others = min(most - 1, fetched[0].pending)
        if others > 0:
            with contextlib.suppress(TimeoutError, BusError):  # what is in hand is returned whatever comes of the rest
                fetched += await self._door.fetch(stream, consumer, most=others, wait_s=_REST_S)
        return fetched

    async def _aged(self, fetched: Sequence[Fetched], subject_filter: str, consumer: str) -> Sequence[Work]:
        """Say of each how long it has waited; where that may matter, by the time that the broker tells now."""
        now = asyncio.get_running_loop().time
        taken_at = now()
        if any(self._clock.age_s(item.stored_unix_s, taken_at) > AGE_CERTAIN_S for item in fetched):
            try:
                await self._make_work_consumer(subject_filter, consumer, (_AGE_ASK_S,))
            except BusError as error:  # what is in hand is returned whatever comes of this; nothing is held against it
                self._tally.complain("broker_time_unknown", error)
                return [TakenWork(self._door, item, 0.0) for item in fetched]
        return [TakenWork(self._door, item, self._clock.age_s(item.stored_unix_s, taken_at)) for item in fetched]

    async def _ensure_consumer(self, subject_filter: str, consumer: str) -> None:
        if consumer not in self._consumers_made:
            await self._make_work_consumer(subject_filter, consumer, _TRIES_S)
            self._consumers_made.add(consumer)

    async def _make_work_consumer(self, subject_filter: str, consumer: str, tries_s: Sequence[float]) -> None:
        """Make it, or find that it is there as it should be; the answer bears the time at the queue's broker."""
        wanted = work_consumer(consumer, subject_filter, self._work)
        answer = await self._make_consumer(self._assets.transfer, wanted, tries_s)
        self._clock.note(answer, asyncio.get_running_loop().time())

    # --------------------------------------------------------------------------------------------------- history

    async def history(self, subject_filter: str, after_sequence: int, most: int) -> Sequence[Delivery]:
        """Read a log from after a sequence; BusError wherever the end of what came is not known to be the end."""
        stream = self._assets.history_stream(subject_filter)
        name = f"history-{secrets.token_hex(8)}"
        made = await self._make_consumer(stream, history_consumer(name, subject_filter, after_sequence))
        left = cast("int", made.get("num_pending", 0))
        deliveries: list[Delivery] = []
        try:
            while left and len(deliveries) < most:
                batch = min(_HISTORY_BATCH, left, most - len(deliveries))
                for item in await self._door.fetch(stream, name, most=batch, wait_s=FETCH_S):
                    if item.consumer_sequence != len(deliveries) + 1:
                        raise BusError("history was cut on its way; read it again", stream=stream)
                    deliveries.append(item.delivery)
                    left = item.pending
        except TimeoutError as error:
            raise BusError("history stopped in the middle; read it again", stream=stream) from error
        finally:
            await self._forget_history(stream, name)
        return deliveries

    async def last(self, subject: str) -> Delivery | None:
        """Read from the stream's leader, never from a replica that lags: a fence stands on it."""
        message = await self._message(self._assets.stream_of(subject), {"last_by_subj": subject})
        return None if message is None else Delivery(subject, _data(message), cast("int", message["seq"]))

    async def log_end(self, subject_filter: str) -> int:
        """Ask the stream's leader where its last sequence stands; nothing of what it holds is read."""
        answer = await self._api(f"STREAM.INFO.{self._assets.history_stream(subject_filter)}")
        return cast("int", cast("Document", answer["state"])["last_seq"])

    async def _message(self, stream: str, which: Document) -> Document | None:
        try:
            return cast("Document", (await self._api(f"STREAM.MSG.GET.{stream}", which))["message"])
        except RefusedError as error:
            if error.code == _NO_MESSAGE:
                return None
            raise

    async def _forget_history(self, stream: str, name: str) -> None:
        try:
            await self._door.leave(stream, name)
            await self._api(f"CONSUMER.DELETE.{stream}.{name}")
        except BusError:
            self._tally.count("history_consumer_left")  # it expires by itself

    # --------------------------------------------------------------------------------------------------- buckets

    async def get(self, bucket: str, key: str) -> Entry | None:
        """Read from the stream's leader, never from a replica that lags: a compare-and-set stands on it."""
        stream, subject = self._key_subject(bucket, key)
        message = await self._message(stream, {"last_by_subj": subject})
        return None if message is None else Entry(key, _data(message), cast("int", message["seq"]))

    async def put(self, bucket: str, key: str, value: bytes) -> None:
        """Store whatever stands there."""
        _, subject = self._key_subject(bucket, key)
        await self._call(subject, value, None, tries_s=_TRIES_S)  # the same once more, where both came through

    async def compare_and_set(self, bucket: str, key: str, value: bytes, revision: int) -> int:
        """Store if the key's revision is still this one; return the new one, else 0."""
        _, subject = self._key_subject(bucket, key)
        try:
            answer = await self._call(subject, value, {"Nats-Expected-Last-Subject-Sequence": str(revision)})
        except RefusedError as error:
            if error.code in _WRONG_LAST_SEQUENCE:
                return 0
            raise
        return cast("int", answer["seq"])

    async def keys(self, bucket: str) -> Sequence[str]:
        """List from the stream's state; the client's way is a key watch."""
        name = self._assets.bucket(bucket)
        head = f"$KV.{name}."
        answer = await self._api(f"STREAM.INFO.KV_{name}", {"subjects_filter": f"{head}>"})
        subjects = cast("dict[str, dict[str, int] | None]", answer["state"]).get("subjects") or {}
        return sorted(subject.removeprefix(head) for subject in subjects)

    def _key_subject(self, bucket: str, key: str) -> tuple[str, str]:
        check_key(key)
        name = self._assets.bucket(bucket)
        return f"KV_{name}", f"$KV.{name}.{key}"

    # ---------------------------------------------------------------------------------------------------- assets

    async def ensure_assets(self) -> None:
        """Create what is missing and compare what is there."""
        for wanted in self._assets.all():
            name = str(wanted["name"])
            try:
                answer = await self._api(f"STREAM.INFO.{name}")
            except RefusedError as error:
                if error.code != _NO_STREAM:
                    raise
                answer = await self._create(name, wanted)
            if changed := amended(wanted, cast("Document", answer["config"])):
                answer = await self._api(f"STREAM.UPDATE.{name}", changed)
            for field, found, expected in drift(wanted, cast("Document", answer["config"])):
                raise ConfigError(
                    "an asset in the broker has another shape; use another prefix, or remove it if nobody needs it",
                    stream=name,
                    field=field,
                    found=found,
                    expected=expected,
                )

    async def _create(self, name: str, wanted: Document) -> Document:
        try:
            return await self._api(f"STREAM.CREATE.{name}", wanted)
        except RefusedError as error:
            if error.code in _NO_ROOM:
                raise ConfigError(
                    "the broker has no room for a stream; give it more storage, or lower the limits",
                    stream=name,
                    max_bytes=wanted.get("max_bytes"),
                    reason=error.reason,
                ) from error
            raise

    async def _make_consumer(self, stream: str, wanted: Document, tries_s: Sequence[float] = _TRIES_S) -> Document:
        subject = f"CONSUMER.CREATE.{stream}.{wanted['name']}.{wanted['filter_subject']}"
        return await self._api(subject, {"stream_name": stream, "config": wanted}, tries_s)

    async def _api(
        self, subject: str, document: Document | None = None, tries_s: Sequence[float] = _TRIES_S
    ) -> Document:
        """Ask what may be asked twice, and do so: a cluster that elects a leader loses the question in silence."""
        data = json.dumps(document).encode() if document else b""
        return await self._call(f"$JS.API.{subject}", data, None, tries_s=tries_s)

    async def _call(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None, tries_s: Sequence[float] = (CALL_S,)
    ) -> Document:
        for wait_s in tries_s:
            with contextlib.suppress(TimeoutError):
                return await self._ask(subject, data, headers, wait_s)
        raise BusError("JetStream did not answer in time", asked=subject, waited_s=sum(tries_s))

    async def _ask(self, subject: str, data: bytes, headers: Mapping[str, str] | None, wait_s: float) -> Document:
        answer = cast("Document", json.loads(await self._door.ask(subject, data, headers=headers, wait_s=wait_s)))
        error = cast("dict[str, object] | None", answer.get("error"))
        if error:
            raise RefusedError(subject, error)
        return answer


class TakenWork:
    """A request taken from the work queue; see `kvbus.transport.Work`."""

    def __init__(self, door: Door, item: Fetched, waited_s: float) -> None:
        self._door = door
        self._item = item
        self.waited_s = waited_s
        self._ended = False

    @property
    def delivery(self) -> Delivery:
        """The message, with its sequence in the stream."""
        return self._item.delivery

    @property
    def attempt(self) -> int:
        """1 for the first delivery."""
        return self._item.attempt

    async def keep(self) -> None:
        """Push the broker's ack wait out, confirmed; harmless if it comes late."""
        try:
            await self._door.ask(self._item.reply, b"+WPI", wait_s=FETCH_S)
        except TimeoutError as error:
            raise BusError("the broker did not confirm a sign of life", subject=self.delivery.subject) from error

    async def finish(self) -> None:
        """Take the message off the queue, confirmed; after a BusError call it again, it may or may not have come."""
        await self._end(b"+ACK")

    async def give_back(self, delay_s: float) -> None:
        """Let the queue offer the message again after a delay, confirmed."""
        await self._end(b"-NAK " + json.dumps({"delay": int(delay_s * 1e9)}).encode())

    async def _end(self, word: bytes) -> None:
        if self._ended:
            raise BusError("this work has ended; a second ack could end another's", subject=self.delivery.subject)
        try:
            await self._door.ask(self._item.reply, word, wait_s=FETCH_S)
        except TimeoutError as error:
            raise BusError("the broker did not confirm the ack in time", subject=self.delivery.subject) from error
        self._ended = True


def _data(message: Document) -> bytes:
    return base64.b64decode(cast("str", message.get("data") or ""))


def _message_id(message: Document) -> str:
    """Return the id in a stored message's headers, empty where it has none."""
    lines = base64.b64decode(cast("str", message.get("hdrs") or "")).decode(errors="replace").split("\r\n")
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Nats-Msg-Id:")), "")
