"""Recordings: what the broker holds of both logs, byte for byte, in a file that shows by itself whether it is whole.

A file is a magic word, a header frame, one frame for each stored event, and an end frame with the counts. A frame is
its length and its CRC-32 (u32 each, little-endian), then one msgpack map. A file that was cut off has no end frame, a
bit that flipped fails the checksum, an event that is gone leaves a jump in its log's sequence.
"""

import gzip
import io
import struct
import tarfile
import zlib
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

from kvbus.codec import pack, unpack
from kvbus.commands.lifelines import Run
from kvbus.errors import ConfigError, PeerError
from kvbus.events import BATCH_EVENTS_MAX, EVENT_LENGTH_MAX_BYTES, Event, EventsBatch, UnknownKind, decode, split
from kvbus.topics import Family, Topics
from kvbus.transport import Bus

LOGS = (Family.FACTS, Family.SETTLE)
EVENTS_MAX = 200_000
"""The newest events of each log that are kept when a log is read at once: some 300 MB once decoded."""

FILE_LENGTH_MAX_BYTES = 1 << 30
"""A recording is read into memory at once; a broker's facts log holds as much by default."""

LOGS_NAME = "logs.kvbus.gz"
"""The recording in a dump's archive."""
_GZIP = b"\x1f\x8b"
_MAGIC = b"kvbus recording\n"
_FORMAT = 1
_HEAD = struct.Struct("<II")
_FRAME_LENGTH_MAX_BYTES = EVENT_LENGTH_MAX_BYTES + (4 << 10)  # an event, and what the frame says of it
_PAGE = 1_000


@dataclass(frozen=True, slots=True)
class Stored:
    """One event as a log holds it; `data` is empty for a repeat that the broker stored under the same message id.

    `part` counts from 0 where the log's message holds a batch of `parts` events.
    """

    family: Family
    sequence: int
    subject: str
    data: bytes
    part: int = 0
    parts: int = 1

    @property
    def where(self) -> str:
        """Its place in words."""
        return f"{self.family.value} {self.sequence}{f' part {self.part + 1}' if self.parts > 1 else ''}"

    @property
    def place(self) -> int:
        """Its place in its log, which holds batches of at most so many events."""
        return self.sequence * BATCH_EVENTS_MAX + self.part

    def events(self) -> "Iterator[Stored]":
        """Yield each event of a message that holds a batch; itself where it does not, or cannot be read."""
        try:
            parts = split(self.data)
        except PeerError:
            parts = (self.data,)
        for part, data in enumerate(parts):
            yield Stored(self.family, self.sequence, self.subject, data, part, len(parts))

    def event(self) -> Event:
        """Return the event; PeerError where the bytes hold none, or one that another instance speaks."""
        event = decode(self.data)
        if isinstance(event.body, EventsBatch):
            raise PeerError("it is a batch where one event should stand")
        if isinstance(event.body, UnknownKind):
            raise PeerError("it is of a kind that this version does not know", kind=event.body.kind)
        if self.subject.rpartition(".")[2] != Topics().facts(event.header.i).rpartition(".")[2]:
            raise PeerError("one instance speaks on the subject of another", instance=event.header.i)
        return event


@dataclass(slots=True)
class Record:
    """Stored messages in the order in which they were read.

    `after`: each log's sequence after which the record begins. `runs`: the runs that it is about; None for all that it
    names. `faults`: what is wrong with the file, in words. `end_ns`: when it ended, 0 where it does not say. `begins`:
    each log's sequence after which the log itself began when it was read, since the broker had dropped what was before.
    """

    after: dict[Family, int] = field(default_factory=lambda: dict.fromkeys(LOGS, 0))
    stored: list[Stored] = field(default_factory=list)
    runs: frozenset[Run] | None = None
    faults: list[str] = field(default_factory=list)
    end_ns: int = 0
    begins: dict[Family, int] = field(default_factory=lambda: dict.fromkeys(LOGS, 0))

    def begins_late(self, family: Family) -> bool:
        """Whether one of the logs begins later than with its first message, and the record there."""
        return self.runs is None and self.begins[family] > 0

    def events(self) -> Iterator[Event]:
        """Yield the events that can be read."""
        for stored in self.stored:
            try:
                if stored.data:
                    yield stored.event()
            except PeerError:
                continue

    def since(self, runs: frozenset[Run]) -> "Record":
        """Return what follows from the first event of these runs on; they must have begun within this record."""
        after = {log: max(self.after[log], self.begins[log]) for log in LOGS}
        record = Record(after, runs=runs, faults=list(self.faults), end_ns=self.end_ns)
        begun: set[Family] = set()
        for stored in self.stored:
            if stored.family not in begun and _run_of(stored) in runs:
                begun.add(stored.family)
            if stored.family in begun:
                record.stored.append(stored)
            else:
                record.after[stored.family] = stored.sequence
        return record


class LogTap:
    """Reads both logs as the broker holds them, from their beginning, a page at a time; BusError as the bus has it.

    `begins`: after which sequence each of them begins, as the broker's first message told; 0 while none has come.
    """

    def __init__(self, bus: Bus, topics: Topics) -> None:
        self._bus = bus
        self._filters = {Family.FACTS: topics.facts_filter(), Family.SETTLE: topics.settle_filter()}
        self._last: dict[Family, int] = dict.fromkeys(LOGS, 0)
        self._newest: dict[tuple[Family, Run], int] = {}
        self.begins: dict[Family, int] = dict.fromkeys(LOGS, 0)

    async def more(self) -> AsyncIterator[Stored]:
        """Yield what is there beyond what was read before; within each log in its order."""
        for family, subject_filter in self._filters.items():
            while True:
                page = await self._bus.history(subject_filter, after_sequence=self._last[family], most=_PAGE)
                if page and not self._last[family]:
                    self.begins[family] = page[0].sequence - 1
                for delivery in page:
                    self._last[family] = delivery.sequence
                    stored = Stored(family, delivery.sequence, delivery.subject, delivery.data)
                    for one in self._without_repeat(stored).events():
                        yield one
                if len(page) < _PAGE:
                    break

    async def record(self, record: Record) -> None:
        """Add what is there to a record; of a log that holds more than EVENTS_MAX only the newest stay."""
        kept: dict[Family, deque[Stored]] = {family: deque() for family in LOGS}
        for stored in record.stored:
            kept[stored.family].append(stored)
        async for stored in self.more():
            log = kept[stored.family]
            log.append(stored)
            while log and (len(log) > EVENTS_MAX or log[0].sequence <= record.begins[stored.family]):  # a batch's rest
                record.begins[stored.family] = log.popleft().sequence
        for family, begins in self.begins.items():
            record.begins[family] = max(record.begins[family], begins)
        record.stored = [stored for log in kept.values() for stored in log]

    def _without_repeat(self, stored: Stored) -> Stored:
        """A member stores one message at a time, so a broker that forgot an id stores a repeat right behind it."""
        run = _run_of(stored)
        digest = hash(stored.data)
        if self._newest.get((stored.family, run)) == digest and run[1]:
            return Stored(stored.family, stored.sequence, stored.subject, b"")
        self._newest[stored.family, run] = digest
        return stored


class RecordingWriter:
    """Writes a recording, ConfigError where the file cannot take it; without `end` the file counts as cut off."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._counts: dict[Family, int] = dict.fromkeys(LOGS, 0)
        self._begins: dict[Family, int] = dict.fromkeys(LOGS, 0)

    @classmethod
    def create(cls, path: Path) -> Self:
        """Open a file for a recording, in place of what is there."""
        with _written():
            return cls(path.open("wb"))

    def begin(self, after: Mapping[Family, int] | None = None, runs: frozenset[Run] | None = None) -> None:
        """Write the header; with no `after`, the record begins where the logs begin."""
        document: dict[str, object] = {"format": _FORMAT, "after": _by_name(after or dict.fromkeys(LOGS, 0))}
        if runs is not None:
            document["runs"] = sorted(runs)
        with _written():
            self._file.write(_MAGIC)
        self._frame(document)

    def log_begins(self, begins: Mapping[Family, int]) -> None:
        """Write after which sequences the logs begin, each once and before its first message."""
        for family, sequence in begins.items():
            if sequence > self._begins[family] == self._counts[family] == 0:
                self._begins[family] = sequence
                self._frame({"log": family.value, "begins": sequence})

    def add(self, stored: Stored) -> None:
        """Write one message."""
        self._counts[stored.family] += 1
        log, sequence = stored.family.value, stored.sequence
        frame: dict[str, object] = {"log": log, "sequence": sequence, "subject": stored.subject, "data": stored.data}
        self._frame(frame | ({"part": stored.part, "parts": stored.parts} if stored.parts > 1 else {}))

    def flush(self) -> None:
        """Hand over to the system what was written so far."""
        with _written():
            self._file.flush()

    def end(self, end_ns: int) -> None:
        """Write the end mark and close the file."""
        self._frame({"end": _by_name(self._counts), "end_ns": end_ns})
        self.close()

    def close(self) -> None:
        """Close the file, without an end mark unless it has one; harmless to repeat."""
        with _written():
            self._file.close()

    def _frame(self, document: dict[str, object]) -> None:
        payload = pack(document)
        with _written():
            self._file.write(_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)


@contextmanager
def _written() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"the recording cannot be written: {error}; give another FILE") from error


def write_record(path: Path, record: Record) -> None:
    """Write a whole record to a file; ConfigError where that cannot be."""
    with closing(RecordingWriter.create(path)) as writer:
        writer.begin(record.after, record.runs)
        writer.log_begins(record.begins)
        for stored in record.stored:
            writer.add(stored)
        writer.end(record.end_ns)


def read_record(path: Path) -> Record:
    """Return what a file holds, with all that is wrong with it in `faults`; ConfigError where it is no recording."""
    try:
        if (length_bytes := path.stat().st_size) > FILE_LENGTH_MAX_BYTES:
            raise ConfigError("the recording is too long", length_bytes=length_bytes, most=FILE_LENGTH_MAX_BYTES)
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the recording cannot be read: {error}") from error
    if data.startswith(_GZIP):
        data = _from_archive(data)
    if not data.startswith(_MAGIC):
        raise ConfigError(f"{path} is no recording: make one with `kvbus watch --record FILE` or `kvbus dump`")
    record = Record()
    try:
        _fill(record, _frames(data))
    except PeerError as error:
        record.faults.append(str(error))
    return record


def _from_archive(data: bytes) -> bytes:
    """Return the recording that a dump's archive holds; nothing where there is none in it."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            for entry in archive:
                file = archive.extractfile(entry) if entry.isfile() and entry.name.endswith(LOGS_NAME) else None
                if file is not None:
                    with gzip.open(file) as recording:
                        return recording.read(FILE_LENGTH_MAX_BYTES)
    except (tarfile.TarError, OSError, EOFError, zlib.error):
        return b""
    return b""


def _fill(record: Record, frames: Iterator[dict[str, object]]) -> None:
    header = next(frames, None)
    if header is None or header.get("format") != _FORMAT:
        raise PeerError("the recording has no header of a known format", expected=_FORMAT)
    record.after = _counts(header.get("after"))
    record.runs = _runs(header.get("runs"))
    for frame in frames:
        if "end" in frame:
            told, found = _counts(frame["end"]), dict.fromkeys(LOGS, 0)
            for stored in record.stored:
                found[stored.family] += 1
            if told != found:
                words = ", ".join(f"{told[log]} of {log.value}, it holds {found[log]}" for log in LOGS)
                record.faults.append(f"the end mark counts {words}")
            end_ns = frame.get("end_ns")
            record.end_ns = end_ns if isinstance(end_ns, int) else 0
            if next(frames, None) is not None:
                record.faults.append("something follows the end mark")
            return
        if "begins" in frame:
            _note_beginning(record, frame)
        else:
            record.stored.append(_stored(frame))
    record.faults.append("the recording was cut off: it has no end mark")


def _frames(data: bytes) -> Iterator[dict[str, object]]:
    place = len(_MAGIC)
    while place < len(data):
        start = place + _HEAD.size
        if start > len(data):
            raise PeerError("the recording was cut off within a frame", byte=place)
        length, checksum = _HEAD.unpack_from(data, place)
        payload = data[start : start + length]
        if length > _FRAME_LENGTH_MAX_BYTES:
            raise PeerError("the recording is damaged: no frame is so long", byte=place, length_bytes=length)
        if len(payload) < length:
            raise PeerError("the recording was cut off within a frame", byte=place)
        if zlib.crc32(payload) != checksum:
            raise PeerError("the recording is damaged: a frame does not fit its checksum", byte=place)
        yield unpack(payload, length_max_bytes=_FRAME_LENGTH_MAX_BYTES)
        place = start + length


def _note_beginning(record: Record, frame: dict[str, object]) -> None:
    """A log begins once, and before its first message: nothing that follows could move its beginning."""
    log, sequence = frame.get("log"), frame["begins"]
    if log not in LOGS or type(sequence) is not int or sequence <= 0:
        raise PeerError("the recording says where a log begins, and names no log or no place", fields=sorted(frame)[:8])
    family = Family(str(log))
    if record.begins[family] or any(stored.family is family for stored in record.stored):
        raise PeerError("the recording says in the middle of a log where that begins", log=family.value)
    record.begins[family] = sequence


def _stored(frame: dict[str, object]) -> Stored:
    log, sequence, subject, data = (frame.get(name) for name in ("log", "sequence", "subject", "data"))
    if log not in LOGS or not isinstance(sequence, int) or not isinstance(subject, str) or not isinstance(data, bytes):
        raise PeerError("a frame of the recording holds no stored event", fields=sorted(frame)[:8])
    part, parts = frame.get("part", 0), frame.get("parts", 1)
    if not isinstance(part, int) or not isinstance(parts, int) or not 0 <= part < parts <= BATCH_EVENTS_MAX:
        raise PeerError(
            "a frame of the recording counts its parts wrongly", part=repr(part)[:20], parts=repr(parts)[:20]
        )
    return Stored(Family(str(log)), sequence, subject, data, part, parts)


def _counts(value: object) -> dict[Family, int]:
    if not isinstance(value, dict):
        raise PeerError("the recording's counts must be a map", got=type(value).__name__)
    counts = {log: value.get(log.value) for log in LOGS}
    if not all(type(count) is int and count >= 0 for count in counts.values()):
        raise PeerError("the recording's counts must be numbers from 0 on", got=repr(counts)[:200])
    return {log: int(str(count)) for log, count in counts.items()}


def _runs(value: object) -> frozenset[Run] | None:
    if value is None:
        return None
    try:
        return frozenset((str(instance), str(member), int(epoch)) for instance, member, epoch in _rows(value))
    except (ValueError, TypeError, OverflowError) as error:
        raise PeerError("the recording's runs must be rows of instance, member, epoch") from error


def _rows(value: object) -> list[tuple[object, object, int]]:
    if not isinstance(value, list) or not all(isinstance(row, list) and len(row) == 3 for row in value):
        raise PeerError("the recording's runs must be rows of three", got=type(value).__name__)
    return [(row[0], row[1], int(row[2])) for row in value]


def _by_name(counts: Mapping[Family, int]) -> dict[str, object]:
    return {family.value: count for family, count in counts.items()}


def _run_of(stored: Stored) -> Run:
    """Return who speaks in a message, be it an event or a batch; nobody where it cannot be read."""
    try:
        header = decode(stored.data).header
    except PeerError:
        return "", "", 0
    return header.i, header.m, header.e
