"""The promises of `kvbus.testing.contracts`, asked of the pool's lender and of the source's backend."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvbus.dataplane.lending import LendingBackend, Reader
from kvbus.errors import LedgerContradictionError
from kvbus.events import ReaderKey
from kvbus.ledger.types import Direction, Lease, LeaseView, Order
from kvbus.pool.layout import PageLayout
from kvbus.pool.lender import PoolLender, lender_over
from kvbus.pool.memory import PoolMemory
from kvbus.testing.backend_promises import BACKEND_PROMISES
from kvbus.testing.cases import BackendCase, ContractViolationError, LenderCase
from kvbus.testing.contracts import check_backend_promise, check_lender_promise
from kvbus.testing.lender_promises import LENDER_PROMISES
from kvbus.testing.sim.searches.found import Found

PAGES = 12
LAYOUT = PageLayout("toy", 1, 1, 4, 16, "uint8", 0, 1, "ab")
EPOCH = 1 << 32 | 5
NONCE = bytes(range(16))


@contextmanager
def lending_case() -> Iterator[BackendCase]:
    """The source's side of a read: its attempts end by their reader's word."""
    wakes: list[None] = []
    backend = LendingBackend(wake=lambda: wakes.append(None))

    def order(ticket: int, attempt: int, peer: str) -> Order:
        names = (bytes([ticket]) * 16, bytes([ticket + 100]) * 16)
        view = LeaseView("pool", 0, EPOCH, (0, 1), names, (2 * ticket, 2 * ticket + 1), (2, 2))
        hint = Reader(_key(ticket, attempt, peer), NONCE)
        return Order(ticket, attempt, view, Direction.READ, hint, peer, None)

    def end(order: Order) -> None:
        backend.acknowledge(_key(order.ticket, order.attempt, order.peer), NONCE)

    yield BackendCase(backend, order, end=end, wakes=lambda: len(wakes))


def _key(ticket: int, attempt: int, peer: str) -> ReaderKey:
    return ReaderKey(instance=peer, member="m0", epoch=7, transfer=f"t{ticket}", attempt=attempt, rank=0)


@contextmanager
def pool_case() -> Iterator[LenderCase]:
    """The pool's lender, over a small pool."""
    memory = PoolMemory.create(LAYOUT, PAGES, EPOCH)
    lender = lender_over(memory, name="pool", engine_reserve_pages=0)
    numbers = itertools.count(1)

    def lend(direction: Direction, rows: int) -> Lease:
        names = tuple(next(numbers).to_bytes(16, "little") for _ in range(rows))
        if direction is Direction.READ:
            _fill(lender, names)
            return lender.lend_read(names)
        return lender.lend_write(names, range(rows))

    yield LenderCase(lender, lend, content=lambda: _content(lender))
    lender.check()
    memory.close()


def _fill(lender: PoolLender, names: tuple[bytes, ...]) -> None:
    lease = lender.lend_write(names, range(len(names)), for_peer=False)
    if lease.poll() is not None:
        lease.mark_arrived((True,) * len(names))
    lease.release()


def _content(lender: PoolLender) -> set[bytes]:
    every = [number.to_bytes(16, "little") for number in range(1, 1_000)]
    return {name for name, here in zip(every, lender.held(every), strict=True) if here}


def check_pool_lender(_seed: int) -> Found | None:
    """Check every promise of a lender; the step is the promise's number."""
    return _first(LENDER_PROMISES, lambda promise: check_lender_promise(pool_case, promise))


def check_lending_backend(_seed: int) -> Found | None:
    """Check every promise of a backend; the step is the promise's number."""
    return _first(BACKEND_PROMISES, lambda promise: check_backend_promise(lending_case, promise))


def _first(promises: tuple[Callable[[Any], None], ...], check: Callable[[Callable[[Any], None]], None]) -> Found | None:
    for number, promise in enumerate(promises, 1):
        try:
            check(promise)
        except (ContractViolationError, LedgerContradictionError) as error:
            return Found(f"{promise.__name__}: {error}", number)
    return None
