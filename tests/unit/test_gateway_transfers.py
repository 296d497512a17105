"""Transfers over HTTP, from the request to its end, against a destination whose words the test chooses."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvbus.broker import EmbeddedBroker
from kvbus.bus import NatsBus
from kvbus.bus_assets import EMBEDDED
from kvbus.events import TransferOutcome, TransferRequested
from kvbus.gateway.runs import refusal
from kvbus.ledger.admission import AdmissionGate
from kvbus.publisher import Publisher
from kvbus.testing.bus import MemoryBroker
from tests.unit.gateway_parts import Stage, prompt, stage
from tests.waiting import until

PUBLISHED = {"fired", "transferred", "failed", "deduped", "skipped_busy", "inflight", "seen", "max_inflight"}


@pytest.fixture
async def gateway() -> AsyncIterator[Stage]:
    async with stage() as running:
        yield running


def adds_up(stats: dict[str, int]) -> bool:
    return stats["fired"] == stats["transferred"] + stats["failed"] + stats["inflight"]


# H12, H13, H16, H29
async def test_a_transfer_over_a_real_broker_is_accepted_and_its_end_is_told_by_its_hash(tmp_path: Path) -> None:
    async with EmbeddedBroker.started(tmp_path / "broker") as broker:
        buses = [
            await NatsBus.connect(broker.url, name=f"n{number}", token=broker.token, limits=EMBEDDED)
            for number in range(3)
        ]
        await buses[0].ensure_assets()
        async with stage(iter(buses).__next__) as one:
            asked = await one.ask(prompt=prompt(), model="m", cache_salt="s", on_miss="partial", budget_s=7)
            assert asked.status_code == 202
            said = asked.json()
            assert (said["status"], said["deduped"], said["destination"]) == ("accepted", False, "b")
            told = await one.record(said["request_hash"])
            stats = await one.stats()
        for bus in buses:
            await bus.close()

    request = one.b.requests[0]
    assert (request.source, request.destination, request.model, request.salt) == ("a", "b", "m", "s")
    assert (request.on_miss, request.budget_s, request.prompt.text) == ("partial", 7.0, prompt())
    assert told["status"] == "transferred"
    assert told["pages"] == {"wanted": 3, "held": 1, "moved": 2}
    assert told["bytes"] == 128
    assert set(stats) == PUBLISHED
    assert (stats["fired"], stats["transferred"], stats["inflight"]) == (1, 1, 0)


# H1
async def test_the_checks_come_in_one_order(gateway: Stage) -> None:
    client, path = gateway.client, "/v1/kv_transfer"
    assert (await client.post(path, content=b"{")).status_code == 400
    assert (await client.post(path, json={"source": "evil"})).status_code == 400  # fields before the list
    assert (await client.post(path, json={"source": "evil", "prompt": "x", "destination": "?"})).status_code == 403
    gateway.b.settles = False
    for number in range(4):
        assert (await gateway.ask(prompt=prompt(f"{number}"))).json()["status"] == "accepted"
    assert (await gateway.ask(prompt=prompt("0"), source="evil")).status_code == 403  # the list before repeats
    assert (await gateway.ask(prompt=prompt("0"))).json()["status"] == "deduped"  # repeats before load
    assert (await gateway.ask(prompt=prompt("4"))).json()["status"] == "skipped_busy"


# H4
async def test_what_is_refused_touches_no_counter(gateway: Stage) -> None:
    before = await gateway.stats()
    bad: list[dict[str, object]] = [{"prompt": None}, {"prompt": 5}, {"source": "b"}, {"source": "http://h"}]
    for body in bad:
        assert (await gateway.ask(**{"prompt": "x", **body})).status_code in {400, 403}
    assert await gateway.stats() == before


# H4
@pytest.mark.parametrize("listed", ["", " , "])
async def test_without_a_list_every_source_is_refused(listed: str) -> None:
    async with stage(source_allow=listed) as one:
        answered = await one.ask(prompt=prompt())
        assert answered.status_code == 403
        assert "KV_TRANSFER_SOURCE_ALLOW" in answered.json()["error"]
        assert one.b.requests == []


# H2
async def test_an_empty_prompt_is_accepted_and_has_succeeded_from_the_start(gateway: Stage) -> None:
    empty: list[dict[str, object]] = [{"prompt": ""}, {"messages": []}]
    for body in empty:
        answered = await gateway.ask(**body)
        assert (answered.status_code, answered.json()["status"]) == (202, "accepted")
        assert (await gateway.record(answered.json()["request_hash"]))["status"] == "transferred"
    assert (await gateway.ask(prompt="")).json()["status"] == "deduped"
    stats = await gateway.stats()
    assert (stats["fired"], stats["transferred"], stats["inflight"]) == (2, 2, 0)
    assert gateway.b.requests == []


# H8
async def test_the_same_prompt_from_another_source_or_for_another_model_is_another_request() -> None:
    async with stage(names=("a", "b", "c"), source_allow="a,c") as one:
        for body in ({}, {"source": "c"}, {"model": "m"}, {"cache_salt": "s"}):
            assert (await one.ask(prompt=prompt(), **body)).json()["status"] == "accepted"
        assert len({request.request_hash for request in one.b.requests}) == 4


# H9, H20
async def test_a_repeat_joins_and_hears_of_the_failure_and_may_then_be_tried_again(gateway: Stage) -> None:
    gateway.b.settles = False
    first = (await gateway.ask(prompt=prompt())).json()
    second = (await gateway.ask(prompt=prompt())).json()
    assert (second["status"], second["deduped"]) == ("deduped", True)
    assert (second["request_hash"], second["transfer"]) == (first["request_hash"], first["transfer"])

    waiting = asyncio.ensure_future(gateway.record(second["request_hash"]))
    await gateway.b.end(await gateway.b.taken(), "failed")

    told = await waiting
    assert (told["status"], told["failure"], told["reason"]) == ("failed", "source_misses", "it is not there")
    assert told["repeats"] == 1
    gateway.b.settles = True
    assert (await gateway.ask(prompt=prompt())).json()["status"] == "accepted"
    assert (await gateway.record(second["request_hash"]))["status"] == "transferred"
    stats = await gateway.stats()
    assert (stats["fired"], stats["failed"], stats["transferred"], stats["deduped"]) == (2, 1, 1, 1)


# H10, H11
async def test_what_the_destination_skips_is_skipped_here_and_forgotten(gateway: Stage) -> None:
    gateway.b.word, gateway.b.reason = "skipped_busy", "4 transfers are running"
    answered = (await gateway.ask(prompt=prompt())).json()
    assert (answered["status"], answered["reason"]) == ("skipped_busy", "4 transfers are running")
    stats = await gateway.stats()
    assert (stats["skipped_busy"], stats["fired"], stats["seen"]) == (1, 0, 0)
    gateway.b.word = "accepted"
    assert (await gateway.ask(prompt=prompt())).json()["status"] == "accepted"


# H20
async def test_repeats_of_a_request_that_is_then_skipped_are_skipped_with_it() -> None:
    async with stage(present=False) as one:
        one.b.word = "skipped_busy"
        asking = [asyncio.ensure_future(one.ask(prompt=prompt())) for _ in range(3)]
        await until(lambda: len(one.parts.transfers.gate("b")) == 1)
        serving = asyncio.ensure_future(one.b.serve())
        answered = [(await each).json()["status"] for each in asking]
        serving.cancel()
        assert answered == ["skipped_busy"] * 3
        assert (await one.stats())["deduped"] == 0


# H23
async def test_a_refusal_of_the_destination_is_about_the_source_or_about_itself(gateway: Stage) -> None:
    gateway.b.word, gateway.b.reason = "refused", "source 'a' is not among those that 'b' allows (--allow a)"
    assert (await gateway.ask(prompt=prompt())).status_code == 403
    gateway.b.reason = "bus_unavailable: facts or releases wait for the broker"
    answered = await gateway.ask(prompt=prompt())
    assert (answered.status_code, answered.headers["retry-after"]) == (503, "1")
    stats = await gateway.stats()
    assert (stats["fired"], stats["seen"]) == (0, 0)


def test_what_a_destination_says_of_a_source_is_known_as_that() -> None:
    for allow, source in (((), "a"), (("c",), "a"), (("c",), "b")):
        gate = AdmissionGate(instance="b", source_allow=allow, inflight_max=1, dedup_ttl_s=1, entries_max=9)
        said = gate.repeat("h", request_id="r", source=source, now=0.0)
        assert said is not None
        assert refusal(said.reason, "b").status == 403


# H26
async def test_two_gateways_share_what_the_destination_knows() -> None:
    broker = MemoryBroker(clock=lambda: 0.0)
    async with stage(broker.connect) as one, stage(broker.connect, present=False) as two:
        one.b.word = "deduped"
        answered = (await two.ask(prompt=prompt())).json()
        assert answered["status"] == "deduped"
        told = await two.record(answered["request_hash"])
        assert told["status"] == "transferred"
        stats = await two.stats()
        assert (stats["deduped"], stats["fired"], stats["transferred"]) == (1, 0, 0)


# H19
async def test_a_lost_result_is_made_good_by_the_facts(gateway: Stage) -> None:
    gateway.b.settles = False
    answered = (await gateway.ask(prompt=prompt())).json()
    await gateway.b.end(await gateway.b.taken(), told="facts")
    assert (await gateway.record(answered["request_hash"]))["status"] == "transferred"
    assert adds_up(await gateway.stats())


# H21
async def test_the_outcome_of_an_earlier_transfer_ends_no_later_one_of_the_same_prompt(gateway: Stage) -> None:
    gateway.b.settles = False
    first_hash = (await gateway.ask(prompt=prompt())).json()["request_hash"]
    first = await gateway.b.taken()
    await gateway.b.end(first, "failed", told="requester")
    await gateway.record(first_hash)
    late = gateway.b.transfer(first)
    assert (await gateway.ask(prompt=prompt())).json()["status"] == "accepted"
    second = await gateway.b.taken(2)
    assert gateway.b.transfer(second) != late

    outcome = json.loads((await gateway.client.get(f"/v1/kv_transfer/{first_hash}")).text)
    assert outcome["status"] == "running"
    gateway.b.requests.pop()  # the next words are about the first transfer again
    await gateway.b.end(first, "failed")
    await gateway.b.step(first, "late")
    gateway.b.requests.append(second)
    await gateway.b.step(second, "moving")

    async def moving() -> bool:
        return (await gateway.record(first_hash, 0))["step"] == "moving"

    await until(moving)
    assert (await gateway.record(first_hash, 0))["status"] == "running"
    await gateway.b.end(second)
    assert (await gateway.record(first_hash))["status"] == "transferred"
    stats = await gateway.stats()
    assert (stats["fired"], stats["failed"], stats["transferred"]) == (2, 1, 1)


# H21
async def test_the_outcome_of_an_earlier_transfer_ends_no_request_that_is_still_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbus.gateway.runs.VERDICT_WAIT_S", 0.05)
    async with stage(present=False) as one:
        answered = (await one.ask(prompt=prompt())).json()
        stale = {"source": "a", "destination": "b", "outcome": "failed", "transfer": "T-1"}
        await one.b.report(TransferOutcome.model_validate({"request_hash": answered["request_hash"], **stale}))
        await one.b.report(TransferOutcome.model_validate({"request_hash": "0" * 32, **stale}))

        async def heard() -> bool:
            return (await one.client.get(f"/v1/kv_transfer/{'0' * 32}")).status_code == 200

        await until(heard)
        assert (await one.record(answered["request_hash"], 0))["status"] == "queued"
        serving = asyncio.ensure_future(one.b.serve())
        assert (await one.record(answered["request_hash"]))["status"] == "transferred"
        serving.cancel()


# H19, H21
@pytest.mark.parametrize("told", ["facts", "requester"])
async def test_a_request_that_a_stopping_destination_hands_back_goes_on_and_ends_as_its_next_run_does(
    gateway: Stage, told: str
) -> None:
    b = gateway.b
    b.settles = False
    request_hash = (await gateway.ask(prompt=prompt())).json()["request_hash"]
    first = await b.taken()
    await b.end(first, "cancelled", told="handed back")

    async def stands_as(status: str, transfer: str) -> bool:
        record = await gateway.record(request_hash, 0)
        assert adds_up(stats := await gateway.stats()), stats
        assert (stats["fired"], stats["inflight"]) == (1, 1)
        return (record["status"], record["transfer"]) == (status, transfer)

    await until(lambda: stands_as("queued", b.transfer(first)))
    assert (await gateway.ask(prompt=prompt())).json()["status"] == "deduped"
    b.requests.append(first)  # the queue offers it to the next run, which takes it on under another name
    second = b.transfer(first)
    await b.step(first, "accepted")
    await until(lambda: stands_as("running", second))
    await b.end(first, told=told)
    ended = await gateway.record(request_hash)
    assert (ended["status"], ended["transfer"], ended["repeats"]) == ("transferred", second, 1)
    stats = await gateway.stats()
    assert (stats["fired"], stats["transferred"], stats["failed"], stats["inflight"]) == (1, 1, 0, 0)


# H18, H19
async def test_a_request_that_is_handed_back_waits_anew_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.gateway.runs.SLACK_S", 0.0)
    monkeypatch.setattr("kvbus.gateway.runs.HANDED_BACK_WAIT_S", 0.5)
    async with stage() as one:
        one.b.settles = False
        request_hash = (await one.ask(prompt=prompt(), budget_s=1.0)).json()["request_hash"]
        first = await one.b.taken()
        await one.b.end(first, "cancelled", told="handed back")
        one.b.requests.append(first)
        await one.b.step(first, "accepted")
        told = await one.record(request_hash)
        assert (told["status"], told["transfer"]) == ("failed", one.b.transfer(first))
        assert adds_up(await one.stats())


# H22
async def test_a_dedup_time_of_zero_leaves_cap_and_budget_in_place() -> None:
    async with stage(dedup_ttl_s=0, inflight_max=2) as one:
        one.b.settles = False
        for number in range(2):
            await one.ask(prompt=prompt(f"{number}"), budget_s=11)
        assert (await one.ask(prompt=prompt("2"))).json()["status"] == "skipped_busy"
        assert [request.budget_s for request in one.b.requests] == [11.0, 11.0]
        await one.b.end(one.b.requests[0])
        await one.record(one.b.requests[0].request_hash)
        assert (await one.ask(prompt=prompt("0"))).json()["status"] == "accepted"


# H18, H19
async def test_an_outcome_that_never_comes_ends_the_request_and_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbus.gateway.runs.SLACK_S", 0.0)
    async with stage(inflight_max=1) as one:
        one.b.settles = False
        answered = (await one.ask(prompt=prompt(), budget_s=0.05)).json()
        told = await one.record(answered["request_hash"])
        assert (told["status"], told["reason"]) == ("failed", "no outcome came within 0.05 s")
        assert adds_up(await one.stats())
        assert (await one.ask(prompt=prompt())).json()["status"] == "accepted"


# H13
async def test_a_destination_that_is_away_finds_the_request_in_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.gateway.runs.VERDICT_WAIT_S", 0.05)
    async with stage(present=False) as one:
        answered = (await one.ask(prompt=prompt())).json()
        assert answered["status"] == "accepted"
        assert "not answered yet" in answered["reason"]
        assert (await one.record(answered["request_hash"], 0))["status"] == "queued"
        stats = await one.stats()
        assert (stats["fired"], stats["inflight"]) == (1, 1)
        serving = asyncio.ensure_future(one.b.serve())
        assert (await one.record(answered["request_hash"]))["status"] == "transferred"
        serving.cancel()


# H19
async def test_a_gateway_that_stops_has_counted_an_end_for_all_that_it_fired() -> None:
    async with stage() as one:
        one.b.settles = False
        for number in range(3):
            await one.ask(prompt=prompt(f"{number}"))
        transfers = one.parts.transfers
        await transfers.close()
        stats = transfers.statistics("b")
        assert (stats.fired, stats.failed, stats.inflight) == (3, 3, 0)


# H19
async def test_a_broken_outcome_breaks_no_counter(gateway: Stage) -> None:
    gateway.b.settles = False
    answered = (await gateway.ask(prompt=prompt())).json()
    request = await gateway.b.taken()
    for data in (b"", b"\xc1", b"\x90", b"\xc0", gateway.b.said(request)):
        await gateway.b.bus.publish(f"kv.result.{request.requester}", data)
    assert adds_up(await gateway.stats())
    await gateway.b.end(request)
    assert (await gateway.record(answered["request_hash"]))["status"] == "transferred"


# H19
async def test_the_counters_add_up_whenever_they_are_read(gateway: Stage) -> None:
    read: list[dict[str, int]] = []

    async def watch() -> None:
        while True:
            read.append(await gateway.stats())

    watching = asyncio.ensure_future(watch())
    words = ["accepted", "skipped_busy", "refused", "deduped"]
    for number in range(40):
        gateway.b.word, gateway.b.reason = words[number % 4], "source is not liked"
        await gateway.ask(prompt=prompt(f"{number // 2}"))
    watching.cancel()
    assert len(read) > 10
    assert all(map(adds_up, read))
    grown = [[one[name] for one in read] for name in ("fired", "transferred", "failed", "deduped", "skipped_busy")]
    assert all(column == sorted(column) for column in grown)


async def test_a_cancel_reaches_the_destination_and_its_outcome_ends_the_request(gateway: Stage) -> None:
    gateway.b.settles = False
    request_hash = (await gateway.ask(prompt=prompt())).json()["request_hash"]
    path = f"/v1/kv_transfer/{request_hash}"

    answered = await gateway.client.delete(path)

    assert (answered.status_code, answered.json()["status"]) == (202, "cancelling")
    assert gateway.b.cancelled == [request_hash]
    await gateway.b.end(await gateway.b.taken(), "cancelled")
    assert (await gateway.record(request_hash))["status"] == "cancelled"
    assert (await gateway.client.delete(path)).status_code == 409
    assert (await gateway.client.delete(f"/v1/kv_transfer/{'0' * 32}")).status_code == 404
    stats = await gateway.stats()
    assert (stats["failed"], stats["inflight"]) == (1, 0)


async def test_a_cancel_of_a_queued_request_is_repeated_once_it_is_taken_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbus.gateway.runs.VERDICT_WAIT_S", 0.05)
    async with stage(present=False) as one:
        one.b.settles = False
        request_hash = (await one.ask(prompt=prompt())).json()["request_hash"]
        assert (await one.client.delete(f"/v1/kv_transfer/{request_hash}")).status_code == 202
        serving = asyncio.ensure_future(one.b.serve())
        await until(lambda: one.b.cancelled == [request_hash])
        serving.cancel()


# H23
async def test_a_source_url_stands_for_the_instance_that_is_registered_under_it() -> None:
    urls = {"a": ("http://10.0.0.5:8000/",), "c": ("http://10.0.0.6:8000",), "d": ("http://10.0.0.6:8000/",)}
    allow = "http://10.0.0.5:8000,http://10.0.0.6:8000,http://10.0.0.7:8000"
    async with stage(names=("a", "b", "c", "d"), urls=urls, source_allow=allow) as one:
        answered = await one.ask(source="http://[::ffff:10.0.0.5]:8000", prompt=prompt())
        assert answered.json()["status"] == "accepted"
        assert one.b.requests[0].source == "a"
        assert (await one.ask(source="HTTP://10.0.0.5:8000/", prompt=prompt())).json()["status"] == "deduped"

        two = await one.ask(source="http://10.0.0.6:8000", prompt=prompt())
        assert (two.status_code, "several instances claim" in two.json()["error"]) == (403, True)
        none = await one.ask(source="http://10.0.0.7:8000", prompt=prompt())
        assert (none.status_code, "no registered instance" in none.json()["error"]) == (503, True)
        assert (await one.ask(source="a", prompt=prompt())).status_code == 403  # the list names URLs
        assert len(one.b.requests) == 1


# H23
async def test_nothing_that_a_source_names_is_ever_connected_to() -> None:
    came: list[object] = []

    async def take(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(writer.get_extra_info("peername"))
        writer.close()

    trap = await asyncio.start_server(take, "127.0.0.1", 0)
    port = trap.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    async with trap, stage(urls={"a": (url,)}, source_allow=url) as one:
        for source in (url, f"{url}/", f"http://u@127.0.0.1:{port}", f"http://localhost:{port}", f"{url}?x"):
            await one.ask(source=source, prompt=prompt())
        assert [request.source for request in one.b.requests] == ["a"]
        _, writer = await asyncio.open_connection("127.0.0.1", port)  # it would have been seen
        await until(lambda: came)
        writer.close()
        await writer.wait_closed()
    assert len(came) == 1


# H23
async def test_each_instance_has_a_base_url_at_the_gateway_that_names_it_as_a_source(gateway: Stage) -> None:
    answered = await gateway.ask(source=f"{gateway.url}/instances/a", prompt=prompt())
    assert answered.json()["status"] == "accepted"
    assert gateway.b.requests[0].source == "a"
    assert (await gateway.ask(source=f"{gateway.url}/instances/b", prompt=prompt())).status_code == 403


async def test_the_destination_is_the_only_one_or_it_is_named_in_path_or_body(gateway: Stage) -> None:
    client, body = gateway.client, {"source": "a", "prompt": prompt()}
    unclear = await client.post("/v1/kv_transfer", json=body)
    assert (unclear.status_code, unclear.json()["instances"]) == (400, ["a", "b"])
    path = "/instances/b/v1/kv_transfer"
    assert (await client.post(path, json=body)).json()["destination"] == "b"
    assert (await client.post(path, json={**body, "destination": "a"})).status_code == 400
    assert (await client.post("/instances/zz/v1/kv_transfer", json=body)).status_code == 404
    assert (await client.post("/v1/kv_transfer", json={**body, "destination": "a"})).status_code == 400  # own source
    async with stage(instances=("b",)) as alone:
        assert (await alone.client.post("/v1/kv_transfer", json=body)).json()["destination"] == "b"
        assert (await alone.client.post("/instances/a/v1/kv_transfer", json=body)).status_code == 404


async def test_an_instance_that_registers_later_is_served() -> None:
    async with stage(names=("a",)) as one:
        assert (await one.ask(prompt=prompt())).status_code == 404
        late = type(one.played["a"])("b", one.bus)
        await late.register()

        async def found() -> bool:
            return (await one.client.get("/instances/b/v1/kv_transfer/stats")).status_code == 200

        await until(found)


# H35
async def test_after_the_destination_started_again_the_same_prompt_is_brought_again(gateway: Stage) -> None:
    request_hash = (await gateway.ask(prompt=prompt())).json()["request_hash"]
    await gateway.record(request_hash)
    assert (await gateway.ask(prompt=prompt())).json()["status"] == "deduped"
    gateway.b.epoch += 1
    await gateway.b.register()
    await gateway.parts.directory.refresh()
    assert (await gateway.ask(prompt=prompt())).json()["status"] == "accepted"


async def test_one_hash_at_two_instances_has_to_be_told_apart() -> None:
    async with stage(names=("a", "b", "c")) as one:
        hashes = {(await one.ask(prompt=prompt(), destination=name)).json()["request_hash"] for name in ("b", "c")}
        (request_hash,) = hashes
        unclear = await one.client.get(f"/v1/kv_transfer/{request_hash}")
        assert (unclear.status_code, unclear.json()["instances"]) == (409, ["b", "c"])
        for name in ("b", "c"):
            told = await one.client.get(f"/instances/{name}/v1/kv_transfer/{request_hash}")
            assert told.json()["destination"] == name
        both = (await one.client.get("/v1/kv_transfer/stats")).json()
        assert (both["fired"], both["max_inflight"]) == (2, 12)


async def test_what_others_asked_for_can_be_looked_at_and_counts_nowhere(gateway: Stage) -> None:
    request = await foreign_request(gateway)
    await gateway.b.step(request, "accepted")

    async def seen() -> bool:
        return (await gateway.client.get(f"/v1/kv_transfer/{request.request_hash}")).status_code == 200

    await until(seen)
    await gateway.b.end(request, told="facts")
    told = await gateway.record(request.request_hash)
    assert (told["status"], told["source"]) == ("transferred", "a")
    assert (await gateway.stats())["fired"] == 0
    assert (await gateway.ask(prompt=prompt("elsewhere"))).json()["status"] == "accepted"


async def foreign_request(gateway: Stage) -> TransferRequested:
    gateway.b.settles = False
    async with Publisher(bus=gateway.b.bus) as publisher:
        await publisher.transfer(source="a", destination="b", prompt=prompt("elsewhere"))
        request = await gateway.b.taken()
    gateway.b.settles = True
    return request
