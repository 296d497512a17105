"""How an attempt is cut: segments in prompt order, runs contiguous on both sides, few reads of generation records.

All of it is arithmetic over whole columns: a page of 16 KiB is copied in three microseconds, and a turn of Python for
each of its columns would cost as much again.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvbus.pool.generations import RECORD_BYTES

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

WORDS = RECORD_BYTES // 8
Pages = NDArray[np.int64]
Records = NDArray[np.uint64]
"""Generation records, one row of WORDS each."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Many runs as columns: whoever works them off makes no object for each, which would keep the collector busy."""

    sources: Sequence[int] = ()
    locals: Sequence[int] = ()
    lengths: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Run]:
        return map(Run, self.sources, self.locals, self.lengths)

    def part(self, first: int, end: int) -> "Runs":
        """Return some of them."""
        return Runs(self.sources[first:end], self.locals[first:end], self.lengths[first:end])

    def columns(self) -> Iterator[tuple[int, int, int]]:
        """Yield source, local and length of each."""
        return zip(self.sources, self.locals, self.lengths, strict=True)

    def in_parts(self, length_bytes_max: int) -> Iterator["Runs"]:
        """Yield them in order, as many together as have that many bytes, and at least one."""
        ends = list(accumulate(self.lengths))
        first = before = 0
        while first < len(ends):
            end = max(first + 1, bisect_right(ends, before + length_bytes_max))
            yield self.part(first, end)
            first, before = end, ends[end - 1]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows that are read, verified and counted together.

    `spans` copy generation records from the source into a scratch of SCRATCH_BYTES (`local` is an offset in it);
    `records` says where in the scratch each row's record then stands, `expected` what it must be.
    """

    rows: tuple[int, ...]
    runs: Runs | tuple[()]
    spans: Sequence[Run]
    records: Pages | tuple[()]
    expected: Records | tuple[()]

    def columns(self) -> Iterator[tuple[int, int, int]]:
        """Yield source, local and length of each run."""
        return self.runs.columns() if self.runs else iter(())

    def unchanged_rows(self, scratch: memoryview) -> tuple[int, ...]:
        """Return the rows whose generation is still the grant's; a torn or odd record is another one (P1, P2)."""
        found = np.frombuffer(scratch, dtype=np.uint64).reshape(-1, WORDS)
        places = np.asarray(self.records, dtype=np.int64) // RECORD_BYTES
        return rows_where(self.rows, matching(found[places], np.asarray(self.expected, dtype=np.uint64)))


def expected_records(epoch: int, counters: Records) -> Records:
    """Return the only records that pages may have under these counters, complements included."""
    records = np.empty((len(counters), WORDS), dtype=np.uint64)
    records[:, 0], records[:, 1] = epoch, counters
    records[:, 2:] = ~records[:, :2]
    return records


def matching(found: Records, expected: Records) -> NDArray[np.bool_]:
    """Tell, record by record, whether all of it is what is expected, the complements too."""
    same: NDArray[np.bool_] = (found == expected).all(axis=1)
    return same


def rows_where(rows: Sequence[int], same: NDArray[np.bool_]) -> tuple[int, ...]:
    """Return the rows for which the mask says so."""
    if same.all():
        return tuple(rows)
    return tuple(row for row, is_same in zip(rows, same.tolist(), strict=True) if is_same)


@dataclass(frozen=True, slots=True)
class Side:
    """The pages of one pool, row by row, and where it has them: page 0's offset, and the distance of two pages."""

    pages: Pages
    first: int
    stride: int

    def offsets(self, order: Pages) -> Pages:
        """Return where the pages of these rows start."""
        return self.first + self.stride * self.pages[order]


@dataclass(frozen=True, slots=True)
class Table:
    """Where the source has its generation records, and which ones its pages must have, row by row."""

    offset: int
    expected: Records


def segments_of(
    source: Side, local: Side | None, *, page_bytes: int, limits: Limits, table: Table | None
) -> Iterator[Segment]:
    """Yield the segments in prompt order; within one, rows are sorted by their place at the source.

    Without a local side the segments have no runs, and without the source's table no spans.
    """
    count = len(source.pages)
    rows_max = max(1, min(SEGMENT_ROWS_MAX, limits.segment_bytes // page_bytes))
    bounds = [*range(0, count, rows_max), count]
    orders = [first + source.pages[first:end].argsort(kind="stable") for first, end in pairwise(bounds)]
    runs, run_bounds = Runs(), [0] * len(bounds)
    if local is not None:
        order = np.concatenate(orders)
        runs, run_bounds = _runs(source.offsets(order), local.offsets(order), page_bytes, limits.run_bytes, bounds)
    for mine, (run, run_end) in zip(orders, pairwise(run_bounds), strict=True):
        rows, mine_runs = tuple(mine.tolist()), runs.part(run, run_end) if local else ()
        if table is None:
            yield Segment(rows, mine_runs, (), (), ())
        else:
            yield Segment(rows, mine_runs, *_spans(source.pages[mine], table.offset), table.expected[mine])


def _runs(
    source: Pages, local: Pages, page_bytes: int, run_bytes_max: int, bounds: list[int]
) -> tuple[Runs, list[int]]:
    """Return the runs of all pages, none across a bound, and where in their list each bound lies."""
    count, pages_max = len(source), run_bytes_max // page_bytes
    if not pages_max:
        cuts = np.arange(0, page_bytes, run_bytes_max)
        lengths = np.tile(np.minimum(run_bytes_max, page_bytes - cuts), count)
        sources, locals_ = (np.add.outer(side, cuts).ravel().tolist() for side in (source, local))
        return Runs(sources, locals_, lengths.tolist()), [len(cuts) * bound for bound in bounds]
    begins = np.ones(count, dtype=np.bool_)
    begins[1:] = (np.diff(source) != page_bytes) | (np.diff(local) != page_bytes)
    begins[bounds[:-1]] = True
    numbers = np.arange(count)
    begins |= (numbers - np.maximum.accumulate(np.where(begins, numbers, 0))) % pages_max == 0
    firsts = np.flatnonzero(begins)
    lengths = np.diff(firsts, append=count) * page_bytes
    runs = Runs(source[firsts].tolist(), local[firsts].tolist(), lengths.tolist())
    run_bounds: list[int] = np.searchsorted(firsts, bounds).tolist()
    return runs, run_bounds


def _spans(pages: Pages, table_offset: int) -> tuple[list[Run], Pages]:
    """Return few reads that cover the records of ascending pages within the scratch, and where each record lands.

    Wide gaps are cut first: first those that cost more than a get, then as many as it takes to fit.
    """
    gaps = np.diff(pages) - 1
    is_cut = gaps >= SPAN_GAP_RECORDS_MAX
    over = int(pages[-1] - pages[0]) + 1 - int(gaps[is_cut].sum()) - SCRATCH_BYTES // RECORD_BYTES
    if over > 0:
        widest = np.argsort(np.where(is_cut, 0, -gaps), kind="stable")
        is_cut[widest[: int(np.searchsorted(np.cumsum(gaps[widest]), over)) + 1]] = True
    if not is_cut.any():
        first = int(pages[0])
        length_bytes = RECORD_BYTES * (int(pages[-1]) - first + 1)
        return [Run(table_offset + RECORD_BYTES * first, 0, length_bytes)], RECORD_BYTES * (pages - first)
    cuts = np.flatnonzero(is_cut) + 1
    firsts, lasts = pages[np.append(0, cuts)], pages[np.append(cuts, len(pages)) - 1]
    lengths = RECORD_BYTES * (lasts - firsts + 1)
    places = np.cumsum(lengths) - lengths
    spans = list(map(Run, (table_offset + RECORD_BYTES * firsts).tolist(), places.tolist(), lengths.tolist()))
    shifts = np.repeat(places - RECORD_BYTES * firsts, np.diff(np.concatenate(([0], cuts, [len(pages)]))))
    return spans, shifts + RECORD_BYTES * pages
