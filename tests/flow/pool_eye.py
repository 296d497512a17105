"""Looks into a worker's pool from outside, to see how far a transfer has come: no counter tells of half a transfer."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbus.engines.desk import Where
from kvbus.events import LeaseGranted, from_column
from tests.flow.town import Town, prompt
from tests.waiting import until

HEAD_BYTES = 64
"""No two pages of the toy's begin alike: their first bytes tell whether a page is another one than before."""


@dataclass(frozen=True, slots=True)
class PoolEye:
    """Where an instance's pages lie, and how each of them began when this was opened."""

    town: Town
    name: str
    where: Where
    before: Sequence[bytes]

    def page(self, page: int) -> bytes:
        """The bytes of a page now."""
        return read_pages(self.where, self.where.page_bytes, [page])[0]

    def anew(self) -> "PoolEye":
        """The same pool, and its pages as they begin now."""
        return replace(self, before=read_pages(self.where, HEAD_BYTES))

    async def pages_of(self, transfer: str) -> Sequence[int]:
        """The pages that a transfer fills, row by row."""
        found: list[tuple[int, ...]] = []

        async def granted() -> bool:
            worker = self.town.workers[self.name]
            for event in await self.town.events(worker.name):
                body = event.body
                if (
                    event.header.m == worker.member
                    and isinstance(body, LeaseGranted)
                    and (body.transfer, body.direction) == (transfer, "write")
                ):
                    found.append(from_column(body.pages, 4))
            return bool(found)

        await until(granted, what=f"{self.name} reports the lease of {transfer}")
        return found[0]

    async def until_row(self, transfer: str, row: int) -> None:
        """Wait until a row's page is another one than when this was opened: all rows of earlier segments have arrived.

        It has to be opened before the transfer is asked for, so that a row that came long ago is seen, too.
        """
        page = (await self.pages_of(transfer))[row]

        def has_begun() -> bool:
            return read_pages(self.where, HEAD_BYTES, [page])[0] != self.before[page]

        await until(has_begun, what=f"row {row} begins to arrive")


def read_pages(where: Where, length_bytes: int, pages: Sequence[int] | None = None) -> list[bytes]:
    """The first bytes of some pages of a pool, or of all of them."""
    descriptor = os.open(f"/proc/{where.pid}/fd/{where.fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        count = (os.fstat(descriptor).st_size - where.offset) // where.stride
        chosen = range(count) if pages is None else pages
        return [os.pread(descriptor, length_bytes, where.offset + page * where.stride) for page in chosen]
    finally:
        os.close(descriptor)


async def eye_on(town: Town, name: str) -> PoolEye:
    """Learn where an instance's pool is, from one page that it computes for that."""
    ids = prompt(f"eye on {name}", 1)
    await town.answer(name, ids, store=True)
    with town.workers[name].client() as client:
        where = client.where(ids)
    return PoolEye(town, name, where, read_pages(where, HEAD_BYTES))
