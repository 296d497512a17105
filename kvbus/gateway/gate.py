"""The gate of one instance: repeats, the cap, and the published counters. Synchronous; time is an argument.

A request first takes a place (`asking`) while its destination is asked. Only when that takes it on does it count as
fired, so no counter is ever taken back, and fired = transferred + failed + inflight holds at every instant. Every call
costs the same however much is remembered.
"""

from collections import OrderedDict, deque
from dataclasses import asdict, dataclass
from typing import Literal

from kvbus.events import TransferOutcome
from kvbus.gateway.records import Record, Status


@dataclass(frozen=True, slots=True)
class GateStatistics:
    """The published counters; all but the last three only ever grow."""

    fired: int = 0
    transferred: int = 0
    failed: int = 0
    deduped: int = 0
    skipped_busy: int = 0
    inflight: int = 0
    seen: int = 0
    max_inflight: int = 0

    def __add__(self, other: "GateStatistics") -> "GateStatistics":
        mine, theirs = asdict(self), asdict(other)
        return GateStatistics(**{name: count + theirs[name] for name, count in mine.items()})


@dataclass(frozen=True, slots=True)
class Passed:
    """What the gate says to a request: a new one has a place now, a repeat joins its record, a busy gate keeps none."""

    word: Literal["new", "repeat", "busy"]
    record: Record | None = None


class TransferGate:
    """Remembers requests by hash: those that run, and those that ended well within the dedup time.

    A request that failed is remembered for those who ask for it, and no longer stands in the way of a retry.
    """

    def __init__(self, *, inflight_max: int, dedup_ttl_s: float, entries_max: int) -> None:
        self._inflight_max = inflight_max
        self._dedup_ttl_s = dedup_ttl_s
        self._entries_max = entries_max
        self._entries: dict[str, Record] = {}
        self._by_age: deque[Record] = deque()  # in order of acceptance, which is that of expiry
        self._latest: OrderedDict[str, Record] = OrderedDict()
        self._asking = 0
        self._counts = dict.fromkeys(("fired", "transferred", "failed", "deduped", "skipped_busy"), 0)
        self._inflight = 0

    def __len__(self) -> int:
        """How many requests a repeat may join."""
        return len(self._entries)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is asked and nothing that was fired runs."""
        return not self._asking and not self._inflight

    def enter(self, record: Record) -> Passed:
        """Answer a request that came at its record's time: a repeat before anything else, then load."""
        self._expire(record.accepted_at)
        known = self._entries.get(record.request_hash)
        if known is not None:
            return Passed("repeat", known)
        if self._inflight + self._asking >= self._inflight_max:
            return Passed("busy")
        self._make_room()
        self._entries[record.request_hash] = record
        self._by_age.append(record)
        self._asking += 1
        return Passed("new", record)

    def repeated(self, record: Record) -> None:
        """Count a repeat that joined a request."""
        record.repeats += 1
        self._counts["deduped"] += 1

    def was_busy(self) -> None:
        """Count a request for which there was no place, here or at the destination."""
        self._counts["skipped_busy"] += 1

    def fire(self, record: Record, *, transfer: str = "", queued: bool = False) -> None:
        """The destination, or its queue, has taken a request on: it counts from now on."""
        self._asking -= 1
        self._inflight += 1
        self._counts["fired"] += 1
        record.status = "queued" if queued else "running"
        record.transfer = transfer
        self._show(record)

    def withdraw(self, record: Record) -> None:
        """Forget a request that the destination did not take on: nothing is counted, and it may be tried at once."""
        self._asking -= 1
        self._drop(record)

    def end(self, record: Record, status: Status, *, reason: str = "", outcome: TransferOutcome | None = None) -> None:
        """End a request that was fired, once. One that did not come about no longer stands in the way of a retry."""
        if record.ended:
            return
        record.status, record.reason, record.outcome = status, reason, outcome
        self._inflight -= 1
        self._counts["transferred" if status == "transferred" else "failed"] += 1
        if status != "transferred" or record.forget_at_end or not self._dedup_ttl_s:
            self._drop(record)

    def show(self, record: Record) -> None:
        """Remember, for those who ask, a request that others made."""
        self._show(record)

    def left_open(self, member: str, epoch: int) -> list[Record]:
        """Return what others made and a member took on in another run than this, and whose end was not told."""
        return [
            record
            for record in self._latest.values()
            if not record.ours and not record.ended and record.member == member and record.epoch != epoch
        ]

    def find(self, request_hash: str) -> Record | None:
        """Return the latest request of a hash, ended or not."""
        return self._entries.get(request_hash) or self._latest.get(request_hash)

    def forget_ended(self) -> None:
        """Let what has been brought be brought again: the destination has forgotten its cache."""
        for record in list(self._entries.values()):
            if record.ended:
                self._drop(record)
            else:
                record.forget_at_end = True

    def statistics(self, now: float) -> GateStatistics:
        """Return the published counters."""
        self._expire(now)
        return GateStatistics(
            **self._counts, inflight=self._inflight, seen=len(self._entries), max_inflight=self._inflight_max
        )

    # ------------------------------------------------------------------------------------------------------- inside

    def _expire(self, now: float) -> None:
        """Drop what is past its time. Each record passes here once, so a request pays for one of those before it."""
        while self._by_age and now - self._by_age[0].accepted_at >= self._dedup_ttl_s:
            self._retire(self._by_age.popleft())

    def _make_room(self) -> None:
        """Drop the oldest that ended; what runs is bounded by the cap, and waits for its end."""
        while len(self._by_age) >= self._entries_max:
            self._retire(self._by_age.popleft())

    def _retire(self, record: Record) -> None:
        if record.ended:
            self._drop(record)
        else:  # it runs, and a repeat joins it, however long that takes
            record.forget_at_end = True

    def _drop(self, record: Record) -> None:
        """Let a repeat be a new request; only the record's own entry, never that of a later one of its hash."""
        if self._entries.get(record.request_hash) is record:
            del self._entries[record.request_hash]

    def _show(self, record: Record) -> None:
        self._latest[record.request_hash] = record
        self._latest.move_to_end(record.request_hash)
        if len(self._latest) > self._entries_max:
            self._latest.popitem(last=False)
