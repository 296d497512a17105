"""Metrics of real workers and of a real gateway: each number moves with what it stands for."""

import asyncio
import re
import signal
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from kvbus.bus import NatsBus
from kvbus.gateway.serving import running, served
from kvbus.gateway.settings import GatewaySettings
from kvbus.metrics import table
from kvbus.metrics.reading import Kind
from kvbus.testing.cluster import free_ports
from tests.exposed import Exposed, well_named
from tests.flow.town import BLOCK, PAGE_BYTES, TOPICS, Town, prompt, town
from tests.tampering_pages import flip_a_bit
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAMES = ("a", "b", "slow")
BLOCKS = 6
READY_S = 60.0
SLOW_ROUNDS = 10_000
"""For each token: 320 of them take a second and more, hundreds of times a scrape, on any machine."""


@dataclass(slots=True)
class Seen:
    """A town whose workers serve metrics, with a gateway in front of it."""

    town: Town
    ports: dict[str, int]
    gateway: httpx.AsyncClient

    async def worker(self, name: str) -> Exposed:
        """What a worker tells of itself."""
        async with httpx.AsyncClient(timeout=60) as client:
            answered = await client.get(f"http://127.0.0.1:{self.ports[name]}/metrics")
        assert answered.status_code == 200, answered.text
        return Exposed(answered.text)

    async def cluster(self) -> Exposed:
        """What the gateway tells of itself and of all."""
        answered = await self.gateway.get("/metrics")
        assert answered.status_code == 200, answered.text
        return Exposed(answered.text)

    async def cluster_with(self, name: str, value: float, **labels: str) -> Exposed:
        """What the gateway tells once a value stands there, and every member has answered to be counted.

        Scrapes within a second share what members answered, and a busy one may miss a scrape.
        """
        told: list[Exposed] = []

        async def stands_there() -> bool:
            told[:] = [await self.cluster()]
            all_answered = all(one.value == 1 for one in told[0].of("kvbus_member_up"))
            return all_answered and any(one.value == value for one in told[0].of(name, **labels))

        await until(stands_there, READY_S, what=f"{name} is {value}")
        return told[0]

    async def ask(self, ids: list[int], **body: object) -> str:
        """Ask for a transfer from a into b over HTTP; returns how it ended."""
        body = {"source": "a", "destination": "b", "prompt": ids, **body}
        answered = await self.gateway.post("/v1/kv_transfer", json=body)
        assert answered.status_code == 202, answered.text
        path = f"/instances/b/v1/kv_transfer/{answered.json()['request_hash']}"
        ended = await self.gateway.get(path, params={"wait_s": 30})
        return str(ended.json()["status"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen() -> AsyncIterator[Seen]:
    with tempfile.TemporaryDirectory(prefix="kvflow-") as name:
        async with town(Path(name)) as built:
            ports = dict(zip(NAMES, free_ports(len(NAMES)), strict=True))
            for instance, rounds in zip(NAMES, (1, 1, SLOW_ROUNDS), strict=True):
                arguments = ["--instance", instance, "--engine-options", f'{{"work_rounds": {rounds}}}']
                arguments += ["--backend", "memory", "--digests", "always", "--metrics", f":{ports[instance]}"]
                arguments += [part for other in NAMES if other != instance for part in ("--allow", other)]
                await built.start_again(instance, arguments)
            bus = await NatsBus.connect(built.broker.url, name="gateway", token=built.broker.token, topics=TOPICS)
            settings = GatewaySettings(source_allow="a")
            async with (
                running(settings, bus, TOPICS) as parts,
                served(parts) as url,
                httpx.AsyncClient(base_url=url, timeout=60) as client,
            ):
                await until(lambda: parts.feed.listening, READY_S, what="the facts are heard")
                yield Seen(built, ports, client)
            await bus.close()


# R24
async def test_a_transfer_raises_what_is_counted_of_it_here_and_there_and_at_the_gateway(seen: Seen) -> None:
    before = await seen.worker("b")
    assert await seen.ask(prompt("counted", BLOCKS)) == "transferred"
    await seen.town.at_rest("a", "b")
    source, destination = await seen.worker("a"), await seen.worker("b")
    cluster = await seen.cluster_with("kvbus_transfers_total", 1, outcome="settled", instance="b")

    assert before.value("kvbus_transfers_total", outcome="settled") == 0
    for told in (destination, cluster):
        at_b = {"instance": "b", "member": "m0"}
        assert told.value("kvbus_transfers_total", outcome="settled", **at_b) == 1
        assert told.value("kvbus_transferred_bytes_total", **at_b) == BLOCKS * PAGE_BYTES
        assert told.value("kvbus_binding_bytes_total", binding="memory", **at_b) == BLOCKS * PAGE_BYTES
        assert told.value("kvbus_binding_ends_total", binding="memory", evidence="completed", **at_b) == 1
        assert told.value("kvbus_binding_submissions_total", binding="memory", **at_b) == 1
        assert told.value("kvbus_transfer_duration_seconds_count", **at_b) == 1
        assert 0 < told.value("kvbus_transfer_duration_seconds_sum", **at_b) < 60
        assert told.value("kvbus_transfer_size_bytes_sum", **at_b) == BLOCKS * PAGE_BYTES
        assert told.value("kvbus_transfer_size_bytes_bucket", le="262144", **at_b) == 0
        assert told.value("kvbus_transfer_size_bytes_bucket", le="1048576", **at_b) == 1
        assert told.value("kvbus_transport_orders_total", transport="memory", **at_b) == 1
        assert told.value("kvbus_pool_pages", state="cached", **at_b) == BLOCKS
        assert told.value("kvbus_requests_total", verdict="fired", **at_b) == 1
    for told in (source, cluster):
        assert told.value("kvbus_binding_ends_total", binding="lending", evidence="peer_ack", instance="a") == 1
    assert cluster.value("kvbus_gateway_transfers_transferred_total", destination="b") == 1
    assert cluster.labels("kvbus_member_up", "instance") == set(NAMES)
    assert all(one.value == 1 for one in cluster.of("kvbus_member_up"))
    assert all(0 <= one.value < 15 for one in cluster.of("kvbus_heartbeat_age_seconds"))


async def test_failures_and_refusals_are_counted_by_reason(seen: Seen) -> None:
    assert await seen.ask(prompt("missing", 2), on_miss="fail") == "failed"
    handle = await seen.town.ask(prompt("refused", 2), source="stranger")
    assert (await handle.verdict(30)).verdict == "refused"
    told = await seen.cluster_with("kvbus_requests_refused_total", 1, reason="source", instance="b")
    assert told.value("kvbus_transfers_total", outcome="failed", instance="b") == 1
    assert told.value("kvbus_transfer_failures_total", reason="source_misses", instance="b") == 1
    assert told.value("kvbus_requests_total", verdict="refused", instance="b") == 1
    assert told.value("kvbus_transfer_duration_seconds_count", instance="b") == 1, "of what failed no time is spread"


async def test_a_page_in_quarantine_shows(seen: Seen) -> None:
    ids = prompt("flipped", BLOCKS)
    await seen.town.answer("a", ids, store=True)

    async def digests_are_made() -> bool:
        return (await seen.town.counters("a"))["digests_made"] >= BLOCKS

    await until(digests_are_made, READY_S)
    with seen.town.workers["a"].client() as client:
        where = client.where(ids)
    flip_a_bit(where, where.pages[2])
    assert (await seen.town.answer("a", ids)).end.cached_tokens == 2 * BLOCK
    cluster = await seen.cluster_with("kvbus_pool_pages", 1, state="quarantined", instance="a")
    for told in (await seen.worker("a"), cluster):
        assert told.value("kvbus_pool_pages", state="quarantined", instance="a") == 1
        assert told.value("kvbus_page_digest_faults_total", fault="spoiled", instance="a") == 1
        assert told.value("kvbus_holding_pages", instance="a") == 1


async def test_a_lease_that_is_out_shows_with_its_age(seen: Seen) -> None:
    computing = asyncio.ensure_future(seen.town.answer("slow", prompt("slow", 20), store=True))
    ages: list[float] = []

    async def is_out() -> bool:
        told = await seen.worker("slow")
        if told.value("kvbus_leases_held"):
            ages.append(told.value("kvbus_leases_oldest_age_seconds"))
        return len(ages) >= 2

    await until(is_out, READY_S, what="a lease is out at two scrapes")
    assert 0 < ages[0] < ages[1]
    await computing
    await seen.town.at_rest("slow")
    told = await seen.worker("slow")
    assert (told.value("kvbus_leases_held"), told.value("kvbus_leases_oldest_age_seconds")) == (0, 0)


async def test_each_counter_that_a_metric_is_made_of_is_counted_somewhere(seen: Seen) -> None:
    counted = {key for name in NAMES for key in await seen.town.counters(name)}
    for metric in table.MEMBER:
        if metric in table.SETTLING[1:] or metric.name == "kvbus_transport_refusals_total":
            continue  # an instance of several members has these, and one whose transport refused an order
        name = metric.counter if metric.kind is not Kind.HISTOGRAM else f"{metric.counter}_sum"
        shape = re.compile(re.sub(r"\\\{\w+\\\}", "[a-z0-9_-]+", re.escape(name)))
        assert any(shape.fullmatch(key) for key in counted), f"{metric.name} is made of {name}, which nobody counts"


async def test_what_promtool_has_to_say_of_real_answers_is_nothing(seen: Seen) -> None:
    well_named(await seen.worker("b"))
    well_named(await seen.cluster())


async def test_a_worker_that_stands_still_is_down_and_silent(seen: Seen) -> None:
    worker = seen.town.workers["slow"]
    worker.signal(signal.SIGSTOP)
    try:

        async def is_missed() -> bool:
            told = await seen.cluster()
            silent_s = told.value("kvbus_heartbeat_age_seconds", instance="slow")
            is_down = told.value("kvbus_member_up", instance="slow") == 0
            return is_down and silent_s > 2 and told.value("kvbus_member_up", instance="b") == 1

        await until(is_missed, READY_S, what="it is missed, and b is not")
    finally:
        worker.signal(signal.SIGCONT)

    async def is_back() -> bool:
        return (await seen.cluster()).value("kvbus_member_up", instance="slow") == 1

    await until(is_back, READY_S, what="it is back")


async def test_without_a_broker_a_worker_still_tells_what_waits_for_it(seen: Seen) -> None:
    await seen.town.at_rest("b")
    before = await seen.worker("b")
    assert (before.value("kvbus_bus_connected"), before.value("kvbus_outbox_bytes")) == (1, 0)
    seen.town.broker.kill()
    try:
        await seen.town.answer("b", prompt("no broker", 4), store=True)

        async def waits() -> bool:
            told = await seen.worker("b")
            assert told.value("kvbus_outbox_limit_bytes") > told.value("kvbus_outbox_busy_bytes")
            away = told.value("kvbus_bus_connected") == 0
            return away and told.value("kvbus_outbox_bytes") > 0 and told.value("kvbus_outbox_events") > 0

        await until(waits, READY_S, what="facts wait")

        async def is_stale() -> bool:
            return (await seen.cluster()).value("kvbus_gateway_stale") == 1

        await until(is_stale, READY_S, what="the gateway says that it is stale")
    finally:
        await seen.town.broker.start()

    async def is_over() -> bool:
        told = await seen.worker("b")
        back = told.value("kvbus_bus_reconnects_total") > before.value("kvbus_bus_reconnects_total")
        return back and told.value("kvbus_bus_connected") == 1 and told.value("kvbus_outbox_bytes") == 0

    await until(is_over, READY_S, what="all of it was stored")
    told = await seen.worker("b")
    assert told.value("kvbus_bus_disconnects_total") > before.value("kvbus_bus_disconnects_total")
    assert told.value("kvbus_outbox_dropped_total") == 0
