"""Makers for the parts that kvbus ships, as a third party would write them for its own."""

import contextlib
import itertools
from collections.abc import Callable, Iterator

from kvbus.dataplane.lending import LendingBackend, Reader
from kvbus.events import ReaderKey
from kvbus.ledger.types import Direction, Lease, LeaseView, Order
from kvbus.names import page_names
from kvbus.roles.local import LocalBackend
from kvbus.testing.cases import BackendCase, LenderCase
from kvbus.testing.ledger_parts import ListedLease, ListedLender, ManualBackend
from tests.unit.helpers.lending_process import LendingProcess, reader_key
from tests.unit.helpers.reader_side import Maker
from tests.unit.pool_parts import TOY, fill, small_lender

NONCE = b"0123456789abcdef"


def order_of(
    ticket: int, attempt: int, peer: str, *, direction: Direction = Direction.WRITE, hint: object = "go"
) -> Order:
    """An order over two pages of its own, for a backend to which pages are numbers."""
    counter = 1 if direction is Direction.WRITE else 2
    names = (bytes([ticket]) * 16, bytes([ticket + 100]) * 16)
    view = LeaseView("pool", 0, 5, (0, 1), names, (2 * ticket, 2 * ticket + 1), (counter, counter))
    return Order(ticket, attempt, view, direction, hint, peer, None)


@contextlib.contextmanager
def manual_case(backend: ManualBackend | None = None) -> Iterator[BackendCase]:
    driven = backend or ManualBackend()
    yield BackendCase(driven, order_of, end=lambda order: driven.deliver(order.ticket), isolates=False)


@contextlib.contextmanager
def local_case() -> Iterator[BackendCase]:
    backend = LocalBackend(name="local")
    yield BackendCase(
        backend,
        order_of,
        end=lambda order: backend.completed(order.ticket, whole=True, page_bytes=64),
        isolates=False,
    )


@contextlib.contextmanager
def lending_case() -> Iterator[BackendCase]:
    wakes: list[None] = []
    backend = LendingBackend(wake=lambda: wakes.append(None))

    def key(ticket: int, attempt: int, peer: str) -> ReaderKey:
        return ReaderKey(instance=peer, member="m0", epoch=7, transfer=f"t{ticket}", attempt=attempt, rank=0)

    def order(ticket: int, attempt: int, peer: str) -> Order:
        hint = Reader(key(ticket, attempt, peer), NONCE)
        return order_of(ticket, attempt, peer, direction=Direction.READ, hint=hint)

    def end(order: Order) -> None:
        backend.acknowledge(key(order.ticket, order.attempt, order.peer), NONCE)

    def refused(ticket: int) -> Order:
        return order_of(ticket, 1, "one", direction=Direction.READ, hint="no reader")

    yield BackendCase(backend, order, end=end, refused=refused, wakes=lambda: len(wakes))


def reading_case(maker: Maker, lender: LendingProcess) -> Callable[[], contextlib.AbstractContextManager[BackendCase]]:
    """The maker for a backend that reads out of another process; its attempts end by themselves."""

    @contextlib.contextmanager
    def make() -> Iterator[BackendCase]:
        with maker(pages=64) as side:

            def order(ticket: int, attempt: int, peer: str) -> Order:
                grant = lender.grant((ticket, ticket + 10), reader=reader_key(f"t{ticket}", attempt))
                return side.order(grant, (2 * ticket, 2 * ticket + 1), ticket=ticket, attempt=attempt, peer=peer)

            def refused(ticket: int) -> Order:
                grant = lender.grant((ticket, ticket + 10), fingerprint="another")
                return side.order(grant, (2 * ticket, 2 * ticket + 1), ticket=ticket)

            yield BackendCase(
                side.reader,
                order,
                refused=refused,
                wakes=lambda: int(side.woken.is_set()),
                content=lambda order: b"".join(side.memory.page_bytes(page).tobytes() for page in order.view.pages),
            )

    return make


# ------------------------------------------------------------------------------------------------------------ lenders


@contextlib.contextmanager
def listed_case(lender: ListedLender | None = None) -> Iterator[LenderCase]:
    listed = lender or ListedLender()

    def refused() -> Lease:
        lease = listed.lend(Direction.WRITE, granted=False)
        lease.refuse("no room")
        return lease

    def grant(lease: Lease) -> None:
        assert isinstance(lease, ListedLease)
        lease.grant()

    yield LenderCase(
        listed,
        lambda direction, rows: listed.lend(direction, rows, granted=False),
        grant=grant,
        refused=refused,
        state=lambda: (set(listed.out), set(listed.content)),
        content=lambda: listed.content,
    )


@contextlib.contextmanager
def pool_case() -> Iterator[LenderCase]:
    lender = small_lender(pages=12)
    prompts = itertools.count(1)

    def names(rows: int) -> tuple[bytes, ...]:
        return page_names(TOY.namespace("salt"), [next(prompts)] * (TOY.block_tokens * rows), TOY.block_tokens)

    def lend(direction: Direction, rows: int) -> Lease:
        wanted = names(rows)
        if direction is Direction.READ:
            fill(lender, wanted)
            return lender.lend_read(wanted)
        return lender.lend_write(wanted, range(rows))

    def content() -> set[bytes]:
        every = [name for prompt in range(1, 400) for name in _names_of(prompt)]
        return {name for name, here in zip(every, lender.held(every), strict=True) if here}

    two = names(2)
    yield LenderCase(
        lender,
        lend,
        refused=lambda: lender.lend_read(names(2), whole=True),
        faults=(
            lambda: lender.lend_write(two, (3, 1)),
            lambda: lender.lend_write(two, (-1, 0)),
            lambda: lender.lend_write(two, (0,)),
            lambda: lender.lend_write((two[0], two[0]), (0, 1)),
            lambda: lender.lend_write(None, range(13)),
            lambda: lender.lend_write((b"short", two[0]), (0, 1)),
            lambda: lender.lend_read(("text", two[0])),  # type: ignore[arg-type]
            lambda: lender.lend_read(two, -1),
        ),
        state=lambda: (lender.statistics().pages, lender.statistics().reads, lender.statistics().writes),
        content=content,
    )
    lender.check()


def _names_of(prompt: int) -> tuple[bytes, ...]:
    return page_names(TOY.namespace("salt"), [prompt] * (TOY.block_tokens * 3), TOY.block_tokens)
