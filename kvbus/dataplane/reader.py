"""What every backend here shares: what it owes its caller, whom it refuses, how an attempt's result is made up.

A backend's own thread does the reading; its caller's thread submits, cancels and drains. `Outbox` is the only thing
that both touch, under one lock that is never held across a call of anybody else's code.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbus.dataplane.reading import Plan, Segment
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Cancelled, Change, Delivered, Failed, Order, Result, SubmissionRejectedError
from kvbus.pool.digests import digest_of

ATTEMPTS_MAX = 4096
"""Attempts without evidence yet, of one backend: four seconds of 1,000 transfers a second."""
PEERS_MAX = 1024
"""Peers that a backend remembers: several times the instances of a large cluster."""
EPOCHS_MAX = 64
"""Epochs of one peer remembered for isolation: it would have to restart 64 times within one isolation to slip by."""
BLOCKS_NAMED_MAX = 16
"""Blocks that one text names; the sentence goes into events, which take 2,000 characters."""

Pair = tuple[int, int]
"""(ticket, attempt): the name of one attempt."""


class Outbox:
    """The changes that wait to be drained, and the attempts that still owe evidence."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._changes: list[Change] = []
        self._open: dict[Pair, bool] = {}  # the value: whether a cancel was asked for

    def open(self, pair: Pair) -> None:
        """Note an attempt before anything of it can escape; SubmissionRejectedError if it is known or one too many."""
        with self._lock:
            if pair in self._open:
                raise SubmissionRejectedError(FailureClass.CONTRADICTION, f"attempt {pair} is already under way")
            if len(self._open) >= ATTEMPTS_MAX:
                text = f"{ATTEMPTS_MAX} attempts are under way; wait for some to end"
                raise SubmissionRejectedError(FailureClass.TRANSPORT, text)
            self._open[pair] = False

    def withdraw(self, pair: Pair) -> None:
        """Forget an attempt of which nothing escaped after all."""
        with self._lock:
            self._open.pop(pair, None)

    def first_cancel(self, pair: Pair) -> bool:
        """Tell whether the attempt is under way and this is the first cancel of it (contract 39)."""
        with self._lock:
            if self._open.get(pair, True):
                return False
            self._open[pair] = True
            return True

    def report(self, change: Change) -> None:
        """List a change, then raise the wake signal (R9); one with evidence closes its attempt."""
        with self._lock:
            if change.evidence is not None:
                self._open.pop((change.ticket, change.attempt), None)
            self._changes.append(change)
        self._wake()

    def drain(self) -> Sequence[Change]:
        """Return and forget what was listed, oldest first."""
        if not self._changes:
            return []  # asked at each round; what is being listed just now raises the wake signal afterwards
        with self._lock:
            changes, self._changes = self._changes, []
        return changes

    def unfinished(self) -> tuple[Pair, ...]:
        """Name the attempts that still owe evidence."""
        with self._lock:
            return tuple(self._open)


class Isolation:
    """Which peers get no new work. An isolation binds the epochs seen until then: a restarted peer is another one.

    Used by one thread. If no epoch was seen yet, the next one that shows up is the isolated one.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[str, OrderedDict[int, None]] = OrderedDict()
        self._isolated: dict[str, set[int]] = {}

    def refuses(self, peer: str, epoch: int) -> bool:
        """Note that this peer shows up in this epoch, and tell whether it is isolated."""
        isolated = self._isolated.get(peer)
        if isolated is not None and not isolated:
            isolated.add(epoch)
        epochs = self._seen.setdefault(peer, OrderedDict())
        epochs[epoch] = None
        if len(epochs) > EPOCHS_MAX:
            epochs.popitem(last=False)
        if len(self._seen) > PEERS_MAX:
            oldest = next(name for name in self._seen if name != peer and name not in self._isolated)
            del self._seen[oldest]
        return isolated is not None and epoch in isolated

    def isolate(self, peer: str) -> None:
        """Refuse that peer from now on, in all epochs in which it was seen; at most PEERS_MAX - 1 peers."""
        self._make_room(peer)
        self._isolated.setdefault(peer, set()).update(self._seen.get(peer, ()))

    def isolate_epoch(self, peer: str, epoch: int) -> None:
        """Refuse one process of that peer from now on, and its others as before."""
        self._make_room(peer)
        self._isolated.setdefault(peer, set()).add(epoch)

    def peers(self) -> tuple[str, ...]:
        """Name the isolated peers."""
        return tuple(self._isolated)

    def _make_room(self, peer: str) -> None:
        if peer not in self._isolated and len(self._isolated) >= PEERS_MAX - 1:
            del self._isolated[next(iter(self._isolated))]  # the oldest: its old process is the likeliest to be gone


class Pace:
    """A rate limit in bytes per second, with no burst beyond one operation: the debt of one is paid before the next."""

    def __init__(self, rate_limit_bytes_s: float | None) -> None:
        self._rate = rate_limit_bytes_s
        self.is_limited = rate_limit_bytes_s is not None
        self.operations = 0
        """How many were noted so far: whoever shares a limit fairly asks whose the last one was."""
        self._free_at = 0.0

    def wait_s(self, now: float) -> float:
        """Return how long to wait before the next operation; 0 when it may start."""
        return max(0.0, self._free_at - now)

    def spend(self, length_bytes: int, now: float) -> None:
        """Note an operation that starts now."""
        self.operations += 1
        if self._rate is not None:
            self._free_at = max(self._free_at, now) + length_bytes / self._rate


@dataclass(slots=True)
class Stop:
    """Why an attempt ends before it has read everything."""

    failure: FailureClass
    text: str


class Progress:
    """What has arrived of one attempt, and why the rest has not."""

    def __init__(self, order: Order, plan: Plan) -> None:
        self.order = order
        self.plan = plan
        self.stop: Stop | None = None
        self.length_bytes = 0
        self._arrived = [False] * len(order.view.pages)
        self._changed = 0
        self._differing: list[int] = []

    @property
    def pair(self) -> Pair:
        """The attempt's name."""
        return self.order.ticket, self.order.attempt

    def fail(self, failure: FailureClass, text: str) -> None:
        """Say why the attempt ends early; the first reason stands."""
        if self.stop is None:
            self.stop = Stop(failure, text)

    def verified(self, segment: Segment, unchanged: Sequence[int]) -> None:
        """Count the rows of a segment that were read whole and whose generation is still the grant's afterwards.

        Those with other bytes than their digests' are not among them. They are hashed here, on the thread that has just
        brought them: out of its caches mostly.
        """
        whole = self._with_their_bytes(unchanged)
        for row in whole:
            self._arrived[row] = True
        self.length_bytes += len(whole) * self.plan.local.page_bytes
        self._changed += len(segment.rows) - len(unchanged)

    def change(self, evidence: Evidence) -> Change:
        """Return how the attempt ended; called once, when nobody of ours touches its pages any more."""
        result, text = self._result()
        ticket, attempt = self.pair
        return Change(ticket, attempt, result, evidence, text, tuple(sorted(self._differing)), self._changed)

    def _with_their_bytes(self, rows: Sequence[int]) -> Sequence[int]:
        """Return the rows whose bytes here are those of the grant's digests: all, where nobody compares."""
        digests, pages, memory = self.plan.digests, self.plan.local_pages, self.plan.local.memory
        if not digests or memory is None:
            return rows
        differing = [row for row in rows if digest_of(memory.page_bytes(pages[row])) != digests[row]]
        if not differing:
            return rows
        self._differing += differing
        memory.digests.note_differing(len(differing))
        wrong = frozenset(differing)
        return [row for row in rows if row not in wrong]

    def _result(self) -> tuple[Result, str]:
        arrived, count = tuple(self._arrived), sum(self._arrived)
        text = self._missing_text(count)
        if self.stop is not None and self.stop.failure is FailureClass.CANCELLED:
            return Cancelled(arrived, self.length_bytes), text
        failure = FailureClass.PAGE_DIFFERS if self._differing else FailureClass.PAGE_CHANGED
        failure = self.stop.failure if self.stop else failure
        if not count:
            return Failed(failure, text), text
        if self.stop is None and not self._changed and not self._differing:
            failure = FailureClass.NONE
        return Delivered(arrived, self.length_bytes, failure), text

    def _missing_text(self, count: int) -> str:
        reasons = []
        granted, wanted = len(self.plan.source_pages), self.plan.rows_wanted
        if self.stop is not None:
            reasons.append(self.stop.text)
        if self._changed:
            reasons.append(f"{self._changed} pages were rewritten at the source while they were read")
        if self._differing:
            reasons.append(self._differing_text())
        if granted < wanted:
            reasons.append(f"the grant covers {granted} of {wanted} pages")
        return f"{count} of {wanted} pages arrived: {'; '.join(reasons)}" if reasons else ""

    def _differing_text(self) -> str:
        """Name the blocks that differ, as far as a sentence goes, with their pages at the source."""
        ordinals, pages = self.order.view.ordinals, self.plan.source_pages
        rows = sorted(self._differing)
        named = ", ".join(f"block {ordinals[row]} of page {pages[row]}" for row in rows[:BLOCKS_NAMED_MAX])
        more = f" and {len(rows) - BLOCKS_NAMED_MAX} more" if len(rows) > BLOCKS_NAMED_MAX else ""
        return f"{len(rows)} pages arrived with other bytes than their digests say: {named}{more}"
