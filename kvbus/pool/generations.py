"""Generations: one record per page that tells a reader whether the bytes it read are those that were lent (P1, P2).

A record is 32 bytes in the pool: epoch, counter, and the complement of both, each a little-endian u64. The counter is
odd while the page is being written and even once it is sealed; it only grows, so no value comes twice in an epoch
(contract 48). 0 means that the page was never written; it is even, yet not sealed.

Order. To raise: counter, then its complement; to seal: the other way round. Each is one aligned eight-byte store, so
that between the two stores the record contradicts itself and `decode` answers None: a page counts as unreadable from
the first store of a raise on, and as sealed only after the last store of a seal.

Barriers. Python has no fence, and none is missing: the worker raises before it hands the view over, and seals after it
was told that the writing ended. Both messages cross a system call or a lock between worker, engine process and UCX
thread, which orders memory on both sides. On x86, stores are seen in the order in which they were made; on weaker
machines the kernel's locks in `send` and `recv` give the release and the acquire.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbus.errors import LedgerContradictionError

RECORD_BYTES: Final = 32
_RECORD: Final = struct.Struct("<4Q")
_WORDS: Final = RECORD_BYTES // 8
_EPOCH, _COUNTER, _EPOCH_COMPLEMENT, _COUNTER_COMPLEMENT = range(_WORDS)
_ALL_ONES: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Generation:
    """Epoch ‖ counter of a page: equal values mean that the page was not written in between."""

    epoch: int
    counter: int

    @property
    def sealed(self) -> bool:
        """Whether the page holds whole content: an even counter that is not 0."""
        return self.counter > 0 and self.counter % 2 == 0


def decode(record: bytes | bytearray | memoryview) -> Generation | None:
    """Return the generation in a record of 32 bytes, or None where it is torn; ValueError for another length."""
    if len(record) != RECORD_BYTES:
        raise ValueError(f"a generation record has {RECORD_BYTES} bytes, got {len(record)}")
    epoch, counter, epoch_complement, counter_complement = _RECORD.unpack(record)
    if epoch ^ epoch_complement != _ALL_ONES or counter ^ counter_complement != _ALL_ONES:
        return None
    return Generation(epoch, counter)


class Generations:
    """The generation table of one pool. The lending worker alone writes it; engines see it read-only.

    `table` is the (pages, 4) u64 view of the pool's records. The worker keeps the counters of its own beside it:
    whatever an engine writes into the shared table, no counter of a lease comes from there.
    """

    def __init__(self, table: NDArray[np.uint64], epoch: int) -> None:
        self._epoch = epoch
        self._counters = [0] * len(table)
        self._mapped: NDArray[np.uint64] | None = None
        self._columns: tuple[memoryview, memoryview] | None = None
        self.map_to(table)

    def __repr__(self) -> str:
        return f"<Generations pages={len(self._counters)} epoch={self._epoch}>"

    @property
    def epoch(self) -> int:
        """The epoch under which this table's counters count."""
        return self._epoch

    def map_to(self, table: NDArray[np.uint64] | None) -> NDArray[np.uint64] | None:
        """Use another view of the same table, or none while the pool is unmapped; return the one used until now."""
        before, self._mapped = self._mapped, table
        # Plain views: most leases have few pages, and an array for each costs more than the stores themselves.
        self._columns = None if table is None else (table[:, _COUNTER].data, table[:, _COUNTER_COMPLEMENT].data)
        return before

    def format(self) -> None:
        """Write every record as never written, in this epoch; once, before anybody else maps the pool."""
        self._table[:, _EPOCH] = self._epoch
        self._table[:, _EPOCH_COMPLEMENT] = self._epoch ^ _ALL_ONES
        self._table[:, _COUNTER] = 0
        self._table[:, _COUNTER_COMPLEMENT] = _ALL_ONES

    def raise_pages(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Make the pages' counters odd, each larger than ever before, and return them (P1: before the first byte)."""
        raised = self.counters(pages)
        if raised:
            own, (counters, complements) = self._counters, self._stored()
            raised = tuple([counter + 1 + counter % 2 for counter in raised])
            for page, counter in zip(pages, raised, strict=True):
                counters[page] = counter
                complements[page] = counter ^ _ALL_ONES
                own[page] = counter
        return raised

    def seal_pages(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Make the pages' counters even and return them (P1: after the last byte); each must be odd."""
        sealed = self.counters(pages)
        for page, counter in zip(pages, sealed, strict=True):
            if counter % 2 == 0:
                raise LedgerContradictionError("a page is sealed that nobody writes", page=page, counter=counter)
        if sealed:
            own, (counters, complements) = self._counters, self._stored()
            sealed = tuple([counter + 1 for counter in sealed])
            for page, counter in zip(pages, sealed, strict=True):
                complements[page] = counter ^ _ALL_ONES
                counters[page] = counter
                own[page] = counter
        return sealed

    def counters(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Return the worker's own counters of the pages."""
        return tuple(map(self._counters.__getitem__, pages))

    def read(self, page: int) -> Generation | None:
        """Return what the shared record of a page says now, or None where it is torn."""
        return decode(self._table[page].tobytes())

    def check(self) -> None:
        """Raise LedgerContradictionError where the shared table differs from the worker's counters."""
        expected = np.empty_like(self._table)
        expected[:, _EPOCH] = self._epoch
        expected[:, _COUNTER] = self._counters
        np.invert(expected[:, :_EPOCH_COMPLEMENT], out=expected[:, _EPOCH_COMPLEMENT:])
        if expected.tobytes() != self._table.tobytes():
            page = int(np.flatnonzero((expected != self._table).any(axis=1))[0])
            raise LedgerContradictionError(
                "the generation table was changed from outside",
                page=page,
                counter=self._counters[page],
                record=self._table[page].tobytes().hex(),
            )

    @property
    def _table(self) -> NDArray[np.uint64]:
        if self._mapped is None:
            raise _closed()
        return self._mapped

    def _stored(self) -> tuple[memoryview, memoryview]:
        """Return the table's columns of counters and of their complements."""
        if self._columns is None:
            raise _closed()
        return self._columns


def _closed() -> ValueError:
    return ValueError("the pool was closed")
