"""The live page while a thousand transfers end each second: rows stay few, and a person is still answered."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from playwright.async_api import expect

from kvbus.columns import column
from kvbus.events import (
    EventsBatch,
    FactsSeen,
    Header,
    LeaseGranted,
    TransferOutcome,
    TransferStep,
    encode,
)
from kvbus.gateway.serving import running, served
from kvbus.gateway.settings import GatewaySettings
from kvbus.ledger.facts import Fact
from kvbus.parts import Body
from kvbus.testing.bus import MemoryBroker
from kvbus.transport import Bus
from tests.browser import SHOTS, WIDE, Complaints, chromium, shot
from tests.flow.town import TOPICS
from tests.waiting import until

pytestmark = pytest.mark.slow

EACH_SECOND = 1_000
SECONDS = 4
EACH_BATCH = 20
BEHIND_MAX = 2_000
"""Events that may wait for the gateway: half a second's. On a machine that does less, all goes slower."""
ANSWERS = 8
DEADLINE_S = 60
TICKS_EACH_SECOND = 4
EPOCH = 1 << 32 | 7
NOT_MOVED = 30
"""Transfers that begin and do not end, so that some are always in flight."""


class Busy:
    """A member that records a thousand transfers each second, or as many as this machine can, until it has `ended`."""

    def __init__(self, bus: Bus, heard: Callable[[], int]) -> None:
        self._bus = bus
        self._heard = heard
        self._said = count(1)
        self._now_ns = time.time_ns()
        self._events = 0
        self.transfers = 0
        self.ended = asyncio.Event()

    async def run(self) -> None:
        """Record a batch each fiftieth of a second."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not self.ended.is_set():
            first, self.transfers = self.transfers, self.transfers + EACH_BATCH
            events = tuple(event for number in range(first, self.transfers) for event in self._life(number))
            self._events += len(events)
            batch = self._event(EventsBatch(events=events))
            await self._bus.store(TOPICS.facts("b"), batch, message_id=f"{first}")
            await until(lambda: loop.time() >= began + self.transfers / EACH_SECOND, what="the next batch is due")
            await until(lambda: self._heard() >= self._events - BEHIND_MAX, 60, what="the gateway keeps up")

    def _life(self, number: int) -> Iterator[bytes]:
        transfer, request_hash = f"b-{number}", f"{number:032x}"
        yield self._event(TransferStep(transfer=transfer, request_hash=request_hash, step="accepted", text="from a"))
        pages = column(range(8), 4)
        yield self._event(
            LeaseGranted(
                ticket=number + 1, transfer=transfer, rank=0, direction="write", lender="pool", peer="a",
                pages=pages, counters=column(range(8), 8),
            )
        )  # fmt: skip
        if number < NOT_MOVED:
            return
        bits = Fact.TAKEN | Fact.GRANTED | Fact.ACCESS_ENDED | Fact.SETTLED | Fact.RETURNED
        yield self._event(
            FactsSeen(
                n=1, ticket=column([number + 1], 8), rank=column([0], 2), bits=column([bits], 4),
                lo=column([0], 4), hi=column([8], 4),
            )
        )  # fmt: skip
        yield self._event(
            TransferOutcome(
                transfer=transfer, request_hash=request_hash, source="a", destination="b", outcome="settled",
                pages_wanted=8, pages_moved=8, length_bytes=8 << 16, total_s=0.02,
            )
        )  # fmt: skip

    def _event(self, body: Body) -> bytes:
        self._now_ns += 10_000
        return encode(Header(k=body.KIND, i="b", m="m0", e=EPOCH, s=next(self._said), t=self._now_ns), body)


async def test_a_thousand_transfers_a_second_leave_few_rows_and_an_answering_page() -> None:
    connect = MemoryBroker(clock=lambda: 0.0).connect
    async with chromium() as browser:
        page = await browser.new_page(viewport=WIDE)
        complaints = Complaints(page)
        async with running(GatewaySettings(), connect(), TOPICS) as parts, served(parts) as url:
            await page.goto(url)
            await expect(page.locator("#state")).to_have_attribute("data-state", "live")
            busy = Busy(connect(), lambda: parts.page.picture.events)
            storing = asyncio.ensure_future(busy.run())
            began, answered_ms, rows = time.monotonic(), list[float](), list[int]()
            async with asyncio.timeout(DEADLINE_S):
                while time.monotonic() < began + SECONDS or len(answered_ms) < ANSWERS:
                    rows.append(await page.evaluate("document.querySelectorAll('tr, #members > li').length"))
                    answered_ms.append(await page.evaluate(ANSWERED))
            busy.ended.set()
            await storing
            took_s = time.monotonic() - began
            ended = busy.transfers - NOT_MOVED
            await expect(page.locator("#n-settled")).to_have_text(f"{ended:,}", timeout=30_000)
            await expect(page.locator("#n-flight")).to_have_text(str(NOT_MOVED))
            await expect(page.locator("#more-flight")).to_contain_text(f"longest of {NOT_MOVED}")
            await expect(page.locator("#n-leases")).to_have_text(str(NOT_MOVED))
            updates, repairs = await page.evaluate("[kvbusPage.source.updates, kvbusPage.source.repairs]")
            await shot(page, "page-busy")
    answered_ms.sort()
    measured = {"answered_median_ms": answered_ms[len(answered_ms) // 2], "answered_most_ms": answered_ms[-1]}
    measured |= {
        "answers": len(answered_ms),
        "transfers_s": busy.transfers / took_s,
        "updates": updates,
        "rows_max": max(rows),
    }
    (SHOTS / "page-busy.json").write_text(json.dumps(measured, indent=1))
    assert max(rows) <= ROWS_MAX
    assert max(rows) > NOT_MOVED, "and were there"
    assert repairs == 0, "nothing was missed"
    assert 1 < updates <= TICKS_EACH_SECOND * (time.monotonic() - began) + 2, "many facts come as few updates"
    assert not complaints.heard


ROWS_MAX = 25 + 40 + 25 + 3 + 2
"""In flight, outcomes, leases; the heads of the tables; members."""

ANSWERED = """() => new Promise((resolve) => {
  const began = performance.now();
  const box = document.querySelector(".skip");
  box.addEventListener("focus", () => requestAnimationFrame(() => {
    box.blur();
    resolve(performance.now() - began);
  }), { once: true });
  setTimeout(() => box.focus());
})"""
"""How long an input takes that a task of the page's own answers, and that is then drawn."""
