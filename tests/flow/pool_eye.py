"""Looks into a worker's pool from outside, to see how far a transfer has come: no counter tells of half a transfer."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvbus.engines.desk import Where
from kvbus.events import LeaseGranted, from_column
from tests.flow.town import Town, prompt
from tests.waiting import until


@dataclass(frozen=True, slots=True)
class PoolEye:
    """Where an instance's pages lie."""

    town: Town
    name: str
    where: Where

    def page(self, page: int) -> bytes:
        """The bytes of a page now."""
        descriptor = os.open(f"/proc/{self.where.pid}/fd/{self.where.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            offset = self.where.offset + page * self.where.stride
            return os.pread(descriptor, self.where.page_bytes, offset)
        finally:
            os.close(descriptor)

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
        """Wait until the first bytes of a row's page change: all rows of earlier segments have arrived by then."""
        page = (await self.pages_of(transfer))[row]
        before = self.page(page)
        await until(lambda: self.page(page) != before, 30, what=f"row {row} begins to arrive")


async def eye_on(town: Town, name: str) -> PoolEye:
    """Learn where an instance's pool is, from one page that it computes for that."""
    ids = prompt(f"eye on {name}", 1)
    await town.answer(name, ids, store=True)
    with town.workers[name].client() as client:
        return PoolEye(town, name, client.where(ids))
