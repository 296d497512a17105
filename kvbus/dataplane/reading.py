"""What to read, in which order, and what counts as read: pure arithmetic over a grant and a write lease's view.

Rows are cut into segments in prompt order, because what a broken transfer leaves is useful only as a prefix of the
prompt. Each segment is verified by itself: its generations are read only after all of its bytes have arrived (P2), so
a source that dies midway leaves whole, verified pages. Within a segment pages are sorted by their place at the source
and merged where both sides are contiguous.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import sub
from typing import NamedTuple

from kvbus.grants import Expected, Grant, refusal
from kvbus.ledger.facts import FailureClass
from kvbus.ledger.types import Direction, Order, SubmissionRejectedError
from kvbus.parts import ProcessIdentity
from kvbus.pool.digests import DigestMode
from kvbus.pool.generations import RECORD_BYTES
from kvbus.pool.memory import PoolMemory, PoolPlan

RUN_BYTES_MAX = 8 << 20
"""One get: longer ones gain no speed (2 MiB runs already reach the speed of 1 GiB), and would delay a cancel."""
SEGMENT_BYTES_MAX = 8 << 20
"""What is verified together and lost together: 2 ms of reading on one host; its after-read costs some 10 µs."""
SEGMENT_ROWS_MAX = 4096
"""8 MiB of the smallest sensible pages, 2 KiB; their records alone then fit the scratch four times over."""
SPAN_GAP_RECORDS_MAX = 1024
"""Reading 32 KiB of records that nobody asked for costs less (6 µs) than one more get (10 µs)."""
SCRATCH_BYTES = 512 << 10
"""Where one segment's records land: the whole generation table of a pool of 16,384 pages."""
PACE_S = 0.05
"""With a rate limit, one get carries at most this much of it, so that the flow stays even and a cancel quick."""

_RECORD = struct.Struct("<4Q")
_ALL_ONES = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """The hint of a reading backend's order: the lender's grant, what was asked for, and which process lends.

    The last two where the caller still knows them.
    """

    grant: Grant
    expected: Expected | None = None
    lender: ProcessIdentity | None = None


@dataclass(frozen=True, slots=True)
class LocalPool:
    """Where pages land: the destination's own pool, in bytes from `address`; digests need its `memory`."""

    fingerprint: str
    address: int
    length_bytes: int
    pages_offset: int
    page_stride: int
    page_bytes: int
    page_count: int
    memory: PoolMemory | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, memory: PoolMemory) -> "LocalPool":
        """Return where the pages of a pool lie in this process."""
        return cls(
            fingerprint=memory.fingerprint,
            address=memory.address,
            length_bytes=memory.length_bytes,
            pages_offset=memory.pages_offset,
            page_stride=memory.page_stride,
            page_bytes=memory.layout.page_bytes,
            page_count=memory.page_count,
            memory=memory,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """How finely an attempt is cut, in bytes."""

    run_bytes: int = RUN_BYTES_MAX
    segment_bytes: int = SEGMENT_BYTES_MAX


class Run(NamedTuple):
    """Bytes contiguous on both sides: offsets from the source pool's base and from the local pool's address."""

    source: int
    local: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that are read, verified and counted together.

    `spans` copy generation records from the source into a scratch of SCRATCH_BYTES (`local` is an offset in it);
    `records` says where in the scratch each row's record then stands, `expected` what it must be.
    """

    rows: tuple[int, ...]
    runs: tuple[Run, ...]
    spans: tuple[Run, ...]
    records: tuple[int, ...]
    expected: tuple[bytes, ...]

    def unchanged_rows(self, scratch: memoryview) -> tuple[int, ...]:
        """Return the rows whose generation is still the grant's; a torn or odd record is another one (P1, P2)."""
        return tuple(
            row
            for row, at, expected in zip(self.rows, self.records, self.expected, strict=True)
            if scratch[at : at + RECORD_BYTES] == expected
        )


def record_of(epoch: int, counter: int) -> bytes:
    """Return the only bytes that a page's generation record may hold under that grant, complements included."""
    return _RECORD.pack(epoch, counter, epoch ^ _ALL_ONES, counter ^ _ALL_ONES)


def _records_of(epoch: int, counters: list[int]) -> tuple[bytes, ...]:
    """Return the record of each counter; pages of one age share theirs, so that few are made."""
    made = {counter: record_of(epoch, counter) for counter in set(counters)}
    return tuple(made[counter] for counter in counters)


def verify(record: bytes | memoryview, epoch: int, counter: int) -> bool:
    """Tell whether a generation record says exactly what the grant says; a torn one never does (P2)."""
    return record == record_of(epoch, counter)


def limits_for(rate_limit_bytes_s: float | None) -> Limits:
    """Return how finely to cut under a rate limit: a get within PACE_S of it, a segment within five of those."""
    if rate_limit_bytes_s is None:
        return Limits()
    paced = max(4096, int(rate_limit_bytes_s * PACE_S))
    return Limits(min(RUN_BYTES_MAX, paced), min(SEGMENT_BYTES_MAX, 5 * paced))


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked order: row n of the view comes from page `source_pages[n]`; rows beyond the grant do not arrive.

    `digests` are those to be found after reading, where the grant has them and this pool's owner wants them compared.
    """

    grant: Grant
    local: LocalPool
    source_pages: tuple[int, ...]
    counters: tuple[int, ...]
    local_pages: tuple[int, ...]
    rows_wanted: int
    digests: tuple[int, ...] = ()

    def segments(self, limits: Limits) -> Iterator[Segment]:
        """Yield the segments in prompt order, made when they are needed: a large order costs its submitter little."""
        rows = max(1, min(SEGMENT_ROWS_MAX, limits.segment_bytes // self.local.page_bytes))
        for first in range(0, len(self.source_pages), rows):
            yield self._segment(range(first, min(first + rows, len(self.source_pages))), limits)

    def _segment(self, rows: range, limits: Limits) -> Segment:
        order = tuple(sorted(rows, key=self.source_pages.__getitem__))
        pages = [self.source_pages[row] for row in order]
        spans, records = _spans(pages, self.grant.pool.generations_offset)
        return Segment(
            rows=order,
            runs=tuple(self._runs(order, limits.run_bytes)),
            spans=spans,
            records=records,
            expected=_records_of(self.grant.lender_epoch, [self.counters[row] for row in order]),
        )

    def _runs(self, rows: tuple[int, ...], run_bytes_max: int) -> Iterator[Run]:
        pool, local, length = self.grant.pool, self.local, self.local.page_bytes
        source_first, source_stride, source_pages = pool.pages_offset, pool.page_stride, self.source_pages
        local_first, local_stride, local_pages = local.pages_offset, local.page_stride, self.local_pages
        source = place = run = 0  # what waits to be merged with the next page
        for row in rows:
            from_ = source_first + source_stride * source_pages[row]
            to = local_first + local_stride * local_pages[row]
            if run and source + run == from_ and place + run == to and run + length <= run_bytes_max:
                run += length
                continue
            if run:
                yield Run(source, place, run)
            source, place, run = from_, to, length
            while run > run_bytes_max:
                yield Run(source, place, run_bytes_max)
                source, place, run = source + run_bytes_max, place + run_bytes_max, run - run_bytes_max
        if run:
            yield Run(source, place, run)


def plan(order: Order, local: LocalPool, transport: str) -> Plan:
    """Check an order down to its last descriptor; SubmissionRejectedError(GRANT_REFUSED) before anything escapes.

    The source cannot see a one-sided access, so this is the last place where a forged or stale grant is stopped: every
    source range lies inside the grant's pool, every local range inside ours, none twice (contract 47).
    """
    hint = order.hint
    if not isinstance(hint, ReadOrder):
        raise _refused(f"hint is a {type(hint).__name__}, expected a ReadOrder")
    if order.direction is not Direction.WRITE:
        raise _refused("a reader fills write leases; the order is for a read lease")
    grant, view = hint.grant, order.view
    text = _grant_refusal(hint, order, local) or _local_refusal(order, local)
    if text is None and getattr(grant, transport) is None:
        text = f"the grant offers no {transport} access"
    if text is not None:
        raise _refused(text)
    pages = grant.page_indexes()
    compares = local.memory is not None and local.memory.digests.mode is not DigestMode.OFF
    digests = grant.page_digests() if compares else ()
    return Plan(grant, local, pages, grant.page_counters(), view.pages[: len(pages)], len(view.pages), digests)


def _grant_refusal(hint: ReadOrder, order: Order, local: LocalPool) -> str | None:
    grant, rows = hint.grant, len(order.view.pages)
    if grant.rank != order.view.rank:
        return f"the grant is for rank {grant.rank}, the lease for rank {order.view.rank}"
    asked = hint.expected
    if asked is None:
        expected = Expected(
            reader=grant.reader,
            lender_instance=grant.lender_instance,
            lender_epoch=grant.lender_epoch,
            fingerprint=local.fingerprint,
            page_bytes=local.page_bytes,
            names_asked=rows,
        )
    elif (asked.fingerprint, asked.page_bytes) != (local.fingerprint, local.page_bytes):
        return f"pages of layout {asked.fingerprint} were asked for, the registered pool has {local.fingerprint}"
    else:
        expected = replace(asked, names_asked=min(asked.names_asked, rows))
    return refusal(grant, expected) or _misplaced(grant, local)


def _misplaced(grant: Grant, local: LocalPool) -> str | None:
    """Return what of a grant's geometry no pool of this layout has: bytes would come from shifted places."""
    stated = grant.pool
    own = PoolPlan.sized(stated.page_count, page_bytes=local.page_bytes, page_stride=local.page_stride)
    for name in ("page_stride", "generations_offset", "pages_offset", "length_bytes"):
        granted, expected = getattr(stated, name), getattr(own, name)
        if granted != expected:
            return f"{name} of the granted pool is {granted}, expected {expected} for {stated.page_count} pages"
    return None


def _local_refusal(order: Order, local: LocalPool) -> str | None:
    pages = order.view.pages
    if order.view.pool != local.fingerprint:
        return f"the lease is for pool {order.view.pool}, the registered one is {local.fingerprint}"
    if min(pages) < 0 or max(pages) >= local.page_count:
        return f"the lease names a page outside the local pool of {local.page_count} pages"
    if len(set(pages)) != len(pages):
        return "the lease names one local page twice"
    if local.pages_offset + local.page_stride * local.page_count > local.length_bytes:
        return f"{local.page_count} pages do not fit the local pool of {local.length_bytes} bytes"
    return None


def _refused(text: str) -> SubmissionRejectedError:
    return SubmissionRejectedError(FailureClass.GRANT_REFUSED, text)


def _spans(pages: list[int], table_offset: int) -> tuple[tuple[Run, ...], tuple[int, ...]]:
    """Return few reads that cover the records of ascending pages within the scratch, and where each record lands.

    Wide gaps are cut first: first those that cost more than a get, then as many as it takes to fit.
    """
    steps = list(map(sub, pages[1:], pages))
    cuts = {at for at, step in enumerate(steps, 1) if step > SPAN_GAP_RECORDS_MAX}
    over = _covered(pages, cuts) - SCRATCH_BYTES // RECORD_BYTES
    if over > 0:
        gaps = [(step - 1, at) for at, step in enumerate(steps, 1) if at not in cuts]
        for gap, at in sorted(gaps, reverse=True):
            if over <= 0:
                break
            cuts.add(at)
            over -= gap
    spans: list[Run] = []
    records: list[int] = []
    place = 0
    bounds = [0, *sorted(cuts), len(pages)]
    for first, end in pairwise(bounds):
        length = (pages[end - 1] - pages[first] + 1) * RECORD_BYTES
        spans.append(Run(table_offset + pages[first] * RECORD_BYTES, place, length))
        shift = place - pages[first] * RECORD_BYTES
        records += [shift + page * RECORD_BYTES for page in pages[first:end]]
        place += length
    return tuple(spans), tuple(records)


def _covered(pages: list[int], cuts: set[int]) -> int:
    """Count the records that the spans between these cuts hold."""
    bounds = [0, *sorted(cuts), len(pages)]
    return sum(pages[end - 1] - pages[first] + 1 for first, end in pairwise(bounds))
