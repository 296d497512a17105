"""The live page's side of the gateway: its files, its numbered updates, and stories as `kvbus story` tells them."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import fields
from functools import partial
from typing import Any

import httpx
import pytest

from kvbus.commands.stories import Story, tell
from kvbus.commands.story_documents import story_document
from kvbus.commands.trails import NotFound
from kvbus.events import Header, TransferStep, encode
from kvbus.gateway.answers import Problem
from kvbus.gateway.page_doors import FOLDER, POLICY, TYPES
from kvbus.gateway.page_feed import CLIENTS_MAX, QUEUE_MAX
from kvbus.gateway.page_rows import ROWS_MAX, TABLES
from kvbus.gateway.story_reader import AT_ONCE, PAGE_EVENTS, WAITING_MAX, Stories
from kvbus.picture import rows
from kvbus.picture.whole import Picture
from kvbus.testing.bus import MemoryBroker
from tests.unit.gateway_parts import TOPICS, Stage, prompt, stage
from tests.unit.story_parts import HASH, TRANSFER, Pair, flushed
from tests.waiting import DEADLINE_S, until

EVENTS = "/v1/cluster/events"
EACH_SECOND = 4
"""Updates, as the page feed promises."""


@pytest.fixture
async def gateway() -> AsyncIterator[Stage]:
    async with stage() as running:
        yield running


class Copy:
    """The cluster as a client holds it that takes a snapshot and then updates; it sees gaps as the page does."""

    def __init__(self, answer: httpx.Response) -> None:
        self._messages = self._read(answer)
        self.tables: dict[str, dict[str, Any]] = {}
        self.head: dict[str, Any] = {}
        self.state = ""
        self.sequence = -1
        self.updates = 0

    async def until(self, predicate: "Callable[[Copy], bool]") -> None:
        """Take updates until something holds."""
        async with asyncio.timeout(DEADLINE_S):
            while not predicate(self):
                self._take(*await anext(self._messages))

    def _take(self, name: str, told: dict[str, Any]) -> None:
        if name == "snapshot":
            self.tables = told["tables"]
        else:
            assert told["previous"] == self.sequence, "no update is missed"
            for table, changed in told["set"].items():
                self.tables[table].update(changed)
            for table, keys in told["gone"].items():
                for key in keys:
                    del self.tables[table][key]
            self.updates += 1
        self.sequence, self.head, self.state = told["sequence"], told["head"], told["bus"]["state"]

    async def _read(self, answer: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        held: dict[str, str] = {}
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            held[name] = value
            if not line and "data" in held:
                yield held["event"], json.loads(held["data"])
                held = {}


async def test_the_page_and_its_files_come_with_a_policy_that_lets_nothing_else_in(gateway: Stage) -> None:
    page = await gateway.client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["content-security-policy"] == POLICY
    named = re.findall(r'(?:src|href)="(/page/[^"]+)"', page.text)
    assert len(named) >= 4
    imported = {f"/page/{name}" for path in FOLDER.glob("*.js") for name in re.findall(r'"\./(.+?)"', path.read_text())}
    for path in {*named, *imported}:
        answered = await gateway.client.get(path)
        assert answered.status_code == 200, path
        assert answered.headers["x-content-type-options"] == "nosniff"
    again = await gateway.client.get("/", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/page/none.js", "/page/..%2Fapp.py", "/page/%2e%2e/app.py", "/page/"])
async def test_no_other_file_is_given_out(gateway: Stage, path: str) -> None:
    assert (await gateway.client.get(path)).status_code == 404


def test_no_file_of_the_page_names_another_place_or_runs_text_as_code() -> None:
    known = [path for path in FOLDER.iterdir() if path.suffix in TYPES]
    assert len(known) == len(list(FOLDER.iterdir())) > 5
    for path in known:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.|innerHTML|insertAdjacentHTML|eval\(|document\.write", text), path.name


def test_no_row_has_a_place_for_a_prompt() -> None:
    shown = [rows.MemberRow, rows.TransferRow, rows.LeaseRow, rows.OutOfUseRow, rows.IsolatedRow, rows.EndedRow]
    names = {one.name for kind in shown for one in fields(kind)}
    assert not {name for name in names if "prompt" in name or "token" in name} - {"block_tokens"}


async def test_a_client_is_told_all_and_then_what_changes(gateway: Stage) -> None:
    gateway.b.settles = False
    async with gateway.client.stream("GET", EVENTS) as answer:
        copy = Copy(answer)
        await copy.until(lambda copy: set(copy.tables.get("members", ())) == {"a/m0", "b/m0"})
        await gateway.ask(prompt=prompt())
        request = await gateway.b.taken()
        await gateway.b.step(request, "accepted")
        await copy.until(lambda copy: "T0" in copy.tables["transfers"])
        row = copy.tables["transfers"]["T0"]
        assert (row["step"], row["destination"], row["request_hash"]) == ("accepted", "b", request.request_hash)
        await gateway.b.end(request, "failed")
        await copy.until(lambda copy: "T0" in copy.tables["ended"])
        assert copy.tables["transfers"] == {}
        assert copy.tables["ended"]["T0"]["reason"] == "it is not there"
        assert copy.head["outcomes"] == {"failed": 1}
        whole = (await gateway.client.get("/v1/cluster")).json()
        assert whole["sequence"] >= copy.sequence
        assert set(whole["tables"]) == set(TABLES)
        assert whole["tables"]["ended"] == copy.tables["ended"]
    await until(lambda: gateway.parts.page.clients == 0, what="who has gone is forgotten")


async def test_a_thousand_events_at_once_come_as_few_updates_with_few_rows(gateway: Stage) -> None:
    gateway.b.settles = False
    await gateway.ask(prompt=prompt())
    request = await gateway.b.taken()
    async with gateway.client.stream("GET", EVENTS) as answer:
        copy = Copy(answer)
        await copy.until(lambda copy: copy.sequence >= 0)
        before, began = copy.updates, time.monotonic()
        for number in range(300):
            accepted = {"transfer": f"many-{number}", "request_hash": request.request_hash, "step": "accepted"}
            await gateway.b.report(_step(accepted))
        await copy.until(lambda copy: copy.head["transfers_count"] == 300)
        assert len(copy.tables["transfers"]) == ROWS_MAX
        assert copy.updates - before <= EACH_SECOND * (time.monotonic() - began) + 2


async def test_a_client_that_does_not_read_costs_a_bounded_queue_and_sees_the_gap(gateway: Stage) -> None:
    page = gateway.parts.page
    client = page.join()
    for number in range(3 * QUEUE_MAX):
        await gateway.b.report(_step({"transfer": f"T-{number}", "request_hash": "cd" * 16, "step": "accepted"}))
        await until(partial(_has, page.picture, number + 1), what="the fact is heard")
        page.snapshot()
    told: list[int] = []
    lost = 0
    while (item := await client.next(0.0)) is not None:
        if isinstance(item, int):
            lost = item
            break
        told.append(json.loads(item.data)["sequence"])
    assert len(told) == QUEUE_MAX
    assert lost >= 2 * QUEUE_MAX - 1
    page.leave(client)


async def test_no_more_clients_look_than_the_gateway_serves(gateway: Stage) -> None:
    clients = [gateway.parts.page.join() for _ in range(CLIENTS_MAX)]
    refused = await gateway.client.get(EVENTS)
    assert refused.status_code == 503
    for client in clients:
        gateway.parts.page.leave(client)


async def test_a_bus_that_is_away_is_told_with_since_when() -> None:
    broker = MemoryBroker(clock=lambda: 0.0)
    async with stage(broker.connect) as gateway, gateway.client.stream("GET", EVENTS) as answer:
        copy = Copy(answer)
        await copy.until(lambda copy: copy.state == "live")
        bus: Any = gateway.parts.bus
        bus.cut()
        await copy.until(lambda copy: copy.state == "away")
        told = (await gateway.client.get("/v1/cluster")).json()
        assert told["bus"]["since_ms"] <= told["now_ms"]
        bus.restore()
        await copy.until(lambda copy: copy.state == "live")


async def test_a_story_by_http_is_the_one_that_the_command_tells() -> None:
    broker = MemoryBroker(clock=lambda: 0.0)
    async with stage(broker.connect) as gateway:
        pair = Pair(broker.connect())
        pair.whole()
        async with flushed(pair.a, pair.b):
            await until(lambda: gateway.parts.page.picture.span(TRANSFER), what="the outcome is heard")
        events = await pair.events()
        for wanted in (TRANSFER, HASH, TRANSFER[:6]):
            told = (await gateway.client.get(f"/v1/transfers/{wanted}/story")).json()
            assert told.pop("cut") is False
            own = tell(events, wanted)
            assert isinstance(own, Story)
            assert own.complete
            assert told == json.loads(json.dumps(story_document(own)))
            assert {event["lane"] for event in told["events"]} == {"requester", "destination", "source", "data plane"}


async def test_an_event_from_the_end_of_time_ends_no_story_and_keeps_none_reading() -> None:
    bus = MemoryBroker(clock=lambda: 0.0).connect()
    for number in range(1, 601):
        late = number == PAGE_EVENTS  # a reading that goes by time would stop behind it, and never get further
        step = TransferStep(transfer="T-last" if number == 600 else "T", request_hash=HASH, step="accepted")
        header = Header(k=step.KIND, i="b", m="m0", e=1, s=number, t=2**63 - 1 if late else number)
        await bus.store(TOPICS.facts("b"), encode(header, step), message_id=str(number))
    stories = Stories(bus=bus, topics=TOPICS, span=lambda _: None)
    async with asyncio.timeout(60):
        last, cut = await stories.tell("T-last")
        unknown, _ = await stories.tell("nobody")
    assert isinstance(last, Story)
    assert isinstance(unknown, NotFound)
    assert not cut


async def test_more_askers_than_may_wait_for_a_story_are_sent_away_at_once() -> None:
    connect = MemoryBroker(clock=lambda: 0.0).connect
    stories = Stories(bus=connect(), topics=TOPICS, span=lambda _: None)
    answered = await asyncio.gather(
        *(stories.tell("T") for _ in range(AT_ONCE + WAITING_MAX + 2)), return_exceptions=True
    )
    refused = [one for one in answered if isinstance(one, Problem)]
    assert [(one.status, one.retry_after_s) for one in refused] == [(503, 1)] * 2
    assert sum(isinstance(one, tuple) and isinstance(one[0], NotFound) for one in answered) == AT_ONCE + WAITING_MAX
    told, _ = await stories.tell("T")  # and their places are free again
    assert isinstance(told, NotFound)


async def test_a_transfer_that_nobody_recorded_has_no_story_and_others_are_named(gateway: Stage) -> None:
    await gateway.ask(prompt=prompt())
    await gateway.b.taken()
    answered = await gateway.client.get("/v1/transfers/nothing/story")
    assert answered.status_code == 404
    assert "no recorded event names it" in answered.json()["error"]
    assert (await gateway.client.get(f"/v1/transfers/{'x' * 500}/story")).status_code == 404


def _has(picture: Picture, count: int) -> bool:
    return picture.show(1).transfers_count == count


def _step(values: dict[str, str]) -> TransferStep:
    return TransferStep.model_validate(values)
