"""The reading side of the tests: a local pool with a canary in every byte, one reader, and waiting for its word."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from kvbus.dataplane.memory import MemoryReader
from kvbus.dataplane.reading import ReadOrder
from kvbus.dataplane.socket_reader import SocketReader, SocketReaderSettings
from kvbus.dataplane.ucx import UcxPlane, UcxReader, UcxReaderSettings
from kvbus.grants import Grant
from kvbus.ledger.types import Backend, Cancelled, Change, Delivered, Direction, LeaseView, Order
from kvbus.pool.memory import PoolMemory
from tests.unit.helpers.lending_process import READER_EPOCH, content, layout
from tests.waiting import wait_until

CANARY = 0
"""No page of a lender is filled with it."""
TCP_ONLY = {"TLS": "tcp"}


class Side:
    """A reader, the pool that it fills, and every change that it reported."""

    def __init__(self, reader: Backend, memory: PoolMemory, woken: threading.Event, plane: UcxPlane | None) -> None:
        self.reader = reader
        self.memory = memory
        self.woken = woken
        self.plane = plane
        self.seen: list[Change] = []

    def order(self, grant: Grant, pages: Sequence[int], *, ticket: int = 1, attempt: int = 1, peer: str = "A") -> Order:
        count = len(pages)
        view = LeaseView(
            pool=self.memory.fingerprint,
            rank=0,
            epoch=READER_EPOCH,
            ordinals=tuple(range(count)),
            names=tuple(bytes([n % 256]) * 16 for n in range(count)),
            pages=tuple(pages),
            counters=(1,) * count,
        )
        return Order(
            ticket=ticket,
            attempt=attempt,
            view=view,
            direction=Direction.WRITE,
            hint=ReadOrder(grant),
            peer=peer,
            timeout_s=None,
        )

    def submit(self, grant: Grant, pages: Sequence[int], *, ticket: int = 1, attempt: int = 1, peer: str = "A") -> None:
        self.reader.submit(self.order(grant, pages, ticket=ticket, attempt=attempt, peer=peer))

    def drain(self) -> list[Change]:
        self.seen.extend(self.reader.changes())
        return self.seen

    def end_of(self, ticket: int = 1, attempt: int = 1, deadline_s: float = 60.0) -> Change:
        """Wait for the attempt's evidence, woken only by the reader's signal."""

        def found() -> Change | None:
            self.woken.wait(0.05)
            self.woken.clear()
            return next(
                (change for change in self.drain() if (change.ticket, change.attempt) == (ticket, attempt)), None
            )

        wait_until(found, deadline_s, f"the end of ticket {ticket}, attempt {attempt}")
        return next(change for change in self.seen if (change.ticket, change.attempt) == (ticket, attempt))

    def holds(self, page: int, byte: int) -> bool:
        return bool((self.memory.page_bytes(page) == byte).all())

    def bytes_moved(self) -> int:
        """How many bytes of the pool are no canary any more."""
        return sum(int((self.memory.page_bytes(page) != CANARY).sum()) for page in range(self.memory.page_count))


class Maker(Protocol):
    """Makes a reading side; the context ends it."""

    def __call__(
        self, *, page_bytes: int = ..., pages: int = ..., rate_limit_bytes_s: float | None = ...
    ) -> contextlib.AbstractContextManager[Side]: ...


@contextlib.contextmanager
def ucx_side(
    *,
    page_bytes: int = 64 << 10,
    pages: int = 256,
    rate_limit_bytes_s: float | None = None,
    settings: Mapping[str, str] | None = None,
    cancel_wait_s: float = 1.0,
    wire_up_s: float = 10.0,
    reads_before: bool = False,
    on_wake: Callable[[], None] | None = None,
) -> Iterator[Side]:
    woken = threading.Event()

    def wake() -> None:
        if on_wake is not None:
            on_wake()
        woken.set()

    plane = UcxPlane(wake=wake, settings=settings)
    plane.start()
    memory = PoolMemory.create(layout(page_bytes), pages, READER_EPOCH)
    plane.register(memory)
    chosen = UcxReaderSettings(
        rate_limit_bytes_s=rate_limit_bytes_s,
        cancel_wait_s=cancel_wait_s,
        wire_up_s=wire_up_s,
        reads_before=reads_before,
    )
    reader = UcxReader(plane, wake=wake, settings=chosen)
    try:
        yield Side(reader, memory, woken, plane)
    finally:
        reader.shutdown(5.0)
        reader.release_hold()


@contextlib.contextmanager
def memory_side(
    *, page_bytes: int = 64 << 10, pages: int = 256, rate_limit_bytes_s: float | None = None
) -> Iterator[Side]:
    woken = threading.Event()
    reader = MemoryReader(wake=woken.set, rate_limit_bytes_s=rate_limit_bytes_s)
    reader.start()
    memory = PoolMemory.create(layout(page_bytes), pages, READER_EPOCH)
    reader.register(memory)
    try:
        yield Side(reader, memory, woken, None)
    finally:
        reader.shutdown(5.0)
        reader.release_hold()


@contextlib.contextmanager
def tcp_side(
    *, page_bytes: int = 64 << 10, pages: int = 256, rate_limit_bytes_s: float | None = None
) -> Iterator[Side]:
    with ucx_side(page_bytes=page_bytes, pages=pages, rate_limit_bytes_s=rate_limit_bytes_s, settings=TCP_ONLY) as side:
        yield side


@contextlib.contextmanager
def socket_side(
    *,
    page_bytes: int = 64 << 10,
    pages: int = 256,
    rate_limit_bytes_s: float | None = None,
    wire_up_s: float = 10.0,
) -> Iterator[Side]:
    woken = threading.Event()
    chosen = SocketReaderSettings(rate_limit_bytes_s=rate_limit_bytes_s, wire_up_s=wire_up_s)
    reader = SocketReader(wake=woken.set, settings=chosen)
    reader.start()
    memory = PoolMemory.create(layout(page_bytes), pages, READER_EPOCH)
    reader.register(memory)
    try:
        yield Side(reader, memory, woken, None)
    finally:
        reader.shutdown(5.0)
        reader.release_hold()


MAKERS: dict[str, Maker] = {"ucx": ucx_side, "ucx-tcp": tcp_side, "memory": memory_side, "socket": socket_side}


def arrived_of(change: Change) -> tuple[bool, ...]:
    """Which rows arrived, by the change's result."""
    assert isinstance(change.result, Delivered | Cancelled), change
    return change.result.arrived


def check_rows(side: Side, change: Change, local: Sequence[int], source: Sequence[int]) -> int:
    """Assert that every row counted as arrived holds the source's page, byte by byte; return how many did."""
    arrived = arrived_of(change)
    for there, at, origin in zip(arrived, local, source, strict=True):
        assert not there or side.holds(at, content(origin)), f"page {at} is not page {origin}"
    return sum(arrived)
