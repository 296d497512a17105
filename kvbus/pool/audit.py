"""The lender's own proof: every pin has its owner, and every lent page is as it was lent."""

from collections import Counter
from collections.abc import Iterable

from kvbus.errors import LedgerContradictionError
from kvbus.ledger.types import Direction
from kvbus.pool.allocator import PageAllocator, PageState
from kvbus.pool.generations import Generations
from kvbus.pool.lease import PoolLease
from kvbus.pool.pins import PinSet


def check_leases(
    allocator: PageAllocator,
    generations: Generations,
    *,
    leases: Iterable[PoolLease],
    unmarked: Iterable[PoolLease],
    pin_sets: Iterable[PinSet],
) -> None:
    """Raise LedgerContradictionError unless the owners given account for every page that is not free to be taken."""
    pins: Counter[int] = Counter()
    written: Counter[int] = Counter()
    for lease in leases:
        (pins if lease.direction is Direction.READ else written).update(lease.pages)
        if not lease.fenced:
            _check_generations(lease, generations)
    for pin_set in pin_sets:
        pins.update(pin_set.pages)
    if (pinned := allocator.pinned()) != pins:
        page = min(page for page in pinned.keys() | pins.keys() if pinned.get(page, 0) != pins[page])
        raise LedgerContradictionError("pins without owner", page=page, pins=allocator.pins(page), owners=pins[page])
    if written != dict.fromkeys(allocator.pages_in(PageState.WRITING), 1):
        raise LedgerContradictionError("written pages and write leases differ", lent=sorted(written.elements()))
    quarantined = allocator.pages_in(PageState.QUARANTINED)
    for lease in unmarked:
        _check_generations(lease, generations)
        if not quarantined.issuperset(lease.pages):
            raise LedgerContradictionError("pages of an unmarked lease left quarantine", lease=lease.lease_id)


def _check_generations(lease: PoolLease, generations: Generations) -> None:
    """A lent page keeps its generation: odd for writing, even for reading (P1, P2)."""
    now = generations.counters(lease.pages)
    parity = 1 if lease.direction is Direction.WRITE else 0
    if now != lease.counters or any(counter % 2 != parity or not counter for counter in now):
        raise LedgerContradictionError(
            "a lent page changed its generation", lease=lease.lease_id, now=now, lent=lease.counters
        )
