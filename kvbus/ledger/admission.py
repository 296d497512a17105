"""Admission: which requests a destination takes. Sources are refused unless listed; repeats and overload are values.

The order of the checks is part of the promise: source, then repeat, then load. A repeat under full load is `deduped`,
and a request that was `skipped_busy` leaves nothing behind, so that it may be tried again at once. Load is what runs,
and what is held without being of use to anybody: quarantined pages count as well (R18, R20).
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, NamedTuple

from kvbus.ledger.holding import HoldingCost


class Verdict(StrEnum):
    """The destination's answer to one request."""

    ACCEPTED = "accepted"
    DEDUPED = "deduped"
    SKIPPED_BUSY = "skipped_busy"
    REFUSED = "refused"
    ADOPTED = "adopted"
    """The same request, delivered again by the queue: it joins its own transfer (P22). Never sent to a requester."""


Ground = Literal["source", "stopping", "not_leading", "bus_unavailable", "waited", "other"]
"""Why a request was refused, as one word, for counting: the source, or what this member could not do just then."""


class Admission(NamedTuple):
    """A verdict, the reason for people, and the transfer that the request joined or started, if any."""

    verdict: Verdict
    reason: str = ""
    transfer: str = ""


@dataclass(slots=True)
class _Entry:
    transfer: str
    request_id: str
    accepted_at: float
    running: bool = True
    forgotten: bool = False
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """Counters since start, and what is remembered now. `fired` is settled + failed + inflight at every instant.

    `grounds` counts refusals by their word; together they are `refused`.
    """

    fired: int
    settled: int
    failed: int
    deduped: int
    skipped_busy: int
    refused: int
    inflight: int
    seen: int
    grounds: Mapping[Ground, int]


class AdmissionGate:
    """Answers each request once; only ACCEPTED takes a place, and a failed transfer gives it back for a retry.

    `holding` says what is held in vain; with `pages_kept_max` pages of that or more, new requests are skipped.
    """

    def __init__(
        self,
        *,
        instance: str,
        source_allow: Collection[str],
        inflight_max: int,
        dedup_ttl_s: float,
        entries_max: int,
        holding: Callable[[], HoldingCost] | None = None,
        pages_kept_max: int = 0,
    ) -> None:
        self._instance = instance
        self._source_allow = frozenset(source_allow)
        self._inflight_max = inflight_max
        self._dedup_ttl_s = dedup_ttl_s
        self._entries_max = entries_max
        self._holding = holding
        self._pages_kept_max = pages_kept_max
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._by_content: dict[bytes, str] = {}
        # By the requester's own event id, also of what failed: the queue may offer that again, but it never runs twice.
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._inflight = 0
        self._grounds: dict[Ground, int] = {}
        self._counts = dict.fromkeys(("fired", "settled", "failed", "deduped", "skipped_busy", "refused"), 0)

    def repeat(self, request_hash: str, *, request_id: str, source: str, now: float) -> Admission | None:
        """Answer a request that is refused for its source, or that has been answered before; None for a new one."""
        if refusal := self._source_refusal(source):
            return self.refuse(refusal, "source")
        if ended := self._ended.get(request_id):
            return Admission(Verdict.ADOPTED, "delivered again, and ended", ended)
        self._forget_expired(now)
        entry = self._entries.get(request_hash)
        if entry is None:
            return None
        if entry.request_id == request_id:
            return Admission(Verdict.ADOPTED, "delivered again", entry.transfer)
        self._counts["deduped"] += 1
        state = "is running" if entry.running else "has settled within the dedup time"
        return Admission(Verdict.DEDUPED, f"the same request {state}", entry.transfer)

    def admit(self, request_hash: str, *, request_id: str, source: str, transfer: str, now: float) -> Admission:
        """Answer a request that asks to become `transfer`."""
        known = self.repeat(request_hash, request_id=request_id, source=source, now=now)
        if known is not None:
            return known
        if reason := self._load():
            self._counts["skipped_busy"] += 1
            return Admission(Verdict.SKIPPED_BUSY, reason)
        self._make_room()
        self._entries[request_hash] = _Entry(transfer, request_id, now)
        self._inflight += 1
        self._counts["fired"] += 1
        return Admission(Verdict.ACCEPTED, "", transfer)

    def refuse(self, reason: str, ground: Ground = "other") -> Admission:
        """Count a refusal that was decided elsewhere (an unknown source, a prompt that fits nothing)."""
        self._counts["refused"] += 1
        self._grounds[ground] = self._grounds.get(ground, 0) + 1
        return Admission(Verdict.REFUSED, reason)

    def same_content(self, request_hash: str, last_name: bytes) -> str | None:
        """Note a request's last page name, now that it has tokens; return the transfer that already runs for it.

        Two prompts may be worded differently and tokenize alike; the second then joins the first.
        """
        other_hash = self._by_content.get(last_name)
        other = self._entries.get(other_hash) if other_hash else None
        if other_hash != request_hash and other is not None and other.running:
            return other.transfer
        entry = self._entries.get(request_hash)
        if entry is not None:
            entry.content = last_name
            self._by_content[last_name] = request_hash
        return None

    def ended(self, request_hash: str, *, settled: bool) -> None:
        """Give the place of a running transfer back; one that did not settle is forgotten and may be retried."""
        entry = self._entries.get(request_hash)
        if entry is None or not entry.running:
            return
        entry.running = False
        self._ended[entry.request_id] = entry.transfer
        if len(self._ended) > self._entries_max:
            self._ended.popitem(last=False)
        self._inflight -= 1
        self._counts["settled" if settled else "failed"] += 1
        if not settled or not self._dedup_ttl_s or entry.forgotten:
            self._drop(request_hash)

    @property
    def fired(self) -> int:
        """How many were admitted so far."""
        return self._counts["fired"]

    @property
    def inflight(self) -> int:
        """How many run now."""
        return self._inflight

    def forget_settled(self) -> None:
        """Let requests that have settled run again, and those that run once they have: all names were forgotten."""
        for entry in self._entries.values():
            entry.forgotten = True
        for request_hash in [key for key, entry in self._entries.items() if not entry.running]:
            self._drop(request_hash)

    def statistics(self) -> AdmissionStatistics:
        """Return the counters as a frozen record."""
        seen, grounds = len(self._entries), MappingProxyType(dict(self._grounds))
        return AdmissionStatistics(**self._counts, inflight=self._inflight, seen=seen, grounds=grounds)

    def _load(self) -> str:
        """Return why there is no place for another transfer now, or ""."""
        if self._inflight >= self._inflight_max:
            return f"{self._inflight} transfers are running, at most {self._inflight_max}: try again later"
        return self._holding().refusal(self._pages_kept_max) if self._holding else ""

    def _source_refusal(self, source: str) -> str | None:
        if source == self._instance:
            return f"source {source!r} is this instance itself"
        if not self._source_allow:
            return f"{self._instance!r} allows no source: start it with --allow NAME for each (source_allow)"
        if source not in self._source_allow:
            return f"source {source!r} is not among those that {self._instance!r} allows (--allow {source})"
        return None

    def _forget_expired(self, now: float) -> None:
        """Drop ended entries past their time; acceptance order is expiry order, so the oldest stand first."""
        expired: list[str] = []
        for request_hash, entry in self._entries.items():
            if now - entry.accepted_at < self._dedup_ttl_s:
                break
            if not entry.running:  # a running request is refused by its claim, however long it takes (P21)
                expired.append(request_hash)
        for request_hash in expired:
            self._drop(request_hash)

    def _make_room(self) -> None:
        if len(self._entries) >= self._entries_max:
            oldest = next((key for key, entry in self._entries.items() if not entry.running), None)
            if oldest is not None:  # running ones are bounded by the in-flight cap, and never evicted (contract 50)
                self._drop(oldest)

    def _drop(self, request_hash: str) -> None:
        entry = self._entries.pop(request_hash)
        if self._by_content.get(entry.content) == request_hash:
            del self._by_content[entry.content]
