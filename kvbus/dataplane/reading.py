"""What to read, in which order, and what counts as read: pure arithmetic over a grant and a write lease's view.

Rows are cut into segments in prompt order, because what a broken transfer leaves is useful only as a prefix of the
prompt. Each segment is verified by itself: its generations are read only after all of its bytes have arrived (P2), so
a source that dies midway leaves whole, verified pages. Within a segment pages are sorted by their place at the source
and merged where both sides are contiguous.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from kvbus.dataplane.cutting import (
    RUN_BYTES_MAX,
    SCRATCH_BYTES,
    SEGMENT_BYTES_MAX,
    SEGMENT_ROWS_MAX,
    Limits,
    Pages,
    Records,
    Run,
    Segment,
    Side,
    Table,
    expected_records,
    segments_of,
)
from kvbus.grants import Expected, Grant, refusal
from kvbus.ledger.facts import FailureClass
from kvbus.ledger.types import Direction, Order, SubmissionRejectedError
from kvbus.parts import ProcessIdentity
from kvbus.pool.digests import DigestMode
from kvbus.pool.memory import PoolMemory, PoolPlan

__all__ = [
    "RUN_BYTES_MAX",
    "SCRATCH_BYTES",
    "SEGMENT_BYTES_MAX",
    "SEGMENT_ROWS_MAX",
    "Limits",
    "LocalPool",
    "Plan",
    "ReadOrder",
    "Run",
    "Segment",
    "limits_for",
    "plan",
    "record_of",
    "verify",
]  # how rows are cut is offered here as well

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


def record_of(epoch: int, counter: int) -> bytes:
    """Return the only bytes that a page's generation record may hold under that grant, complements included."""
    return _RECORD.pack(epoch, counter, epoch ^ _ALL_ONES, counter ^ _ALL_ONES)


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

    def segments(self, limits: Limits, *, with_runs: bool = True, with_spans: bool = True) -> Iterator[Segment]:
        """Yield the segments in prompt order, cut when the first is asked for: that costs its submitter nothing.

        Without runs they are for a reader that takes pages by their numbers, and without spans for one that sees the
        source's generation records where they stand.
        """
        pool, local = self.grant.pool, self.local
        source = Side(self.page_column(), pool.pages_offset, pool.page_stride)
        target = table = None
        if with_runs:
            target = Side(np.array(self.local_pages, dtype=np.int64), local.pages_offset, local.page_stride)
        if with_spans:
            table = Table(pool.generations_offset, self.expected_records())
        return segments_of(source, target, page_bytes=local.page_bytes, limits=limits, table=table)

    def page_column(self) -> Pages:
        """Return the granted pages, row by row."""
        return np.frombuffer(self.grant.pages, dtype="<u4").astype(np.int64)

    def expected_records(self) -> Records:
        """Return the only generation records that the granted pages may have, row by row."""
        return expected_records(self.grant.lender_epoch, np.frombuffer(self.grant.counters, dtype="<u8"))


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
        expected = asked if asked.names_asked <= rows else replace(asked, names_asked=rows)
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
