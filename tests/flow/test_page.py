"""The live page in a real browser, over real workers and a real broker: what a person sees, and how they get about."""

import asyncio
import re
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from kvbus.bus import NatsBus
from kvbus.events import HeartbeatSeen, encode
from kvbus.gateway.serving import running, served
from kvbus.gateway.settings import GatewaySettings
from kvbus.ledger.facts import Fact
from kvbus.testing.bus import MemoryBroker
from tests.browser import PHONE, WAIT_MS, WIDE, Complaints, chromium, shot
from tests.flow.town import TOPICS, Town, as_text, prompt, town
from tests.unit.picture_parts import Teller
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

RATE_BYTES_S = 500_000
"""Slow enough to see: forty pages of 64 KiB take five seconds."""


@dataclass(slots=True)
class Seen:
    """A gateway's page in a browser, over a town of two workers; `here` is the one that reads slowly."""

    town: Town
    url: str
    page: Page
    complaints: Complaints

    @property
    def flight(self) -> Locator:
        """The rows of transfers in flight."""
        return self.page.locator("#flight tbody tr")

    @property
    def ended(self) -> Locator:
        """The rows of recent outcomes, the newest first."""
        return self.page.locator("#ended tbody tr")

    @property
    def story(self) -> Locator:
        """The open story."""
        return self.page.locator("dialog#story[open]")

    async def state(self, word: str) -> None:
        """Wait until the page says that it is in this state."""
        await expect(self.page.locator("#state")).to_have_attribute("data-state", word, timeout=WAIT_MS)

    async def away_from_rows(self) -> None:
        """Take pointer and keyboard out of the lists, which stand still while somebody reads them."""
        await self.page.mouse.move(640, 1)
        await self.page.evaluate("document.activeElement.blur()")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lived_in() -> AsyncIterator[tuple[Town, str]]:
    """Two workers, and a gateway in front of them."""
    with tempfile.TemporaryDirectory(prefix="kvpage-") as folder:
        async with town(Path(folder)) as built:
            slow = built.start("b", allow=["a"], backend="memory", rate_limit_bytes_s=RATE_BYTES_S, pages=256)
            await asyncio.gather(built.start("a", backend="memory", pages=256), slow)
            bus = await NatsBus.connect(built.broker.url, name="gateway", token=built.broker.token, topics=TOPICS)
            async with running(GatewaySettings(source_allow="a"), bus, TOPICS) as parts, served(parts) as url:
                yield built, url
            await bus.close()


@pytest_asyncio.fixture(loop_scope="module")
async def seen(lived_in: tuple[Town, str], browser: Browser) -> AsyncIterator[Seen]:
    built, url = lived_in
    page = await browser.new_page(viewport=WIDE, color_scheme="light", reduced_motion="reduce")
    found = Seen(built, url, page, Complaints(page))
    await page.goto(url)
    await found.state("live")
    yield found
    await page.close()
    assert not found.complaints.heard


async def test_an_empty_page_says_what_to_do_next(seen: Seen) -> None:
    await expect(seen.page.locator("#members > li")).to_have_count(2)
    await expect(seen.page.locator("#members > li").first).to_contain_text("256 free")
    await expect(seen.page.locator("#members > li").first).to_contain_text("0 quarantined")
    await expect(seen.page.locator("#members > li").first).to_contain_text("epoch 1-")
    await expect(seen.page.locator("#empty-flight code")).to_have_text('kvbus stage --from a --to b "…"')
    await expect(seen.page.locator("#empty-out")).to_be_visible()
    await expect(seen.page.locator("#empty-isolated")).to_be_visible()
    await shot(seen.page, "page-empty")


async def test_a_transfer_is_seen_in_flight_and_then_among_the_outcomes(seen: Seen) -> None:
    await seen.town.stage(prompt("page-before", 3))
    handles = [await seen.town.ask(prompt(f"page-flight-{blocks}", blocks)) for blocks in (48, 36, 24)]
    await expect(seen.flight).to_have_count(3, timeout=WAIT_MS)
    moving = seen.flight.filter(has_text="48")
    await expect(moving.locator(".step b")).to_have_text(re.compile("moving|way"), timeout=WAIT_MS)
    await expect(moving.locator(".way")).to_have_text("a → b")
    await expect(moving.locator(".pages")).to_contain_text("0 / 48")
    await expect(seen.page.locator("#n-flight")).to_have_text("3")
    leases = seen.page.locator("#leases tbody tr")
    await expect(leases).to_have_count(6)  # a write at b and a read at a, for each
    await expect(leases.filter(has_text="write from a")).to_have_count(3)
    await expect(seen.page.locator("#members > li").first).to_contain_text("3 leases")
    await expect(seen.page.locator("#members > li").last).to_contain_text("3 transfers run")
    await expect(seen.page.locator("#pace")).to_be_visible()
    await shot(seen.page, "page-flight")

    await moving.click()  # its story so far
    await expect(seen.story.locator(".badge")).to_have_text("▸ in flight")
    await seen.page.keyboard.press("Escape")
    await seen.away_from_rows()
    for handle in handles:
        outcome = await handle.outcome(60)
        assert outcome is not None
        assert outcome.outcome == "settled"
        await expect(seen.page.locator(f'#ended tr[data-opens="{outcome.transfer}"]')).to_contain_text("✓ settled")
    await expect(seen.flight).to_have_count(0)
    await expect(seen.page.locator("#empty-leases")).to_be_visible()
    await expect(seen.page.locator("#n-settled")).to_have_text("4")


async def test_a_transfer_opens_to_its_story_in_four_lanes(seen: Seen) -> None:
    outcome = await seen.town.stage(prompt("page-story", 6))
    await seen.page.locator(f'#ended tr[data-opens="{outcome.transfer}"]').click()
    lanes = seen.story.locator(".lanes")
    await expect(lanes.locator(".heads span[data-lane]")).to_have_text(
        ["requester", "destination b", "source a", "data plane"]
    )
    for lane, words in {
        "requester": "in the queue",
        "destination": "asking a for 6 blocks",
        "source": "read 6 pages for b",
        "data plane": "delivered: 6/6 blocks",
    }.items():
        await expect(lanes.locator(f'li[data-lane="{lane}"]').filter(has_text=words).first).to_be_visible()
    await expect(seen.story.locator(".verdict")).to_contain_text("6 of 6 blocks")
    await expect(seen.story.locator(".verdict")).to_contain_text("Nothing is out.")
    await expect(seen.story.locator(".told tbody tr")).to_have_count(2)
    await expect(seen.story.locator(".faults")).to_have_count(0)
    await shot(seen.page, "page-story")


async def test_a_failed_transfer_says_why_in_the_list_and_in_its_story(seen: Seen) -> None:
    outcome = await seen.town.stage(prompt("page-missing", 4), on_miss="fail")
    row = seen.page.locator(f'#ended tr[data-opens="{outcome.transfer}"]')
    await expect(row.locator(".badge")).to_have_text("✕ failed")
    await expect(row).to_contain_text("source misses")
    await row.click()
    await expect(seen.story.locator(".badge")).to_have_text("✕ failed")
    await expect(seen.story.locator('.lanes li[data-tone="bad"]').first).to_contain_text("a holds 0 of the 4 blocks")
    await shot(seen.page, "page-failed")


async def test_the_keyboard_alone_gets_everywhere_and_out_again(seen: Seen) -> None:
    await expect(seen.ended.first).to_be_visible()
    press = seen.page.keyboard.press
    focused = seen.page.locator(":focus")
    await press("Tab")
    await expect(focused).to_have_text("Skip to transfers")
    await press("Tab")
    await expect(focused).to_have_attribute("data-opens", re.compile("."))
    first = await focused.get_attribute("data-opens")
    outline = await focused.evaluate("row => getComputedStyle(row).outlineStyle")
    assert outline == "solid", "who comes by the keyboard sees where they are"
    await press("ArrowDown")
    assert await focused.get_attribute("data-opens") != first
    await press("Home")
    await press("Enter")
    await expect(seen.story).to_be_visible()
    await expect(seen.story.locator(".lanes")).to_be_visible()
    await expect(focused).to_have_text("Esc ✕")
    await press("Escape")
    await expect(seen.story).to_have_count(0)
    await expect(focused).to_have_attribute("data-opens", first or "")
    await press("Tab")  # the list is one stop, so the next one is the footer's link
    await expect(focused).to_have_text("HTTP interface")


async def test_an_address_with_a_transfer_opens_its_story(seen: Seen) -> None:
    transfer = await seen.ended.first.get_attribute("data-opens")
    await seen.page.goto("about:blank")
    await seen.page.goto(f"{seen.url}/#transfer={transfer}")
    await expect(seen.story.locator("h2")).to_contain_text(str(transfer))
    await seen.page.goto("about:blank")
    await seen.page.goto(f"{seen.url}/#transfer=nobody-knows-it")
    await expect(seen.story).to_contain_text("no recorded event names it")
    await seen.page.goto("about:blank")
    await seen.page.goto(f"{seen.url}/#transfer=%")  # an address that somebody broke: the page works all the same
    await expect(seen.ended.first).to_be_visible()
    await expect(seen.story).to_have_count(0)


async def test_a_story_that_nobody_recorded_is_asked_for_less_and_less_often_until_there_is_one(
    browser: Browser,
) -> None:
    connect = MemoryBroker(clock=lambda: 0.0).connect
    b, bus, page = Teller(from_ns=time.time_ns()), connect(), await browser.new_page(viewport=WIDE)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/story") else None)
    await page.clock.install()
    async with running(GatewaySettings(), connect(), TOPICS) as parts, served(parts) as url:
        await page.goto(f"{url}/#transfer=b-000001")
        await expect(page.locator("dialog[open]")).to_contain_text("no recorded event names it")
        pause_ms = 0
        while pause_ms < 30_000:

            async def is_longer(before: int = pause_ms) -> bool:
                return bool(await page.evaluate(f"kvbusPage.story.pause > {before}"))

            await until(is_longer, what="the story was asked for again")
            pause_ms = await page.evaluate("Math.ceil(kvbusPage.story.pause)")
            await page.clock.fast_forward(pause_ms)
        assert len(asked) < 20
        step = b.step("accepted", "b-000001")
        data = encode(step.header, step.body)  # type: ignore[arg-type] # it is of a known kind
        await bus.store(TOPICS.facts("b"), data, message_id=step.header.event_id)

        async def is_told() -> bool:
            await page.clock.fast_forward(pause_ms)
            return await page.locator("dialog[open] .lanes").count() > 0

        await until(is_told)
        await page.close()


async def test_an_update_that_was_missed_is_repaired_by_a_snapshot(seen: Seen) -> None:
    await expect(seen.ended.first).to_be_visible()
    await seen.page.evaluate("kvbusPage.source.tables.ended = {}; kvbusPage.source.sequence -= 1; 0")
    await until(lambda: seen.page.evaluate("kvbusPage.source.repairs"), what="the page asked for all of it again")
    await expect(seen.ended.first).to_be_visible()
    assert await seen.page.evaluate("Object.keys(kvbusPage.source.tables.ended).length") > 0


async def test_nothing_of_a_prompt_is_told_or_shown(seen: Seen) -> None:
    secret = prompt("page-secret", 3)
    text = as_text(secret)
    outcome = await seen.town.stage(text)
    await seen.page.locator(f'#ended tr[data-opens="{outcome.transfer}"]').click()
    await expect(seen.story.locator(".lanes")).to_be_visible()
    shown = await seen.page.evaluate("document.documentElement.outerHTML")
    async with httpx.AsyncClient(base_url=seen.url, timeout=60) as client:
        cluster = (await client.get("/v1/cluster")).text
        story = (await client.get(f"/v1/transfers/{outcome.transfer}/story")).text
    assert outcome.transfer in cluster
    assert outcome.transfer in story
    for told in (shown, cluster, story):
        assert not [place for place in range(len(text) - 8) if text[place : place + 8] in told]
        assert ", ".join(map(str, secret[:6])) not in told


async def test_pages_out_of_use_and_isolated_peers_are_named_with_their_reasons(browser: Browser) -> None:
    connect = MemoryBroker(clock=lambda: 0.0).connect
    b, bus = Teller(from_ns=time.time_ns() - round(90e9)), connect()
    page = await browser.new_page(viewport=WIDE)
    told = [
        b.granted(7, pages=3),
        b.facts(7, Fact.TAKEN, Fact.GRANTED, Fact.SUBMITTED),
        b.facts(7, Fact.CANCELLED, Fact.ABANDONED, failure="deadline", text="30 s have passed"),
        b.facts(0, failure="peer_lost", peer="a", text="ucx: it does not move"),
    ]
    async with running(GatewaySettings(), connect(), TOPICS) as parts, served(parts) as url:
        await page.goto(url)
        await until(lambda: parts.feed.listening, what="facts are heard")
        for event in told:
            data = encode(event.header, event.body)  # type: ignore[arg-type] # it is of a known kind
            await bus.store(TOPICS.facts("b"), data, message_id=event.header.event_id)
        out, isolated = page.locator("#out > li"), page.locator("#isolated > li")
        await expect(out).to_contain_text("3 pages of b, lease T7")
        await expect(out).to_contain_text("nothing says that access has ended: 30 s have passed")
        await expect(page.locator("#n-out")).to_have_text("3")
        await expect(isolated).to_contain_text("a, by b")
        await expect(isolated).to_contain_text("ucx: it does not move")
        await shot(page, "page-out-of-use")
        await out.focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("dialog[open] h2")).to_contain_text("b-1")
        await page.close()


async def test_a_member_that_drains_is_named_as_that_until_it_takes_part_again(browser: Browser) -> None:
    connect = MemoryBroker(clock=lambda: 0.0).connect
    b, bus, page = Teller(from_ns=time.time_ns()), connect(), await browser.new_page(viewport=WIDE)
    beat = HeartbeatSeen(
        transfers_running=0, leases_held=1, pages_free=9, pages_cached=3, pages_lent=3, facts_sequence=0, settle_n=0
    )
    async with running(GatewaySettings(), connect(), TOPICS) as parts, served(parts) as url:
        await page.goto(url)
        await until(lambda: parts.feed.listening, what="facts are heard")
        for state, shown in (("draining", "◌ draining"), (None, "")):
            event = b(beat.model_copy(update={"state": state}))
            data = encode(event.header, event.body)  # type: ignore[arg-type] # it is of a known kind
            await bus.publish(TOPICS.heartbeat("b"), data)
            await expect(page.locator(".drains")).to_have_text(shown)
        await page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_words_stand_out_from_their_ground(seen: Seen, scheme: str) -> None:
    await seen.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type] # one of the two
    await expect(seen.ended.first).to_be_visible()
    found = await seen.page.evaluate(CONTRASTS)
    assert len(found) > 30
    assert not [one for one in found if one["ratio"] < 4.5], "WCAG AA asks for 4.5"
    await seen.ended.filter(has_text="failed").first.click()
    await expect(seen.story.locator(".lanes")).to_be_visible()
    assert not [one for one in await seen.page.evaluate(CONTRASTS) if one["ratio"] < 4.5]
    await shot(seen.page, f"page-failed-{scheme}")


async def test_a_phone_shows_all_of_it_without_scrolling_sideways(seen: Seen) -> None:
    await seen.page.set_viewport_size(PHONE)
    await expect(seen.ended.first).to_be_visible()
    widths = "[document.documentElement.scrollWidth, innerWidth]"
    shown, there = await seen.page.evaluate(widths)
    assert shown <= there
    await shot(seen.page, "page-phone")
    await seen.ended.first.click()
    await expect(seen.story.locator(".lanes li p").first).to_be_visible()
    shown, there = await seen.page.evaluate("[document.getElementById('story').scrollWidth, innerWidth]")
    assert shown <= there
    await shot(seen.page, "page-phone-story")


async def test_a_broker_that_is_away_is_told_with_since_when_and_then_it_is_live_again(seen: Seen) -> None:
    pid = seen.town.broker.pid
    assert pid is not None
    await seen.town.ask(prompt("page-meanwhile", 32))
    await expect(seen.flight.locator(".step b")).to_have_text(re.compile("moving|way"), timeout=WAIT_MS)
    transfer = await seen.flight.first.get_attribute("data-opens")
    await seen.town.broker.stop()
    await seen.state("broker")
    notice = seen.page.locator("#notice")
    await expect(notice).to_contain_text("The broker is away")
    await expect(notice).to_contain_text(re.compile(r"since \d\d:\d\d:\d\d"))
    await expect(seen.page.locator("#state")).to_have_text("Stale")
    await expect(seen.page.locator("#members > li")).to_have_count(2)
    await shot(seen.page, "page-broker-away")
    await seen.town.broker.start()
    assert seen.town.broker.pid != pid
    await seen.state("live")
    await expect(notice).to_be_hidden()
    await until(lambda: seen.town.bus.health().connected, 60, what="the requester is connected again, too")
    row = seen.page.locator(f'#ended tr[data-opens="{transfer}"]')
    await expect(row).to_contain_text("settled", timeout=2 * WAIT_MS)  # it went on without the broker


async def test_a_gateway_that_is_away_is_told_and_a_new_one_is_joined(browser: Browser) -> None:
    connect = MemoryBroker(clock=lambda: 0.0).connect
    page = await browser.new_page(viewport=WIDE)
    state = page.locator("#state")
    async with running(GatewaySettings(), connect(), TOPICS) as parts, served(parts) as url:
        await page.goto(url)
        await expect(state).to_have_attribute("data-state", "live")
        await expect(page.locator("#empty-members")).to_contain_text("kvbus up")
    await expect(state).to_have_attribute("data-state", "gateway", timeout=WAIT_MS)
    await expect(page.locator("#notice")).to_contain_text("The gateway does not answer since")
    port = int(url.rpartition(":")[2])
    async with running(GatewaySettings(port=port), connect(), TOPICS) as parts, served(parts):
        await expect(state).to_have_attribute("data-state", "live", timeout=WAIT_MS)
        await until(lambda: parts.page.clients == 1, what="the page follows the new gateway")
        await page.close()
    await until(lambda: parts.page.clients == 0, what="who has gone is forgotten")


CONTRASTS = """() => {
  const light = ([r, g, b]) => {
    const linear = (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
    const [x, y, z] = [r, g, b].map((one) => linear(one / 255));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = parts(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const root = document.querySelector("dialog[open]") ?? document.body;
  return [...root.querySelectorAll("*")]
    .filter((node) => node.checkVisibility() && !node.closest(".skip, .hidden"))
    .filter((node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()))
    .map((node) => {
      const one = light(parts(getComputedStyle(node).color)), other = light(ground(node));
      const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
      return { ratio, text: node.textContent.trim().slice(0, 40), name: node.tagName + "." + node.className };
    });
}"""
"""The contrast of each piece of text with what it stands on, as WCAG computes it."""
