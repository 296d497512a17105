"""One attempt as the socket reader's thread sees it: which pages to ask for next, where they land, what they prove.

An attempt is cut into blocks of rows in prompt order, as its segments are (`reading.py`); within one, rows are sorted
by their place at the source. A block counts only by the records that the source sent behind its bytes (P2).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbus.dataplane import socket_wire as wire
from kvbus.dataplane.cutting import expected_records
from kvbus.dataplane.reader import Progress
from kvbus.dataplane.reading import SEGMENT_ROWS_MAX, Segment
from kvbus.dataplane.socket_calls import Places
from kvbus.dataplane.socket_pool import WORDS, Column, Pages, PoolBytes
from kvbus.ledger.facts import FailureClass

BLOCK_BYTES = 16 << 20
"""Verified together and lost together, and what one question asks for: 7 ms on one host, an eighth of a second over
1 Gbit/s. A question costs both sides together some 0.3 ms, with the caches cold from copying."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows that are asked for together: row n of `rows` comes from `pages[n]` and goes to `places[n]`."""

    reading: "Reading"
    span: range
    """The same rows, in prompt order."""
    rows: NDArray[np.int64]
    pages: Pages
    counters: Column
    places: Places
    length_bytes: int

    def question(self, number: int) -> bytes:
        """Return the frame that asks for it."""
        ticket = self.reading.ticket
        return wire.question(number, ticket, self.pages.astype(np.uint32).tobytes(), self.counters.tobytes())

    def places_of(self, kept: NDArray[np.bool_] | None) -> Places:
        """Return where the bytes of the kept rows land, in the order in which they come."""
        return self.places if kept is None else self.places[kept]

    def verify(self, kept: NDArray[np.bool_] | None, records: memoryview) -> None:
        """Count the rows whose generation was the grant's behind their last byte."""
        found = np.frombuffer(records, dtype=np.uint64).reshape(len(self.rows), WORDS)
        same = found == expected_records(self.reading.progress.plan.grant.lender_epoch, self.counters)
        segment = Segment(rows=tuple(self.span), runs=(), spans=(), records=(), expected=())
        rows: Sequence[int] = self.span
        if kept is not None or np.count_nonzero(same) != same.size:
            whole = same.all(axis=1)
            rows = self.rows[whole if kept is None else whole & kept].tolist()
        self.reading.progress.verified(segment, rows)


class Reading:
    """One attempt on a link."""

    def __init__(self, progress: Progress, pool: PoolBytes, block_bytes: int) -> None:
        plan = progress.plan
        self.progress = progress
        self.pool = pool
        self.asked = 0
        """Blocks that the source has not answered yet."""
        self.was_asked = False
        self.was_served = False
        self._page_bytes = plan.local.page_bytes
        self._pages = np.frombuffer(plan.grant.pages, dtype="<u4").astype(np.int64)
        self._counters = np.frombuffer(plan.grant.counters, dtype="<u8").astype(np.uint64)
        self._rows_a_block = max(1, min(SEGMENT_ROWS_MAX, block_bytes // self._page_bytes))
        self._next_row = 0

    @property
    def ticket(self) -> int:
        """The lender's ticket of the lease that is read."""
        return self.progress.plan.grant.ticket

    @property
    def has_more(self) -> bool:
        """Whether there is something to ask for."""
        return self.progress.stop is None and self._next_row < len(self._pages)

    @property
    def ended(self) -> bool:
        """Whether no byte will land for it any more: all was answered, or it was stopped.

        The reader's thread lets bytes land by a call of its own, which has returned whenever this is asked; what a
        stopped attempt has asked for already goes elsewhere.
        """
        return self.progress.stop is not None or not (self.asked or self._next_row < len(self._pages))

    def next_block(self) -> Block:
        """Return the next block to ask for."""
        first, end = self._next_row, min(self._next_row + self._rows_a_block, len(self._pages))
        self._next_row = end
        self.asked += 1
        self.was_asked = True
        order = np.argsort(self._pages[first:end], kind="stable")
        local = np.array(self.progress.plan.local_pages[first:end], dtype=np.int64)[order]
        rows, length_bytes = first + order, len(order) * self._page_bytes
        return Block(
            self,
            range(first, end),
            rows,
            self._pages[rows],
            self._counters[rows],
            self.pool.places(local),
            length_bytes,
        )

    def stop(self, failure: FailureClass, text: str) -> None:
        """Ask for nothing more; the first reason stands."""
        self.progress.fail(failure, text)
