"""The lender's own proof: every pin has its owner, and every lent page is as it was lent."""

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
    pins: list[int] = []
    written: list[int] = []
    for lease in leases:
        (pins if lease.direction is Direction.READ else written).extend(lease.pages)
        if not lease.fenced:
            _check_generations(lease, generations)
    for pin_set in pin_sets:
        pins.extend(pin_set.pages)
    owners: dict[int, int] = {}
    for page in pins:
        owners[page] = owners.get(page, 0) + 1
    if (pinned := allocator.pinned()) != owners:
        page = min(page for page in pinned.keys() | owners.keys() if pinned.get(page, 0) != owners.get(page, 0))
        raise LedgerContradictionError(
            "pins without owner", page=page, pins=allocator.pins(page), owners=owners.get(page, 0)
        )
    if sorted(written) != sorted(allocator.pages_in(PageState.WRITING)):
        raise LedgerContradictionError("written pages and write leases differ", lent=sorted(written))
    for lease in unmarked:
        _check_generations(lease, generations)
        if any(allocator.state(page) is not PageState.QUARANTINED for page in lease.pages):
            raise LedgerContradictionError("pages of an unmarked lease left quarantine", lease=lease.lease_id)


def _check_generations(lease: PoolLease, generations: Generations) -> None:
    """A lent page keeps its generation: odd for writing, even for reading (P1, P2)."""
    now = generations.counters(lease.pages)
    parity = 1 if lease.direction is Direction.WRITE else 0
    if now != lease.counters or [counter for counter in now if counter % 2 != parity or not counter]:
        raise LedgerContradictionError(
            "a lent page changed its generation", lease=lease.lease_id, now=now, lent=lease.counters
        )
