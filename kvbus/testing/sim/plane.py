"""The simulated data plane: a reading backend whose gets take time, stall, land late, and are seen by nobody else.

It plans and counts with the product's own parts (`plan`, `Progress`, `Isolation`, `Outbox`), copies real bytes out of
the source's real pool in two halves with time in between, and verifies generations as the protocol wants (P2). Each
time it touches a page, it asks the truth whether that page is still lent to it.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvbus.dataplane.reader import Isolation, Outbox, Pair, Progress
from kvbus.dataplane.reading import Limits, LocalPool, Segment, plan
from kvbus.ledger.facts import Evidence, FailureClass
from kvbus.ledger.types import Cancelled, Change, Failed, Order, SubmissionRejectedError
from kvbus.pool.generations import Generation
from kvbus.pool.memory import PoolMemory
from kvbus.testing.sim.loop import Actor
from kvbus.testing.sim.pages import HALF_BYTES, read, write
from kvbus.testing.sim.settings import Rates
from kvbus.testing.sim.truth import SimProcess, Truth, begin_access, end_access

GET_S = 0.0008
SLOW_MAX_S = 3.0
STALL_MAX_S = 30.0
CLOSE_MAX_S = 0.5
CLOSE_LATE_MAX_S = 12.0
"""How long a forced close may take until every get of it has ended, mostly and at times."""
SEGMENT_PAGES = 3


@dataclass(slots=True, eq=False)
class _Attempt:
    """One attempt: its segments in order; `moving` while gets of one are under way."""

    progress: Progress
    source: SimProcess
    segments: Iterator[Segment]
    moving: Segment | None = None
    posted: int = 0
    ended: bool = False
    told: bool = False

    @property
    def pair(self) -> Pair:
        return self.progress.pair

    @property
    def pages(self) -> tuple[int, ...]:
        return self.progress.plan.source_pages


class SimReader:
    """A `Backend` that reads granted pages. Its gets are carried out by `device`, an actor that dies with its process.

    `holds` says whether this member's holder holds a ticket; only the checks use it.
    """

    def __init__(
        self,
        truth: Truth,
        process: SimProcess,
        device: Actor,
        memory: PoolMemory,
        *,
        seed: str,
        rates: Rates,
        wake: Callable[[], None],
        flips: float = 0.0,
    ) -> None:
        self.rates = rates
        self.pages_read = 0
        self._flips = flips
        self._truth = truth
        self._process = process
        self._device = device
        self._memory = memory
        self._local = LocalPool.of(memory)
        self._limits = Limits(self._local.page_bytes, self._local.page_bytes * SEGMENT_PAGES)
        self._random = random.Random(f"{seed}:plane")
        self._outbox = Outbox(wake)
        self._isolation = Isolation()
        self._attempts: dict[Pair, _Attempt] = {}
        self._is_shut = False
        self.gate: Callable[[Callable[..., None], tuple[object, ...]], bool] | None = None
        """Where a script holds steps of its gets: True where it took one."""

    @property
    def name(self) -> str:
        """The transport's name, as grants spell it."""
        return "memory"

    @property
    def open(self) -> int:
        """Attempts that may still touch memory."""
        return len(self._attempts)

    # ---------------------------------------------------------------------------------------- what the holder calls

    def submit(self, order: Order) -> None:
        """Start an attempt; sometimes reject it, and sometimes raise although bytes are moving."""
        if self._is_shut:
            raise SubmissionRejectedError(FailureClass.SHUTDOWN, "the reader is shut down")
        checked = plan(order, self._local, self.name)
        offer = checked.grant.memory
        source = self._truth.find(offer.process) if offer else None
        if self._isolation.refuses(order.peer, checked.grant.lender_epoch):
            raise SubmissionRejectedError(FailureClass.PEER_LOST, f"{order.peer} is isolated in this epoch")
        if source is None or source.memory is None:
            raise SubmissionRejectedError(FailureClass.PEER_LOST, f"{order.peer} is gone")
        draw = self._random.random()
        if draw < self.rates.rejected:
            raise SubmissionRejectedError(FailureClass.TRANSPORT, "the transport took nothing")
        self._outbox.open((order.ticket, order.attempt))
        segments = checked.segments(self._limits, with_runs=False, with_spans=False)  # as one that maps the source
        attempt = _Attempt(Progress(order, checked), source, segments)
        self._attempts[attempt.pair] = attempt
        self._mark(attempt)
        self._post(self._next_segment, attempt)
        if draw > 1 - self.rates.uncertain:
            raise OSError("the transport lost sight of the submission")

    def changes(self) -> Sequence[Change]:
        """Return what changed since the last call."""
        return self._outbox.drain()

    def cancel(self, ticket: int, attempt: int) -> None:
        """Post nothing more for an attempt; what is under way lands later."""
        if self._outbox.first_cancel((ticket, attempt)):
            self._post(self._stop, (ticket, attempt), FailureClass.CANCELLED, "cancelled")

    def isolate(self, peer: str) -> None:
        """End what runs with a peer by force: its gets are gone within a bound, and never land."""
        self._isolation.isolate(peer)
        for attempt in list(self._attempts.values()):
            if attempt.progress.order.peer == peer:
                self._post(self._force, attempt, FailureClass.PEER_LOST, f"{peer} was isolated")

    def shutdown(self, budget_s: float) -> Sequence[tuple[int, int]]:
        """Take nothing more, end everything by force; the evidence follows."""
        del budget_s
        if not self._is_shut:
            self._is_shut = True
            for attempt in list(self._attempts.values()):
                self._post(self._force, attempt, FailureClass.SHUTDOWN, "the reader was shut down")
        return self._outbox.unfinished()

    def release_hold(self) -> None:
        """Let the memory go."""
        if self._attempts:
            self._truth.trail.violate(self._process.name, f"hold released with {len(self._attempts)} attempts open")

    # ------------------------------------------------------------------------------------------------------- the end

    def process_ended(self) -> None:
        """The process that reads is gone, and its gets with it."""
        for attempt in list(self._attempts.values()):
            self._unmark(attempt)
        self._attempts.clear()

    # ----------------------------------------------------------------------------------------------------- one attempt

    def _next_segment(self, attempt: _Attempt) -> None:
        if attempt.ended:
            return
        progress = attempt.progress
        segment = next(attempt.segments, None) if progress.stop is None else None
        if segment is None:
            self._end(attempt, Evidence.COMPLETED if attempt.posted else Evidence.NEVER_SUBMITTED)
            return
        if (
            not attempt.source.alive and self._random.random() < 0.5
        ):  # a mapping outlives its process, a socket does not
            progress.fail(FailureClass.PEER_LOST, f"{attempt.source.name} has gone")
            self._end(attempt, Evidence.COMPLETED if attempt.posted else Evidence.NEVER_SUBMITTED)
            return
        attempt.moving = segment
        attempt.posted += 1
        self._check(attempt, segment, "a get is posted")
        took_s = self._duration_s()
        self._post(self._half, attempt, segment, delay_s=took_s / 2)
        self._post(self._land, attempt, segment, delay_s=took_s)

    def _half(self, attempt: _Attempt, segment: Segment) -> None:
        if not attempt.ended:
            self._copy(attempt, segment, 0)

    def _land(self, attempt: _Attempt, segment: Segment) -> None:
        if attempt.ended:
            return
        self._copy(attempt, segment, 1)
        if self._random.random() < 0.3:
            self._post(self._verify, attempt, segment, delay_s=self._duration_s())
        else:
            self._verify(attempt, segment)

    def _verify(self, attempt: _Attempt, segment: Segment) -> None:
        if attempt.ended:
            return
        self._check(attempt, segment, "generations are read")
        progress = attempt.progress
        checked, memory = progress.plan, _memory(attempt.source)
        read, epoch = memory.generations.read, checked.grant.lender_epoch
        same = [
            row for row in segment.rows if read(checked.source_pages[row]) == Generation(epoch, checked.counters[row])
        ]
        attempt.moving = None
        if not attempt.told:
            progress.verified(segment, same)
            self.pages_read += len(same)
        self._next_segment(attempt)

    def _copy(self, attempt: _Attempt, segment: Segment, half: int) -> None:
        self._check(attempt, segment, "bytes land")
        checked, source = attempt.progress.plan, _memory(attempt.source)
        first = HALF_BYTES * half
        parts = read(source, [checked.source_pages[row] for row in segment.rows], first, HALF_BYTES)
        if self._flips:
            parts = [self._flipped(part) for part in parts]
        write(self._memory, [checked.local_pages[row] for row in segment.rows], first, parts)

    def _flipped(self, part: bytes) -> bytes:
        """Return bytes as they land, sometimes with one bit changed."""
        if self._random.random() >= self._flips:
            return part
        to = bytearray(part)
        to[self._random.randrange(len(to))] ^= 1 << self._random.randrange(8)
        return bytes(to)

    def _stop(self, pair: Pair, failure: FailureClass, text: str) -> None:
        attempt = self._attempts.get(pair)
        if attempt is None or attempt.ended:
            return
        attempt.progress.fail(failure, text)
        if attempt.moving is None:
            self._next_segment(attempt)
        elif self._random.random() < self.rates.result_first and not attempt.told:
            attempt.told = True  # the result now, the evidence when the last get has landed
            change = attempt.progress.change(Evidence.COMPLETED)
            self._outbox.report(Change(*pair, result=change.result, text=change.text))

    def _force(self, attempt: _Attempt, failure: FailureClass, text: str) -> None:
        if not attempt.ended:
            attempt.progress.fail(failure, text)
            late = self._random.random() < 0.2
            delay_s = self._random.random() * (CLOSE_LATE_MAX_S if late else CLOSE_MAX_S)
            self._post(self._closed, attempt, delay_s=delay_s)

    def _closed(self, attempt: _Attempt) -> None:
        if not attempt.ended:
            self._end(attempt, Evidence.ENDPOINT_DESTROYED)

    def _end(self, attempt: _Attempt, evidence: Evidence) -> None:
        attempt.ended = True
        del self._attempts[attempt.pair]
        self._unmark(attempt)
        change = attempt.progress.change(evidence)
        if attempt.told:
            change = Change(*attempt.pair, evidence=evidence)
        self._note_end(attempt, change)
        self._outbox.report(change)

    # --------------------------------------------------------------------------------------------------------- checks

    def _mark(self, attempt: _Attempt) -> None:
        checked, source = attempt.progress.plan, attempt.source
        trail, writers = self._truth.trail, self._process.writers
        begin_access(source.lease_readers, (checked.grant.ticket,))
        begin_access(source.readers, attempt.pages)
        begin_access(writers, checked.local_pages)
        here, there = self._process.name, source.name
        if any(writers[page] > 1 for page in checked.local_pages):
            text = f"attempt {attempt.pair[1]} of T{attempt.pair[0]} writes pages to which access has not ended"
            trail.violate(here, text, f"T{attempt.pair[0]}")
        pages = " ".join([f"{there}.p{page}" for page in attempt.pages])
        local = " ".join([f"{here}.p{page}" for page in checked.local_pages])
        trail.note(here, f"{here}.T{attempt.pair[0]} reads {there}.T{checked.grant.ticket} {pages} into {local}")

    def _unmark(self, attempt: _Attempt) -> None:
        checked, source = attempt.progress.plan, attempt.source
        end_access(source.lease_readers, (checked.grant.ticket,))
        end_access(source.readers, attempt.pages)
        end_access(self._process.writers, checked.local_pages)

    def _check(self, attempt: _Attempt, segment: Segment, what: str) -> None:
        """Whoever touches pages has them lent: at the source while that lives, and here."""
        checked, source = attempt.progress.plan, attempt.source
        ticket, mine = checked.grant.ticket, attempt.pair[0]
        if source.alive and not source.holds(ticket) and ticket not in source.fenced:
            text = f"{what} for T{mine}, and T{ticket} of {source.name} was returned before"
            self._truth.trail.violate(
                self._process.name, text, f"T{mine}", f"{source.name}.T{ticket}", *self._pages(attempt, segment)
            )
        if not self._process.holds(mine):
            text = f"{what} for T{mine}, which was returned before"
            self._truth.trail.violate(self._process.name, text, f"T{mine}", *self._pages(attempt, segment))

    def _pages(self, attempt: _Attempt, segment: Segment) -> tuple[str, ...]:
        return tuple(f"{attempt.source.name}.p{attempt.pages[row]}" for row in segment.rows)

    def _note_end(self, attempt: _Attempt, change: Change) -> None:
        result, evidence = change.result, change.evidence
        arrived = "" if result is None or isinstance(result, Failed) else f" {sum(result.arrived)} rows"
        kind = "told before" if result is None else type(result).__name__.lower()
        stopped = " on request" if isinstance(result, Cancelled) else ""
        word = evidence.name.lower() if evidence is not None else ""
        here = self._process.name
        text = f"{here}.T{attempt.pair[0]} attempt ends: {kind}{stopped}{arrived} {word}"
        self._truth.trail.note(here, text)

    # ----------------------------------------------------------------------------------------------------------- time

    def _post(self, call: Callable[..., None], *args: object, delay_s: float = 0.0) -> None:
        if self.gate is not None and self.gate(call, args):
            return
        self._truth.loop.post(self._device, call, *args, delay_s=delay_s)

    def _duration_s(self) -> float:
        draw, random = self._random.random(), self._random
        if draw < self.rates.stalled_get:
            return random.uniform(SLOW_MAX_S, STALL_MAX_S)
        if draw < self.rates.stalled_get + self.rates.slow_get:
            return random.uniform(0.1, SLOW_MAX_S)
        return random.expovariate(1 / GET_S)


def _memory(process: SimProcess) -> PoolMemory:
    if process.memory is None:
        raise ValueError(f"{process.name} has no pool")
    return process.memory
