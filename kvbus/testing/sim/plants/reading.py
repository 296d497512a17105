"""Faults of the reader: what it compares with what, and when."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvbus.dataplane import memory as memory_module
from kvbus.dataplane.cutting import Records
from kvbus.dataplane.memory import _Reading
from kvbus.dataplane.reading import record_of
from kvbus.pool.generations import Generation
from kvbus.testing.sim.plants.plant import Change, plant


@plant("the after-read is compared with the first read", "P2", check="rewriting")
def compare_with_first_read() -> Sequence[Change]:
    """Count a page as unchanged if it is as it was before it was read, whatever the grant says."""
    seen: dict[tuple[int, int], object] = {}

    def as_at_first(self: _Reading, rows: Sequence[int]) -> tuple[int, ...]:
        read, pages = self.source.generations.read, self.progress.plan.source_pages
        now = {row: read(pages[row]) for row in rows}
        if all((id(self), row) in seen for row in rows):
            return tuple(row for row in rows if seen.pop((id(self), row)) == now[row])
        seen.update({(id(self), row): at for row, at in now.items()})
        return tuple(rows)

    return [(_Reading, "_unchanged", as_at_first)]


@plant("generations are read before the bytes have arrived", "P2", check="rewriting")
def verify_first() -> Sequence[Change]:
    """Count rows by what their generations were when the gets were posted."""

    def once(self: _Reading, rows: Sequence[int]) -> tuple[int, ...]:
        before: dict[int, bool] = self.__dict__.setdefault("seen_first", {})
        read, checked = self.source.generations.read, self.progress.plan
        for row in rows:
            if row not in before:
                expected = Generation(checked.grant.lender_epoch, checked.counters[row])
                before[row] = read(checked.source_pages[row]) == expected
        return tuple(row for row in rows if before[row])

    return [(_Reading, "_unchanged", once)]


@plant("an odd generation counts as the one before it", "P1", check="rewriting")
def odd_is_even() -> Sequence[Change]:
    """Take a page that is being written for what it was before."""

    def rounded(self: _Reading, rows: Sequence[int]) -> tuple[int, ...]:
        checked, read = self.progress.plan, self.source.generations.read
        found = []
        for row in rows:
            now = read(checked.source_pages[row])
            before = Generation(now.epoch, now.counter - now.counter % 2) if now else None
            if before == Generation(checked.grant.lender_epoch, checked.counters[row]):
                found.append(row)
        return tuple(found)

    return [(_Reading, "_unchanged", rounded)]


@plant("a torn generation is taken as it stands", "P2", check="rewriting")
def believe_torn() -> Sequence[Change]:
    """Read epoch and counter, and not the complement that tells a torn record."""

    def without_complement(found: Records, expected: Records) -> NDArray[np.bool_]:
        same: NDArray[np.bool_] = (found[:, :2] == expected[:, :2]).all(axis=1)
        return same

    def record_without(record: bytes, epoch: int, counter: int) -> bool:
        return record[:16] == record_of(epoch, counter)[:16]

    return [(memory_module, "matching", without_complement), (memory_module, "verify", record_without)]


@plant("grants of another epoch are read", "contract 48, P16", check="rewriting")
def any_epoch() -> Sequence[Change]:
    """Compare counters, and not the epoch under which they count."""

    def counters_only(self: _Reading, rows: Sequence[int]) -> tuple[int, ...]:
        checked, read = self.progress.plan, self.source.generations.read
        now = {row: read(checked.source_pages[row]) for row in rows}
        return tuple(row for row, at in now.items() if at is not None and at.counter == checked.counters[row])

    return [(_Reading, "_unchanged", counters_only), (memory_module, "mismatch", lambda _source, _grant: None)]
