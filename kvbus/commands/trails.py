"""From a heap of recorded events to one transfer's trail: in order, each once, and found by what a person has at hand.

A person may have a transfer's id, a request's hash, the beginning of either, or a ticket that stood in a log line.
"""

import difflib
import heapq
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvbus.commands.leases import LeaseKey, SettleLogBody, fact_lines, party_keys
from kvbus.events import (
    AttemptMade,
    CancelDecided,
    Event,
    FactsSeen,
    LeaseGranted,
    MadeVisible,
    OutcomeFixed,
    SettleDecided,
    SettleVoided,
    TransferOpened,
    TransferOutcome,
    TransferRequested,
    TransferStep,
    TransferVerdict,
)

PREFIX_MIN = 4
"""Shorter beginnings fit too much to be meant."""
CANDIDATES_MAX = 5

_TICKET = re.compile(r"T(\d{1,19})(?:@(.+))?")

TransferEvent = (
    TransferStep | TransferOutcome | TransferVerdict
    | TransferOpened | SettleDecided | MadeVisible | SettleVoided | CancelDecided
)  # fmt: skip
RequestEvent = TransferStep | TransferOutcome | TransferVerdict | TransferRequested
LeaseRow = LeaseGranted | AttemptMade | OutcomeFixed


@dataclass(slots=True)
class Known:
    """A transfer that some event names."""

    transfer: str
    first_ns: int
    last_ns: int
    request_hash: str = ""
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class NotFound:
    """Why nothing was told, and what may have been meant."""

    wanted: str
    reason: str
    candidates: tuple[Known, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """Which transfer is meant, or, with an empty transfer, which lease that belongs to none; `note` says how."""

    transfer: str
    lease: LeaseKey | None = None
    note: str = ""


def in_order(events: Iterable[Event]) -> list[Event]:
    """Return events by time, each once; within one run of a member its own order stands, whatever clocks say.

    So does the order of one instance's decisions, whichever of its members made them.
    """
    runs: dict[tuple[str, str, int], dict[int, Event]] = {}
    for event in events:
        header = event.header
        runs.setdefault((header.i, header.m, header.e), {}).setdefault(header.s, event)
    queues = [_timed(sorted(run.values(), key=lambda event: event.header.s)) for run in runs.values()]
    return list(_Merge(queues, _decisions_before(event for run in runs.values() for event in run.values())))


_Head = tuple[int, int, int, Event]
"""Time, sequence, number of the queue, event."""


class _Merge:
    """Takes the earliest head of several queues; one that another decision must precede waits for that.

    `before` has the object ids of events, since names would have to be made of each of them.
    """

    def __init__(self, queues: Sequence[Iterator[tuple[int, int, Event]]], before: Mapping[int, int]) -> None:
        self._queues = queues
        self._before = before
        self._awaited = set(before.values())
        self._heads: list[_Head] = []
        self._waiting: dict[int, list[_Head]] = {}

    def __iter__(self) -> Iterator[Event]:
        for number in range(len(self._queues)):
            self._pull(number)
        while self._heads or self._waiting:
            if not self._heads:  # they wait for each other: no log has that order, so time decides
                self._awaited.clear()
                for awaited in list(self._waiting):
                    self._release(awaited)
            head = heapq.heappop(self._heads)
            event = head[3]
            before = self._before.get(id(event))
            if before is not None and before in self._awaited:
                self._waiting.setdefault(before, []).append(head)
                continue
            yield event
            if id(event) in self._awaited:
                self._awaited.discard(id(event))
                self._release(id(event))
            self._pull(head[2])

    def _release(self, awaited: int) -> None:
        for head in self._waiting.pop(awaited, ()):
            heapq.heappush(self._heads, head)

    def _pull(self, number: int) -> None:
        for at_ns, sequence, event in self._queues[number]:
            heapq.heappush(self._heads, (at_ns, sequence, number, event))
            return


def _decisions_before(events: Iterable[Event]) -> dict[int, int]:
    """Return, of each decision that follows one of another run, which one that is: terms grow, numbers count."""
    logs: dict[str, list[Event]] = {}
    for event in events:
        if isinstance(event.body, SettleLogBody):
            logs.setdefault(event.header.i, []).append(event)
    before: dict[int, int] = {}
    for log in logs.values():
        log.sort(key=_place_in_log)
        for first, second in pairwise(log):
            if (first.header.m, first.header.e) != (second.header.m, second.header.e):
                before[id(second)] = id(first)
    return before


def _place_in_log(event: Event) -> tuple[int, int]:
    body = event.body
    return (body.term, body.n) if isinstance(body, SettleLogBody) else (0, 0)


def _timed(run: list[Event]) -> Iterator[tuple[int, int, Event]]:
    """A clock that was set back must not put an event before its own past."""
    latest = 0
    for event in run:
        latest = max(latest, event.header.t)
        yield latest, event.header.s, event


@dataclass(slots=True)
class Index:
    """Who is named in a list of events: transfers, leases and the transfers that they belong to, runs of members."""

    transfers: dict[str, Known] = field(default_factory=dict)
    owners: dict[LeaseKey, str] = field(default_factory=dict)
    last_ns: dict[LeaseKey, int] = field(default_factory=dict)
    runs: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)
    """Instance and member → epoch → time of its last event."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> "Index":
        """Return the index of some events."""
        index = cls()
        for event in events:
            index.add(event)
        return index

    def add(self, event: Event) -> None:
        """Note whom one event names."""
        header, body = event.header, event.body
        self.runs.setdefault((header.i, header.m), {})[header.e] = header.t
        if transfer := transfer_of(event):
            known = self.transfers.setdefault(transfer, Known(transfer, header.t, header.t))
            known.last_ns = header.t
            known.request_hash = known.request_hash or hash_of(event)
            if isinstance(body, TransferOutcome):
                known.outcome = body.outcome
        for key in keys_of(event):
            if transfer or isinstance(body, LeaseGranted):
                self.owners[key] = transfer
            self.owners.setdefault(key, "")
            self.last_ns[key] = header.t

    def newest(self, transfers: Iterable[str]) -> str:
        """Return the one of some transfers that began last."""
        return max(transfers, key=lambda transfer: self.transfers[transfer].first_ns)

    def later_run(self, key: LeaseKey) -> bool:
        """Whether the member of a lease has run under another epoch since: the lease's own process has ended then."""
        epochs = self.runs.get((key.instance, key.member), {})
        last = epochs.get(key.epoch, 0)
        return any(time > last for epoch, time in epochs.items() if epoch != key.epoch)

    # ------------------------------------------------------------------------------------------------------ finding

    def find(self, wanted: str) -> Found | NotFound:
        """Return which transfer or lease is meant; a repeated request's last transfer, a ticket of the last run."""
        if wanted in self.transfers:
            return Found(wanted)
        if match := _TICKET.fullmatch(wanted):
            return self._find_ticket(wanted, int(match[1]), match[2] or "")
        by_hash: dict[str, list[str]] = {}
        for known in self.transfers.values():
            if known.request_hash:
                by_hash.setdefault(known.request_hash, []).append(known.transfer)
        if wanted in by_hash:
            return self._of_request(by_hash[wanted])
        if len(wanted) < PREFIX_MIN:
            return self._not_found(wanted, f"give an id, or at least its first {PREFIX_MIN} characters")
        hits = {transfer for transfer in self.transfers if transfer.startswith(wanted)}
        hashes = [request_hash for request_hash in by_hash if request_hash.startswith(wanted)]
        if len(hashes) == 1 and hits <= set(by_hash[hashes[0]]):
            return self._of_request(by_hash[hashes[0]])
        hits |= {self.newest(by_hash[request_hash]) for request_hash in hashes}
        if len(hits) == 1:
            return Found(hits.pop())
        if hits:
            return NotFound(wanted, f"{len(hits)} transfers begin so: give more of the id", self._newest_first(hits))
        why = "mistyped, older than what the log still holds, or not taken from its queue yet"
        return self._not_found(wanted, f"no recorded event names it: {why}")

    def _of_request(self, transfers: list[str]) -> Found:
        newest = self.newest(transfers)
        earlier = [transfer for transfer in transfers if transfer != newest]
        note = f"the last of {len(transfers)} transfers of this request; before it: {', '.join(earlier)}"
        return Found(newest, note=note if earlier else "")

    def _find_ticket(self, wanted: str, ticket: int, instance: str) -> Found | NotFound:
        newest: dict[tuple[str, str], LeaseKey] = {}
        runs = 0
        for key in sorted(self.last_ns, key=lambda key: self.last_ns[key]):
            if key.ticket == ticket and instance in {"", key.instance, f"{key.instance}/{key.member}"}:
                newest[key.instance, key.member] = key
                runs += 1
        owners = {self.owners[key] for key in newest.values()}
        if len(owners) == 1 and (len(newest) == 1 or owners != {""}):
            key = next(iter(newest.values()))
            note = f"{key} of its member's last run; {runs - len(newest)} earlier had one too"
            return Found(owners.pop(), key, note if runs > len(newest) else "")
        if newest:
            names = ", ".join(sorted({str(key) for key in newest.values()}))
            return NotFound(wanted, f"several leases have this ticket: {names}", self._newest_first(owners - {""}))
        return self._not_found(wanted, "no recorded event names this ticket")

    def _not_found(self, wanted: str, reason: str) -> NotFound:
        names = {known.request_hash: known.transfer for known in self.transfers.values() if known.request_hash}
        names |= {transfer: transfer for transfer in self.transfers}
        close = difflib.get_close_matches(wanted, list(names), n=CANDIDATES_MAX, cutoff=0.5)
        candidates = self._newest_first({names[name] for name in close} or set(self.transfers))
        return NotFound(wanted, reason, candidates)

    def _newest_first(self, transfers: Iterable[str]) -> tuple[Known, ...]:
        found = sorted(
            (self.transfers[transfer] for transfer in transfers), key=lambda known: known.first_ns, reverse=True
        )
        return tuple(found[:CANDIDATES_MAX])


def transfer_of(event: Event) -> str:
    """Return the transfer that an event names, or an empty string."""
    body = event.body
    return body.transfer if isinstance(body, TransferEvent | LeaseGranted) else ""


def hash_of(event: Event) -> str:
    """Return the request hash that an event names, or an empty string."""
    body = event.body
    return body.request_hash if isinstance(body, RequestEvent) else ""


def keys_of(event: Event) -> Iterator[LeaseKey]:
    """Yield the leases that an event names."""
    body = event.body
    if isinstance(body, LeaseRow):
        yield LeaseKey.of(event.header, body.ticket)
    elif isinstance(body, FactsSeen):
        for line in fact_lines(body):
            yield LeaseKey.of(event.header, line[0])
    else:
        yield from party_keys(event)
